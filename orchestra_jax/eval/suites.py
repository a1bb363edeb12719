"""Suites: named sets of tasks to evaluate on, from YAML files and a few that need no file.

suites:
  market:
    env: {id: orchestra/Market-v0, kwargs: {split: test}}
    num_tasks: 512
  frames:
    env:
      id: orchestra/QA-v0
      kwargs: {path: frames.tsv, tools: [{kind: web_search}], judge: {model: gpt-5-mini}}
    num_tasks: all
    rollout: {max_tokens: 16000}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import yaml
from pydantic import Field, ValidationError

from orchestra_jax.config import ConfigError, EnvConfig, EvalConfig, RolloutConfig, RunConfig, Section
from orchestra_jax.rollout.setup import make_env

DEFAULT_SUITE = "held_out"
"""What the tasks of a config's own `env` and `eval` are called."""


class SuiteEnv(Section):
    """The environment of a suite."""

    id: str
    """As in a config's `env.id`."""
    kwargs: dict[str, Any] = Field({})
    """Its arguments."""


class SuiteSection(Section):
    """A suite as a file describes it."""

    env: SuiteEnv
    """Where the tasks come from."""
    num_tasks: int | Literal["all"] = 256
    """How many; `all` takes every task of an environment that lists them (QA files, tau2). Where it lists them, none is
    taken twice."""
    seed: int = Field(1_000_003, ge=0)
    """Which tasks, and the luck of their tools."""
    rollout: dict[str, Any] = Field({})
    """Laid over the config's `rollout`: longer prompts need a larger max_tokens."""


BUILT_IN = {
    "market": SuiteSection(env=SuiteEnv(id="orchestra/Market-v0", kwargs={"split": "test"}), num_tasks=512),
    "service": SuiteSection(env=SuiteEnv(id="orchestra/Service-v0", kwargs={"split": "test"}), num_tasks=128),
}
"""Suites that can be named without a file. They run in simulation."""


@dataclass(frozen=True)
class Suite:
    """Tasks to evaluate on.

    `config` has the suite's environment (in `env.eval_kwargs`) and limits. `num_tasks` None: all that there are.
    `is_listed`: taken from the environment's own list of tasks where it has one, none of them twice.
    """

    name: str
    config: RunConfig
    num_tasks: int | None
    seed: int
    is_listed: bool

    def spec(self) -> dict[str, Any]:
        """What decides the suite's episodes, as plain JSON."""
        env = self.config.env
        return {
            "env": {"id": env.id, "kwargs": env.kwargs | env.eval_kwargs},
            "num_tasks": self.num_tasks,
            "seed": self.seed,
            "rollout": self.config.rollout.model_dump(mode="json", exclude={"tasks_per_step", "group_size", "rows"}),
        }


@dataclass(frozen=True)
class EvalTask:
    """The number of a task within its suite, the seed of its episodes, and its id where the environment lists ids."""

    number: int
    seed: int
    task_id: str | None = None


def own_suite(config: RunConfig) -> Suite:
    """The tasks that a config's `env` and `eval` describe."""
    settings = config.eval or EvalConfig()
    return Suite(DEFAULT_SUITE, config, settings.num_tasks, settings.seed, is_listed=False)


def read_suites(texts: Sequence[str], config: RunConfig) -> list[Suite]:
    """The suites that `--suite` names: files, names in them, and built-in ones. Files alone mean all that they hold.

    Raises:
      ConfigError: no such suite or file, or a file is wrong.
    """
    files = [text for text in texts if text.endswith((".yaml", ".yml"))]
    known: dict[str, SuiteSection] = {}
    for file in files:
        for name, section in _read_file(Path(file)).items():
            if name in known:
                raise ConfigError(f"--suite {file}: there is another suite called {name!r}; rename one")
            known[name] = section
    names = [text for text in texts if text not in files] or list(known)
    known = {**BUILT_IN, **known}
    for name in names:
        if name not in known:
            raise ConfigError(f"--suite {name}: no such suite ({', '.join(known)}), and no YAML file")
    return [_suite(name, known[name], config) for name in dict.fromkeys(names)]


def make_suites(entries: Any, config: RunConfig, where: str) -> list[Suite]:
    """The suites that a mapping of names describes, as under `suites` in a file.

    Raises:
      ConfigError: one is wrong; the message starts with `where`.
    """
    return [_suite(name, section, config) for name, section in _sections(entries, where).items()]


def suite_tasks(suite: Suite) -> list[EvalTask]:
    """The suite's tasks. They depend on nothing but the suite (and on what the environment lists).

    Raises:
      ConfigError: the environment cannot be made, or does not list (so many) tasks.
    """
    if suite.is_listed:
        env = make_env(suite.config, suite.config.env.kwargs | suite.config.env.eval_kwargs)
        try:
            ids = _listed_ids(env)
        finally:
            env.close()
        if ids is not None:
            return _listed_tasks(suite, ids)
    if suite.num_tasks is None:
        raise ConfigError(
            f"suite {suite.name}: {suite.config.env.id} lists no tasks, so there is no `all` of them: give num_tasks"
        )
    return [EvalTask(number, seed) for number, seed in enumerate(task_seeds(suite.seed, suite.num_tasks))]


def task_seeds(seed: int, num_tasks: int) -> list[int]:
    """Seeds of held-out tasks. They depend on nothing but `seed`; training draws below 2^30, this above."""
    return np.random.default_rng(seed).integers(2**30, 2**31, num_tasks).tolist()


def _listed_ids(env: gym.Env) -> list[str] | None:
    listed = getattr(env.unwrapped, "task_ids", None)
    ids: Iterable[str] | None = listed() if callable(listed) else None
    return None if ids is None else list(ids)


def _listed_tasks(suite: Suite, ids: list[str]) -> list[EvalTask]:
    wanted = len(ids) if suite.num_tasks is None else suite.num_tasks
    if wanted > len(ids):
        raise ConfigError(f"suite {suite.name}: num_tasks is {wanted}, {suite.config.env.id} has {len(ids)} tasks")
    chosen = range(len(ids))
    if wanted < len(ids):
        chosen = np.sort(np.random.default_rng([suite.seed, 1]).permutation(len(ids))[:wanted]).tolist()
    seeds = task_seeds(suite.seed, wanted)
    return [EvalTask(number, seeds[number], ids[index]) for number, index in enumerate(chosen)]


def _suite(name: str, section: SuiteSection, config: RunConfig) -> Suite:
    try:
        rollout = RolloutConfig.model_validate({**config.rollout.model_dump(), **section.rollout})
        # Rows of the trainer play no part, but must be as long as a trajectory.
        train = config.train.model_copy(update={"row_tokens": max(config.row_tokens, rollout.max_tokens)})
        env = EnvConfig(id=section.env.id, eval_kwargs=section.env.kwargs)
        settings = config.eval or EvalConfig()
        changed = RunConfig.model_validate(
            {**dict(config), "env": env, "rollout": rollout, "train": train, "eval": settings}
        )
    except ValidationError as error:
        raise ConfigError(f"suite {name}: {_explained(error)}") from None
    num_tasks = None if section.num_tasks == "all" else section.num_tasks
    return Suite(name, changed, num_tasks, section.seed, is_listed=True)


def _read_file(file: Path) -> dict[str, SuiteSection]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--suite {file}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--suite {file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping) or list(content) != ["suites"]:
        raise ConfigError(f"--suite {file} must hold one key, `suites`, with a mapping of names to suites")
    return _sections(content["suites"], f"--suite {file}")


def _sections(entries: Any, where: str) -> dict[str, SuiteSection]:
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(f"{where}: `suites` must be a mapping of names to suites")
    sections = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not name or "/" in name or ":" in name:
            raise ConfigError(f"{where}: {name!r} cannot be the name of a suite: text without / and :")
        try:
            sections[name] = SuiteSection.model_validate(entry)
        except ValidationError as error:
            raise ConfigError(f"{where}: {name}: {_explained(error)}") from None
        number = sections[name].num_tasks
        if isinstance(number, int) and number < 1:
            raise ConfigError(f"{where}: {name}: num_tasks must be at least 1, not {number}")
    return sections


def _explained(error: ValidationError) -> str:
    problems = ((".".join(map(str, e["loc"])) or "it", e["msg"].removeprefix("Value error, ")) for e in error.errors())
    return "; ".join(f"{where}: {message}" for where, message in problems)
