"""`orchestra envs`: the environments and tools that are installed, and whether an environment keeps the rules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import yaml
from orchestra_envs import EnvironmentNotFoundError, list_envs, load_plugins
from orchestra_envs.conformance import examine
from orchestra_envs.toolbox import list_installed_tools

from orchestra_jax.config import ConfigError


def list_environments() -> None:
    """Prints each environment and the code behind it, and the tools that packages announce.

    Plug-ins that cannot be loaded go to standard error.
    """
    names = list_envs()
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{name:{width}}  {_origin(name)}")
    for plugin, reason in load_plugins().items():
        print(f"plug-in {plugin} could not be loaded: {reason}", file=sys.stderr)
    for tool in list_installed_tools():
        if tool.error:
            print(f"tool plug-in {tool.name} ({tool.target}) could not be loaded: {tool.error}", file=sys.stderr)
        else:
            print(f"tool {tool.name}  {tool.target} ({tool.package})")


def check_environment(env_id: str, arguments: Sequence[str] = ()) -> None:
    """Checks an environment against Gymnasium's rules and ours; prints what is wrong, and what was not checked.

    Args:
      env_id: its name.
      arguments: what to make it with, as "key=value" with a value in YAML.

    Raises:
      ConfigError: there is no such environment, it cannot be made, or it fails the check.
    """
    kwargs = dict(map(_argument, arguments))
    try:
        findings = examine(env_id, **kwargs)
    except EnvironmentNotFoundError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # whatever the environment's own code raises
        raise ConfigError(f"{env_id} cannot be made: {type(error).__name__}: {error}") from error
    problems = findings.problems
    for problem in problems:
        print(f"- {problem}")
    for note in findings.notes:
        print(f"({note})")
    if problems:
        raise ConfigError(f"{env_id} fails the check ({len(problems)} problem{'s' * (len(problems) > 1)})")
    print(f"{env_id} passes the check")


def _argument(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not (key.isidentifier() and separator):
        raise ConfigError(f"{text!r}: an environment's argument is written key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is no YAML: {error}") from None


def _origin(env_id: str) -> str:
    entry_point = gym.spec(env_id).entry_point
    if entry_point is None or isinstance(entry_point, str):
        return entry_point or ""
    return f"{entry_point.__module__}:{getattr(entry_point, '__qualname__', entry_point)}"
