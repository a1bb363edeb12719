"""A search engine that speaks Tavily's protocol, and an embedding endpoint with faults: real HTTP servers on loopback.

    with SearchServer([Result("https://a.test/", "A", "passage", "whole page")]) as server:
        tool = web_search_tool(base_url=server.url)

Each runs in a thread with a loop of its own. `server.faults` holds what happens to the next requests, first come first
served; afterwards they are answered as they should. `server.requests` holds what was asked: (path, headers, body).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

KEY = "tvly-test-key"
DIMENSIONS = 64


@dataclass(frozen=True)
class Fault:
    """One spoiled answer: a status with headers and a body, or a connection that hangs or breaks in mid-answer."""

    status: int = 200
    body: str = "{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    breaks: bool = False
    path: str = ""
    """Only requests to paths that end so are spoiled; "" for all."""


@dataclass(frozen=True)
class Result:
    """A page that the engine knows: `passage` is what it finds in it, `whole` its text (None: it cannot be read)."""

    url: str
    title: str
    passage: str
    whole: str | None = None


class _Server:
    def __init__(self, routes: Mapping[str, Callable[[Mapping[str, Any], web.Request], web.Response]]) -> None:
        self.faults: deque[Fault] = deque()
        self.requests: list[tuple[str, Mapping[str, str], Any]] = []
        self.url = ""
        self._routes = routes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        for path in self._routes:
            app.router.add_post(path, self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        self.requests.append((request.path, dict(request.headers), body))
        fault = self.faults[0] if self.faults and request.path.endswith(self.faults[0].path) else None
        if fault is None:
            return self._routes[request.path](body, request)
        self.faults.popleft()
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if not fault.breaks:
            return web.Response(status=fault.status, text=fault.body, headers=fault.headers)
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"results": [')
        assert request.transport is not None
        request.transport.close()
        return response


class SearchServer(_Server):
    """Answers /search with all its pages, in order, and /extract with the texts of those that can be read."""

    def __init__(self, pages: Sequence[Result] = (), key: str = KEY) -> None:
        super().__init__({"/search": self._search, "/extract": self._extract})
        self.pages = list(pages)
        self.key = key

    def _search(self, body: Mapping[str, Any], request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        query = body.get("query")
        if not isinstance(query, str) or not query:
            return _error(400, "Query is missing.")
        if len(query) > 400:
            return _error(400, "Query is too long. Max query length is 400 characters.")
        found = self.pages[: body.get("max_results", 5)]
        results = [
            {"url": page.url, "title": page.title, "content": page.passage, "score": 0.9 - 0.1 * i, "raw_content": None}
            for i, page in enumerate(found)
        ]
        return web.json_response(
            {"query": query, "answer": None, "images": [], "results": results, "response_time": 0.1, "request_id": "1"}
        )

    def _extract(self, body: Mapping[str, Any], request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        texts = {page.url: page.whole for page in self.pages}
        urls = body.get("urls") or []
        results = [{"url": url, "raw_content": texts[url], "images": []} for url in urls if texts.get(url)]
        failed = [{"url": url, "error": "Failed to fetch url"} for url in urls if not texts.get(url)]
        return web.json_response({"results": results, "failed_results": failed, "response_time": 0.1})

    def _refused(self, request: web.Request) -> web.Response | None:
        sent = request.headers.get("Authorization", "")
        if sent == f"Bearer {self.key}":
            return None
        return _error(401, f"Unauthorized: missing or invalid API key ({sent.removeprefix('Bearer ')}).")


class EmbeddingServer(_Server):
    """Answers /v1/embeddings with unit vectors that are near for texts with common words."""

    def __init__(self) -> None:
        super().__init__({"/v1/embeddings": self._embeddings})

    def _embeddings(self, body: Mapping[str, Any], request: web.Request) -> web.Response:
        data = [
            {"object": "embedding", "index": i, "embedding": embedding(text)} for i, text in enumerate(body["input"])
        ]
        usage = {"prompt_tokens": sum(len(text.split()) for text in body["input"]), "total_tokens": 0}
        # In an order of its own: the index says which is which.
        return web.json_response({"object": "list", "model": body["model"], "data": data[::-1], "usage": usage})


def embedding(text: str) -> list[float]:
    """Counts of hashed words: not normalised, on purpose."""
    vector = [0.0] * DIMENSIONS
    for word in text.lower().replace(".", " ").replace("?", " ").split():
        vector[hashlib.sha256(word.encode()).digest()[0] % DIMENSIONS] += 1.0
    return vector


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"detail": {"error": message}}, status=status)
