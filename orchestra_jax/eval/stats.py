"""Intervals and paired differences for evaluations: plain NumPy in float64, no JAX.

Episodes of one task are not independent (they share the question, the tools and the prices), so everything
here resamples *tasks*: ``clusters`` names the task of each episode, and a task is drawn with all its episodes or
not at all (the cluster bootstrap; Davison and Hinkley, "Bootstrap Methods and their Application", 1997, 3.8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]

_ESTIMATES = ("accuracy", "cost_usd", "latency_s", "preference", "cost_per_solved_usd")

_MAX_INDICES_AT_ONCE = 1 << 22  # bounds the memory of the resampling: 4M indices of 8 bytes


NUM_PERMUTATIONS = 10_000
"""Sign flips drawn by :func:`permutation_p` where there are more of them than that."""


@dataclass(frozen=True)
class PairedDifference:
    """Mean of ``a - b`` over shared tasks, with its interval."""

    difference: float
    low: float
    high: float
    num_tasks: int

    @property
    def significant(self) -> bool:
        """True where the interval leaves out 0."""
        return self.low > 0.0 or self.high < 0.0


def bootstrap_ci(
    values: ArrayLike,
    clusters: Sequence[Any] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of the mean of ``values``.

    Args:
        values: one number per episode, [N].
        clusters: the task of each episode, [N]; tasks are resampled, not episodes. ``None``: every episode is
            a task of its own.
        num_resamples: number of bootstrap samples.
        seed: the same seed gives the same interval.
        level: coverage, in (0, 1).

    Returns:
        ``(low, high)``. With a single task nothing can be resampled and both ends are the mean.

    Raises:
        ValueError: empty, non-finite or not one-dimensional values, lengths that differ, a bad level.
    """
    x = _checked_values("values", values)
    return _bootstrap_ratio(x, np.ones_like(x), clusters, num_resamples, seed, level)


def wilson_interval(num_successes: float, num_trials: float, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927; Brown, Cai and DasGupta 2001).

    Unlike the bootstrap it does not shrink to a point when all, or none, of the trials succeed. The counts may
    be fractional, so that an effective sample size can be given.

    Raises:
        ValueError: no trials, successes outside [0, num_trials], a bad level.
    """
    _check_level(level)
    if not (math.isfinite(num_trials) and num_trials > 0):
        raise ValueError(f"num_trials must be positive, got {num_trials}")
    if not 0 <= num_successes <= num_trials:
        raise ValueError(f"num_successes must be between 0 and num_trials={num_trials}, got {num_successes}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = num_successes / num_trials
    shrink = 1 + z * z / num_trials
    centre = (share + z * z / (2 * num_trials)) / shrink
    half_width = z * math.sqrt(share * (1 - share) / num_trials + (z / (2 * num_trials)) ** 2) / shrink
    # The ends are 0 and 1 exactly when none or all succeed; rounding must not say otherwise.
    low = 0.0 if num_successes == 0 else max(0.0, centre - half_width)
    high = 1.0 if num_successes == num_trials else min(1.0, centre + half_width)
    return low, high


def accuracy_interval(
    outcomes: ArrayLike,
    clusters: Sequence[Any] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Interval of a mean outcome in [0, 1].

    Right-or-wrong outcomes get Wilson's interval at the effective number of episodes: N divided by the design
    effect of the tasks (Kish 1965), N itself where every task has one episode, and the number of tasks where
    all outcomes agree and nothing can be estimated. Graded outcomes get the bootstrap over tasks.

    Args:
        outcomes: outcome per episode, in [0, 1], [N].
        clusters: the task of each episode, [N], or ``None``.

    Raises:
        ValueError: as :func:`bootstrap_ci`; an outcome outside [0, 1].
    """
    x = _checked_values("outcomes", outcomes)
    if x.min() < 0 or x.max() > 1:
        raise ValueError(f"outcomes must lie in [0, 1], got {x.min():g} to {x.max():g}")
    if not np.isin(x, (0.0, 1.0)).all():
        return bootstrap_ci(x, clusters, num_resamples, seed, level)
    effective = _effective_num_episodes(x, clusters)
    return wilson_interval(float(x.mean()) * effective, effective, level)


def paired_difference(
    values_a: ArrayLike,
    values_b: ArrayLike,
    clusters: Sequence[Any] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> PairedDifference:
    """Mean of ``values_a - values_b`` where both policies met the same tasks, with a bootstrap interval.

    Pairing takes the difficulty of the tasks out of the comparison, so that the interval is narrower than
    the two separate intervals suggest.

    Args:
        values_a: one number per episode, [N].
        values_b: the other policy on the same task (and replica), [N].
        clusters: the task of each pair, [N], or ``None`` where every pair is a task of its own.

    Raises:
        ValueError: as :func:`bootstrap_ci`; lengths that differ.
    """
    a, b = _checked_values("values_a", values_a), _checked_values("values_b", values_b)
    if len(a) != len(b):
        raise ValueError(f"values_a has {len(a)} episodes and values_b {len(b)}: pairs are needed, task by task")
    low, high = bootstrap_ci(a - b, clusters, num_resamples, seed, level)
    num_tasks = len(a) if clusters is None else len(set(clusters))
    return PairedDifference(float((a - b).mean()), low, high, num_tasks)


def permutation_p(
    differences: ArrayLike,
    clusters: Sequence[Any] | None = None,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
) -> float:
    """Two-sided p-value of the paired permutation test that neither policy does better (Fisher 1935).

    If it makes no difference which policy met a task, the sign of the task's difference is a coin toss. The statistic
    is the absolute sum of the differences; all sign flips are counted where there are no more than `num_permutations`,
    else so many are drawn, and the observed one counts as one of them (Phipson and Smyth 2010).

    Args:
        differences: ``a - b``, one per pair of episodes, [N].
        clusters: the task of each pair, [N]: a task's pairs flip together. ``None``: every pair is a task.

    Raises:
        ValueError: as :func:`bootstrap_ci`; fewer than one permutation.
    """
    x = _checked_values("differences", differences)
    if num_permutations < 1:
        raise ValueError(f"num_permutations must be at least 1, got {num_permutations}")
    index, num_clusters = _cluster_index(clusters, len(x))
    totals = np.bincount(index, weights=x, minlength=num_clusters)
    totals = totals[totals != 0.0]  # flipping nothing changes nothing
    if not totals.size:
        return 1.0
    # Sums of the same numbers in another order must not count as smaller.
    least = abs(float(totals.sum())) * (1 - 1e-9) - 1e-15
    if totals.size < 63 and 2**totals.size <= num_permutations:
        bits = (np.arange(2**totals.size)[:, None] >> np.arange(totals.size)) & 1
        return float((np.abs((1 - 2.0 * bits) @ totals) >= least).mean())
    rng = np.random.default_rng(seed)
    chunk = max(1, _MAX_INDICES_AT_ONCE // totals.size)
    extreme = 0
    for start in range(0, num_permutations, chunk):
        signs = 1 - 2.0 * rng.integers(0, 2, (min(chunk, num_permutations - start), totals.size), dtype=np.int8)
        extreme += int((np.abs(signs @ totals) >= least).sum())
    return (1 + extreme) / (1 + num_permutations)


def mcnemar_p(num_only_a: int, num_only_b: int) -> float:
    """Two-sided p-value of McNemar's exact test: of the tasks that one policy alone solved, is each half theirs?

    Args:
        num_only_a, num_only_b: tasks that a solved and b did not, and the other way round.

    Raises:
        ValueError: a negative number.
    """
    if num_only_a < 0 or num_only_b < 0:
        raise ValueError(f"numbers of tasks must not be negative, got {num_only_a} and {num_only_b}")
    total, fewer = num_only_a + num_only_b, min(num_only_a, num_only_b)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for how many there are, by Holm's step-down method (1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = largest
    return adjusted


def pass_hat_k(num_trials: int, num_successes: int, k: int) -> float:
    """Chance that k trials of a task, drawn from its n without replacement, all succeed: C(c, k) / C(n, k).

    Averaged over tasks it is pass^k of tau-bench (Yao et al. 2024, arXiv 2406.12045); pass^1 is the mean accuracy.

    Raises:
        ValueError: unless 1 <= k <= num_trials and 0 <= num_successes <= num_trials.
    """
    if not 1 <= k <= num_trials or not 0 <= num_successes <= num_trials:
        raise ValueError(f"expected 1 <= k <= n and 0 <= c <= n, got k={k}, n={num_trials}, c={num_successes}")
    return math.comb(num_successes, k) / math.comb(num_trials, k)


def summarize(
    records: Sequence[Mapping[str, Any]], *, num_resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> dict[str, Any]:
    """The entry of one policy in ``summary.json``.

    Args:
        records: one mapping per episode with ``task_id``, ``outcome`` (in [0, 1]), ``cost_usd`` and
            ``latency_s``; also, where there, ``preference`` (the preference score), ``tool_counts`` and
            ``end_reason``. Episodes that ended by ``"infra_error"`` say nothing about the policy: they are left
            out of every mean, and counted. Any other failure of the policy counts as it scored.

    Returns:
        ``accuracy``, ``cost_usd`` and ``latency_s`` (means per episode), ``preference`` (mean, or ``None``
        where no record has one), ``cost_per_solved_usd`` (total cost over total outcome; ``None`` where nothing
        was solved), ``tools`` (mean calls per episode), ``tool_shares`` (of all calls), ``end_reasons`` (episodes by
        their end), ``num_episodes``, ``num_tasks``, ``num_infra_errors``, ``warning`` (what to know before trusting
        the numbers, or ``None``), and ``ci95`` with ``[low, high]`` for the first five (``high`` of the cost per
        solved task is ``None`` where resamples without any solved task reach into the upper tail).

        Where tasks were tried repeatedly, also ``pass_hat_k``: pass^1, pass^2, ... up to the most trials of a task,
        each over the tasks that have so many, an outcome above 0.5 being a success; intervals in ``ci95``. Where
        records have ``policy_cost_usd`` and ``policy_latency_s`` (an endpoint's own share of cost and latency), their
        means.

        What fails often fails by kind: wrong answers go to a judge, right ones do not. So where more than half of
        the episodes were left out, whatever hangs on the outcome is ``None``; where all were, every number is.

    Raises:
        ValueError: no record, a missing field, a number that is not finite; names record and field.
    """
    if not records:
        raise ValueError("no episode to summarize: there are no records")
    used = [r for r in records if r.get("end_reason") != "infra_error"]
    counts = {
        "num_episodes": len(used),
        "num_tasks": len({_field(r, "task_id", i) for i, r in enumerate(used)}),
        "num_infra_errors": len(records) - len(used),
        "warning": _dropped_warning(len(used), len(records)),
    }
    if not used:
        nothing: dict[str, Any] = {"tools": {}, "tool_shares": {}, "end_reasons": {}}
        return {**dict.fromkeys(_ESTIMATES), **nothing, **counts, "ci95": dict.fromkeys(_ESTIMATES)}
    tasks = [_field(r, "task_id", i) for i, r in enumerate(used)]
    outcome, cost, latency = (_column(used, name) for name in ("outcome", "cost_usd", "latency_s"))
    mean_ci = partial(bootstrap_ci, num_resamples=num_resamples, seed=seed, level=level)

    intervals: dict[str, list[float | None] | None] = {
        "accuracy": list(accuracy_interval(outcome, tasks, num_resamples, seed, level)),
        "cost_usd": list(mean_ci(cost, tasks)),
        "latency_s": list(mean_ci(latency, tasks)),
        "preference": None,
        "cost_per_solved_usd": None,
    }
    preference = None
    if scored := [r for r in used if r.get("preference") is not None]:
        scores = _column(scored, "preference")
        preference = float(scores.mean())
        intervals["preference"] = list(mean_ci(scores, [r["task_id"] for r in scored]))
    cost_per_solved = None
    if outcome.sum() > 0:
        cost_per_solved = float(cost.sum() / outcome.sum())
        low, high = _bootstrap_ratio(cost, outcome, tasks, num_resamples, seed, level)
        intervals["cost_per_solved_usd"] = [low, high if math.isfinite(high) else None]
    means = {
        "accuracy": float(outcome.mean()),
        "cost_usd": float(cost.mean()),
        "latency_s": float(latency.mean()),
        "preference": preference,
        "cost_per_solved_usd": cost_per_solved,
    }
    passes, pass_intervals = _passes(used, tasks, mean_ci)
    extra: dict[str, Any] = {"pass_hat_k": passes} if passes else {}
    if passes:
        intervals["pass_hat_k"] = pass_intervals  # type: ignore[assignment]
    if 2 * len(used) < len(records):
        hidden = dict.fromkeys(("accuracy", "preference", "cost_per_solved_usd", *extra))
        means, intervals, extra = {**means, **hidden}, {**intervals, **hidden}, {}
    for name in ("policy_cost_usd", "policy_latency_s"):
        if all(r.get(name) is not None for r in used):
            extra[name] = float(_column(used, name).mean())
    tools = _mean_tool_calls(used)
    ends = Counter(str(r.get("end_reason") or "unknown") for r in used)
    shown = {"tools": tools, "tool_shares": _shares(tools), "end_reasons": dict(sorted(ends.items()))}
    return {**means, **extra, **shown, **counts, "ci95": intervals}


def _passes(
    records: Sequence[Mapping[str, Any]], tasks: Sequence[Any], mean_ci: Callable[[ArrayLike], Interval]
) -> tuple[list[float], list[list[float]]]:
    """pass^k for k = 1, 2, ... and their intervals; nothing where no task was tried twice."""
    trials: dict[Any, list[bool]] = {}
    for record, task in zip(records, tasks):
        # A task that was drawn twice is two tasks here: their trials differ in tools and prices.
        trials.setdefault((task, record.get("number")), []).append(float(record["outcome"]) > 0.5)
    most = max(map(len, trials.values()))
    if most < 2 or not any("trial" in record for record in records):
        return [], []
    per_k = [[pass_hat_k(len(t), sum(t), k) for t in trials.values() if len(t) >= k] for k in range(1, most + 1)]
    return [float(np.mean(values)) for values in per_k], [list(mean_ci(values)) for values in per_k]


def _shares(tools: Mapping[str, float]) -> dict[str, float]:
    total = sum(tools.values())
    return {tool: calls / total for tool, calls in tools.items()} if total else {}


def _dropped_warning(num_used: int, num_records: int) -> str | None:
    if num_used == num_records:
        return None
    number = f"counts {num_used}"
    if 2 * num_used < num_records:
        number = f"is not given, it would count only {num_used}" if num_used else "is not known, it would count none"
    return (
        f"accuracy {number} of {num_records} episodes: the others were dropped as infra_error, for the environment "
        "failed in them (its score, its judge or its user; the log says how)"
    )


def _bootstrap_ratio(
    numerator: NDArray[np.float64],
    denominator: NDArray[np.float64],
    clusters: Sequence[Any] | None,
    num_resamples: int,
    seed: int,
    level: float,
) -> Interval:
    """Percentile interval of sum(numerator) / sum(denominator) over resampled clusters; x/0 is infinite."""
    _check_level(level)
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}")
    index, num_clusters = _cluster_index(clusters, len(numerator))
    top = np.bincount(index, weights=numerator, minlength=num_clusters)
    bottom = np.bincount(index, weights=denominator, minlength=num_clusters)
    ratios = np.empty(num_resamples)
    done = 0
    for drawn in _resamples(num_clusters, num_resamples, seed):
        totals, counts = top[drawn].sum(axis=1), bottom[drawn].sum(axis=1)
        ratios[done : done + len(drawn)] = np.divide(totals, counts, out=np.full(len(drawn), np.inf), where=counts > 0)
        done += len(drawn)
    # Inverted empirical distribution: always a resampled value, so that infinities never meet in a 0 * inf.
    tail = (1 - level) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def _resamples(num_clusters: int, num_resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Cluster numbers drawn with replacement, [chunk, num_clusters] at a time."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _MAX_INDICES_AT_ONCE // num_clusters)
    for start in range(0, num_resamples, chunk):
        yield rng.integers(num_clusters, size=(min(chunk, num_resamples - start), num_clusters))


def _effective_num_episodes(outcomes: NDArray[np.float64], clusters: Sequence[Any] | None) -> float:
    """Number of independent episodes that would fix the mean of right-or-wrong ``outcomes`` [N] as well."""
    index, num_clusters = _cluster_index(clusters, len(outcomes))
    num_episodes = len(outcomes)
    if num_clusters == num_episodes:
        return float(num_episodes)
    share = float(outcomes.mean())
    if share in (0.0, 1.0) or num_clusters == 1:
        return float(num_clusters)
    # Linearised variance of a ratio over clusters: residual totals per cluster (Cochran 1977, section 11.12).
    residuals = np.bincount(index, weights=outcomes - share, minlength=num_clusters)
    variance = num_clusters / (num_clusters - 1) * float(residuals @ residuals) / num_episodes**2
    if variance == 0.0:
        return float(num_episodes)
    return min(float(num_episodes), share * (1 - share) / variance)


def _cluster_index(clusters: Sequence[Any] | None, num_values: int) -> tuple[NDArray[np.int64], int]:
    """Number of the cluster of each value, [N], in order of first appearance, and how many there are."""
    if clusters is None:
        return np.arange(num_values), num_values
    if len(clusters) != num_values:
        raise ValueError(f"clusters has {len(clusters)} entries for {num_values} values: one each is needed")
    numbers: dict[Any, int] = {}
    index = np.array([numbers.setdefault(name, len(numbers)) for name in clusters], dtype=np.int64)
    return index, len(numbers)


def _checked_values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"{name} must be a non-empty one-dimensional array, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"{name} must be finite; entry {int(np.argmin(np.isfinite(x)))} is not")
    return x


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1 (0.95 for a 95% interval), got {level}")


def _field(record: Mapping[str, Any], name: str, position: int) -> Any:
    if record.get(name) is None:
        raise ValueError(f"episode {position} has no {name!r}")
    return record[name]


def _column(records: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    column = np.array([_number(record, name, i) for i, record in enumerate(records)])
    return _checked_values(name, column)


def _number(record: Mapping[str, Any], name: str, position: int) -> float:
    value = _field(record, name, position)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"episode {position}: {name} must be a number, got {value!r}") from None


def _mean_tool_calls(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in records:
        for tool, count in (record.get("tool_counts") or {}).items():
            totals[tool] = totals.get(tool, 0.0) + count
    return {tool: totals[tool] / len(records) for tool in sorted(totals)}
