"""Statistics of evaluations against closed formulas and published numbers."""

import json
import math

import numpy as np
import pytest

from orchestra_jax.eval.evaluate import add_preference_scores
from orchestra_jax.eval.stats import (
    accuracy_interval,
    bootstrap_ci,
    holm,
    mcnemar_p,
    paired_difference,
    pass_hat_k,
    permutation_p,
    summarize,
    wilson_interval,
)

Z95 = 1.959963984540054


def episode(task_id, outcome, cost_usd=0.01, latency_s=1.0, **extra):
    return {"task_id": task_id, "outcome": outcome, "cost_usd": cost_usd, "latency_s": latency_s, **extra}


def test_wilson_matches_published_values():
    # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_solves_the_score_equation():
    # Both ends solve |p_hat - p| = z * sqrt(p (1 - p) / n).
    for end in wilson_interval(37, 50, level=0.95):
        assert abs(0.74 - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / 50), rel=1e-9)


def test_wilson_is_never_a_point_and_stays_inside_the_unit_interval():
    assert wilson_interval(10, 10)[1] == 1.0
    assert wilson_interval(10, 10)[0] == pytest.approx(10 / (10 + Z95**2))
    assert wilson_interval(0, 10)[0] == 0.0


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5), (1, math.inf)])
def test_wilson_rejects_impossible_counts(successes, trials):
    with pytest.raises(ValueError, match=r"num_(trials|successes)"):
        wilson_interval(successes, trials)


def test_bootstrap_agrees_with_the_normal_interval():
    x = np.random.default_rng(1).normal(3.0, 2.0, size=900)
    low, high = bootstrap_ci(x, num_resamples=8000)
    half_width = Z95 * x.std() / math.sqrt(len(x))
    assert low == pytest.approx(x.mean() - half_width, abs=0.06 * half_width)
    assert high == pytest.approx(x.mean() + half_width, abs=0.06 * half_width)


def test_bootstrap_is_exact_for_two_values():
    # Resampled means of (0, 1) are 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_ci([0.0, 1.0], level=0.95) == (0.0, 1.0)
    assert bootstrap_ci([0.0, 1.0], level=0.40) == (0.5, 0.5)


def test_bootstrap_resamples_tasks_and_not_episodes():
    per_task = np.random.default_rng(2).normal(size=40)
    copies = np.repeat(per_task, 8)
    tasks = [f"task-{i}" for i in range(40) for _ in range(8)]
    assert bootstrap_ci(copies, tasks) == pytest.approx(bootstrap_ci(per_task))
    naive_low, naive_high = bootstrap_ci(copies)
    low, high = bootstrap_ci(copies, tasks)
    assert (high - low) / (naive_high - naive_low) == pytest.approx(math.sqrt(8), rel=0.1)


def test_bootstrap_weighs_unequal_tasks_by_their_episodes():
    # Task a: three episodes of 0; task b: one of 1. Resamples: aa -> 0, ab -> 1/4, bb -> 1.
    values, tasks = [0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b"]
    assert bootstrap_ci(values, tasks, level=0.40) == (0.25, 0.25)
    assert bootstrap_ci(values, tasks) == (0.0, 1.0)


def test_bootstrap_does_not_depend_on_chunks(monkeypatch):
    x = np.random.default_rng(3).normal(size=50)
    whole = bootstrap_ci(x, num_resamples=500)
    monkeypatch.setattr("orchestra_jax.eval.stats._MAX_INDICES_AT_ONCE", 333)
    assert bootstrap_ci(x, num_resamples=500) == whole


def test_bootstrap_covers_the_true_mean():
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(300):
        values = np.repeat(rng.normal(size=50), 4) + rng.normal(size=200)
        low, high = bootstrap_ci(values, [i // 4 for i in range(200)], num_resamples=400)
        hits += low <= 0.0 <= high
    assert 0.90 <= hits / 300 <= 0.98


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": []}, "non-empty"),
        ({"values": [[1.0]]}, "one-dimensional"),
        ({"values": [1.0, math.nan]}, "entry 1"),
        ({"values": [1.0, 2.0], "clusters": ["a"]}, "clusters has 1"),
        ({"values": [1.0], "level": 95}, "level"),
        ({"values": [1.0], "num_resamples": 0}, "num_resamples"),
    ],
)
def test_bootstrap_rejects_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_ci(**arguments)


def test_accuracy_of_single_episodes_is_wilson():
    assert accuracy_interval([1, 1, 0, 1], ["a", "b", "c", "d"]) == wilson_interval(3, 4)
    assert accuracy_interval([1, 1, 0, 1]) == wilson_interval(3, 4)


def test_accuracy_of_copied_episodes_counts_tasks():
    # Replicas that always agree carry no information: as wide as one episode per task (up to C / (C - 1)).
    outcomes = np.array([1] * 30 + [0] * 10)
    tasks = [i for i in range(40) for _ in range(16)]
    low, high = accuracy_interval(np.repeat(outcomes, 16), tasks)
    assert (low, high) == pytest.approx(wilson_interval(0.75 * 39, 39), abs=1e-9)


def test_accuracy_of_independent_replicas_counts_nearly_all_episodes():
    outcomes = np.random.default_rng(5).random(4000) < 0.7
    tasks = [i for i in range(1000) for _ in range(4)]
    low, high = accuracy_interval(outcomes, tasks)
    wilson_low, wilson_high = wilson_interval(float(outcomes.sum()), 4000)
    assert (high - low) / (wilson_high - wilson_low) == pytest.approx(1.0, abs=0.1)


def test_accuracy_is_no_point_when_all_agree():
    assert accuracy_interval([1] * 32, [0, 1, 2, 3] * 8) == wilson_interval(4, 4)
    assert accuracy_interval([1, 0, 1], ["a", "a", "a"])[1] > 0.9


def test_graded_outcomes_use_the_bootstrap_and_must_be_shares():
    graded = [0.25, 0.5, 1.0]
    assert accuracy_interval(graded) == bootstrap_ci(graded)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        accuracy_interval([0.0, 1.5])


def test_paired_difference_removes_what_the_tasks_share():
    rng = np.random.default_rng(6)
    difficulty = rng.normal(size=200)
    a, b = difficulty + 0.1 + 0.1 * rng.normal(size=200), difficulty
    result = paired_difference(a, b)
    assert result.difference == pytest.approx((a - b).mean())
    half_width = Z95 * (a - b).std() / math.sqrt(200)
    assert result.high - result.low == pytest.approx(2 * half_width, rel=0.08)
    assert result.significant
    assert result.num_tasks == 200


def test_paired_difference_of_equals_is_zero_and_not_significant():
    result = paired_difference([0.0, 1.0, 1.0], [0.0, 1.0, 1.0], ["a", "a", "b"])
    assert (result.difference, result.low, result.high, result.num_tasks) == (0.0, 0.0, 0.0, 2)
    assert not result.significant


def test_paired_difference_needs_pairs():
    with pytest.raises(ValueError, match="2 episodes and values_b 1"):
        paired_difference([1.0, 2.0], [1.0])


def test_summarize_gives_means_intervals_and_counts():
    records = [
        episode("a", 1.0, 0.02, 2.0, preference=1.0, tool_counts={"search": 1}),
        episode("a", 0.0, 0.04, 4.0, preference=0.0, tool_counts={"search": 2, "gpt-5": 1}),
        episode("b", 1.0, 0.06, 6.0, preference=2.0, tool_counts={}),
        episode("c", 1.0, 9.00, 9.0, end_reason="infra_error"),
    ]
    entry = summarize(records)
    assert entry["accuracy"] == pytest.approx(2 / 3)
    assert entry["cost_usd"] == pytest.approx(0.04)
    assert entry["latency_s"] == pytest.approx(4.0)
    assert entry["preference"] == pytest.approx(1.0)
    assert entry["cost_per_solved_usd"] == pytest.approx(0.06)
    assert entry["tools"] == {"gpt-5": pytest.approx(1 / 3), "search": pytest.approx(1.0)}
    assert (entry["num_episodes"], entry["num_tasks"], entry["num_infra_errors"]) == (3, 2, 1)
    # Tasks a and b resampled: mean cost is .03 (aa), .04 (ab) or .06 (bb); per solved task always .06.
    assert entry["ci95"]["cost_usd"] == pytest.approx([0.03, 0.06])
    assert entry["ci95"]["cost_per_solved_usd"] == pytest.approx([0.06, 0.06])
    assert entry["ci95"]["accuracy"][0] < 2 / 3 < entry["ci95"]["accuracy"][1]


def test_summarize_without_preference_or_success():
    entry = summarize([episode("a", 0.0), episode("b", 0.0)])
    assert entry["preference"] is None
    assert entry["ci95"]["preference"] is None
    assert entry["cost_per_solved_usd"] is None
    assert entry["ci95"]["accuracy"] == [0.0, pytest.approx(Z95**2 / (2 + Z95**2))]


def test_summarize_says_when_the_cost_per_solved_task_has_no_upper_end():
    entry = summarize([episode("a", 1.0), episode("b", 0.0)])
    assert entry["cost_per_solved_usd"] == pytest.approx(0.02)
    assert entry["ci95"]["cost_per_solved_usd"] == [pytest.approx(0.01), None]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no episode"),
        ([episode("a", 1.0), episode("b", None)], "episode 1 has no 'outcome'"),
        ([{"outcome": 1.0}], "episode 0 has no 'task_id'"),
        ([episode("a", 1.0, cost_usd="cheap")], "cost_usd must be a number"),
        ([episode("a", 1.0, latency_s=math.inf)], "latency_s must be finite"),
    ],
)
def test_summarize_names_record_and_field(records, message):
    with pytest.raises(ValueError, match=message):
        summarize(records)


def dropped(count):
    return [episode(f"dropped {number}", 0.0, end_reason="infra_error") for number in range(count)]


def test_a_policy_whose_episodes_were_all_dropped_has_a_row_without_numbers():
    entry = summarize(dropped(3))
    for key in ("accuracy", "cost_usd", "latency_s", "preference", "cost_per_solved_usd"):
        assert entry[key] is None
        assert entry["ci95"][key] is None
    assert (entry["num_episodes"], entry["num_tasks"], entry["num_infra_errors"]) == (0, 0, 3)
    assert entry["tools"] == {}
    assert "accuracy is not known, it would count none of 3 episodes" in entry["warning"]
    json.dumps(entry, allow_nan=False)


def test_no_accuracy_where_most_episodes_were_dropped():
    entry = summarize([episode("a", 1.0, 0.02, preference=1.0), *dropped(2)])
    assert (entry["accuracy"], entry["preference"], entry["cost_per_solved_usd"]) == (None, None, None)
    assert entry["ci95"]["accuracy"] is None
    assert entry["cost_usd"] == pytest.approx(0.02)
    assert "it would count only 1 of 3 episodes" in entry["warning"]


def test_some_dropped_episodes_are_warned_of():
    entry = summarize([episode("a", 1.0), *dropped(1)])
    assert entry["accuracy"] == 1.0
    assert entry["warning"].startswith("accuracy counts 1 of 2 episodes: the others were dropped as infra_error")
    assert summarize([episode("a", 1.0)])["warning"] is None


def test_a_dropped_episode_is_nothing_to_compare_with():
    reference = [{**episode("a", 0.0, end_reason="infra_error"), "seed": 0}, {**episode("b", 0.0), "seed": 1}]
    records = [{**episode(name, 1.0), "seed": seed} for seed, name in enumerate("ab")]
    for record in [*reference, *records]:
        record.update(weights={}, tool_counts={})
    add_preference_scores(records, reference)
    assert records[0]["preference"] is None
    assert records[1]["preference"] > 0
    assert summarize(records)["preference"] == records[1]["preference"]


def test_pass_hat_k_is_the_share_of_draws_that_all_succeed():
    # tau-bench (arXiv 2406.12045), section 3: C(c, k) / C(n, k).
    assert [pass_hat_k(4, 3, k) for k in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    from itertools import combinations

    trials = [1, 1, 0, 1, 0, 1]
    for k in range(1, 7):
        draws = list(combinations(trials, k))
        assert pass_hat_k(6, sum(trials), k) == pytest.approx(sum(map(all, draws)) / len(draws))
    with pytest.raises(ValueError, match="k=5, n=4"):
        pass_hat_k(4, 2, 5)


def test_permutation_test_counts_all_sign_flips_of_few_tasks():
    # Sums over the flips of (1, 2, 3): 6, 4, 2, 0, 0, -2, -4, -6; as extreme as 6: two of eight.
    assert permutation_p([1.0, 2.0, 3.0]) == 2 / 8
    assert permutation_p([1.0, 2.0, -3.0]) == 1.0
    assert permutation_p([0.0, 0.0]) == 1.0


def test_permutation_test_flips_tasks_and_not_episodes():
    # Two tasks with the same difference: half of the flips are as extreme, however many episodes tell it.
    differences, tasks = [1.0] * 6, ["a"] * 3 + ["b"] * 3
    assert permutation_p(differences, tasks) == 0.5
    assert permutation_p(differences) == 2 / 64


def test_drawn_permutations_agree_with_the_normal_approximation_and_do_not_depend_on_chunks(monkeypatch):
    x = np.random.default_rng(8).normal(0.1, 1.0, size=400)
    z = abs(x.sum()) / math.sqrt(float(x @ x))
    p = permutation_p(x)
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)
    monkeypatch.setattr("orchestra_jax.eval.stats._MAX_INDICES_AT_ONCE", 4001)
    assert permutation_p(x) == p
    assert permutation_p(np.abs(x)) == 1 / 10_001  # never 0: the observed one is one of them


def test_permutation_test_keeps_its_level():
    rng = np.random.default_rng(9)
    rejected = sum(permutation_p(rng.normal(size=30), num_permutations=400, seed=i) < 0.05 for i in range(400))
    assert 0.02 <= rejected / 400 <= 0.08


def test_mcnemar_is_the_exact_binomial_test():
    # Agresti, Categorical Data Analysis (2nd ed.), section 10.1: 86 and 150 discordant pairs, z^2 = 17.4.
    assert mcnemar_p(86, 150) == pytest.approx(3.7e-5, rel=0.1)
    assert mcnemar_p(0, 5) == 2 / 32
    assert mcnemar_p(3, 3) == 1.0
    assert mcnemar_p(0, 0) == 1.0


def test_holm_steps_down():
    # Sorted .01, .02, .03, .04 are multiplied by 4, 3, 2, 1 and never fall.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_summarize_tells_pass_hat_k_of_repeated_trials():
    outcomes = {"a": [1, 1, 1], "b": [1, 0, 1], "c": [0, 0, 0]}
    records = [
        episode(task, float(outcome), number=number, trial=trial)
        for number, (task, trials) in enumerate(outcomes.items())
        for trial, outcome in enumerate(trials)
    ]
    entry = summarize(records)
    assert entry["pass_hat_k"] == pytest.approx([5 / 9, (1 + 1 / 3) / 3, 1 / 3])
    assert entry["pass_hat_k"][0] == pytest.approx(entry["accuracy"])
    assert len(entry["ci95"]["pass_hat_k"]) == 3
    # A dropped trial leaves its task with two: pass^3 is over the others.
    records[0]["end_reason"] = "infra_error"
    assert summarize(records)["pass_hat_k"] == pytest.approx([(1 + 2 / 3) / 3, (1 + 1 / 3) / 3, 0.0])
    assert "pass_hat_k" not in summarize(records[::3])


def test_summarize_tells_shares_of_calls_and_ends():
    records = [
        episode("a", 1.0, tool_counts={"search": 3}, end_reason="answered"),
        episode("b", 1.0, tool_counts={"gpt-5": 1}, end_reason="max_turns"),
    ]
    entry = summarize(records)
    assert entry["tool_shares"] == {"gpt-5": 0.25, "search": 0.75}
    assert entry["end_reasons"] == {"answered": 1, "max_turns": 1}


def test_preference_scores_are_in_cents_and_minutes():
    # The reference case "positive magnitudes": 2 / 1 + 1 / 1 + 20 / 5 + 0.5 * 5 / 2 = 8.25.
    def record(tools, outcome, cost_usd, latency_s):
        weights = {"t1": 1.0, "t2": 0.0, "outcome": 1.0, "cost": 1.0, "latency": 0.5}
        numbers = {"outcome": outcome, "cost_usd": cost_usd, "latency_s": latency_s}
        return {"seed": 1, "trial": 0, "tool_counts": tools, "weights": weights, **numbers}

    records = [record({"t1": 2}, 1.0, 0.05, 120.0)]
    add_preference_scores(records, [record({"t1": 1, "t2": 3}, 0.0, 0.20, 300.0)])
    assert records[0]["preference"] == pytest.approx(8.25)
    other_trial = [{**records[0], "trial": 1}]
    add_preference_scores(other_trial, records)
    assert other_trial[0]["preference"] is None
