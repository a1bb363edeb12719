"""metrics.jsonl of a run, the same numbers as TensorBoard events, and whoever else follows."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from google.protobuf.message import DecodeError
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from orchestra_jax.train.trackers import Follower

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

_NOT_SHOWN = ("step", "policy_version")


class NoMetrics:
    """What processes that write nothing have in a `MetricsWriter`'s place."""

    def __enter__(self) -> NoMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def flush(self) -> int:
        """Nothing; 0."""
        return 0

    def truncate(self, num_bytes: int) -> None:
        """Nothing."""

    def drop_phase(self, phase: str) -> None:
        """Nothing."""


class MetricsWriter:
    """Appends one JSON object per step to metrics.jsonl, and tells TensorBoard and the trackers the same numbers.

    A checkpoint stores how long the file was (`flush`); resuming cuts it back to that length (`truncate`), so that
    steps which are done again do not stand twice. The TensorBoard events, one folder a phase, are then made anew from
    metrics.jsonl: what was cut is gone from them too, and what a kill kept from reaching the disk is back.

    Args:
        folder: the run's.
        trackers: who is told of every row, see `trackers.open_trackers`; closed with the writer.
    """

    def __init__(self, folder: Path, trackers: Sequence[Follower] = ()) -> None:
        self._path = folder / METRICS_FILE
        self._file = self._path.open("ab")
        self._events = folder / TENSORBOARD_FOLDER
        self._writers: dict[str, SummaryWriter] = {}  # opened when a phase writes first
        self._trackers = tuple(trackers)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for writer in self._writers.values():
            writer.close()
        for tracker in self._trackers:
            tracker.close(failed=kind is not None)

    def write(self, row: dict[str, Any]) -> None:
        """One step of a phase ("train" unless `row["phase"]` says another). Numbers go out under their names.

        A number that is not finite (the gradient norm of a skipped update, say) is null: JSON has no NaN.
        """
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        phase, step, numbers = _parts(row)
        if phase not in self._writers:
            self._writers[phase] = SummaryWriter(str(self._events / phase))
        for name, value in numbers.items():
            self._writers[phase].add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.tell(phase, step, numbers)

    def flush(self) -> int:
        """Puts everything on the disk; returns the length of metrics.jsonl in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        for writer in self._writers.values():
            writer.flush()
        return self._file.tell()

    def truncate(self, num_bytes: int) -> None:
        """Cuts metrics.jsonl back to what it was at a checkpoint, and the TensorBoard events with it."""
        cut = num_bytes < self._path.stat().st_size
        self._file.truncate(num_bytes)
        self._file.seek(num_bytes)
        if cut or not self._writers:  # a process before this one wrote the events, perhaps not all of them
            self._rewrite_events()

    def drop_phase(self, phase: str) -> None:
        """Cuts metrics.jsonl back to before the first row of `phase`: for a phase that starts from its beginning."""
        length = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or json.loads(line).get("phase") == phase:
                break
            length += len(line)
        self.truncate(length)

    def _rewrite_events(self) -> None:
        """Makes the TensorBoard events anew from metrics.jsonl, with the wall-clock times that the old ones had."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        times = _event_times(self._events)
        staging = self._events.with_name(self._events.name + ".tmp")
        shutil.rmtree(staging, ignore_errors=True)
        writers: dict[str, SummaryWriter] = {}
        wall_s = time.time()
        for row in _rows(self._path):
            phase, step, numbers = _parts(row)
            wall_s = times.get((phase, step), wall_s)
            if phase not in writers:
                # Another name than what is written next, within the same second perhaps: it would be overwritten.
                writers[phase] = SummaryWriter(str(staging / phase), filename_suffix=".resumed")
            for name, value in numbers.items():
                writers[phase].add_scalar(name, value, step, walltime=wall_s)
        for writer in writers.values():
            writer.close()
        shutil.rmtree(self._events, ignore_errors=True)
        if staging.is_dir():
            staging.rename(self._events)


def _parts(row: Mapping[str, Any]) -> tuple[str, int, dict[str, float]]:
    """Phase, step and numbers of a row."""
    numbers = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name not in _NOT_SHOWN and not isinstance(value, bool)
    }
    return str(row.get("phase") or "train"), int(row["step"]), numbers


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _event_times(folder: Path) -> dict[tuple[str, int], float]:
    """When each step of each phase was written, as TensorBoard's event files below `folder` say."""
    times: dict[tuple[str, int], float] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        # Events of versions before this one lie in the folder itself, all phases together: their times are not known
        # to be of one phase or another, and the later phase is the one whose steps matter.
        phase = "train" if file.parent == folder else file.parent.name
        for event in _read_events(file):
            if event.HasField("summary"):
                times[phase, event.step] = event.wall_time
    return times


def _read_events(file: Path) -> Iterator[Event]:
    """The events of a file as far as it is whole.

    TFRecord frames: uint64 length, uint32 checksum of it, the event, uint32 checksum of that; all little-endian
    (tensorflow/core/lib/io/record_writer.h).
    """
    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        begin, at = at + 12, at + 12 + length + 4
        if at > len(data):
            return
        try:
            yield Event.FromString(data[begin : begin + length])
        except DecodeError:
            return


Metrics = MetricsWriter | NoMetrics
