"""`orchestra convert`: GGUF files, Hugging Face folders and checkpoints, into Hugging Face folders or checkpoints.

Weights pass through one tensor at a time. Everything is written into DESTINATION.partial and renamed when it is whole;
killed midway, the same command keeps the weight files that were finished.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import param_specs
from orchestra_jax.models.gguf import load_gguf
from orchestra_jax.models.hf import (
    CONFIG_FILE,
    Writable,
    check_writable,
    open_hf,
    read_config,
    stored_parameter,
    write_folder,
)
from orchestra_jax.models.hf_config import config_to_hf
from orchestra_jax.models.safetensors_io import StoredTensor

# Everything of a folder that is neither weights nor config.json and that a tokenizer, a template or `generate` reads.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PROGRESS_FILE = "conversion.json"

Format = Literal["hf", "checkpoint"]


@dataclass(frozen=True)
class Source:
    """A model to convert; its weights may lie elsewhere still."""

    config: ModelConfig
    params: Mapping[str, Writable]
    files: dict[str, bytes]
    """Tokenizer and the like, by name."""
    token_ids: dict[str, Any]
    version: Any
    """Something that JSON can hold and that changes with the source."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    to: Format = "hf",
) -> str:
    """Writes `source` in another format, with config and tokenizer files.

    Args:
      source: a .gguf file (Llama architecture, dequantised), a Hugging Face folder, a folder that this function made,
        a run's folder (its newest checkpoint), or a checkpoint in one (RUN/checkpoints/rl, or .../rl/STEP).
      destination: a folder that does not exist yet or is empty.
      dtype: of the weights: float32, bfloat16 or float16. None: as in the source, float32 from GGUF.
      max_shard_bytes: see `hf.save_hf`.
      to: "hf", a Hugging Face folder, or "checkpoint": config.json, tokenizer and an Orbax checkpoint of step 0 with
        the weights under `params`, as a run's checkpoints have them.

    Returns:
      One line that says what was written.

    Raises:
      ValueError: the source cannot be read or the destination is taken; the message names it.
      ImportError: a GGUF file, and the extra `gguf` is not installed.
    """
    source, destination = Path(source), Path(destination)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination}: exists already; remove it or choose another destination")
    model = open_source(source, dtype)
    check_writable(model.config, model.params, max_shard_bytes)
    written_as = {np.dtype(param.dtype).name for param in model.params.values()}
    settings = {
        "source": str(source.resolve()),
        "version": model.version,
        "dtype": sorted(written_as),
        "max_shard_bytes": max_shard_bytes,
        "to": to,
    }
    with _staging(destination, settings) as staging:
        if to == "hf":
            write_folder(
                staging,
                model.config,
                model.params,
                max_shard_bytes=max_shard_bytes,
                files=model.files,
                token_ids=model.token_ids,
            )
        else:
            _write_checkpoint(staging, model)
    tokenizer = "with tokenizer" if "tokenizer.json" in model.files else "WITHOUT a tokenizer.json (none in the source)"
    weights = f"{model.config.num_parameters / 1e6:.1f}M parameters in {' and '.join(sorted(written_as))}"
    return f"{destination}: {model.config.model_type}, {weights}, {tokenizer}"


def companion_files(folder: str | Path) -> dict[str, bytes]:
    """The tokenizer, template and generation files of a Hugging Face folder, by name, for `save_hf(files=...)`."""
    return {name: (Path(folder) / name).read_bytes() for name in COMPANION_FILES if (Path(folder) / name).is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# sources
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FilePart:
    """A parameter in safetensors files (`hf.Readable`)."""

    tensors: Mapping[str, StoredTensor]
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, layer: int | None) -> np.ndarray:
        part = tuple(slice(0, size) for size in (self.shape if layer is None else self.shape[1:]))
        return stored_parameter(self.tensors, self.name, layer)[part]


@dataclass(frozen=True)
class _CheckpointPart:
    """A parameter in a checkpoint (`hf.Readable`)."""

    leaf: Any
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, layer: int | None) -> np.ndarray:
        return self.leaf.read(layer)


def open_source(source: Path, dtype: str | None) -> Source:
    """Finds out what lies at a path and opens it.

    Raises:
      ValueError: nothing that can be converted does.
    """
    if source.is_file():
        if source.suffix != ".gguf":
            raise ValueError(f"{source}: is neither a .gguf file nor a Hugging Face folder")
        config, params, files = load_gguf(source, dtype=dtype or "float32")
        return Source(config, params, files, json.loads(files["generation_config.json"]), _versions([source]))
    found = _find_checkpoint(source)
    if found is None:
        return _from_hf(source, dtype)
    return _from_checkpoint(*found, dtype)


def _from_hf(folder: Path, dtype: str | None) -> Source:
    config, tensors, stored = open_hf(folder)
    target = np.dtype(dtype) if dtype else stored
    params: dict[str, Writable] = {
        name: _FilePart(tensors, name, spec.shape, target) for name, spec in param_specs(config).items()
    }
    files = sorted({tensor.file for tensor in tensors.values()})
    return Source(config, params, companion_files(folder), _token_ids(folder), _versions(files))


def _from_checkpoint(root: Path, store: Path, step: int | None, dtype: str | None) -> Source:
    """A model from a store of checkpoints (`step`, or the newest), described by the folder `root`."""
    from orchestra_jax.train.checkpoint import CheckpointStore  # Orbax takes seconds to import

    with CheckpointStore(store) as checkpoints:
        step = checkpoints.latest_step() if step is None else step
        if step is None:
            raise ValueError(f"{store}: holds no complete checkpoint")
        leaves, _ = checkpoints.open(step)
    if (root / CONFIG_FILE).is_file():
        config, files, token_ids, saved = read_config(root), companion_files(root), _token_ids(root), None
    else:
        config, files, token_ids, saved = _describe_run(root)
    target = dtype or saved
    params: dict[str, Writable] = {}
    for name in param_specs(config):
        leaf = leaves.get(("params", name))
        if leaf is None:
            raise ValueError(f"{store / str(step)}: holds no weight {name}")
        params[name] = _CheckpointPart(leaf, leaf.shape, np.dtype(target or leaf.dtype))
    return Source(config, params, files, token_ids, [step, *_versions([store / str(step) / "COMMITTED.json"])])


def _describe_run(run: Path) -> tuple[ModelConfig, dict[str, bytes], dict[str, Any], str]:
    """Shapes, tokenizer files, token ids and dtype of the policy that a run's config describes."""
    from orchestra_jax.config import load_config
    from orchestra_jax.rollout.policy import read_policy

    config = load_config(run / "config.yaml")
    model, chat = read_policy(config.model, config.text)
    return model, companion_files(chat.tokenizer.source), {}, config.model.dtype


def _find_checkpoint(path: Path) -> tuple[Path, Path, int | None] | None:
    """Folder that describes the model, store and step (None: the newest) of a path to checkpoints; else None."""
    if (path / "config.yaml").is_file():
        for phase in ("rl", "sft"):
            if any((path / "checkpoints" / phase).glob("*/COMMITTED.json")):
                return path, path / "checkpoints" / phase, None
        raise ValueError(f"{path}: the run has no complete checkpoint yet")
    if (path / "COMMITTED.json").is_file() and re.fullmatch("[0-9]+", path.name):
        store, step = path.resolve().parent, int(path.name)
    elif any(path.glob("*/COMMITTED.json")):
        store, step = path.resolve(), None
    else:
        return None
    for root in (store, store.parent.parent):
        if (root / CONFIG_FILE).is_file() or (root / "config.yaml").is_file():
            return root, store, step
    raise ValueError(f"{path}: neither {store / CONFIG_FILE} nor the config.yaml of a run says what model this is")


def _token_ids(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return {key: raw[key] for key in _TOKEN_IDS if key in raw}


def _versions(files: list[Path]) -> list[list[Any]]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


# ---------------------------------------------------------------------------------------------------------------------
# destinations
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _staging(destination: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """The folder to write into; it becomes `destination` at the end. What an earlier conversion left is kept if it had
    the same settings.

    Raises:
      ValueError: another conversion is writing there.
    """
    staging = destination.with_name(destination.name + ".partial")
    staging.parent.mkdir(parents=True, exist_ok=True)
    lock = staging.with_name(staging.name + ".lock")
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{destination}: another conversion is writing it") from None
        progress = staging / _PROGRESS_FILE
        if not progress.is_file() or progress.read_text(encoding="utf-8") != json.dumps(settings):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            progress.write_text(json.dumps(settings), encoding="utf-8")
        yield staging
        progress.unlink()
        if destination.exists():
            destination.rmdir()  # empty, or this raises
        staging.rename(destination)
        lock.unlink()


def _write_checkpoint(folder: Path, model: Source) -> None:
    from orchestra_jax.train.checkpoint import CheckpointStore

    raw = config_to_hf(model.config, dtype=next(iter(model.params.values())).dtype.name) | model.token_ids
    for name, content in {**model.files, CONFIG_FILE: json.dumps(raw, indent=2).encode()}.items():
        (folder / name).write_bytes(content)
    shutil.rmtree(folder / "0", ignore_errors=True)
    with CheckpointStore(folder) as store:
        arrays = {"params": {name: _whole(param) for name, param in model.params.items()}}
        store.save(0, arrays, {"step": 0}, wait=True)


def _whole(param: Writable) -> np.ndarray:
    """A parameter on the host: a checkpoint is written from whole arrays."""
    if isinstance(param, jax.Array | np.ndarray):
        return np.asarray(param)
    out = np.empty(param.shape, param.dtype)
    if math.prod(param.shape) and len(param.shape) > 1 and hasattr(param, "name") and param.name.startswith("layers."):
        for layer in range(param.shape[0]):
            out[layer] = param.read(layer)
    else:
        out[...] = param.read(None)
    return out
