"""A tool that asks a language model behind an OpenAI-compatible endpoint.

    tool = expert_tool(name="expert-1", model="gpt-5-mini", description="A strong generalist.", latency_s=20)
    tool = expert_tool(name="local", model="qwen3", base_url="http://127.0.0.1:8000/v1", api_key_env=None,
                       price={"input_usd_per_million": 0.2, "output_usd_per_million": 0.2})

`orchestra_envs.live.chat` says how to start a local server. The expert is handed the task's question, the results of
the calls so far and the policy's instruction, as in ToolOrchestra; `sees` narrows or widens that. Its answer is what
the policy reads, reasoning left out. Tokens are charged by `price`; where the endpoint sends no usage they are
estimated and the cost is marked as not known. Cached input tokens are charged in full.

Failed attempts cost nothing if the endpoint refused them or could not be reached. One that timed out or broke off after
it was sent may be billed: it is charged by estimates of the request and of what had come of the answer (which only
`stream` can tell), and the cost is marked as not known. So that this holds for the last attempt too, requests end
a little before the tool's own time limit, by a tenth of it or one second; the call is then "unavailable". What the tool
cuts off itself (a copy of it with a shorter `timeout_s`, say) is charged nothing.
"""

import asyncio
import contextvars
import dataclasses
import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from orchestra_envs.limits import Limiter, Retry, ToolUnavailableError
from orchestra_envs.live.chat import ChatError, ChatReply, Endpoint, chat, load_client
from orchestra_envs.prices import PriceTable, as_price, model_price
from orchestra_envs.tools import CallContext, CallRecord, Price, Tool, ToolArgumentError, ToolResult, canonical_json

logger = logging.getLogger(__name__)

Sees = Literal["instruction", "question", "history", "conversation"]

DEFAULT_RETRY = Retry(3)

DESCRIPTION = "A language model to ask for help: it reasons, answers questions and follows instructions."


def expert_tool(
    *,
    name: str,
    model: str,
    base_url: str | None = None,
    api_key_env: str | None = "OPENAI_API_KEY",
    description: str = DESCRIPTION,
    price: Price | Mapping[str, float] | None = None,
    prices: PriceTable | str | PathLike[str] | None = None,
    provider: str | None = None,
    latency_s: float = 10.0,
    timeout_s: float = 300.0,
    attempt_timeout_s: float | None = None,
    retry: Retry | Mapping[str, Any] | None = DEFAULT_RETRY,
    limiter: Limiter | Mapping[str, Any] | None = None,
    max_concurrency: int | None = None,
    max_calls_per_s: float | None = None,
    sees: Sees = "history",
    max_context_chars: int = 40_000,
    system_prompt: str | None = None,
    temperature: float | None = None,
    max_output_tokens: int | None = None,
    stream: bool = False,
    extra: Mapping[str, Any] | None = None,
    max_output_chars: int | None = None,
) -> Tool:
    """A live expert as a tool.

    Args:
        name, description: what the policy knows it by; they need not tell which model it is.
        model, base_url, api_key_env, extra: see `Endpoint`.
        price: dollars, a `Price` or a mapping (see `prices.as_price`). None looks the model up in `prices`, then in
            genai-prices' table at `provider` (which `base_url` tells if it is a known one).
        prices: a price table, see `prices.model_price`.
        latency_s: seconds that the policy is told to expect; what a call took is measured.
        timeout_s: limit of a call, its retries and pauses included.
        attempt_timeout_s: limit of one request; None gives each all the time that is left.
        retry: of requests that failed for a passing reason; None for none. A mapping has `Retry`'s fields.
        limiter: bounds the calls of all episodes of the process, and of all tools that are given the same one. A
            mapping has `Limiter`'s fields.
        max_concurrency, max_calls_per_s: short for a `limiter` of the tool's own.
        sees: what the expert reads beside the instruction: nothing ("instruction"), the task's question ("question"),
            that and the calls so far with their results ("history"), or the whole conversation ("conversation").
        max_context_chars: calls or conversation longer than this lose their oldest part.
        system_prompt: the request's system message; None sends none.
        temperature, max_output_tokens: None leaves it to the endpoint.
        stream: see `chat`.
        max_output_chars: the policy reads no more of an answer.

    Raises:
        ValueError: an argument is not usable, or the price is not known; the message says how to mend it.
    """
    if attempt_timeout_s is None:
        attempt_timeout_s = timeout_s
    endpoint = Endpoint(model, base_url, api_key_env, attempt_timeout_s, dict(extra or {}))
    load_client()
    deadline = _Deadline(timeout_s)
    if sees not in get_args(Sees):
        raise ValueError(f"expert {name!r}: sees must be one of {', '.join(get_args(Sees))}, not {sees!r}")
    if isinstance(max_context_chars, bool) or not isinstance(max_context_chars, int) or max_context_chars < 1:
        raise ValueError(f"expert {name!r}: max_context_chars must be a whole number above 0, not {max_context_chars}")
    if price is None:
        price = model_price(model, provider=provider or base_url, overrides=prices)
    tool_price = as_price(price, f"expert {name!r}: price")
    if api_key_env is not None and not os.environ.get(api_key_env):
        logger.warning("expert %r: the environment variable %s is not set, its calls will fail", name, api_key_env)

    async def consult(instruction: str = "", *, context: CallContext) -> ToolResult:
        prompt = expert_prompt(instruction, context, sees, max_context_chars)
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        left_s = deadline.left_s()
        start = time.perf_counter()
        try:
            reply = await chat(
                dataclasses.replace(endpoint, timeout_s=min(left_s, endpoint.timeout_s)),
                [*system, {"role": "user", "content": prompt}],
                stream=stream,
                max_output_tokens=max_output_tokens,
                temperature=temperature,
            )
        except ChatError as error:
            latency_s = time.perf_counter() - start
            is_last = latency_s >= left_s - 0.01  # time limits may end a little early
            raise _unavailable(error, name, endpoint, tool_price, latency_s, is_last=is_last) from None
        deadline.forget()
        if not reply.text:
            raise ToolUnavailableError(
                _why_empty(reply),
                transient=False,
                cost_usd=_beside_tokens_usd(tool_price, time.perf_counter() - start),
                input_tokens=reply.input_tokens,
                output_tokens=reply.output_tokens,
                cost_known=reply.usage_known,
            )
        return ToolResult(
            reply.text,
            input_tokens=reply.input_tokens,
            output_tokens=reply.output_tokens,
            cost_known=reply.usage_known,
        )

    settings = {
        "sees": sees if sees != "history" else None,
        "system_prompt": system_prompt,
        "temperature": temperature,
        "max_output_tokens": max_output_tokens,
        "extra": dict(extra or {}) or None,
    }
    limits = {"max_concurrency": max_concurrency, "max_calls_per_s": max_calls_per_s}
    if any(limit is not None for limit in limits.values()):
        if limiter is not None:
            raise ValueError(f"expert {name!r}: give a limiter, or max_concurrency and max_calls_per_s, not both")
        limiter = limits
    return Tool(
        name=name,
        description=description,
        parameters=_parameters(sees),
        function=consult,
        price=tool_price,
        latency_s=latency_s,
        timeout_s=timeout_s,
        clock="measured",
        retry=Retry(**retry) if isinstance(retry, Mapping) else retry,
        limiter=Limiter(**limiter) if isinstance(limiter, Mapping) else limiter,
        max_output_chars=max_output_chars,
        source="live",
        backend=_identity(endpoint, settings),
    )


def expert_prompt(instruction: str, context: CallContext, sees: Sees, max_context_chars: int) -> str:
    """What the expert is asked.

    Raises:
        ToolArgumentError: there is neither an instruction nor anything else that the expert may see.
    """
    parts = []
    if sees == "conversation":
        parts += _section("Conversation so far", _conversation(context.messages), max_context_chars)
    elif sees != "instruction":
        parts.append(f"Task:\n{context.task.question}")
    if sees == "history":
        parts += _section("Results of earlier tool calls", _calls(context.history), max_context_chars)
    if instruction.strip():
        parts.append(f"Instruction:\n{instruction}" if parts else instruction)
    if not parts:
        raise ToolArgumentError("instruction must say what the expert shall do")
    return "\n\n".join(parts)


def _parameters(sees: Sees) -> dict[str, Any]:
    alone = sees == "instruction"
    hint = "it reads nothing else" if alone else "it solves the task if left out"
    instruction = {"type": "string", "description": f"What the expert shall do, in words; {hint}."}
    required = {"required": ["instruction"]} if alone else {}
    return {
        "type": "object",
        "properties": {"instruction": instruction},
        "additionalProperties": False,
        **required,
    }


def _section(title: str, text: str, max_chars: int) -> list[str]:
    """A part of the prompt, its end kept; nothing if there is no text."""
    num_cut = len(text) - max_chars
    if num_cut > 0:
        text = f"[{num_cut} characters cut]\n{text[num_cut:]}"
    return [f"{title}:\n{text}"] if text else []


def _calls(history: Sequence[CallRecord]) -> str:
    return "\n\n".join(f"{record.tool} {canonical_json(record.arguments)}\n{record.text}" for record in history)


def _conversation(messages: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)


class _Deadline:
    """When the requests of a call must end, over its attempts, for its tool to account for the last of them, too.

    The attempts of a call run in one task, and each call in one of its own, so that a context variable tells calls
    apart.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._margin_s = min(1.0, 0.1 * timeout_s)
        self._start: contextvars.ContextVar[float | None] = contextvars.ContextVar("start", default=None)

    def left_s(self) -> float:
        """Seconds that the next request may take.

        Raises:
            ToolUnavailableError: there are none left.
        """
        now = asyncio.get_running_loop().time()
        start = self._start.get()
        if start is None or now >= start + self._timeout_s:  # the first attempt of a call
            self._start.set(start := now)
        left_s = start + self._timeout_s - self._margin_s - now
        if left_s <= 0:
            raise ToolUnavailableError(f"no answer within {self._timeout_s:g} s", transient=False)
        return left_s

    def forget(self) -> None:
        """The call is over."""
        self._start.set(None)


def _beside_tokens_usd(price: Price, latency_s: float) -> float:
    """What a request costs beside its tokens."""
    return price.cost_usd(latency_s=latency_s)


def _unavailable(
    error: ChatError, name: str, endpoint: Endpoint, price: Price, latency_s: float, *, is_last: bool
) -> ToolUnavailableError:
    """The error as the policy may read it: which model is behind an alias is not told. `is_last`: no time is left."""
    if not error.transient:
        _warn_once(name, endpoint.identity, str(error))
    return ToolUnavailableError(
        _without_names(str(error), endpoint),
        transient=error.transient and not is_last,
        retry_after_s=error.retry_after_s,
        cost_usd=_beside_tokens_usd(price, latency_s) if error.input_tokens or error.output_tokens else 0.0,
        input_tokens=error.input_tokens,
        output_tokens=error.output_tokens,
        cost_known=error.cost_known,
    )


@functools.lru_cache(maxsize=256)  # a wrong key fails thousands of calls
def _warn_once(name: str, identity: str, message: str) -> None:
    logger.warning("expert %r (%s): %s", name, identity, message)


def _without_names(message: str, endpoint: Endpoint) -> str:
    url = urlsplit(str(endpoint.base_url))
    names = {
        "[endpoint]": (str(endpoint.base_url), url.netloc, url.hostname or url.netloc),
        "[model]": (endpoint.model, endpoint.model.rpartition("/")[2]),
    }
    for mark, words in names.items():
        for word in words:
            message = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", mark, message, flags=re.IGNORECASE)
    return message


def _why_empty(reply: ChatReply) -> str:
    if reply.finish_reason == "length":
        return "no answer: it ran out of output tokens while reasoning"
    if reply.tool_calls:
        return "no answer: it asked for tools, which it does not have"
    return f"no answer: the text is empty (finish reason {reply.finish_reason or 'not given'})"


def _identity(endpoint: Endpoint, settings: Mapping[str, Any]) -> str:
    """The endpoint's identity, with a digest of the settings that change its answers, if there are any."""
    given = {key: value for key, value in settings.items() if value is not None}
    if not given:
        return endpoint.identity
    return f"{endpoint.identity}#{hashlib.sha256(canonical_json(given).encode()).hexdigest()[:8]}"
