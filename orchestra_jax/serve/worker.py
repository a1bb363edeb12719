"""The thread that owns the engine: takes turns and cancellations from a queue, runs rounds, hands out what was sampled.

Nothing in an engine is thread-safe, and a round takes as long as it takes, so no event loop may wait for one::

    worker = EngineThread(make_engine)
    worker.start()
    ...                                         # in an event loop
    events = asyncio.Queue()
    turn = worker.submit(request, events)
    while True:
        turn, event = await events.get()        # Progress, Progress, ..., then Ended or Failed
    worker.cancel(turn)                         # at any time; its slot is free after the round under way
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from orchestra_jax.sampler.engine import Engine, Request, SampledTurn
from orchestra_jax.serve.errors import ApiError

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Turns that wait for a slot by default; more are refused."""


@dataclass(frozen=True)
class Progress:
    """Tokens that were sampled since the last event."""

    tokens: Sequence[int]


@dataclass(frozen=True)
class Ended:
    """The turn is over: its last tokens, and all of it."""

    tokens: Sequence[int]
    turn: SampledTurn


@dataclass(frozen=True)
class Failed:
    """The turn is over without a result."""

    error: ApiError


Event = Progress | Ended | Failed


@dataclass(eq=False)
class Turn:
    """A turn under way. Two turns of one conversation are different, though they have the same key."""

    request: Request
    events: asyncio.Queue[tuple[Turn, Event]]
    loop: asyncio.AbstractEventLoop
    since: float
    """When it was submitted, of `time.monotonic`."""
    num_sent: int = 0


class _Command(NamedTuple):
    name: str
    turn: Turn | None = None


class EngineThread:
    """See the module's text.

    Args:
        make_engine: makes the engine, its weights in use; called again if a round raises, since nobody knows then what
            is in the cache.
        max_waiting: turns beyond the engine's slots that are taken.

    Attributes:
        engine: for its statistics; nothing else of it may be touched from outside. None while there is none.
        fault: why no turn can be sampled any more, or None.
    """

    def __init__(self, make_engine: Callable[[], Engine], *, max_waiting: int = MAX_WAITING) -> None:
        self._make_engine = make_engine
        self.engine: Engine | None = make_engine()
        self.slots = self.engine.slots
        self.most = self.slots + max_waiting
        self.fault: str | None = None
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        # Of the event loop's side:
        self._open: dict[Hashable, Turn] = {}
        self._turn_s = 1.0
        # Of the thread's side:
        self._active: dict[Hashable, Turn] = {}
        self._kept: OrderedDict[Hashable, None] = OrderedDict()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after the round under way; turns that are not done fail."""
        self._commands.put(_Command("close"))
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def num_open(self) -> int:
        """Turns that were submitted and are not over."""
        return len(self._open)

    def is_open(self, key: Hashable) -> bool:
        """Whether the conversation has a turn that is not over; then it can have no other."""
        return key in self._open

    def submit(self, request: Request, events: asyncio.Queue[tuple[Turn, Event]]) -> Turn:
        """Hands a turn to the engine; what becomes of it is put into `events`. To be called in an event loop.

        Raises:
            ApiError: too many turns are waiting, or the engine is broken.
            ValueError: the conversation has a turn under way.
        """
        self.check_room(1)
        if request.key in self._open:
            raise ValueError(f"conversation {request.key!r} has a turn under way")
        turn = Turn(request, events, asyncio.get_running_loop(), time.monotonic())
        self._open[request.key] = turn
        self._commands.put(_Command("submit", turn))
        return turn

    def check_room(self, count: int) -> None:
        """Whether so many turns can be submitted.

        Raises:
            ApiError: not now; the error says when to try again.
        """
        if self.fault is not None:
            raise ApiError(503, self.fault, code="engine_broken")
        if len(self._open) + count > self.most:
            rounds = (len(self._open) + count - self.most) / self.slots
            raise ApiError(
                429,
                f"{len(self._open)} turns are under way or waiting, as many as this server takes ({self.most})",
                code="queue_full",
                retry_after_s=min(60, max(1, math.ceil(rounds * self._turn_s))),
            )

    def cancel(self, turn: Turn) -> None:
        """Drops a turn; nothing is put into its events any more by what happens later. No error if it is over."""
        if self._open.get(turn.request.key) is turn:
            del self._open[turn.request.key]
            self._commands.put(_Command("cancel", turn))

    def _deliver(self, events: Sequence[tuple[Turn, Event]]) -> None:
        """In the event loop."""
        for turn, event in events:
            if self._open.get(turn.request.key) is not turn:
                continue  # cancelled
            if not isinstance(event, Progress):
                del self._open[turn.request.key]
                if isinstance(event, Ended):
                    self._turn_s += 0.1 * (time.monotonic() - turn.since - self._turn_s)
            turn.events.put_nowait((turn, event))

    # The thread.

    def _work(self) -> None:
        open_ = True
        while open_:
            error = None
            try:
                open_ = self._take_commands()
                if open_ and self._active:
                    self._round()
            except Exception as fault:
                log.exception("a round of the engine failed")
                error = f"the sampler failed: {type(fault).__name__}: {fault}"
            if error:  # out of the handler, so that the fault does not keep the old engine's cache alive
                self._fail_all(ApiError(500, error, code="sampler_error"))
                self._start_anew()
        self.fault = "the server is shutting down"
        while not self._commands.empty():
            command = self._commands.get()
            if command.name == "submit" and command.turn is not None:
                self._active[command.turn.request.key] = command.turn
        self._fail_all(ApiError(503, self.fault, code="shutting_down"))

    @property
    def _engine_at_work(self) -> Engine:
        if self.engine is None:
            raise RuntimeError(self.fault)
        return self.engine

    def _take_commands(self) -> bool:
        """All that are there; waits for one if there is nothing else to do. False: the end."""
        while not self._active or not self._commands.empty():
            command = self._commands.get()
            if command.name == "close":
                return False
            assert command.turn is not None
            (self._admit if command.name == "submit" else self._drop)(command.turn)
        return True

    def _admit(self, turn: Turn) -> None:
        key = turn.request.key
        try:
            self._engine_at_work.submit(turn.request)
        except Exception as error:
            log.exception("a turn was refused by the engine")
            self._send([(turn, Failed(ApiError(500, f"the sampler refused the turn: {error}", code="sampler_error")))])
            return
        self._kept.pop(key, None)
        self._active[key] = turn
        self._release_oldest()

    def _drop(self, turn: Turn) -> None:
        if self._active.get(turn.request.key) is turn:
            del self._active[turn.request.key]
            self._engine_at_work.cancel(turn.request.key)

    def _release_oldest(self) -> None:
        """Conversations keep their slots for their next turns; where there are more than slots, the oldest give way."""
        while self._kept and len(self._kept) + len(self._active) > self.slots:
            self._engine_at_work.release(self._kept.popitem(last=False)[0])

    def _round(self) -> None:
        engine = self._engine_at_work
        done = {sampled.key: sampled for sampled in engine.run()}
        events: list[tuple[Turn, Event]] = []
        for key, turn in self._active.items():
            if key in done and (fault := done[key].error):
                events.append((turn, Failed(ApiError(500, f"the turn failed: {fault}", code="turn_error"))))
            elif key in done:
                events.append((turn, Ended(done[key].tokens[turn.num_sent :], done[key])))
            elif new := engine.partial(key)[turn.num_sent :]:
                turn.num_sent += len(new)
                events.append((turn, Progress(new)))
        for key in done:
            del self._active[key]
            self._kept[key] = None
        self._send(events)
        self._release_oldest()

    def _fail_all(self, error: ApiError) -> None:
        failed, self._active = list(self._active.values()), {}
        self._send([(turn, Failed(error)) for turn in failed])

    def _start_anew(self) -> None:
        """A new engine in place of one that failed."""
        self._kept.clear()
        self.engine = None  # its cache makes room for the new one's
        try:
            self.engine = self._make_engine()
        except Exception as error:
            log.exception("the engine cannot be made anew")
            self.fault = f"the sampler failed and cannot be started anew: {type(error).__name__}: {error}"

    def _send(self, events: Sequence[tuple[Turn, Event]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Turn, Event]]] = {}
        for turn, event in events:
            by_loop.setdefault(turn.loop, []).append((turn, event))
        for loop, its_events in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(self._deliver, its_events)
