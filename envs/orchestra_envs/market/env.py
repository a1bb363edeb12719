"""`orchestra/Market-v0`: short questions, cheap tools that fit some of them, and dear experts that know more.

A simulation, without network or keys: the experts are biased coins with a price list (`experts` says which of their
numbers are published and which are ours), the calculator and the search engine really work, and the answer is judged
exactly. The policy has to learn, per task, which tool is good enough and what it costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestra_envs.env import Preference, Task, ToolEnv
from orchestra_envs.market.experts import EXPERTS
from orchestra_envs.market.judge import is_correct
from orchestra_envs.market.plans import keeps_all_solvable
from orchestra_envs.market.tasks import SPLITS, TASK_TYPES, make_task, task_from_id
from orchestra_envs.market.tools import TOOL_NAMES, expert_tool, market_tools, passages_read
from orchestra_envs.preference import draw_preference, fixed_weights
from orchestra_envs.tools import Price, Tool

_NUM_TASKS = 2**31  # task numbers that reset draws from, per type and split


class MarketEnv(ToolEnv):
    """The simulated market of tools as a Gymnasium environment.

    Args:
        split: "train" or "test"; no fact, sum or story is in both. Random preferences are worded differently, too.
        types: the task types to draw from, each equally often.
        tools: names of the tools on offer (see `TOOL_NAMES`); None for all.
        randomize_tools: each episode offers a random subset, at least two tools, with which every type of task can
            still be solved.
        price_spread: each episode multiplies each tool's price and its latency by factors drawn log-uniformly from
            [1 / price_spread, price_spread]; 1 keeps the market's own prices.
        preference: "balanced" (outcome 1, cost 0.5, latency 0.25, not told in words), "random" (drawn per episode
            and told in words), or a mapping of weights in [0, 1] for "outcome", "cost", "latency" and tool names.
        **limits: `max_turns` and the other limits of `ToolEnv`.

    `reset(options={"task_id": "test/lookup/17"})` poses that task. Raises ValueError for an unknown split, type or
    tool, a subset that leaves a type unsolvable with `randomize_tools`, or a spread below 1.
    """

    def __init__(
        self,
        *,
        split: str = "train",
        types: Sequence[str] = TASK_TYPES,
        tools: Sequence[str] | None = None,
        randomize_tools: bool = False,
        price_spread: float = 1.0,
        preference: str | Mapping[str, float] = "balanced",
        **limits: Any,
    ) -> None:
        self._split = _one_of("split", split, SPLITS)
        self._types = _names("types", types, TASK_TYPES)
        names = _names("tools", TOOL_NAMES if tools is None else tools, TOOL_NAMES)
        self._names = tuple(name for name in TOOL_NAMES if name in names)
        if randomize_tools and not keeps_all_solvable(frozenset(names)):
            raise ValueError(f"tools: {', '.join(names)} cannot solve every type; offer more or do not randomize")
        if not 1.0 <= price_spread < float("inf"):
            raise ValueError(f"price_spread: expected a finite factor of at least 1, got {price_spread}")
        self._randomize_tools = randomize_tools
        self._price_spread = price_spread
        self._weights = fixed_weights(preference, self._names)
        self.tools = tuple(tool for tool in market_tools() if tool.name in self._names)
        super().__init__(**limits)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A random task of the split, or the one that `options["task_id"]` names, with tools and preference."""
        if "task_id" in options:
            task = task_from_id(options["task_id"])
        else:
            task_type = self._types[int(rng.integers(len(self._types)))]
            task = make_task(self._split, task_type, int(rng.integers(_NUM_TASKS)))
        names = _draw_subset(self._names, rng) if self._randomize_tools else self._names
        if self._weights is None:
            preference = draw_preference(rng, names, held_out=self._split == "test")
        else:
            preference = Preference(dict.fromkeys(names, 0.0) | dict(self._weights), "")
        return replace(task, preference=preference, metadata=task.metadata | {"tools": names})

    def score(self, task: Task, answer: str) -> float:
        """1.0 if the final turn states the task's answer, else 0.0."""
        return float(is_correct(answer, task.answer))

    def state_hash(self, tool: str) -> str | None:
        """Of the passages read so far, which searches do not repeat and experts read along."""
        offered = self._begun.tools[tool]
        if (offered.backend or offered.name) == "calculator":
            return None
        return hashlib.sha256("\n".join(passages_read(self.history)).encode()).hexdigest()

    def episode_tools(self, task: Task, rng: np.random.Generator) -> Sequence[Tool]:
        """The tools on offer in this episode, at this episode's prices."""
        tools = [tool for tool in self.tools if tool.name in task.metadata["tools"]]
        if self._price_spread == 1.0:
            return tools
        limit = np.log(self._price_spread)
        factors = np.exp(rng.uniform(-limit, limit, size=(len(tools), 2)))
        return [_scale(tool, float(price), float(latency)) for tool, (price, latency) in zip(tools, factors)]


def _draw_subset(names: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """A random subset in the given order, at least two names, with which all types can be solved."""
    while True:
        size = int(rng.integers(2, len(names) + 1))
        subset = tuple(names[i] for i in sorted(rng.choice(len(names), size=size, replace=False)))
        if keeps_all_solvable(frozenset(subset)):
            return subset


def _scale(tool: Tool, price_factor: float, latency_factor: float) -> Tool:
    """`tool` with its price and its latency multiplied."""
    if tool.name in EXPERTS:
        expert = EXPERTS[tool.name]
        return expert_tool(
            replace(
                expert,
                input_usd_per_million=expert.input_usd_per_million * price_factor,
                output_usd_per_million=expert.output_usd_per_million * price_factor,
                latency_s=expert.latency_s * latency_factor,
            )
        )
    price = Price(per_call_usd=tool.price.per_call_usd * price_factor)
    return replace(tool, price=price, latency_s=tool.latency_s * latency_factor)


def _one_of(field: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{field}: expected one of {', '.join(allowed)}, got {value!r}")
    return value


def _names(field: str, values: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not values:
        raise ValueError(f"{field}: expected a list of names out of {', '.join(allowed)}, got {values!r}")
    return tuple(_one_of(field, value, allowed) for value in values)
