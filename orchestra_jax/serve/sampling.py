"""From a checked request to turns of the engine: limits, seeds, stop strings and, where asked for, a grammar."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Hashable
from functools import lru_cache

from orchestra_jax.sampler.engine import Request
from orchestra_jax.sampler.grammar import TokenGrammar, tool_call_grammar
from orchestra_jax.serve.errors import ApiError, bad_request
from orchestra_jax.serve.prompt import Prompt
from orchestra_jax.serve.request import ChatRequest
from orchestra_jax.text.chat import ChatFormat


def make_requests(
    asked: ChatRequest,
    prompt: Prompt,
    keys: list[Hashable],
    *,
    capacity: int,
    grammar: Callable[[], TokenGrammar] | None,
) -> list[Request]:
    """A turn for each choice.

    Args:
        keys: the engine's key of each choice.
        capacity: the most tokens of a conversation.
        grammar: makes the grammar of a turn, or None.

    Raises:
        ApiError: the conversation is too long (`context_length_exceeded`).
    """
    room = capacity - len(prompt.ids)
    if room < 1:
        raise ApiError(
            400,
            f"messages: they have {len(prompt.ids)} tokens; a conversation here has at most {capacity}, "
            "and needs room for an answer",
            param="messages",
            code="context_length_exceeded",
        )
    return [
        Request(
            key=key,
            tokens=prompt.ids,
            limit=min(room, asked.max_tokens or room),
            trajectory=trajectory(asked.seed, index),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop_texts=asked.stop,
            grammar=grammar() if grammar else None,
        )
        for index, key in enumerate(keys)
    ]


def trajectory(seed: int | None, choice: int) -> int:
    """What keys the randomness of a choice: the same for the same seed, else never the same."""
    if seed is None:
        return secrets.randbits(32)
    return int.from_bytes(hashlib.sha256(f"{seed} {choice}".encode()).digest()[:4], "big")


def grammar_of(asked: ChatRequest, chat: ChatFormat, *, constrain: bool) -> Callable[[], TokenGrammar] | None:
    """What makes the grammar of each turn of a request, None where the policy writes freely.

    A call is required, a tool is strict, or `constrain` asks for it: then calls can only be ones of the tools, with
    arguments that fit. With tool_choice "none" no call can be written.

    Raises:
        ApiError: 400; llguidance is not installed here, or a schema is too much for it.
    """
    forbidden = asked.tool_choice == "none" and bool(asked.tools)
    needed = asked.tool_choice == "required" or (asked.strict_tools and asked.tool_choice == "auto")
    if not (forbidden or needed or (constrain and asked.tools)):
        return None
    tools = "[]" if asked.tool_choice == "none" else json.dumps(asked.tools)
    required = asked.tool_choice == "required"
    try:
        return _compiled(chat, tools, required, asked.named_tool, asked.parallel_tool_calls)
    except ImportError as error:
        if forbidden:
            return None  # a call that is written all the same is not given out
        param = "tool_choice" if required else "tools"
        raise bad_request(param, f"cannot be enforced by this server: {error}", "unsupported_parameter") from None
    except ValueError as error:
        raise bad_request("tools", str(error), "unsupported_schema") from None


@lru_cache(maxsize=64)
def _compiled(
    chat: ChatFormat, tools: str, required: bool, name: str | None, parallel: bool
) -> Callable[[], TokenGrammar]:
    """Compiling takes long enough that a conversation's turns should not all pay for it."""
    return tool_call_grammar(
        chat.tokenizer,
        json.loads(tools),
        required=required,
        name=name,
        parallel=parallel,
        reasoning_open=chat.reasoning_open,
        stop_ids=chat.stop_ids,
    )
