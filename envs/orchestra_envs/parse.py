"""From the text of one assistant turn to its reasoning, its visible text and its tool calls.

The wire form is the one Qwen and Hermes models write::

    <think>reasoning</think>
    visible text
    <tool_call>
    {"name": "search", "arguments": {"query": "Velmora Tower"}}
    </tool_call>

Rules, in the order in which they are applied:

1. Reasoning first. `<think>...</think>` blocks are reasoning, several of them too, and nothing in them is a
   call. A block that is never closed reaches to the end of the text. A `</think>` that nothing opened (the
   prompt may have done so) makes everything before it reasoning, drafted calls included.
2. A call is strict JSON (RFC 8259) right after `<tool_call>`. The object is read first and the closing tag is
   looked for after it, so that markers inside JSON strings are text.
3. One pair of tags may hold several objects, or a list of them: all run, in order.
4. JSON is never repaired. If anything between the tags is not JSON (trailing comma, single quotes, text after
   the object, NaN, a number out of range, a key written twice, nesting beyond `MAX_DEPTH`), no call of that
   pair runs, one error says why, and the pair ends at its first closing tag.
5. A complete call whose closing tag is missing runs if the text ends there or the next `<tool_call>` follows,
   unless the turn was cut off (`truncated`): then it does not.
6. `arguments` may be an object, null or absent (no arguments), or a JSON string that holds an object (decoded
   once, or twice). Anything else is an error. `parameters` is read as `arguments` if that is absent, and the
   OpenAI form `{"type": "function", "function": {...}}` is unwrapped. Other keys beside them are an error,
   except `id`, `type` and `index`.
7. JSON without the tags is visible text: an answer may be JSON. A code fence around the JSON inside the tags is
   skipped. A closing tag alone is an error if the turn has no call and no other error.
8. Lone surrogates become U+FFFD, in the text and in decoded strings, so that everything can be written as UTF-8.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

MAX_CALLS = 128
"""Tool calls and malformed pairs of tags read in one turn; what follows is one error."""

MAX_DEPTH = 64
"""Deepest nesting of objects and lists in a call."""

ErrorKind = Literal[
    "malformed_json",
    "truncated_call",
    "missing_name",
    "bad_arguments",
    "too_many_calls",
    "unopened_call",
    "empty_turn",
]

_MARKER = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}|{CALL_OPEN}|{CALL_CLOSE}")
_THINK_TAG = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")
_BEFORE_JSON = re.compile(r"\s*(?:```[a-z_]*\s)?\s*")
_AFTER_JSON = re.compile(r"\s*(?:```)?\s*")
_IGNORED_KEYS = frozenset({"id", "type", "index"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the policy asked for it: the tool's name and its arguments (JSON values)."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParseError:
    """Why a piece of a turn is not a call; `message` is one sentence that the policy can act upon."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn taken apart; `content` is the visible text outside reasoning and calls, stripped."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    errors: tuple[ParseError, ...]
    truncated: bool


def parse_turn(text: str, *, truncated: bool = False, reasoning_open: bool = False) -> ParsedTurn:
    """Take one assistant turn apart by the rules of this module; never raises, linear in `len(text)`.

    Args:
        text: what the policy wrote, without its stop token.
        truncated: the turn was cut off by a length limit; a call that is not closed then never runs.
        reasoning_open: the prompt ends inside `<think>`, so that the text begins with reasoning.
    """
    text = replace_surrogates(text)
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    errors: list[ParseError] = []
    unopened: list[ParseError] = []
    num_pairs = 0
    position = visible_from = _end_of_reasoning(text, 0) if reasoning_open else 0
    while marker := _MARKER.search(text, position):
        content.append(text[position : marker.start()])
        start = position = marker.end()
        tag = marker.group()
        if tag == THINK_OPEN:
            position = _end_of_reasoning(text, start)
            reasoning.append(text[start:position].removesuffix(THINK_CLOSE).strip())
        elif tag == THINK_CLOSE:
            visible_from = position
            for collected in (content, reasoning, calls, errors, unopened):
                collected.clear()
        elif tag == CALL_CLOSE:
            unopened = [ParseError("unopened_call", f"{CALL_CLOSE} without {CALL_OPEN} before it")]
        elif num_pairs == MAX_CALLS:
            errors.append(_TOO_MANY_CALLS)
            position = len(text)
        else:
            num_pairs += 1
            position = _read_pair(text, start, truncated, calls, errors)
    content.append(text[position:])
    hidden = _THINK_TAG.sub("", text[:visible_from]).strip()
    return ParsedTurn(
        reasoning="\n".join(part for part in (hidden, *reasoning) if part),
        content="".join(content).strip(),
        calls=tuple(calls),
        errors=tuple(errors or (unopened if not calls else ())),
        truncated=truncated,
    )


def render_call(call: ToolCall) -> str:
    """The text of a call as a Qwen or Hermes model writes it; `parse_turn` gives the same call back.

    Raises:
        ValueError: the arguments are not JSON (NaN, infinity, keys that are no strings, Python objects) or nested
            deeper than `MAX_DEPTH`.
    """
    try:
        fields = _clean({"name": call.name, "arguments": call.arguments}, 0)
        body = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments of {call.name!r} cannot be written as JSON: {error}") from error
    return f"{CALL_OPEN}\n{body}\n{CALL_CLOSE}"


def decode_arguments(value: Any) -> dict[str, Any]:
    """Arguments as they come over the wire (object, null, or a JSON string of an object) as a dict.

    A string is decoded once, and once more if it holds another string (double encoding is common).

    Raises:
        ValueError: anything else; the message names what was found.
    """
    for _ in range(2):
        if not isinstance(value, str):
            break
        value = _decode_whole(value) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"arguments must be a JSON object, not {_json_type(value)}")
    return value


def replace_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates (not writable as UTF-8) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


_TOO_MANY_CALLS = ParseError("too_many_calls", f"more than {MAX_CALLS} tool calls in one turn")


class _FieldError(Exception):
    """A JSON value that is no call; carries the `ParseError`."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.error = ParseError(kind, message)


def _end_of_reasoning(text: str, start: int) -> int:
    close = text.find(THINK_CLOSE, start)
    return len(text) if close < 0 else close + len(THINK_CLOSE)


def _read_pair(text: str, start: int, truncated: bool, calls: list[ToolCall], errors: list[ParseError]) -> int:
    """Read what follows a `<tool_call>` that ends at `start`; returns where the visible text goes on."""
    try:
        values, end = _read_values(text, start)
    except ValueError as error:
        close = text.find(CALL_CLOSE, start)
        if close < 0:
            errors.append(ParseError("truncated_call", f"the tool call has no {CALL_CLOSE} and no complete JSON"))
            return len(text)
        errors.append(ParseError("malformed_json", f"the tool call is not valid JSON: {error}"))
        return close + len(CALL_CLOSE)
    if truncated and not text.startswith(CALL_CLOSE, end):
        errors.append(ParseError("truncated_call", "the turn was cut off before the tool call was closed"))
        return end
    if len(calls) + len(values) > MAX_CALLS:
        errors.append(_TOO_MANY_CALLS)
        values = []
    for value in values:
        try:
            calls.append(_to_call(value))
        except _FieldError as error:
            errors.append(error.error)
    return end + len(CALL_CLOSE) if text.startswith(CALL_CLOSE, end) else end


def _read_values(text: str, start: int) -> tuple[list[Any], int]:
    """The JSON values from `start` to the closing tag, the next opening tag or the end of the text."""
    values: list[Any] = []
    position = _skip(_BEFORE_JSON, text, start)
    while position < len(text) and not text.startswith((CALL_CLOSE, CALL_OPEN), position):
        value, position = _decode(text, position)
        values += value if isinstance(value, list) else [value]
        position = _skip(_AFTER_JSON, text, position)
    if not values:
        raise ValueError("it is empty")
    return values, position


def _to_call(value: Any) -> ToolCall:
    if isinstance(value, dict) and "name" not in value and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise _FieldError("malformed_json", f"a tool call must be a JSON object, not {_json_type(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _FieldError("missing_name", 'the tool call has no "name"')
    arguments_key = "arguments" if "arguments" in value else "parameters"
    if extra := value.keys() - _IGNORED_KEYS - {"name", arguments_key}:
        listed = ", ".join(repr(key) for key in sorted(extra))
        raise _FieldError("bad_arguments", f'unexpected {listed} beside "name"; put arguments into "arguments"')
    try:
        return ToolCall(name, decode_arguments(value.get(arguments_key)))
    except ValueError as error:
        raise _FieldError("bad_arguments", f"{name}: {error}") from error


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return found.end() if found else position


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is written twice in one object")
    return found


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is no number that JSON can hold")
    return number


def _integer(digits: str) -> int:
    if len(digits) > 400:  # Python itself refuses 4301 digits, in words that mean nothing to a policy
        raise ValueError("a number has more than 400 digits")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_float)


def _decode(text: str, position: int) -> tuple[Any, int]:
    """One strict JSON value at `position` and where it ends; ValueError if there is none."""
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (character {error.pos - position})") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from error
    return _clean(value, 0), end


def _decode_whole(text: str) -> Any:
    value, end = _decode(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise ValueError("arguments: text after the JSON value")
    return value


def _clean(value: Any, depth: int) -> Any:
    """`value` with lone surrogates replaced; ValueError for deeper nesting than later readers can be sure of."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if not isinstance(value, dict | list):
        return value
    if depth == MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    if not all(isinstance(key, str) for key in value):
        raise ValueError("a key is no string")
    return {replace_surrogates(key): _clean(item, depth + 1) for key, item in value.items()}


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
