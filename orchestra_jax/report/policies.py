"""The policies of a summary as rows ready to show: shared by the terminal table and the report page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["trained", "start", "baseline", "oracle"]


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval; ``None`` where it is not known or has no bound."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Metric:
    """One column: its key in the summary, its heading, its unit and how its numbers are written.

    ``format`` takes the number and how many significant digits to give (a percentage has its own rule).
    """

    key: str
    title: str
    unit: str
    higher_is_better: bool
    format: Callable[[float, int], str]


@dataclass(frozen=True)
class PolicyRow:
    """One policy: its name in the summary, a readable label, its kind and one estimate per metric key.

    The estimates are over `num_episodes`; `num_dropped` more say nothing, since the environment failed in them.
    """

    name: str
    label: str
    kind: Kind
    num_episodes: int | None
    estimates: dict[str, Estimate]
    num_dropped: int = 0

    @property
    def counted(self) -> str:
        """``6 of 128`` where episodes were dropped, else empty."""
        if not self.num_dropped or self.num_episodes is None:
            return ""
        return f"{self.num_episodes} of {self.num_episodes + self.num_dropped}"


def format_significant(x: float, digits: int = 3) -> str:
    """``x`` with ``digits`` significant digits (at most two below 0.1) and no exponent: 5.50, 0.423, 0.042, 1234."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    if abs(x) < 0.1:
        digits = min(digits, 2)
    decimals = digits - 1 - math.floor(math.log10(abs(x)))
    return f"{x:.{min(max(decimals, 0), 8)}f}"


def _format_percent(share: float, digits: int) -> str:
    return "100" if share >= 0.9995 else f"{100 * share:.1f}"


def _format_cents(usd: float, digits: int) -> str:
    return format_significant(100 * usd, digits)


METRICS = (
    Metric("accuracy", "Accuracy", "%", True, _format_percent),
    Metric("cost_usd", "Cost per task", "¢", False, _format_cents),
    Metric("cost_per_solved_usd", "Cost per solved task", "¢", False, _format_cents),
    Metric("latency_s", "Latency", "s", False, format_significant),
    Metric("preference", "Preference", "", True, format_significant),
)

_LABELS = {
    "trained": "Trained",
    "trained:greedy": "Trained, greedy",
    "warm_start": "Warm start",
    "warm_start:greedy": "Warm start, greedy",
    "random": "Random tool",
    "cheapest": "Cheapest tool",
    "oracle": "Oracle",
}


def policy_label(name: str) -> str:
    """A readable label for a policy's name in the summary: ``always:gpt-5`` becomes ``Always gpt-5``."""
    if name.startswith("always:"):
        return f"Always {name.removeprefix('always:')}"
    return _LABELS.get(name, name)


def policy_rows(summary: Mapping[str, Any]) -> list[PolicyRow]:
    """Rows of a ``summary.json``: trained first, then its start, baselines by falling accuracy, the oracle last.

    Unknown or unusable numbers become ``None``; the cost per solved task is the cost per task over the accuracy
    where the summary does not hold it (then without an interval).
    """
    policies = summary.get("policies")
    entries = policies if isinstance(policies, Mapping) else {}
    rows = [_row(str(name), entry) for name, entry in entries.items() if isinstance(entry, Mapping)]
    return sorted(rows, key=_rank)


def best_names(rows: Sequence[PolicyRow], metric: Metric) -> frozenset[str]:
    """Names of the policies that are best by ``metric`` as it is written (ties together).

    The oracle does not compete, since it knows the skills of the tools; a policy alone is not best of anything.
    """
    values = [(row.name, row.estimates[metric.key].value) for row in rows if row.kind != "oracle"]
    known = [(name, value) for name, value in values if value is not None]
    if len(known) < 2:
        return frozenset()
    pick = max if metric.higher_is_better else min
    best = format_mean(pick(value for _, value in known), metric)
    return frozenset(name for name, value in known if format_mean(value, metric) == best)


def format_mean(value: float, metric: Metric) -> str:
    """``value`` as the tables write it, without the unit: three significant digits."""
    return metric.format(value, 3)


def format_interval(estimate: Estimate, metric: Metric) -> str:
    """``85.0–91.2``, two significant digits; an open end is ``∞``; empty where there is no interval."""
    if estimate.low is None:
        return ""
    high = "∞" if estimate.high is None else metric.format(estimate.high, 2)
    return f"{metric.format(estimate.low, 2)}–{high}"


def finite_number(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else ``None`` (a bool is no number)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _row(name: str, entry: Mapping[str, Any]) -> PolicyRow:
    intervals = entry.get("ci95")
    intervals = intervals if isinstance(intervals, Mapping) else {}
    estimates = {m.key: _estimate(entry.get(m.key), intervals.get(m.key)) for m in METRICS}
    if estimates["cost_per_solved_usd"].value is None:
        accuracy, cost = estimates["accuracy"].value, estimates["cost_usd"].value
        if accuracy and cost is not None:
            estimates["cost_per_solved_usd"] = Estimate(cost / accuracy)
    num_episodes = finite_number(entry.get("num_episodes"))
    return PolicyRow(
        name,
        policy_label(name),
        _kind(name),
        None if num_episodes is None else int(num_episodes),
        estimates,
        num_dropped=max(0, int(finite_number(entry.get("num_infra_errors")) or 0)),
    )


def _estimate(value: Any, interval: Any) -> Estimate:
    number = finite_number(value)
    if number is None or not isinstance(interval, Sequence) or isinstance(interval, str) or len(interval) != 2:
        return Estimate(number)
    return Estimate(number, finite_number(interval[0]), finite_number(interval[1]))


def _kind(name: str) -> Kind:
    base = name.split(":", 1)[0]
    if base == "trained":
        return "trained"
    if base == "warm_start":
        return "start"
    return "oracle" if base == "oracle" else "baseline"


def _rank(row: PolicyRow) -> tuple[int, float, str]:
    order = ("trained", "start", "baseline", "oracle").index(row.kind)
    accuracy = row.estimates["accuracy"].value
    by_accuracy = 0.0 if row.kind in ("trained", "start") else -(accuracy if accuracy is not None else -1.0)
    return order, by_accuracy, row.name
