"""Stands for the engine: the turns of one conversation are written beforehand and come a few tokens a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestra_jax.sampler.engine import Request, SampledTurn
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.tokenizer import load_tokenizer

CHAT = ChatFormat(load_tokenizer("market"))
TOKENS_A_ROUND = 5


def written(call: str) -> str:
    """A call as the policy writes it, of its JSON."""
    return f"<tool_call>\n{call}\n</tool_call>"


class ScriptedEngine:
    """Has of `Engine` what a rollout uses. A turn that ends in "..." is cut by its limit.

    Attributes:
        requests: what was asked for.
        seen: the text of every unfinished turn, as `partial` gave it after each round.
    """

    slots = 1

    def __init__(self, turns: Sequence[str], capacity: int = 2048) -> None:
        self.turns = list(turns)
        self.capacity = capacity
        self.requests: list[Request] = []
        self.seen: list[str] = []
        self._left: list[int] = []
        self._given: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def use(self, params: Any, version: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def release(self, key: Any) -> None:
        pass

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._left, self._given = CHAT.turn_ids(self.turns.pop(0)), []

    def partial(self, key: Any) -> list[int]:
        tokens = list(self._given) if self._left else []
        if tokens:
            self.seen.append(CHAT.turn_text(tokens))
        return tokens

    def run(self) -> list[SampledTurn]:
        self._given += self._left[:TOKENS_A_ROUND]
        del self._left[:TOKENS_A_ROUND]
        if self._left:
            return []
        tokens = self._given
        stopped = not CHAT.turn_text(tokens).endswith("...")
        if not stopped:
            tokens = tokens[:-1]
        return [SampledTurn(self.requests[-1].key, tokens, [-0.5] * len(tokens), [0] * len(tokens), stopped)]
