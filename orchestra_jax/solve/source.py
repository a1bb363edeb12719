"""What a folder says of the policy in it: its weights, and where it is a run, how that was set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from orchestra_jax.config import ConfigError, ModelSection, RolloutConfig, RunConfig, TextConfig, load_config
from orchestra_jax.models.config import ModelConfig
from orchestra_jax.rollout.rollout import RolloutLimits
from orchestra_jax.train.folder import RunFolder


@dataclass(frozen=True)
class Source:
    """A policy that can be loaded, and the config of the run that it comes from (None: of a folder alone)."""

    folder: Path
    model: ModelSection
    text: TextConfig
    run: RunConfig | None


def read_source(folder: str | Path) -> Source:
    """Reads a run folder (which means its `model/`), the `model/` or `warm_start/` of one, or a Hugging Face folder.

    The weights of a folder that is no run's are taken in float32 on a CPU, in bfloat16 elsewhere.

    Raises:
      ConfigError: there is no such folder, it is neither of these, or its run has no model yet.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; a policy is a run folder or a Hugging Face folder")
    if not (folder / "config.json").is_file():
        run = RunFolder(folder)
        if not run.config.is_file():
            raise ConfigError(f"{folder} holds no policy: neither config.yaml (a run) nor config.json (Hugging Face)")
        if not run.model.is_dir():
            raise ConfigError(f"the run {folder} has no {run.model.name}/ yet: its training has not finished")
        return _of_run(run, run.model)
    run = RunFolder(folder.resolve().parent)
    if run.config.is_file() and folder.resolve() in (run.model, run.warm_start):
        return _of_run(run, folder)
    model = ModelSection(path=str(folder), dtype="float32" if jax.default_backend() == "cpu" else "bfloat16")
    return Source(folder, model, TextConfig(), None)


def _of_run(run: RunFolder, folder: Path) -> Source:
    config = load_config(run.config)
    model = ModelSection(path=str(folder), dtype=config.model.dtype)
    return Source(folder, model, TextConfig(tools=config.text.tools), config)


def limits_of(source: Source, model: ModelConfig, max_tokens: int | None) -> tuple[int, RolloutLimits]:
    """How long a conversation may get, and its turns and observations, in tokens.

    A run's own limits; for a folder alone those of a config without any, less where the model holds less. `max_tokens`
    replaces the first.

    Raises:
      ConfigError: the model cannot hold as much, or a turn would not fit.
    """
    limits = source.run.rollout if source.run else RolloutConfig()
    capacity = limits.max_tokens if max_tokens is None else max_tokens
    max_turn, max_observation = limits.max_turn_tokens, limits.max_observation_tokens
    most = model.max_position_embeddings
    if source.run is None:
        capacity = capacity if max_tokens is not None else min(capacity, most)
        max_turn, max_observation = min(max_turn, capacity // 4), min(max_observation, capacity // 8)
    if capacity > most:
        raise ConfigError(f"--max-tokens {capacity}: the model holds at most {most} (max_position_embeddings)")
    if not 0 < max_turn < capacity:
        raise ConfigError(f"--max-tokens {capacity}: must be more than the {max_turn} tokens that a turn may have")
    return capacity, RolloutLimits(max_turn, max_observation, limits.max_sampled_tokens, limits.stop_after_tool_call)
