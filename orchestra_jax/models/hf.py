"""Weights in and out of Hugging Face folders (config.json + safetensors, single or sharded).

`load_hf` reads one parameter at a time, and of it only the slices that this host's devices need, straight from the
memory-mapped files. `save_hf` writes so that a reader never sees a mixture of an old and a new model. Every tensor of
a folder is accounted for: missing, extra, wrongly shaped or quantised ones are errors that name tensor and file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, check_params, param_specs
from orchestra_jax.models.hf_config import config_from_hf, config_to_hf

__all__ = ["config_from_hf", "config_to_hf", "load_hf", "read_config", "save_hf"]

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
# Buffers that old exports carry; RoPE's frequencies follow from the config.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


# ---------------------------------------------------------------------------------------------------------------------
# names
# ---------------------------------------------------------------------------------------------------------------------


def _hf_name(param: str, layer: int | None = None) -> str:
    """The tensor of a Hugging Face file that holds `param` (or its slice of one layer)."""
    if layer is None:
        return "lm_head.weight" if param == "lm_head" else f"model.{param}.weight"
    name = param.removeprefix("layers.")
    if name.endswith("_bias"):  # q_bias is the bias of q_proj
        name, kind = name.removesuffix("_bias") + "_proj", "bias"
    else:
        kind = "weight"
    if name in ("gate_proj", "up_proj", "down_proj"):
        name = f"mlp.{name}"
    elif not name.endswith("layernorm"):
        name = f"self_attn.{name}"
    return f"model.layers.{layer}.{name}.{kind}"


def _is_transposed(param: str) -> bool:
    """Whether Hugging Face stores `param` as [out, in], the transpose of ours."""
    return param == "lm_head" or param.endswith("_proj")


def _layers(param: str, config: ModelConfig) -> Iterator[int | None]:
    """The layers that `param` stacks, or one None if it belongs to no layer."""
    return iter(range(config.num_layers)) if param.startswith("layers.") else iter([None])


def _hf_shape(param: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one Hugging Face tensor of a parameter with our (possibly stacked) `shape`."""
    if param.startswith("layers."):
        shape = shape[1:]
    return shape[::-1] if _is_transposed(param) else shape


def _hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face file of this model must have."""
    return {
        _hf_name(param, layer): _hf_shape(param, spec.shape)
        for param, spec in param_specs(config).items()
        for layer in _layers(param, config)
    }


# ---------------------------------------------------------------------------------------------------------------------
# reading
# ---------------------------------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """One tensor of a file, not read yet."""

    file: Path
    data: Any  # safetensors' slice object: data[1:3, :] reads those rows
    shape: tuple[int, ...]
    dtype: str


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder.

    Raises:
      ValueError: no such folder, no config.json, or one that cannot be used; see `config_from_hf`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    return config_from_hf(_read_json(folder / CONFIG_FILE), source=str(folder / CONFIG_FILE))


def load_hf(
    folder: str | Path,
    *,
    dtype: str | None = "float32",
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    extra_vocab_rows: Literal["error", "keep", "cut"] = "error",
) -> tuple[ModelConfig, Params]:
    """Loads a Hugging Face folder of the Qwen3, Qwen2, Llama or SmolLM2 family.

    Args:
      folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
      dtype: of the parameters: float32, bfloat16 or float16; None keeps the file's (the widest, if it mixes).
      shardings: where each parameter goes, by our names; each device's slice is read by itself. None: everything on
        the default device.
      extra_vocab_rows: what to do if the file's embedding has more rows than config.json's vocab_size: refuse, keep
        them (they are never sampled: `valid_vocab_size` is set), or cut them off.

    Returns:
      The config, and the parameters named and shaped as `decoder.param_specs(config)` says.

    Raises:
      ValueError: whatever is wrong with the folder, naming the file and the key or tensor.
    """
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    folder = Path(folder)
    config = read_config(folder)
    tensors = _open_tensors(folder)
    config = _match_vocabulary(config, tensors, extra_vocab_rows)
    _check_tensors(config, tensors, folder, cut_vocab=extra_vocab_rows == "cut")
    stored = (_DTYPES[tensors[name].dtype] for name in _hf_shapes(config))
    target = np.dtype(dtype) if dtype else jnp.result_type(*stored)

    params = {}
    for name, spec in param_specs(config).items():
        read = partial(_read_parameter, tensors, name, spec.shape, target)
        if shardings is None:
            params[name] = jnp.asarray(read(None))
        else:
            params[name] = jax.make_array_from_callback(spec.shape, shardings[name], read)
    return config, params


def _read_parameter(
    tensors: Mapping[str, _Tensor],
    param: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """The part `index` (None: all) of a parameter of our `shape`, read from the files that hold it."""
    parts = index or (slice(None),) * len(shape)
    ranges = [range(*part.indices(size)) for part, size in zip(parts, shape, strict=True)]
    out = np.empty([len(r) for r in ranges], dtype)

    def read(layer: int | None, within: list[range]) -> np.ndarray:
        if _is_transposed(param):
            within = within[::-1]
        data = tensors[_hf_name(param, layer)].data[tuple(slice(r.start, r.stop) for r in within)]
        return data.T if _is_transposed(param) else data

    if param.startswith("layers."):
        for row, layer in enumerate(ranges[0]):
            out[row] = read(layer, ranges[1:])
    else:
        out[...] = read(None, ranges)
    return out


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
        raise ValueError(f"{file}: not valid JSON: {error}") from None


def _open_tensors(folder: Path) -> dict[str, _Tensor]:
    """Every tensor of the folder's weight files, unread. Files that the index does not name are not looked at."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        raise ValueError(f"{folder}: has both {SINGLE_FILE} and {INDEX_FILE}; remove the stale one")
    if single.exists():
        return _open_file(single)
    if index.exists():
        return _open_shards(folder, index)
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f" (found {', '.join(other[:3])}; only safetensors are read here)" if other else ""
    raise ValueError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _open_shards(folder: Path, index: Path) -> dict[str, _Tensor]:
    parsed = _read_json(index)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{index}: weight_map must be an object of tensor name -> file name")

    tensors: dict[str, _Tensor] = {}
    for file_name in sorted(set(weight_map.values())):
        listed = {name for name, shard in weight_map.items() if shard == file_name}
        if Path(file_name).name != file_name:
            raise ValueError(f"{index}: {file_name!r} must be the name of a file beside the index")
        if not (folder / file_name).is_file():
            raise ValueError(f"{folder / file_name}: no such file, but {INDEX_FILE} says that it holds {_some(listed)}")
        shard = _open_file(folder / file_name)
        if absent := listed - shard.keys():
            raise ValueError(f"{folder / file_name}: does not hold {_some(absent)}, but {INDEX_FILE} says so")
        if unlisted := shard.keys() - listed:
            raise ValueError(f"{folder / file_name}: holds {_some(unlisted)}, which {INDEX_FILE} does not list for it")
        tensors |= shard
    return tensors


def _open_file(file: Path) -> dict[str, _Tensor]:
    try:
        with safe_open(file, framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
            return {
                name: _Tensor(file, data, tuple(data.get_shape()), data.get_dtype()) for name, data in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from None


def _match_vocabulary(config: ModelConfig, tensors: Mapping[str, _Tensor], extra_vocab_rows: str) -> ModelConfig:
    """The config with the vocabulary that the caller chose, where the file has more rows than the config says."""
    if extra_vocab_rows not in ("error", "keep", "cut"):
        raise ValueError(f"extra_vocab_rows must be error, keep or cut, got {extra_vocab_rows!r}")
    embedding = tensors.get(_hf_name("embed_tokens"))
    if embedding is None or not embedding.shape or embedding.shape[0] <= config.vocab_size:
        return config  # whatever else is wrong is found by _check_tensors
    rows = embedding.shape[0]
    if extra_vocab_rows == "error":
        raise ValueError(
            f"{embedding.file}: {_hf_name('embed_tokens')} has {rows} rows, but config.json has vocab_size "
            f"{config.vocab_size}; load with extra_vocab_rows='keep' (the extra ids are never sampled) or 'cut'"
        )
    if extra_vocab_rows == "cut":
        return config
    valid = config.valid_vocab_size or config.vocab_size
    return ModelConfig(**{**vars(config), "vocab_size": rows, "valid_vocab_size": valid})


def _check_tensors(config: ModelConfig, tensors: Mapping[str, _Tensor], folder: Path, *, cut_vocab: bool) -> None:
    """Raises ValueError unless the files hold exactly the tensors of `config`."""
    if config.num_layers > len(tensors):  # before anything is built per layer
        raise ValueError(
            f"{folder}: config.json has num_hidden_layers {config.num_layers}, "
            f"but the weight files hold only {len(tensors)} tensors"
        )
    expected = _hf_shapes(config)
    if missing := expected.keys() - tensors.keys():
        hint = ""
        if _hf_name("lm_head") in missing:
            hint = "; if the head shares the embedding's weights, config.json must say tie_word_embeddings=true"
        raise ValueError(f"{folder}: the weight files lack {_some(missing)}{hint}")

    tied_head = {_hf_name("lm_head")} if config.tie_word_embeddings else set()
    extra = {name for name in tensors.keys() - expected.keys() - tied_head if not _IGNORED.fullmatch(name)}
    if extra:
        first = min(extra)
        raise ValueError(
            f"{tensors[first].file}: holds {_some(extra)}, which a {config.model_type} model with this "
            f"config.json ({config.num_layers} layers) does not have"
        )

    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}; only {', '.join(_DTYPES)} are supported"
            )
        found = tensor.shape
        if cut_vocab and len(found) == 2 and name in (_hf_name("embed_tokens"), _hf_name("lm_head")):
            found = (min(found[0], shape[0]), found[1])
        if found != shape:
            raise ValueError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
    if tied_head & tensors.keys():
        _check_tied_head(tensors[_hf_name("embed_tokens")], tensors[_hf_name("lm_head")])


def _check_tied_head(embedding: _Tensor, head: _Tensor, block: int = 8192) -> None:
    """Raises ValueError if a file with tied embeddings holds a head that differs; compares `block` rows at a time."""
    rows = embedding.shape[0]
    parts = (slice(row, min(row + block, rows)) for row in range(0, rows, block))
    same = head.shape == embedding.shape and all(
        np.array_equal(embedding.data[part], head.data[part]) for part in parts
    )
    if not same:
        raise ValueError(
            f"{head.file}: config.json says tie_word_embeddings=true, but lm_head.weight differs from "
            "model.embed_tokens.weight; set it to false to keep the head, or remove lm_head.weight"
        )


def _some(names: set[str], limit: int = 4) -> str:
    """The first few names, for an error message."""
    shown = sorted(names)[:limit]
    return ", ".join(shown) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ---------------------------------------------------------------------------------------------------------------------
# writing
# ---------------------------------------------------------------------------------------------------------------------


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    params: Mapping[str, jax.Array | np.ndarray],
    *,
    max_shard_bytes: int = 5_000_000_000,
    files: Mapping[str, bytes] | None = None,
    token_ids: Mapping[str, int | list[int] | None] | None = None,
) -> None:
    """Writes a Hugging Face folder that transformers and `load_hf` read; `load_hf` gives back the same bits.

    Everything is first written beside its destination, then the old entry (index or single file) is removed, and the
    new one is put in place last: a crash leaves the old model, the new one, or a folder that refuses to load.

    Args:
      folder: made if it does not exist; weights of an earlier export in it are replaced, other files stay.
      config: the model.
      params: its parameters, in the dtype to be written, each addressable from this process.
      max_shard_bytes: a weight file gets no more than this, unless a single tensor is larger.
      files: further files of the folder by name, such as tokenizer.json.
      token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` for config.json.

    Raises:
      ValueError: the parameters are not those of `config`, or the config cannot be expressed in this format.
    """
    check_params(config, params)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file, not a folder")
    writable = [np.dtype(dtype) for dtype in _DTYPES.values()]
    for name, param in params.items():
        if param.dtype not in writable:
            raise ValueError(f"parameter {name} is {param.dtype}; only {', '.join(map(str, writable))} can be written")
    dtype = jnp.result_type(*(p.dtype for p in params.values()))
    raw_config = config_to_hf(config, dtype=dtype.name) | dict(token_ids or {})

    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        for name, content in {**(files or {}), CONFIG_FILE: _json_bytes(raw_config)}.items():
            _write_durably(temporary / name, content)
        weight_files = _write_weights(temporary, config, params, max_shard_bytes)
        _install(temporary, folder, weight_files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(
    folder: Path, config: ModelConfig, params: Mapping[str, jax.Array | np.ndarray], max_shard_bytes: int
) -> list[str]:
    """Writes the weight files, and the index if there are several; returns their names, the entry file last."""
    shards = _plan_shards(config, params, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {_hf_name(param, layer): _hf_tensor(params, param, layer) for param, layer in shard}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        # safetensors makes its files readable by their owner alone; give them the usual mode.
        shutil.copymode(folder / CONFIG_FILE, folder / file_name)
        _sync(folder / file_name)
        weight_map |= dict.fromkeys(tensors, file_name)
    if len(shards) == 1:
        return [SINGLE_FILE]
    total = sum(p.size * p.dtype.itemsize for p in params.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_durably(folder / INDEX_FILE, _json_bytes(index))
    return [*sorted(set(weight_map.values())), INDEX_FILE]


def _plan_shards(
    config: ModelConfig, params: Mapping[str, jax.Array | np.ndarray], max_shard_bytes: int
) -> list[list[tuple[str, int | None]]]:
    """Splits the tensors (parameter, layer), in order, into files of at most `max_shard_bytes`."""
    shards: list[list[tuple[str, int | None]]] = [[]]
    used = 0
    for param in param_specs(config):
        layers = list(_layers(param, config))
        size = params[param].size * params[param].dtype.itemsize // len(layers)
        for layer in layers:
            if shards[-1] and used + size > max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append((param, layer))
            used += size
    return shards


def _hf_tensor(params: Mapping[str, jax.Array | np.ndarray], param: str, layer: int | None) -> np.ndarray:
    """One tensor as Hugging Face stores it, on the host and contiguous (safetensors writes the raw buffer)."""
    value = np.asarray(params[param] if layer is None else params[param][layer])
    return np.ascontiguousarray(value.T if _is_transposed(param) else value)


def _install(temporary: Path, folder: Path, weight_files: list[str]) -> None:
    """Moves the finished files into `folder`, its entry file last, and removes the shards of an earlier export."""
    for entry in (INDEX_FILE, SINGLE_FILE):
        (folder / entry).unlink(missing_ok=True)
    others = sorted(p.name for p in temporary.iterdir() if p.name not in weight_files)
    for name in [*others, *weight_files[:-1]]:
        os.replace(temporary / name, folder / name)
    _sync(folder)
    os.replace(temporary / weight_files[-1], folder / weight_files[-1])
    _sync(folder)
    for path in folder.iterdir():
        if _SHARD_NAME.fullmatch(path.name) and path.name not in weight_files:
            path.unlink()


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write_durably(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    _sync(file)


def _sync(path: Path) -> None:
    """Forces a file or folder to disk, so that the order of renames survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
