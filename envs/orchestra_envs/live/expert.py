"""A tool that asks a language model behind an OpenAI-compatible endpoint.

    tool = expert_tool(name="expert-1", model="gpt-5-mini", description="A strong generalist.", latency_s=20)
    tool = expert_tool(name="local", model="qwen3", base_url="http://127.0.0.1:8000/v1", api_key_env=None,
                       price={"input_usd_per_million": 0.2, "output_usd_per_million": 0.2})

`orchestra_envs.live.chat` says how to start a local server. The expert is handed the task's question, the results of
the calls so far and the policy's instruction, as in ToolOrchestra; `sees` narrows or widens that. Its answer is what
the policy reads, reasoning left out. Tokens are charged by `price`, failed attempts that had begun to answer included;
where the endpoint sends no usage they are estimated and the cost is marked as not known. Cached input tokens are
charged in full.
"""

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
from orchestra_envs.live.chat import ChatError, ChatReply, Endpoint, chat
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
        attempt_timeout_s: limit of one request; None gives each the whole time.
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
        start = time.perf_counter()
        try:
            reply = await chat(
                endpoint,
                [*system, {"role": "user", "content": prompt}],
                stream=stream,
                max_output_tokens=max_output_tokens,
                temperature=temperature,
            )
        except ChatError as error:
            raise _unavailable(error, name, endpoint, tool_price, time.perf_counter() - start) from None
        if not reply.text:
            cost_usd = _cost_usd(tool_price, reply, time.perf_counter() - start)
            raise ToolUnavailableError(_why_empty(reply), transient=False, cost_usd=cost_usd)
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


def _cost_usd(price: Price, reply: ChatReply, latency_s: float) -> float:
    return price.cost_usd(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens, latency_s=latency_s)


def _unavailable(
    error: ChatError, name: str, endpoint: Endpoint, price: Price, latency_s: float
) -> ToolUnavailableError:
    """The error as the policy may read it: which model is behind an alias is not told."""
    if not error.transient:
        _warn_once(name, endpoint.identity, str(error))
    return ToolUnavailableError(
        _without_names(str(error), endpoint),
        transient=error.transient,
        retry_after_s=error.retry_after_s,
        cost_usd=_cost_usd(price, error.partial, latency_s) if error.partial else 0.0,
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
