"""Several processes, one run: joining them, and agreeing on what each of them alone knows.

`initialize` must come before JAX is used. Afterwards every process runs the same program. What only one of them can
know (a file that exists, a signal that came, an episode that it played) goes round by `gather_objects` or `from_writer`
before anything is decided by it: two processes that decide differently wait for each other for ever. The first process
is the writer; the others touch no file that all share.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


def is_writer() -> bool:
    """Whether this process writes the files of the run."""
    return jax.process_index() == 0


def gather_objects(value: Any) -> list[Any]:
    """What each process calls this with, in the order of the processes, on all of them.

    Values are pickled: they come from processes of the same program.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = _allgather(np.array([data.size], np.int64)).reshape(-1)
    # Few distinct lengths, because each is a program to compile.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: data.size] = data
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(_allgather(padded), sizes, strict=True)]


def _allgather(values: np.ndarray) -> np.ndarray:
    """[processes, ...] from each process' array of one shape; bytes, so that 64-bit numbers keep their width."""
    from jax.experimental import multihost_utils

    raw = np.ascontiguousarray(values).view(np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(raw))
    return gathered.view(values.dtype)


def from_writer(value: T) -> T:
    """The first process' value, on all of them."""
    if jax.process_count() == 1:
        return value
    return gather_objects(value if is_writer() else None)[0]


def on_writer(function: Callable[[], T], what: str = "writing") -> T | None:
    """Runs a function on the first process only; returns (None elsewhere) when it is done, on all of them.

    Raises:
      RuntimeError: it failed, told on the other processes. The first one raises what was raised.
    """
    result, error = None, None
    if is_writer():
        try:
            result = function()
        except Exception as failure:
            error = failure
    all_succeeded(error, what)
    return result


def all_succeeded(error: BaseException | None, what: str) -> None:
    """Raises on all processes if one of them comes with an error; nobody is left waiting.

    Raises:
      RuntimeError: another process failed; where this one did, its own error.
    """
    told = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for process, text in enumerate(told):
        if text is not None:
            raise RuntimeError(f"{what} failed on process {process}: {text}")
