"""How often a tool may be called, how many calls may be under way, and when a failed call is tried again."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity
from aiolimiter import AsyncLimiter

_T = TypeVar("_T")


class ToolUnavailableError(Exception):
    """Raised by a tool function whose backend failed (and not the policy that called it).

    Args:
        message: what went wrong; the policy reads it.
        transient: whether trying again may help; the tool's `retry` does so.
        retry_after_s: seconds that the backend asked to wait.
        cost_usd: what the failed attempt cost in US dollars, beside its tokens.
        input_tokens: that the attempt was billed for, by the tool's price.
        output_tokens: the same.
        cost_known: False if these are estimates.
    """

    def __init__(
        self,
        message: str,
        *,
        transient: bool = True,
        retry_after_s: float | None = None,
        cost_usd: float = 0.0,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cost_known: bool = True,
    ) -> None:
        super().__init__(message)
        self.transient = transient
        self.retry_after_s = retry_after_s
        self.cost_usd = cost_usd
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.cost_known = cost_known


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, ToolUnavailableError):
        return error.transient
    return isinstance(error, ConnectionError | TimeoutError)


@dataclass(frozen=True, slots=True)
class Retry:
    """Tries a call again after a transient fault (`ToolUnavailableError`, `ConnectionError`, `TimeoutError`).

    The pause before attempt n+1 is drawn uniformly from [0, min(max_delay_s, base_delay_s * 2^(n-1))] ("full jitter"),
    on top of what the backend asked for (its Retry-After).

    Raises:
        ValueError: a field is out of range.
    """

    max_attempts: int = 3
    base_delay_s: float = 0.5
    max_delay_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ValueError(f"Retry.max_attempts must be a whole number of at least 1, not {self.max_attempts!r}")
        for name in ("base_delay_s", "max_delay_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"Retry.{name} must be a finite number of at least 0, not {value!r}")

    async def run(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """The result of the first attempt that succeeds; raises what the last one raised."""
        jitter = tenacity.wait_random_exponential(multiplier=self.base_delay_s, max=self.max_delay_s)

        def pause_s(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked_s = getattr(error, "retry_after_s", None) or 0.0
            return asked_s + jitter(state)

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.max_attempts),
            wait=pause_s,
            retry=tenacity.retry_if_exception(is_transient),
            sleep=asyncio.sleep,
            reraise=True,
        )

        async def awaited() -> _T:  # tenacity awaits only what it can see to be async
            return await attempt()

        return await retrying(awaited)


class Limiter:
    """Bounds the calls of one backend, over all tools and episodes of the process that share this object.

    It is shared by identity: copies (Gymnasium deep-copies keyword arguments) are the same limiter; another process
    gets one of its own. Waiters are served in the order in which they came.

    Args:
        max_concurrency: most calls under way at once; None for no bound.
        max_calls_per_s: most calls that start per second, on average (bursts of one second's worth); None: no bound.

    Raises:
        ValueError: a bound is not positive, or there is none.
    """

    def __init__(self, *, max_concurrency: int | None = None, max_calls_per_s: float | None = None) -> None:
        if max_concurrency is None and max_calls_per_s is None:
            raise ValueError("Limiter: give max_concurrency, max_calls_per_s, or both")
        if max_concurrency is not None and (
            isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1
        ):
            raise ValueError(
                f"Limiter.max_concurrency must be a whole number of at least 1 or None, not {max_concurrency!r}"
            )
        if max_calls_per_s is not None and (
            isinstance(max_calls_per_s, bool)
            or not isinstance(max_calls_per_s, int | float)
            or not 0 < max_calls_per_s < math.inf
        ):
            raise ValueError(
                f"Limiter.max_calls_per_s must be a finite number above 0 or None, not {max_calls_per_s!r}"
            )
        self.max_concurrency = max_concurrency
        self.max_calls_per_s = max_calls_per_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None
        self._bucket: AsyncLimiter | None = None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Waits for a turn and holds a slot; gives the seconds that the wait took."""
        self._prepare()
        start = time.perf_counter()
        async with self._slots or contextlib.nullcontext():
            await self.wait_for_rate()
            yield time.perf_counter() - start

    async def wait_for_rate(self) -> None:
        """Waits until one more call may start by `max_calls_per_s`."""
        self._prepare()
        if self._bucket:
            await self._bucket.acquire()

    def _prepare(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        self._slots = asyncio.Semaphore(self.max_concurrency) if self.max_concurrency else None
        rate = self.max_calls_per_s
        self._bucket = AsyncLimiter(max(rate, 1.0), max(1.0, 1.0 / rate)) if rate else None

    def __copy__(self) -> "Limiter":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Limiter":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _limiter, (self.max_concurrency, self.max_calls_per_s)

    def __repr__(self) -> str:
        return f"Limiter(max_concurrency={self.max_concurrency!r}, max_calls_per_s={self.max_calls_per_s!r})"


def _limiter(max_concurrency: int | None, max_calls_per_s: float | None) -> Limiter:
    return Limiter(max_concurrency=max_concurrency, max_calls_per_s=max_calls_per_s)
