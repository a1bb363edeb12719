"""Pairs of policies that met the same tasks: differences, their intervals and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from orchestra_jax.eval.stats import holm, mcnemar_p, paired_difference, permutation_p

METRICS = ("accuracy", "cost_usd", "latency_s", "preference")
_FIELDS = {"accuracy": "outcome"}


def compare_all(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Every pair of policies: see `compare`. P-values are also given adjusted for the number of pairs (Holm)."""
    rows = [compare(a, b, records[a], records[b]) for a, b in combinations(records, 2)]
    for metric in METRICS:
        tested = [row[metric] for row in rows if row[metric] is not None]
        for entry, adjusted in zip(tested, holm([entry["p"] for entry in tested])):
            entry["p_holm"] = adjusted
    return rows


def compare(
    a: str, b: str, records_a: Sequence[Mapping[str, Any]], records_b: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One pair, over the episodes (task and trial) in which neither was dropped as "infra_error".

    Returns:
      `a`, `b` (names), `num_tasks`, `num_episodes`; per metric `difference` (mean of a - b), `ci95` (bootstrap over
      tasks) and `p` (paired permutation test over tasks), or None where an episode lacks the number; `only_a_solved`,
      `only_b_solved` (episodes with an outcome above 0.5 of one alone), and `mcnemar_p`: None where tasks were tried
      repeatedly, for their episodes are not independent.
    """
    by_key = {_key(record): record for record in records_b if _counts(record)}
    pairs = [(record, by_key[_key(record)]) for record in records_a if _counts(record) and _key(record) in by_key]
    tasks = [pair[0]["task_id"] for pair in pairs]
    only_a = sum(_solved(x) and not _solved(y) for x, y in pairs)
    only_b = sum(_solved(y) and not _solved(x) for x, y in pairs)
    once = len({_key(x)[0] for x, _ in pairs}) == len(pairs)
    return {
        "a": a,
        "b": b,
        "num_tasks": len(set(tasks)),
        "num_episodes": len(pairs),
        **{metric: _difference(pairs, tasks, _FIELDS.get(metric, metric)) for metric in METRICS},
        "only_a_solved": only_a,
        "only_b_solved": only_b,
        "mcnemar_p": mcnemar_p(only_a, only_b) if once else None,
    }


def _difference(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], tasks: Sequence[str], field: str
) -> dict[str, Any] | None:
    if not pairs or any(x.get(field) is None or y.get(field) is None for x, y in pairs):
        return None
    a, b = [float(x[field]) for x, _ in pairs], [float(y[field]) for _, y in pairs]
    paired = paired_difference(a, b, tasks)
    p = permutation_p([x - y for x, y in zip(a, b)], tasks)
    return {"difference": paired.difference, "ci95": [paired.low, paired.high], "p": p}


def _key(record: Mapping[str, Any]) -> tuple[int, int]:
    return record["number"], record["trial"]


def _counts(record: Mapping[str, Any]) -> bool:
    return record.get("end_reason") != "infra_error"


def _solved(record: Mapping[str, Any]) -> bool:
    return float(record["outcome"]) > 0.5
