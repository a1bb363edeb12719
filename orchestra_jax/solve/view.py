"""An episode shown as it goes: on a terminal with the tokens as they come, elsewhere in plain lines, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from orchestra_jax.report.console import format_duration
from orchestra_jax.rollout.episode import Episode, Turn
from orchestra_jax.solve.transcript import (
    Row,
    count,
    cut_rows,
    end_row,
    growing_rows,
    pending_calls,
    policy_rows,
    result_rows,
    seconds,
    spent,
)

LABEL_WIDTH = 9
_LINES_BELOW = 3  # of a terminal, kept free under a long turn


class View:
    """Prints finished turns, and below them on a terminal the one under way. A context manager.

    Args:
      console: where to.
      growing: the text so far of the turn under way; called by the thread that calls `watch`.
      clock: seconds, monotonic.
    """

    def __init__(
        self, console: Console, growing: Callable[[], str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.console = console
        self._growing = growing
        self._clock = clock
        self._start_s = clock()
        self._changed_s: float | None = None
        self._num_turns = 0
        self._printed = 0
        self._heading = ""
        self._under_way: Sequence[Row] = ()
        self._status = ""
        self._spinner = Spinner("dots")
        self._live = Live(self, console=console, transient=True, auto_refresh=True, refresh_per_second=8)

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._under_way = ()
        self._live.stop()

    def print(self, rows: Sequence[Row]) -> None:
        """Prints rows above what is under way."""
        if self.console.is_terminal:
            self.console.print(_table(rows))
        else:
            self.console.file.write("".join(_plain(row) for row in rows))
            self.console.file.flush()

    def watch(self, number: int, episode: Episode) -> None:
        """To be called after every change of the episode."""
        now_s = self._clock()
        if self._changed_s is None or len(episode.turns) != self._num_turns:
            if episode.turns and episode.turns[-1].role == "assistant":
                took_s = now_s - (self._changed_s or self._start_s)
                self._heading = f"{count(episode.turns[-1].num_tokens, 'token')} in {seconds(took_s)}"
            self._changed_s, self._num_turns = now_s, len(episode.turns)
        self._look_at(episode)
        self._print_turns(episode)

    def finish(self, episode: Episode) -> None:
        """Prints how it ended."""
        self._under_way, self._status = (), ""
        self._print_turns(episode)
        self._live.stop()
        self.print([end_row(episode, self._clock() - self._start_s)])

    def _print_turns(self, episode: Episode) -> None:
        """Prints the turns that will not change any more."""
        while self._printed < len(episode.turns):
            turn = episode.turns[self._printed]
            is_last = self._printed + 1 == len(episode.turns)
            if is_last and _is_open(turn, episode):
                return
            self._printed += 1
            if turn.role == "assistant":
                self.print([self._turn_row(episode), *_rows_of(turn, episode, is_last=is_last)])
            else:
                self.print([*result_rows(turn), Row("so far", spent(episode), "dim")])

    def _turn_row(self, episode: Episode) -> Row:
        number = sum(turn.role == "assistant" for turn in episode.turns[: self._printed])
        return Row(f"turn {number}", self._heading, "dim")

    def _look_at(self, episode: Episode) -> None:
        """Notes what is under way, for the terminal."""
        if not self.console.is_terminal:
            return
        last = episode.turns[-1] if episode.turns else None
        if calls := pending_calls(episode):
            self._under_way, state = (), f"waiting for {', '.join(call.name for call in calls)}"
        elif last and _is_open(last, episode):
            self._under_way, state = policy_rows(last.text, final=False), "waiting"
        else:
            text = self._growing()
            self._under_way, state = growing_rows(text), "writing" if text else "reading"
        self._status = f"{state} · {spent(episode)} · "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What is under way; rendered by a thread of the display, so that the spinner turns and the seconds pass."""
        passed = format_duration(self._clock() - self._start_s)
        self._spinner.update(text=Text(f"{self._status}{passed}", style="dim"))
        whole = Group(_table(self._under_way), self._spinner) if self._under_way else self._spinner
        lines = console.render_lines(whole, options, pad=False)
        for line in lines[-max(1, console.height - _LINES_BELOW) :]:  # of a long turn its end
            yield from line
            yield Segment.line()


def _is_open(turn: Turn, episode: Episode) -> bool:
    """Whether the last turn is a text of which only the environment's answer will tell whether it was the final one."""
    return turn.role == "assistant" and not episode.end_reason and not pending_calls(episode)


def _rows_of(turn: Turn, episode: Episode, *, is_last: bool) -> list[Row]:
    if is_last and episode.end_reason in ("length", "context"):
        return cut_rows(turn.text)
    return policy_rows(turn.text, final=is_last and episode.end_reason == "answered")


def _plain(row: Row) -> str:
    """A row as lines; all but the first are indented."""
    indent = "\n" + " " * (LABEL_WIDTH + 1)
    return f"{row.label:<{LABEL_WIDTH}} {row.text.strip().replace(chr(10), indent)}\n"


def _table(rows: Sequence[Row]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(Text(row.label, style="blue"), Text(row.text.strip(), style=row.style))
    return grid
