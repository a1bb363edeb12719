"""Web search as a tool, by a provider that can be exchanged; Tavily's protocol is the first.

    from orchestra_envs.live.web_search import web_search_tool

    search = web_search_tool(max_results=5)                                  # key from TAVILY_API_KEY at each call
    search = web_search_tool(base_url="http://127.0.0.1:8080", read_pages=True)   # a proxy; whole pages

Needs aiohttp: `pip install 'orchestra-jax[live]'`. A provider of your own is a `Provider`: an async function from a
query and a number of results to `Found` pages, and what it charges. For a local peer that speaks Tavily's protocol
see `tests/envs/servers/search_server.py`: `with SearchServer(pages) as server: web_search_tool(base_url=server.url)`.

What pages say is passed on as it is (HTML and control tokens too): whoever puts it into a prompt must encode it as
plain text.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import email.utils
import json
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from orchestra_envs.limits import Limiter, Retry, ToolUnavailableError
from orchestra_envs.live.options import install_hint, made
from orchestra_envs.loop import tool_loop
from orchestra_envs.tools import CallContext, Price, Tool, ToolArgumentError, ToolResult

if TYPE_CHECKING:
    import aiohttp

SEARCH_USD = 0.01
"""The paper's price of one search."""

PAGE_USD = 0.002
"""The paper's price of one page that is read whole."""

MAX_QUERY_CHARS = 390
"""Queries are cut there, as in the paper (Tavily refuses more than 400 characters)."""

MAX_RESPONSE_BYTES = 16 * 2**20
MAX_RESULTS = 20

TAVILY_URL = "https://api.tavily.com"
DEFAULT_RETRY = Retry()
DEFAULT_DESCRIPTION = (
    "Searches the web. Returns the best pages for a query, numbered, each with its title, its address and what it "
    "says about the query."
)


@dataclass(frozen=True, slots=True)
class Page:
    """One result: `text` is what the page says about the query or, of a page that was read, its whole text."""

    url: str
    title: str
    text: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found, best first. `num_read` pages were read whole; `note` tells the policy what went wrong."""

    pages: tuple[Page, ...]
    num_read: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Provider:
    """A search engine and its prices in US dollars.

    `search(query, max_results)` raises `ToolUnavailableError` when it fails. A search costs `search_usd` plus
    `page_usd` for each page read whole. `backend` is its identity for the records; no key may be in it.
    """

    search: Callable[[str, int], Awaitable[Found]]
    backend: str
    search_usd: float = SEARCH_USD
    page_usd: float = 0.0


def web_search_tool(
    *,
    name: str = "web_search",
    provider: str | Provider = "tavily",
    max_results: int = 5,
    price: Price | Mapping[str, float] | None = None,
    description: str = DEFAULT_DESCRIPTION,
    latency_s: float = 1.5,
    timeout_s: float = 60.0,
    retry: Retry | Mapping[str, Any] | None = DEFAULT_RETRY,
    limiter: Limiter | Mapping[str, Any] | None = None,
    max_page_chars: int = 1000,
    max_chars: int = 4000,
    **provider_options: Any,
) -> Tool:
    """Web search as an async tool with the argument `query`; its latency is measured.

    Args:
        name: what the policy calls it.
        provider: the name of a known one ("tavily") or one of your own.
        max_results: most pages of a search, 1 to 20.
        price: in place of the provider's; then a search costs this, however many pages were read. None: the
            provider's price, which counts `max_results` pages where it reads pages whole, and a search that could
            read fewer costs less.
        description: what the policy is told.
        latency_s: what the policy is told to expect, in seconds.
        timeout_s: of the whole call, retries included.
        retry: of transient faults (429, 5xx, time-outs, broken connections, answers that are no JSON).
        limiter: shared by all episodes of the process.
        max_page_chars: the text of a page is cut there and marked.
        max_chars: pages that do not fit into so many characters are left out, and their number is told.
        provider_options: of a provider given by name, see `tavily`.

    Raises:
        ValueError: an argument is not usable; ImportError: aiohttp is missing.
    """
    if isinstance(provider, str):
        provider = _named_provider(provider, provider_options)
    elif provider_options:
        raise ValueError(f"web_search: unknown arguments {', '.join(provider_options)} (a Provider has its own)")
    for field, value, most in (
        ("max_results", max_results, MAX_RESULTS),
        ("max_page_chars", max_page_chars, math.inf),
        ("max_chars", max_chars, math.inf),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            bound = f" and at most {most}" if most < math.inf else ""
            raise ValueError(f"web_search: {field} must be a whole number of at least 1{bound}, not {value!r}")
    given_price = made(Price, price, "web_search: price")
    engine = provider
    full_usd = engine.search_usd + engine.page_usd * max_results

    async def search(query: str, context: CallContext) -> ToolResult:
        wanted = query.strip()
        if not wanted:
            raise ToolArgumentError("the query is empty")
        found = await engine.search(wanted[:MAX_QUERY_CHARS], max_results)
        notes = [found.note] if found.note else []
        if len(wanted) > MAX_QUERY_CHARS:
            notes.append(f"The query was cut to its first {MAX_QUERY_CHARS} characters.")
        text = render_pages(found.pages, max_page_chars=max_page_chars, max_chars=max_chars, notes=notes)
        cost_usd = None
        if given_price is None and found.num_read < max_results and full_usd:
            # As a share of the episode's price, which may be another than the one the tool was made with.
            share = (engine.search_usd + engine.page_usd * found.num_read) / full_usd
            cost_usd = context.price.per_call_usd * share
        return ToolResult(text, cost_usd=cost_usd)

    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for, in a few words."}},
            "required": ["query"],
            "additionalProperties": False,
        },
        function=search,
        price=given_price or Price(per_call_usd=full_usd),
        latency_s=latency_s,
        timeout_s=timeout_s,
        clock="measured",
        retry=made(Retry, retry, "web_search: retry"),
        limiter=made(Limiter, limiter, "web_search: limiter"),
        source="live",
        backend=engine.backend,
    )


def render_pages(pages: Sequence[Page], *, max_page_chars: int, max_chars: int, notes: Sequence[str] = ()) -> str:
    """The pages as numbered text: title, address, what it says. Cuts are marked.

    The first page is always there, so the text may be longer than `max_chars` by its title and address.
    """
    if not pages:
        return "\n\n".join(["No results. Try other words.", *notes])
    blocks: list[str] = []
    room = max_chars
    for number, page in enumerate(pages, start=1):
        head = f"[{number}] {_one_line(page.title) or 'Untitled'}\n{_one_line(page.url)}\n"
        text = _cut(page.text.strip(), max_page_chars if blocks else min(max_page_chars, max_chars))
        if blocks and len(head) + len(text) > room:
            break
        blocks.append(head + text)
        room -= len(blocks[-1]) + 2
    if len(blocks) < len(pages):
        blocks.append(f"[{len(pages) - len(blocks)} more left out]")
    return "\n\n".join([*blocks, *notes])


def tavily(
    *,
    base_url: str = TAVILY_URL,
    api_key_env: str = "TAVILY_API_KEY",
    search_depth: Literal["basic", "advanced", "fast", "ultra-fast"] = "basic",
    read_pages: bool = False,
    search_usd: float = SEARCH_USD,
    page_usd: float = PAGE_USD,
    request_timeout_s: float = 20.0,
) -> Provider:
    """Tavily, or whatever speaks its protocol (POST /search and /extract, bearer key).

    Args:
        base_url: without /search; to go through a proxy.
        api_key_env: the environment variable that holds the key, read at each call.
        search_depth: Tavily's own; it charges twice as much for "advanced".
        read_pages: fetch the whole pages (POST /extract) in place of the passages that match the query. A page that
            cannot be read keeps its passage.
        search_usd: what a search costs, in US dollars.
        page_usd: what a page that was read costs, in US dollars.
        request_timeout_s: of one request; a slower one is a transient fault.

    Raises:
        ValueError: an argument is not usable; ImportError: aiohttp is missing.
    """
    _import_aiohttp()
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"web_search: base_url must begin with http:// or https://, not {base_url!r}")
    if not api_key_env or not isinstance(api_key_env, str):
        raise ValueError("web_search: api_key_env must name the environment variable that holds the key")
    if not (isinstance(request_timeout_s, int | float) and 0 < request_timeout_s < math.inf):
        raise ValueError(f"web_search: request_timeout_s must be a number above 0, not {request_timeout_s!r}")
    root = base_url.rstrip("/")

    async def post(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await _post_json(root + path, body, _api_key(api_key_env), request_timeout_s)

    async def search(query: str, max_results: int) -> Found:
        body = {"query": query, "max_results": max_results, "search_depth": search_depth}
        pages = _pages((await post("/search", body)).get("results"))[:max_results]
        if not read_pages or not pages:
            return Found(pages)
        try:
            answer = await post("/extract", {"urls": [page.url for page in pages], "format": "text"})
        except ToolUnavailableError as error:
            # The search is paid for: its passages are better than nothing, or than paying for it again.
            return Found(pages, note=f"The pages could not be read ({error}); these are passages of them.")
        return _with_texts(pages, answer)

    host = f"{address.hostname}:{address.port}" if address.port else address.hostname
    return Provider(
        search, f"tavily@{address.scheme}://{host}{address.path}", search_usd, page_usd if read_pages else 0.0
    )


PROVIDERS: dict[str, Callable[..., Provider]] = {"tavily": tavily}
"""Providers by name, for configs; add your own."""


def _named_provider(name: str, options: Mapping[str, Any]) -> Provider:
    if name not in PROVIDERS:
        raise ValueError(f"web_search: provider must be one of {', '.join(PROVIDERS)}, or a Provider, not {name!r}")
    try:
        return PROVIDERS[name](**options)
    except TypeError as error:
        raise ValueError(f"web_search: provider {name!r}: {error}") from None


def _pages(results: Any) -> tuple[Page, ...]:
    """Pages of Tavily's list of results; entries without an address are left out."""
    if not isinstance(results, list):
        raise ToolUnavailableError("the answer of the search engine has no list of results")
    pages = []
    for result in results:
        if isinstance(result, Mapping) and isinstance(url := result.get("url"), str) and url:
            score = result.get("score")
            is_score = isinstance(score, int | float) and math.isfinite(score)
            pages.append(
                Page(url, str(result.get("title") or ""), str(result.get("content") or ""), score if is_score else None)
            )
    return tuple(pages)


def _with_texts(pages: Sequence[Page], answer: Mapping[str, Any]) -> Found:
    """`pages` with the texts of an answer of /extract, as far as it has them."""
    results = answer.get("results")
    texts = {
        result["url"]: result["raw_content"]
        for result in (results if isinstance(results, list) else ())
        if isinstance(result, Mapping) and isinstance(result.get("url"), str) and result.get("raw_content")
    }
    read = [Page(page.url, page.title, str(texts.get(page.url, page.text)), page.score) for page in pages]
    num_read = sum(page.url in texts for page in pages)
    note = f"{len(pages) - num_read} pages could not be read; of these there is a passage." * (num_read < len(pages))
    return Found(tuple(read), num_read, note)


def _api_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ToolUnavailableError(f"there is no key: set the environment variable {variable}", transient=False)
    if not (key.isascii() and key.isprintable()):
        raise ToolUnavailableError(f"the environment variable {variable} holds no usable key", transient=False)
    return key


async def _post_json(url: str, body: Mapping[str, Any], key: str, timeout_s: float) -> Mapping[str, Any]:
    """The JSON object that a POST of `body` gives. Raises ToolUnavailableError; the key is in no message."""
    aiohttp = _import_aiohttp()
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        # A redirect is not followed: it could carry the key to another host.
        async with (
            _session() as session,
            session.post(url, json=body, headers=headers, timeout=timeout, allow_redirects=False) as response,
        ):
            status, retry_after = response.status, response.headers.get("Retry-After")
            data = await _read(response)
    except TimeoutError:
        raise ToolUnavailableError(f"the search engine did not answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        fatal = isinstance(error, aiohttp.InvalidURL)
        message = _without(key, f"{type(error).__name__}: {error}")
        raise ToolUnavailableError(f"no connection to the search engine ({message})", transient=not fatal) from None
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if status != 200:
        transient = status in (408, 425, 429) or status >= 500
        message = _without(key, _error_text(answer))
        raise ToolUnavailableError(
            f"the search engine answered {status}{f': {message}' if message else ''}",
            transient=transient,
            retry_after_s=_seconds(retry_after) if transient else None,
        )
    if not isinstance(answer, Mapping):
        raise ToolUnavailableError("the answer of the search engine is no JSON object")
    return answer


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        data += chunk
        if len(data) > MAX_RESPONSE_BYTES:
            raise ToolUnavailableError(
                f"the answer of the search engine has more than {MAX_RESPONSE_BYTES:,} bytes", transient=False
            )
    return bytes(data)


def _error_text(answer: Any) -> str:
    """What an answer with an error says: Tavily's {"detail": {"error": text}}, or the like of others."""
    while isinstance(answer, Mapping):
        answer = next((answer[key] for key in ("detail", "error", "message") if key in answer), "")
    return _cut(_one_line(answer), 300) if isinstance(answer, str) else ""


def _seconds(retry_after: str | None) -> float | None:
    """The seconds of a Retry-After header (a number or a date); None if there are none."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(retry_after)
        return seconds if 0 <= seconds < math.inf else None
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None


def _without(key: str, message: str) -> str:
    return message.replace(key, "***")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars].rstrip()} [...]"


_sessions: dict[int, tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession]] = {}
"""By process, so that a forked child neither uses nor closes what its parent has open."""


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP session: on the tools' loop one for all calls, on any other, which may end soon, one for this call."""
    loop = asyncio.get_running_loop()
    if loop is not tool_loop():
        async with _new_session() as session:
            yield session
        return
    known = _sessions.get(os.getpid())
    if known is None or known[0] is not loop or known[1].closed:
        known = _sessions[os.getpid()] = loop, _new_session()
    yield known[1]


def _new_session() -> aiohttp.ClientSession:
    aiohttp = _import_aiohttp()
    # How many requests run at once is the limiter's business, not the connection pool's.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=True)


@atexit.register
def _close_session() -> None:
    loop, session = _sessions.get(os.getpid(), (None, None))
    if loop and session and loop.is_running():
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=2)


def _import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise ImportError(f"web search needs aiohttp: {install_hint('live')}") from None
    return aiohttp
