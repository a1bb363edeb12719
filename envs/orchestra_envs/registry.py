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
import re
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

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
    readable JSON in it, sane costs, malformed turns survived, every tool callable with wrong arguments, a `score` that
    scores, demonstrations that can be played, equal episodes for equal seeds (also after `reset()` without one, and
    with other instances in between), the same task for every replica of a seed, a spec that can be pickled, `close`
    twice. Tools with the source "live" are never called. See `orchestra_envs.conformance`.

    Raises:
        EnvironmentNotFoundError, ValueError: as `make`.
    """
    from orchestra_envs.conformance import examine  # it needs `make`

    return examine(env_id, **kwargs).problems


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
