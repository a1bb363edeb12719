"""Finding environments by name, plug-ins of other packages included.

Gymnasium no longer loads plug-ins by entry point. A package that declares::

    [project.entry-points."orchestra.envs"]
    my_package = "my_package.envs"

is imported (its module calls `gymnasium.register`) when a name is asked for that is not known yet.
"""

import difflib
import functools
import importlib
import importlib.metadata
import json
import math
import pickle
import re
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.utils.env_checker import check_env

from orchestra_envs.env import INFO_TYPES
from orchestra_envs.parse import ToolCall, render_call

_WRONG_ARGUMENT = re.compile(r"unexpected keyword argument '\w+'|missing \d+ required .*?argument.*?'(?= was raised|$)")
PLUGIN_GROUP = "orchestra.envs"


class EnvironmentNotFoundError(ValueError):
    """No environment of that name can be had; the message says what there is and which plug-ins failed."""


@functools.cache
def load_plugins() -> dict[str, str]:
    """Import every plug-in of the group "orchestra.envs", once; returns the broken ones: name -> what was raised."""
    broken = {}
    for entry_point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            entry_point.load()
        except Exception as error:  # whatever somebody else's package raises must not hide the others
            broken[f"{entry_point.name} ({entry_point.value})"] = f"{type(error).__name__}: {error}"
    return broken


def list_envs() -> list[str]:
    """The names of all environments with a namespace that are not Gymnasium's own, plug-ins included, sorted."""
    load_plugins()
    return sorted(
        env_id
        for env_id, spec in gym.registry.items()
        if spec.namespace and not str(spec.entry_point).startswith("gymnasium.")
    )


def make(env_id: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make an environment by name, such as "orchestra/Market-v0" or "module:namespace/Env-v0".

    Like `gymnasium.make`, and plug-ins are imported if the name is not known without them.

    Raises:
        EnvironmentNotFoundError: no such environment, or its module cannot be imported.
        ValueError: the environment does not take one of the keyword arguments.
    """
    spec = _find(env_id)
    try:
        return gym.make(spec, **kwargs)
    except TypeError as error:
        if found := _WRONG_ARGUMENT.search(str(error)):
            raise ValueError(f"{env_id}: {found[0]}") from error
        raise


def check(env_id: str, **kwargs: Any) -> list[str]:
    """What is wrong with an environment, one sentence each; an empty list if nothing is.

    Gymnasium's own checker (its warnings count), and the contract of `ToolEnv`: the keys and types of `info`,
    readable JSON in it, sane costs, malformed turns survived, every tool callable with wrong arguments, equal
    episodes for equal seeds (also after `reset()` without one, and with other instances in between), the same task
    for every replica of a seed, a spec that can be pickled, `close` twice.

    Raises:
        EnvironmentNotFoundError, ValueError: as `make`.
    """
    env = _bare(env_id, kwargs)
    problems = list(_gymnasium_problems(env))
    for title, checks in (
        ("info", _info_problems),
        ("faults", _fault_problems),
        ("determinism", _determinism_problems),
    ):
        try:
            problems += checks(env_id, kwargs)
        except Exception as error:
            problems.append(f"{title}: {type(error).__name__}: {error}")
    try:
        pickle.dumps(env.spec)
    except Exception as error:
        problems.append(f"the spec cannot be pickled: {error}")
    env.close()
    env.close()
    return problems


def _find(env_id: str) -> EnvSpec:
    if not isinstance(env_id, str) or not env_id:
        raise EnvironmentNotFoundError(f"an environment is named by a string, not {env_id!r}")
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise EnvironmentNotFoundError(f"{env_id}: cannot import {module}: {_short(error)}") from error
    try:
        spec = gym.spec(name)
    except gym.error.Error:
        broken = load_plugins()
        try:
            spec = gym.spec(name)
        except gym.error.Error as error:
            raise EnvironmentNotFoundError(_not_found(name, broken)) from error
    if isinstance(spec.entry_point, str):
        try:
            load_env_creator(spec.entry_point)
        except Exception as error:
            raise EnvironmentNotFoundError(f"{env_id}: cannot load {spec.entry_point}: {_short(error)}") from error
    return spec


def _not_found(name: str, broken: dict[str, str]) -> str:
    known = list_envs()
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    message = f"there is no environment {name!r}; "
    message += f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known) or 'none'}"
    for plugin, reason in broken.items():
        message += f" (plug-in {plugin} could not be loaded: {reason})"
    return message


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _bare(env_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """The environment without Gymnasium's wrappers, whose checks would warn about what is reported here."""
    return make(env_id, **kwargs).unwrapped


def _gymnasium_problems(env: gym.Env[Any, Any]) -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env, skip_render_check=True)
        except Exception as error:
            yield f"check_env: {_short(error)}"
    yield from (f"check_env: {warning.message}" for warning in caught)


def _info_problems(env_id: str, kwargs: dict[str, Any]) -> Iterator[str]:
    env = _bare(env_id, kwargs)
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


def _fault_problems(env_id: str, kwargs: dict[str, Any]) -> Iterator[str]:
    env = _bare(env_id, kwargs)
    _, info = env.reset(seed=0)
    tool_names = [spec["function"]["name"] for spec in json.loads(info.get("tools_json") or "[]")]
    bad_calls = [ToolCall(name, {"no such argument": 1}) for name in [*tool_names, "no such tool"]]
    env.reset(seed=0)
    env.step("\ud800")  # no text, but to be survived; in a conversation it is a message like any other
    for action in ["", "<tool_call>{", "<think>", "</tool_call>", *map(render_call, bad_calls)]:
        env.reset(seed=0)
        _, _, _, _, info = env.step(action)
        if not info.get("num_errors") and not info.get("end_reason"):
            yield f"the turn {action!r} counts as no error"
    env.close()


def _determinism_problems(env_id: str, kwargs: dict[str, Any]) -> Iterator[str]:
    first, second, other = (_bare(env_id, kwargs) for _ in range(3))
    for seed in (3, None, None):
        one = first.reset(seed=seed)
        other.reset()
        if one != second.reset(seed=seed):
            yield "reset: two instances with equal seeds differ" if seed else "reset() after reset(seed): they differ"
        for name in (spec["function"]["name"] for spec in json.loads(one[1].get("tools_json") or "[]")):
            action = render_call(ToolCall(name, {}))
            step = first.step(action)
            if step != second.step(action):
                yield f"step: two instances with equal seeds differ after a call of {name}"
            if first.np_random.bit_generator.state != second.np_random.bit_generator.state:
                yield "np_random of two instances with equal seeds differs after a step"
            if step[2] or step[3]:  # this many failed calls may end an episode
                break
    if first.reset(seed=4, options={"replica": 1}) != second.reset(seed=4, options={"replica": 2}):
        yield "replicas of one seed begin differently"
    for env in (first, second, other):
        env.close()
