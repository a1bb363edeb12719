"""Scripted policies for comparison and for warm starts, and a loop that runs one episode.

All of them call tools with the least arguments that their schemas ask for (none, or the question where a text is
wanted) and then copy the last result as "Answer: X". By name (`make_policy`):

* `always:<tool>`: that tool, once ("unknown" where an episode does not offer it).
* `random`: one tool, uniformly at random.
* `cheapest`: tools in rising order of price until one returns a result instead of an error.
* `oracle`: knows the market's skill table: the cheapest plan whose chance of success is within 0.05 of the best.
* `demonstration`: the turns that the environment's own `demonstrate` gives.
* `published:<model>`: one tool, drawn by how often a prompted model called it in ToolOrchestra's table 15, whatever the
  task (`market.published`).
* `habit`: a fair warm start with the bad habit that prompted models have: 55% the strongest expert, 25% the oracle's
  plan, 20% a random tool.

`oracle` and `habit` need the market's tasks; the others run on any `ToolEnv`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np

from orchestra_envs.env import ToolEnv
from orchestra_envs.example_arguments import example_arguments
from orchestra_envs.market.plans import best_plan
from orchestra_envs.market.published import call_shares, draw_tool
from orchestra_envs.market.tasks import task_from_id
from orchestra_envs.parse import ToolCall, render_call

STRONGEST_EXPERT = "gpt-5"
HABIT_SHARES = {"strongest": 0.55, "suitable": 0.25, "random": 0.2}
POLICY_NAMES = ("always:<tool>", "random", "cheapest", "oracle", "demonstration", "habit", "published:<model>")

# Only used to rank tools by price: what one call of a language model typically takes.
_TYPICAL_INPUT_TOKENS, _TYPICAL_OUTPUT_TOKENS, _TYPICAL_SECONDS = 100, 1000, 10

# (environment, offered tools, id of the task, generator) -> names of the tools to call, in order
_Choose = Callable[[gymnasium.Env, list[dict[str, Any]], str, np.random.Generator], list[str]]


class Policy(Protocol):
    """What `run_episode` needs: told of each new episode, then asked for one turn after the other."""

    def reset(self, env: gymnasium.Env, observation: str, info: dict[str, Any], rng: np.random.Generator) -> None:
        """Begin an episode; `observation` and `info` come from `env.reset`."""

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """The text of the next turn, given the newest observation and info."""


class ScriptedPolicy:
    """Calls a list of tools chosen at reset, one a turn, then copies the last result.

    With `fallback`, the first result that is not an error is taken and the rest of the list is not called.
    """

    def __init__(self, name: str, choose: _Choose, *, fallback: bool = False) -> None:
        self._name = name
        self._choose = choose
        self._fallback = fallback
        self._calls: list[str] = []
        self._arguments: dict[str, dict[str, Any]] = {}

    def reset(self, env: gymnasium.Env, observation: str, info: dict[str, Any], rng: np.random.Generator) -> None:
        """Choose the tools for this episode; raises ValueError if there are none, or none that the policy knows."""
        specs = json.loads(info["tools_json"])
        if not specs:
            raise ValueError(f"policy {self._name}: the environment offers no tools")
        self._arguments = {
            _name(spec): example_arguments(spec["function"]["parameters"], observation) for spec in specs
        }
        self._calls = self._choose(env, specs, info["task_id"], rng)

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """The next call, or the final answer."""
        has_result = info["num_calls"] > 0 and info["num_errors"] == 0
        if self._calls and not (self._fallback and has_result):
            name = self._calls.pop(0)
            return render_call(ToolCall(name, self._arguments.get(name, {})))
        return f"Answer: {result_value(observation) if has_result else 'unknown'}"


class DemonstrationPolicy:
    """Says what the environment's `ToolEnv.demonstrate` prescribes for the task."""

    def __init__(self) -> None:
        self._turns: list[str] = []

    def reset(self, env: gymnasium.Env, observation: str, info: dict[str, Any], rng: np.random.Generator) -> None:
        """Ask the environment; raises ValueError if it has no demonstrations."""
        tool_env = env.unwrapped
        if not isinstance(tool_env, ToolEnv):
            raise ValueError("policy demonstration: the environment is no ToolEnv")
        try:
            self._turns = list(tool_env.demonstrate(tool_env.task, rng))
        except NotImplementedError as error:
            raise ValueError(f"policy demonstration: {error}") from None

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """The next turn of the demonstration."""
        if not self._turns:
            raise ValueError("policy demonstration: the turns of demonstrate() ended before the episode did")
        return self._turns.pop(0)


def result_value(observation: str) -> str:
    """The value that a tool's result states: what follows the last "Answer:", else its last word."""
    words = observation.rsplit("Answer:", 1)[-1].split()
    return words[-1].rstrip(".") if words else "unknown"


def make_policy(name: str) -> Policy:
    """The scripted policy of this name (see the module's list).

    Raises ValueError for an unknown name; the policy raises it at reset if the environment has no tools, or not the one
    of `always:<tool>`.
    """
    if name.startswith("always:"):
        return ScriptedPolicy(name, _always(name.removeprefix("always:")))
    if name.startswith("published:"):
        return ScriptedPolicy(name, _published(name.removeprefix("published:")))
    if name == "demonstration":
        return DemonstrationPolicy()
    if name == "cheapest":
        return ScriptedPolicy(name, _by_price, fallback=True)
    choices: dict[str, _Choose] = {"random": _random, "oracle": _oracle, "habit": _habit}
    if name not in choices:
        raise ValueError(f"policy: expected one of {', '.join(POLICY_NAMES)}, got {name!r}")
    return ScriptedPolicy(name, choices[name])


def _name(spec: dict[str, Any]) -> str:
    return spec["function"]["name"]


def _always(tool: str) -> _Choose:
    def choose(env: gymnasium.Env, specs: list[dict[str, Any]], task_id: str, rng: np.random.Generator) -> list[str]:
        offered = [_name(spec) for spec in specs]
        known = dict.fromkeys([*(other.name for other in getattr(env.unwrapped, "tools", ())), *offered])
        if tool not in known:
            raise ValueError(f"policy always:{tool}: no such tool; the environment has {', '.join(known)}")
        return [tool] if tool in offered else []

    return choose


def _published(model: str) -> _Choose:
    call_shares(model)  # says so if there is no such model

    def choose(env: gymnasium.Env, specs: list[dict[str, Any]], task_id: str, rng: np.random.Generator) -> list[str]:
        return [draw_tool(model, map(_name, specs), rng)]

    return choose


def _random(env: gymnasium.Env, specs: list[dict[str, Any]], task_id: str, rng: np.random.Generator) -> list[str]:
    return [_name(specs[int(rng.integers(len(specs)))])]


def _by_price(env: gymnasium.Env, specs: list[dict[str, Any]], task_id: str, rng: np.random.Generator) -> list[str]:
    return [_name(spec) for spec in sorted(specs, key=lambda spec: _typical_cost_usd(spec["price"]))]


def _typical_cost_usd(price: dict[str, float]) -> float:
    return (
        price["per_call_usd"]
        + price["per_input_token_usd"] * _TYPICAL_INPUT_TOKENS
        + price["per_output_token_usd"] * _TYPICAL_OUTPUT_TOKENS
        + price["per_second_usd"] * _TYPICAL_SECONDS
    )


def _oracle(env: gymnasium.Env, specs: list[dict[str, Any]], task_id: str, rng: np.random.Generator) -> list[str]:
    try:
        return list(best_plan(task_from_id(task_id), specs))
    except KeyError as error:
        raise ValueError(
            f"policy oracle: knows the market's tools by their own names, and {error} is none: no aliases"
        ) from None


def _habit(env: gymnasium.Env, specs: list[dict[str, Any]], task_id: str, rng: np.random.Generator) -> list[str]:
    kind = rng.choice(list(HABIT_SHARES), p=list(HABIT_SHARES.values()))
    if kind == "strongest" and STRONGEST_EXPERT in map(_name, specs):
        return [STRONGEST_EXPERT]
    return (_oracle if kind == "suitable" else _random)(env, specs, task_id, rng)


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode as text and sums.

    `messages` are the turns in order, as {"role": "user" | "assistant" | "tool", "content": text}, from the question
    to the final answer; `reset_info` is the environment's first info (tools, prices, preference); `tool_counts` has
    the calls of each tool that was called.
    """

    task_id: str
    seed: int
    replica: int
    messages: list[dict[str, str]]
    reset_info: dict[str, Any]
    outcome: float
    reward: float
    cost_usd: float
    latency_s: float
    tool_counts: dict[str, int]
    end_reason: str


class EpisodeRecord:
    """An `Episode` in the making: begun with what `reset` gave, then told of every step."""

    def __init__(self, seed: int, replica: int, observation: str, info: dict[str, Any]) -> None:
        self._seed, self._replica = seed, replica
        self._reset_info = self._info = info
        self._reward = 0.0
        self._counts: Counter[str] = Counter()
        self._messages = [{"role": "user", "content": observation}]
        self.ended = False

    def add(self, action: str, observation: str, reward: float, ended: bool, info: dict[str, Any]) -> None:
        """One step."""
        calls = json.loads(info["calls_json"])
        self._info, self.ended = info, ended
        self._reward += reward
        self._counts.update(call["tool"] for call in calls)
        self._messages.append({"role": "assistant", "content": action})
        if observation:
            by_tool = calls or info["num_errors"]
            self._messages.append({"role": "tool" if by_tool else "user", "content": observation})

    def episode(self) -> Episode:
        """What there is so far."""
        info = self._info
        return Episode(
            task_id=self._reset_info["task_id"],
            seed=self._seed,
            replica=self._replica,
            messages=self._messages,
            reset_info=self._reset_info,
            outcome=info["outcome"],
            reward=self._reward,
            cost_usd=info["episode_cost_usd"],
            latency_s=info["episode_latency_s"],
            tool_counts=dict(self._counts),
            end_reason=info["end_reason"],
        )


def run_episode(env: gymnasium.Env, policy: Policy, seed: int, replica: int = 0) -> Episode:
    """Run one episode to its end.

    The same environment, policy, seed and replica give the same episode. `seed` fixes task, tools, prices and
    preference; `replica` varies the luck of the tools and of the policy.
    """
    observation, info = env.reset(seed=seed, options={"replica": replica})
    record = EpisodeRecord(seed, replica, observation, info)
    policy.reset(env, observation, info, np.random.default_rng([seed, replica]))
    while not record.ended:
        action = policy.act(observation, info)
        observation, reward, terminated, truncated, info = env.step(action)
        record.add(action, observation, float(reward), terminated or truncated, info)
    return record.episode()
