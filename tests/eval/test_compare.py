"""Pairs of policies on the same tasks."""

import pytest

from orchestra_jax.eval.compare import compare, compare_all
from orchestra_jax.eval.stats import mcnemar_p


def records(outcomes, cost_usd=0.01, **extra):
    return [
        {
            "number": number,
            "trial": 0,
            "task_id": f"t{number}",
            "outcome": float(outcome),
            "cost_usd": cost_usd,
            "latency_s": 1.0,
            "preference": None,
            "end_reason": "answered",
            **extra,
        }
        for number, outcome in enumerate(outcomes)
    ]


def test_differences_are_over_shared_episodes():
    a, b = records([1] * 9 + [0] * 3, 0.04), records([1] * 4 + [0] * 8)
    b[11]["end_reason"] = "infra_error"
    found = compare("a", "b", a, b)
    assert (found["num_tasks"], found["num_episodes"]) == (11, 11)
    assert found["accuracy"]["difference"] == pytest.approx(5 / 11)
    low, high = found["accuracy"]["ci95"]
    assert low < 5 / 11 < high
    assert (found["only_a_solved"], found["only_b_solved"]) == (5, 0)
    assert found["accuracy"]["p"] == found["mcnemar_p"] == mcnemar_p(5, 0) == 2 / 32
    assert found["cost_usd"]["difference"] == pytest.approx(0.03)
    assert found["preference"] is None


def test_the_other_way_round_is_the_negative():
    a, b = records([1, 0, 1, 1, 0]), records([0, 0, 1, 0, 1])
    forth, back = compare("a", "b", a, b), compare("b", "a", b, a)
    assert forth["accuracy"]["difference"] == -back["accuracy"]["difference"]
    assert forth["accuracy"]["p"] == back["accuracy"]["p"]


def test_mcnemar_is_for_single_trials():
    a = records([1, 0]) + [{**record, "trial": 1} for record in records([1, 1])]
    assert compare("a", "b", a, a)["mcnemar_p"] is None
    assert compare("a", "b", a, a)["num_episodes"] == 4


def test_nothing_in_common():
    found = compare("a", "b", records([1, 1]), [{**r, "number": r["number"] + 9} for r in records([1, 1])])
    assert (found["num_episodes"], found["accuracy"]) == (0, None)


def test_all_pairs_are_adjusted_for_their_number():
    rows = compare_all({"a": records([1] * 8), "b": records([0] * 8), "c": records([1] * 8)})
    assert [(row["a"], row["b"]) for row in rows] == [("a", "b"), ("a", "c"), ("b", "c")]
    p = 2 / 2**8
    assert [row["accuracy"]["p"] for row in rows] == [p, 1.0, p]
    assert [row["accuracy"]["p_holm"] for row in rows] == pytest.approx([3 * p, 1.0, 3 * p])
