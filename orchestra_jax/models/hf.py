"""Weights in and out of Hugging Face folders (config.json + safetensors, single or sharded).

`load_hf` reads one shard of one parameter at a time, of the files only the slices that this host's devices need, cast
and transposed on the way: beside the arrays themselves the host holds no more than the largest shard. `save_hf` writes
one tensor at a time, and so that a reader never sees a mixture of an old and a new model. Every tensor of a folder is
accounted for: missing, extra, wrongly shaped or quantised ones are errors that name tensor and file.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from orchestra_jax.distributed import all_succeeded, on_writer
from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, check_params, param_specs
from orchestra_jax.models.hf_config import config_from_hf, config_to_hf
from orchestra_jax.models.safetensors_io import (
    DTYPES,
    NewTensor,
    StoredTensor,
    blocks_of,
    copy_into,
    in_file_order,
    open_file,
    write_file,
)

__all__ = ["config_from_hf", "config_to_hf", "load_hf", "read_config", "save_hf"]

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

BLOCK_BYTES = 64 * 2**20
"""Of a tensor being written, so much is cast and transposed at a time."""

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


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder.

    Raises:
      ValueError: no such folder, no config.json, or one that cannot be used; see `config_from_hf`.
    """
    if "://" in str(folder):
        raise ValueError(f"{folder}: weights are read from a file system; mount the bucket, or copy them")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    return config_from_hf(_read_json(folder / CONFIG_FILE), source=str(folder / CONFIG_FILE))


def load_hf(
    folder: str | Path,
    *,
    dtype: str | None = "float32",
    shardings: Mapping[str, Sharding] | None = None,
    extra_vocab_rows: Literal["error", "keep", "cut"] = "error",
) -> tuple[ModelConfig, Params]:
    """Loads a Hugging Face folder of the Qwen3, Qwen2, Llama or SmolLM2 family.

    Args:
      folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
      dtype: of the parameters: float32, bfloat16 or float16; None keeps the file's (the widest, if it mixes).
      shardings: where each parameter goes, by our names; each device's slice is read by itself. None: everything on
        this process' first device.
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
    config, tensors, stored = open_hf(folder, extra_vocab_rows=extra_vocab_rows)
    target = np.dtype(dtype) if dtype else stored

    default = SingleDeviceSharding(jax.local_devices()[0])
    params = {}
    for name, spec in param_specs(config).items():
        read = partial(_read_parameter, tensors, name, target)
        params[name] = _place(spec.shape, target, shardings[name] if shardings else default, read)
    return config, params


def open_hf(
    folder: str | Path, *, extra_vocab_rows: Literal["error", "keep", "cut"] = "error"
) -> tuple[ModelConfig, dict[str, StoredTensor], np.dtype]:
    """Opens and checks a folder without reading its weights; see `load_hf`.

    Returns:
      The config, the folder's tensors by their names there, and the dtype that holds all of them.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = open_tensors(folder)
    config = _match_vocabulary(config, tensors, extra_vocab_rows)
    _check_tensors(config, tensors, folder, cut_vocab=extra_vocab_rows == "cut")
    return config, tensors, np.dtype(jnp.result_type(*(DTYPES[tensors[name].dtype] for name in _hf_shapes(config))))


Bounds = tuple[tuple[int, int], ...]
"""A part of an array: first and last (exclusive) index along each axis."""


def _place(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, read: Callable[[Bounds], np.ndarray]
) -> jax.Array:
    """An array from its parts, `read` one after the other for the devices of this host."""
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        parts = index or (slice(None),) * len(shape)
        bounds = tuple(part.indices(size)[:2] for part, size in zip(parts, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    arrays: list[jax.Array] = []
    for bounds, devices in holders.items():
        part = read(bounds)
        targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        # Transfers keep the host's copy until they are done: not waiting would pile copies up.
        arrays += jax.block_until_ready([jax.device_put(part, target) for target in targets])
        del part
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def _read_parameter(tensors: Mapping[str, StoredTensor], param: str, dtype: np.dtype, bounds: Bounds) -> np.ndarray:
    """A part of one of our parameters, read from the files that hold it."""
    out = np.empty([end - start for start, end in bounds], dtype)
    stacked = param.startswith("layers.")
    within = tuple(slice(start, end) for start, end in (bounds[1:] if stacked else bounds))
    rows: list[tuple[np.ndarray, int | None]] = [(out, None)]
    if stacked:
        rows = [(out[row], layer) for row, layer in enumerate(range(*bounds[0]))]
    for row, layer in rows:
        copy_into(row, stored_parameter(tensors, param, layer)[within])
    return out


def stored_parameter(tensors: Mapping[str, StoredTensor], param: str, layer: int | None) -> np.ndarray:
    """One of our parameters, or its slice of one layer, as a view of its file in our orientation."""
    view = tensors[_hf_name(param, layer)].view()
    return view.T if _is_transposed(param) else view


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
        raise ValueError(f"{file}: not valid JSON: {error}") from None


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weight files, unread. Files that the index does not name are not looked at."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        raise ValueError(f"{folder}: has both {SINGLE_FILE} and {INDEX_FILE}; remove the stale one")
    if single.exists():
        return open_file(single)
    if index.exists():
        return _open_shards(folder, index)
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f" (found {', '.join(other[:3])}; only safetensors are read here)" if other else ""
    raise ValueError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _open_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    parsed = _read_json(index)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{index}: weight_map must be an object of tensor name -> file name")

    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        listed = {name for name, shard in weight_map.items() if shard == file_name}
        if Path(file_name).name != file_name:
            raise ValueError(f"{index}: {file_name!r} must be the name of a file beside the index")
        if not (folder / file_name).is_file():
            raise ValueError(f"{folder / file_name}: no such file, but {INDEX_FILE} says that it holds {_some(listed)}")
        shard = open_file(folder / file_name)
        if absent := listed - shard.keys():
            raise ValueError(f"{folder / file_name}: does not hold {_some(absent)}, but {INDEX_FILE} says so")
        if unlisted := shard.keys() - listed:
            raise ValueError(f"{folder / file_name}: holds {_some(unlisted)}, which {INDEX_FILE} does not list for it")
        tensors |= shard
    return tensors


def _match_vocabulary(config: ModelConfig, tensors: Mapping[str, StoredTensor], extra_vocab_rows: str) -> ModelConfig:
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


def _check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor], folder: Path, *, cut_vocab: bool) -> None:
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
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}; only {', '.join(DTYPES)} are supported"
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


def _check_tied_head(embedding: StoredTensor, head: StoredTensor, block: int = 8192) -> None:
    """Raises ValueError if a file with tied embeddings holds a head that differs; compares `block` rows at a time."""
    rows = embedding.shape[0]
    parts = (slice(row, min(row + block, rows)) for row in range(0, rows, block))
    same = head.shape == embedding.shape and all(
        np.array_equal(embedding.view()[part], head.view()[part]) for part in parts
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


class Readable(Protocol):
    """A parameter that lies elsewhere (in a file, in a checkpoint) and is read one layer at a time."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, layer: int | None) -> np.ndarray:
        """Its values, or those of one layer; they are cast to `dtype` when they are written."""


Writable = jax.Array | np.ndarray | Readable


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    params: Mapping[str, Writable],
    *,
    max_shard_bytes: int = 5_000_000_000,
    files: Mapping[str, bytes] | None = None,
    token_ids: Mapping[str, int | list[int] | None] | None = None,
) -> None:
    """Writes a Hugging Face folder that transformers and `load_hf` read; `load_hf` gives back the same bits.

    Everything is first written beside its destination, then the old entry (index or single file) is removed, and the
    new one is put in place last: a crash leaves the old model, the new one, or a folder that refuses to load. One
    tensor at a time is on the host. Where several processes hold the parameters, all of them call this: each tensor is
    gathered once, the first process writes, and the call returns (or raises) on all of them when it is done.

    Args:
      folder: made if it does not exist; weights of an earlier export in it are replaced, other files stay.
      config: the model.
      params: its parameters, in the dtype to be written.
      max_shard_bytes: a weight file gets no more than this, unless a single tensor is larger.
      files: further files of the folder by name, such as tokenizer.json.
      token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` for config.json.

    Raises:
      ValueError: the parameters are not those of `config`, or the config cannot be expressed in this format.
      RuntimeError: the first process could not write, told on the others.
    """
    folder = Path(folder)
    check_writable(config, params, max_shard_bytes)

    def prepare() -> Path:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".export-", dir=folder))

    temporary = on_writer(prepare)
    try:
        names = write_folder(
            temporary, config, params, max_shard_bytes=max_shard_bytes, files=files, token_ids=token_ids
        )
        on_writer(lambda: _install(temporary, folder, names) if temporary else None)
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def check_writable(config: ModelConfig, params: Mapping[str, Writable], max_shard_bytes: int) -> None:
    """Raises ValueError where `save_hf` would refuse; nothing is written."""
    check_params(config, params)  # type: ignore[arg-type]  # it looks at names and shapes only
    config_to_hf(config)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    for name, param in params.items():
        if param.dtype not in DTYPES.values():
            able = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"parameter {name} is {param.dtype}; only {able} can be written")


def write_folder(
    folder: Path | None,
    config: ModelConfig,
    params: Mapping[str, Writable],
    *,
    max_shard_bytes: int,
    files: Mapping[str, bytes] | None = None,
    token_ids: Mapping[str, int | list[int] | None] | None = None,
) -> list[str]:
    """Writes an export into a folder of its own, config.json last; weight files that are there already are kept.

    Each weight file is renamed into place when it is whole, so that an export that was cut off goes on. The caller sees
    to it that those files are of the same model and settings.

    Args:
      folder: exists; None on processes that do not write.
      config: the model.
      params: its parameters.
      max_shard_bytes: see `save_hf`, as `files` and `token_ids`.
      files: further files.
      token_ids: for config.json.

    Returns:
      Names of the weight files, the entry file (index, or the single one) last.
    """
    dtype = jnp.result_type(*(p.dtype for p in params.values()))
    raw_config = config_to_hf(config, dtype=dtype.name) | dict(token_ids or {})
    shards = _plan_shards(config, params, max_shard_bytes)
    weight_map: dict[str, str] = {}
    error: OSError | None = None
    for number, shard in enumerate(shards, start=1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        sources = {_new_tensor(params[param], param, layer): (param, layer) for param, layer in shard}
        weight_map |= {tensor.name: file_name for tensor in sources}
        if folder and (folder / file_name).exists():
            continue
        tensors = in_file_order(sources)
        values = (_blocks(params, *sources[tensor]) for tensor in tensors)
        try:
            if folder and not error:
                write_file(folder / file_name, tensors, values)
        except OSError as failure:  # a full disk: the others must not wait for this process
            error = failure
        for _ in values:  # whoever does not write takes part in gathering all the same
            pass
    all_succeeded(error, "writing the weights")
    if folder:
        if len(shards) > 1:
            total = sum(math.prod(p.shape) * p.dtype.itemsize for p in params.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_durably(folder / INDEX_FILE, _json_bytes(index))
        for name, content in {**(files or {}), CONFIG_FILE: _json_bytes(raw_config)}.items():
            _write_durably(folder / name, content)
    names = sorted(set(weight_map.values()))
    return names if len(shards) == 1 else [*names, INDEX_FILE]


def _plan_shards(
    config: ModelConfig, params: Mapping[str, Writable], max_shard_bytes: int
) -> list[list[tuple[str, int | None]]]:
    """Splits the tensors (parameter, layer), in order, into files of at most `max_shard_bytes`."""
    shards: list[list[tuple[str, int | None]]] = [[]]
    used = 0
    for param in param_specs(config):
        layers = list(_layers(param, config))
        size = math.prod(params[param].shape) * params[param].dtype.itemsize // len(layers)
        for layer in layers:
            if shards[-1] and used + size > max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append((param, layer))
            used += size
    return shards


def _new_tensor(value: Writable, param: str, layer: int | None) -> NewTensor:
    return NewTensor(_hf_name(param, layer), _hf_shape(param, value.shape), np.dtype(value.dtype))


def _blocks(params: Mapping[str, Writable], param: str, layer: int | None) -> Iterator[np.ndarray]:
    """One tensor as Hugging Face stores it, block by block. Every process that holds a part has to call this."""
    value = params[param]
    if isinstance(value, jax.Array):
        tensor = _gather(value, layer)
    elif isinstance(value, np.ndarray):
        tensor = value if layer is None else value[layer]
    else:
        tensor = value.read(layer)
    return blocks_of(tensor.T if _is_transposed(param) else tensor, np.dtype(value.dtype), BLOCK_BYTES)


def _gather(value: jax.Array, layer: int | None) -> np.ndarray:
    """An array, or one layer of it, on this host, wherever its parts lie.

    The part is copied on the devices first: a JAX array keeps what it was once read as, for as long as it lives.
    """
    sharding = value.sharding
    if value.is_fully_addressable:
        return np.asarray(_copy(value) if layer is None else _layer(value, layer))
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"parameters of several processes must lie on a mesh, not on {sharding}")
    # First the layer, then the other hosts' parts of it: in one program all layers might be gathered.
    axes = sharding.spec if layer is None else sharding.spec[1:]
    own = NamedSharding(sharding.mesh, PartitionSpec(*axes))
    part = value if layer is None else _jitted(_layer_of, own)(value, layer)
    return np.asarray(_jitted(_copy_of, NamedSharding(sharding.mesh, PartitionSpec()))(part).addressable_data(0))


def _copy_of(value: jax.Array) -> jax.Array:
    return jnp.copy(value)


def _layer_of(value: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)


_copy, _layer = jax.jit(_copy_of), jax.jit(_layer_of)


@cache
def _jitted(function: Callable[..., jax.Array], sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(function, out_shardings=sharding)


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
