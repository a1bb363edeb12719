"""SIGINT and SIGTERM that wait for a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_noted(late: type[KeyboardInterrupt] = KeyboardInterrupt) -> Iterator[list[int]]:
    """A list that the first SIGTERM or SIGINT is put into; a second SIGINT interrupts at once.

    Whoever works looks into the list between two steps: an interrupt in the midst of a call into the device's runtime
    can bring the process down when it exits. Outside the main thread signals are nobody's business, and the list stays
    empty.

    Args:
      late: raised at the end, where a signal came too late for anyone to look into the list.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        raise late
