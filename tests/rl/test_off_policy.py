"""Off-policy estimates: against sums over every possible trajectory, and against the market's simulated truth."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from orchestra_jax.rl.off_policy import (
    ESTIMATORS,
    Logged,
    compare,
    difference_interval,
    effective_sample_size,
    estimate_interval,
    estimate_value,
    fit_values,
    logged,
)

sys.path.insert(0, str(Path(__file__).parent))
from routed_market import HABIT, THRIFTY, Log, market, play, true_values

BEHAVIOR = np.array([0.5, 0.25, 0.25])
TARGET = np.array([0.25, 0.25, 0.5])
PAYS = np.array([0.0, 1.0, 3.0])
"""A bandit with three arms: the behaviour earns 1, the target 1.75."""


def bandit(num: int, seed: int = 0) -> tuple[Logged, np.ndarray, np.ndarray]:
    arms = np.random.default_rng(seed).choice(3, size=num, p=BEHAVIOR)
    return logged(np.log(TARGET / BEHAVIOR)[arms][:, None], np.ones((num, 1))), PAYS[arms][:, None], arms


def all_two_step_trajectories() -> tuple[Logged, np.ndarray, np.ndarray, float]:
    """Every trajectory of a small decision process, each as often as the behaviour makes it (in 64ths).

    Step 1 draws a in {0, 1}; after a = 0 the trajectory ends at once. Step 2 draws b in {0, 1}. Returns the data,
    rewards, the kinds of decisions, and the target's true value.
    """
    b1, b2, t1, t2 = np.array([0.5, 0.5]), np.array([0.25, 0.75]), np.array([0.25, 0.75]), np.array([0.5, 0.5])
    pay1, pay2 = np.array([1.0, 2.0]), np.array([-1.0, 5.0])
    ratios, mask, rewards, kinds = [], [], [], []
    for a, b in itertools.product((0, 1), (0, 1)):
        copies = round(64 * b1[a] * b2[b])
        long = a == 1
        for _ in range(copies):
            ratios.append([np.log(t1[a] / b1[a]), np.log(t2[b] / b2[b]) if long else 0.0])
            mask.append([True, long])
            rewards.append([pay1[a], pay2[b] if long else np.nan])
            kinds.append([a, b])
    truth = float(t1 @ pay1 + t1[1] * (t2 @ pay2))
    return logged(ratios, mask), np.array(rewards), np.array(kinds), truth


@pytest.mark.parametrize("kind", ["is", "pdis", "wis", "pdwis"])
def test_the_mean_over_all_trajectories_is_the_true_value(kind):
    data, rewards, _, truth = all_two_step_trajectories()
    assert estimate_value(data, rewards, kind) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("kind", ["dr", "wdr"])
def test_doubly_robust_is_right_whatever_the_guess_if_it_is_consistent(kind):
    data, rewards, kinds, truth = all_two_step_trajectories()
    guess = np.array([[0.3, -2.0], [4.0, 1.5]])  # of decision k at step t: guess[t][k]
    q = np.stack([guess[0][kinds[:, 0]], guess[1][kinds[:, 1]]], axis=1)
    v = np.stack([np.full(64, 0.25 * 0.3 - 0.75 * 2.0), np.full(64, 0.5 * 4.0 + 0.5 * 1.5)], axis=1)
    assert estimate_value(data, rewards, kind, q=q, v=v) == pytest.approx(truth, abs=1e-12)


def test_estimates_of_three_samples_by_hand():
    data = logged(np.log([[2.0], [0.5], [1.5]]), np.ones((3, 1)))
    rewards = np.array([[3.0], [1.0], [0.0]])
    assert estimate_value(data, rewards, "is") == pytest.approx((6 + 0.5) / 3)
    assert estimate_value(data, rewards, "wis") == pytest.approx(6.5 / 4)
    assert effective_sample_size([2.0, 0.5, 1.5]) == pytest.approx(16 / 6.5)
    q = v = np.full((3, 1), 2.0)
    assert estimate_value(data, rewards, "dr", q=q, v=v) == pytest.approx(2 + (2 * 1 + 0.5 * -1 + 1.5 * -2) / 3)
    assert estimate_value(data, rewards, "wdr", q=q, v=v) == pytest.approx(2 + (2 * 1 + 0.5 * -1 + 1.5 * -2) / 4)


def test_the_effective_sample_of_equal_and_of_single_weights():
    assert effective_sample_size(np.full(7, 1e200)) == pytest.approx(7)
    assert effective_sample_size([0.0, 3.0, 0.0]) == pytest.approx(1)
    assert effective_sample_size([0.0, 0.0]) == 0.0


def test_a_decision_that_the_target_never_makes_has_weight_zero():
    data = logged([[-np.inf], [np.log(2)]], np.ones((2, 1)))
    assert estimate_value(data, np.array([[100.0], [3.0]]), "is") == pytest.approx(3.0)
    assert estimate_value(data, np.array([[100.0], [3.0]]), "wis") == pytest.approx(3.0)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_same_policy_has_the_mean_of_the_log(kind):
    _, rewards, _ = bandit(50)
    same = logged(np.zeros((50, 1)), np.ones((50, 1)))
    q, v = fit_values(np.zeros((50, 1, 1)), rewards, same)
    value = estimate_value(same, rewards, kind, q=q, v=v)
    assert value == pytest.approx(float(rewards.mean()), abs=1e-12)  # whatever the fitted value is: it cancels


def test_large_samples_come_near_the_bandits_value():
    data, rewards, arms = bandit(20_000)
    probs = np.broadcast_to(TARGET, (20_000, 1, 3))
    q, v = fit_values(np.zeros((20_000, 1, 1)), rewards, data, decisions=arms[:, None], target_probs=probs)
    for kind in ESTIMATORS:
        assert estimate_value(data, rewards, kind, q=q, v=v) == pytest.approx(1.75, abs=0.05)
    # A bandit's value is a sum that the fit gets right: nothing is left to chance but the arms' means.
    assert estimate_value(data, rewards, "dr", q=q, v=v) == pytest.approx(1.75, abs=1e-3)


def test_a_fitted_value_narrows_the_interval_and_pairing_narrows_the_difference():
    log = play(market(), HABIT, list(range(150)), np.random.default_rng(0))
    data = logged(log.log_ratios(THRIFTY), log.mask)
    cost = log.rewards["cost_usd"]
    q, v = fit_values(log.features(), cost, data, decisions=log.kinds, target_probs=log.probs_under(THRIFTY))
    by_weights = estimate_interval(data, cost, "wis")
    fitted = estimate_interval(data, cost, "wdr", q=q, v=v)
    assert fitted.high - fitted.low < 0.8 * (by_weights.high - by_weights.low)
    difference = difference_interval(data, cost, "wdr", q=q, v=v)
    assert difference.high < 0
    assert difference.low < difference.value < difference.high
    assert difference.value == pytest.approx(fitted.value - cost.sum(axis=1).mean())


def test_a_task_is_resampled_with_all_its_trajectories():
    data, rewards, _ = bandit(100)
    tenfold = logged(
        np.repeat(data.log_ratios, 10, axis=0), np.ones((1000, 1)), [f"task {i}" for i in range(100) for _ in range(10)]
    )
    alone = estimate_interval(data, rewards, "wis", num_resamples=500)
    together = estimate_interval(tenfold, np.repeat(rewards, 10, axis=0), "wis", num_resamples=500)
    assert together.value == pytest.approx(alone.value)
    assert together.high - together.low == pytest.approx(alone.high - alone.low, rel=0.02)


def test_one_task_alone_has_no_interval():
    data = logged(np.zeros((3, 1)), np.ones((3, 1)), ["a", "a", "a"])
    found = estimate_interval(data, np.array([[1.0], [2.0], [3.0]]), "wis")
    assert (found.value, found.low, found.high) == (2.0, -np.inf, np.inf)


def fitted(log: Log, data: Logged) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    options = {"decisions": log.kinds, "target_probs": log.probs_under(THRIFTY)}
    return {name: fit_values(log.features(), reward, data, **options) for name, reward in log.rewards.items()}


def test_a_report_concludes_where_the_sample_is_large_enough():
    log = play(market(), HABIT, list(range(300)), np.random.default_rng(1))
    data = logged(log.log_ratios(THRIFTY), log.mask)
    report = compare(data, log.rewards, values=fitted(log, data), bounds={"accuracy": (0, 1)}, num_resamples=200)
    assert report["refused"] is None
    assert report["ess"] > 100
    assert report["quantities"]["cost_usd"]["verdict"] == "lower"
    assert set(report["quantities"]["accuracy"]["estimates"]) == set(ESTIMATORS)
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("num", [8, 300])
def test_a_report_refuses_where_it_is_too_small(num):
    data, rewards, _ = bandit(num)
    ratios = data.log_ratios.copy()
    ratios[1:] = -20.0  # all weight on one trajectory
    data = logged(ratios, data.mask)
    report = compare(data, {"reward": rewards}, values={"reward": (rewards, rewards)}, num_resamples=50)
    assert f"of {num} trajectories" in report["refused"]
    entry = report["quantities"]["reward"]
    assert entry["verdict"] == "refused"
    assert entry["difference"] is None
    assert set(entry["estimates"].values()) == {None}
    assert entry["behavior"]["value"] == pytest.approx(float(rewards.mean()))
    json.dumps(report, allow_nan=False)


def test_a_report_says_that_there_is_no_support():
    data = logged(np.full((20, 1), -np.inf), np.ones((20, 1)))
    report = compare(data, {"reward": np.ones((20, 1))}, values={}, num_resamples=50)
    assert "never does what was logged" in report["refused"]


@pytest.mark.parametrize(
    ("ratios", "mask", "says"),
    [
        ([[0.0], [np.nan]], [[1], [1]], "trajectory 1"),
        ([[0.0, np.inf]], [[1, 1]], "trajectory 0"),
        ([[0.0, 0.0]], [[0, 1]], "stand first"),
        ([[0.0]], [[0]], "at least one decision"),
        ([0.0], [1], "N, T"),
    ],
)
def test_wrong_logs_are_told(ratios, mask, says):
    with pytest.raises(ValueError, match=says):
        logged(ratios, mask)


def test_what_was_not_logged_is_not_read():
    data = logged([[0.0, np.nan]], [[1, 0]])
    assert estimate_value(data, np.array([[2.0, np.nan]]), "pdwis") == 2.0


def test_wrong_calls_are_told():
    data, rewards, _ = bandit(4)
    with pytest.raises(ValueError, match="estimator must be one of"):
        estimate_value(data, rewards, "best")
    with pytest.raises(ValueError, match="needs q and v"):
        estimate_value(data, rewards, "dr")
    with pytest.raises(ValueError, match="shape"):
        estimate_value(data, rewards[:2], "is")
    with pytest.raises(ValueError, match="at least two tasks"):
        fit_values(np.zeros((4, 1, 1)), rewards, logged(np.zeros((4, 1)), np.ones((4, 1)), ["a"] * 4))
    with pytest.raises(ValueError, match="both decisions and target_probs"):
        fit_values(np.zeros((4, 1, 1)), rewards, data, decisions=np.zeros((4, 1), int))


def test_intervals_cover_the_truth_of_the_market_in_about_95_of_100_logs():
    """True values are those of 8,000 simulated tasks: their own error is a tenth of an interval's width."""
    env, repetitions, size = market(), 100, 120
    truth = true_values(env, THRIFTY, 8000, seed=1)
    rng = np.random.default_rng(0)
    covered = {(name, kind): 0 for name in truth for kind in ESTIMATORS}
    for repetition in range(repetitions):
        log = play(env, HABIT, rng.integers(0, 2**30, size).tolist(), rng)
        data = logged(log.log_ratios(THRIFTY), log.mask)
        values = fitted(log, data)
        for name, kind in covered:
            q, v = values[name]
            found = estimate_interval(data, log.rewards[name], kind, q=q, v=v, num_resamples=200, seed=repetition)
            covered[name, kind] += found.low <= truth[name] <= found.high
    assert min(covered.values()) >= 88, covered
    assert 92 <= np.mean(list(covered.values())) <= 99, covered
