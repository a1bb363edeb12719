"""Tools: what a policy can call, what a call costs, and how a call is run.

A `Tool` is a name, a description, a JSON schema, a Python function (plain or async), a price and a latency. The
`tool` decorator makes one from a function with type hints and a docstring. `run_calls` runs the calls of one turn
and turns every fault (unknown tool, wrong arguments, exception, time-out, unusable result) into a `CallRecord`
that the policy can read; nothing but `KeyboardInterrupt` gets out of it.

Costs are US dollars, latencies seconds of a declared clock: the one the result states, or else the tool's own
`latency_s`. No wall clock enters a record, so the same seed and the same actions give the same records.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
import os
import re
import textwrap
import threading
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import jsonschema
import jsonschema.exceptions
import numpy as np
import pydantic

from orchestra_envs.parse import ToolCall, replace_surrogates

if TYPE_CHECKING:
    from orchestra_envs.env import Task

DEFAULT_TIMEOUT_S = 60.0
MAX_USD_PER_TOKEN = 1.0

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_T = TypeVar("_T")


_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys, no spaces and unescaped Unicode; ValueError for NaN and infinity."""
    return _encode_json(value)


def _is_number(value: Any) -> bool:
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
            if not (_is_number(value) and value >= 0):
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

    `cost_usd=None` means: by the tool's price. `latency_s=None` means: the tool's declared latency.
    """

    text: str
    cost_usd: float | None = None
    latency_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call after it was run (or refused); `text` is what the policy reads.

    `status` is "ok" or "error"; `error_type` is "" or one of unknown_tool, invalid_arguments, tool_exception,
    timeout, bad_result, budget. `attempts` is 0 for a call that never started.
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
    source: Literal["live", "simulated", "recorded"]

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values (`dataclasses.asdict` would copy the arguments, slowly)."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a tool may know of the episode; injected into an argument annotated `CallContext`.

    `rng` depends on the episode's seed, the replica and the ordinal of the call alone. `history` holds the calls
    of earlier turns (those of the same turn run at the same time).
    """

    rng: np.random.Generator
    task: "Task"
    history: tuple[CallRecord, ...]


@dataclass(frozen=True)
class Tool:
    """A tool that a policy can call.

    Args:
        name: letters, digits, `_`, `-` and `.`, at most 64.
        description: what it does, in words for the policy.
        parameters: JSON schema (draft 2020-12) of the arguments, of type "object".
        function: called with the arguments as keywords; plain or async. Async calls of a turn run concurrently,
            plain ones one after the other. It returns a `ToolResult`, a string, bytes (UTF-8) or any JSON value.
        price: dollars; a call that fails costs its `per_call_usd` and `per_second_usd`.
        latency_s: declared seconds of a call.
        timeout_s: wall-clock limit of an async call (a plain function cannot be interrupted).
        source: written into the records.

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
    source: Literal["live", "simulated", "recorded"] = "simulated"
    _context_argument: str | None = field(init=False, repr=False, compare=False)
    _validator: jsonschema.Draft202012Validator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"tool name {self.name!r} must be 1 to 64 letters, digits, '_', '-' or '.'")
        if not isinstance(self.description, str) or not self.description.strip():
            raise ValueError(f"tool {self.name!r} needs a description: the policy chooses by it")
        if not callable(self.function):
            raise ValueError(f"tool {self.name!r}: function must be callable, not {self.function!r}")
        if not (_is_number(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"tool {self.name!r}: latency_s must be a finite number >= 0, not {self.latency_s!r}")
        if not (_is_number(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"tool {self.name!r}: timeout_s must be a finite number > 0, not {self.timeout_s!r}")
        object.__setattr__(self, "latency_s", float(self.latency_s))
        object.__setattr__(self, "_context_argument", _context_argument(self.function))
        object.__setattr__(self, "_validator", _validator(self.name, self.parameters))

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
    source: Literal["live", "simulated", "recorded"] = "simulated",
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


def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    make_context: Callable[[int], CallContext],
    *,
    max_output_chars: int,
    budget_usd: float | None = None,
) -> list[CallRecord]:
    """Run the calls of one turn; one record a call, in the order of the calls. No fault of a tool gets out.

    Plain functions run here one after the other, async ones all at once on a shared background event loop, which
    is not touched if there are none.

    Args:
        calls: what the policy asked for.
        tools: by name.
        make_context: the context of the i-th of these calls; used only for tools that want one.
        max_output_chars: longer texts are cut there and marked.
        budget_usd: a call that would start when this turn has spent so much is refused; async calls that are
            under way count with their price per call. None for no limit.
    """
    records: dict[int, CallRecord] = {}
    under_way: dict[int, tuple[Awaitable[Any], float]] = {}
    spent_usd = 0.0
    for index, call in enumerate(calls):
        tool = tools.get(call.name)
        if budget_usd is not None and spent_usd >= budget_usd:
            outcome: Any = _Fault("budget", "the budget is spent; the call was refused", started=False)
        elif tool is None:
            known = ", ".join(tools) or "none"
            outcome = _Fault("unknown_tool", f"there is no tool {call.name!r}; tools: {known}", started=False)
        else:
            outcome = _start(call, tool, make_context, index)
            if inspect.isawaitable(outcome):
                under_way[index] = outcome, tool.timeout_s
                spent_usd += tool.price.per_call_usd
                continue
        records[index] = _record(call, tool, outcome, max_output_chars)
        spent_usd += records[index].cost_usd
    if under_way:
        outcomes = _on_background_loop(_await_all(under_way.values()))
        for index, outcome in zip(under_way, outcomes):
            if isinstance(outcome, KeyboardInterrupt):
                raise outcome
            call = calls[index]
            records[index] = _record(call, tools[call.name], outcome, max_output_chars)
    return [records[index] for index in range(len(calls))]


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a call has no result. A `started` one is charged, with `latency_s` or else the declared latency."""

    error_type: str
    message: str
    started: bool = True
    latency_s: float | None = None


def _start(call: ToolCall, tool: Tool, make_context: Callable[[int], CallContext], index: int) -> Any:
    """Check the arguments and call the function: what it returned (an awaitable, if async) or raised, or a `_Fault`."""
    try:
        if message := tool.argument_error(call.arguments):
            return _Fault("invalid_arguments", f"{call.name}: {message}", started=False)
        arguments = _own_copy(call.arguments)
        if tool._context_argument is not None:
            arguments[tool._context_argument] = make_context(index)
        return tool.function(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error


def _fault_of(name: str, error: BaseException) -> _Fault:
    try:
        message = _ADDRESS.sub("", str(error))
    except Exception:  # an exception whose __str__ raises
        message = ""
    if isinstance(error, ToolArgumentError):
        return _Fault("invalid_arguments", f"{name}: {message}", started=False)
    kind = type(error).__name__
    return _Fault("tool_exception", f"{name}: {kind}: {message}" if message else f"{name}: {kind}")


def _record(call: ToolCall, tool: Tool | None, outcome: Any, max_output_chars: int) -> CallRecord:
    """The account of a call from what came of it: its function's result, an exception, or a `_Fault`."""
    fault = outcome if isinstance(outcome, _Fault) else None
    if isinstance(outcome, BaseException):
        fault = _fault_of(call.name, outcome)
    elif fault is None:
        try:
            result = _as_result(outcome)
        except Exception as error:  # the value may be anything
            fault = _Fault("bad_result", f"{call.name} gave no usable result: {error}")
    if fault is not None:
        text = f"Error: {fault.message}"
        result = ToolResult(text, None, fault.latency_s) if fault.started else ToolResult(text, 0.0, 0.0)
    cost_usd, latency_s = result.cost_usd, result.latency_s
    if latency_s is None:
        assert tool is not None  # without a tool no call starts
        latency_s = tool.latency_s
    if cost_usd is None:
        assert tool is not None
        cost_usd = tool.price.cost_usd(
            input_tokens=result.input_tokens, output_tokens=result.output_tokens, latency_s=latency_s
        )
    text, truncated_chars = cap_text(replace_surrogates(result.text), max_output_chars)
    return CallRecord(
        tool=call.name,
        arguments=call.arguments,
        status="error" if fault else "ok",
        error_type=fault.error_type if fault else "",
        text=text,
        cost_usd=float(cost_usd),
        latency_s=float(latency_s),
        attempts=0 if fault and not fault.started else 1,
        input_tokens=int(result.input_tokens),
        output_tokens=int(result.output_tokens),
        truncated_chars=truncated_chars,
        source=tool.source if tool else "simulated",
    )


def _as_result(value: Any) -> ToolResult:
    """A function's return value as a `ToolResult`; raises if it is not usable."""
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, bytes):
        return ToolResult(value.decode("utf-8", errors="replace"))
    if not isinstance(value, ToolResult):
        return ToolResult(json.dumps(value, ensure_ascii=False, allow_nan=False, default=_numpy_value))
    if not isinstance(value.text, str):
        raise TypeError(f"text must be a string, not {type(value.text).__name__}")
    for name in ("cost_usd", "latency_s", "input_tokens", "output_tokens"):
        amount = getattr(value, name)
        may_be_none = name in ("cost_usd", "latency_s")
        if not (amount is None and may_be_none) and not (_is_number(amount) and amount >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, not {amount!r}")
    return value


def _numpy_value(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def cap_text(text: str, max_chars: int) -> tuple[str, int]:
    """The first `max_chars` characters with a mark that says how many were cut, and that number."""
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text, 0
    return f"{text[:max_chars]}\n[{num_cut} characters cut]", num_cut


def _own_copy(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy that a tool may change without changing the record."""
    if any(isinstance(value, dict | list) for value in arguments.values()):
        return copy.deepcopy(arguments)
    return dict(arguments)


async def _await_all(limited: Iterable[tuple[Awaitable[Any], float]]) -> list[Any]:
    return await asyncio.gather(*(_await_one(awaitable, timeout_s) for awaitable, timeout_s in limited))


async def _await_one(awaitable: Awaitable[Any], timeout_s: float) -> Any:
    """The result, the exception or a `_Fault`. A tool that ignores its cancellation is left behind, not waited for."""
    task = asyncio.ensure_future(_guarded(awaitable))
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()
        return _Fault("timeout", f"no result within {timeout_s:g} s", latency_s=timeout_s)
    return task.result()


async def _guarded(awaitable: Awaitable[Any]) -> Any:
    # Every exception is caught here: SystemExit out of a task would stop the loop that all tools share.
    try:
        return await awaitable
    except BaseException as error:
        return error


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _on_background_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` on the process's tool loop (so it works inside notebooks and other loops) and wait."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="orchestra-tools", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop)
    try:
        return future.result()
    except BaseException:  # interrupted while waiting: leave no task behind
        future.cancel()
        raise


def _forget_loop() -> None:
    """In a forked child: the loop's thread stayed with the parent."""
    global _loop, _loop_lock
    _loop, _loop_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)


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
    if remote := re.search(r'"\$ref":"(?!#)([^"]*)"', schema_json):
        raise ValueError(f"it refers to {remote[1]!r}, and only references within it are read")
    return jsonschema.Draft202012Validator(schema)


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
