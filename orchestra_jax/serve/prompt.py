"""From a client's messages to the ids that the policy goes on from.

A client sends the whole conversation at every turn, as text. The text of a sampled turn does not give back the ids that
were sampled, reasoning may be missing from it, and a template may write history otherwise than it was sampled. So what
a conversation was, id for id, is remembered; where a request continues it, its prompt is those ids and the ids of the
new messages: what a rollout would have (`ChatFormat.observation_ids`), with a beginning that the engine has in its
cache. Other histories, edited or of another server, are rendered by the chat template.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra_envs.parse import THINK_CLOSE, THINK_OPEN, ToolCall, render_call

from orchestra_jax.serve.request import Message
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.prompt import tools_section

MEMORY_TOKENS = 8_000_000
"""Ids that a `TurnMemory` keeps by default: 32 MB."""


@dataclass(frozen=True)
class Prompt:
    """What a request starts from.

    Attributes:
        ids: the whole conversation, up to where the policy's turn starts.
        digest: of the messages and tools, to which an answer is added by `extend_digest`.
        key: the engine's key of the conversation that this continues, None for a new one.
    """

    ids: list[int]
    digest: bytes
    key: Hashable | None = None


@dataclass(frozen=True)
class _Remembered:
    ids: array[int]
    """Of the conversation up to and including the assistant's turn."""
    reasoning: str
    key: Hashable


class TurnMemory:
    """The ids of conversations that this server sampled, the least recently used forgotten first. Thread-safe.

    Args:
        max_tokens: ids kept in total.
    """

    def __init__(self, max_tokens: int = MEMORY_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._turns: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, digest: bytes, ids: Sequence[int], reasoning: str, key: Hashable) -> None:
        """Remembers a conversation that ends with a sampled turn.

        Args:
            digest: of its messages, the sampled one included.
            ids: of all of it.
            reasoning: of the sampled turn; a client may send it back or not, but not another one.
            key: the engine's.
        """
        with self._lock:
            if known := self._turns.pop(digest, None):
                self._num_tokens -= len(known.ids)
            self._turns[digest] = _Remembered(array("i", ids), reasoning, key)
            self._num_tokens += len(ids)
            while self._num_tokens > self._max_tokens:
                _, forgotten = self._turns.popitem(last=False)
                self._num_tokens -= len(forgotten.ids)

    def get(self, digest: bytes, reasoning: str) -> tuple[list[int], Hashable] | None:
        """The ids of a conversation and its key in the engine; None if it is not remembered."""
        with self._lock:
            known = self._turns.get(digest)
            if known is None or (reasoning and reasoning != known.reasoning):
                return None
            self._turns.move_to_end(digest)
            return known.ids.tolist(), known.key


def build_prompt(
    chat: ChatFormat, messages: Sequence[Message], tools: list[dict[str, Any]], memory: TurnMemory
) -> Prompt:
    """The prompt of a request.

    Args:
        messages: as `read_messages` gives them.
        tools: in OpenAI's form; they are written as in training (`ChatFormat.prompt_ids`).

    Raises:
        ValueError: the template fails, or a tool's schema contains a control token.
    """
    digests = [hashlib.sha256(_canonical(tools)).digest()]
    for message in messages:
        digests.append(extend_digest(digests[-1], message))
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] != "assistant":
            continue
        if known := memory.get(digests[index + 1], messages[index].get("reasoning", "")):
            ids, key = known
            following = following_ids(chat, messages[index + 1 :])
            # A sampled stop token closed the turn already.
            return Prompt(ids + following[int(ids[-1] in chat.stop_ids) :], digests[-1], key)
    return Prompt(first_ids(chat, messages, tools), digests[-1])


def extend_digest(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation and one more message. Reasoning is left out, which clients may not send back."""
    kept = {name: value for name, value in message.items() if name != "reasoning"}
    return hashlib.sha256(digest + _canonical(kept)).digest()


def first_ids(chat: ChatFormat, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
    """The ids of a conversation that nobody remembers.

    Raises:
        ValueError: as `build_prompt`.
    """
    written = _template_messages(chat, messages)
    if tools and not chat.supports_tools:
        written, tools = _with_tools_in_system(written, tools), []
    return chat.conversation_ids(written, tools or None, add_generation_prompt=True)


def following_ids(chat: ChatFormat, messages: Sequence[Message]) -> list[int]:
    """The ids from the end token of an assistant's turn to the start of the next one, `messages` between them.

    They are what two renderings have in common at their end whose assistants said different things: the end token
    follows a turn at once, and what is behind an added token is encoded apart.

    Raises:
        ValueError: the template fails.
    """
    after = _template_messages(chat, messages)
    first, second = (
        chat.conversation_ids(
            [{"role": "user", "content": "Q"}, {"role": "assistant", "content": said}, *after],
            add_generation_prompt=True,
        )
        for said in ("a", "b")
    )
    common = 0
    while first[-1 - common] == second[-1 - common]:
        common += 1
    return first[len(first) - common :]


def _template_messages(chat: ChatFormat, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the policy is used to them: calls and reasoning within the text of a turn, and tool results as user
    messages where the template has no role for them."""
    written: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        role, content = message["role"], message["content"]
        is_result = role == "tool" and not chat.supports_tool_role
        if role == "assistant":
            content = _turn_text(message)
        elif is_result:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if in_results:
                content = f"{written.pop()['content']}\n{content}"
        written.append({"role": role, "content": content})
        in_results = is_result
    return written


def _turn_text(message: Message) -> str:
    reasoning = message.get("reasoning", "")
    calls = [render_call(ToolCall(call["name"], call["arguments"])) for call in message.get("tool_calls", ())]
    said = "\n".join(filter(None, [message["content"], *calls]))
    return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{said}" if reasoning else said


def _with_tools_in_system(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without a section for tools."""
    section = tools_section(tools)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": section}, *messages]
    system = "\n\n".join(filter(None, [messages[0]["content"], section]))
    return [{"role": "system", "content": system}, *messages[1:]]


def _canonical(value: Sequence[Any] | Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
