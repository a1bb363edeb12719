"""Advantages and filters, among them the numbers of known bugs of other trainers (BR-23, BR-24, BR-34)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra_jax.rl import (
    DROP_REASONS,
    batch_advantages,
    drop_reason,
    group_advantages,
    group_drop_reasons,
    homogeneous,
)

KINDS = ("grpo", "dr_grpo", "rloo")
REWARDS = np.array([2.0, 0.5, 0.0, 1.0])


def test_formulas():
    centred = REWARDS - REWARDS.mean()
    np.testing.assert_allclose(group_advantages(REWARDS), centred / (REWARDS.std(ddof=1) + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(group_advantages(REWARDS, kind="dr_grpo"), centred, rtol=1e-12)
    others = [np.delete(REWARDS, i).mean() for i in range(len(REWARDS))]
    np.testing.assert_allclose(group_advantages(REWARDS, kind="rloo"), REWARDS - others, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reward", "size"), [(0.1, 3), (0.1, 7), (0.3, 12), (1.0, 1)])
def test_identical_rewards_give_exact_zeros(kind, reward, size):
    """BR-23: the mean of equal, non-dyadic floats may be off by an ulp, which a small eps blows up."""
    advantages = group_advantages(np.full(size, reward, np.float32), kind=kind, eps=1e-8)
    assert advantages.tolist() == [0.0] * size
    assert group_advantages([reward] * size, kind=kind, eps=0.0).tolist() == [0.0] * size


def test_nan_reward_does_not_poison_its_group():
    """BR-24, with the sample standard deviation."""
    advantages = group_advantages([1, np.nan, 0, 0], eps=1e-4)
    np.testing.assert_allclose(advantages, [1.1545, 0, -0.5773, -0.5773], atol=1e-4)
    assert advantages[1] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_rows_are_as_if_absent(kind):
    rewards = [2.0, 99.0, 0.5, np.nan, 0.0, 1.0]
    valid = [True, False, True, True, True, True]
    advantages = group_advantages(rewards, kind=kind, valid=valid)
    np.testing.assert_array_equal(advantages[[0, 2, 4, 5]], group_advantages(REWARDS, kind=kind))
    assert advantages[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_valid_gives_zeros(kind):
    assert group_advantages([np.nan, np.nan], kind=kind).tolist() == [0.0, 0.0]
    assert group_advantages([], kind=kind).tolist() == []
    assert group_advantages([1.0, 0.0], kind=kind, valid=[True, False]).tolist() == [0.0, 0.0]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_the_order(rewards, kind):
    advantages = group_advantages(rewards, kind=kind)
    assert abs(advantages.sum()) < 1e-6
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()


def test_batch_treats_each_group_alone():
    rewards = np.array([1.0, 5.0, 0.0, 7.0, 0.5, 7.5])
    groups = np.array([0, 1, 0, 1, 0, 1])
    for kind in KINDS:
        advantages = batch_advantages(rewards, groups, kind=kind)
        for group in (0, 1):
            expected = group_advantages(rewards[groups == group], kind=kind)
            np.testing.assert_array_equal(advantages[groups == group], expected)


def test_reinforce_pp_normalises_over_the_batch():
    rewards = np.array([1.0, 0.0, 5.0, 9.0, np.nan, 3.0, 3.0])
    groups = np.array([0, 0, 1, 1, 1, 2, 2])
    centred = np.array([0.5, -0.5, -2.0, 2.0, 0.0, 0.0])
    expected = centred / (centred.std(ddof=1) + 1e-6)
    advantages = batch_advantages(rewards, groups, kind="reinforce_pp")
    np.testing.assert_allclose(advantages, [*expected[:4], 0.0, *expected[4:]], rtol=1e-12)
    assert batch_advantages([0.1] * 6, [0, 0, 0, 1, 1, 1], kind="reinforce_pp").tolist() == [0.0] * 6


def test_errors():
    with pytest.raises(ValueError, match="batch_advantages"):
        group_advantages(REWARDS, kind="reinforce_pp")
    with pytest.raises(ValueError, match="kind must be"):
        group_advantages(REWARDS, kind="ppo")
    with pytest.raises(ValueError, match="kind must be"):
        batch_advantages(REWARDS, [0, 0, 1, 1], kind="ppo")
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, np.inf])
    with pytest.raises(ValueError, match="valid must have"):
        group_advantages(REWARDS, valid=[True])
    with pytest.raises(ValueError, match="one dimension"):
        group_advantages([REWARDS])
    with pytest.raises(ValueError, match="group_ids"):
        batch_advantages(REWARDS, [0, 1])


def test_homogeneous_uses_the_sample_deviation():
    assert homogeneous([0.0, 0.0, 0.0])
    assert not homogeneous([0.0, 1.0])
    # Sample standard deviation 0.1061, population standard deviation 0.075.
    assert not homogeneous([0.0, 0.15])
    assert homogeneous([0.0, 0.15], threshold=0.11)
    assert homogeneous([0.0, np.nan]), "one judged reward cannot differ from anything"
    assert homogeneous([0.0, 1.0], valid=[True, False])


def test_drop_reasons_by_precedence():
    assert drop_reason(1.0) == ""
    assert drop_reason(0.0, answered=False) == "no_answer"
    assert drop_reason(0.0, answered=False, format_error=True) == "format_error"
    assert drop_reason(float("nan"), format_error=True) == "unscorable"
    assert drop_reason(float("nan"), infra=True) == "infra"


def test_group_drop_reasons():
    """BR-34: infra failures are neither reward 0 nor part of the statistics."""
    reasons = group_drop_reasons(
        [1.0, 0.0, 0.0, 0.0, np.nan, 0.0],
        format_errors=[False, False, True, False, False, False],
        answered=[True, True, True, False, True, True],
        infra=[False, False, False, False, False, True],
    )
    assert reasons == ("", "", "format_error", "no_answer", "unscorable", "infra")
    assert set(reasons) - {""} <= set(DROP_REASONS)
    # Without the infra row's 0 the rest is homogeneous.
    assert group_drop_reasons([1.0, 1.0, 0.0], infra=[False, False, True]) == ("homogeneous", "homogeneous", "infra")
    assert group_drop_reasons([1.0, 1.0, 0.0]) == ("", "", "")
    with pytest.raises(ValueError, match="answered must have"):
        group_drop_reasons([1.0, 0.0], answered=[True])
