"""Numbers of the ToolOrchestra paper (arXiv 2511.21689) to hold the market against, and stand-ins made of them.

`CALLS_PER_TASK` is table 15: how often each orchestrator called what, per task, averaged over HLE, FRAMES and tau2.
From it come the scripted policies `published:MODEL`: one call per task, to a tool drawn by the share that the model
gave it, whatever the task. They are stand-ins for *whom* a prompted model asks. They do not read the task, so they say
nothing of how well it would have chosen; no model is run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_COLUMNS = (
    *("gpt-5", "gpt-5-mini", "qwen3-32b", "qwen2.5-coder-32b", "qwen2.5-math-72b", "qwen2.5-math-7b"),
    *("llama-3.3-70b", "local_search", "web_search", "code"),
)
_TABLE_15 = {
    "qwen3-8b": (6.0, 0.5, 1.4, 0.5, 0, 0, 0, 0.8, 1.2, 1.6),
    "nemotron-49b": (5.1, 1.6, 0.5, 0.8, 0.1, 0.1, 0.3, 0.7, 0.9, 1.4),
    "llama-3.3-70b": (1.8, 0, 0.1, 0, 1.4, 0.3, 4.8, 0.6, 1.4, 1.3),
    "qwen3-235b": (6.2, 0.3, 0.6, 1.2, 0.6, 0.1, 1.1, 1.4, 1.0, 2.2),
    "claude-opus-4.1": (6.2, 0.2, 0.3, 0.3, 0.1, 0, 0.1, 1.0, 1.3, 1.4),
    "gpt-5": (2.7, 5.6, 0, 0.2, 0, 0, 0, 0.5, 0.7, 1.0),
    "orchestrator-8b": (1.6, 1.7, 1.3, 0.2, 0, 0.1, 0, 1.8, 0.7, 0.8),
}
CALLS_PER_TASK: dict[str, dict[str, float]] = {
    model: dict(zip(_COLUMNS, calls, strict=True)) for model, calls in _TABLE_15.items()
}

# What the market offers in place of the paper's tools; it has no model that writes code, so that goes to `calculator`.
_IN_THE_MARKET = {
    "local_search": "search",
    "web_search": "search",
    "code": "calculator",
    "qwen2.5-coder-32b": "calculator",
}

# Table 1, rows without tools: (cost in cents, latency in minutes) of one model that answers alone, HLE and FRAMES.
ALONE: dict[str, tuple[float, float]] = {"gpt-5": (6.2, 4.1), "llama-3.3-70b": (0.5, 1.4)}

# Table 1, with expert tools: (accuracy on FRAMES in %, cost in cents, latency in minutes) of prompted orchestrators.
WITH_EXPERTS: dict[str, tuple[float, float, float]] = {
    "qwen3-8b": (68.9, 27.6, 18.3),
    "nemotron-49b": (57.9, 25.6, 17.1),
    "llama-3.3-70b": (52.4, 19.7, 13.4),
    "qwen3-235b": (74.2, 29.7, 21.2),
    "claude-opus-4.1": (72.8, 52.5, 25.6),
    "gpt-5": (57.5, 17.8, 13.6),
    "orchestrator-8b": (76.3, 9.2, 8.2),
}


def call_shares(model: str) -> dict[str, float]:
    """The share of a model's calls that goes to each of the market's tools, by table 15.

    Raises:
        ValueError: the table does not have the model; the message lists those that it has.
    """
    if model not in CALLS_PER_TASK:
        raise ValueError(f"published:{model}: expected one of {', '.join(CALLS_PER_TASK)}")
    calls = CALLS_PER_TASK[model]
    shares: dict[str, float] = {}
    for name, number in calls.items():
        tool = _IN_THE_MARKET.get(name, name)
        shares[tool] = shares.get(tool, 0.0) + number / sum(calls.values())
    return shares


def draw_tool(model: str, offered: Iterable[str], rng: np.random.Generator) -> str:
    """One of the offered tools by the model's shares; any of them alike where it called none of them."""
    shares = call_shares(model)
    names = list(offered)
    weights = np.array([shares.get(name, 0.0) for name in names])
    if not weights.any():
        weights = np.ones(len(names))
    return names[int(rng.choice(len(names), p=weights / weights.sum()))]
