"""Whether an environment keeps the rules: Gymnasium's, and those of `ToolEnv`.

    from orchestra_envs.conformance import examine
    findings = examine("orchestra/Market-v0", split="test")
    findings.problems    # what is wrong, one sentence each
    findings.notes       # what was not looked at, and why

Or `orchestra envs orchestra/Market-v0 split=test`. Nothing is spent on tools: those with the source "live" are not
called, and any other call is given up after `CALL_TIMEOUT_S`. The judge and the user of an environment are asked,
though, for an environment whose judge always fails is of no use.

An environment of text that says nothing of tools (no "tools_json" and no "calls_json" in its `info`) is a plain
Gymnasium environment, and is checked by Gymnasium's rules alone.
"""

import inspect
import json
import logging
import math
import pickle
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env

from orchestra_envs.env import INFO_TYPES, Reply, ToolEnv
from orchestra_envs.parse import ToolCall, parse_turn, render_call
from orchestra_envs.registry import make
from orchestra_envs.tools import Tool

CALL_TIMEOUT_S = 5.0
"""How long the check waits for a tool; one that takes half of it is not called again."""

ANSWERS = ("Answer: 1", "I do not know.", "Answer: Oslo")
"""Final answers that `score` is tried with, one a seed."""

MAX_MESSAGES = 4  # to a user who replies
NO_ARGUMENT = {"no such argument": 1}

Env = gym.Env[Any, Any]


@dataclass(frozen=True)
class Findings:
    """What is wrong (`problems`), and what was not looked at (`notes`); one sentence each."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(env_id: str, **kwargs: Any) -> Findings:
    """Checks the environment that `make(env_id, **kwargs)` gives; see the module's text and `orchestra_envs.check`.

    Raises:
        EnvironmentNotFoundError, ValueError: as `make`.
    """
    findings = Findings()
    new_env = _Maker(env_id, kwargs)
    env = new_env()
    with _quiet():
        findings.problems.extend(_gymnasium_problems(env))
        checks: dict[str, Callable[[_Maker, list[str]], Iterator[str]]]
        if _is_plain(new_env()):
            findings.notes.append("a plain Gymnasium environment: checked by Gymnasium's rules")
            checks = {"spaces": _space_problems, "determinism": _plain_determinism_problems}
        else:
            checks = {
                "info": _info_problems,
                "faults": _fault_problems,
                "score": _score_problems,
                "demonstrate": _demonstration_problems,
                "determinism": _determinism_problems,
            }
        for title, problems_of in checks.items():
            try:
                findings.problems.extend(problems_of(new_env, findings.notes))
            except Exception as error:
                findings.problems.append(f"{title}: {_short(error)}")
        findings.problems.extend(_closing_problems(env))
    findings.notes[:] = dict.fromkeys(findings.notes)
    return findings


@dataclass(frozen=True)
class _Maker:
    """Makes the environment without Gymnasium's wrappers, whose checks would warn about what is reported here."""

    env_id: str
    kwargs: dict[str, Any]

    def __call__(self) -> Env:
        env = make(self.env_id, **self.kwargs).unwrapped
        if isinstance(env, ToolEnv):
            _limit_calls(env)
        return env


def _limit_calls(env: ToolEnv) -> None:
    """No tool of this instance may keep the check waiting."""
    episode_tools = env.episode_tools

    def limited(*arguments: Any) -> Sequence[Tool]:
        tools = episode_tools(*arguments)
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Tool) for tool in tools):
            return tools  # the environment says what is wrong with it
        return [replace(tool, timeout_s=min(tool.timeout_s, CALL_TIMEOUT_S)) for tool in tools]

    env.episode_tools = limited  # type: ignore[method-assign, assignment]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of failing hooks: they are reported here."""
    logger = logging.getLogger("orchestra_envs.env")

    def nothing(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_plain(env: Env) -> bool:
    if isinstance(env, ToolEnv):
        return False
    try:
        info = env.reset(seed=0)[1]
    except Exception:  # Gymnasium's checker has said it
        return True
    finally:
        env.close()
    return not {"tools_json", "calls_json"} & set(info)


def _is_deterministic(env: Env) -> bool:
    return env.spec is None or not env.spec.nondeterministic


def _tools(env: Env, info: dict[str, Any]) -> dict[str, Tool | None]:
    """The tools of the episode just begun, by name; None where no more than its name is known."""
    if isinstance(env, ToolEnv):
        return {tool.name: tool for tool in env.offered_tools}
    return {spec["function"]["name"]: None for spec in json.loads(info.get("tools_json") or "[]")}


def _is_live(tool: Tool | None) -> bool:
    return tool is not None and tool.source == "live"


def _is_measured(tool: Tool | None) -> bool:
    return tool is not None and tool.clock == "measured"


# --- Gymnasium's rules -------------------------------------------------------------------------------------------


def _gymnasium_problems(env: Env) -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env, skip_render_check=True)
        except Exception as error:
            yield f"check_env: {_short(error)}"
    yield from (f"check_env: {warning.message}" for warning in caught)


def _space_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    env = new_env()
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gym.spaces.Text):
            yield f"{name} is {space}, no text: orchestra_envs.UnicodeText() takes every text"
    env.close()


def _plain_determinism_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    first, second = new_env(), new_env()
    if not _is_deterministic(first):
        notes.append("registered as nondeterministic: episodes of equal seeds were not compared")
        return
    if not _equal(first.reset(seed=3), second.reset(seed=3)):
        yield "reset: two instances with equal seeds differ"
    else:
        first.action_space.seed(0)
        action = ANSWERS[0] if first.action_space.contains(ANSWERS[0]) else first.action_space.sample()
        if not _equal(first.step(action), second.step(action)):
            yield "step: two instances with equal seeds differ"
    for env in (first, second):
        env.close()


def _equal(one: Any, other: Any) -> bool:
    """`==` also where there are arrays within."""
    try:
        np.testing.assert_equal(one, other)
    except AssertionError:
        return False
    return True


def _closing_problems(env: Env) -> Iterator[str]:
    try:
        pickle.dumps(env.spec)
    except Exception as error:
        yield f"the spec cannot be pickled: {error}"
    for time_ in ("", " a second time"):
        try:
            env.close()
        except Exception as error:
            yield f"close(){time_}: {_short(error)}"


# --- The contract of ToolEnv -------------------------------------------------------------------------------------


def _info_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    env = new_env()
    infos = {"reset": env.reset(seed=0)[1], "step": env.step("<tool_call>{}</tool_call>")[4]}
    for when, info in infos.items():
        for key, kind in INFO_TYPES.items():
            if key not in info:
                yield f"info of {when} has no {key!r}"
            elif type(info[key]) is not kind:
                yield f"info[{key!r}] of {when} is {type(info[key]).__name__}, not {kind.__name__}"
            elif key.endswith("_json") and info[key]:
                json.loads(info[key])
            elif kind is float and not (math.isfinite(info[key]) and info[key] >= 0):
                yield f"info[{key!r}] of {when} is {info[key]}"
    env.close()


def _fault_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    env = new_env()
    tools = _tools(env, env.reset(seed=0)[1])
    if live := [name for name, tool in tools.items() if _is_live(tool)]:
        notes.append(f"not called, being live: {', '.join(live)}")
    refusing = [
        name
        for name, tool in tools.items()
        if not _is_live(tool) and (tool is None or tool.argument_error(NO_ARGUMENT))
    ]
    bad_calls = [ToolCall(name, NO_ARGUMENT) for name in [*refusing, "no such tool"]]
    env.reset(seed=0)
    env.step("\ud800")  # no text, but to be survived; in a conversation it is a message like any other
    for action in ["", "<tool_call>{", "<think>", "</tool_call>", *map(render_call, bad_calls)]:
        env.reset(seed=0)
        _, _, _, _, info = env.step(action)
        if not info.get("num_errors") and not info.get("end_reason"):
            yield f"the turn {action!r} counts as no error"
    env.close()


def _score_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    """Plain answers to a few tasks; stops at the first failure, for a judge may be slow to fail."""
    env = new_env()
    failures = _watch(env)
    num_ended = 0
    for seed, answer in enumerate(ANSWERS):
        try:
            end_reason = _say(env, seed, answer)
        except Exception as error:
            end_reason = "infra_error"
            failures.append(f"step: {_short(error)}")
        num_ended += bool(end_reason)
        if end_reason == "infra_error":
            yield f"the answer {answer!r} (seed {seed}) ends in infra_error, as {failures[0] if failures else 'told'}"
            break
    if not num_ended:
        notes.append(f"score was not tried with plain answers: no episode ended within {MAX_MESSAGES} messages")
    env.close()


def _say(env: Env, seed: int, answer: str) -> str:
    """Gives one answer until the episode ends; its end_reason, "" if it did not end."""
    env.reset(seed=seed)
    for _ in range(MAX_MESSAGES):
        _, _, terminated, truncated, info = env.step(answer)
        if terminated or truncated:
            return str(info.get("end_reason") or "ended")
    return ""


def _watch(env: Env) -> list[str]:
    """The list that what goes wrong in `score` and `reply` of this instance will be written to."""
    failures: list[str] = []
    if isinstance(env, ToolEnv):
        for name, fault in (("score", _score_fault), ("reply", _reply_fault)):
            setattr(env, name, _watched(name, getattr(env, name), fault, failures))
    return failures


def _watched(
    name: str, hook: Callable[..., Any], fault: Callable[[Any], str], failures: list[str]
) -> Callable[..., Any]:
    def looked_at(value: Any) -> Any:
        if what := fault(value):
            failures.append(what)
        return value

    async def awaited(value: Awaitable[Any]) -> Any:
        try:
            return looked_at(await value)
        except Exception as error:
            failures.append(f"{name} raised {_short(error)}")
            raise

    def call(*arguments: Any) -> Any:
        try:
            value = hook(*arguments)
        except Exception as error:
            failures.append(f"{name} raised {_short(error)}")
            raise
        return awaited(value) if inspect.isawaitable(value) else looked_at(value)

    return call


def _score_fault(value: Any) -> str:
    try:
        is_share = 0.0 <= float(value) <= 1.0
    except (TypeError, ValueError):
        is_share = False
    return "" if is_share else f"score returned {value!r}, not a number in [0, 1]"


def _reply_fault(value: Any) -> str:
    return "" if value is None or isinstance(value, Reply) else f"reply returned {value!r}, not a Reply or None"


def _demonstration_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    env = new_env()
    if not isinstance(env, ToolEnv) or type(env).demonstrate is ToolEnv.demonstrate:
        return
    failures = _watch(env)
    for seed in range(len(ANSWERS)):
        env.reset(seed=seed)
        try:
            turns = env.demonstrate(env.task, np.random.default_rng(seed))
        except NotImplementedError:
            return
        if isinstance(turns, str) or not isinstance(turns, Iterable):
            yield f"demonstrate must return a list of turns (strings), not {_clipped(turns)}"
            return
        turns = list(turns)
        if wrong := [turn for turn in turns if not isinstance(turn, str)]:
            yield f"demonstrate must return strings; one of its turns is {_clipped(wrong[0])}"
            return
        called = {call.name for turn in turns for call in parse_turn(turn).calls}
        if live := sorted(called & {tool.name for tool in env.offered_tools if _is_live(tool)}):
            notes.append(f"a demonstration was not played, for it calls {', '.join(live)}")
            continue
        problem, has_ended = _played(env, turns, failures)
        goes_on = f"after all of its turns ({len(turns)}) the episode goes on"
        if problem or (not has_ended and _is_deterministic(env)):
            yield f"demonstrate (seed {seed}): {problem or goes_on}"
            return
        if not has_ended:  # a user who is a language model may talk on
            notes.append(f"demonstrate (seed {seed}): {goes_on}")
    env.close()


def _played(env: Env, turns: Sequence[str], failures: Sequence[str]) -> tuple[str, bool]:
    """What goes wrong when these turns are taken ("" if nothing does), and whether they end the episode."""
    for number, turn in enumerate(turns, start=1):
        _, _, terminated, truncated, info = env.step(turn)
        if info["error_type"] in ("unknown_tool", "invalid_arguments") or info["episode_format_errors"]:
            return f"turn {number} is in error ({info['error_type']}): {_clipped(turn)}", False
        if info["end_reason"] == "infra_error":
            return f"turn {number} ends in infra_error, as {failures[0] if failures else 'told'}", True
        if terminated or truncated:
            return "", True
    return "", False


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:117]}..."


def _determinism_problems(new_env: _Maker, notes: list[str]) -> Iterator[str]:
    first, second, other = (new_env() for _ in range(3))
    is_deterministic = _is_deterministic(first)
    if not is_deterministic:
        notes.append("registered as nondeterministic: only the tasks of equal seeds were compared, not their episodes")
    slow: set[str] = set()
    for seed in (3, None, None):
        one = first.reset(seed=seed)
        other.reset()
        if _begun(one, is_deterministic) != _begun(second.reset(seed=seed), is_deterministic):
            yield "reset: two instances with equal seeds differ" if seed else "reset() after reset(seed): they differ"
        if is_deterministic:
            yield from _call_problems(first, second, _tools(first, one[1]), slow, notes)
    replicas = [env.reset(seed=4, options={"replica": k}) for k, env in ((1, first), (2, second))]
    if _begun(replicas[0], is_deterministic) != _begun(replicas[1], is_deterministic):
        yield "replicas of one seed begin differently"
    for env in (first, second, other):
        env.close()


def _begun(result: tuple[Any, dict[str, Any]], is_deterministic: bool) -> Any:
    """What is to be equal of a reset: all of it, or what no simulated user has a part in."""
    info = result[1]
    return result if is_deterministic else [info.get(key) for key in ("task_id", "tools_json", "preference_json")]


def _call_problems(
    first: Env, second: Env, tools: dict[str, Tool | None], slow: set[str], notes: list[str]
) -> Iterator[str]:
    """Calls every tool that may be called in both, and compares; those that were slow are entered and left out."""
    if measured := [name for name, tool in tools.items() if _is_measured(tool) and not _is_live(tool)]:
        notes.append(f"called by no comparison of equal seeds, for their clock is measured: {', '.join(measured)}")
    for name, tool in tools.items():
        if name in slow or _is_live(tool) or _is_measured(tool):
            continue
        action = render_call(ToolCall(name, {}))
        start_s = time.monotonic()
        step = first.step(action)
        if (waited_s := time.monotonic() - start_s) > CALL_TIMEOUT_S / 2:
            slow.add(name)
            notes.append(f"{name} was called once only, for that took {waited_s:.1f} s")
            break  # the two have not gone the same way any more
        if step != second.step(action):
            yield f"step: two instances with equal seeds differ after a call of {name}"
        if first.np_random.bit_generator.state != second.np_random.bit_generator.state:
            yield "np_random of two instances with equal seeds differs after a step"
        if step[2] or step[3]:  # this many failed calls may end an episode
            break
