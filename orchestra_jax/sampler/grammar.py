"""Token masks that keep a policy's tool calls well-formed, by llguidance (the extra `grammar`).

A turn under a grammar is free text, reasoning and tool calls as `orchestra_envs.parse` reads them. The text is the
policy's own; a call that it begins can only become one that the environment runs: strict JSON, a known tool, arguments
that fit its schema. For evaluation and serving; training samples without.

How it is built:

- The grammar is over bytes. `<think>`, `</think>`, `<tool_call>` and `</tool_call>` are known to llguidance by their
  bytes, be they one added token (Qwen3) or several plain ones (SmolLM2), so one grammar serves all tokenizers and both
  spellings, just as the parser sees text only. All other added tokens are special to it: none occurs but the stop ids,
  and these only where the turn may end.
- Free text is a regular expression without any of the four tags. A lazy lexeme, free text plus an opening tag, ends it;
  what follows the tag is a reasoning block up to `</think>` (drafted calls in it are text, as for the parser) or the
  JSON of a call. Tags that close nothing cannot be written, and a turn cannot end within a reasoning block or a call.
- Arguments are compiled here as far as objects, lists, unions and references go, since llguidance's own JSON Schema
  fixes the order of properties to that of the schema, and ours are sorted by name: a rule with one bit per property
  allows any order, each name once. Everything else (strings, enums, formats, patterns, `allOf`, maps ...) is
  llguidance's.
- White space may stand where JSON allows it, but not for ever: a weak policy would never leave it. For the same reason
  integers without bounds end at 10^18.

What is narrower than the schema: objects with `properties` take no others unless `additionalProperties` says so; a
`format` that llguidance knows is enforced (jsonschema takes it for a note), others are not; names, enums and strings
with a pattern are written as they are, without `\\u` escapes. What is wider: within a map (`additionalProperties`) a
key may be written twice, and nesting may exceed the parser's limit; the environment answers either with an error.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from orchestra_envs.parse import CALL_CLOSE, CALL_OPEN, MAX_CALLS, THINK_CLOSE, THINK_OPEN

from orchestra_jax.text.tokenizer import Tokenizer

EXTRA = "orchestra-jax[grammar]"


class TokenGrammar(Protocol):
    """What may be sampled next in one row; one object a row, advanced by the tokens sampled."""

    def mask(self) -> np.ndarray:
        """uint32 `[ceil(vocab_size / 32)]`: bit `token & 31` of word `token >> 5` is set where the token is allowed.

        `vocab_size` is the tokenizer's; tokens that only the model's padded embedding has are never allowed.
        """

    def accept(self, token: int) -> None:
        """Goes on past a token that the mask allowed."""


class GrammarMatcher:
    """A `TokenGrammar` by llguidance. Rows that begin alike may be copied instead of matched again."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def mask(self) -> np.ndarray:
        """See `TokenGrammar`; read-only. Once the turn has ended, the stop ids alone.

        Raises:
            ValueError: no token can follow (the vocabulary lacks a byte), or a limit of llguidance was reached.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        if self._matcher.stop_reason() not in ("NotStopped", "NoExtension", "EndOfSentence"):
            raise ValueError(f"grammar: {_one_line(self._matcher.get_error()) or 'no token can follow'}")
        return words

    def accept(self, token: int) -> None:
        """See `TokenGrammar`.

        Raises:
            ValueError: the token is not allowed here; the matcher is of no use any more.
        """
        if not self._matcher.consume_token(token):
            raise ValueError(f"grammar: token {token} is not allowed here")

    def may_end(self) -> bool:
        """Whether the turn may end here (the mask allows the stop ids)."""
        return self._matcher.is_accepting()

    def copy(self) -> GrammarMatcher:
        """One that stands where this one does and goes its own way."""
        return GrammarMatcher(self._matcher.deep_copy(), self._num_words)


def tool_call_grammar(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool = False,
    name: str | None = None,
    parallel: bool = True,
    reasoning_open: bool = False,
    stop_ids: Sequence[int] | None = None,
) -> Callable[[], GrammarMatcher]:
    """Compiles the grammar of a turn; each call of what it returns starts a row.

    Args:
        tokenizer: the policy's; what llguidance needs of it is made once per tokenizer and stop ids.
        tools: OpenAI function schemas, such as `json.loads(info["tools_json"])`. Without any, no call can be written.
        required: the turn ends with a call. Else it may do without.
        name: the only tool that may be called.
        parallel: several calls may be made in one turn.
        reasoning_open: the prompt ends inside `<think>` (`ChatFormat.reasoning_open`).
        stop_ids: the tokens that end a turn (`ChatFormat.stop_ids`); the tokenizer's own if not given.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: a tool has no name or no object schema, or its schema uses what cannot be enforced; the message
            names the tool, the place in its schema and the feature. Or `name` or `required` cannot be met.
    """
    llguidance = _llguidance()
    stops = tuple(tokenizer.eos_ids if stop_ids is None else stop_ids)
    if not stops:
        raise ValueError(f"{tokenizer.source}: has no end-of-sequence token; pass stop_ids")
    functions = _functions(tools, name)
    if required and not functions:
        raise ValueError("a tool call is required, but there are no tools")
    rules = _Rules()
    lark = _turn_rules(functions, rules, required=required, max_calls=MAX_CALLS if parallel else 1)
    start = f"{_OPTIONS}start: {'thought ' if reasoning_open else ''}turn\n"
    matcher = llguidance.LLMatcher(_ll_tokenizer(tokenizer, stops), start + lark, log_level=0)
    if matcher.is_error():
        raise ValueError(_explanation(llguidance, rules, matcher.get_error()))
    first = GrammarMatcher(matcher, num_words=-(-tokenizer.vocab_size // 32))
    first.mask()  # the slowest mask of a row; copies have it already
    return first.copy


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ImportError(f"grammar-constrained sampling needs llguidance: pip install '{EXTRA}'") from None
    return llguidance


class _Vocabulary:
    """A tokenizer as `llguidance.LLTokenizer` reads one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self.eos_token_id = stop_ids[0]
        self.tokens = [_bytes_or_nothing(tokenizer, i) for i in range(tokenizer.vocab_size)]
        control = [i for token, i in tokenizer.added_tokens.items() if token not in _TAGS]
        self.special_token_ids = [*control, *stop_ids]
        self._encode = tokenizer.encode_text

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


@lru_cache(maxsize=8)
def _ll_tokenizer(tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> Any:
    return _llguidance().LLTokenizer(_Vocabulary(tokenizer, stop_ids), eos_token=list(stop_ids))


def _bytes_or_nothing(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token; none for an id that the vocabulary leaves out."""
    try:
        return tokenizer.token_bytes(token)
    except ValueError:
        return b""


# --- The turn ----------------------------------------------------------------------------------------------------

_TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
_WS = r"[ \t\r\n]{0,32}"  # enough for pretty-printed JSON; never unbounded

# llguidance would force the tokens of text that can only go on one way; so the choice of tokens is the policy's.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_TURN = rf"""
think: to_think thought
to_think[lazy]: TO_THINK
thought[lazy]: THOUGHT
free: FREE
FREE: /(?s:.*)/ & ~/(?s:.*)({"|".join(map(re.escape, _TAGS)).replace("/", chr(92) + "/")})(?s:.*)/
TO_THINK: FREE "{THINK_OPEN}"
THOUGHT: /(?s:.*)/ "{THINK_CLOSE}"
"""
_CALL = rf"""
call: to_call CALL_HEAD tool CALL_TAIL
to_call[lazy]: TO_CALL
TO_CALL: FREE "{CALL_OPEN}"
CALL_HEAD: /{_WS}\{{{_WS}"name"{_WS}:{_WS}/
ARGUMENTS: /{_WS},{_WS}"arguments"{_WS}:{_WS}/
CALL_TAIL: /{_WS}\}}{_WS}/ "{CALL_CLOSE}"
AFTER_CALL: /[ \t\r\n]{{1,32}}/
OPEN: /\{{{_WS}/
CLOSE: /{_WS}\}}/
OPEN_LIST: /\[{_WS}/
CLOSE_LIST: /{_WS}\]/
COMMA: /{_WS},{_WS}/
COLON: /{_WS}:{_WS}/
NUMBER: /-?(0|[1-9][0-9]{{0,17}})(\.[0-9]{{1,24}})?([eE][+-]?[0-9]{{1,2}})?/
"""


def _turn_rules(functions: Mapping[str, Any], rules: _Rules, *, required: bool, max_calls: int) -> str:
    """Lark rules from `turn` down."""
    if not functions:
        return f"turn: think* free\n{_TURN}"
    calls = f"(think* call){{{int(required)},{max_calls}}}"
    turn = f"turn: {calls} {'AFTER_CALL?' if required else 'think* free'}\n"
    tools = [f"{_literal(name)} ARGUMENTS {rules.arguments(name, schema)}" for name, schema in functions.items()]
    return f"{turn}{_TURN}{_CALL}tool: {' | '.join(tools)}\n{rules.text()}"


def _functions(tools: Sequence[Mapping[str, Any]], only: str | None) -> dict[str, Any]:
    """Name -> schema of the arguments."""
    found: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tools[{index}]: must have a function with a 'name'")
        found[name] = function.get("parameters") or {"type": "object", "properties": {}}
    if only is None:
        return found
    if only not in found:
        raise ValueError(f"there is no tool {only!r}; tools: {', '.join(found) or 'none'}")
    return {only: found[only]}


# --- Arguments ---------------------------------------------------------------------------------------------------

# The keywords of JSON Schema that say what is valid; all others are notes.
_ASSERTIONS = frozenset(
    """
    $ref $dynamicRef type enum const allOf anyOf oneOf not if then else
    properties required additionalProperties patternProperties propertyNames minProperties maxProperties
    dependencies dependentRequired dependentSchemas unevaluatedProperties
    items prefixItems additionalItems contains minContains maxContains minItems maxItems uniqueItems unevaluatedItems
    minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
    """.split()  # noqa: SIM905 - readable
)
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_LIST = {"type", "items", "minItems", "maxItems"}
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_DATA_KEYWORDS = ("const", "enum", "default", "examples")
_MAX_NUMBER = 10**18
_MAX_PROPERTIES = 64  # bits of a rule's parameter

# How llguidance compiles the parts that are left to it: white space as here, and "\u00e9" beside "é".
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": f"{_WS},{_WS}",
    "key_separator": f"{_WS}:{_WS}",
    "json_allow_general_unicode_escapes": True,
}


class _Rules:
    """Collects Lark rules; equal parts of a schema share one."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # what a rule is for -> its name
        self._bodies: dict[str, str] = {}  # name -> the rule
        self.leaves: list[tuple[str, dict[str, Any]]] = []  # where and what was left to llguidance

    def text(self) -> str:
        return "".join(self._bodies.values())

    def arguments(self, tool: str, schema: Any) -> str:
        """The name of the rule for a tool's arguments."""
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise ValueError(f"tool {tool!r}: parameters must be a JSON schema of an object")
        root = _bounded({**schema, "type": "object"})
        return self._value(root, root, f"tool {tool!r}: parameters")

    def _value(self, schema: Any, root: dict[str, Any], where: str) -> str:
        """The name of the rule for a value; a rule is named before its body is made, so that schemas may recur."""
        key = json.dumps(schema)
        if '"$ref"' in key:
            key += json.dumps(root)  # a reference means something else in another tool
        if key not in self._names:
            self._names[key] = rule = f"r{len(self._names)}"
            self._bodies[rule] = self._rule(rule, schema, root, where)
        return self._names[key]

    def _rule(self, rule: str, schema: Any, root: dict[str, Any], where: str) -> str:
        keys = _ASSERTIONS.intersection(schema) if isinstance(schema, dict) else frozenset()
        kind = schema.get("type") if keys else None
        if keys == {"$ref"}:
            return f"{rule}: {self._value(_resolved(schema['$ref'], root, where), root, where)}\n"
        if keys == {"anyOf"}:
            return self._union(rule, schema["anyOf"], root, f"{where}.anyOf")
        if isinstance(kind, list) and not keys & {"enum", "const"}:
            return self._union(rule, [{**schema, "type": one} for one in kind], root, where)
        if kind == "object" and _is_closed_object(schema, keys):
            return self._object(rule, schema, root, where)
        if kind == "array" and keys <= _LIST and "items" in keys and schema.get("maxItems") != 0:
            item = self._value(schema["items"], root, f"{where}.items")
            return _list_rule(rule, item, schema.get("minItems", 0), schema.get("maxItems"))
        if kind == "number" and keys == {"type"}:
            return f"{rule}: NUMBER\n"
        return self._leaf(rule, schema, root, where)

    def _union(self, rule: str, options: Sequence[Any], root: dict[str, Any], where: str) -> str:
        names = [self._value(option, root, f"{where}[{index}]") for index, option in enumerate(options)]
        return f"{rule}: {' | '.join(dict.fromkeys(names))}\n"

    def _object(self, rule: str, schema: dict[str, Any], root: dict[str, Any], where: str) -> str:
        """Properties in any order, each once: bit i of the parameter says that the i-th was written."""
        required = schema.get("required", ())
        names = sorted(schema.get("properties", ()), key=lambda name: name not in required)  # required ones first
        values = {name: self._value(schema["properties"][name], root, f"{where}.{name}") for name in names}
        if not names:
            return f"{rule}: OPEN CLOSE\n"
        members = [f"{_literal(name)} COLON {values[name]} {rule}_more::set_bit({i})" for i, name in enumerate(names)]
        complete = f"%if is_ones([0:{len(required)}])" if required else ""
        more = [f'"" {complete}', *(f"COMMA {member} %if bit_clear({i})" for i, member in enumerate(members))]
        return (
            f"{rule}: OPEN {rule}_first::0x0 CLOSE{'' if required else ' | OPEN CLOSE'}\n"
            f"{rule}_first::_ : {' | '.join(members)}\n"
            f"{rule}_more::_ : {' | '.join(more)}\n"
        )

    def _leaf(self, rule: str, schema: Any, root: dict[str, Any], where: str) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError(f"{where}: {json.dumps(schema)} is no schema that a value could fit")
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        document = {**definitions, **schema, "x-guidance": _JSON_OPTIONS}
        self.leaves.append((where, document))
        return f"{rule}: %json {json.dumps(document)}\n"


def _is_closed_object(schema: dict[str, Any], keys: frozenset[str]) -> bool:
    """Whether an object has the listed properties and, said or unsaid, no others."""
    known = schema.get("properties")
    closed = schema.get("additionalProperties", known is None) is False
    required = set(schema.get("required", ()))
    return keys <= _OBJECT and closed and required <= set(known or ()) and len(known or ()) <= _MAX_PROPERTIES


def _list_rule(rule: str, item: str, min_items: int, max_items: int | None) -> str:
    most = "" if max_items is None else max_items - 1
    empty = "" if min_items else " | OPEN_LIST CLOSE_LIST"
    return f"{rule}: OPEN_LIST {item} (COMMA {item}){{{max(min_items - 1, 0)},{most}}} CLOSE_LIST{empty}\n"


def _literal(text: str) -> str:
    """A Lark literal of a JSON string."""
    return json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False)


def _resolved(reference: Any, root: Any, where: str) -> Any:
    """What a reference within the schema stands for."""
    part = root
    if not isinstance(reference, str) or not re.match("#(/|$)", reference):
        raise ValueError(f"{where}: $ref {reference!r} is not supported, only references within the schema ('#/...')")
    for token in reference.split("/")[1:]:
        token = urllib.parse.unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and token.isdigit() and int(token) < len(part):
            part = part[int(token)]
        elif isinstance(part, dict) and token in part:
            part = part[token]
        else:
            raise ValueError(f"{where}: $ref {reference!r} leads nowhere")
    return part


def _bounded(schema: Any) -> Any:
    """The schema with bounds for numbers that would have as many digits as the policy likes, and known formats only."""
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: part if key in _DATA_KEYWORDS else _bounded(part) for key, part in schema.items()}
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    lower = [made[key] for key in ("minimum", "exclusiveMinimum") if isinstance(made.get(key), int | float)]
    upper = [made[key] for key in ("maximum", "exclusiveMaximum") if isinstance(made.get(key), int | float)]
    kind = made.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "integer" in kinds or ("number" in kinds and (lower or upper)):
        if not lower and max(upper, default=0) > -_MAX_NUMBER:
            made["minimum"] = -_MAX_NUMBER
        if not upper and max(lower, default=0) < _MAX_NUMBER:
            made["maximum"] = _MAX_NUMBER
    return made


def _explanation(llguidance: Any, rules: _Rules, error: str) -> str:
    """Which part of which tool's schema llguidance refused, and why."""
    for where, document in rules.leaves:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(document)
        if message := llguidance.LLMatcher.validate_grammar(grammar):
            return f"{where}: its schema cannot be enforced by a grammar: {_one_line(message)}"
    return f"the tools' schemas are too much for a grammar: {_one_line(error)}"


def _one_line(message: str) -> str:
    """A message of llguidance without the dump of its state and advice on options that are not ours to set."""
    return " ".join(message.partition("<state>")[0].partition(". Enable '")[0].split())[:300]
