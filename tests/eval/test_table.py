"""The table of an evaluation."""

import io
import re

from rich.console import Console

from orchestra_jax.eval.compare import compare_all
from orchestra_jax.eval.stats import summarize
from orchestra_jax.eval.table import evaluation_table, print_evaluation


def summary():
    def records(solved, tools):
        return [
            {
                "number": number,
                "trial": 0,
                "task_id": str(number),
                "outcome": float(number < solved),
                "cost_usd": 0.025,
                "latency_s": 90.0,
                "tool_counts": tools,
                "end_reason": "answered" if number else "infra_error",
            }
            for number in range(41)
        ]

    found = {
        "first": records(38, {"search": 3, "gpt-5": 1}),
        "second": records(8, {f"tool-{i:02}": 1 for i in range(12)}),
    }
    policies = {name: summarize(episodes) for name, episodes in found.items()}
    return {"trials": 1, "policies": policies, "comparisons": compare_all(found)}


def shown(width, is_terminal):
    file = io.StringIO()
    print_evaluation(summary(), Console(file=file, width=width, force_terminal=is_terminal, no_color=True))
    return file.getvalue()


def test_numbers_in_the_units_of_the_paper():
    text = shown(80, is_terminal=False)
    first, second = (line for line in text.splitlines() if line.startswith(("first", "second")))
    assert "92.5 (80.1" in first  # 37 of 40: one episode was dropped
    assert "40 (of 41)" in first
    assert "2.50 (2.5–2.5)" in first  # cents
    assert "1.50 (1.5–1.5)" in first  # minutes
    assert "4.00: search 75%, gpt-5 25%" in first
    assert "-75.0*" in second
    assert "tool-07 8%, 4 more" in second
    assert "preference" not in text


def test_a_narrow_terminal_gets_the_tools_below():
    text = re.sub("\x1b[^m]*m", "", shown(80, is_terminal=True))
    assert "(80.1–97.4)" in text  # not broken at the end of a line
    assert "tool calls per task" in text
    assert "tool calls" in {column.header for column in evaluation_table(summary()).columns}
