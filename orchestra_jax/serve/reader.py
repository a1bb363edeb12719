"""From sampled tokens, as they come, to reasoning, visible text and tool calls that can be sent at once.

What is handed out is never taken back, so it must be certain: whole UTF-8 characters, nothing that may be the beginning
of a stop string or of a tag, white space only when more text follows it, a tool call when it is complete. The pieces
joined are what `orchestra_envs.parse.parse_turn` makes of the whole text, with one exception: a `</think>` that nothing
opened cannot make reasoning of what was sent as content already; it is left out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestra_envs.parse import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    ParsedTurn,
    ParseError,
    ToolCall,
    parse_turn,
)

from orchestra_jax.sampler.stops import held_back

_UNOPENED = parse_turn(CALL_CLOSE).errors
_TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
_TAG = re.compile("|".join(_TAGS))
_THINK_TAG = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")
_THINK_END = re.compile(THINK_CLOSE)
_IN_CALL = re.compile(rf'\\.|"|{CALL_OPEN}|{CALL_CLOSE}', re.DOTALL)


@dataclass(frozen=True)
class Delta:
    """What new tokens added to a turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()
    """Tool calls that could not be read."""


class TurnReader:
    """Reads one turn.

    Args:
        token_bytes: the bytes of a token (`Tokenizer.token_bytes`).
        reasoning_open: the prompt ends inside `<think>`.
        stop_texts: the turn ends before the first of these in its text, wherever that is.
        one_call: the turn ends with its first complete call.

    Attributes:
        finished: a stop text or a call ended the turn; later tokens are not read.
        stop_text: the one that ended it.
        num_read: tokens read so far, those of a stop text included.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        reasoning_open: bool = False,
        stop_texts: Sequence[str] = (),
        one_call: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = _StopTexts(stop_texts)
        self._markup = _Markup(reasoning_open)
        self._one_call = one_call
        self.finished = False
        self.num_read = 0

    @property
    def stop_text(self) -> str | None:
        return self._stops.found

    def feed(self, tokens: Iterable[int], *, end: bool = False, truncated: bool = False) -> Delta:
        """Reads more tokens (without a stop token at the end).

        Args:
            end: these are the last ones.
            truncated: a limit cut the turn, so that a call which is not closed does not count.
        """
        for token in tokens:
            if self.finished:
                break
            self.num_read += 1
            self._read(self._decode(self._token_bytes(token)))
        if end and not self.finished:
            self._read(self._decode(b"", True))
            if not self.finished:
                self._markup.push(self._stops.rest())
                self._markup.end(truncated=truncated)
        return self._markup.take()

    def _read(self, text: str) -> None:
        self._markup.push(self._stops.push(text))
        if self._stops.found is not None:
            self._markup.end(truncated=False)
            self.finished = True
        elif self._one_call and self._markup.num_calls:
            self.finished = True


class _StopTexts:
    """Holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string.

        The string that is completed first counts, of several the longest: so it does not matter how the text is cut.
        """
        if not self.stops:
            return text
        text = self.held + text
        hits = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self.stops if stop in text]
        if hits:
            _, start, self.found = min(hits)
            return text[:start]
        kept = len(text) - held_back(text, self.stops)
        self.held = text[kept:]
        return text[:kept]

    def rest(self) -> str:
        return self.held


class _Markup:
    """Takes text apart at the tags."""

    def __init__(self, reasoning_open: bool) -> None:
        self._buffer = ""
        self._read: Callable[[], bool] = self._thought if reasoning_open else self._visible
        self._prompt_opened = reasoning_open
        self._ended = self._truncated = False
        self._scanned, self._in_string = 0, False  # of a call: how much of the buffer was looked at
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._stray_close = self._any_error = False
        self.num_calls = 0
        self._calls: list[ToolCall] = []
        self._errors: list[ParseError] = []

    def push(self, text: str) -> None:
        self._buffer += text
        while self._buffer and self._read():
            pass

    def end(self, *, truncated: bool) -> None:
        """Nothing follows: what was held back is decided."""
        self._ended, self._truncated = True, truncated
        self.push("")
        if self._read == self._call:  # the text ends with the opening tag
            self._call()
        if self._stray_close and not self.num_calls and not self._any_error:
            self._errors += _UNOPENED

    def take(self) -> Delta:
        """What was found since the last time."""
        delta = Delta(self._reasoning.take(), self._content.take(), tuple(self._calls), tuple(self._errors))
        self._calls, self._errors = [], []
        return delta

    # Readers of a state: each takes something off the buffer, and says whether to go on with what is left.

    def _visible(self) -> bool:
        return self._up_to_tag(_TAG, _TAGS, self._content)

    def _thought(self) -> bool:
        # Reasoning that the prompt opened may open itself once more; elsewhere a second <think> is text.
        if self._prompt_opened:
            return self._up_to_tag(_THINK_TAG, (THINK_OPEN, THINK_CLOSE), self._reasoning)
        return self._up_to_tag(_THINK_END, (THINK_CLOSE,), self._reasoning)

    def _up_to_tag(self, pattern: re.Pattern[str], tags: Sequence[str], target: _Trimmed) -> bool:
        tag = pattern.search(self._buffer)
        if tag is None:
            kept = len(self._buffer) - (0 if self._ended else held_back(self._buffer, tags))
            target.push(self._cut(kept))
            return False
        target.push(self._cut(tag.start()))
        self._cut(len(tag.group()))
        self._enter(tag.group())
        return True

    def _enter(self, tag: str) -> None:
        thinking = self._read == self._thought
        if tag == THINK_OPEN and not thinking:
            self._reasoning.begin_block()
            self._read = self._thought
        elif tag == THINK_CLOSE:
            self._prompt_opened = False
            self._read = self._visible
        elif tag == CALL_CLOSE:
            self._stray_close = True
        elif tag == CALL_OPEN:
            self._scanned, self._in_string = 0, False
            self._read = self._call

    def _call(self) -> bool:
        """Reads up to a tag that no JSON string holds, or to the end of the text."""
        while found := _IN_CALL.search(self._buffer, self._scanned):
            self._scanned = found.end()
            if found.group() == '"':
                self._in_string = not self._in_string
            elif found.group() in (CALL_OPEN, CALL_CLOSE) and not self._in_string and self._end_call(found):
                return True
        return self._ended and self._end_of_text()

    def _end_call(self, tag: re.Match[str]) -> bool:
        """Whether the call ends at this tag."""
        body = self._buffer[: tag.start()]
        parsed, is_json = _parse_call(body)
        if is_json:
            self._add(parsed)
            self._cut(tag.end() if tag.group() == CALL_CLOSE else tag.start())
            self._read = self._visible
            return True
        if tag.group() == CALL_CLOSE:
            self._malformed()
        return tag.group() == CALL_CLOSE

    def _end_of_text(self) -> bool:
        parsed, is_json = _parse_call(self._buffer, truncated=self._truncated)
        if not is_json and CALL_CLOSE in self._buffer:
            self._malformed()
            return True
        self._add(parsed)
        self._cut(len(self._buffer))
        self._read = self._visible
        return False

    def _malformed(self) -> None:
        """What is not JSON ends at its first closing tag."""
        end = self._buffer.index(CALL_CLOSE) + len(CALL_CLOSE)
        self._add(parse_turn(CALL_OPEN + self._cut(end)))
        self._read = self._visible

    def _add(self, parsed: ParsedTurn) -> None:
        self._calls += parsed.calls
        self._errors += parsed.errors
        self.num_calls += len(parsed.calls)
        self._any_error |= bool(parsed.errors)

    def _cut(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text


class _Trimmed:
    """Text without white space at the ends of its blocks, which are joined by line ends."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._space = ""
        self._in_block = self._any = False

    def push(self, text: str) -> None:
        text = self._space + text if self._in_block else text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return
        if not self._in_block and self._any:
            self._out.append("\n")
        self._out.append(kept)
        self._in_block = self._any = True

    def begin_block(self) -> None:
        self._space, self._in_block = "", False

    def take(self) -> str:
        text, self._out = "".join(self._out), []
        return text


def _parse_call(body: str, *, truncated: bool = False) -> tuple[ParsedTurn, bool]:
    """What stands behind an opening tag, without a closing one, and whether it is JSON."""
    parsed = parse_turn(CALL_OPEN + body, truncated=truncated)
    kinds = {error.kind for error in parsed.errors}
    return parsed, not ("truncated_call" in kinds or (CALL_CLOSE in body and "malformed_json" in kinds))
