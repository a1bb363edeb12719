"""What can be expected of a sequence of tools on a task: the oracle's knowledge of the market.

A plan is a tuple of tool names, called in this order without arguments; the last result is the answer. Only plans
that can make sense are considered: one tool alone, or as many searches as the task needs facts and then an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from orchestra_envs.env import Task
from orchestra_envs.market.experts import EXPERTS, input_tokens, success_probability
from orchestra_envs.market.tasks import TASK_TYPES, make_task

Plan = tuple[str, ...]

# A subset of tools keeps a type solvable if some plan is right at least this often on its medium tasks.
SOLVABLE = 0.6


def plans(task: Task, tools: Iterable[str]) -> list[Plan]:
    """The plans worth considering for `task` with these tools."""
    names = list(tools)
    singles: list[Plan] = [(name,) for name in names]
    num_facts = len(task.metadata["gold"])
    if num_facts == 0 or "search" not in names:
        return singles
    return singles + [("search",) * num_facts + (name,) for name in names if name in EXPERTS]


def success(plan: Plan, task: Task) -> float:
    """The chance that `plan` answers `task` rightly."""
    last, gold = plan[-1], task.metadata["gold"]
    if last == "calculator":
        return float(task.metadata["type"] == "arithmetic")
    if last == "search":
        return float(task.metadata["type"] == "lookup")
    has_passages = bool(gold) and plan.count("search") >= len(gold)
    return success_probability(EXPERTS[last], task, has_passages=has_passages)


def expected_cost_usd(plan: Plan, task: Task, prices: Mapping[str, Mapping[str, float]]) -> float:
    """The mean cost of `plan` at `prices` (tool name -> the "price" entry of `Tool.spec`)."""
    return sum(_call_cost_usd(name, task, prices[name]) for name in plan)


def _call_cost_usd(name: str, task: Task, price: Mapping[str, float]) -> float:
    if name not in EXPERTS:
        return price["per_call_usd"]
    output_tokens = EXPERTS[name].output_tokens[task.metadata["type"]]
    return (
        price["per_call_usd"]
        + price["per_input_token_usd"] * input_tokens(task, task.metadata["gold"])
        + price["per_output_token_usd"] * output_tokens
    )


def best_plan(task: Task, specs: Iterable[Mapping[str, Any]], tolerance: float = 0.05) -> Plan:
    """The cheapest plan among those whose success is within `tolerance` of the highest that the tools allow.

    `specs` are the offered tools as `Tool.spec` (and the environment's `tools_json`) describes them.
    """
    prices = {spec["function"]["name"]: spec["price"] for spec in specs}
    candidates = plans(task, prices)
    enough = max(success(plan, task) for plan in candidates) - tolerance
    good = [plan for plan in candidates if success(plan, task) >= enough]
    return min(good, key=lambda plan: (expected_cost_usd(plan, task, prices), len(plan), plan))


@cache
def keeps_all_solvable(tools: frozenset[str]) -> bool:
    """Whether each type of task has a plan over `tools` that is right with a chance of at least `SOLVABLE`."""
    medium = [make_task("train", task_type, 1) for task_type in TASK_TYPES]
    return all(max(success(plan, task) for plan in plans(task, tools)) >= SOLVABLE for task in medium)
