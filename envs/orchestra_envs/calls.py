"""Running the calls of one turn: every fault becomes a `CallRecord` that the policy can read.

Unknown tool, wrong arguments, exception, time-out, unavailable backend, unusable result: nothing but
`KeyboardInterrupt` gets out of `run_calls`, and nothing in it waits for ever.
"""

import asyncio
import copy
import functools
import hashlib
import inspect
import json
import logging
import re
import threading
import time
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.loop import on_loop
from orchestra_envs.parse import ToolCall, replace_surrogates
from orchestra_envs.tools import CallContext, CallRecord, Tool, ToolArgumentError, ToolResult, is_number

MAX_HUNG_CALLS = 8
"""Calls of plain functions that may have outlived their time limit before their tool is refused."""

BLOCKED_S = 0.25
"""Seconds of an async tool without awaiting anything that are worth a warning."""

MAX_CALL_THREADS = 512
"""Plain functions that run at once in a process; more wait, each for at most the others' time limits."""

MAX_COST_USD = 1e6
"""More than this for one call is a mistake of the tool."""

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


async def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    make_context: Callable[[int], CallContext],
    *,
    max_output_chars: int,
    budget_usd: float | None = None,
    state_hash: Callable[[str], str | None] = lambda name: None,
) -> list[CallRecord]:
    """Run the calls of one turn; one record a call, in the order of the calls. No fault of a tool gets out.

    Plain functions run one after the other, async ones all at once, beside them. Meant for `loop.drive`: where all
    tools are inline, nothing waits.

    Args:
        calls: what the policy asked for.
        tools: by name.
        make_context: the context of the i-th of these calls; used only for tools that want one.
        max_output_chars: longer texts are cut there and marked.
        budget_usd: a call that would start when this turn has spent so much is refused; async calls that are
            under way count with their price per call. None for no limit.
        state_hash: asked with a tool's name right before its call; written into the record.
    """
    under_way: dict[int, asyncio.Task[_Outcome]] = {}
    try:
        return await _run_all(calls, tools, make_context, max_output_chars, budget_usd, state_hash, under_way)
    except BaseException:
        for task in under_way.values():
            task.cancel()
        raise


async def _run_all(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    make_context: Callable[[int], CallContext],
    max_output_chars: int,
    budget_usd: float | None,
    state_hash: Callable[[str], str | None],
    under_way: dict[int, "asyncio.Task[_Outcome]"],
) -> list[CallRecord]:
    """See `run_calls`; the tasks of async calls are entered into `under_way`."""
    records: dict[int, CallRecord] = {}
    states: dict[int, str | None] = {}
    spent_usd = 0.0
    for index, call in enumerate(calls):
        tool = tools.get(call.name)
        states[index] = None if tool is None else state_hash(call.name)
        if budget_usd is not None and spent_usd >= budget_usd:
            outcome = _refused("budget", "the budget is spent; the call was refused")
        elif tool is None:
            outcome = _refused("unknown_tool", f"there is no tool {call.name!r}; tools: {', '.join(tools) or 'none'}")
        elif message := _argument_error(tool, call):
            outcome = _refused("invalid_arguments", f"{call.name}: {message}")
        else:
            function = functools.partial(_call, tool, call, functools.partial(make_context, index))
            if tool.inline:
                outcome = _Outcome(_caught(function))
            elif tool.is_async:
                await on_loop()
                under_way[index] = asyncio.ensure_future(_run(tool, function))
                spent_usd += tool.price.per_call_usd
                continue
            else:
                await on_loop()
                outcome = await _run(tool, function)
        records[index] = _record(call, tool, outcome, max_output_chars, states[index])
        spent_usd += records[index].cost_usd
    for index, task in under_way.items():
        tool = tools[calls[index].name]
        records[index] = _record(calls[index], tool, await task, max_output_chars, states[index])
    return [records[index] for index in range(len(calls))]


def cap_text(text: str, max_chars: int) -> tuple[str, int]:
    """The first `max_chars` characters with a mark that says how many were cut, and that number."""
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text, 0
    return f"{text[:max_chars]}\n[{num_cut} characters cut]", num_cut


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a call has no result. `cost_usd` and `latency_s` of None: by the tool's price and clock."""

    error_type: str
    message: str
    cost_usd: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of a call: what its function returned or raised, or a `_Fault`; and the failed attempts' bill."""

    value: Any
    attempts: int = 1
    wall_s: float = 0.0
    queue_s: float = 0.0
    failed: tuple[ToolUnavailableError, ...] = ()


def _refused(error_type: str, message: str) -> _Outcome:
    return _Outcome(_Fault(error_type, message, 0.0, 0.0), attempts=0)


def _argument_error(tool: Tool, call: ToolCall) -> str:
    try:
        return tool.argument_error(call.arguments)
    except RecursionError:
        return "the arguments are nested too deeply"


def _call(tool: Tool, call: ToolCall, make_context: Callable[[], CallContext]) -> Any:
    arguments = _own_copy(call.arguments)
    if tool._context_argument is not None:
        arguments[tool._context_argument] = make_context()
    return tool.function(**arguments)


def _caught(function: Callable[[], Any]) -> Any:
    """What `function` returns or raises. SystemExit out of a task would stop the loop that all tools share."""
    try:
        return function()
    except BaseException as error:
        return error


async def _run(tool: Tool, function: Callable[[], Any]) -> _Outcome:
    """The call within the tool's limits: a turn of its limiter, its retries, its time."""
    if tool.limiter is None:
        return await _within_time(tool, function, queue_s=0.0)
    async with tool.limiter.slot() as queue_s:
        return await _within_time(tool, function, queue_s)


async def _within_time(tool: Tool, function: Callable[[], Any], queue_s: float) -> _Outcome:
    """A call that ignores its cancellation is left behind, not waited for."""
    attempts = _Attempts(tool, function)
    start = time.perf_counter()
    task = asyncio.ensure_future(_awaited(attempts.run()))
    try:
        done, _ = await asyncio.wait({task}, timeout=tool.timeout_s)
        late_s = time.perf_counter() - start - tool.timeout_s
        if not done and late_s > BLOCKED_S:
            # Another tool blocked the loop: this one could not run either, and gets the time back.
            done, _ = await asyncio.wait({task}, timeout=late_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        value = task.result()
    else:
        attempts.give_up()
        task.cancel()
        value = _Fault("timeout", f"no result within {tool.timeout_s:g} s", latency_s=tool.timeout_s)
    return _Outcome(value, max(attempts.number, 1), time.perf_counter() - start, queue_s, tuple(attempts.failed))


class _Attempts:
    """The attempts of one call, counted."""

    def __init__(self, tool: Tool, function: Callable[[], Any]) -> None:
        self.tool = tool
        self.function = function
        self.number = 0
        self.failed: list[ToolUnavailableError] = []
        self._gave_up = threading.Event()

    async def run(self) -> Any:
        if self.tool.retry is None:
            return await self._attempt()
        return await self.tool.retry.run(self._attempt)

    def give_up(self) -> None:
        """The time is over; a plain function that still runs counts as hung from here on."""
        self._gave_up.set()

    async def _attempt(self) -> Any:
        if self.number and self.tool.limiter:
            await self.tool.limiter.wait_for_rate()
        self.number += 1
        try:
            if self.tool.is_async:
                return await _watched(self.function(), self.tool.name)
            value = await self._in_thread()
            return await value if inspect.isawaitable(value) else value
        except ToolUnavailableError as error:
            self.failed.append(error)
            raise

    async def _in_thread(self) -> Any:
        """The plain function in a thread of its own: a pool's would be used up by functions that hang."""
        hung_key = self.tool.backend or self.tool.name
        if _hung[hung_key] >= MAX_HUNG_CALLS:
            raise ToolUnavailableError(
                f"{_hung[hung_key]} earlier calls outlived their time limit and still run", transient=False
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(value: Any) -> None:
            if not future.done():
                future.set_result(value)

        def work() -> None:
            value = _caught(self.function)
            if self._gave_up.is_set():
                _count_hung(hung_key, -1)
            else:
                loop.call_soon_threadsafe(deliver, value)

        async with _thread_slots():
            threading.Thread(target=work, name=f"orchestra-tool-{self.tool.name}", daemon=True).start()
            try:
                value = await future
            except asyncio.CancelledError:
                if self._gave_up.is_set():
                    _count_hung(hung_key, +1)
                raise
        if isinstance(value, BaseException):
            raise _carrier(value)
        return value


@types.coroutine
def _watched(awaitable: Awaitable[Any], name: str) -> Generator[Any, Any, Any]:
    """Awaits, and says so once for a tool that blocks the loop on which all tools wait."""
    iterator = awaitable.__await__()
    resume, argument = iterator.send, None
    while True:
        begin = time.perf_counter()
        try:
            waits_for = resume(argument)
        except StopIteration as stop:
            return stop.value
        finally:
            _warn_if_blocked(name, time.perf_counter() - begin)
        try:
            argument = yield waits_for
            resume = iterator.send
        except BaseException as error:
            resume, argument = iterator.throw, error


def _warn_if_blocked(name: str, blocked_s: float) -> None:
    if blocked_s > BLOCKED_S and name not in _blocking:
        _blocking.add(name)
        logger.warning(
            "the async tool %r ran for %.1f s without awaiting anything, and all other tools waited: make it a plain "
            "function, or await in it",
            name,
            blocked_s,
        )


class _RaisedError(Exception):
    """Carries what a task may not raise itself: SystemExit and its like would end the loop."""


def _carrier(error: BaseException) -> BaseException:
    return error if isinstance(error, Exception) else _RaisedError(error)


_blocking: set[str] = set()
_hung: Counter[str] = Counter()
_hung_lock = threading.Lock()
_slots_of_loop: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None


def _count_hung(key: str, change: int) -> None:
    with _hung_lock:
        _hung[key] += change


def _thread_slots() -> asyncio.Semaphore:
    global _slots_of_loop
    loop = asyncio.get_running_loop()
    if _slots_of_loop is None or _slots_of_loop[0] is not loop:
        _slots_of_loop = loop, asyncio.Semaphore(MAX_CALL_THREADS)
    return _slots_of_loop[1]


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except _RaisedError as error:
        return error.args[0]
    except BaseException as error:
        return error


def _fault_of(name: str, error: BaseException) -> _Fault:
    try:
        message = _ADDRESS.sub("", str(error))
    except Exception:  # an exception whose __str__ raises
        message = ""
    if isinstance(error, ToolArgumentError):
        return _Fault("invalid_arguments", f"{name}: {message}", 0.0, 0.0)
    if isinstance(error, ToolUnavailableError):
        return _Fault("unavailable", f"{name} is unavailable: {message}", 0.0)  # the bill of failed attempts is added
    kind = type(error).__name__
    return _Fault("tool_exception", f"{name}: {kind}: {message}" if message else f"{name}: {kind}")


def _record(
    call: ToolCall, tool: Tool | None, outcome: _Outcome, max_output_chars: int, state_hash: str | None = None
) -> CallRecord:
    """The account of a call from what came of it."""
    value = outcome.value
    if isinstance(value, KeyboardInterrupt):
        raise value
    fault = value if isinstance(value, _Fault) else None
    if isinstance(value, BaseException):
        fault = _fault_of(call.name, value)
    elif fault is None:
        try:
            result = _as_result(value)
        except Exception as error:  # the value may be anything
            fault = _Fault("bad_result", f"{call.name} gave no usable result: {error}")
    if fault is not None:
        result = ToolResult(f"Error: {fault.message}", fault.cost_usd, fault.latency_s)
    measured = tool is not None and tool.clock == "measured"
    if tool is not None and tool.max_output_chars is not None:
        max_output_chars = min(max_output_chars, tool.max_output_chars)
    latency_s = _latency_s(tool, result, outcome, refused=outcome.attempts == 0)
    text, truncated_chars = cap_text(replace_surrogates(result.text), max_output_chars)
    return CallRecord(
        tool=call.name,
        arguments=call.arguments,
        status="error" if fault else "ok",
        error_type=fault.error_type if fault else "",
        text=text,
        cost_usd=_cost_usd(tool, result, latency_s) + sum(_bill_usd(tool, error) for error in outcome.failed),
        latency_s=latency_s,
        attempts=0 if fault and fault.error_type == "invalid_arguments" else outcome.attempts,
        input_tokens=int(result.input_tokens) + sum(error.input_tokens for error in outcome.failed),
        output_tokens=int(result.output_tokens) + sum(error.output_tokens for error in outcome.failed),
        truncated_chars=truncated_chars,
        source=tool.source if tool else "simulated",
        cost_known=result.cost_known and all(error.cost_known for error in outcome.failed),
        queue_s=outcome.queue_s if measured else 0.0,
        backend=tool.backend if tool else "",
        raw_sha256=_hash_of_undecodable(value),
        state_hash=state_hash,
    )


def _latency_s(tool: Tool | None, result: ToolResult, outcome: _Outcome, *, refused: bool) -> float:
    if tool is None or refused:
        return 0.0
    if result.latency_s is not None:
        return float(result.latency_s)
    return outcome.wall_s if tool.clock == "measured" else tool.latency_s


def _cost_usd(tool: Tool | None, result: ToolResult, latency_s: float) -> float:
    if result.cost_usd is not None or tool is None:
        return float(result.cost_usd or 0.0)
    return float(
        tool.price.cost_usd(input_tokens=result.input_tokens, output_tokens=result.output_tokens, latency_s=latency_s)
    )


def _bill_usd(tool: Tool | None, error: ToolUnavailableError) -> float:
    """What a failed attempt cost."""
    if tool is None:
        return error.cost_usd
    price = tool.price
    tokens_usd = price.per_input_token_usd * error.input_tokens + price.per_output_token_usd * error.output_tokens
    return error.cost_usd + tokens_usd


def _as_result(value: Any) -> ToolResult:
    """A function's return value as a `ToolResult`; raises if it is not usable."""
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, bytes):
        return ToolResult(value.decode("utf-8", errors="replace"))
    if not isinstance(value, ToolResult):
        return ToolResult(json.dumps(value, ensure_ascii=False, allow_nan=False, default=_numpy_value))
    if not isinstance(value.text, str):
        raise TypeError(f"text must be a string, not {type(value.text).__name__}")
    for name in ("cost_usd", "latency_s", "input_tokens", "output_tokens"):
        amount = getattr(value, name)
        may_be_none = name in ("cost_usd", "latency_s")
        if not (amount is None and may_be_none) and not (is_number(amount) and amount >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, not {amount!r}")
    if value.cost_usd is not None and value.cost_usd > MAX_COST_USD:
        raise ValueError(f"cost_usd of {value.cost_usd!r} is more than ${MAX_COST_USD:g} for one call")
    return value


def _hash_of_undecodable(value: Any) -> str:
    """The SHA-256 of bytes that are no UTF-8; "" for anything else."""
    if not isinstance(value, bytes):
        return ""
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return hashlib.sha256(value).hexdigest()
    return ""


def _numpy_value(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _own_copy(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy that a tool may change without changing the record."""
    if any(isinstance(value, dict | list) for value in arguments.values()):
        return copy.deepcopy(arguments)
    return dict(arguments)
