"""Checkpoints over Orbax: asynchronous, atomic, exact.

A store is one folder with one sub-folder per step:

    <directory>/<step>/arrays/           what Orbax writes: the leaves of the array tree, each under its path
    <directory>/<step>/host_state.json   everything that is no array: counters, cursors, pending text
    <directory>/<step>/COMMITTED.json    our mark, written last: the leaves, and size and CRC-32 of every file

Step S means: after update S; a resumed run goes on with S + 1. Orbax alone may offer a step that was never
finished (its newest folder counts even when empty), so a step counts here if and only if it has the mark,
which is renamed into place after every other byte has been flushed to disk. A kill at any moment leaves the
earlier checkpoints as they were.

One run writes a store; a second writer on the same folder is not supported. Where the run has several processes, all of
them call `save`, `restore` and `wait`: each writes and reads its own parts of the arrays, the first one does the rest.
The folder must be one that all of them see.
"""

import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from orchestra_jax.distributed import all_succeeded, from_writer, is_writer, on_writer

MARK_FILE = "COMMITTED.json"
HOST_STATE_FILE = "host_state.json"
ARRAYS_FOLDER = "arrays"
READ_BYTES = 16 * 2**20
CHUNK_BYTES = 64 * 2**20
"""Arrays are stored in pieces of at most this, along their first axis if that will do: to read a part of an array, on
another number of devices or layer by layer, no more than that is read beside it."""
INCOMPLETE = "ignoring the incomplete checkpoint %s (no valid %s)"

logger = logging.getLogger(__name__)

PyTree = Any


class CheckpointError(ValueError):
    """A checkpoint that is not there or does not fit what is asked of it."""


class CorruptCheckpointError(CheckpointError):
    """A committed checkpoint whose files are no longer what was written."""


class CheckpointSaveError(RuntimeError):
    """A save failed in the background; its cause is chained."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
      directory: the folder; made at the first save.
      keep_latest: how many complete checkpoints to keep, at least 1. Older ones go only after a newer one is
        complete.

    Call `close` (or use `with`) before the program ends, or the last save may stay incomplete.
    """

    def __init__(self, directory: str | os.PathLike[str], keep_latest: int = 3) -> None:
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be at least 1, got {keep_latest}")
        self.directory = Path(directory).resolve()
        self.keep_latest = keep_latest
        # Folders are made before `save` returns: made in the background, a failure leaves Orbax threads
        # waiting for minutes and keeps the program from ending.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def save(self, step: int, arrays: PyTree, host_state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Save the state after update `step`; returns as soon as the arrays have been copied to the host.

        The caller may donate or overwrite the arrays at once. An earlier save still under way is waited for
        first.

        Args:
          step: greater than that of every complete checkpoint here.
          arrays: a tree whose leaves are JAX arrays (typed PRNG keys included) or NumPy arrays.
          host_state: string keys; values that JSON gives back unchanged (no tuples, no integer keys).
          wait: return only when the checkpoint is complete.

        Raises:
          ValueError: the step does not grow, or a leaf or value cannot be stored; the message names it.
          CheckpointSaveError: this save (with `wait`) or the one before failed in the background.
        """
        self.wait()
        latest = from_writer(self.latest_step() if is_writer() else None)
        if step < 0 or (latest is not None and step <= latest):
            raise ValueError(f"step {step} must be at least 0 and above the latest one, {latest}, in {self.directory}")
        leaves = _leaves(arrays)
        _check_json(host_state, "host_state")
        state_text = json.dumps(host_state, indent=1)
        # Orbax refuses arrays without elements; the mark alone describes them.
        stored = {leaf.name: leaf.data for leaf in leaves if leaf.data.size}

        folder = self._folder(step)

        def make_room() -> None:
            if folder.exists():
                logger.warning("replacing the incomplete checkpoint %s", folder)
                shutil.rmtree(folder)
            folder.mkdir(parents=True)

        on_writer(make_room)
        if stored:
            pieces = {
                name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if leaf.ndim else ())
                for name, leaf in stored.items()
            }
            self._orbax.save(folder / ARRAYS_FOLDER, args=ocp.args.PyTreeSave(stored, save_args=pieces))
        mark = {"format": 1, "step": step, "leaves": [leaf.description for leaf in leaves]}
        self._pending = (step, self._worker.submit(self._finish, folder, state_text, mark))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way on any process.

        Raises:
          CheckpointSaveError: the last save failed; told once.
          RuntimeError: it failed on another process.
        """
        if self._pending is None:
            return
        error: CheckpointSaveError | None = None
        try:
            self._wait_here()
        except CheckpointSaveError as failure:
            error = failure
        all_succeeded(error, "saving a checkpoint")

    def _wait_here(self) -> None:
        """`wait` for this process alone."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:
            raise CheckpointSaveError(
                f"saving step {step} into {self._folder(step)} failed ({error}); earlier checkpoints are untouched"
            ) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. Folders without a valid mark are logged as warnings."""
        complete = []
        for step in self._step_folders():
            if self._pending is not None and step == self._pending[0] and not self._pending[1].done():
                continue
            if self._is_complete(step):
                complete.append(step)
            else:
                logger.warning(INCOMPLETE, self._folder(step), MARK_FILE)
        return complete

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def restore(
        self, step: int, abstract_arrays: PyTree = None, *, allow_extra: bool = False
    ) -> tuple[PyTree, dict[str, Any]]:
        """Read one checkpoint, bit for bit.

        Args:
          step: which.
          abstract_arrays: the tree to fill, with the shape, dtype and sharding of each leaf:
            `jax.ShapeDtypeStruct`s (without a sharding: on the first device), JAX arrays, or NumPy arrays
            where NumPy ones are wanted back. None gives nested dicts with the keys the tree had (integers
            stay integers) and NumPy leaves.
          allow_extra: skip leaves of the checkpoint that `abstract_arrays` lacks, to read only the
            parameters, say.

        Returns:
          The arrays and the host state. JAX arrays own their memory, so they can be donated.

        Raises:
          CheckpointError: no such complete step, or leaves are missing, too many, or of another shape or dtype.
          CorruptCheckpointError: a file differs from what was written.
        """
        self.wait()
        found = from_writer(on_writer(lambda: self._intact(step), "reading a checkpoint"))
        assert found is not None  # the first process has either read it or failed on all of them
        mark, host_state = found
        return self._fill(step, mark, abstract_arrays, allow_extra), host_state

    def _intact(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The mark and the host state of a checkpoint whose every file is as it was written; raises as `restore`."""
        folder = self._folder(step)
        mark = _read_mark(folder, step)
        if mark is None:
            raise CheckpointError(f"no complete checkpoint {folder}; complete steps: {self.steps()}")
        _verify_files(folder, mark["files"])
        return mark, json.loads((folder / HOST_STATE_FILE).read_text(encoding="utf-8"))

    def _fill(self, step: int, mark: dict[str, Any], abstract_arrays: PyTree, allow_extra: bool) -> PyTree:
        folder = self._folder(step)
        descriptions = {leaf["name"]: leaf for leaf in mark["leaves"]}
        if abstract_arrays is None:
            values = self._read_arrays(folder, descriptions, {})
            return _nested({name: descriptions[name]["path"] for name in values}, values)
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(abstract_arrays)
        targets = {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
        _check_fit(folder, descriptions, targets, allow_extra)
        values = self._read_arrays(folder, {name: descriptions[name] for name in targets}, targets)
        return jax.tree_util.tree_unflatten(treedef, [values[name] for name in targets])

    def open(self, step: int) -> "tuple[dict[tuple[str | int, ...], StoredLeaf], dict[str, Any]]":
        """One checkpoint's arrays, by their paths in the tree, to be read in parts; and its host state.

        For a process that runs alone. Arrays without elements and random keys are left out.

        Raises:
          CheckpointError: no such complete step.
          CorruptCheckpointError: a file differs from what was written.
        """
        mark, host_state = self._intact(step)
        base = (self._folder(step) / ARRAYS_FOLDER).as_posix() + "/"
        leaves = {
            tuple(leaf["path"]): StoredLeaf(base, leaf["name"], tuple(leaf["shape"]), leaf["dtype"])
            for leaf in mark["leaves"]
            if "prng_impl" not in leaf and 0 not in leaf["shape"]
        }
        return leaves, host_state

    def restore_latest(
        self, abstract_arrays: PyTree = None, *, allow_extra: bool = False
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """`restore` of the newest intact checkpoint, with its step; None if there never was a complete one.

        A corrupt checkpoint is logged as an error, renamed to `<step>.corrupt-<time>` so that its step can be
        saved anew, and the one before it is tried. One that does not fit `abstract_arrays` is an error: an
        older one would not fit either.

        Raises:
          CheckpointError: as `restore`, or every checkpoint is corrupt.
        """
        self.wait()
        found = from_writer(on_writer(self._newest_intact, "reading a checkpoint"))
        if found is None:
            return None
        step, mark, host_state = found
        return step, self._fill(step, mark, abstract_arrays, allow_extra), host_state

    def _newest_intact(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        corrupt = []
        for step in reversed(self._step_folders()):
            folder = self._folder(step)
            # A mark that cannot be read was once whole: that checkpoint is corrupt, not incomplete.
            if not (folder / MARK_FILE).exists():
                logger.warning(INCOMPLETE, folder, MARK_FILE)
                continue
            try:
                return (step, *self._intact(step))
            except CorruptCheckpointError as error:
                aside = self.directory / f"{step}.corrupt-{time.time_ns()}"
                logger.error("%s; moved to %s, trying the checkpoint before it", error, aside)
                folder.rename(aside)
                corrupt.append(step)
        if corrupt:
            raise CorruptCheckpointError(f"every checkpoint in {self.directory} is corrupt: steps {corrupt}")
        return None

    def close(self) -> None:
        """Wait for this process' part of the last save and end the background threads.

        Nothing is agreed upon with other processes: one that ends with an error must not wait for them.

        Raises:
          CheckpointSaveError: as `wait`.
        """
        try:
            self._wait_here()
        finally:
            self._worker.shutdown()
            self._orbax.close()

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def _step_folders(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = [entry.name for entry in self.directory.iterdir() if entry.is_dir()]
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def _is_complete(self, step: int) -> bool:
        try:
            return _read_mark(self._folder(step), step) is not None
        except CorruptCheckpointError:
            return False

    def _finish(self, folder: Path, state_text: str, mark: dict[str, Any]) -> None:
        """In the background: when Orbax is done, make everything durable, then commit, then prune."""
        self._orbax.wait_until_finished()  # for all processes' parts
        if not is_writer():
            return
        (folder / HOST_STATE_FILE).write_text(state_text, encoding="utf-8")
        _commit(folder, mark | {"files": _flush_files(folder)})
        self._prune(mark["step"])

    def _prune(self, newest: int) -> None:
        """Delete all but the newest checkpoints, and incomplete ones older than `newest`, which is complete."""
        complete = [step for step in self._step_folders() if self._is_complete(step)]
        keep = set(complete[-self.keep_latest :])
        for step in self._step_folders():
            if step < newest and step not in keep:
                # Without its mark a half-deleted checkpoint cannot be taken for a complete one.
                (self._folder(step) / MARK_FILE).unlink(missing_ok=True)
                shutil.rmtree(self._folder(step))

    def _read_arrays(
        self, folder: Path, descriptions: Mapping[str, dict[str, Any]], targets: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The described leaves by name, as `targets` wants them; NumPy where there is no target."""
        wanted = {name: _orbax_target(leaf, targets.get(name)) for name, leaf in descriptions.items()}
        stored = {name: target for name, target in wanted.items() if 0 not in target.shape}
        values: dict[str, Any] = {}
        if stored:
            args = ocp.args.PyTreeRestore(
                item=stored,
                restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
                partial_restore=True,
            )
            values = self._orbax.restore(folder / ARRAYS_FOLDER, args=args)
        result = {}
        for name, target in wanted.items():
            value = values.pop(name) if name in values else _zeros(target)
            if value.shape != target.shape or value.dtype != target.dtype:
                raise CheckpointError(
                    f"{folder}: leaf {name} came back as {value.dtype}{list(value.shape)} instead of "
                    f"{target.dtype}{list(target.shape)}; for 64-bit JAX arrays enable jax_enable_x64"
                )
            if isinstance(value, jax.Array):
                # Memory that XLA did not allocate is not reused when donated: the first step would take twice as much.
                value = jnp.copy(value)
            if "prng_impl" in descriptions[name]:
                value = jax.random.wrap_key_data(jnp.asarray(value), impl=descriptions[name]["prng_impl"])
            result[name] = value
        return result


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """An array of a checkpoint, not read yet."""

    base: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, row: int | None = None) -> np.ndarray:
        """Its values, or those of one row of its first axis."""
        place = {"driver": "ocdbt", "base": f"file://{self.base}", "path": f"{self.name}/"}
        stored = tensorstore.open({"driver": "zarr", "kvstore": place}, open=True, read=True).result()
        return (stored if row is None else stored[row]).read().result()


# --- trees ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf as it is stored: by name in a flat dict, so that no key of the tree has to survive Orbax."""

    name: str
    data: jax.Array | np.ndarray
    description: dict[str, Any]


def _leaves(tree: PyTree) -> list[_Leaf]:
    leaves = []
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        description: dict[str, Any] = {"name": name, "path": [_plain_key(key) for key in path]}
        data: jax.Array | np.ndarray
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(value)
            description |= {
                "prng_impl": str(jax.random.key_impl(value)),
                "data_shape": list(data.shape),
                "data_dtype": str(data.dtype),
            }
        elif isinstance(value, jax.Array):
            data = value
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OUSMm":
            data = np.asarray(value)
        else:
            raise ValueError(
                f"leaf {name} is a {type(value).__name__}, not a numeric array; make it one or put it into host_state"
            )
        leaves.append(_Leaf(name, data, description | {"shape": list(value.shape), "dtype": str(value.dtype)}))
    return leaves


def _plain_key(key: Any) -> str | int:
    """The key of a dict, the index of a sequence, or the name of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            plain = getattr(key, attribute)
            return plain if isinstance(plain, str | int) else str(plain)
    return str(key)


def _nested(paths: Mapping[str, list[str | int]], values: Mapping[str, Any]) -> PyTree:
    """Nested dicts from paths; the bare leaf if the tree was one."""
    tree: dict[str | int, Any] = {}
    for name, path in paths.items():
        if not path:
            return values[name]
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = values[name]
    return tree


def _check_fit(
    folder: Path, descriptions: Mapping[str, dict[str, Any]], targets: Mapping[str, Any], allow_extra: bool
) -> None:
    problems = [f"missing in the checkpoint: {name}" for name in targets if name not in descriptions]
    if not allow_extra:
        problems += [f"only in the checkpoint: {name}" for name in descriptions if name not in targets]
    for name, target in targets.items():
        if name in descriptions:
            found = f"{descriptions[name]['dtype']}{descriptions[name]['shape']}"
            asked = f"{target.dtype}{list(target.shape)}"
            if found != asked:
                problems.append(f"{name}: {found} in the checkpoint, {asked} asked for")
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"the checkpoint {folder} does not fit (is the configuration the one it was saved with?):\n  "
            + "\n  ".join(problems[:20])
            + more
        )


def _orbax_target(description: Mapping[str, Any], target: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    """What Orbax is asked to restore: abstract for a JAX array, a NumPy array (of no memory) for a NumPy one."""
    is_key = "prng_impl" in description
    shape = tuple(description["data_shape" if is_key else "shape"])
    dtype = jnp.dtype(description["data_dtype" if is_key else "dtype"])
    if target is None or isinstance(target, np.ndarray | np.generic):
        return np.broadcast_to(np.zeros((), dtype), shape)
    sharding = getattr(target, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _zeros(target: jax.ShapeDtypeStruct | np.ndarray) -> jax.Array | np.ndarray:
    empty = np.zeros(target.shape, target.dtype)
    return empty if isinstance(target, np.ndarray) else jax.device_put(empty, target.sharding)


def _check_json(value: Any, name: str) -> None:
    """Raise unless JSON gives `value` back unchanged: integer keys would return as strings, tuples as lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; keys must be strings")
            _check_json(item, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{name}[{index}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"{name} is a {type(value).__name__}; only dict, list, str, int, float, bool and None fit")


# --- files ------------------------------------------------------------------------------------------------------------


def _read_mark(folder: Path, step: int) -> dict[str, Any] | None:
    """The commit mark, or None if there is none.

    Raises:
      CorruptCheckpointError: the mark is damaged or belongs to another step.
    """
    try:
        mark = json.loads((folder / MARK_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptCheckpointError(f"the checkpoint {folder} is corrupt: {MARK_FILE} is no JSON ({error})") from error
    if not isinstance(mark, dict) or mark.pop("crc32", None) != _crc_of_mark(mark):
        raise CorruptCheckpointError(f"the checkpoint {folder} is corrupt: {MARK_FILE} does not match its own checksum")
    if mark["step"] != step:
        raise CorruptCheckpointError(f"the checkpoint {folder} is not of step {step}: {MARK_FILE} says {mark['step']}")
    return mark


def _commit(folder: Path, mark: Mapping[str, Any]) -> None:
    """Write the mark under another name, flush it, and rename it: it is there whole or not at all."""
    temporary = folder / f"{MARK_FILE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({**mark, "crc32": _crc_of_mark(mark)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARK_FILE)
    _flush_folder(folder)
    _flush_folder(folder.parent)


def _crc_of_mark(mark: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(mark, sort_keys=True).encode())


def _flush_files(folder: Path) -> dict[str, list[int]]:
    """Force every file to disk; `[size in bytes, CRC-32]` by path relative to the folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            _flush_folder(path)
        else:
            files[path.relative_to(folder).as_posix()] = list(_size_and_crc(path, flush=True))
    return files


def _verify_files(folder: Path, files: Mapping[str, list[int]]) -> None:
    for name, (size, crc) in files.items():
        try:
            found = _size_and_crc(folder / name)
        except OSError as error:
            raise CorruptCheckpointError(f"the checkpoint {folder} is corrupt: {error}") from error
        if found != (size, crc):
            raise CorruptCheckpointError(
                f"the checkpoint {folder} is corrupt: {name} has {found[0]} bytes and CRC-32 {found[1]:08x}, "
                f"written were {size} bytes and {crc:08x}"
            )


def _size_and_crc(path: Path, *, flush: bool = False) -> tuple[int, int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
        if flush:
            os.fsync(file.fileno())
    return size, crc


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
