"""Strings that end a turn, found across token boundaries as the tokens come.

All of it is pure and on the host. Strings are matched as UTF-8 bytes: a character may be spread over tokens, and a stop
may begin and end in the middle of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from orchestra_envs.parse import CALL_CLOSE

from orchestra_jax.text.tokenizer import Tokenizer


class StopMatcher:
    """Looks for the first of several strings in the text of one turn; one object a turn.

    Keeps no more than the bytes in which a stop may have begun.

    Args:
        stop_texts: the strings, none of them empty.
        token_bytes: the bytes of a token (`Tokenizer.token_bytes`).
    """

    def __init__(self, stop_texts: Sequence[str], token_bytes: Callable[[int], bytes]) -> None:
        if not all(stop_texts):
            raise ValueError("stop texts must not be empty")
        self._stops = [(text, text.encode()) for text in stop_texts]
        self._token_bytes = token_bytes
        self._keep = max((len(stop) for _, stop in self._stops), default=1) - 1
        self._tail = b""

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Goes on with the next tokens of the turn; what comes after a stop was found is of no meaning.

        Returns:
            How many of `tokens` there are up to and with the one that completes a stop, and that stop; None if there
            is none yet. Of several stops it is the one that ends first, and of those that end together the longest.
        """
        pieces = [self._token_bytes(token) for token in tokens]
        data = b"".join([self._tail, *pieces])
        found = [(at + len(stop), -len(stop), text) for text, stop in self._stops if (at := data.find(stop)) >= 0]
        if found:
            end, _, text = min(found)
            ends = accumulate(map(len, pieces), initial=len(self._tail))
            return next(number for number, reached in enumerate(ends) if reached >= end), text
        self._tail = data[len(data) - self._keep :] if len(data) > self._keep else data
        return None


def held_back(text: str, stop_texts: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop, and so are not to be shown yet."""
    longest = min(len(text), max(map(len, stop_texts), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(len(stop) > length and stop.startswith(end) for stop in stop_texts):
            return length
    return 0


def tool_call_stop(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Stop ids and stop texts that end a turn after its first tool call: the closing tag's token, or else its text.

    The tag counts wherever it stands, also in a reasoning block or in a string of the call's arguments. Where a grammar
    is used, its `parallel=False, required=True` says it better.
    """
    token = tokenizer.added_tokens.get(CALL_CLOSE)
    return ((token,), ()) if token is not None else ((), (CALL_CLOSE,))
