"""metrics.jsonl and TensorBoard events of a run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"


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
    """Appends one JSON object per step to metrics.jsonl, and the same numbers to TensorBoard.

    A checkpoint stores how long the file was (`flush`); resuming cuts it back to that length (`truncate`), so that
    steps which are done again do not stand twice.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._file = self._path.open("ab")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._tensorboard.close()

    def write(self, row: dict[str, Any]) -> None:
        """One step. Numbers other than `step` go to TensorBoard under their names.

        A number that is not finite (the gradient norm of a skipped update, say) is null: JSON has no NaN.
        """
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "policy_version"):
                self._tensorboard.add_scalar(name, value, row["step"])

    def flush(self) -> int:
        """Puts everything on the disk; returns the length of metrics.jsonl in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def truncate(self, num_bytes: int) -> None:
        """Cuts metrics.jsonl back to what it was at a checkpoint."""
        self._file.truncate(num_bytes)
        self._file.seek(num_bytes)

    def drop_phase(self, phase: str) -> None:
        """Cuts metrics.jsonl back to before the first row of `phase`: for a phase that starts from its beginning."""
        length = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or json.loads(line).get("phase") == phase:
                break
            length += len(line)
        self.truncate(length)


Metrics = MetricsWriter | NoMetrics
