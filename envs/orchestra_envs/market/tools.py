"""The market's tools: a calculator and a search engine that really work, and the simulated experts.

Every argument is optional. A tool without arguments works on the question of the task, as in ToolOrchestra, where an
expert is always handed the whole problem; `{"name": "search", "arguments": {}}` is a complete call. What a tool
returns ends with the value that answers the question, if it has it.

Prices: the experts' are the published ones (see `experts`). Calculator and search are local, so their prices and
latencies are our choice: $0 and 0.05 s; $0.0005 and 0.3 s (the paper's web search costs $0.01).
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from orchestra_envs.market import corpus
from orchestra_envs.market.experts import EXPERTS, Expert, ask
from orchestra_envs.tools import CallContext, CallRecord, Price, Tool, ToolArgumentError, ToolResult

TOOL_NAMES = ("calculator", "search", *EXPERTS)

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_EXPRESSION_CHARS = 200
_MAX_MAGNITUDE = 10**15
_ARITHMETIC_RUN = re.compile(r"[\d(+-][\d\s()+\-*/%.]*")
_HAS_OPERATION = re.compile(r"[\d)]\s*[-+*/%]+\s*[-+(\d.]")
_TYPOGRAPHY = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


def calculate(text: str) -> str:
    """Evaluate the one arithmetic expression in `text` exactly ("What is 37 * 14 - 96?" gives "422").

    Understands + - * / // % and parentheses over integers and decimals. Fractions are rounded to ten digits.

    Raises ValueError if there is no expression or more than one, or if it is malformed, divides by zero or is too
    long or too large.
    """
    expression = find_expression(text)
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression is longer than {_MAX_EXPRESSION_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"cannot read {expression!r} as arithmetic") from None
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def find_expression(text: str) -> str:
    """The arithmetic expression in a sentence: a run of numbers, operators and parentheses with an operation in it.

    Raises ValueError unless there is exactly one.
    """
    runs = (run.strip(" .\t\n") for run in _ARITHMETIC_RUN.findall(text.translate(_TYPOGRAPHY)))
    found = [run for run in runs if _HAS_OPERATION.search(run)]
    if len(found) != 1:
        raise ValueError("no arithmetic expression" if not found else "more than one arithmetic expression")
    return found[0]


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _evaluate(operand) * (-1 if isinstance(node.op, ast.USub) else 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = Fraction(_OPERATIONS[type(op)](_evaluate(left), _evaluate(right)))
        case _:
            raise ValueError("only + - * / // % and parentheses over numbers are understood")
    if abs(value) > _MAX_MAGNITUDE:
        raise ValueError("the numbers are too large")
    return value


def _is_search(record: CallRecord) -> bool:
    return (record.backend or record.tool) == "search"  # it may go by another name in an episode


def passages_read(history: tuple[CallRecord, ...]) -> tuple[str, ...]:
    """The corpus passages that searches of an episode have returned so far, in that order."""
    found = (record.text for record in history if _is_search(record) and record.status == "ok")
    return tuple(line for text in found for line in text.split("\n"))


def _run_calculator(context: CallContext, expression: str = "") -> str:
    try:
        return calculate(expression or context.task.question)
    except ValueError as error:
        raise ToolArgumentError(str(error)) from None


def _run_search(context: CallContext, query: str = "", top_k: int = 1) -> str:
    seen = frozenset(passages_read(context.history))
    found = corpus.retrieve(query or context.task.question, top_k, seen)
    if not found:
        raise ValueError("nothing found")
    return "\n".join(found)


@cache
def calculator_tool() -> Tool:
    """`calculate` as a tool: free, 0.05 s."""
    expression = {"type": "string", "description": "Arithmetic to evaluate; the question if left out."}
    return Tool(
        name="calculator",
        description="Evaluates the arithmetic expression in the question exactly.",
        parameters=_schema(expression=expression),
        function=_run_calculator,
        latency_s=0.05,
        inline=True,
    )


@cache
def search_tool() -> Tool:
    """BM25 search of the corpus as a tool: $0.0005, 0.3 s. Passages read before in the episode are not repeated."""
    query = {"type": "string", "description": "What to look for; the question if left out."}
    top_k = {"type": "integer", "minimum": 1, "maximum": 5, "description": "Passages to return, 1 if left out."}
    return Tool(
        name="search",
        description="Finds the best passage about the question in the library that was not read before.",
        parameters=_schema(query=query, top_k=top_k),
        function=_run_search,
        price=Price(per_call_usd=0.0005),
        latency_s=0.3,
        inline=True,
    )


def expert_tool(expert: Expert) -> Tool:
    """A simulated expert as a tool at its own prices; it takes no arguments and reads the passages found so far."""

    def consult(context: CallContext) -> ToolResult:
        answer = ask(expert, context.task, passages_read(context.history), context.rng)
        return ToolResult(
            answer.text,
            latency_s=answer.latency_s,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
        )

    return Tool(
        name=expert.name,
        description=expert.description,
        parameters=_schema(),
        function=consult,
        price=expert_price(expert),
        latency_s=expert.latency_s,
        inline=True,
        backend=f"simulated:{expert.name}",
    )


def expert_price(expert: Expert) -> Price:
    """The expert's price list per token (it publishes dollars per million)."""
    return Price(
        per_input_token_usd=expert.input_usd_per_million / 1e6,
        per_output_token_usd=expert.output_usd_per_million / 1e6,
    )


@cache
def market_tools() -> tuple[Tool, ...]:
    """All tools of the market at their default prices, in the order of `TOOL_NAMES`."""
    return (calculator_tool(), search_tool(), *(expert_tool(expert) for expert in EXPERTS.values()))


def _schema(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}
