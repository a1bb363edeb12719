"""`ToolEnv`: a task, tools with prices and latencies, and a policy that writes one assistant turn a step.

Subclass it with two methods and a list of tools::

    class Cities(ToolEnv):
        tools = [lookup]

        def sample_task(self, rng, options):
            return Task("How many people live in Oslo?", answer="709000")

        def score(self, task, answer):
            return float(task.answer in answer)

Observation: the new text for the policy, never the history. Action: the text of one assistant turn as
`orchestra_envs.parse` reads it; if the prompt already opened a reasoning block, put `<think>` in front of it.
A turn with calls runs them; a turn with neither a call nor an error is the final answer, or, where the environment
defines `reply`, a message to the user, who replies.

Randomness: the task, the tools, their prices and the preference depend on the seed of `reset` alone;
`options={"replica": k}` varies only what happens inside the tools. So a group for GRPO is one seed with the
replicas 0..G-1, and two environments with equal seed, replica and actions go through equal episodes.
"""

import asyncio
import inspect
import logging
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from orchestra_envs.calls import cap_text, run_calls
from orchestra_envs.loop import bridge, drive, on_loop
from orchestra_envs.parse import CALL_CLOSE, CALL_OPEN, ParsedTurn, ParseError, ToolCall, parse_turn, render_call
from orchestra_envs.spaces import MAX_TEXT_CHARS, UnicodeText
from orchestra_envs.tools import CallContext, CallRecord, Tool, canonical_json

if TYPE_CHECKING:
    from orchestra_envs.randomize import Randomization

logger = logging.getLogger(__name__)

REWARD_PER_USD = 10.0
"""What a dollar takes from the step reward at a preference weight of 1: ten cents weigh as much as an answer."""

REWARD_PER_SECOND = 0.001
"""What a second of latency takes from the step reward at a preference weight of 1."""

PREFERENCE_OBJECTIVES = ("outcome", "cost", "latency")

# Streams of random numbers of one episode, told apart by the first element of the spawn key.
_TASK_STREAM, _TOOLS_STREAM, _CALL_STREAM, _RANDOMIZE_STREAM, _EPISODE_STREAM = range(5)

HOOK_TIMEOUT_S = 900.0
"""How long an async `opening`, `reply` or `score` may take before the episode is given up."""


@dataclass(frozen=True)
class Preference:
    """What the user cares about, as weights in [0, 1] and in the words the policy is told.

    `weights` has "outcome", "cost" and "latency", and any number of tool names. An empty `text` tells nothing.

    Raises:
        ValueError: one of the three is missing, or a weight is outside [0, 1].
    """

    weights: Mapping[str, float]
    text: str

    def __post_init__(self) -> None:
        for name in PREFERENCE_OBJECTIVES:
            if name not in self.weights:
                raise ValueError(f"Preference.weights needs {name!r} (it has {', '.join(self.weights) or 'nothing'})")
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
                raise ValueError(f"Preference.weights[{name!r}] must be a number in [0, 1], not {weight!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"Preference.text must be a string, not {self.text!r}")


@dataclass(frozen=True)
class Task:
    """One thing to solve. `answer` and `metadata` are for `score` and the tools; the policy never sees them.

    `instructions` are standing rules for the policy, such as a company's policy text: `info["instructions"]` after
    `reset`, where trainers find what belongs into the system prompt.
    """

    question: str
    answer: Any = None
    id: str = ""
    preference: Preference | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    instructions: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.question, str) or not self.question:
            raise ValueError(f"Task.question must be a text, not {self.question!r}")
        if not isinstance(self.id, str):
            raise ValueError(f"Task.id must be a string, not {self.id!r}")
        if not isinstance(self.instructions, str):
            raise ValueError(f"Task.instructions must be a string, not {self.instructions!r}")


@dataclass(frozen=True)
class Reply:
    """What the user says to a message of the policy. With `end` the episode is over after it, and is scored.

    `cost_usd` and `latency_s` are charged to the episode: 0 for a person or a simulated one.
    """

    text: str
    end: bool = False
    cost_usd: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"Reply.text must be a string, not {self.text!r}")
        for name in ("cost_usd", "latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Reply.{name} must be a finite number of at least 0, not {getattr(self, name)!r}")


@dataclass
class _Episode:
    """The state of one episode."""

    seed: int
    replica: int
    task: Task
    tools: dict[str, Tool]
    rng: np.random.Generator
    messages: list[Mapping[str, str]] = field(default_factory=list)
    history: tuple[CallRecord, ...] = ()
    cost_usd: float = 0.0
    cost_known: bool = True
    latency_s: float = 0.0
    num_errors: int = 0
    num_format_errors: int = 0
    format_errors_in_a_row: int = 0
    turn: int = 0
    end_reason: str = ""

    def account(self, records: Sequence[CallRecord], num_format_errors: int) -> tuple[float, float, int]:
        """Enter what happened in a turn; its cost (a sum), latency (calls run in parallel) and number of errors."""
        cost_usd = sum((record.cost_usd for record in records), 0.0)
        latency_s = max((record.latency_s for record in records), default=0.0)
        num_errors = num_format_errors + sum(record.status == "error" for record in records)
        self.history += tuple(records)
        self.cost_usd += cost_usd
        self.cost_known &= all(record.cost_known for record in records)
        self.latency_s += latency_s
        self.num_errors += num_errors
        self.num_format_errors += num_format_errors
        self.format_errors_in_a_row = self.format_errors_in_a_row + 1 if num_format_errors else 0
        return cost_usd, latency_s, num_errors


class ToolEnv(gym.Env[str, str]):
    """Base class of tool environments; see the module's text for how to write one.

    `info` is flat and has the same keys and types after `reset` and every `step`: of this step `cost_usd`,
    `latency_s` (float), `num_calls`, `num_errors` (int), `error_type` (str, the first error's, "" if none),
    `calls_json` (str, a JSON list of `CallRecord`); of the episode `episode_cost_usd`, `episode_latency_s`,
    `episode_calls`, `episode_errors`, `episode_format_errors`, `turn`, `end_reason`; at the end `outcome` (float
    in [0, 1]) and `drop` (bool: the environment failed, do not learn from this episode); always `task_id` and
    `cost_known` (bool: no cost of the episode so far is an estimate); after `reset` alone `tools_json` (a JSON list of
    `Tool.spec()`), `preference_json` ({"weights", "text"}, or "" if the task has none) and `instructions` (str), ""
    after steps. Dollars and seconds are those of the tools' records.

    Calls of one turn run in parallel: the turn's cost is the sum of theirs, its latency their maximum.

    The step reward is `-(w_cost * REWARD_PER_USD * cost_usd + w_latency * REWARD_PER_SECOND * latency_s)`, plus
    the outcome at the end; the weights are the preference's, 1 without one. Trainers may form their own from `info`.

    Ends: `terminated` with end_reason "answered" or "user_ended", or "infra_error" where `score` failed. `truncated`
    with "max_turns", "format_errors" (too many unreadable turns in a row), "budget" (a call was refused for it), or
    "infra_error" where `reply` failed.

    `areset` and `astep` are the same as coroutines: with them one thread keeps hundreds of episodes with slow tools
    going (see `orchestra_envs.runner`).

    Args:
        max_turns: most assistant turns of an episode.
        max_format_errors: this many turns in a row that cannot be read end the episode (0 and 1: the first one
            does). None for no such limit.
        budget_usd: a call that would start when the episode has cost so much is refused and ends the episode.
        max_output_chars: longer tool outputs are cut there and marked.
        randomize: other names, subsets, prices, descriptions and preferences for every task, as
            `orchestra_envs.randomize` reads them; None leaves the tools as they are.

    Raises:
        ValueError: an argument is out of range.
    """

    tools: Sequence[Tool] = ()

    def __init__(
        self,
        *,
        max_turns: int = 8,
        max_format_errors: int | None = None,
        budget_usd: float | None = None,
        max_output_chars: int = 4000,
        randomize: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_turns = _whole_number("max_turns", max_turns, minimum=1)
        self.max_format_errors = (
            None if max_format_errors is None else _whole_number("max_format_errors", max_format_errors, minimum=0)
        )
        self.max_output_chars = _whole_number("max_output_chars", max_output_chars, minimum=1)
        if budget_usd is not None and not (math.isfinite(budget_usd) and budget_usd >= 0):
            raise ValueError(f"budget_usd must be a finite number of at least 0 or None, not {budget_usd!r}")
        self.budget_usd = budget_usd
        _tool_list(type(self).__name__, self.tools)
        self._randomization = None if randomize is None else _read_randomization(randomize)
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._episode: _Episode | None = None

    # What a subclass defines.

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """The task of an episode; all its randomness must come from `rng`, which depends on the seed alone."""
        raise NotImplementedError(f"{type(self).__name__} must define sample_task(rng, options)")

    def score(self, task: Task, answer: str) -> float | Awaitable[float]:
        """How right the final answer (or the last message) is, in [0, 1]. May be async.

        An exception marks the episode as one to drop.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(task, answer)")

    def episode_tools(self, task: Task, rng: np.random.Generator) -> Sequence[Tool]:
        """The tools of an episode, `self.tools` unless overridden; `rng` depends on the seed alone."""
        return self.tools

    def opening(self, task: Task) -> str | Awaitable[str]:
        """The first observation, by default the question. May be async; the episode's tools are made already."""
        return task.question

    def reply(self, message: str) -> Reply | Awaitable[Reply | None] | None:
        """What the user says to a turn of plain text; None (the default) takes the text as the final answer.

        May be async. An exception marks the episode as one to drop. `message` holds no hidden reasoning.
        """
        return None

    def ended(self) -> tuple[str, bool] | None:
        """Whether a tool brought the episode to its end; asked after every turn with calls.

        None (the default) if not, else the end_reason and whether the episode is complete: complete ones terminate
        and are scored on the last message (""), others are truncated.
        """
        return None

    def state_hash(self, tool: str) -> str | None:
        """Optional: a hash of the world that the tool of this name reads or changes, as it stands now.

        Asked before every call and written into its record, so that a replay knows for which state of the world a
        recorded result holds. None (the default) for tools whose results depend on their arguments alone.
        """
        return None

    def demonstrate(self, task: Task, rng: np.random.Generator) -> Sequence[str]:
        """Optional: the assistant's turns in an episode on `task`, for warm starts (`sft.router: demonstration`).

        They need not be good, only in the right form; draw from `rng` to show more than one way.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no demonstrate(task, rng)")

    def __getattr__(self, name: str) -> Any:
        if name in ("_episode", "max_turns", "_randomization", "observation_space", "action_space"):
            raise AttributeError(f"{type(self).__name__}.__init__ must call super().__init__(): there is no {name!r}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def task(self) -> Task:
        """The task of the episode under way."""
        return self._begun.task

    @property
    def episode_rng(self) -> np.random.Generator:
        """Randomness of the episode beside its tools (a simulated user's), of the seed and the replica alone."""
        return self._begun.rng

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """The conversation so far without hidden reasoning; see `CallContext.messages`."""
        return tuple(self._begun.messages)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools of the episode, as the policy sees them."""
        return tuple(self._begun.tools.values())

    @property
    def history(self) -> tuple[CallRecord, ...]:
        """The calls of the episode so far."""
        return self._begun.history

    @property
    def _begun(self) -> _Episode:
        if self._episode is None:
            raise gym.error.ResetNeeded("call reset() first: there is no episode yet")
        return self._episode

    # Gymnasium's interface.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the observation is the question, and the preference in words if there is one.

        Args:
            seed: decides the task, tools, prices and preference. None draws the next one from `np_random`, so
                that what follows `reset(seed=...)` is determined too.
            options: {"replica": k}, k >= 0, varies the tools' randomness alone; other keys are the subclass's.

        Raises:
            ValueError: the replica is not a whole number of at least 0, two tools share a name, or one is no `Tool`.
        """
        super().reset(seed=seed)
        return drive(self._reset(seed, dict(options or {})))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """`reset` as a coroutine, for any event loop."""
        super().reset(seed=seed)
        return await bridge(self._reset(seed, dict(options or {})))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one assistant turn. No fault of the policy or of a tool is raised; they are observations.

        Raises:
            gymnasium.error.ResetNeeded: before the first `reset` or after the end of the episode.
            gymnasium.error.InvalidAction: the action is not a string.
        """
        return drive(self._step(self._checked(action), action))

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`step` as a coroutine, for any event loop."""
        return await bridge(self._step(self._checked(action), action))

    async def _reset(self, seed: int | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._episode = None
        replica = _whole_number('options["replica"]', options.get("replica", 0), minimum=0)
        episode_seed = int(self.np_random.integers(2**63)) if seed is None else int(seed)
        name = type(self).__name__
        task = self.sample_task(_stream(episode_seed, _TASK_STREAM), options)
        if not isinstance(task, Task):
            raise ValueError(f"{name}.sample_task must return a Task, not {task!r}")
        tools = _tool_list(name, self.episode_tools(task, _stream(episode_seed, _TOOLS_STREAM)))
        if self._randomization is not None:
            rng = _stream(episode_seed, _RANDOMIZE_STREAM)
            tools, preference = self._randomization.apply(tools, task.preference, rng, other_tools=self.tools)
            task = replace(task, preference=preference)
        rng = _stream(episode_seed, _EPISODE_STREAM, replica)
        self._episode = episode = _Episode(episode_seed, replica, task, _by_name(tools), rng)
        preference = task.preference
        opening = await _result_of(self.opening(task))
        words = preference.text if preference else ""
        observation = f"{opening}\n\n{words}" if words else opening
        episode.messages.append({"role": "user", "content": observation})
        return observation, self._info(
            tools_json=f"[{','.join(tool.spec_json for tool in tools)}]",
            preference_json=(
                canonical_json({"weights": dict(preference.weights), "text": preference.text}) if preference else ""
            ),
            instructions=task.instructions,
        )

    def _checked(self, action: Any) -> _Episode:
        """The episode that a step continues."""
        episode = self._episode
        if episode is None or episode.end_reason:
            raise gym.error.ResetNeeded("call reset() first: there is no episode under way")
        if not isinstance(action, str):
            raise gym.error.InvalidAction(f"an action is the text of a turn, not {type(action).__name__}")
        return episode

    async def _step(self, episode: _Episode, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        turn = parse_turn(action)
        episode.turn += 1
        if not turn.calls and not turn.errors and turn.content:
            episode.messages.append({"role": "assistant", "content": turn.content})
            return await self._say(episode, turn.content)
        content = "\n".join(filter(None, [turn.content, *map(render_call, turn.calls)]))
        episode.messages.append({"role": "assistant", "content": content or action})
        return await self._continue(episode, turn)

    async def _say(self, episode: _Episode, message: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A turn of plain text: the user replies, or it was the final answer."""
        try:
            reply = await _result_of(self.reply(message))
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException:
            self._log_failure("reply", episode.task)
            episode.end_reason = "infra_error"
            return "", 0.0, False, True, self._info(error_type="infra_error", drop=True)
        if reply is None:
            return await self._finish(episode, message, "answered", Reply(""))
        episode.messages.append({"role": "user", "content": reply.text})
        if reply.end:
            return await self._finish(episode, message, "user_ended", reply)
        episode.cost_usd += reply.cost_usd
        episode.latency_s += reply.latency_s
        episode.format_errors_in_a_row = 0
        episode.end_reason = self._limit_reached(episode, ())
        reward = _step_reward(episode.task.preference, reply.cost_usd, reply.latency_s)
        info = self._info(cost_usd=reply.cost_usd, latency_s=reply.latency_s)
        return reply.text[:MAX_TEXT_CHARS], reward, False, bool(episode.end_reason), info

    async def _finish(
        self, episode: _Episode, answer: str, end_reason: str, reply: Reply
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        episode.cost_usd += reply.cost_usd
        episode.latency_s += reply.latency_s
        outcome, error_type = await self._scored(episode, answer, end_reason)
        info = self._info(
            outcome=outcome,
            error_type=error_type,
            drop=bool(error_type),
            cost_usd=reply.cost_usd,
            latency_s=reply.latency_s,
        )
        reward = outcome + _step_reward(episode.task.preference, reply.cost_usd, reply.latency_s)
        return reply.text[:MAX_TEXT_CHARS], reward, True, False, info

    async def _scored(self, episode: _Episode, answer: str, end_reason: str) -> tuple[float, str]:
        """Ends the episode; its outcome, and "infra_error" if that could not be told."""
        episode.end_reason = end_reason
        try:
            return _checked_outcome(await _result_of(self.score(episode.task, answer))), ""
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException:
            self._log_failure("score", episode.task)
            episode.end_reason = "infra_error"
            return 0.0, "infra_error"

    def _log_failure(self, hook: str, task: Task) -> None:
        """The exception being handled, with its traceback the first time, then only at 10, 100, ... times."""
        error = sys.exc_info()[1]
        key = (type(self).__qualname__, hook, type(error).__name__)
        _failures[key] += 1
        times = _failures[key]
        where = f"{type(self).__name__}.{hook}() failed on task {task.id!r}; the episode is marked to be dropped"
        if times == 1:
            logger.exception("%s", where)
        elif str(times).strip("0") == "1":
            logger.error("%s (%d times now): %s: %s", where, times, type(error).__name__, error)

    async def _continue(self, episode: _Episode, turn: ParsedTurn) -> tuple[str, float, bool, bool, dict[str, Any]]:
        records = await self._make_calls(episode, turn.calls)
        format_errors = turn.errors if turn.errors or records else (_EMPTY_TURN,)
        cost_usd, latency_s, num_errors = episode.account(records, len(format_errors))
        error_types = [record.error_type for record in records if record.error_type]
        error_types += [error.kind for error in format_errors]
        ended = self.ended()
        if ended is not None and ended[1]:
            outcome, failure = await self._scored(episode, "", ended[0])
        else:
            outcome, failure = 0.0, ""
            episode.end_reason = ended[0] if ended else self._limit_reached(episode, error_types)
        info = self._info(
            outcome=outcome,
            drop=bool(failure),
            cost_usd=cost_usd,
            latency_s=latency_s,
            num_calls=len(records),
            num_errors=num_errors,
            error_type=failure or (error_types[0] if error_types else ""),
            calls_json=canonical_json([record.as_dict() for record in records]),
        )
        error_text, _ = cap_text("\n".join(f"Error: {e.message}." for e in format_errors), self.max_output_chars)
        observation = results_text([(record.tool, record.text) for record in records], error_text)[:MAX_TEXT_CHARS]
        episode.messages.append({"role": "tool", "content": observation})
        reward = outcome + _step_reward(episode.task.preference, cost_usd, latency_s)
        terminated = ended is not None and ended[1]
        return observation, reward, terminated, bool(episode.end_reason) and not terminated, info

    async def _make_calls(self, episode: _Episode, calls: Sequence[ToolCall]) -> Sequence[CallRecord]:
        """The calls of a turn, made; one record a call."""
        first_ordinal = len(episode.history)
        return await run_calls(
            calls,
            episode.tools,
            lambda index: self._call_context(episode, first_ordinal + index, calls[index].name),
            max_output_chars=self.max_output_chars,
            budget_usd=None if self.budget_usd is None else self.budget_usd - episode.cost_usd,
            state_hash=self.state_hash,
        )

    def _limit_reached(self, episode: _Episode, error_types: Sequence[str]) -> str:
        if "budget" in error_types:
            return "budget"
        limit = self.max_format_errors
        if limit is not None and episode.format_errors_in_a_row >= max(limit, 1):
            return "format_errors"
        return "max_turns" if episode.turn >= self.max_turns else ""

    def _call_context(self, episode: _Episode, ordinal: int, name: str) -> CallContext:
        rng = _stream(episode.seed, _CALL_STREAM, episode.replica, ordinal)
        return CallContext(rng, episode.task, episode.history, tuple(episode.messages), episode.tools[name].price)

    def _info(self, **changed: Any) -> dict[str, Any]:
        episode = self._episode
        assert episode is not None
        return {
            **_EMPTY_INFO,
            "episode_cost_usd": episode.cost_usd,
            "episode_latency_s": episode.latency_s,
            "episode_calls": len(episode.history),
            "episode_errors": episode.num_errors,
            "episode_format_errors": episode.num_format_errors,
            "turn": episode.turn,
            "end_reason": episode.end_reason,
            "task_id": episode.task.id,
            "cost_known": episode.cost_known,
            **changed,
        }


def bare_tool_env(env: gym.Env[Any, Any]) -> ToolEnv | None:
    """The `ToolEnv` within Gymnasium's own wrappers; None if it is none, or something else is wrapped around it.

    For those who step environments as coroutines, which the wrappers know nothing of.
    """
    while isinstance(env, OrderEnforcing | PassiveEnvChecker):
        env = env.env
    return env if isinstance(env, ToolEnv) else None


INFO_TYPES: Mapping[str, type] = {
    "cost_usd": float,
    "latency_s": float,
    "num_calls": int,
    "num_errors": int,
    "error_type": str,
    "calls_json": str,
    "episode_cost_usd": float,
    "episode_latency_s": float,
    "episode_calls": int,
    "episode_errors": int,
    "episode_format_errors": int,
    "turn": int,
    "end_reason": str,
    "outcome": float,
    "drop": bool,
    "task_id": str,
    "tools_json": str,
    "preference_json": str,
    "instructions": str,
    "cost_known": bool,
}
"""The keys of `info` and their types, the same after `reset` and every `step`."""

_EMPTY_INFO = {name: kind() for name, kind in INFO_TYPES.items()} | {"calls_json": "[]"}
_EMPTY_TURN = ParseError("empty_turn", f'the turn is empty: answer, or write {CALL_OPEN}{{"name": ...}}{CALL_CLOSE}')


def _read_randomization(mapping: Mapping[str, Any]) -> "Randomization":
    from orchestra_envs.randomize import read_randomization  # it needs this module's Preference

    return read_randomization(mapping)


_failures: Counter[tuple[str, str, str]] = Counter()


async def _result_of(value: Any) -> Any:
    """What a hook returned, awaited where it is async."""
    if not inspect.isawaitable(value):
        return value
    await on_loop()
    return await asyncio.wait_for(value, HOOK_TIMEOUT_S)


def _tool_list(name: str, tools: Any) -> tuple[Tool, ...]:
    """The tools of an environment class of this name, checked."""
    if isinstance(tools, Tool) or not isinstance(tools, Iterable):
        raise ValueError(f"{name}.tools must be a list of tools, not {tools!r} alone (is a comma missing?)")
    tools = tuple(tools)
    for tool in tools:
        if not isinstance(tool, Tool):
            raise ValueError(f"{name}.tools: {tool!r} is no Tool; decorate the function with @tool")
    _by_name(tools)
    return tools


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise ValueError(f"two tools share a name: {', '.join(tool.name for tool in tools)}")
    return by_name


def results_text(results: Sequence[tuple[str, str]], error_text: str = "") -> str:
    """The observation of a turn from its results, (tool, text) each, and what is said of its format errors.

    One result: its text alone. Several: each under its number and tool, then what could not be read.
    """
    if len(results) == 1 and not error_text:
        return results[0][1]
    texts = [f"[{number}] {tool}:\n{text}" for number, (tool, text) in enumerate(results, start=1)]
    return "\n\n".join([*texts, error_text] if error_text else texts)


def _step_reward(preference: Preference | None, cost_usd: float, latency_s: float) -> float:
    """See the class; minus what the step cost, by the preference's weights."""
    cost_weight = preference.weights["cost"] if preference else 1.0
    latency_weight = preference.weights["latency"] if preference else 1.0
    return 0.0 - cost_weight * REWARD_PER_USD * cost_usd - latency_weight * REWARD_PER_SECOND * latency_s


def _stream(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _checked_outcome(outcome: Any) -> float:
    value = float(outcome)
    if not 0 <= value <= 1:  # NaN too
        raise ValueError(f"score() must return a number in [0, 1], not {outcome!r}")
    return value


def _whole_number(name: str, value: Any, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, not {value!r}")
    return int(value)
