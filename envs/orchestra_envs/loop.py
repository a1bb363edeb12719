"""The event loop of the tools: one background thread per process, on which everything that waits runs.

Environments are written as coroutines and used from plain code. `drive` runs such a coroutine in the caller's thread
for as long as nothing waits (simulated tools never do), and moves what is left of it to the background loop at its
first `await on_loop()`. So a simulated step costs no thread switch, a hundred slow calls cost one call's time, and it
works inside notebooks and other event loops.
"""

import asyncio
import os
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()
_MOVE = object()


def tool_loop() -> asyncio.AbstractEventLoop:
    """The process's background loop, started at the first use."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="orchestra-tools", daemon=True).start()
        return _loop


def run_on_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` on the background loop and wait for its result, from any thread but the loop's own.

    Raises:
        RuntimeError: called on the background loop itself, which would wait for itself for ever.
    """
    loop = tool_loop()
    if _running_loop() is loop:
        coroutine.close()
        raise RuntimeError("this runs on the tools' event loop already: await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(_contained(coroutine), loop)
    try:
        return _opened(future.result())
    except BaseException:  # interrupted while waiting: leave no task behind
        future.cancel()
        raise


def drive(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine whose every wait comes after an `await on_loop()`; see the module's text."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    return run_on_loop(coroutine)  # a task begins where the coroutine stands


def drive_all(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T | Exception]:
    """`drive` many at once: those that wait do so together. Results, or what was raised, in their order."""
    results: dict[int, Any] = {}
    waiting: dict[int, Coroutine[Any, Any, _T]] = {}
    for index, coroutine in enumerate(coroutines):
        try:
            coroutine.send(None)
        except StopIteration as stop:
            results[index] = stop.value
        except Exception as error:
            results[index] = error
        else:
            waiting[index] = coroutine
    if waiting:
        results.update(zip(waiting, run_on_loop(_gathered(waiting.values()))))
    return [results[index] for index in range(len(results))]


def start(coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
    """Run a coroutine without waiting for it; `done` gets its result, or the exception that it raised.

    As with `drive`, one that never waits has ended when this returns, and `done` was called by the caller's thread;
    else it goes on on the background loop, whose thread calls `done`.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        done(stop.value)
    except Exception as error:
        done(error)
    else:
        asyncio.run_coroutine_threadsafe(_told(coroutine, done), tool_loop())


async def _gathered(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[Any]:
    return await asyncio.gather(*map(_caught, coroutines))


async def _told(coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
    result, error = await _contained(_caught(coroutine))
    done(result if error is None else error)


async def _caught(coroutine: Coroutine[Any, Any, _T]) -> Any:
    try:
        return await _rest_of(coroutine)
    except Exception as error:
        return error


async def bridge(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Await `coroutine` on the background loop from whatever loop this is (and under `drive`, which runs no loop)."""
    loop = tool_loop()
    if _running_loop() in (None, loop):
        return await coroutine
    return _opened(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contained(coroutine), loop)))


@types.coroutine
def on_loop() -> Generator[Any, None, None]:
    """To be awaited before anything that waits, in coroutines that `drive` runs."""
    if _running_loop() is not tool_loop():
        yield _MOVE


async def _contained(coroutine: Coroutine[Any, Any, _T]) -> tuple[_T | None, BaseException | None]:
    """What the coroutine returns, or what would stop the loop that all share."""
    try:
        return await _rest_of(coroutine), None
    except (KeyboardInterrupt, SystemExit) as error:
        return None, error


@types.coroutine
def _rest_of(coroutine: Coroutine[Any, Any, _T]) -> Generator[Any, Any, _T]:
    return (yield from coroutine)  # `await` refuses a coroutine that has begun


def _opened(contained: tuple[Any, BaseException | None]) -> Any:
    result, error = contained
    if error is not None:
        raise error
    return result


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _forget_loop() -> None:
    """In a forked child: the loop's thread stayed with the parent."""
    global _loop, _loop_lock
    _loop, _loop_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)
