"""How the demonstration looks: two lanes under a task, and the totals of both below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.align import Align
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from orchestra_jax.demo.timeline import Moment
from orchestra_jax.report.console import format_duration
from orchestra_jax.report.policies import format_significant
from orchestra_jax.rollout.episode import Episode
from orchestra_jax.solve.transcript import Row

LANE_ROWS = 6
"""Lines of a lane, so that nothing jumps."""

_WITHOUT_BARS = 60  # characters of a line of totals that are no bars
_NARROW = 62  # below, the lanes stand one above the other


@dataclass
class Lane:
    """One of the two contestants: its name, and what it has done so far."""

    name: str
    style: str
    outcomes: list[bool] = field(default_factory=list)
    cost_usd: float = 0.0
    latency_s: float = 0.0

    def add(self, episode: Episode) -> None:
        """Enters a task that is over."""
        self.outcomes.append(solved(episode))
        self.cost_usd += episode.cost_usd
        self.latency_s += episode.latency_s


def solved(episode: Episode) -> bool:
    """Whether the answer was right."""
    return (episode.outcome or 0.0) > 0.5


def cents(usd: float) -> str:
    """US cents."""
    return f"{format_significant(100 * usd)}¢"


def frame(
    number: int,
    total: int,
    question: str,
    lanes: Sequence[Lane],
    moments: Sequence[Moment],
    outcomes: Sequence[bool],
    spinner: Spinner,
    note: str,
    width: int,
) -> RenderableType:
    """The whole picture at a moment.

    Args:
      number: of the task, from 1.
      total: tasks.
      question: the task.
      lanes: with the totals of the tasks before this one.
      moments: of this task, one a lane.
      outcomes: whether each will have solved it; shown once its episode has ended.
      spinner: turns while something is going on.
      note: what a viewer must know.
      width: of the terminal, in characters.
    """
    task = Panel(
        Text(question, style="bold"), title=f"task {number} of {total}", title_align="left", border_style="dim"
    )
    lane_width = (width - 1) // 2 if width >= _NARROW else width
    panels = [
        _lane_panel(lane, moment, right, spinner, lane_width) for lane, moment, right in zip(lanes, moments, outcomes)
    ]
    so_far = totals_table(
        lanes,
        width,
        costs_usd=[lane.cost_usd + moment.cost_usd for lane, moment in zip(lanes, moments)],
        latencies_s=[lane.latency_s + moment.latency_s for lane, moment in zip(lanes, moments)],
        ended=[right if not moment.during else None for moment, right in zip(moments, outcomes)],
    )
    body = Columns(panels, padding=(0, 1, 0, 0)) if width >= _NARROW else Group(*panels)
    return Group(task, body, so_far, Align(Text(note, style="dim"), "left"))


def totals_table(
    lanes: Sequence[Lane],
    width: int,
    *,
    costs_usd: Sequence[float] | None = None,
    latencies_s: Sequence[float] | None = None,
    ended: Sequence[bool | None] | None = None,
) -> Table:
    """Tasks solved, money and time of both: by default what the lanes hold. Bars where `width` leaves room."""
    costs = [lane.cost_usd for lane in lanes] if costs_usd is None else costs_usd
    times = [lane.latency_s for lane in lanes] if latencies_s is None else latencies_s
    bar = min(24, (width - _WITHOUT_BARS) // 2)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    # Widths that hold to the end, so that nothing moves.
    for heading, least in (("", 0), ("solved", 8), ("", 12), ("money", 6), ("", 0), ("time", 7), ("", 0)):
        table.add_column(heading, header_style="dim", no_wrap=True, min_width=least)
    for number, lane in enumerate(lanes):
        now = ended[number] if ended else None
        outcomes = [*lane.outcomes, *([now] if now is not None else [])]
        marks = Text()
        for right in outcomes[-12:]:
            marks.append("✓" if right else "✗", style="green" if right else "red")
        table.add_row(
            Text(lane.name, style=lane.style),
            f"{sum(outcomes)} of {len(outcomes)}",
            marks,
            Text(cents(costs[number]), style=lane.style),
            _bar(costs[number], max(costs), bar, lane.style),
            Text(format_duration(times[number]), style=lane.style),
            _bar(times[number], max(times), bar, lane.style),
        )
    return table


def _lane_panel(lane: Lane, moment: Moment, right: bool, spinner: Spinner, width: int) -> Panel:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=7, no_wrap=True)
    grid.add_column(overflow="fold")
    for row in moment.rows[-LANE_ROWS:]:
        grid.add_row(Text(row.label, style="blue"), Text(_short(row), style=row.style))
    if moment.during:
        grid.add_row(spinner, Text(f"{moment.during} · {format_duration(moment.latency_s)}", style="dim"))
    else:
        grid.add_row(*(Text(t, style="bold green" if right else "bold red") for t in _verdict(right)))
    spent = Text(f"{cents(moment.cost_usd)} · {format_duration(moment.latency_s)}", style=lane.style)
    return Panel(
        grid, title=Text(lane.name, style=lane.style), subtitle=spent, width=width, height=LANE_ROWS + 2, padding=(0, 1)
    )


def _verdict(right: bool) -> tuple[str, str]:
    return ("✓", "right") if right else ("✗", "wrong")


def _short(row: Row) -> str:
    text = " ".join(row.text.split())
    return text if len(text) <= 160 else text[:159] + "…"


def _bar(value: float, most: float, width: int, style: str) -> Text:
    if width < 4:
        return Text()
    length = round(width * value / most) if most > 0 else 0
    return Text("█" * length, style=style).append("·" * (width - length), style="dim")
