"""An evaluation in the terminal: one row per policy, and how sure its differences to the first one are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestra_jax.report.policies import format_significant

SECONDS_PER_MINUTE = 60.0
CENTS_PER_USD = 100.0

_PIPE_WIDTH = 200  # a file or pipe has no width of its own: rows stay on one line
_WIDE = 150  # narrower terminals get the tool calls in a table of their own
_SHOWN_TOOLS = 8


def print_evaluation(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints `evaluation_table` to standard output; in a narrow terminal the tool calls below it."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH, file=console.file)
    is_wide = console.width >= _WIDE
    console.print(evaluation_table(summary, with_tools=is_wide))
    if not is_wide:
        console.print(_tools_table(summary))


def evaluation_table(summary: Mapping[str, Any], *, with_tools: bool = True) -> Table:
    """The table of an evaluation's summary: accuracy in %, cents, minutes, preference, tool calls; 95% intervals.

    "vs first" is the accuracy's difference to the first policy of the suite, with a star where the paired permutation
    test gives p < 0.05 after Holm's correction. Columns that no policy has are left out.
    """
    parts: Mapping[str, Any] = summary.get("suites") or {"": summary}
    entries = [entry for part in parts.values() for entry in part["policies"].values()]
    with_passes = any(entry.get("pass_hat_k") for entry in entries)
    with_preference = any(entry.get("preference") is not None for entry in entries)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption=_caption(summary, with_passes))
    table.add_column("policy", no_wrap=True)
    headings = ["accuracy, %", "vs first", *(["pass^k, %"] if with_passes else []), "cost, ¢", "latency, min"]
    for heading in [*headings, *(["preference"] if with_preference else []), "episodes"]:
        table.add_column(heading, justify="right", overflow="fold")
    if with_tools:
        table.add_column("tool calls", overflow="fold")
    for suite, part in parts.items():
        if suite:
            table.add_row(Text(suite, style="bold"))
        for name, entry in part["policies"].items():
            cells = [
                _with_interval(entry, "accuracy", 100.0, 1),
                _versus(part.get("comparisons", ()), next(iter(part["policies"])), name),
                *([_passes(entry)] if with_passes else []),
                _with_interval(entry, "cost_usd", CENTS_PER_USD),
                _with_interval(entry, "latency_s", 1 / SECONDS_PER_MINUTE),
                *([_with_interval(entry, "preference", 1.0)] if with_preference else []),
                _episodes(entry),
                *([_tools(entry)] if with_tools else []),
            ]
            table.add_row(Text(f"  {name}" if suite else name), *cells)
    return table


def _tools_table(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("tool calls per task, and their shares", overflow="fold")
    for name, entry in summary["policies"].items():
        table.add_row(Text(name), _tools(entry))
    return table


def _caption(summary: Mapping[str, Any], with_passes: bool) -> str:
    text = "(95% intervals); vs first: difference to the first policy on the same tasks, * p < 0.05 (Holm)"
    if with_passes:
        text += f"; pass^k: all of k trials right, k = 1 to {summary['trials']}"
    return text


def _number(value: float, scale: float, decimals: int | None, digits: int = 3) -> str:
    return format_significant(value * scale, digits) if decimals is None else f"{value * scale:.{decimals}f}"


def _with_interval(entry: Mapping[str, Any], key: str, scale: float, decimals: int | None = None) -> Text:
    value = entry.get(key)
    if value is None:
        return Text("–", style="dim")
    text = Text(_number(value, scale, decimals))
    interval = (entry.get("ci95") or {}).get(key)
    if interval:
        low, high = (_number(end, scale, decimals, digits=2) for end in interval)
        text.append(f" ({low}–{high})", style="dim")
    return text


def _versus(comparisons: Sequence[Mapping[str, Any]], first: str, name: str) -> Text:
    for row in comparisons:
        if row["accuracy"] is None:
            continue
        if (row["a"], row["b"]) == (first, name):
            sure = row["accuracy"]["p_holm"] < 0.05
            return Text(f"{-100 * row['accuracy']['difference']:+.1f}{'*' if sure else ''}")
    return Text("")


def _passes(entry: Mapping[str, Any]) -> Text:
    return Text(" ".join(f"{100 * value:.1f}" for value in entry.get("pass_hat_k") or ()))


def _episodes(entry: Mapping[str, Any]) -> Text:
    text = Text(str(entry["num_episodes"]))
    if entry["num_infra_errors"]:
        total = entry["num_episodes"] + entry["num_infra_errors"]
        text.append(f" (of {total})", style="bold red")
    return text


def _tools(entry: Mapping[str, Any]) -> Text:
    shares = sorted(entry.get("tool_shares", {}).items(), key=lambda item: -item[1])
    shown = [f"{tool} {100 * share:.0f}%" for tool, share in shares[:_SHOWN_TOOLS] if share >= 0.005]
    if len(shares) > _SHOWN_TOOLS:
        shown.append(f"{len(shares) - _SHOWN_TOOLS} more")
    calls = sum(entry.get("tools", {}).values())
    return Text(f"{calls:.2f}: {', '.join(shown)}" if shown else "none", style="dim")
