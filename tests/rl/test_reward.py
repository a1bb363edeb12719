"""Group rewards against worked numbers of the paper's formula and of the released code's."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra_jax.rl import group_advantages, group_rewards, homogeneous
from orchestra_jax.rl.reward import GUARD_MARGIN

CASES = json.loads((Path(__file__).parent / "reward_cases.json").read_text())
GROUP_KEYS = ("outcomes", "costs_usd", "latencies_s", "tool_counts", "preference")


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_worked_cases(case, variant):
    expected = case[variant]
    rewards = group_rewards(*(case[key] for key in GROUP_KEYS), variant=variant)
    np.testing.assert_allclose(rewards, expected["reward"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(group_advantages(rewards), expected["advantage"], rtol=0, atol=1e-9)
    assert homogeneous(rewards) is not expected["kept"]


def test_paper_prefers_cheap_and_released_prefers_dear():
    group = ([1, 1], [0.01, 0.05], [1, 1], [{}, {}], {"outcome": 1.0, "cost": 1.0})
    assert group_rewards(*group).tolist() == [1.0, 0.0]
    # (c + 2 max) / (max - min): 0.11 / 0.04 and 0.15 / 0.04
    np.testing.assert_allclose(group_rewards(*group, variant="released"), [2.75, 3.75], atol=1e-9)


def test_cheap_wrong_answer_sets_the_scale_only_for_the_group():
    group = ([1, 1, 0], [0.06, 0.10, 0.0], [5, 5, 5], [{"search": 1}, {"search": 3}, {}])
    preference = {"cost": 1.0, "search": 0.5}
    np.testing.assert_allclose(group_rewards(*group, preference), [0.4 + 0.5 / 3, 0.5, 0.0], atol=1e-12)
    correct_only = group_rewards(*group, preference, scale="correct")
    np.testing.assert_allclose(correct_only, [1.0, 0.5, 0.0], atol=1e-12)


def test_outcome_is_scaled_over_the_group_also_with_scale_correct():
    rewards = group_rewards([1, 0], [0.1, 0.1], [1, 1], [{}, {}], {"outcome": 0.7}, scale="correct")
    assert rewards.tolist() == [0.7, 0.0]


def test_budgets_are_absolute():
    rewards = group_rewards(
        [1, 1, 1, 0],
        [0.0, 0.025, 9.0, 0.0],
        [10, 30, 60, 0],
        [{}] * 4,
        {"cost": 1.0, "latency": 0.5},
        cost_budget_usd=0.1,
        latency_budget_s=40,
    )
    np.testing.assert_allclose(rewards, [1 + 0.375, 0.75 + 0.125, 0.0, 0.0], atol=1e-12)


def test_unscorable_row_is_nan_and_outside_the_scale():
    preference = {"outcome": 1.0, "cost": 1.0}
    rewards = group_rewards([1, np.nan, 1, 0], [0.02, 50.0, 0.04, 0.03], [1, 1, 1, 1], [{}] * 4, preference)
    np.testing.assert_allclose(rewards, [2.0, np.nan, 1.0, 0.0], atol=1e-12)
    rewards = group_rewards([1, np.nan], [0.02, np.nan], [1, np.nan], [{}] * 2, preference)
    np.testing.assert_allclose(rewards, [0.0, np.nan])
    assert np.isnan(group_rewards([np.nan] * 2, [0, 0], [0, 0], [{}] * 2, preference, guard=True)).all()


def test_partial_outcomes_are_solved_above_one_half():
    rewards = group_rewards([0.5, 0.75, 1.0, 0.0], [1] * 4, [1] * 4, [{}] * 4, {"outcome": 1.0})
    np.testing.assert_allclose(rewards, [0.0, 0.75, 1.0, 0.0])


def test_costs_equal_up_to_rounding_are_equal():
    rewards = group_rewards([1, 1], [0.1 + 0.2, 0.3], [1, 1], [{}, {}], {"cost": 1.0})
    assert rewards.tolist() == [0.0, 0.0]


def test_weights_of_unused_tools_and_missing_weights_have_no_effect():
    group = ([1, 1, 0], [0.1, 0.2, 0.1], [1, 2, 3], [{"a": 1}, {"a": 2}, {"b": 1}])
    base = group_rewards(*group, {"outcome": 1.0, "cost": 0.5})
    more = group_rewards(*group, {"outcome": 1.0, "cost": 0.5, "never-called": 1.0, "a": 0.0})
    np.testing.assert_array_equal(base, more)


def test_guard_lifts_correct_answers_together():
    group = ([1, 1, 0], [0.2, 0.1, 0.0], [1, 1, 1], [{}] * 3, {"cost": 1.0})
    plain = group_rewards(*group)
    np.testing.assert_allclose(plain, [0.0, 0.5, 0.0])
    np.testing.assert_allclose(group_rewards(*group, guard=True), [GUARD_MARGIN, 0.5 + GUARD_MARGIN, 0.0])


@st.composite
def groups(draw):
    size = draw(st.integers(1, 6))
    amounts = st.lists(st.integers(0, 1000).map(lambda n: n / 100), min_size=size, max_size=size)
    counts = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3))
    weight = st.floats(0, 1)
    keys = st.sampled_from(["a", "b", "outcome", "cost", "latency"])
    return (
        draw(st.lists(st.sampled_from([0.0, 1.0, float("nan")]), min_size=size, max_size=size)),
        draw(amounts),
        draw(amounts),
        draw(st.lists(counts, min_size=size, max_size=size)),
        draw(st.dictionaries(keys, weight)),
    )


@given(groups(), st.sampled_from(["paper", "released"]), st.sampled_from(["group", "correct"]))
def test_guarded_right_answers_beat_wrong_ones(group, variant, scale):
    outcomes = np.array(group[0])
    rewards = group_rewards(*group, variant=variant, scale=scale, guard=True)
    np.testing.assert_array_equal(np.isnan(rewards), np.isnan(outcomes))
    assert (rewards[outcomes == 0] == 0).all()
    assert (rewards[outcomes == 1] > 0).all()


@given(groups(), st.sampled_from(["group", "correct"]))
def test_paper_reward_lies_between_0_and_the_sum_of_weights(group, scale):
    rewards = group_rewards(*group, scale=scale)
    judged = rewards[~np.isnan(rewards)]
    assert (judged >= 0).all()
    assert (judged <= sum(group[4].values()) + 1e-12).all()


@given(groups(), st.floats(0.01, 100))
def test_paper_reward_does_not_depend_on_the_currency(group, rate):
    outcomes, costs, latencies, counts, preference = group
    rewards = group_rewards(outcomes, costs, latencies, counts, preference)
    converted = group_rewards(outcomes, np.array(costs) * rate, latencies, counts, preference)
    np.testing.assert_allclose(rewards, converted, atol=1e-9)


GOOD = {
    "outcomes": [1, 0],
    "costs_usd": [0.1, 0.2],
    "latencies_s": [1, 2],
    "tool_counts": [{"a": 1}, {}],
    "preference": {"outcome": 1.0},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outcomes": [1]}, "outcomes must have shape"),
        ({"outcomes": [1, 1.5]}, "outcomes must lie"),
        ({"costs_usd": [0.1, -0.2]}, "costs_usd must be finite"),
        ({"latencies_s": [np.inf, 1]}, "latencies_s must be finite"),
        ({"tool_counts": [{"a": -1}, {}]}, "tool_counts of 'a'"),
        ({"tool_counts": [{"cost": 1}, {}]}, "cannot be called 'cost'"),
        ({"preference": {"outcome": float("nan")}}, "preference\\['outcome'\\]"),
        ({"preference": {"accuracy": 1.0}}, "called 'outcome'"),
        ({"variant": "papers"}, "variant must be"),
        ({"scale": "all"}, "scale must be"),
        ({"cost_budget_usd": 0.0}, "cost budget"),
        ({"latency_budget_s": -1.0}, "latency budget"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        group_rewards(**(GOOD | change))
