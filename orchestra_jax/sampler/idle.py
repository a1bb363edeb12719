"""Whether the device waited for Python: the time between two pieces of work while there was work to give it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from typing import Any

import jax


class DeviceClock:
    """Notes, in a thread of its own, when the device is done with each piece of work.

    `idle_s` of `working_s + idle_s` is the time in which it had nothing to do though there was something.
    """

    def __init__(self) -> None:
        self._times = {"idle": 0.0, "working": 0.0}
        self._pieces: queue.Queue[tuple[float, float, Any] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def given(self, at: float, since: float, handle: Any) -> None:
        """The device was given work.

        Args:
            at: when (`time.perf_counter`).
            since: from when on there was work that could have been given.
            handle: an array (or several) that is ready when the work is done; nobody donates it.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(self._pieces, self._times), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._pieces.put, None)
        self._pieces.put((at, since, handle))

    def settle(self) -> None:
        """Waits until all work is done and counted."""
        self._pieces.join()

    def reset(self) -> None:
        """Counts from zero again, once what was given is done."""
        self.settle()
        self._times.update(idle=0.0, working=0.0)

    @property
    def idle_s(self) -> float:
        """Seconds without work though there was some to give."""
        return self._times["idle"]

    @property
    def working_s(self) -> float:
        """Seconds at work."""
        return self._times["working"]

    @property
    def idle_share(self) -> float:
        """Idle seconds by all seconds in which there was work."""
        return self.idle_s / max(1e-9, self.idle_s + self.working_s)


def _watch(pieces: queue.Queue, times: dict[str, float]) -> None:
    done = 0.0
    while (piece := pieces.get()) is not None:
        at, since, handle = piece
        with contextlib.suppress(Exception):  # whoever reads the result is told; here only the time counts
            jax.block_until_ready(handle)
        free, done = max(done, since), time.perf_counter()
        times["idle"] += max(0.0, at - free)
        times["working"] += max(0.0, done - max(free, at))
        del piece, handle
        pieces.task_done()
