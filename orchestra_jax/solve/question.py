"""A question of the user's own as an environment, and the tools that it is to be answered with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from orchestra_envs.env import Preference, Task, ToolEnv
from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.preference import BALANCED
from orchestra_envs.qa import INSTRUCTIONS
from orchestra_envs.toolbox import tools_from_config
from orchestra_envs.tools import Tool

from orchestra_jax.config import ConfigError, RunConfig
from orchestra_jax.rollout.setup import eval_kwargs, make_env

KEY_VARIABLES = {"expert": "OPENAI_API_KEY", "web_search": "TAVILY_API_KEY"}
"""Where tools of a kind find their key if their entry has no `api_key_env`."""

LIMITS = ("max_turns", "max_format_errors", "budget_usd", "max_output_chars")
"""The arguments of a run's environment that bound a question's episode, too."""


class QuestionEnv(ToolEnv):
    """One question, with the tools for it. Nobody knows the answer: the outcome is 0 and means nothing.

    Args:
        question: what is asked, the same in every episode.
        tools: on offer.
        instructions: standing rules for the policy, see `Task`.
        preference: what the user cares about, in words; they follow the question. "" tells nothing.
        **limits: `max_turns` and the other arguments of `ToolEnv`.

    Raises:
        ValueError: the question is empty, two tools share a name, or a limit is out of range.
    """

    def __init__(
        self, question: str, tools: Sequence[Tool], *, instructions: str = "", preference: str = "", **limits: Any
    ) -> None:
        self.tools = tuple(tools)
        super().__init__(**limits)
        wish = Preference(BALANCED, preference) if preference else None
        self._task = Task(question, id="question", preference=wish, instructions=instructions)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """The question."""
        return self._task

    def score(self, task: Task, answer: str) -> float:
        """0: there is nothing to compare with."""
        return 0.0


def question_env(
    question: str, tools: Sequence[Tool], run: RunConfig | None, *, preference: str = "", **limits: float | None
) -> QuestionEnv:
    """The question in the setting that the run's policy knows: its instructions and limits.

    Args:
      question: the user's.
      tools: on offer.
      run: the policy's; None if it comes from a folder alone.
      preference: see `QuestionEnv`.
      **limits: replace those of the run's environment; None leaves them.

    Raises:
      ConfigError: the question is empty, or a limit is out of range.
    """
    kwargs = eval_kwargs(run) if run else {}
    instructions = str(kwargs.get("instructions", INSTRUCTIONS)) if run and _is_qa(run) else ""
    given = {name: value for name, value in limits.items() if value is not None}
    known = {name: kwargs[name] for name in LIMITS if name in kwargs}
    try:
        return QuestionEnv(question, tools, instructions=instructions, preference=preference, **(known | given))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def tools_of_file(file: str | Path) -> tuple[Tool, ...]:
    """The tools of a YAML file, a list of entries as `orchestra_envs.toolbox.tools_from_config` reads them.

    Raises:
      ConfigError: the file cannot be read, an entry makes no sense, or a key is not set.
    """
    try:
        entries = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--tools {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tools {file} is not valid YAML: {error}") from None
    return _made(entries, str(file))


def tools_of_run(run: RunConfig) -> tuple[Tool, ...]:
    """The tools of a run's environment, as far as they can work on a question that is none of its tasks.

    Entries under `env.kwargs.tools` can; of another environment those that it offers for every task alike, unless a
    simulated one reads the task, of which it wants to know more than a question.

    Raises:
      ConfigError: they cannot, or cannot be made; says what to do instead.
    """
    entries = eval_kwargs(run).get("tools")
    if isinstance(entries, list) and entries and all(isinstance(entry, Mapping) for entry in entries):
        return _made(entries, "env.kwargs.tools")
    env = make_env(run, eval_kwargs(run))
    try:
        tools, reason = _free_tools(env.unwrapped)
    finally:
        env.close()
    if reason:
        raise ConfigError(
            f"{run.env.id} {reason}, so they cannot work on a question of yours: give others with --tools FILE, or "
            "play one of its own tasks with --task SEED"
        )
    return tools


def check_keys(kwargs: Mapping[str, Any], where: str) -> None:
    """Checks that the keys of the tools among an environment's arguments are set.

    Raises:
      ConfigError: one is not.
    """
    entries = kwargs.get("tools")
    if isinstance(entries, list):
        _check_keys(entries, where)


def _made(entries: Any, where: str) -> tuple[Tool, ...]:
    if isinstance(entries, list):
        _check_keys(entries, where)  # first, for making a tool warns of its key
    try:
        return tools_from_config(entries, where=where)
    except (ValueError, ImportError, OSError, ToolUnavailableError) as error:
        raise ConfigError(str(error)) from error


def _check_keys(entries: Sequence[Any], where: str) -> None:
    for index, entry in enumerate(entries):
        for variable in _key_variables(entry):
            if not os.environ.get(variable, "").strip():
                raise ConfigError(
                    f"{where}[{index}]: the environment variable {variable} is not set; it holds the key of "
                    f"{entry.get('name') or entry['kind']} (api_key_env names another one)"
                )


def _key_variables(entry: Any) -> Iterator[str]:
    """The environment variable that an entry's tool takes its key from, if any."""
    if isinstance(entry, Mapping) and entry.get("kind") in KEY_VARIABLES:
        variable = entry.get("api_key_env", KEY_VARIABLES[entry["kind"]])
        if isinstance(variable, str):
            yield variable


def _free_tools(env: Any) -> tuple[tuple[Tool, ...], str]:
    """An environment's tools, and why they work on its own tasks alone ("" if they work on any)."""
    if not isinstance(env, ToolEnv):
        return (), "tells no tools"
    if type(env).episode_tools is not ToolEnv.episode_tools:
        return (), "makes its tools for each of its tasks"
    bound = [tool.name for tool in env.tools if tool.source == "simulated" and tool._context_argument]
    if bound:
        return (), f"has tools that read its tasks ({', '.join(bound)})"
    return tuple(env.tools), ""


def _is_qa(run: RunConfig) -> bool:
    return run.env.id.rpartition(":")[2] == "orchestra/QA-v0"
