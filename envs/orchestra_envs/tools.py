"""Tools: what a policy can call, what a call costs, and how a call is run.

A `Tool` is a name, a description, a JSON schema, a Python function (plain or async), a price and a latency. The
`tool` decorator makes one from a function with type hints and a docstring. How calls are run stands in `calls`.

Costs are US dollars, latencies seconds. A tool's clock is "declared" (the latency that the result states, or else the
tool's own `latency_s`; no wall clock enters a record, so the same seed and the same actions give the same records) or
"measured" (the seconds that the call took).
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import math
import re
import textwrap
import typing
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

import jsonschema
import jsonschema.exceptions
import numpy as np
import pydantic

from orchestra_envs.limits import Limiter, Retry

if TYPE_CHECKING:
    from orchestra_envs.env import Task

Source = Literal["live", "simulated", "recorded"]
SOURCES: tuple[str, ...] = typing.get_args(Source)
CLOCKS = ("declared", "measured")
DEFAULT_TIMEOUT_S = 60.0
MAX_USD_PER_TOKEN = 1.0

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys, no spaces and unescaped Unicode; ValueError for NaN and infinity."""
    return _encode_json(value)


def is_number(value: Any) -> bool:
    """Whether it is a finite number (no bool), of Python or NumPy."""
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


@dataclass(frozen=True, slots=True)
class Price:
    """What a call costs in US dollars: the sum of its four parts.

    Raises:
        ValueError: a part is negative or not finite, or a token costs more than a dollar (a slip of units).
    """

    per_call_usd: float = 0.0
    per_input_token_usd: float = 0.0
    per_output_token_usd: float = 0.0
    per_second_usd: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (is_number(value) and value >= 0):
                raise ValueError(f"Price.{name} must be a finite number of at least 0, not {value!r}")
            object.__setattr__(self, name, float(value))  # NumPy's numbers are no JSON
        for name in ("per_input_token_usd", "per_output_token_usd"):
            if getattr(self, name) > MAX_USD_PER_TOKEN:
                raise ValueError(
                    f"Price.{name} is {getattr(self, name)!r}, more than ${MAX_USD_PER_TOKEN:g} a token; "
                    "a price per million tokens must be divided by 1e6"
                )

    def cost_usd(self, *, input_tokens: int = 0, output_tokens: int = 0, latency_s: float = 0.0) -> float:
        """The price of one call with these numbers of tokens that took `latency_s` seconds."""
        return (
            self.per_call_usd
            + self.per_input_token_usd * input_tokens
            + self.per_output_token_usd * output_tokens
            + self.per_second_usd * latency_s
        )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool function may return to state its own accounts.

    `cost_usd=None` means: by the tool's price. `latency_s=None` means: by the tool's clock. `cost_known=False` says
    that the cost is an estimate (an endpoint that did not tell the tokens it charged for).
    """

    text: str
    cost_usd: float | None = None
    latency_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_known: bool = True


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call after it was run (or refused); `text` is what the policy reads.

    `status` is "ok" or "error"; `error_type` is "" or one of unknown_tool, invalid_arguments, tool_exception,
    unavailable, timeout, bad_result, budget. `attempts` is 0 for a call that never started. `queue_s` are the seconds
    it waited for its tool's limiter (not in `latency_s`; 0 by a declared clock). `backend` says what is behind the
    tool's name; the policy never reads it. `raw_sha256` is the hash of an output that was no UTF-8, whose bad bytes
    stand as U+FFFD in `text`; "" otherwise. `state_hash` is of the world before the call, for tools that read or change
    one (`ToolEnv.state_hash`); None otherwise.
    """

    tool: str
    arguments: dict[str, Any]
    status: Literal["ok", "error"]
    error_type: str
    text: str
    cost_usd: float
    latency_s: float
    attempts: int
    input_tokens: int
    output_tokens: int
    truncated_chars: int
    source: Source
    cost_known: bool = True
    queue_s: float = 0.0
    backend: str = ""
    raw_sha256: str = ""
    state_hash: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values (`dataclasses.asdict` would copy the arguments, slowly)."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a tool may know of the episode; injected into an argument annotated `CallContext`.

    `rng` depends on the episode's seed, the replica and the ordinal of the call alone. `history` holds the calls
    of earlier turns (those of the same turn run at the same time). `messages` is the conversation so far without
    hidden reasoning: {"role": "user", "assistant" or "tool", "content": text}, oldest first. `price` is the tool's in
    this episode, for tools that state their own costs.
    """

    rng: np.random.Generator
    task: "Task"
    history: tuple[CallRecord, ...]
    messages: tuple[Mapping[str, str], ...] = ()
    price: Price = Price()


@dataclass(frozen=True)
class Tool:
    """A tool that a policy can call.

    Args:
        name: letters, digits, `_`, `-` and `.`, at most 64.
        description: what it does, in words for the policy.
        parameters: JSON schema (draft 2020-12) of the arguments, of type "object".
        function: called with the arguments as keywords; plain or async. Async calls of a turn run concurrently,
            plain ones one after the other. It returns a `ToolResult`, a string, bytes (UTF-8) or any JSON value.
            It may raise `ToolArgumentError` or `ToolUnavailableError`; whatever else it raises is a fault, too.
        price: dollars; a call that fails costs its `per_call_usd` and `per_second_usd`, one whose backend was
            unavailable what the error says.
        latency_s: declared seconds of a call; what the policy is told to expect.
        timeout_s: wall-clock limit of a call, its retries and their pauses included, the wait for the limiter not.
            A plain function cannot be interrupted: it is left behind, and after `calls.MAX_HUNG_CALLS` of those the
            tool is refused until one ends.
        clock: whether records carry declared or measured seconds. Environments with measured tools must be registered
            with `nondeterministic=True`.
        retry: when to try a failed call again; None for never.
        limiter: bounds shared by all tools that hold it (aliases by `dataclasses.replace` do).
        max_output_chars: longer outputs are cut there, if the environment does not cut sooner.
        inline: for plain functions that never wait (simulations): run in the caller's thread, without a time limit.
        source: written into the records.
        backend: identity of what is behind the name, written into the records; the policy never reads it.

    Raises:
        ValueError: a field is not usable; the message names the tool and the field.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    price: Price = Price()
    latency_s: float = 0.0
    _: KW_ONLY
    timeout_s: float = DEFAULT_TIMEOUT_S
    clock: Literal["declared", "measured"] = "declared"
    retry: Retry | None = None
    limiter: Limiter | None = None
    max_output_chars: int | None = None
    inline: bool = False
    source: Source = "simulated"
    backend: str = ""
    is_async: bool = field(init=False, repr=False, compare=False)
    _context_argument: str | None = field(init=False, repr=False, compare=False)
    _validator: jsonschema.Draft202012Validator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"tool name {self.name!r} must be 1 to 64 letters, digits, '_', '-' or '.'")
        if problem := self._problem():
            raise ValueError(f"tool {self.name!r}: {problem}")
        object.__setattr__(self, "latency_s", float(self.latency_s))
        object.__setattr__(self, "is_async", _is_async(self.function))
        object.__setattr__(self, "_context_argument", _context_argument(self.function))
        object.__setattr__(self, "_validator", _validator(self.name, self.parameters))

    def _problem(self) -> str:
        """What is wrong with the fields, "" if nothing is."""
        if not isinstance(self.description, str) or not self.description.strip():
            return "needs a description: the policy chooses by it"
        if not callable(self.function):
            return f"function must be callable, not {self.function!r}"
        if not isinstance(self.price, Price):
            return f"price must be a Price, not {self.price!r}"
        if not (is_number(self.latency_s) and self.latency_s >= 0):
            return f"latency_s must be a finite number >= 0, not {self.latency_s!r}"
        if not (is_number(self.timeout_s) and self.timeout_s > 0):
            return f"timeout_s must be a finite number > 0, not {self.timeout_s!r}"
        for name, allowed in (("clock", CLOCKS), ("source", SOURCES)):
            if getattr(self, name) not in allowed:
                return f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
        for name, kind in (("retry", Retry), ("limiter", Limiter)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                return f"{name} must be a {kind.__name__} or None, not {value!r}"
        cap = self.max_output_chars
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
            return f"max_output_chars must be a whole number of at least 1 or None, not {cap!r}"
        if self.inline and (_is_async(self.function) or self.retry or self.limiter):
            return "inline is for plain functions that never wait: without async, retry and limiter"
        if not isinstance(self.backend, str):
            return f"backend must be a string, not {self.backend!r}"
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its fields; the function of `@tool` by the name of the decorated one (see `_home`)."""
        names = [f.name for f in dataclasses.fields(self) if f.init and f.name != "function"]
        home = _home(self.function)
        function = _Home(*home) if home else self.function
        return _unpickled, (function, {name: getattr(self, name) for name in names})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The underlying function, so that a decorated one can still be called by hand."""
        return self.function(*args, **kwargs)

    def spec(self) -> dict[str, Any]:
        """The tool as JSON: OpenAI's function form plus price (US dollars) and latency (seconds)."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
            "price": {name: getattr(self.price, name) for name in Price.__slots__},
            "latency_s": self.latency_s,
        }

    @functools.cached_property
    def spec_json(self) -> str:
        """`spec()` as canonical JSON."""
        return canonical_json(self.spec())

    def argument_error(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with `arguments` under the schema, in one sentence; "" if nothing is.

        JSON Schema's own rules: 3.0 is an integer, true is no number, "3" is no number.
        """
        if self._validator.is_valid(arguments):
            return ""
        error = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
        where = error.json_path.removeprefix("$").removeprefix(".")
        return f"{where}: {error.message}" if where else error.message


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    price: Price = ...,
    latency_s: float = 0.0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    clock: Literal["declared", "measured"] = "declared",
    retry: Retry | None = None,
    limiter: Limiter | None = None,
    max_output_chars: int | None = None,
    inline: bool = False,
    source: Source = "simulated",
    backend: str = "",
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **fields: Any) -> Tool | Callable[..., Tool]:
    """Make a `Tool` of a function with type hints and a docstring; `@tool` or `@tool(price=..., latency_s=...)`.

    The schema comes from the type hints (whatever pydantic understands; `Annotated[str, Field(description=...)]`
    too) and the "Args:" section of the docstring, the description from the text before that section. Arguments
    arrive converted to the annotated types. An argument annotated `CallContext` is filled in by the environment
    and does not appear in the schema.

    Raises:
        ValueError: no docstring, an argument without a type hint, `*args`, `**kwargs` or positional-only ones.
    """
    if function is None:
        return lambda decorated: _tool_of(decorated, **fields)
    return _tool_of(function, **fields)


class ToolArgumentError(ValueError):
    """Raised by a tool function whose arguments fit the schema and still make no sense; nothing is charged."""


def _validator(name: str, schema: Any) -> jsonschema.Draft202012Validator:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ValueError(f'tool {name!r}: parameters must be a JSON schema with "type": "object"')
    try:
        return _compiled(canonical_json(schema))
    except (jsonschema.SchemaError, TypeError, ValueError) as error:
        message = error.message if isinstance(error, jsonschema.SchemaError) else str(error)
        raise ValueError(f"tool {name!r}: parameters is not a usable JSON schema: {message}") from error


@functools.lru_cache(maxsize=1024)  # markets make the same tools again for every episode, at other prices
def _compiled(schema_json: str) -> jsonschema.Draft202012Validator:
    schema = json.loads(schema_json)
    jsonschema.Draft202012Validator.check_schema(schema)
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"it refers to {reference!r}, and only references within it are read")
        if not _resolves(schema, reference):
            raise ValueError(f"it refers to {reference!r}, which is not in it")
    return jsonschema.Draft202012Validator(schema)


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a decorated function can be found again."""

    module: str
    qualname: str

    def find(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found


_DATA_KEYWORDS = ("const", "enum", "default", "examples")


def _references(schema: Any) -> Iterator[str]:
    """Every `$ref` of a schema, but not what looks like one in its constants, defaults and examples."""
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, part in parts:
        if key == "$ref" and isinstance(part, str):
            yield part
        elif key not in _DATA_KEYWORDS:
            yield from _references(part)


def _resolves(schema: Any, reference: str) -> bool:
    """Whether a reference within the schema, by JSON pointer, leads anywhere; one by anchor is taken on trust."""
    if not reference.startswith("#/"):
        return True
    part = schema
    for token in reference[2:].split("/"):
        token = urllib.parse.unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and token.isdigit() and int(token) < len(part):
            part = part[int(token)]
        elif isinstance(part, dict) and token in part:
            part = part[token]
        else:
            return False
    return True


def _home(function: Any) -> tuple[str, str] | None:
    """Module and name under which the `Tool` of a decorated function stands; None if it does not.

    The wrapper that `tool` makes has the decorated function's name, under which pickle would find the `Tool` instead.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module is None or "<" in qualname:
        return None
    try:
        found = _Home(module, qualname).find()
    except (ImportError, AttributeError):
        return None
    return (module, qualname) if isinstance(found, Tool) and found.function is function else None


def _unpickled(function: Any, fields: dict[str, Any]) -> Tool:
    return Tool(function=function.find().function if isinstance(function, _Home) else function, **fields)


def _is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine; partials, decorated functions and callable objects are looked into."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    routine = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(routine)


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):  # the module defers its annotations
        return annotation.rpartition(".")[2] == CallContext.__name__
    return annotation is CallContext


def _context_argument(function: Callable[..., Any]) -> str | None:
    """The name of the argument annotated `CallContext`; by annotations alone, `inspect.signature` is slow."""
    while isinstance(function, functools.partial):
        function = function.func
    routine = function if inspect.isroutine(function) else type(function).__call__
    annotations = getattr(routine, "__annotations__", {})
    return next((name for name, annotation in annotations.items() if _is_context(annotation)), None)


def _tool_of(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None, **fields: Any
) -> Tool:
    if name is None:
        name = str(getattr(function, "__name__", type(function).__name__))
    known = {f.name for f in dataclasses.fields(Tool) if f.init} - {"parameters", "function"}
    for field_name in fields:
        if field_name not in known:
            near = difflib.get_close_matches(field_name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"tool {name!r}: unknown argument {field_name!r} of @tool; {hint}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"tool {name!r}: a generator gives no result; return the whole text instead of yielding")
    summary, argument_docs = _read_docstring(inspect.getdoc(function) or "")
    arguments_model, names = _arguments_model(name, function, argument_docs)

    @functools.wraps(function)  # keeps the annotations, by which the context argument is found
    def call(**arguments: Any) -> Any:
        context = {key: value for key, value in arguments.items() if isinstance(value, CallContext)}
        try:
            given = arguments_model.model_validate({k: v for k, v in arguments.items() if k not in context})
        except pydantic.ValidationError as error:
            raise ToolArgumentError(_describe(error)) from error
        return function(**{names[key]: getattr(given, key) for key in given.model_fields_set}, **context)

    parameters = _without_titles(arguments_model.model_json_schema())
    return Tool(name, description or summary, parameters, call, **fields)


def _arguments_model(
    name: str, function: Callable[..., Any], argument_docs: Mapping[str, str]
) -> tuple[type[pydantic.BaseModel], dict[str, str]]:
    """A pydantic model of the arguments, and the argument each of its fields stands for.

    Fields have names of their own and the arguments' names as aliases, since pydantic reserves some names.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"tool {name!r}: a type hint cannot be resolved: {error}") from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for argument, parameter in inspect.signature(function).parameters.items():
        if _is_context(parameter.annotation):
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name!r}: argument {argument!r} must be a plain keyword argument")
        if argument not in hints:
            raise ValueError(f"tool {name!r}: argument {argument!r} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        field_info = pydantic.Field(default, alias=argument, description=argument_docs.get(argument))
        key = f"argument_{len(fields)}"
        fields[key] = (hints[argument], field_info)
        names[key] = argument
    config = pydantic.ConfigDict(extra="forbid")
    try:
        return pydantic.create_model(name, __config__=config, **fields), names
    except pydantic.errors.PydanticUserError as error:
        raise ValueError(f"tool {name!r}: {error.message}") from error


def _describe(error: pydantic.ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` without pydantic's generated titles: they only cost tokens. Properties named "title" stay."""
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs"):
            cleaned[key] = {name: _without_titles(part) for name, part in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            cleaned[key] = value
        elif isinstance(value, dict):
            cleaned[key] = _without_titles(value)
        elif isinstance(value, list):
            cleaned[key] = [_without_titles(item) if isinstance(item, dict) else item for item in value]
        else:
            cleaned[key] = value
    return cleaned


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what the "Args:" section says of each argument."""
    summary, *_ = re.split(r"^(?:Args|Returns|Raises|Yields|Examples?):\s*$", docstring, maxsplit=1, flags=re.M)
    section = re.search(r"^Args:\s*$\n((?:[ \t]+.*(?:\n|$)|\n)*)", docstring, flags=re.M)
    entries = re.split(r"^(?=\w)", textwrap.dedent(section[1]), flags=re.M) if section else []
    argument_docs = {}
    for entry in entries:
        if found := re.match(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)", entry, flags=re.S):
            argument_docs[found[1]] = " ".join(found[2].split())
    return " ".join(summary.split()), argument_docs
