"""Connections to MCP servers: one for each server and process, opened at need, watched, replaced when lost.

Everything here but `close_mcp` and `McpServer` lives on the process's tool loop. A connection is a task of its own from
connecting to closing: the SDK's cancel scopes must be left by the task that entered them. Nobody cancels that task from
outside; it is asked to stop, and only ever waited for with a limit.
"""

import asyncio
import atexit
import contextlib
import contextvars
import hashlib
import logging
import os
import shlex
import time
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from orchestra_envs.loop import run_on_loop

MAX_GARBAGE_LINES = 10_000
"""Lines on a server's standard output that are no messages, before the connection is given up."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of one answer over HTTP."""
MAX_PAGES = 1000
"""Of a list of tools."""
MAX_TOLD_CRASHES = 20
"""Errors of a connection's tools whose cause is looked for in the process's standard error, and logged."""
MAX_PAUSE_S = 30.0
"""The longest pause between two attempts to connect to a server that fails."""
UNUSABLE = "x-orchestra-unusable"
"""Key of an input schema that is none, with the reason: the SDK would refuse the whole list for one of them."""

_PATIENCE_S = 1.0  # a call waits so long for the next attempt to connect, and is refused if that is later
_CLOSE_TIMEOUT_S = 10.0  # the SDK takes up to 6.5 s to end a process that resists
_TAIL_BYTES = 2000
_CRASH_BYTES = 16_000  # tracebacks are long, and the cause stands above the rest
_SHOWN_CHARS = 300

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class McpServer:
    """How to reach an MCP server: a command to start, or the URL of one that runs.

    `env` holds pairs of a variable and its value (None: the value it has in this process), `headers_env` pairs of an
    HTTP header and the environment variable with its value.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    headers_env: tuple[tuple[str, str], ...] = ()
    start_timeout_s: float = 30.0

    def __str__(self) -> str:
        """The command, cut if it is long, or the URL without what may be secret in it."""
        if self.command:
            text = shlex.join(self.command)
            return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
        url = urllib.parse.urlsplit(self.url)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    def identity(self) -> str:
        """Tells this server from others in records; other settings, other identity."""
        settings = repr((self.command, self.url, self.env, self.headers_env))
        return f"mcp:{self}@{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def environment(self) -> dict[str, str]:
        """`env` with the values of this process filled in; ValueError for a variable that is not set."""
        return {name: _own_variable(name, "env") if value is None else value for name, value in self.env}

    def headers(self) -> dict[str, str]:
        """The HTTP headers; ValueError for a variable that is not set."""
        return {header: _own_variable(name, "headers_env") for header, name in self.headers_env}


class NoServerError(Exception):
    """A server that cannot be reached; the message says why, in words for the user and not for the policy."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass
class HttpFault:
    """What a call met at the level of HTTP, which the SDK does not tell: a status of 400 or more (else 0), or what
    was wrong with the network (else "")."""

    status: int = 0
    retry_after_s: float | None = None
    network: str = ""


http_fault: contextvars.ContextVar[HttpFault | None] = contextvars.ContextVar("http_fault", default=None)
"""Filled in by the HTTP transport while a call is under way: the SDK sends a request in its caller's context."""


def link_to(server: McpServer) -> "Link":
    """The process's link to `server`. On the tool loop only."""
    if server not in _links:
        _links[server] = Link(server)
    return _links[server]


def close_mcp() -> None:
    """End all connections to MCP servers, and the server processes started for them. The next call connects again.

    Runs at exit by itself. Takes up to ten seconds if a process resists.
    """
    if _links or _sessions:
        run_on_loop(_close_all())


class Link:
    """The way to one server, over all its connections. `num_failures` counts since the last answered call."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.session: Session | None = None
        self.num_failures = 0
        self._not_before = 0.0  # by time.monotonic()
        self._opening: asyncio.Task[Session] | None = None

    async def live(self, *, at_once: bool = False) -> "Session":
        """The connection, opened if there is none.

        Args:
            at_once: try to connect even if the last attempts failed.

        Raises:
            NoServerError: there is none to be had now.
        """
        if self.session is not None:
            await self.session.checked()
            if not self.session.lost:
                return self.session
        if self._opening is None or self._opening.done():
            pause_s = 0.0 if at_once else max(self._not_before - time.monotonic(), 0.0)
            if pause_s > _PATIENCE_S:
                raise NoServerError(f"it failed {self.num_failures} times in a row", pause_s)
            self._opening = asyncio.ensure_future(self._open(pause_s))
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # maybe nobody waits
        opening = self._opening
        await asyncio.wait({opening})  # a caller that is cancelled leaves the attempt to the others
        if opening.cancelled():
            raise NoServerError("the connection was closed")
        if isinstance(error := opening.exception(), NoServerError):
            raise NoServerError(str(error), error.retry_after_s)
        return opening.result()

    def answered(self) -> None:
        """A call was answered: the server works."""
        self.num_failures = 0

    def failed(self) -> None:
        """A connection was lost, or none was to be had: further attempts come later and later, up to MAX_PAUSE_S."""
        self.num_failures += 1
        pause_s = 0.0 if self.num_failures == 1 else min(0.25 * 2.0 ** min(self.num_failures, 20), MAX_PAUSE_S)
        self._not_before = time.monotonic() + pause_s

    def close(self) -> None:
        """Have the connection closed, and no more attempts to open one under way."""
        self.session = None
        if self._opening:
            self._opening.cancel()

    async def _open(self, pause_s: float) -> "Session":
        await asyncio.sleep(pause_s)
        session = Session(self)
        await asyncio.wait({session.opened}, timeout=self.server.start_timeout_s)
        if session.opened.done() and not session.lost:
            self.session, self._not_before = session, 0.0
            return session
        if not session.opened.done():
            session.stop(f"no answer within start_timeout_s={self.server.start_timeout_s:g} s")
        await asyncio.wait({session.task}, timeout=_CLOSE_TIMEOUT_S)
        self.failed()
        raise NoServerError(session.account(), max(self._not_before - time.monotonic(), 0.0))


class Session:
    """One connection, from connecting to closing: `opened` is done when it is open or cannot be, `lost` says that it
    is of no (more) use, `task` is done when it is closed. `tools` are the server's, `client` is the SDK's client."""

    def __init__(self, link: Link) -> None:
        import anyio

        self.link = link
        self.client: Any = None
        self.tools: list[Any] = []
        self.lost = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stderr = _Tail() if link.server.command else None
        self._fault = ""
        self._told: set[tuple[str, str]] = set()
        self._num_messages = 0
        self._num_garbage = 0
        self._garbage = ""  # the first of it
        self._http = HttpFault()
        self._connecting = anyio.CancelScope()
        self._ended = asyncio.Event()
        self._check: asyncio.Task[None] | None = None
        _sessions.add(self)
        self.task = asyncio.ensure_future(self._run())

    def tell_error(self, tool: str, text: str) -> None:
        """A tool reported an error, maybe without its cause: that may stand on the server's standard error, which the
        developer is shown; the policy is not. Each text once."""
        if self.stderr is None or (tool, text) in self._told or len(self._told) == MAX_TOLD_CRASHES:
            return
        self._told.add((tool, text))
        if tail := self.stderr.new_text():
            shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
            _log.warning("MCP server %s: tool %s: %s; on its standard error:\n%s", self.link.server, tool, shown, tail)

    def stop(self, fault: str = "") -> None:
        """Ask the connection's task to close it; returns at once. A `fault` counts against the server."""
        if not self.lost:
            self._fault = fault
        self.lost = True
        if self.client is None:
            self._connecting.cancel()
        self._ended.set()

    def doubt(self, timeout_s: float) -> None:
        """A call got no answer: see whether the server answers anything within `timeout_s`, and give it up if not."""
        if not self.lost and (self._check is None or self._check.done()):
            self._check = asyncio.ensure_future(self._ask(timeout_s))

    async def checked(self) -> None:
        """Wait for a check that is under way."""
        if self._check is not None and not self._check.done():
            await asyncio.wait({self._check})

    def heard(self, message: Any) -> None:
        """Something came from the server."""
        if not isinstance(message, Exception):
            self._num_messages += 1
            mend_listing(getattr(message.message, "result", None))

    def server_closed(self) -> None:
        """Nothing more will come from the server."""
        if self.client is not None:  # before, the SDK finds out by itself, and why
            self.stop("the server ended the connection")
        self._ended.set()

    def account(self) -> str:
        """Why the connection failed, with the last words of the server's process."""
        fault = self._fault
        if self._garbage and self.client is None:
            fault += f"; it prints what is no MCP message: {self._garbage!r}"
        tail = self.stderr.text() if self.stderr else ""
        return f"{fault}; its standard error ends with:\n{tail}" if tail else fault

    async def _ask(self, timeout_s: float) -> None:
        num_messages = self._num_messages
        listing = asyncio.ensure_future(self.client.list_tools())
        done, _ = await asyncio.wait({listing}, timeout=timeout_s)
        if done:
            _ = listing.cancelled() or listing.exception()  # an error is an answer
        else:
            listing.cancel()
            if self._num_messages == num_messages:
                self.stop("the server answers nothing any more")

    async def _run(self) -> None:
        from mcp import Client

        http_fault.set(self._http)
        try:
            with self._connecting:
                async with Client(_transport(self), cache=None, message_handler=self._notice) as client:
                    self.tools = await _list_tools(client)
                    self.client, self.lost = client, self._ended.is_set()
                    self.opened.set_result(None)
                    await self._ended.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fault = self._reason(error)
        finally:
            self._conclude()

    def _reason(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._http.network:
            return self._http.network
        reason = f"{type(error).__name__}: {error}"
        if self.client is None and str(error) == "Connection closed":
            reason = "the connection was closed before the server had answered"
            reason += " (its program ended?)" * bool(self.link.server.command)
        return f"HTTP status {self._http.status} ({reason})" if self._http.status and self.client is None else reason

    def _conclude(self) -> None:
        self.lost = True
        _sessions.discard(self)
        if self.stderr:
            self.stderr.close()
        if not self.opened.done():
            self.opened.set_result(None)
        elif self._fault:
            self.link.failed()
            _log.warning("MCP server %s: %s", self.link.server, self.account())

    async def _notice(self, message: Any) -> None:
        """The SDK's message handler: counts lines that are no messages."""
        if not isinstance(message, Exception):
            return
        self._num_garbage += 1
        if self._num_garbage == 1:
            self._garbage = _input_of(message)[:_SHOWN_CHARS]
            _log.warning("MCP server %s prints lines that are no messages; they are passed over", self.link.server)
        if self._num_garbage == MAX_GARBAGE_LINES:
            self.stop(f"the server printed {MAX_GARBAGE_LINES} lines that are no messages")


def _input_of(error: Exception) -> str:
    """The line that the SDK could not read; "" if it does not say."""
    import pydantic

    found = error.errors()[0]["input"] if isinstance(error, pydantic.ValidationError) else ""
    return found.strip() if isinstance(found, str) else ""


def mend_listing(result: Any) -> None:
    """Make the input schemas of a `tools/list` result such that the SDK reads the list, in place.

    A schema without a type gets "object", a nullable object becomes an object; another type is marked `UNUSABLE`.
    """
    tools = result.get("tools") if isinstance(result, dict) else None
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or "inputSchema" not in tool:
            continue
        schema = tool["inputSchema"]
        kind = schema.get("type", "object") if isinstance(schema, dict) else None
        if kind == "object" or (isinstance(kind, list) and "object" in kind):
            tool["inputSchema"] = {**schema, "type": "object"}
        else:
            shown = f"of type {kind!r}" if kind else f"{schema!r}"[:100]
            tool["inputSchema"] = {"type": "object", UNUSABLE: f"inputSchema must be of type 'object', it is {shown}"}


_links: dict[McpServer, Link] = {}
_sessions: set[Session] = set()  # that are not closed yet
_inherited: list[Any] = []


async def _close_all() -> None:
    for link in _links.values():
        link.close()
    _links.clear()
    tasks = {session.task for session in _sessions}
    for session in list(_sessions):
        session.stop()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)


def _forget_all() -> None:
    """In a forked child: the connections are the parent's. They are kept from the garbage collector, since closing
    them would take their descriptors out of the parent's epoll set, too."""
    _inherited.append((dict(_links), set(_sessions)))
    _links.clear()
    _sessions.clear()


atexit.register(close_mcp)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@contextlib.asynccontextmanager
async def _transport(session: Session) -> AsyncIterator[tuple[Any, Any]]:
    """The SDK's transport to the session's server, with its incoming stream watched."""
    server = session.link.server
    if session.stderr:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        _quiet_sdk()
        parameters = StdioServerParameters(
            command=server.command[0],
            args=list(server.command[1:]),
            env=server.environment(),
            encoding_error_handler="replace",
        )
        async with stdio_client(parameters, errlog=session.stderr.file) as (read, write):
            session.stderr.file.close()  # the server has it
            yield _Watched(read, session), write
    else:
        from mcp.client.streamable_http import streamable_http_client

        async with (
            _http_client(server.headers()) as http,
            streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES) as (read, write),
        ):
            yield _Watched(read, session), write


def _http_client(headers: dict[str, str]) -> Any:
    """An HTTP client that notes the faults of a call (`http_fault`).

    A request that fails in the network gets an answer of status 503: its exception would end the connection for all
    calls under way. The time limit of a call is its tool's.
    """
    import httpx2

    class Client(httpx2.AsyncClient):
        async def send(self, request: Any, **options: Any) -> Any:
            fault = http_fault.get() or HttpFault()
            if request.method == "DELETE":  # the goodbye must not wait for a server that hangs
                request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), 3.0)
            try:
                response = await super().send(request, **options)
                if response.headers.get("content-type", "").startswith("application/json"):
                    await response.aread()  # here, where it may break off
            except httpx2.TransportError as error:
                fault.network = f"{type(error).__name__}: {error}"
                return httpx2.Response(503, request=request)
            if response.status_code >= 400:
                fault.status = response.status_code
                with contextlib.suppress(ValueError):  # a date is passed over
                    fault.retry_after_s = max(float(response.headers.get("retry-after", "")), 0.0)
            return response

    return Client(
        headers=headers,
        timeout=httpx2.Timeout(15.0, read=None, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
    )


async def _list_tools(client: Any) -> list[Any]:
    """All pages of the server's tools."""
    tools: list[Any] = []
    cursor: str | None = None
    seen: set[str] = set()
    while len(seen) < MAX_PAGES:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
        if cursor in seen:
            raise ValueError(f"its list of tools goes in circles (page {cursor!r} twice)")
        seen.add(cursor)
    raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")


class _Watched:
    """The stream of a server's messages; tells the session what comes and when it ends."""

    def __init__(self, stream: Any, session: Session) -> None:
        self._stream = stream
        self._session = session

    @property
    def last_context(self) -> contextvars.Context | None:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        item = await self._stream.receive()
        self._session.heard(item)
        return item

    def __aiter__(self) -> "_Watched":
        return self

    async def __anext__(self) -> Any:
        import anyio

        try:
            item = await self._stream.__anext__()
        except (StopAsyncIteration, anyio.ClosedResourceError):
            self._session.server_closed()
            raise
        self._session.heard(item)
        return item

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> "_Watched":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)


class _Tail:
    """The end of what a process writes to `file`, its standard error. A pipe, so that no disk fills up."""

    def __init__(self) -> None:
        self._reading_end, writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)
        self.file = os.fdopen(writing_end, "w")
        self._bytes = self._new_bytes = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading_end, self._pull)

    def text(self) -> str:
        return self._bytes.decode(errors="replace").strip()

    def new_text(self) -> str:
        """What came since this was last asked for, or the end of that."""
        self._pull()
        new, self._new_bytes = self._new_bytes, b""
        return new.decode(errors="replace").strip()

    def close(self) -> None:
        self.file.close()
        while self._pull():
            pass
        self._loop.remove_reader(self._reading_end)
        os.close(self._reading_end)

    def _pull(self) -> bool:
        """Read what is there; False if nothing was."""
        try:
            chunk = os.read(self._reading_end, 65536)
        except BlockingIOError:
            return False
        if not chunk:  # the other end is closed
            self._loop.remove_reader(self._reading_end)
        self._bytes = (self._bytes + chunk)[-_TAIL_BYTES:]
        self._new_bytes = (self._new_bytes + chunk)[-_CRASH_BYTES:]
        return bool(chunk)


def _quiet_sdk() -> None:
    """The SDK logs a traceback for every line that is no message; `Session` tells it once."""
    logger = logging.getLogger("mcp.client.stdio")
    if _not_about_garbage not in logger.filters:
        logger.addFilter(_not_about_garbage)


def _not_about_garbage(record: logging.LogRecord) -> bool:
    return not (record.threadName == "orchestra-tools" and "parse JSONRPC" in record.getMessage())


def _own_variable(name: str, field_name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(f"{field_name}: the environment variable {name} is not set")
    return value
