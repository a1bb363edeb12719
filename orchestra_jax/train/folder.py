"""The folder of a run: what lies where, and whose it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestra_jax.config import ConfigError, RunConfig, dump_config

CONTENTS = (
    "checkpoints",
    "warm_start",
    "warm_start.tmp",
    "model",
    "model.tmp",
    "episodes",
    "tensorboard",
    "tensorboard.tmp",
    "tracking",
    "metrics.jsonl",
    "warm_up.json",
    "summary.json",
    "summary.tmp",
    "report.html",
    "config.tmp",
    "config.yaml",
)
"""Everything that a run writes. `--overwrite` deletes this and nothing else, config.yaml last: if it is killed while it
deletes, the folder still counts as a run."""


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def warm_start(self) -> Path:
        """Hugging Face folder of the policy that RL starts from."""
        return self.path / "warm_start"

    @property
    def model(self) -> Path:
        """Hugging Face folder of the trained policy; it appears when training is over."""
        return self.path / "model"

    @property
    def begun(self) -> bool:
        """Whether anything was trained: a step's metrics, a warm start, or a part of a checkpoint."""
        metrics, checkpoints = self.path / "metrics.jsonl", self.path / "checkpoints"
        return (
            (metrics.is_file() and metrics.stat().st_size > 0)
            or self.warm_start.exists()
            or (checkpoints.is_dir() and any(entry.is_file() for entry in checkpoints.rglob("*")))
        )

    @property
    def summary(self) -> Path:
        """The evaluation; the last file of a run but for its report."""
        return self.path / "summary.json"

    def write_episodes(self, name: str, records: list[dict[str, Any]]) -> None:
        """One JSON object a line; the file appears whole."""
        file = self.path / "episodes" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        _write_whole(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))

    def write_warm_up(self, times: list[tuple[str, float]]) -> None:
        """What of the sampler was compiled before the first step (or read from the compilation cache), and how long."""
        rows = [{"shape": name, "seconds": round(seconds, 3)} for name, seconds in times]
        _write_whole(self.path / "warm_up.json", json.dumps(rows, indent=1))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json; it appears whole."""
        _write_whole(self.summary, json.dumps(summary, indent=1))

    def read_summary(self) -> dict[str, Any] | None:
        """The evaluation of a finished run."""
        return json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.is_file() else None


def find_run(config: RunConfig, *, overwrite: bool) -> RunFolder:
    """The run's folder, new or to be resumed; nothing is written or deleted yet.

    Raises:
      ConfigError: the folder holds another run, or something else, or cannot be read.
    """
    if "://" in config.output_dir:
        raise ConfigError(
            f"output_dir {config.output_dir}: a run's folder must lie in a file system (that all hosts share); mount "
            "the bucket and give a folder below the mount"
        )
    folder = RunFolder(Path(config.output_dir))
    try:
        if not folder.path.exists():
            return folder
        if not folder.path.is_dir():
            raise ConfigError(f"output_dir {folder.path} is not a folder")
        if not folder.config.is_file():
            if any(entry.name != "config.tmp" for entry in folder.path.iterdir()):
                raise ConfigError(f"output_dir {folder.path} is not empty and holds no run: choose another")
        elif folder.begun and not overwrite and (difference := _difference(folder.config, config)):
            raise ConfigError(
                f"output_dir {folder.path} holds a run with another config ({difference}): choose another output_dir, "
                "or --overwrite the run"
            )
    except OSError as error:
        raise ConfigError(f"output_dir {folder.path}: {error.strerror or error}") from None
    return folder


def open_run(folder: RunFolder, config: RunConfig, *, overwrite: bool) -> None:
    """Makes the folder and writes its config, or finds it there; with `overwrite` deletes the run that it holds.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        if overwrite and folder.config.is_file():
            for name in CONTENTS:
                entry = folder.path / name
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
        folder.path.mkdir(parents=True, exist_ok=True)
        # A run that stopped at a mistake in its config, before anything was trained, goes on with the mended one.
        if not folder.config.is_file() or not folder.begun:
            _write_whole(folder.config, dump_config(config))
    except OSError as error:
        raise ConfigError(f"output_dir {folder.path}: {error.strerror or error}") from None


def _write_whole(file: Path, text: str) -> None:
    staging = file.with_suffix(".tmp")
    staging.write_text(text, encoding="utf-8")
    staging.replace(file)


def _difference(file: Path, config: RunConfig) -> str:
    """The first keys in which a run's config.yaml differs from `config`; "" if none does.

    The folder may have moved, and anybody may follow.
    """
    try:
        old = _leaves(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError):
        return "its config.yaml is no longer YAML"
    new = _leaves(yaml.safe_load(dump_config(config)))
    keys = [
        key
        for key in dict.fromkeys([*old, *new])
        if key not in ("output_dir", "trackers") and old.get(key) != new.get(key)
    ]
    shown = [f"{key} is {json.dumps(old.get(key))} there, {json.dumps(new.get(key))} here" for key in keys[:2]]
    return "; ".join(shown) + (f"; and {len(keys) - 2} more" if len(keys) > 2 else "")


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {prefix: data}
    leaves: dict[str, Any] = {}
    for key, value in data.items():
        leaves |= _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
