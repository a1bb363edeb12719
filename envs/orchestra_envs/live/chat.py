"""Chat completions of any OpenAI-compatible endpoint, by the official client, with every fault told in one way.

    endpoint = Endpoint("gpt-5-mini")                                        # OPENAI_API_KEY from the environment
    endpoint = Endpoint("qwen3", "http://127.0.0.1:8000/v1", api_key_env=None)   # a server of one's own
    reply = await chat(endpoint, [{"role": "user", "content": "2 + 2?"}], stream=True)
    print(reply.text, reply.input_tokens, reply.output_tokens)

A local peer: `vllm serve Qwen/Qwen3-8B --port 8000`, `llama-server -m model.gguf --port 8000`, or Ollama
(`http://127.0.0.1:11434/v1`). Needs `pip install 'orchestra-jax[live]'`.

What answers is read as plain JSON and not by OpenAI's types, since other servers leave fields out or add their own.
There are no retries here: a `ChatError` says whether trying again may help, and `Tool.retry` does it.
"""

import asyncio
import atexit
import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.live.options import install_hint
from orchestra_envs.parse import THINK_CLOSE, THINK_OPEN, decode_arguments, replace_surrogates

OPENAI_URL = "https://api.openai.com/v1"

MAX_CONNECTIONS = 1000
"""Open connections to one endpoint; more calls wait for a free one, within their own time limit."""

MAX_MESSAGE_CHARS = 500
"""Characters of a server's error message that are passed on."""

BYTES_PER_TOKEN = 4
"""For estimates where an endpoint sends no usage."""

_CONNECT_TIMEOUT_S = 15.0
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
_INSTALL = f"LLM experts need the OpenAI client: {install_hint('live')}"


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible API.

    Args:
        model: as the endpoint names it.
        base_url: up to and including the version ("http://127.0.0.1:8000/v1"). None is OPENAI_BASE_URL of the
            environment, else OpenAI's own; it is resolved here, so that the field is never None afterwards.
        api_key_env: name of the environment variable that holds the key, read at each call. None sends no key.
        timeout_s: wall-clock limit of one request, its whole answer included.
        extra: more fields of the request, as `{"reasoning_effort": "low"}`; None as a value leaves a field out.

    Raises:
        ValueError: a field is not usable; the message names it.
    """

    model: str
    base_url: str | None = None
    api_key_env: str | None = "OPENAI_API_KEY"
    timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"Endpoint.model must be the name of a model, not {self.model!r}")
        object.__setattr__(self, "base_url", _checked_url(self.base_url))
        if self.api_key_env is not None and (
            not isinstance(self.api_key_env, str) or not self.api_key_env.isidentifier()
        ):
            # The value is not shown: it may be the key itself, written here by mistake.
            raise ValueError("Endpoint.api_key_env must be the name of an environment variable (or None), not a key")
        if (
            isinstance(self.timeout_s, bool)
            or not isinstance(self.timeout_s, int | float)
            or not 0 < self.timeout_s < math.inf
        ):
            raise ValueError(f"Endpoint.timeout_s must be a finite number above 0, not {self.timeout_s!r}")
        if not isinstance(self.extra, Mapping):
            raise ValueError(f"Endpoint.extra must be a mapping of request fields, not {self.extra!r}")

    @property
    def identity(self) -> str:
        """What is behind it, for records: "openai:MODEL@BASE_URL"."""
        return f"openai:{self.model}@{self.base_url}"


@dataclass(frozen=True, slots=True)
class ChatToolCall:
    """A call that the model asks for. `arguments` is None where `arguments_text` is no JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    arguments_text: str


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer. `usage_known=False`: the numbers of tokens are estimated from the texts (four bytes a token).

    `text` is the answer without reasoning; `reasoning` what the endpoint sent apart (`reasoning_content`,
    `reasoning`) or the model wrote as `<think>...</think>` before its answer. `input_tokens` includes
    `cached_input_tokens`. `finish_reason` is the endpoint's ("stop", "length", "tool_calls", ...), "" if it gave none.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ChatToolCall, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    usage_known: bool = True
    finish_reason: str = ""
    cached_input_tokens: int = 0


class ChatError(ToolUnavailableError):
    """A request without a usable answer.

    Its tokens are what the provider may bill: none, and that is known, where the request was refused or never sent;
    else the usage of the answer, or estimates (`cost_known=False`) of the request and of what had come.

    Attributes:
        partial: what had come when the connection broke, with its estimated tokens, or None.
        status: the HTTP status, None where there was none.
    """

    def __init__(
        self,
        message: str,
        *,
        transient: bool = True,
        retry_after_s: float | None = None,
        partial: ChatReply | None = None,
        status: int | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cost_known: bool = True,
    ) -> None:
        super().__init__(
            message,
            transient=transient,
            retry_after_s=retry_after_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cost_known=cost_known,
        )
        self.partial = partial
        self.status = status


async def chat(
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stream: bool = False,
    max_output_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> ChatReply:
    """One chat completion.

    Args:
        messages: in OpenAI's form (`{"role": ..., "content": ...}`).
        tools: in OpenAI's form; only "type" and "function" of each are sent, so that `Tool.spec()` will do.
        stream: take the answer as it is written. Slow models stay connected, and what had come of an answer that
            broke off is known.

    Raises:
        ChatError: no usable answer. Transient are 408, 409, 425, 429 and 5xx, connections that fail, break or take
            longer than `endpoint.timeout_s`, streams that end without a finish reason, and answers that cannot be
            read; other statuses, a missing key and an exhausted quota are not.
        ImportError: the client is not installed.
    """
    body = _request_body(endpoint, messages, tools, stream, max_output_tokens, temperature, seed)
    key = _api_key(endpoint)
    client = _client(str(endpoint.base_url), key)
    answer = _Answer()
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            await _request(client, body, answer, with_key=bool(key))
    except _request_errors() as error:
        if stream and answer.finish_reason:  # only the usage was lost
            return answer.reply(body)
        # `from None`: the client's own message may repeat the key.
        raise _as_chat_error(error, endpoint, key, answer, body) from None
    return answer.reply(body)


async def close_clients() -> None:
    """Closes the connections that this event loop has open; the next `chat` opens new ones.

    To be called at the end of an `asyncio.run` of one's own; the tools' loop does it at exit.
    """
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        await client.close()


def estimate_tokens(text: str) -> int:
    """A guess at the tokens of `text`, from its length in UTF-8."""
    return math.ceil(len(replace_surrogates(text).encode()) / BYTES_PER_TOKEN)


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and answer of `<think>...</think>answer`; an open block is reasoning to the end.

    A `</think>` that nothing opened closes a block that the server's template opened. Tags further on are text.
    """
    head, close, tail = text.partition(THINK_CLOSE)
    opened = head.lstrip().startswith(THINK_OPEN)
    if opened or (close and THINK_OPEN not in head):
        return head.lstrip().removeprefix(THINK_OPEN).strip(), tail.strip()
    return "", text.strip()


# The request.


def _request_body(
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    stream: bool,
    max_output_tokens: int | None,
    temperature: float | None,
    seed: int | None,
) -> dict[str, Any]:
    # OpenAI's reasoning models refuse the old name, other servers do not know the new one.
    official = urlsplit(str(endpoint.base_url)).hostname == urlsplit(OPENAI_URL).hostname
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": list(messages),
        "tools": [{"type": "function", "function": tool["function"]} for tool in tools or ()] or None,
        "max_completion_tokens" if official else "max_tokens": max_output_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True if stream else None,
        "stream_options": {"include_usage": True} if stream else None,
        **endpoint.extra,
    }
    text = json.dumps({name: value for name, value in body.items() if value is not None}, ensure_ascii=False)
    return json.loads(replace_surrogates(text))


def _api_key(endpoint: Endpoint) -> str:
    if endpoint.api_key_env is None:
        return ""
    key = os.environ.get(endpoint.api_key_env, "").strip()
    if not key:
        raise ChatError(
            f"no API key: set the environment variable {endpoint.api_key_env} "
            "(or api_key_env=None for a server that needs no key)",
            transient=False,
        )
    return key


async def _request(client: Any, body: Mapping[str, Any], answer: "_Answer", *, with_key: bool) -> None:
    """Sends the request and enters what comes into `answer`, so that a broken one is not lost."""
    import openai

    options: Any = {} if with_key else {"headers": {"Authorization": openai.Omit()}}
    path = "/chat/completions"
    if not body.get("stream"):
        answer.read(await client.post(path, cast_to=object, body=body, options=options))
        return
    stream = await client.post(
        path, cast_to=object, body=body, options=options, stream=True, stream_cls=openai.AsyncStream[object]
    )
    async with stream:
        if stream.response.headers.get("content-type", "").startswith("application/json"):  # it does not stream
            answer.read(json.loads(await stream.response.aread()))
            return
        async for event in stream:
            answer.add(event)
    if not answer.finish_reason:
        raise _UnusableError("the stream ended before the answer did")


_clients: dict[asyncio.AbstractEventLoop, dict[tuple[str, str], Any]] = {}


def _client(base_url: str, key: str) -> Any:
    """The client of this event loop for an endpoint and key, made at the first use."""
    try:
        import openai
    except ImportError as error:
        raise ImportError(_INSTALL) from error

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        for closed in [other for other in list(_clients) if other.is_closed()]:
            _clients.pop(closed, None)
    clients = _clients.setdefault(loop, {})
    identity = base_url, hashlib.sha256(key.encode()).hexdigest()
    if identity not in clients:
        # The client adds what OPENAI_ORG_ID and OPENAI_PROJECT_ID say; others need not know it.
        omitted: Any = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.Omit())
        clients[identity] = openai.AsyncOpenAI(
            api_key=key or "none",  # the client insists on one; without a key the header is left out of the request
            base_url=base_url,
            max_retries=0,
            default_headers=None if base_url == OPENAI_URL else omitted,
            http_client=_http_client(),
        )
    return clients[identity]


def load_client() -> None:
    """Imports what requests need, which takes most of a second that an event loop would stand still.

    Where it is not installed nothing happens; the first request says so.
    """
    with contextlib.suppress(ImportError):
        import aiohttp  # noqa: F401
        import httpx2  # noqa: F401
        import openai  # noqa: F401


def _http_client() -> Any:
    import httpx2
    import openai

    # No limit on waiting for a connection: the request's own time limit covers it.
    timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
    return openai.DefaultAioHttpClient(timeout=timeout, limits=limits)


def _close_at_exit() -> None:
    for loop in list(_clients):
        if loop.is_running():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(close_clients(), loop).result(2.0)


def _abandon_clients() -> None:
    """In a forked child: the sockets are the parent's. They are kept, since closing them would disturb its loop."""
    _abandoned.append(dict(_clients))
    _clients.clear()


_abandoned: list[Any] = []
atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_clients)


def _checked_url(base_url: str | None) -> str:
    if base_url is None:
        base_url = os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    if not isinstance(base_url, str):
        raise ValueError(f"Endpoint.base_url must be a URL such as {OPENAI_URL}, not {base_url!r}")
    parts = urlsplit(base_url)
    if parts.username is not None or parts.query or parts.fragment:  # not shown: there may be a key in it
        raise ValueError("Endpoint.base_url must have no user, query or fragment; keys belong into api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"Endpoint.base_url must be a URL such as {OPENAI_URL}, not {base_url!r}")
    return base_url.rstrip("/")


# The answer.


class _UnusableError(ValueError):
    """What came is no answer. `refused`: it is an error of the endpoint in a body of status 200, and `status` and
    `code` are what that says."""

    def __init__(self, message: str, status: int | None = None, code: str = "", *, refused: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.refused = refused


@dataclass
class _CallParts:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass
class _Answer:
    """An answer while it comes, whole or in pieces."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_CallParts] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = ""

    @property
    def has_begun(self) -> bool:
        return bool(any(self.text) or any(self.reasoning) or self.calls)

    def read(self, payload: Any) -> None:
        """A whole answer; `_UnusableError` if it has no message."""
        if isinstance(payload, str):  # the client does not decode what is not declared as JSON
            payload = json.loads(payload)
        choice = self._choice(payload)
        message = choice.get("message") if choice else None
        if not isinstance(message, Mapping):
            raise _UnusableError("the answer has no message")
        self._take(message)

    def add(self, event: Any) -> None:
        """One event of a stream."""
        choice = self._choice(event)
        if choice and isinstance(delta := choice.get("delta"), Mapping):
            self._take(delta)

    def _choice(self, payload: Any) -> Mapping[str, Any] | None:
        """The first choice, if there is one. Usage and finish reason are entered."""
        if not isinstance(payload, Mapping):
            raise _UnusableError("the answer is no JSON object")
        if error := payload.get("error"):
            raise _error_of_body(error)
        if isinstance(usage := payload.get("usage"), Mapping):
            self.usage = usage
        choices = payload.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, Mapping):
            return None
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason
        return choice

    def _take(self, message: Mapping[str, Any]) -> None:
        self._take_content(message.get("content"))
        for name in ("reasoning_content", "reasoning"):
            if isinstance(value := message.get(name), str) and value:
                self.reasoning.append(value)
                break
        if isinstance(refusal := message.get("refusal"), str):
            self.text.append(refusal)
        fragments = message.get("tool_calls")
        for fragment in fragments if isinstance(fragments, list) else ():
            if isinstance(fragment, Mapping):
                self._take_call(fragment)

    def _take_content(self, content: Any) -> None:
        """Text, or a list of parts of it (some servers mark reasoning so)."""
        if isinstance(content, str):
            self.text.append(content)
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            if isinstance(part.get("text"), str):
                self.text.append(part["text"])
            elif part.get("type") == "thinking":
                self.reasoning += _texts(part.get("thinking"))

    def _take_call(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function")
        function = function if isinstance(function, Mapping) else {}
        call_id, name, arguments = fragment.get("id"), function.get("name"), function.get("arguments")
        call = self._call_of(fragment.get("index"), call_id, name)
        if isinstance(call_id, str) and call_id and not call.id:
            call.id = call_id
        if isinstance(name, str) and name:
            call.name = name
        if isinstance(arguments, str):
            call.arguments.append(arguments)
        elif arguments is not None:  # an object, not yet written as JSON
            call.arguments.append(json.dumps(arguments, ensure_ascii=False))

    def _call_of(self, index: Any, call_id: Any, name: Any) -> _CallParts:
        """The call that a fragment belongs to. Some servers send no index, or the same one for every call."""
        known: _CallParts | None = self.calls[-1] if self.calls else None
        if isinstance(index, int) and not isinstance(index, bool):
            known = self.calls[index] if 0 <= index < len(self.calls) else None
        if known is None or (name and call_id and known.id and known.id != call_id):
            known = _CallParts()
            self.calls.append(known)
        return known

    def reply(self, body: Mapping[str, Any]) -> ChatReply:
        """The answer as far as it came, to the request `body`."""
        written, reasoning = "".join(self.text), "".join(self.reasoning).strip()
        text = written.strip()
        if not reasoning:
            reasoning, text = split_reasoning(written)
        calls = tuple(_tool_call(call) for call in self.calls)
        input_tokens, output_tokens = (_count(self.usage.get(f"{name}_tokens")) for name in ("prompt", "completion"))
        usage_known = input_tokens is not None and output_tokens is not None
        if input_tokens is None:
            asked = [body["messages"], body.get("tools", [])]
            input_tokens = estimate_tokens(json.dumps(asked, ensure_ascii=False))
        if output_tokens is None:
            output_tokens = estimate_tokens(written + "".join(self.reasoning))
            output_tokens += sum(estimate_tokens(call.name + call.arguments_text) for call in calls)
        return ChatReply(
            text=replace_surrogates(text),
            reasoning=replace_surrogates(reasoning),
            tool_calls=calls,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            usage_known=usage_known,
            finish_reason=self.finish_reason,
            cached_input_tokens=min(_cached_tokens(self.usage), input_tokens),
        )


def _texts(parts: Any) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    found = (part.get("text") for part in parts if isinstance(part, Mapping)) if isinstance(parts, list) else ()
    return [text for text in found if isinstance(text, str)]


def _tool_call(call: _CallParts) -> ChatToolCall:
    text = replace_surrogates("".join(call.arguments))
    try:
        arguments = decode_arguments(text)
    except ValueError:
        arguments = None
    return ChatToolCall(call.id, replace_surrogates(call.name), arguments, text)


def _count(value: Any) -> int | None:
    """A number of tokens, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return int(value)


def _cached_tokens(usage: Mapping[str, Any]) -> int:
    details = usage.get("prompt_tokens_details")
    found = details.get("cached_tokens") if isinstance(details, Mapping) else usage.get("prompt_cache_hit_tokens")
    return _count(found) or 0


# Faults.


def _request_errors() -> tuple[type[BaseException], ...]:
    """What a request may raise because of the other side."""
    import aiohttp
    import httpx2
    import openai

    return openai.OpenAIError, httpx2.HTTPError, aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError


def _as_chat_error(
    error: BaseException, endpoint: Endpoint, key: str, answer: _Answer, body: Mapping[str, Any]
) -> ChatError:
    message, status, code, retry_after_s = _describe(error, endpoint)
    transient = status is None or status in _TRANSIENT_STATUSES or status >= 500
    if code == "insufficient_quota":  # OpenAI's 429 of an account without money: waiting does not help
        transient = False
    message = " ".join(message.split())
    if key:
        message = message.replace(key, "[API key]")
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    reply = answer.reply(body)
    may_be_billed = bool(answer.has_begun or answer.usage or not _was_refused(error))
    return ChatError(
        message,
        transient=transient,
        retry_after_s=retry_after_s,
        partial=reply if answer.has_begun else None,
        status=status,
        input_tokens=reply.input_tokens if may_be_billed else 0,
        output_tokens=reply.output_tokens if may_be_billed else 0,
        # The usage of a stream that broke off is a count so far, if it is one at all.
        cost_known=not may_be_billed or (reply.usage_known and not body.get("stream")),
    )


def _was_refused(error: BaseException) -> bool:
    """Whether the endpoint surely does not bill the request: it said that it failed, or no connection was made."""
    import aiohttp
    import openai

    if isinstance(error, _UnusableError):
        return error.refused
    if isinstance(error, openai.APIStatusError):
        return True
    if isinstance(error, openai.APIError) and error.body:  # an error event of a stream
        return True
    # Its transport reports connections that break later as time-outs of connecting: only aiohttp's own errors tell.
    return any(
        isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) for cause in _causes(error)
    )


def _describe(error: BaseException, endpoint: Endpoint) -> tuple[str, int | None, str, float | None]:
    """Message, status, the server's error code and the seconds that it asked to wait."""
    import openai

    if isinstance(error, openai.APIStatusError):
        message, code = _message_of(error.body)
        message = f"HTTP {error.status_code}: {message}" if message else f"HTTP {error.status_code}"
        return message, error.status_code, code, _retry_after_s(error.response.headers)
    if isinstance(error, openai.APIConnectionError):
        cause = _causes(error)[-1]
        return f"the connection failed ({type(cause).__name__}: {cause})", None, "", None
    if isinstance(error, openai.APIError) and error.body:  # an error event of a stream
        error = _error_of_body(error.body)
    if isinstance(error, _UnusableError):
        return str(error), error.status, error.code, None
    if isinstance(error, TimeoutError):
        return f"no answer within {endpoint.timeout_s:.4g} s", None, "", None
    if isinstance(error, ValueError | RecursionError):
        return f"the answer cannot be read ({type(error).__name__}: {error})", None, "", None
    return f"the connection failed ({type(error).__name__}: {error})", None, "", None


def _error_of_body(error: Any) -> _UnusableError:
    """Some endpoints answer 200 and say in the body what went wrong."""
    message, code = _message_of(error)
    status = error.get("code") if isinstance(error, Mapping) else None
    with contextlib.suppress(TypeError, ValueError):
        status = int(status)  # type: ignore[arg-type]
    known = isinstance(status, int) and 400 <= status < 600
    text = f"the endpoint reports an error: {message}"
    return _UnusableError(text, status if known else None, code, refused=True)


def _message_of(body: Any) -> tuple[str, str]:
    """What an error body says, and its code."""
    if not isinstance(body, Mapping):
        return str(body or ""), ""
    found = next((body[name] for name in ("message", "detail", "error") if body.get(name)), None)
    message = found if isinstance(found, str) else json.dumps(found or dict(body), default=str)
    return message, str(body.get("code") or body.get("type") or "")


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and what it came from; the root last."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return causes


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by Retry-After (seconds or an HTTP date) or retry-after-ms; None without a usable one."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            seconds = float(headers[name]) * unit_s
            if math.isfinite(seconds):
                return max(seconds, 0.0)
    with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):
        return max(parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time(), 0.0)
    return None
