"""The preference score against hand-made vectors, and random preferences in words."""

import numpy as np
import pytest
from orchestra_envs.preference import draw_preference, preference_score, preference_vector

TOOLS = ("calculator", "search", "gpt-5")

# (measured, reference, weights, correct, expected), worked out from appendix L of arXiv 2511.21689.
CASES = {
    "cents and minutes": (
        {"t1": 2, "t2": 0, "outcome": 1, "cost": 5.0, "latency": 2.0},
        {"t1": 1, "t2": 3, "outcome": 0, "cost": 20.0, "latency": 5.0},
        {"t1": 1, "t2": 0, "outcome": 1, "cost": 1, "latency": 0.5},
        True,
        8.25,
    ),
    "below the floor of one": (
        {"t1": 2, "t2": 0, "outcome": 1, "cost": 0.05, "latency": 2.0},
        {"t1": 1, "t2": 3, "outcome": 0, "cost": 0.2, "latency": 5.0},
        {"t1": 1, "t2": 0, "outcome": 1, "cost": 1, "latency": 0.0},
        True,
        3.2,
    ),
    "wrong answer": (
        {"t1": 2, "t2": 0, "outcome": 0, "cost": 5.0, "latency": 2.0},
        {"t1": 1, "t2": 3, "outcome": 1, "cost": 20.0, "latency": 5.0},
        {"t1": 1, "t2": 1, "outcome": 1, "cost": 1, "latency": 1},
        False,
        0.0,
    ),
}
PRINTED = (
    {"t1": 2, "t2": 0, "outcome": 1, "cost": -0.05, "latency": -120},
    {"t1": 1, "t2": 3, "outcome": 0, "cost": -0.2, "latency": -300},
    {"t1": 1, "t2": 0, "outcome": 1, "cost": 1, "latency": 0},
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_score_of_worked_cases(case):
    measured, reference, weights, correct, expected = case
    assert preference_score(measured, reference, weights, correct=correct) == pytest.approx(expected)


def test_printed_signs_only_on_request():
    assert preference_score(*PRINTED, correct=True, signs="printed") == pytest.approx(2.8)
    with pytest.raises(ValueError, match=r"measured\['cost'\]: expected a positive"):
        preference_score(*PRINTED, correct=True)
    with pytest.raises(ValueError, match="as printed"):
        preference_score(*CASES["cents and minutes"][:3], correct=True, signs="printed")


def test_cheaper_and_quicker_scores_higher():
    weights = {"cost": 1.0, "latency": 1.0}
    reference = preference_vector({"gpt-5": 1}, 1.0, cost_usd=0.05, latency_s=120.0)
    dear = preference_vector({"gpt-5": 1}, 1.0, cost_usd=0.04, latency_s=100.0)
    cheap = preference_vector({"search": 1}, 1.0, cost_usd=0.02, latency_s=70.0)
    assert preference_score(cheap, reference, weights, correct=True) > preference_score(
        dear, reference, weights, correct=True
    )


def test_vector_is_in_cents_and_minutes():
    assert preference_vector({"search": 2}, 1, cost_usd=0.05, latency_s=90.0) == {
        "search": 2.0,
        "outcome": 1.0,
        "cost": pytest.approx(5.0),
        "latency": 1.5,
    }


def test_words_determine_the_weights_and_held_out_words_are_new():
    seen: dict[bool, dict[str, dict]] = {False: {}, True: {}}
    for held_out, meanings in seen.items():
        for seed in range(400):
            preference = draw_preference(np.random.default_rng(seed), TOOLS, held_out=held_out)
            assert meanings.setdefault(preference.text, preference.weights) == preference.weights
            assert set(preference.weights) == {*TOOLS, "outcome", "cost", "latency"}
            assert all(0 <= weight <= 1 for weight in preference.weights.values())
            favoured = {name for name in TOOLS if preference.weights[name] > 0}
            assert favoured == {name for name in TOOLS if name in preference.text}
    assert len(seen[False]) > 20
    assert not set(seen[False]) & set(seen[True])
