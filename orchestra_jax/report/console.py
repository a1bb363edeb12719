"""What a run shows in the terminal: the table of policies and the progress of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from orchestra_jax.report.policies import (
    METRICS,
    Estimate,
    Metric,
    best_names,
    format_interval,
    format_mean,
    format_significant,
    policy_rows,
)

_ROW_STYLES = {"trained": "bold cyan", "start": "cyan", "baseline": "", "oracle": "dim"}


class Update(Protocol):
    """What :func:`make_progress` gives: tell it where training stands."""

    def __call__(
        self,
        step: int,
        total: int,
        *,
        reward: float | None = None,
        accuracy: float | None = None,
        cost_usd: float | None = None,
        eta_s: float | None = None,
    ) -> None: ...


def policies_table(summary: Mapping[str, Any], *, title: str | None = None) -> Table:
    """Table of the policies in ``summary`` (the content of ``summary.json``): means with their 95% intervals.

    Costs are in US cents. The best of each column is underlined (the oracle does not compete); rows of the
    trained policy are coloured and marked by a triangle. Columns that no policy has are left out. Where episodes
    were dropped since the environment failed in them, the accuracy says how many count: ``95.0 (6 of 128)``.
    """
    rows = policy_rows(summary)
    any_dropped = any(row.counted for row in rows)
    metrics = [m for m in METRICS if any(row.estimates[m.key].value is not None for row in rows)]
    if any_dropped and METRICS[0] not in metrics:
        metrics.insert(0, METRICS[0])  # the accuracy, to say how few episodes it would count
    caption = "95% intervals; underlined: best of the column"
    if any_dropped:
        caption += "; (n of m): episodes counted, the others were dropped as infra_error"
    table = Table(
        title=title,
        caption=caption,
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for metric in metrics:
        heading = metric.title.lower() + (f", {metric.unit}" if metric.unit else "")
        table.add_column(heading, justify="right", overflow="fold")
    best = {metric.key: best_names(rows, metric) for metric in metrics}
    for row in rows:
        style = _ROW_STYLES[row.kind]
        name = Text(("▸ " if row.kind == "trained" else "  ") + row.name, style=style)
        cells = [
            _cell(row.estimates[m.key], m, style, row.name in best[m.key], row.counted if m is METRICS[0] else "")
            for m in metrics
        ]
        table.add_row(name, *cells)
    return table


@contextmanager
def make_progress(
    console: Console | None = None,
    *,
    description: str = "training",
    plain_interval_s: float = 15.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Update]:
    """A progress bar on a terminal; elsewhere (a log file, a pipe) a plain line now and then.

    ::

        with make_progress() as update:
            for step in range(1, total + 1):
                ...
                update(step, total, reward=0.7, accuracy=0.9, cost_usd=0.004)

    Args:
        console: where to write; standard error by default, so that standard output stays clean for results.
        description: the word in front.
        plain_interval_s: least time between two plain lines; the first and the last step are always written.
        clock: seconds, monotonic; the time left is estimated from it unless ``eta_s`` is given.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bar(console) as progress:
            yield _bar_update(progress, description, clock)
    else:
        yield _plain_update(console, description, plain_interval_s, clock)


def format_duration(seconds: float) -> str:
    """``42 s``, ``3:07`` (minutes) or ``1:02:33`` (hours)."""
    whole = max(0, round(seconds))
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{secs:02d}"
    return f"{minutes}:{secs:02d}" if minutes else f"{secs} s"


def _cell(estimate: Estimate, metric: Metric, style: str, is_best: bool, counted: str) -> Text:
    if estimate.value is None:
        text = Text("–", style="dim")
    else:
        text = Text(format_mean(estimate.value, metric), style=f"{style} underline" if is_best else style)
    interval = format_interval(estimate, metric)
    if interval:
        # One break opportunity, between value and interval: a narrow terminal gets them on two lines.
        text.append(" ", style="not underline").append(interval, style="dim not bold not underline")
    if counted:
        no_break = counted.replace(" ", "\N{NO-BREAK SPACE}")
        text.append(" ", style="not underline").append(f"({no_break})", style="bold red not underline")
    return text


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[numbers]}"),
        TextColumn("[cyan]{task.fields[left]}[/]"),
        console=console,
        expand=True,
    )


def _bar_update(progress: Progress, description: str, clock: Callable[[], float]) -> Update:
    start_s = clock()
    task: TaskID | None = None
    first_step = 0

    def update(
        step: int,
        total: int,
        *,
        reward: float | None = None,
        accuracy: float | None = None,
        cost_usd: float | None = None,
        eta_s: float | None = None,
    ) -> None:
        nonlocal task, first_step
        if task is None:
            first_step = step - 1
            task = progress.add_task(description, total=total, numbers="", left="")
        left = _time_left(step, total, first_step, clock() - start_s) if eta_s is None else eta_s
        numbers = "  ".join(_numbers(reward, accuracy, cost_usd))
        progress.update(task, completed=step, total=total, numbers=numbers, left=f"{format_duration(left)} left")

    return update


def _plain_update(console: Console, description: str, plain_interval_s: float, clock: Callable[[], float]) -> Update:
    start_s = clock()
    last_line_s: float | None = None
    first_step = 0

    def update(
        step: int,
        total: int,
        *,
        reward: float | None = None,
        accuracy: float | None = None,
        cost_usd: float | None = None,
        eta_s: float | None = None,
    ) -> None:
        nonlocal last_line_s, first_step
        now_s = clock()
        if last_line_s is None:
            first_step = step - 1
        elif now_s - last_line_s < plain_interval_s and step < total:
            return
        last_line_s = now_s
        left = _time_left(step, total, first_step, now_s - start_s) if eta_s is None else eta_s
        time_part = f"{format_duration(left)} left" if step < total else f"{format_duration(now_s - start_s)} in all"
        parts = [f"{description} {step}/{total}", *_numbers(reward, accuracy, cost_usd), time_part]
        console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    return update


def _time_left(step: int, total: int, first_step: int, elapsed_s: float) -> float:
    done = max(1, step - first_step)
    return elapsed_s / done * max(0, total - step)


def _numbers(reward: float | None, accuracy: float | None, cost_usd: float | None) -> list[str]:
    numbers = []
    if reward is not None:
        numbers.append(f"reward {reward:.2f}")
    if accuracy is not None:
        numbers.append(f"accuracy {100 * accuracy:.0f}%")
    if cost_usd is not None:
        numbers.append(f"cost {format_significant(100 * cost_usd, 2)}¢")
    return numbers
