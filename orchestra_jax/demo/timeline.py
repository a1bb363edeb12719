"""An episode over time: what of it is there to see, what it has cost and how long it has taken, at any moment.

Two clocks: seconds of the show, and the market's, in which tools take their simulated time. While a tool works the
market's clock runs `speed` times faster; while the policy writes it stands still, as in the market.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestra_jax.rollout.episode import Episode
from orchestra_jax.solve.transcript import Row, policy_rows, result_rows

WRITE_S = 0.5
"""Seconds of the show in which a turn is written."""


@dataclass(frozen=True)
class Span:
    """A piece of an episode: a turn that is written, or tools at work."""

    kind: Literal["write", "wait"]
    duration_s: float
    """Of the show."""
    cost_usd: float
    latency_s: float
    """Of the market."""
    during: str
    """What is going on."""
    after: tuple[Row, ...]
    """What is to be seen when it is over."""


@dataclass(frozen=True)
class Moment:
    """What is to be seen of an episode at a moment."""

    rows: tuple[Row, ...]
    during: str
    """"" when it has ended."""
    cost_usd: float
    latency_s: float


def spans_of(episode: Episode, speed: float) -> tuple[Span, ...]:
    """The pieces of an episode, one after the other.

    Args:
      episode: ended.
      speed: seconds of the market in a second of the show.
    """
    spans = []
    for number, turn in enumerate(episode.turns):
        if turn.role == "assistant":
            final = number + 1 == len(episode.turns) and episode.end_reason == "answered"
            rows = tuple(policy_rows(turn.text, final=final))
            spans.append(Span("write", WRITE_S, 0.0, 0.0, "writing", rows))
        elif turn.calls:
            cost_usd = sum(call["cost_usd"] for call in turn.calls)
            latency_s = max(call["latency_s"] for call in turn.calls)  # calls of one turn run at once
            names = ", ".join(call["tool"] for call in turn.calls)
            rows = tuple(result_rows(turn))
            spans.append(Span("wait", latency_s / speed, cost_usd, latency_s, f"{names} at work", rows))
    return tuple(spans)


def length_s(spans: Sequence[Span]) -> float:
    """Seconds of the show that an episode takes."""
    return sum(span.duration_s for span in spans)


def moment_at(spans: Sequence[Span], time_s: float) -> Moment:
    """What is to be seen `time_s` seconds into the show; cost and time grow evenly while a tool works."""
    rows: list[Row] = []
    cost_usd = latency_s = 0.0
    for span in spans:
        if time_s < span.duration_s:
            share = max(0.0, time_s) / span.duration_s
            return Moment(
                tuple(rows), span.during, cost_usd + share * span.cost_usd, latency_s + share * span.latency_s
            )
        time_s -= span.duration_s
        rows.extend(span.after)
        cost_usd += span.cost_usd
        latency_s += span.latency_s
    return Moment(tuple(rows), "", cost_usd, latency_s)
