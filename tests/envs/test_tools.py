"""Tools: schemas from type hints, prices, faults, asynchronous calls."""

import asyncio
import dataclasses
import functools
import json
import pickle
import threading
import time
from typing import Annotated, Literal

import numpy as np
import orchestra_envs.loop
import pydantic
import pytest
from orchestra_envs import CallContext, Limiter, Price, Task, Tool, ToolArgumentError, ToolCall, ToolResult, tool
from orchestra_envs.calls import run_calls
from orchestra_envs.loop import drive

ANY_OBJECT = {"type": "object"}


def context(index: int) -> CallContext:
    return CallContext(np.random.default_rng(index), Task("Q?"), ())


def run(calls, tools, **kwargs):
    kwargs.setdefault("max_output_chars", 1000)
    return drive(run_calls(calls, {t.name: t for t in tools}, context, **kwargs))


def run_one(function, arguments=None, **fields):
    made = Tool("f", "Does it.", ANY_OBJECT, function, **fields)
    (record,) = run([ToolCall("f", arguments or {})], [made])
    return record


# From functions to tools.


class Place(pydantic.BaseModel):
    title: str
    size: int = 1


def test_the_schema_comes_from_hints_and_docstring():
    @tool(price=Price(per_call_usd=0.01), latency_s=0.5)
    def search(
        query: str,
        schema: Annotated[int, pydantic.Field(ge=1)] = 3,
        *,
        kind: Literal["web", "local"] = "web",
        place: Place | None = None,
        context: CallContext,
    ) -> str:
        """Find pages.

        The best come first.

        Args:
            query: what to look for,
                in words.
            schema (int): how many.

        Returns:
            The pages.
        """
        return f"{query} {schema!r} {kind} {place!r} {context.task.question}"

    spec = search.spec()
    assert spec["function"]["name"] == "search"
    assert spec["function"]["description"] == "Find pages. The best come first."
    parameters = spec["function"]["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["query"] == {"type": "string", "description": "what to look for, in words."}
    assert parameters["properties"]["schema"] == {
        "type": "integer",
        "minimum": 1,
        "default": 3,
        "description": "how many.",
    }
    assert "context" not in parameters["properties"]
    assert "title" in parameters["$defs"]["Place"]["properties"]
    assert spec["price"]["per_call_usd"] == 0.01
    assert spec["latency_s"] == 0.5
    json.dumps(spec)
    calls = [ToolCall("search", {"query": "x", "schema": 2.0, "place": {"title": "T"}})]
    assert run(calls, [search])[0].text == "x 2 web Place(title='T', size=1) Q?"


def test_a_bare_decorator_and_a_call_by_hand():
    @tool
    def double(x: float) -> float:
        """Twice x."""
        return 2 * x

    assert double.name == "double"
    assert double(x=4) == 8


def test_parameters_that_pydantic_reserves_may_be_arguments():
    @tool
    def f(json: int, copy: int = 0, _private: int = 0, model_config: int = 0) -> list[int]:
        """Every name."""
        return [json, copy, _private, model_config]

    (record,) = run([ToolCall("f", {"json": 1, "copy": 2, "_private": 3, "model_config": 4})], [f])
    assert record.text == "[1, 2, 3, 4]"


def test_the_context_is_found_under_any_wrapping():
    class Seen:
        def method(self, context: CallContext) -> str:
            return context.task.question

        def __call__(self, context: "CallContext") -> str:
            return context.task.question

    def plain(prefix: str, context: CallContext) -> str:
        return prefix + context.task.question

    for function in (Seen().method, Seen(), functools.partial(plain, "")):
        assert run_one(function).text == "Q?"


def no_docstring(x: int) -> int:
    return x


def no_hint(x):
    """Doc."""


def stars(*args: int):
    """Doc."""


def double_stars(**kwargs: int):
    """Doc."""


def positional(x: int, /):
    """Doc."""


def unresolved(x: "Nowhere"):  # noqa: F821
    """Doc."""


def strange(x: object.__class__.__subclasses__):
    """Doc."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "description"),
        (no_hint, "'x' needs a type hint"),
        (stars, "'args'"),
        (double_stars, "'kwargs'"),
        (positional, "'x'"),
        (unresolved, "Nowhere"),
        (strange, "strange"),
    ],
)
def test_functions_that_make_no_tool(function, message):
    with pytest.raises(ValueError, match=message):
        tool(function)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, "name"),
        ({"name": ""}, "name"),
        ({"description": " "}, "description"),
        ({"function": 3}, "function"),
        ({"latency_s": -1}, "latency_s"),
        ({"latency_s": float("nan")}, "latency_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"parameters": {"type": "array"}}, "parameters"),
        ({"parameters": {"type": "object", "required": "x"}}, "parameters"),
        ({"parameters": {"type": "object", "properties": {"x": {"$ref": "http://host/x.json"}}}}, "http://host"),
        ({"parameters": {"type": "object", "default": float("nan")}}, "parameters"),
    ],
)
def test_tools_that_cannot_be_made(changes, message):
    fields = {"name": "f", "description": "D.", "parameters": ANY_OBJECT, "function": len} | changes
    with pytest.raises(ValueError, match=message):
        Tool(**fields)


# Prices.


def test_a_price_is_the_sum_of_its_parts():
    per_million = Price(per_input_token_usd=1.25e-6, per_output_token_usd=10e-6)
    assert per_million.cost_usd(input_tokens=1_000_000) == pytest.approx(1.25)
    assert per_million.cost_usd(output_tokens=1_000_000) == pytest.approx(10)
    assert Price(per_call_usd=0.01, per_second_usd=0.002).cost_usd(latency_s=5) == pytest.approx(0.02)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Price)])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", None, True])
def test_a_price_must_be_a_finite_number(field, value):
    with pytest.raises(ValueError, match=field):
        Price(**{field: value})


def test_a_price_per_million_is_not_taken_for_one_per_token():
    with pytest.raises(ValueError, match="1e6"):
        Price(per_output_token_usd=10.0)


def test_what_a_call_costs():
    price = Price(per_call_usd=1.0, per_output_token_usd=0.5, per_second_usd=0.25)
    fields = {"price": price, "latency_s": 4.0}
    assert run_one(lambda: "x", **fields).cost_usd == 2.0
    assert run_one(lambda: "x", **fields).latency_s == 4.0
    assert run_one(lambda: ToolResult("x", output_tokens=2, latency_s=0.0), **fields).cost_usd == 2.0
    assert run_one(lambda: ToolResult("x", cost_usd=0.125, output_tokens=2), **fields).cost_usd == 0.125
    assert run_one(lambda: 1 / 0, **fields).cost_usd == 2.0


# Results.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Zürich 東京 🚲", "Zürich 東京 🚲"),
        ("", ""),
        (3, "3"),
        (0.5, "0.5"),
        (True, "true"),
        (None, "null"),
        ({"city": "Zürich", "n": [1, None]}, '{"city": "Zürich", "n": [1, null]}'),
        (b"ok \xff\xfe end", "ok \ufffd\ufffd end"),  # BR-30
        (np.float32(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        ("x\ud800", "x\ufffd"),
        (ToolResult("t", input_tokens=np.int64(3)), "t"),
    ],
)
def test_what_a_tool_may_return(value, text):
    record = run_one(lambda: value)
    assert (record.status, record.error_type, record.text, record.attempts) == ("ok", "", text, 1)
    json.dumps(record.as_dict(), allow_nan=False).encode()


RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        float("nan"),
        RECURSIVE,
        ToolResult(3),
        ToolResult("x", cost_usd=-1.0),
        ToolResult("x", cost_usd=float("nan")),
        ToolResult("x", latency_s=float("inf")),
        ToolResult("x", output_tokens=None),
        ToolResult("x", input_tokens=-3),
        ToolResult("x", input_tokens=10**400),
    ],
)
def test_what_a_tool_may_not_return(value):
    record = run_one(lambda: value, price=Price(per_call_usd=0.5))
    assert (record.status, record.error_type, record.cost_usd, record.attempts) == ("error", "bad_result", 0.5, 1)
    assert record.text.startswith("Error: f gave no usable result")


def test_br32_long_output_is_cut_and_marked():
    record = run([ToolCall("f", {})], [Tool("f", "D.", ANY_OBJECT, lambda: "🚲" * 10_000)], max_output_chars=64)[0]
    assert record.text == "🚲" * 64 + "\n[9936 characters cut]"
    assert record.truncated_chars == 9936
    record = run([ToolCall("f", {})], [Tool("f", "D.", ANY_OBJECT, lambda: "x" * 64)], max_output_chars=64)[0]
    assert (record.text, record.truncated_chars) == ("x" * 64, 0)


# Faults.


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


FAULTS = [
    ValueError("wrong"),
    SystemExit(3),
    RecursionError("deep"),
    MemoryError(),
    GeneratorExit(),
    StopIteration(),
    StopAsyncIteration(),
    asyncio.CancelledError(),
    TimeoutError("own"),
    BaseException("base"),
    BaseExceptionGroup("several", [SystemExit(1)]),
    Unprintable(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    json.JSONDecodeError("bad", "x\ud800", 0),
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_exceptions_are_records(fault, asynchronous):
    def raises():
        raise fault

    async def raises_later():
        await asyncio.sleep(0)
        raise fault

    record = run_one(raises_later if asynchronous else raises, price=Price(per_call_usd=0.5), latency_s=2.0)
    assert (record.status, record.error_type) == ("error", "tool_exception")
    assert record.text.startswith("Error: f: ")
    assert (record.cost_usd, record.latency_s, record.attempts) == (0.5, 2.0, 1)
    assert run_one(lambda: "still works").text == "still works"


def test_endless_recursion_is_a_record():
    def endless():
        return endless()

    assert "RecursionError" in run_one(endless).text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_is_the_users(asynchronous):
    async def later():
        raise KeyboardInterrupt

    def now():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_one(later if asynchronous else now)
    assert run_one(asyncio.sleep, {"delay": 0}).status == "ok"


def test_error_texts_hold_no_addresses():
    def fail():
        raise ValueError(f"no use for {object()!r}")

    assert run_one(fail).text == "Error: f: ValueError: no use for <object object>"


def test_unknown_tools_and_wrong_arguments_cost_nothing():
    @tool(price=Price(per_call_usd=1.0), latency_s=3.0)
    def lookup(q: str) -> str:
        """Look up."""
        raise AssertionError("must not run")

    records = run(
        [
            ToolCall("nope", {}),
            ToolCall("lookup", {}),
            ToolCall("lookup", {"q": 3}),
            ToolCall("lookup", {"q": "", "z": 1}),
        ],
        [lookup],
    )
    assert [r.error_type for r in records] == ["unknown_tool"] + ["invalid_arguments"] * 3
    assert all((r.cost_usd, r.latency_s, r.attempts) == (0.0, 0.0, 0) for r in records)
    assert "'nope'" in records[0].text
    assert "lookup" in records[0].text
    assert "'q' is a required property" in records[1].text  # BR-05
    assert "q: 3 is not of type 'string'" in records[2].text
    assert "'z'" in records[3].text


def test_a_tool_may_reject_its_arguments():
    def picky():
        raise ToolArgumentError("not on a Sunday")

    record = run_one(picky, price=Price(per_call_usd=1.0))
    assert (record.error_type, record.text, record.cost_usd) == ("invalid_arguments", "Error: f: not on a Sunday", 0.0)


@pytest.mark.parametrize(
    ("schema", "value", "valid"),
    [  # BR-39 and its neighbours; JSON Schema's rules
        ({"type": "array", "items": {"type": "number"}}, [12, 15], True),
        ({"type": "array", "items": {"type": "number"}}, [True, 15], False),
        ({"type": "integer"}, 3.0, True),
        ({"type": "integer"}, 3.5, False),
        ({"type": "integer"}, True, False),
        ({"type": "integer"}, "3", False),
        ({"type": "boolean"}, 1, False),
        ({"type": ["string", "null"]}, None, True),
        ({"enum": ["a", "b"]}, "c", False),
        ({"$ref": "#/$defs/word"}, "word", True),
        ({"$ref": "#/$defs/word"}, "two words", False),
    ],
)
def test_arguments_are_checked_by_json_schema(schema, value, valid):
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"word": {"pattern": "^[a-z]+$"}}}
    f = Tool("f", "D.", parameters, lambda x: x)
    assert (f.argument_error({"x": value}) == "") is valid
    assert run([ToolCall("f", {"x": value})], [f])[0].error_type == ("" if valid else "invalid_arguments")


def test_hinted_types_are_what_the_function_gets():
    @tool
    def kinds(i: int, xs: list[float], place: Place) -> str:
        """Types."""
        return " ".join(type(v).__name__ for v in (i, *xs, place))

    arguments = {"i": 3.0, "xs": [1, 2.5], "place": {"title": "t"}}
    assert run([ToolCall("kinds", arguments)], [kinds])[0].text == "int float float Place"


def test_conversions_that_only_pydantic_checks_are_argument_errors():
    def even(value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value

    @tool
    def half(x: Annotated[int, pydantic.AfterValidator(even)]) -> int:
        """Half."""
        return x // 2

    record = run([ToolCall("half", {"x": 3})], [half])[0]
    assert record.error_type == "invalid_arguments"
    assert "x: Value error, must be even" in record.text


def test_a_tool_cannot_change_the_record():
    def change(**arguments):
        arguments["x"]["y"] = 2
        return "done"

    call = ToolCall("f", {"x": {"y": 1}})
    (record,) = run([call], [Tool("f", "D.", ANY_OBJECT, change)])
    assert record.arguments == {"x": {"y": 1}}


# Asynchronous tools.


def test_a_hundred_slow_calls_take_the_time_of_one():
    async def slow(i):
        await asyncio.sleep(0.2)
        return i

    f = Tool("f", "D.", ANY_OBJECT, slow)
    start = time.perf_counter()
    records = run([ToolCall("f", {"i": i}) for i in range(100)], [f])
    assert time.perf_counter() - start < 1.0
    assert [record.text for record in records] == [str(i) for i in range(100)]


def test_a_call_that_never_returns_times_out():
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def stubborn():
        while True:
            try:
                await asyncio.sleep(0.3)
                return "late"
            except asyncio.CancelledError:
                pass

    start = time.perf_counter()
    for function in (hang, stubborn):
        record = run_one(function, timeout_s=0.1, price=Price(per_call_usd=0.5), latency_s=2.0)
        assert (record.error_type, record.latency_s, record.cost_usd) == ("timeout", 0.1, 0.5)
    assert cancelled.wait(1.0), "BR-33: no task is left pending"
    assert time.perf_counter() - start < 2.0


def test_it_works_inside_a_running_loop_and_in_threads():
    async def slow():
        await asyncio.sleep(0.1)
        return "done"

    async def inside():
        return run_one(slow)

    assert asyncio.run(inside()).text == "done"
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(run_one(slow).text)) for _ in range(8)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["done"] * 8
    assert time.perf_counter() - start < 0.7


def test_inline_functions_stay_in_the_callers_thread(monkeypatch):
    used = []
    run_on_loop = orchestra_envs.loop.run_on_loop
    monkeypatch.setattr(orchestra_envs.loop, "run_on_loop", lambda c: used.append(c) or run_on_loop(c))
    assert run_one(lambda: threading.current_thread().name, inline=True).text == threading.current_thread().name
    assert used == []
    assert run_one(asyncio.sleep, {"delay": 0}).text == "null"
    assert len(used) == 1


# Budget.


def test_calls_beyond_the_budget_are_refused():
    async def later():
        return "x"

    for function in (lambda: "x", later):
        f = Tool("f", "D.", ANY_OBJECT, function, Price(per_call_usd=0.4))
        records = run([ToolCall("f", {})] * 4, [f], budget_usd=1.0)
        assert [r.error_type for r in records] == ["", "", "", "budget"]
        assert records[3].cost_usd == 0.0
        assert run([ToolCall("f", {})], [f], budget_usd=0.0)[0].error_type == "budget"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"$ref": "https://example.org/a.json"}}}, "only references within it are read"),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}}, "refers to '#/\\$defs/b', which is not in it"),
        ({"properties": {"a": {"const": {"$ref": "https://example.org"}}}}, ""),
        ({"properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": {"b/c": {"type": "integer"}}}, ""),
    ],
    ids=["foreign", "dangling", "data", "escaped"],
)
def test_references_of_a_schema(schema, message):
    parameters = {"type": "object", **schema}
    if message:
        with pytest.raises(ValueError, match=message):
            Tool("f", "Does it.", parameters, print)
    else:
        Tool("f", "Does it.", parameters, print)


def test_a_misspelt_argument_of_the_decorator():
    with pytest.raises(ValueError, match="unknown argument 'prices' of @tool; did you mean price"):
        tool(prices=Price())(echo)


def test_a_generator_is_no_tool():
    def several():
        """Yields."""
        yield "a"

    with pytest.raises(ValueError, match="return the whole text instead of yielding"):
        tool(several)


# Pickle.


@tool(price=Price(per_call_usd=0.01), limiter=Limiter(max_concurrency=2))
def doubled(n: int) -> int:
    """Twice the number."""
    return 2 * n


def echo(n: int) -> int:
    return n


@pytest.mark.parametrize(
    "made",
    [doubled, dataclasses.replace(doubled, name="other"), Tool("echo", "Says it.", ANY_OBJECT, echo, latency_s=2.0)],
    ids=["decorated", "alias", "plain"],
)
def test_tools_can_be_pickled(made):
    again = pickle.loads(pickle.dumps(made))
    assert (again.spec(), again.timeout_s) == (made.spec(), made.timeout_s)
    assert again.function is made.function


def test_tools_of_local_functions_say_why_they_cannot():
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(Tool("f", "Does it.", ANY_OBJECT, lambda: 1))
