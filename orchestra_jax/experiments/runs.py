"""The training runs that the experiments share, as `configs/experiments/runs.yaml` lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestra_jax.config import ConfigError, RunConfig, load_config

RUNS_FILE = "runs.yaml"


@dataclass(frozen=True)
class TrainingRun:
    """One run: a warm start alone (`start` is None), or reinforcement learning from the warm start of another run."""

    name: str
    title: str
    start: str | None
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.output_dir)

    @property
    def policy(self) -> Path:
        """The Hugging Face folder that it ends with."""
        return self.folder / ("warm_start" if self.start is None else "model")

    @property
    def is_finished(self) -> bool:
        """Whether that folder is there."""
        return self.policy.is_dir()


def read_runs(folder: Path, runs_dir: Path, overrides: Sequence[str] = ()) -> dict[str, TrainingRun]:
    """The runs of `folder`'s runs.yaml by name, each after the one that it starts from.

    Args:
      folder: where runs.yaml and the config that it names as `base` lie.
      runs_dir: each run gets the folder of its name there.
      overrides: `key.path=value`, laid over every run's config.

    Raises:
      ConfigError: the file or a config is wrong; names the run.
    """
    file = folder / RUNS_FILE
    content = read_yaml(file)
    check_keys(content, {"base", "runs"}, str(file))
    entries = content.get("runs")
    if not isinstance(entries, Mapping) or not entries or not isinstance(content.get("base"), str):
        raise ConfigError(f"{file}: expected `base: FILE` and `runs: {{NAME: {{title: ...}}}}`")
    runs: dict[str, TrainingRun] = {}
    for name, entry in entries.items():
        where = f"{file}: runs.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be a mapping")
        check_keys(entry, {"title", "start", "set"}, where)
        start = entry.get("start")
        if start is not None and (start not in runs or runs[start].start is not None):
            raise ConfigError(f"{where}.start: {start!r} is no warm start that stands above it")
        changes = [f"{key}={json.dumps(value)}" for key, value in (entry.get("set") or {}).items()]
        config = load_config(folder / content["base"], [*changes, *overrides])
        update: dict[str, Any] = {"output_dir": str(runs_dir / name)}
        if start is not None:
            model = config.model.model_copy(
                update={"path": str(runs[start].policy), "preset": None, "overrides": {}},
            )
            update |= {"model": model, "sft": None}
        elif config.sft is None:
            raise ConfigError(f"{where}: it has no `start`, so it needs an sft section")
        runs[str(name)] = TrainingRun(str(name), str(entry.get("title", name)), start, config.model_copy(update=update))
    return runs


def with_starts(names: Sequence[str], runs: Mapping[str, TrainingRun]) -> list[TrainingRun]:
    """The named runs and the warm starts that they need, in the order in which they can be made."""
    wanted = set(names) | {start for name in names if (start := runs[name].start)}
    return [run for name, run in runs.items() if name in wanted]


def make_run(run: TrainingRun) -> None:
    """Trains a run, or goes on with what was begun of it; a finished one is left as it is.

    Raises:
      ConfigError: its folder holds a run of another config.
      Interrupted: a signal came; a checkpoint was written.
    """
    from orchestra_jax.train.run import sft, train

    if run.is_finished:
        return
    if run.start is None:
        sft(run.config)
    else:
        train(run.config)


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
      ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping, not {type(content).__name__}")
    return content


def check_keys(mapping: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raises ConfigError for a key that is not known."""
    if unknown := [key for key in mapping if key not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; it may have {', '.join(sorted(known))}")
