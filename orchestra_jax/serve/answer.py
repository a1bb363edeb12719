"""An answer as it comes: what the engine reports, read into choices, and the JSON that OpenAI's clients expect."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestra_envs.parse import ParseError

from orchestra_jax.sampler.engine import SampledTurn
from orchestra_jax.serve.prompt import Prompt, TurnMemory, extend_digest
from orchestra_jax.serve.reader import Delta, TurnReader
from orchestra_jax.serve.request import ChatRequest
from orchestra_jax.serve.worker import Ended, Event, Progress
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come.

    Attributes:
        tokens: all that were sampled for it, a stop token included.
        finish_reason: "stop", "length" or "tool_calls" once it is over.
        turn: the engine's result; None if the reader ended the turn sooner.
    """

    index: int
    reader: TurnReader
    stop_ids: Sequence[int]
    calls_allowed: bool = True
    tokens: list[int] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    calls: list[Json] = field(default_factory=list)
    errors: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    turn: SampledTurn | None = None

    def take(self, event: Event) -> Json:
        """Enters what was sampled; the fields that it adds to the message (`delta` of a chunk), {} if none.

        Raises:
            ApiError: the turn failed.
        """
        if not isinstance(event, Progress | Ended):
            raise event.error
        new = list(event.tokens)
        self.tokens += new
        if isinstance(event, Progress):
            read = self.reader.feed(new)
        else:
            stopped = event.turn.stopped
            text = new[:-1] if stopped and new and new[-1] in self.stop_ids else new
            read = self.reader.feed(text, end=True, truncated=not stopped)
            self.turn = event.turn
        delta = self._add(read)
        if self.reader.finished or self.turn is not None:
            self._finish()
        return delta

    def _add(self, read: Delta) -> Json:
        calls = [_call(call.name, call.arguments) for call in read.calls] if self.calls_allowed else []
        errors = [_error(error) for error in read.errors]
        if read.calls and not self.calls_allowed:
            errors += [{"type": "call_not_allowed", "message": "a tool was called though tool_choice is none"}]
        numbered = [{"index": len(self.calls) + number, **call} for number, call in enumerate(calls)]
        self.reasoning += read.reasoning
        self.content += read.content
        self.calls += calls
        self.errors += errors
        delta = {
            "reasoning_content": read.reasoning,
            "content": read.content,
            "tool_calls": numbered,
            "tool_call_errors": errors,
        }
        return {name: value for name, value in delta.items() if value}

    def _finish(self) -> None:
        if self.turn is None or self.reader.finished:
            self.tokens = self.tokens[: self.reader.num_read]
        stopped = self.reader.finished or (self.turn is not None and self.turn.stopped)
        self.finish_reason = ("tool_calls" if self.calls else "stop") if stopped else "length"

    @property
    def message(self) -> Json:
        """The whole message."""
        message: Json = {"role": "assistant", "content": self.content or (None if self.calls else ""), "refusal": None}
        extra = {
            "reasoning_content": self.reasoning,
            "tool_calls": self.calls,
            "tool_call_errors": self.errors,
        }
        return message | {name: value for name, value in extra.items() if value}

    def logprobs(self, tokenizer: Tokenizer) -> Json:
        """One entry for each sampled token, markup and stop token included."""
        values = [] if self.turn is None else self.turn.logprobs[: len(self.tokens)]
        return {
            "content": [_logprob(tokenizer, token, value) for token, value in zip(self.tokens, values)],
            "refusal": None,
        }

    def remember(self, memory: TurnMemory, prompt: Prompt, key: Any) -> None:
        """Keeps the ids for the conversation's next turn, except of a stop string: its text is not in the message."""
        if self.reader.stop_text is not None:
            return
        calls = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            for call in self.calls
        ]
        message = {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})
        memory.put(extend_digest(prompt.digest, message), prompt.ids + self.tokens, self.reasoning, key)


def new_choices(asked: ChatRequest, chat: ChatFormat) -> list[Choice]:
    """The choices of a request, nothing in them yet."""

    def reader() -> TurnReader:
        return TurnReader(
            chat.tokenizer.token_bytes,
            reasoning_open=chat.reasoning_open,
            stop_texts=asked.stop,
            one_call=not asked.parallel_tool_calls and asked.tool_choice != "none",
        )

    allowed = asked.tool_choice != "none"
    return [Choice(index, reader(), chat.stop_ids, allowed) for index in range(asked.n)]


class Answer:
    """The JSON of an answer, whole or in chunks.

    Args:
        asked: the request.
        prompt_tokens: of the prompt.
        tokenizer: for the texts of logprobs.
    """

    def __init__(self, asked: ChatRequest, prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.prompt_tokens = prompt_tokens
        self.tokenizer = tokenizer
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer to a request without `stream`."""
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": choice.message,
                    "logprobs": choice.logprobs(self.tokenizer) if self.asked.logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": self.usage(choices),
        }

    def opening(self, choice: Choice) -> Json:
        """The first chunk of a choice."""
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def chunks(self, choice: Choice, delta: Json) -> Iterator[Json]:
        """The chunks of one `delta`, one for each kind of thing in it; the last one, too, if the choice is over."""
        for name, value in delta.items():
            yield self._chunk(choice, {name: value})
        if choice.finish_reason:
            yield self._chunk(choice, {})

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """What ends a stream that was asked for usage."""
        return {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> Json:
        """Tokens: of the prompt once, and of all choices; every sampled token counts, a stop token too."""
        completion = sum(len(choice.tokens) for choice in choices)
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }
        # Further choices take over the prompt that the first one computed. Unknown of a turn that was ended from here.
        cached = [choice.turn.cached_tokens for choice in choices if choice.turn is not None]
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": min(cached)}
        return usage

    def _chunk(self, choice: Choice, delta: Json) -> Json:
        over = not delta and choice.finish_reason
        chunk: Json = {
            **self.head,
            "object": "chat.completion.chunk",
            "choices": [
                {
                    "index": choice.index,
                    "delta": delta,
                    "logprobs": choice.logprobs(self.tokenizer) if over and self.asked.logprobs else None,
                    "finish_reason": choice.finish_reason if over else None,
                }
            ],
        }
        return chunk | ({"usage": None} if self.asked.include_usage else {})


def _call(name: str, arguments: Json) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _error(error: ParseError) -> Json:
    return {"type": error.kind, "message": error.message}


def _logprob(tokenizer: Tokenizer, token: int, value: float) -> Json:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data), "top_logprobs": []}
