"""What another policy would have achieved, from logged trajectories alone; plain NumPy in float64, no JAX.

A trajectory is a sequence of *decisions* (a turn's choice of tool and arguments, or of the answer). Decision t has a
ratio `p_t = pi(a_t | s_t) / b(a_t | s_t)` of the target policy `pi` to the behaviour policy `b` that was logged, and a
reward `r_t`, which may be any quantity that adds up over the trajectory: its outcome (at the last decision), its
dollars, its seconds. With the cumulative ratio `w_t = p_0 ... p_t` (kept at its last value after a trajectory's end,
where rewards are 0), over N trajectories:

* "is", per-trajectory importance sampling: `mean(w_T sum_t r_t)` (Precup, Sutton and Singh 2000);
* "pdis", per decision: `mean(sum_t w_t r_t)` (the same paper);
* "wis" and "pdwis", self-normalised: `sum(w_T sum_t r_t) / sum(w_T)` and `sum_t sum(w_t r_t) / sum(w_t)`: biased by
  O(1/N), of far smaller variance, and never outside the range of what was logged per decision;
* "dr", doubly robust: `mean(v_0 + sum_t w_t (r_t + v_{t+1} - q_t))` with any guess q of the value of the logged
  decision and v of the state (Jiang and Li 2016, eq. 10 unrolled): unbiased however wrong the guess, if it was not
  fitted on the same trajectory (`fit_values` cross-fits);
* "wdr", the same with self-normalised weights (Thomas and Brunskill 2016, eq. 5).

Intervals resample tasks, not trajectories: those of one task are not independent (`clusters`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ESTIMATORS = ("is", "pdis", "wis", "pdwis", "dr", "wdr")
DEFAULT_ESTIMATOR = "wdr"
MIN_ESS = 10.0
MIN_ESS_SHARE = 0.05
"""Effective samples below which nothing is concluded: fewer than `MIN_ESS`, or than this share of the trajectories."""

_MAX_CELLS_AT_ONCE = 1 << 22  # bounds the memory of the resampling


@dataclass(frozen=True)
class Logged:
    """N trajectories of at most T decisions; short ones are padded."""

    log_ratios: FloatArray
    """[N, T] `log pi - log b` of each decision; -inf where the target never does this. Not read at padding."""
    mask: NDArray[np.bool_]
    """[N, T] True at decisions: the first ones of each row."""
    clusters: IntArray
    """[N] number of the task of each trajectory."""

    @property
    def cumulative(self) -> FloatArray:
        """[N, T] ratios of the decisions up to each one; at padding that of the last."""
        return np.exp(np.cumsum(np.where(self.mask, self.log_ratios, 0.0), axis=1))


@dataclass(frozen=True)
class Estimate:
    """One number with its interval."""

    value: float
    low: float
    high: float


def logged(log_ratios: ArrayLike, mask: ArrayLike, clusters: Sequence[Any] | None = None) -> Logged:
    """Checks and brings into form what `Logged` holds.

    Args:
      log_ratios: [N, T].
      mask: [N, T].
      clusters: N names of tasks; None: every trajectory is a task of its own.

    Raises:
      ValueError: shapes differ, a trajectory is empty or has a gap, a ratio is NaN or infinite (the behaviour cannot
        have had probability 0 for what it did: the logged probabilities are wrong).
    """
    ratio = np.asarray(log_ratios, np.float64)
    live = np.asarray(mask, bool)
    if ratio.ndim != 2 or ratio.shape != live.shape or not len(ratio):
        raise ValueError(f"log_ratios and mask must both be [N, T] with N > 0, got {ratio.shape} and {live.shape}")
    if not live[:, 0].all() or (live[:, 1:] > live[:, :-1]).any():
        raise ValueError("mask: each trajectory must have at least one decision, and they must stand first in its row")
    if np.isnan(ratio[live]).any() or np.isposinf(ratio[live]).any():
        row = int(np.argmax((live & (np.isnan(ratio) | np.isposinf(ratio))).any(axis=1)))
        raise ValueError(f"log_ratios of trajectory {row}: NaN or infinite, so its logged probability is missing or 0")
    names = range(len(ratio)) if clusters is None else clusters
    if len(names) != len(ratio):
        raise ValueError(f"clusters has {len(names)} entries for {len(ratio)} trajectories")
    numbers: dict[Any, int] = {}
    ids = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    return Logged(ratio, live, ids)


def effective_sample_size(weights: ArrayLike) -> float:
    """Kish's `(sum w)^2 / sum w^2`: as many equally weighted samples are worth as much; 0 for no weight at all."""
    w = np.asarray(weights, np.float64)
    top = w.max(initial=0.0)
    if top == 0.0:
        return 0.0
    w = w / top  # squares of very large weights would overflow
    return float(w.sum() ** 2 / np.square(w).sum())


def estimate_value(
    data: Logged, rewards: ArrayLike, kind: str, *, q: ArrayLike | None = None, v: ArrayLike | None = None
) -> float:
    """The value of the target policy: the mean of `sum_t rewards` that it would have.

    Args:
      data: ratios.
      rewards: [N, T], not read at padding.
      kind: one of `ESTIMATORS`.
      q, v: [N, T] for "dr" and "wdr": guesses of the value of the logged decisions, and of the states they were made
        in, from there to the end.

    Raises:
      ValueError: unknown kind, wrong shapes, "dr" without q and v.
    """
    terms = _terms(data, rewards, kind, q, v)
    return float(terms.values(np.ones((1, len(data.mask))))[0])


def estimate_interval(
    data: Logged,
    rewards: ArrayLike,
    kind: str,
    *,
    q: ArrayLike | None = None,
    v: ArrayLike | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
) -> Estimate:
    """`estimate_value` with a bootstrap interval over tasks.

    The interval is the studentised bootstrap's (Davison and Hinkley 1997, section 5.2.1; standard errors of every
    resample by linearisation): weights are skewed, and the percentile interval is then too short above. With a single
    task nothing can be resampled, and the interval is unbounded.

    Args:
      data, rewards, kind, q, v: as for `estimate_value`.
      num_resamples: bootstrap samples.
      seed: the same seed gives the same interval.
      level: coverage, in (0, 1).
      bounds: of the quantity (0 and 1 for an accuracy), which cut the interval.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    terms = _terms(data, rewards, kind, q, v)
    value, low, high = _studentised(terms, data.clusters, num_resamples, seed, level)
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
        low, high = min(low, bounds[1]), max(high, bounds[0])
    return Estimate(value, low, high)


def difference_interval(
    data: Logged,
    rewards: ArrayLike,
    kind: str,
    *,
    q: ArrayLike | None = None,
    v: ArrayLike | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Target less behaviour: `estimate_value` minus the mean that was logged, on the same resampled tasks."""
    terms = _terms(data, rewards, kind, q, v)
    logged_sums = np.where(data.mask, np.asarray(rewards, np.float64), 0.0).sum(axis=1)
    terms = _Terms(terms.top, terms.bottom, terms.plain - logged_sums)
    return Estimate(*_studentised(terms, data.clusters, num_resamples, seed, level))


# ----------------------------------------------------------------------------------------------------------
# the fitted value
# ----------------------------------------------------------------------------------------------------------


def fit_values(
    features: ArrayLike,
    rewards: ArrayLike,
    data: Logged,
    *,
    decisions: ArrayLike | None = None,
    target_probs: ArrayLike | None = None,
    num_folds: int = 5,
    ridge: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Values of decisions and states under the target policy, by fitted Q evaluation with ridge regression.

    `q(s, a) = f(s) . (shared + own[a])` is fitted to `r + sum_a' pi(a' | s') q(s', a')`, as many times over as a
    trajectory has decisions (Le, Voloshin and Yue 2019, algorithm 3). Each trajectory's values come from a fit on the
    tasks of the other folds (cross-fitting, Chernozhukov et al. 2018), so that "dr" stays unbiased.

    Args:
      features: [N, T, F] of the states; a constant is added.
      rewards: [N, T].
      data: ratios, mask and clusters.
      decisions: int [N, T], which of A kinds of decision was taken. None: q does not know the decision, and v = q,
        which is still a valid control variate, as ratios have mean 1.
      target_probs: [N, T, A], the target's probability of each kind of decision; needed with `decisions`.
      num_folds: at most the number of tasks.
      ridge: penalty of the coefficients, for features of unit size.

    Returns:
      (q, v), each [N, T], 0 at padding.

    Raises:
      ValueError: shapes do not fit, or there are fewer than two tasks.
    """
    live = data.mask
    x = np.asarray(features, np.float64)
    reward = np.where(live, _shaped("rewards", rewards, live.shape), 0.0)
    if x.ndim != 3 or x.shape[:2] != live.shape:
        raise ValueError(f"features must be [N, T, F] with N, T = {live.shape}, got {x.shape}")
    if (decisions is None) != (target_probs is None):
        raise ValueError("give both decisions and target_probs, or neither")
    kinds = np.zeros(live.shape, np.int64) if decisions is None else np.asarray(decisions, np.int64)
    probs = np.ones((*live.shape, 1)) if target_probs is None else np.asarray(target_probs, np.float64)
    if kinds.shape != live.shape or probs.shape[:2] != live.shape or probs.ndim != 3:
        raise ValueError(f"decisions and target_probs must be [N, T] and [N, T, A], got {kinds.shape}, {probs.shape}")
    num_tasks = int(data.clusters.max()) + 1
    folds = min(num_folds, num_tasks)
    if folds < 2:
        raise ValueError("fit_values needs at least two tasks, to fit on others than those it values")
    x = np.concatenate([np.ones((*live.shape, 1)), x], axis=2)
    x = np.where(live[..., None], x, 0.0)
    q, v = np.zeros(live.shape), np.zeros(live.shape)
    for fold in range(folds):
        out = data.clusters % folds == fold
        model = _fit_q(x[~out], reward[~out], live[~out], kinds[~out], probs[~out], ridge)
        all_q = x[out] @ model.T
        q[out] = np.take_along_axis(all_q, kinds[out][..., None], axis=2)[..., 0]
        v[out] = (probs[out] * all_q).sum(axis=2)
    return np.where(live, q, 0.0), np.where(live, v, 0.0)


def _fit_q(
    x: FloatArray, reward: FloatArray, live: NDArray[np.bool_], kinds: IntArray, probs: FloatArray, ridge: float
) -> FloatArray:
    """Coefficients [A, F] of q; those of a kind of decision that is rare shrink towards the shared ones."""
    num_kinds, width = probs.shape[2], x.shape[2]
    rows, row_kinds = x[live], kinds[live]
    design = np.zeros((len(rows), num_kinds + 1, width))
    design[:, num_kinds] = rows
    design[np.arange(len(rows)), row_kinds] = rows
    flat = design.reshape(len(rows), -1)
    penalty = np.full(flat.shape[1], ridge)
    penalty[num_kinds * width] = 1e-6  # the shared constant: a mean is not shrunk
    solve = np.linalg.solve(flat.T @ flat + np.diag(penalty), flat.T)
    following = np.zeros(live.shape)
    model = np.zeros((num_kinds, width))
    for _ in range(live.shape[1]):
        coefficients = (solve @ (reward + following)[live]).reshape(num_kinds + 1, width)
        model = coefficients[:num_kinds] + coefficients[num_kinds]
        values = (probs * (x @ model.T)).sum(axis=2)
        following[:, :-1] = np.where(live[:, 1:], values[:, 1:], 0.0)
    return model


# ----------------------------------------------------------------------------------------------------------
# a report
# ----------------------------------------------------------------------------------------------------------


def compare(
    data: Logged,
    rewards: Mapping[str, ArrayLike],
    *,
    values: Mapping[str, tuple[ArrayLike, ArrayLike]],
    bounds: Mapping[str, tuple[float, float]] | None = None,
    kinds: Sequence[str] = ESTIMATORS,
    decide_by: str = DEFAULT_ESTIMATOR,
    min_ess: float = MIN_ESS,
    min_ess_share: float = MIN_ESS_SHARE,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Target against behaviour in each quantity, as plain JSON values.

    Args:
      data: ratios.
      rewards: [N, T] by the name of the quantity.
      values: (q, v) of each quantity, from `fit_values`.
      bounds: of quantities that have some.
      kinds: estimators to report.
      decide_by: the estimator that the verdicts come from.
      min_ess, min_ess_share: fewer effective samples, and nothing is concluded.
      num_resamples, seed: of the bootstrap.

    Returns:
      "num_trajectories", "num_tasks", "ess", "ess_share", "largest_weight_share", "refused" (why nothing is concluded,
      or None), and under "quantities" for each name "behavior" (mean and interval of the log), "estimates" by
      estimator, "difference" and "verdict": "higher", "lower", "undecided" or "refused". Where it refuses, estimates
      and differences are None: a number would be read.
    """
    weights = data.cumulative[:, -1]
    ess, num = effective_sample_size(weights), len(weights)
    report: dict[str, Any] = {
        "num_trajectories": num,
        "num_tasks": int(data.clusters.max()) + 1,
        "ess": ess,
        "ess_share": ess / num,
        "largest_weight_share": float(weights.max() / weights.sum()) if weights.sum() > 0 else None,
        "mean_weight": float(weights.mean()),
        "decided_by": decide_by,
        "refused": _refusal(ess, num, min_ess, min_ess_share),
        "quantities": {},
    }
    same = logged(np.zeros_like(data.log_ratios), data.mask, data.clusters.tolist())
    for name, reward in rewards.items():
        limit = (bounds or {}).get(name)
        options: dict[str, Any] = {"num_resamples": num_resamples, "seed": seed}
        entry: dict[str, Any] = {
            "behavior": _plain(estimate_interval(same, reward, "is", bounds=limit, **options)),
            "estimates": dict.fromkeys(kinds),
            "difference": None,
            "verdict": "refused",
        }
        if not report["refused"]:
            q, v = values[name]
            for kind in kinds:
                found = estimate_interval(data, reward, kind, q=q, v=v, bounds=limit, **options)
                entry["estimates"][kind] = _plain(found)
            difference = difference_interval(data, reward, decide_by, q=q, v=v, **options)
            entry["difference"] = _plain(difference)
            entry["verdict"] = "higher" if difference.low > 0 else "lower" if difference.high < 0 else "undecided"
        report["quantities"][name] = entry
    return report


def _refusal(ess: float, num: int, min_ess: float, min_share: float) -> str | None:
    if ess >= max(min_ess, min_share * num):
        return None
    if ess == 0.0:
        return "the target policy never does what was logged: no trajectory has any weight"
    return (
        f"the effective sample is {ess:.1f} of {num} trajectories, less than {max(min_ess, min_share * num):.1f}: the "
        "target policy differs too much from the logged one, or the log is too small"
    )


def _plain(found: Estimate) -> dict[str, Any]:
    ends = [end if np.isfinite(end) else None for end in (found.low, found.high)]
    return {"value": found.value, "ci95": ends}


# ----------------------------------------------------------------------------------------------------------
# estimators as sums, and their bootstrap
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Terms:
    """An estimate is `sum_k (sum_n c_n top_nk) / (sum_n c_n bottom_nk) + mean_n(c_n plain_n)`.

    c_n says how often trajectory n was drawn.
    """

    top: FloatArray  # [N, K]
    bottom: FloatArray  # [N, K]
    plain: FloatArray  # [N]

    def values(self, counts: FloatArray) -> FloatArray:
        """Estimates [B] for counts [B, N]."""
        return self._parts(counts)[0]

    def _parts(self, counts: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        total = counts.sum(axis=1)
        bottom = counts @ self.bottom
        # Where no weight is left nothing is known; 0 / 0 would be NaN, and a resample may have no weight.
        ratios = np.divide(counts @ self.top, bottom, out=np.zeros_like(bottom), where=bottom > 0)
        plain = counts @ self.plain / total
        return ratios.sum(axis=1) + plain, ratios, bottom, plain, total

    def values_and_errors(self, counts: FloatArray, clusters: IntArray) -> tuple[FloatArray, FloatArray]:
        """Estimates [B] and their standard errors [B], by linearisation, over clusters drawn whole.

        The influence of trajectory n is `sum_k (top_nk - ratio_k bottom_nk) / bottom_k + (plain_n - plain) / total`.
        """
        value, ratios, bottom, plain, total = self._parts(counts)
        inverse = np.divide(1.0, bottom, out=np.zeros_like(bottom), where=bottom > 0)
        influence = inverse @ self.top.T - (ratios * inverse) @ self.bottom.T
        influence += (self.plain[None] - plain[:, None]) / total[:, None]
        num_clusters = int(clusters.max()) + 1
        first = np.unique(clusters, return_index=True)[1]
        by_cluster = np.zeros((len(counts), num_clusters))
        np.add.at(by_cluster.T, clusters, influence.T)
        # Each time a cluster was drawn is a draw of its own.
        variance = (counts[:, first] * np.square(by_cluster)).sum(axis=1)
        return value, np.sqrt(variance * num_clusters / max(1, num_clusters - 1))


def _terms(data: Logged, rewards: ArrayLike, kind: str, q: ArrayLike | None, v: ArrayLike | None) -> _Terms:
    live = data.mask
    reward = np.where(live, _shaped("rewards", rewards, live.shape), 0.0)
    if not np.isfinite(reward).all():
        raise ValueError("rewards must be finite at every decision")
    w = data.cumulative
    num = len(w)
    none, nothing = np.zeros(num), np.zeros((num, 1))
    if kind == "is":
        return _Terms(nothing, nothing, w[:, -1] * reward.sum(axis=1))
    if kind == "pdis":
        return _Terms(nothing, nothing, (w * reward).sum(axis=1))
    if kind == "wis":
        return _Terms((w[:, -1] * reward.sum(axis=1))[:, None], w[:, -1:], none)
    if kind == "pdwis":
        return _Terms(w * reward, w, none)
    if kind not in ("dr", "wdr"):
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {kind!r}")
    if q is None or v is None:
        raise ValueError(f"{kind!r} needs q and v: see fit_values")
    of_decision = np.where(live, _shaped("q", q, live.shape), 0.0)
    of_state = np.where(live, _shaped("v", v, live.shape), 0.0)
    surprise = reward - of_decision
    surprise[:, :-1] += of_state[:, 1:]
    if kind == "dr":
        return _Terms(nothing, nothing, of_state[:, 0] + (w * surprise).sum(axis=1))
    return _Terms(w * surprise, w, of_state[:, 0])


def _studentised(
    terms: _Terms, clusters: IntArray, num_resamples: int, seed: int, level: float
) -> tuple[float, float, float]:
    """(value, low, high) by the bootstrap of (resampled value - value) / resampled standard error."""
    num_clusters = int(clusters.max()) + 1
    values, errors = terms.values_and_errors(np.ones((1, len(clusters))), clusters)
    value, error = float(values[0]), float(errors[0])
    if num_clusters < 2:
        return value, -np.inf, np.inf
    if error == 0.0:
        return value, value, value
    scores = np.empty(num_resamples)
    done = 0
    for counts in _cluster_counts(num_clusters, num_resamples, seed, len(clusters)):
        drawn, spread = terms.values_and_errors(counts[:, clusters], clusters)
        # A resample without spread (all weight on one task) says nothing about the tails but that they are long.
        score = np.divide(drawn - value, spread, out=np.full(len(drawn), np.nan), where=spread > 0)
        scores[done : done + len(drawn)] = score
        done += len(drawn)
    scores = scores[np.isfinite(scores)]
    tail = (1 - level) / 2
    normal = NormalDist().inv_cdf(1 - tail)
    if len(scores) < num_resamples / 2:
        return value, -np.inf, np.inf
    lower, upper = np.quantile(scores, [tail, 1 - tail])
    # Never shorter than the normal interval: that would be the noise of the resampling.
    return value, value - max(upper, normal) * error, value - min(lower, -normal) * error


def _cluster_counts(num_clusters: int, num_resamples: int, seed: int, num_rows: int) -> Iterator[FloatArray]:
    """How often each cluster is drawn, [chunk, C], `num_resamples` rows in all."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _MAX_CELLS_AT_ONCE // max(num_clusters, num_rows))
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        yield rng.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), size=size).astype(np.float64)


def _shaped(name: str, values: ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    array = np.asarray(values, np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array
