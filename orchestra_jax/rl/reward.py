"""Rewards of one group of trajectories: outcome, cost, latency and tool use, weighed by a preference.

The paper (ToolOrchestra, arXiv 2511.21689, Eq. 1-2) describes each trajectory by the vector
`M = [calls of each tool..., outcome, -cost_usd, -latency_s]`, scales every entry to [0, 1] by its smallest
and largest value in the group (0 where they are equal) and takes the dot product with the preference `P`; a
wrong answer earns 0. `variant="released"` is what the authors' code computes instead; it is here for
comparisons only.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Variant = Literal["paper", "released"]
Scale = Literal["group", "correct"]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NON_TOOL_KEYS = ("outcome", "cost", "latency")
"""Preference keys that are not tool names."""

CORRECT_ABOVE = 0.5
"""A trajectory is correct (solved) when its outcome, a number in [0, 1], is greater than this."""

GUARD_MARGIN = 0.5
"""What `guard=True` lifts the least rewarded correct trajectory to. Large enough that a single correct one
among 16 (sample standard deviation margin / sqrt(16)) is not lost to the homogeneity threshold of 0.1."""

EQUAL_WITHIN = 1e-9
"""Relative spread up to which values count as equal: sums of the same prices in another order differ by an
ulp, and min-max scaling would blow that up to a full point of reward."""


def group_rewards(
    outcomes: ArrayLike,
    costs_usd: ArrayLike,
    latencies_s: ArrayLike,
    tool_counts: Sequence[Mapping[str, int]],
    preference: Mapping[str, float],
    *,
    variant: Variant = "paper",
    scale: Scale = "group",
    guard: bool = False,
    cost_budget_usd: float | None = None,
    latency_budget_s: float | None = None,
) -> FloatArray:
    """Reward of each of the G trajectories of one task.

    Args:
      outcomes: [G] in [0, 1]; correct when above `CORRECT_ABOVE`. NaN marks a trajectory that could not be
        scored: its reward is NaN and it takes no part in any minimum or maximum.
      costs_usd: [G] dollars, at least 0.
      latencies_s: [G] seconds, at least 0.
      tool_counts: G mappings, tool name to number of calls; a missing tool was called 0 times.
      preference: weight of each tool name and of "outcome", "cost", "latency". A missing key weighs 0; the
        weight of a tool that nobody called has no effect.
      variant: "paper", or "released" for the formula of the authors' code, in which dearer and slower is
        better.
      scale: minimum and maximum of tool counts, cost and latency are taken over the whole "group" (the paper)
        or over its "correct" trajectories only, so that a cheap wrong answer does not set the scale. The
        outcome is always scaled over the group.
      guard: shift the correct trajectories together, keeping their differences, so that the least rewarded of
        them has at least `GUARD_MARGIN`. Without it a right answer can earn 0, as a wrong one does.
      cost_budget_usd: score cost by `1 - min(1, cost / budget)` instead of within the group.
      latency_budget_s: the same for latency.

    Returns:
      float64 [G]. Exactly 0 for wrong answers, NaN for unscorable ones.

    Raises:
      ValueError: lengths differ, a value is out of range, or a name is unknown; the message says which.
    """
    if variant not in ("paper", "released"):
        raise ValueError(f"variant must be 'paper' or 'released', got {variant!r}")
    if scale not in ("group", "correct"):
        raise ValueError(f"scale must be 'group' or 'correct', got {scale!r}")
    _check_preference(preference, tool_counts)

    outcome = _vector("outcomes", outcomes, len(tool_counts))
    scorable = ~np.isnan(outcome)
    if np.any((outcome[scorable] < 0.0) | (outcome[scorable] > 1.0)):
        raise ValueError(f"outcomes must lie in [0, 1] (or be NaN: unscorable), got {outcome.tolist()}")
    cost = _amounts("costs_usd", costs_usd, scorable)
    latency = _amounts("latencies_s", latencies_s, scorable)

    correct = scorable & (outcome > CORRECT_ABOVE)
    scale_rows = scorable if scale == "group" else correct

    reward = preference.get("outcome", 0.0) * _min_max(outcome, scorable)
    tools = sorted(set().union(*tool_counts)) if tool_counts else []
    for tool in tools:
        counts = np.array([float(row.get(tool, 0)) for row in tool_counts])
        # The released code scales a count only over the trajectories that used the tool, so others go below
        # 0.
        rows = scale_rows if variant == "paper" else scale_rows & (counts > 0)
        reward = reward + preference.get(tool, 0.0) * _min_max(counts, rows)
    for key, amount, budget in (("cost", cost, cost_budget_usd), ("latency", latency, latency_budget_s)):
        if budget is not None:
            term = _within_budget(key, amount, budget)
        elif variant == "paper":
            term = _min_max(-amount, scale_rows)
        else:
            term = _released_efficiency(amount, scale_rows)
        reward = reward + preference.get(key, 0.0) * term

    if guard and correct.any():
        reward = reward + max(0.0, GUARD_MARGIN - float(reward[correct].min()))
    return np.where(scorable, np.where(correct, reward, 0.0), np.nan)


def _min_max(values: FloatArray, rows: BoolArray) -> FloatArray:
    """Scale so that the least of `rows` is 0 and the greatest 1; all 0 if they are equal or none."""
    if not rows.any():
        return np.zeros_like(values)
    low, high = values[rows].min(), values[rows].max()
    if high - low <= EQUAL_WITHIN * max(abs(low), abs(high)):
        return np.zeros_like(values)
    return (values - low) / (high - low)


def _released_efficiency(amounts: FloatArray, rows: BoolArray) -> FloatArray:
    """The cost and latency terms of the released code, `(x + 2 max) / (max - min)`, which grow with the
    amount.

    It takes minimum and maximum of negated amounts but inserts the positive one, and adds the pair a second
    time with an amount of 0.
    """
    if not rows.any():
        return np.zeros_like(amounts)
    low, high = amounts[rows].min(), amounts[rows].max()
    if high - low <= EQUAL_WITHIN * high:
        return np.zeros_like(amounts)
    return (amounts + 2.0 * high) / (high - low)


def _within_budget(key: str, amounts: FloatArray, budget: float) -> FloatArray:
    if not (np.isfinite(budget) and budget > 0.0):
        raise ValueError(f"the {key} budget must be a positive finite number, got {budget}")
    return 1.0 - np.minimum(1.0, amounts / budget)


def _vector(name: str, values: ArrayLike, length: int) -> FloatArray:
    vector = np.asarray(values, dtype=np.float64)
    if vector.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), one value per entry of tool_counts, got {vector.shape}")
    return vector


def _amounts(name: str, values: ArrayLike, scorable: BoolArray) -> FloatArray:
    vector = _vector(name, values, len(scorable))
    if not np.all(np.isfinite(vector[scorable]) & (vector[scorable] >= 0.0)):
        raise ValueError(f"{name} must be finite and at least 0, got {vector.tolist()}")
    return vector


def _check_preference(preference: Mapping[str, float], tool_counts: Sequence[Mapping[str, int]]) -> None:
    for key, weight in preference.items():
        if not np.isfinite(weight):
            raise ValueError(f"preference[{key!r}] must be a finite number, got {weight}")
    for row in tool_counts:
        for tool, count in row.items():
            if tool in NON_TOOL_KEYS:
                raise ValueError(f"a tool cannot be called {tool!r}: preferences use that name; rename the tool")
            if not (np.isfinite(count) and count >= 0):
                raise ValueError(f"tool_counts of {tool!r} must be at least 0, got {count}")
    # The paper's word for our "outcome": left unnoticed, right answers would weigh nothing.
    if "accuracy" in preference and not any("accuracy" in row for row in tool_counts):
        raise ValueError("preference has the key 'accuracy'; the weight of a right answer is called 'outcome' here")
