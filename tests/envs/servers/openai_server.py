"""An OpenAI-compatible endpoint on 127.0.0.1 for tests: a real HTTP server in a thread, told how to answer.

    with OpenAIServer([Answer(status=429, headers={"Retry-After": "0"}), Answer("Paris.")]) as server:
        tool = expert_tool(name="expert", model="m", base_url=server.base_url, api_key_env=None, price=Price())
        ...
    assert server.requests[0]["messages"] == [...]

The script is a list of answers (given in order, the last one again and again) or a function from the request's JSON
to an answer; a plain string is an answer of that text. POST /v1/chat/completions and /v1/embeddings are served.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

EMBEDDING_SIZE = 32


@dataclass(frozen=True)
class Answer:
    """One answer of the endpoint.

    Args:
        text: the content; None is JSON's null.
        reasoning: sent as `reasoning_content`.
        tool_calls: in OpenAI's form; when streamed, the arguments come in fragments of a few characters.
        finish_reason: None leaves it out, so that a stream ends without one.
        usage: "count" counts words (a stream sends it only if asked to by `stream_options`), None sends none, a
            mapping is sent as it is.
        choices: False sends an empty list of choices.
        status, headers: of the HTTP answer; other statuses than 200 send OpenAI's error form with `text` as message.
        body: sent instead of everything else, as it is.
        content_type: of `body`.
        delay_s: seconds before the answer begins.
        chunk_delay_s: seconds between the events of a stream.
        piece_chars: characters of one event of a stream.
        drop: "headers" closes the connection before the answer, "middle" after about half of it.
    """

    text: str | None = "ok"
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = "stop"
    usage: Mapping[str, Any] | str | None = "count"
    choices: bool = True
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    piece_chars: int = 8
    drop: str = ""


Script = Sequence[Answer | str] | Callable[[dict[str, Any]], Answer | str]


class OpenAIServer:
    """The server; a context manager. What it saw can be read while it runs and afterwards.

    Args:
        script: see the module's text.
        hold_until: the first requests are answered only when so many are under way at once (or after 20 s), so that
            a test of concurrency does not depend on how fast the machine is.

    Attributes:
        base_url: "http://127.0.0.1:PORT/v1".
        requests: the JSON bodies of the requests, in order of arrival.
        headers: their headers, lower-case names.
        num_under_way, max_under_way: requests being answered now, and the most there ever were at once.
        open_connections: TCP connections open now.
    """

    def __init__(self, script: Script = ("ok",), *, hold_until: int = 0) -> None:
        self.script = script
        self.hold_until = hold_until
        self.base_url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_under_way = 0
        self.max_under_way = 0
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-server", daemon=True)

    def __enter__(self) -> "OpenAIServer":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def open_connections(self) -> int:
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/embeddings", self._embeddings)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"

    def _next(self, body: dict[str, Any]) -> Answer:
        if callable(self.script):
            answer = self.script(body)
        else:
            answer = self.script[min(len(self.requests), len(self.script)) - 1]
        return Answer(answer) if isinstance(answer, str) else answer

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.num_under_way += 1
        self.max_under_way = max(self.max_under_way, self.num_under_way)
        try:
            answer = self._next(body)
            await self._hold()
            await asyncio.sleep(answer.delay_s)
            return await self._send(request, body, answer)
        finally:
            self.num_under_way -= 1

    async def _hold(self) -> None:
        if self.num_under_way >= self.hold_until:
            self._released.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._released.wait(), 20.0)

    async def _send(self, request: web.Request, body: dict[str, Any], answer: Answer) -> web.StreamResponse:
        if answer.drop == "headers":
            return _abort(request)
        if answer.body is not None:
            kind = {"Content-Type": answer.content_type}
            return web.Response(body=answer.body, status=answer.status, headers={**kind, **answer.headers})
        if answer.status != 200:
            error = {"error": {"message": answer.text, "type": "test", "code": None}}
            return web.json_response(error, status=answer.status, headers=answer.headers)
        if body.get("stream"):
            return await _send_events(request, list(_events(body, answer)), answer)
        whole = json.dumps(_completion(body, answer)).encode()
        if answer.drop != "middle":
            return web.Response(body=whole, content_type="application/json", headers=answer.headers)
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(whole))})
        await response.prepare(request)
        await response.write(whole[: len(whole) // 2])
        return _abort(request)

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        size = body.get("dimensions") or EMBEDDING_SIZE
        as_base64 = body.get("encoding_format") == "base64"
        data = []
        for index, text in enumerate(texts):
            vector = embed(text, size)
            coded = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": coded})
        num_tokens = sum(count_words(text) for text in texts)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return web.json_response({"object": "list", "model": body["model"], "data": data, "usage": usage})


def embed(text: str, size: int = EMBEDDING_SIZE) -> np.ndarray:
    """A unit vector `[size]` (float32), the sum of one random vector per word: texts that share words are near."""
    total = np.zeros(size)
    for word in text.lower().split() or [""]:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
        total += np.random.default_rng(seed).standard_normal(size)
    return (total / np.linalg.norm(total)).astype(np.float32)


def count_words(text: str) -> int:
    """The server's tokens."""
    return len(text.split())


def _usage(body: Mapping[str, Any], answer: Answer) -> Mapping[str, Any] | None:
    if answer.usage != "count":
        return answer.usage  # type: ignore[return-value]
    num_in = sum(count_words(str(message["content"])) for message in body["messages"])
    num_out = count_words(answer.text or "")
    return {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}


def _completion(body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": body["model"]}
    whole["choices"] = [choice] if answer.choices else []
    if usage := _usage(body, answer):
        whole["usage"] = usage
    return whole


def _events(body: Mapping[str, Any], answer: Answer) -> Any:
    def event(delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": body["model"], "choices": [choice]}

    yield event({"role": "assistant", "content": "" if answer.text is not None else None})
    for piece in _pieces(answer.reasoning or "", answer.piece_chars):
        yield event({"reasoning_content": piece})
    for piece in _pieces(answer.text or "", answer.piece_chars):
        yield event({"content": piece})
    for index, call in enumerate(answer.tool_calls):
        function = call["function"]
        head = {"index": index, "id": call["id"], "type": "function", "function": {**function, "arguments": ""}}
        yield event({"tool_calls": [head]})
        for piece in _pieces(function["arguments"], 3):
            yield event({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    if answer.finish_reason is not None:
        yield event({}, answer.finish_reason)
    asked = (body.get("stream_options") or {}).get("include_usage")
    if (usage := _usage(body, answer)) and asked:
        yield {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": usage}


def _pieces(text: str, num_chars: int) -> list[str]:
    return [text[start : start + num_chars] for start in range(0, len(text), num_chars)]


async def _send_events(request: web.Request, events: Sequence[Any], answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **answer.headers})
    await response.prepare(request)
    for event in events[: len(events) // 2] if answer.drop == "middle" else events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if answer.chunk_delay_s:
            await asyncio.sleep(answer.chunk_delay_s)
    if answer.drop == "middle":
        await asyncio.sleep(0.05)  # so that what was sent arrives before the connection is reset
        return _abort(request)
    await response.write(b"data: [DONE]\n\n")
    return response


def _abort(request: web.Request) -> web.Response:
    if request.transport:
        request.transport.abort()
    return web.Response()
