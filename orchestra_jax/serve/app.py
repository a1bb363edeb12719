"""The HTTP application: OpenAI's chat completions over one engine.

- `POST /v1/chat/completions`, whole or as server-sent events
- `GET /v1/models`, `GET /v1/models/NAME`
- `GET /health`: without a key; 503 if nothing can be sampled any more

A request whose client goes away is cancelled, and its slots are free after the round under way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orchestra_jax.sampler.engine import Request
from orchestra_jax.sampler.grammar import TokenGrammar
from orchestra_jax.serve.answer import Answer, Choice, new_choices
from orchestra_jax.serve.errors import ApiError
from orchestra_jax.serve.prompt import Prompt, TurnMemory, build_prompt
from orchestra_jax.serve.request import ChatRequest, read_chat_request
from orchestra_jax.serve.sampling import grammar_of, make_requests
from orchestra_jax.serve.worker import EngineThread, Event, Turn
from orchestra_jax.text.chat import ChatFormat

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """What is served.

    Args:
        name: of the model, as clients ask for it.
        chat: the policy's chat format.
        worker: the engine's thread.
        capacity: the most tokens of a conversation.
        api_key: what clients must show; None for no key.
        constrain: tool calls can only be ones of the request's tools, with arguments that fit (needs llguidance).
    """

    name: str
    chat: ChatFormat
    worker: EngineThread
    capacity: int
    api_key: str | None = None
    constrain: bool = False


def create_app(service: Service) -> Starlette:
    """The application. Whoever makes it starts and closes `service.worker`."""
    memory = TurnMemory()
    created = int(time.time())
    numbers = itertools.count()

    async def chat_completions(request: HttpRequest) -> Response:
        asked = read_chat_request(await _json_body(request))
        _check_model(service, asked.model)
        service.worker.check_room(asked.n)  # before any work is done for it
        connected = _Connected(request.receive)
        # Both may take long for long conversations and many tools: not in the event loop.
        prompt, grammar = await connected.run(asyncio.to_thread(_prepare, service, memory, asked))
        keys = _keys(service.worker, prompt, numbers, asked.n)
        sampling = _Sampling(service, memory, asked, prompt)
        sampling.submit(make_requests(asked, prompt, keys, capacity=service.capacity, grammar=grammar))
        try:
            if asked.stream:
                first = await connected.run(sampling.next_event())
                return _EventStream(sampling, first)
            return JSONResponse(await connected.run(sampling.whole()))
        except BaseException:
            sampling.cancel()
            raise

    async def models(request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, created)]})

    async def model(request: HttpRequest) -> Response:
        _check_model(service, request.path_params["name"])
        return JSONResponse(_model(service, created))

    async def health(request: HttpRequest) -> Response:
        worker = service.worker
        engine = worker.engine
        body = {
            "status": "ok" if worker.fault is None else worker.fault,
            "model": service.name,
            "slots": worker.slots,
            "turns": worker.num_open,
            "stats": {} if engine is None else dataclasses.asdict(engine.stats),
        }
        return JSONResponse(body, status_code=200 if worker.fault is None else 503)

    def guarded(endpoint: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def checked(request: HttpRequest) -> Response:
            _check_key(service.api_key, request.headers.get("authorization", ""))
            return await endpoint(request)

        return checked

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(chat_completions), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/health", health),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _internal_error,
        },
    )


class _Sampling:
    """The turns of one request, and what has come of them."""

    def __init__(self, service: Service, memory: TurnMemory, asked: ChatRequest, prompt: Prompt) -> None:
        self.service, self.memory, self.asked, self.prompt = service, memory, asked, prompt
        self.choices = new_choices(asked, service.chat)
        self.answer = Answer(asked, len(prompt.ids), service.chat.tokenizer)
        self._events: asyncio.Queue[tuple[Turn, Event]] = asyncio.Queue()
        self._turns: dict[Turn, Choice] = {}

    def submit(self, requests: list[Request]) -> None:
        """Raises ApiError if there is no room for all of them."""
        self.service.worker.check_room(len(requests))
        for request, choice in zip(requests, self.choices, strict=True):
            self._turns[self.service.worker.submit(request, self._events)] = choice

    def cancel(self) -> None:
        """Drops what is under way."""
        for turn in self._turns:
            self.service.worker.cancel(turn)

    async def next_event(self) -> tuple[Choice, dict[str, Any]]:
        """The next thing that happens: the choice and what is added to its message.

        Raises:
            ApiError: a turn failed.
        """
        while True:
            turn, event = await self._events.get()
            choice = self._turns[turn]
            delta = choice.take(event)
            if choice.finish_reason:
                self.service.worker.cancel(turn)  # no more is wanted, if the reader ended it
                choice.remember(self.memory, self.prompt, turn.request.key)
            if delta or choice.finish_reason:
                return choice, delta

    @property
    def over(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    async def whole(self) -> dict[str, Any]:
        """The answer, once all of it is there."""
        while not self.over:
            await self.next_event()
        return self.answer.whole(self.choices)

    async def chunks(self, first: tuple[Choice, dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks; a fault on the way is one of them."""
        opened: set[int] = set()
        choice, delta = first
        while True:
            if choice.index not in opened:
                opened.add(choice.index)
                yield self.answer.opening(choice)
            for chunk in self.answer.chunks(choice, delta):
                yield chunk
            if self.over:
                break
            try:
                choice, delta = await self.next_event()
            except ApiError as error:
                yield error.body
                return
        if self.asked.include_usage:
            yield self.answer.usage_chunk(self.choices)


class _EventStream(Response):
    """A `_Sampling` as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, sampling: _Sampling, first: tuple[Choice, dict[str, Any]]) -> None:
        # Not kept back by proxies, nor stored.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._sampling, self._first = sampling, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _Connected(receive).run(self._send(send))
        except ClientDisconnect:
            log.info("the client has left a stream")
        finally:
            self._sampling.cancel()

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._sampling.chunks(self._first):
            await body(b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n")
        await body(b"data: [DONE]\n\n")
        await body(b"", more=False)


class _Connected:
    """Runs things as long as the client is there."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled if the client goes away first.

        Raises:
            ClientDisconnect: it has.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._wait_until_gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            for future in (task, gone):
                future.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _prepare(
    service: Service, memory: TurnMemory, asked: ChatRequest
) -> tuple[Prompt, Callable[[], TokenGrammar] | None]:
    grammar = grammar_of(asked, service.chat, constrain=service.constrain)
    try:
        return build_prompt(service.chat, asked.messages, asked.tools, memory), grammar
    except ValueError as error:
        raise ApiError(400, f"messages or tools: {error}", param="messages") from None


def _keys(worker: EngineThread, prompt: Prompt, numbers: Iterator[int], count: int) -> list[Hashable]:
    """The engine's keys of a request's choices: the first goes on in the slot of the conversation that it continues."""
    keys: list[Hashable] = [next(numbers) for _ in range(count)]
    if prompt.key is not None and not worker.is_open(prompt.key):
        keys[0] = prompt.key
    return keys


async def _json_body(request: HttpRequest) -> Any:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body of the request has more than {MAX_BODY_BYTES} bytes")
    try:
        # Lone surrogates, which JSON can hold and UTF-8 cannot, become U+FFFD.
        text = body.decode()
        if "\\u" in text:
            text = json.dumps(json.loads(text, parse_constant=_refuse), ensure_ascii=False)
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body of the request is not JSON: {error}", code="invalid_json") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        message = f"the model {name[:200]!r} is not served here; {service.name!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_key(key: str | None, header: str) -> None:
    scheme, _, shown = header.partition(" ")
    if key is not None and not (scheme.lower() == "bearer" and hmac.compare_digest(shown.encode(), key.encode())):
        message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")


def _model(service: Service, created: int) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": created,
        "owned_by": "orchestra-jax",
        "max_model_len": service.capacity,  # as vLLM tells it
    }


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, status_code=error.status_code, headers=error.headers)


async def _gone(request: HttpRequest, error: Exception) -> Response:
    log.info("the client has left")
    return Response(status_code=499)  # nobody reads it


async def _internal_error(request: HttpRequest, error: Exception) -> Response:
    """Also logged, with its trace, by the server."""
    return JSONResponse(ApiError(500, "a fault of this server; its log has more").body, status_code=500)
