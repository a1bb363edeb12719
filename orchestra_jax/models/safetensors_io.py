"""Safetensors files, read by slices and written in a stream.

Reading maps a file into memory one tensor at a time, and only while it is copied from: nothing of a file stays in the
process. Headers are checked by the safetensors library (sizes, offsets without gaps or overlaps, the file's length)
before an offset is used. Writing needs shapes and dtypes beforehand and holds one block of one tensor at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES = {"F32": np.dtype(jnp.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(jnp.float16)}
"""The weights that are read and written here, by the format's names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

COPY_BLOCK = 128
"""Rows and columns that are copied at a time: transposed, a whole matrix at once takes ten times as long."""


class StoredTensor(NamedTuple):
    """One tensor of a file, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As the format names it: F32, BF16, I8, ..."""
    start: int
    """Its first byte in the file."""

    def view(self) -> np.ndarray:
        """The tensor as an array that lies in the file; let it go soon, what was read of it counts as memory."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.start, self.shape)


class NewTensor(NamedTuple):
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_file(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, unread.

    Raises:
      ValueError: the file is no safetensors file, damaged or cut off; the message names it.
    """
    try:
        with safe_open(file, framework="np"):
            pass  # checks everything that the header says against itself and against the file's length
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a readable safetensors file: {error} (cut off or damaged? Copy or download it again)"
        ) from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, cast on the way; in blocks if source is a matrix that lies transposed in memory."""
    if source.ndim != 2 or source.flags.c_contiguous:
        target[...] = source
        return
    rows, columns = source.shape
    for row in range(0, rows, COPY_BLOCK):
        for column in range(0, columns, COPY_BLOCK):
            part = (slice(row, row + COPY_BLOCK), slice(column, column + COPY_BLOCK))
            target[part] = source[part]


def blocks_of(tensor: np.ndarray, dtype: np.dtype, block_bytes: int) -> Iterator[np.ndarray]:
    """The tensor's rows in contiguous blocks of `dtype`, each of at most `block_bytes` (or one row)."""
    row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
    step = max(1, block_bytes // row_bytes)
    for row in range(0, tensor.shape[0], step):
        part = tensor[row : row + step]
        block = np.empty(part.shape, dtype)
        copy_into(block, part)
        yield block


def in_file_order(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    """Wider types first: then every tensor starts at a multiple of its own width, as readers may ask for."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def write_file(file: Path, tensors: Sequence[NewTensor], values: Iterator[Iterable[np.ndarray]]) -> None:
    """Writes a file beside `file`, flushes it to the disk and renames it: it is there whole or not at all.

    Args:
      file: replaced if it exists.
      tensors: in the order of the file.
      values: of each, in as many blocks as one likes, each contiguous and of the tensor's dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[tensor.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    staging = file.with_name(file.name + ".tmp")
    with staging.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for blocks in values:
            for block in blocks:
                stream.write(block.reshape(-1).view(np.uint8).data)
        if stream.tell() != 8 + len(text) + end:
            raise ValueError(f"{file}: {stream.tell()} bytes were written, not {8 + len(text) + end}")
        stream.flush()
        os.fsync(stream.fileno())
    staging.rename(file)
