"""User preferences: drawing them, telling them in words, and scoring how well an episode met them.

A preference is a weight in [0, 1] for every tool (how gladly the user sees it used) and for "outcome", "cost" and
"latency", as in ToolOrchestra (arXiv 2511.21689, section 3 and appendix F), where a language model wrote the pairs of
words and weights. Here they come from a few templates, so that the words determine the weights exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from orchestra_envs.env import Preference

USD_PER_CENT = 0.01
SECONDS_PER_MINUTE = 60.0

# The weights of "balanced": the outcome first, then money, then time.
BALANCED = {"outcome": 1.0, "cost": 0.5, "latency": 0.25}

# profile -> (weights of outcome, cost, latency; weight of each favoured tool; how many tools are favoured)
_PROFILES: dict[str, tuple[dict[str, float], float, int]] = {
    "accuracy": ({"outcome": 1.0, "cost": 0.0, "latency": 0.0}, 0.0, 0),
    "cost": ({"outcome": 1.0, "cost": 1.0, "latency": 0.0}, 0.0, 0),
    "latency": ({"outcome": 1.0, "cost": 0.0, "latency": 1.0}, 0.0, 0),
    "thrift": ({"outcome": 1.0, "cost": 0.5, "latency": 0.5}, 0.0, 0),
    "tool": ({"outcome": 1.0, "cost": 0.25, "latency": 0.0}, 1.0, 1),
    "two_tools": ({"outcome": 1.0, "cost": 0.0, "latency": 0.0}, 1.0, 2),
}
# profile -> wordings met in training, wordings kept for the held-out split
_WORDINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "accuracy": (
        ("Only the right answer matters.", "Be right, whatever it costs."),
        ("Spare no expense to be right.",),
    ),
    "cost": (
        ("Keep the cost low.", "Be right but spend little money."),
        ("Money is tight, so be cheap.",),
    ),
    "latency": (
        ("Be quick.", "Be right but take little time."),
        ("Time is tight, so be quick.",),
    ),
    "thrift": (
        ("Save money and time.", "Keep both cost and time low."),
        ("Spend little money and little time.",),
    ),
    "tool": (
        ("I like to see {} used.", "Use {} if you can."),
        ("If you can, use {}.",),
    ),
    "two_tools": (
        ("I like to see {} and {} used.", "Use {} and {} if you can."),
        ("If you can, use {} and {}.",),
    ),
}


def draw_preference(rng: np.random.Generator, tools: Sequence[str], *, held_out: bool = False) -> Preference:
    """A random preference over `tools` (two names at least) with weights and the words that say them.

    With `held_out` the words come from templates that are never used without it; the weights are drawn alike.
    """
    profile = list(_PROFILES)[int(rng.integers(len(_PROFILES)))]
    weights, tool_weight, num_favoured = _PROFILES[profile]
    favoured = [str(name) for name in rng.choice(tools, size=num_favoured, replace=False)]
    wordings = _WORDINGS[profile][int(held_out)]
    text = wordings[int(rng.integers(len(wordings)))].format(*favoured)
    tool_weights = {name: tool_weight if name in favoured else 0.0 for name in tools}
    return Preference({**tool_weights, **weights}, text)


def preference_vector(
    tool_counts: Mapping[str, int], outcome: float, cost_usd: float, latency_s: float
) -> dict[str, float]:
    """The measured vector of one episode for `preference_score`: calls by tool, outcome, cents and minutes."""
    return {
        **{name: float(count) for name, count in tool_counts.items()},
        "outcome": float(outcome),
        "cost": cost_usd / USD_PER_CENT,
        "latency": latency_s / SECONDS_PER_MINUTE,
    }


def preference_score(
    measured: Mapping[str, float],
    reference: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    correct: bool,
    signs: Literal["mended", "printed"] = "mended",
) -> float:
    """How well one episode met a preference, relative to a reference policy on the same task.

    ToolOrchestra, appendix L, equations 5 and 6: with M the measured and M0 the reference vector, a tool or the
    outcome scores M / max(1, M0), cost and latency score M0 / max(1, M); the result is their sum weighted by the
    preference if the answer was right, else 0. A set of tasks scores the sum over its tasks.

    The paper defines the cost and latency entries as negative dollars and seconds, with which max(1, M) is always 1
    and dearer references score lower. The mended form takes positive magnitudes, in cents and minutes so that typical
    values exceed the floor of 1 (`preference_vector` builds such a vector). `signs="printed"` computes the paper's
    literal form from non-positive entries, for comparison only.

    Args:
        measured, reference: tool names, "outcome", "cost" and "latency" -> value; a missing entry counts as 0.
        weights: the preference, the same keys -> weight in [0, 1].
        correct: whether the final answer was right.

    Raises ValueError where cost or latency has the wrong sign for `signs`.
    """
    direction = -1.0 if signs == "printed" else 1.0
    for name, vector in (("measured", measured), ("reference", reference)):
        for key in ("cost", "latency"):
            if direction * vector.get(key, 0.0) < 0:
                wanted = "negative (as printed)" if signs == "printed" else "positive (cents, minutes)"
                raise ValueError(f"{name}[{key!r}]: expected a {wanted} value, got {vector[key]}")
    if not correct:
        return 0.0
    return sum(weight * _ratio(key, measured, reference) for key, weight in weights.items())


def _ratio(key: str, measured: Mapping[str, float], reference: Mapping[str, float]) -> float:
    numerator, denominator = (reference, measured) if key in ("cost", "latency") else (measured, reference)
    return numerator.get(key, 0.0) / max(1.0, denominator.get(key, 0.0))
