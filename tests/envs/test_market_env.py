"""`orchestra/Market-v0` as an environment: checker, groups of replicas, random markets, preferences, options."""

import json
import math
import warnings

import gymnasium as gym
import numpy as np
import orchestra_envs
import pytest
from gymnasium.utils.env_checker import check_env
from orchestra_envs import ToolCall, render_call
from orchestra_envs.market.env import MarketEnv
from orchestra_envs.market.plans import keeps_all_solvable
from orchestra_envs.market.tasks import TASK_TYPES, task_from_id
from orchestra_envs.market.tools import TOOL_NAMES, market_tools
from orchestra_envs.preference import BALANCED

RANDOM_MARKET = {"randomize_tools": True, "price_spread": 4.0, "preference": "random"}


def call(name, **arguments):
    return render_call(ToolCall(name, arguments))


def offered(info):
    return {spec["function"]["name"]: spec for spec in json.loads(info["tools_json"])}


@pytest.mark.parametrize("kwargs", [{}, RANDOM_MARKET | {"split": "test"}], ids=["default", "random"])
def test_checkers_have_no_complaint(kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("orchestra/Market-v0", **kwargs).unwrapped)
    assert orchestra_envs.check("orchestra/Market-v0", **kwargs) == []


@pytest.mark.parametrize("kwargs", [{}, RANDOM_MARKET], ids=["default", "random"])
def test_group_rule(kwargs):
    """Equal seeds with different replicas: equal task, tools, prices and words; other luck of the experts."""
    env = MarketEnv(**kwargs)
    expert_results = []
    for replica in range(12):
        start = env.reset(seed=5, options={"replica": replica})
        assert start == env.reset(seed=5)
        observation, info = env.reset(seed=5, options={"replica": replica})
        expert = next(name for name in offered(info) if name not in ("calculator", "search"))
        result = env.step(call(expert))
        assert env.reset(seed=5, options={"replica": replica}) == (observation, info)
        assert env.step(call(expert)) == result
        expert_results.append((result[0], result[4]["cost_usd"], result[4]["latency_s"]))
    assert len(set(expert_results)) == 12
    assert len({env.reset(seed=seed)[0] for seed in range(100)}) > 95


def test_types_and_splits():
    for split in ("train", "test"):
        env = MarketEnv(split=split, types=["lookup", "arithmetic"])
        ids = [env.reset(seed=seed)[1]["task_id"].split("/") for seed in range(100)]
        assert {task_id[0] for task_id in ids} == {split}
        assert {task_id[1] for task_id in ids} == {"lookup", "arithmetic"}
    env = MarketEnv()
    types = [env.reset(seed=seed)[1]["task_id"].split("/")[1] for seed in range(1000)]
    assert all(140 < types.count(task_type) < 260 for task_type in TASK_TYPES)


def test_a_task_can_be_asked_for():
    observation, info = MarketEnv().reset(seed=0, options={"task_id": "test/lookup/17"})
    assert info["task_id"] == "test/lookup/17"
    assert observation == task_from_id("test/lookup/17").question


def test_solving_by_hand():
    env = MarketEnv()
    _, info = env.reset(seed=0, options={"task_id": "test/two_hop/1"})
    answer = task_from_id(info["task_id"]).answer
    first, *_ = env.step(call("search"))
    second, *_ = env.step(call("search"))
    numbers = [text.rstrip(".").split()[-1] for text in (first, second)]
    total, *_, info = env.step(call("calculator", expression=" + ".join(numbers)))
    assert int(total) == answer
    assert info["episode_cost_usd"] == pytest.approx(0.001)
    assert info["episode_latency_s"] == pytest.approx(0.65)
    _, reward, terminated, _, info = env.step(f"Answer: {total}")
    assert terminated
    assert reward == info["outcome"] == 1.0


def test_cost_follows_tokens_and_price():
    env = MarketEnv()
    for seed in range(20):
        env.reset(seed=seed)
        (record,) = json.loads(env.step(call("gpt-5"))[4]["calls_json"])
        expected = (1.25 * record["input_tokens"] + 10.0 * record["output_tokens"]) / 1e6
        assert record["cost_usd"] == pytest.approx(expected)
        assert record["text"].startswith("Answer: ")


def test_doing_nothing_scores_nothing():
    env = MarketEnv()
    for seed in range(300):
        env.reset(seed=seed)
        assert env.step("Answer: unknown")[4]["outcome"] == 0.0
        env.reset(seed=seed)
        assert env.step("I do not know.")[4]["outcome"] == 0.0


def test_random_markets_stay_solvable_and_in_range():
    env = MarketEnv(randomize_tools=True, price_spread=4.0)
    default = {tool.name: tool for tool in market_tools()}
    sizes, log_factors = set(), []
    for seed in range(300):
        specs = offered(env.reset(seed=seed)[1])
        assert keeps_all_solvable(frozenset(specs))
        sizes.add(len(specs))
        for name, spec in specs.items():
            log_factors.append(math.log(spec["latency_s"] / default[name].latency_s))
            for part, value in spec["price"].items():
                usual = getattr(default[name].price, part)
                assert usual / 4.001 <= value <= usual * 4.001
    assert sizes == set(range(2, 9))
    # Log-uniform: mean 0, standard deviation log(4) / sqrt(3).
    assert np.mean(log_factors) == pytest.approx(0, abs=0.1)
    assert np.std(log_factors) == pytest.approx(math.log(4) / math.sqrt(3), rel=0.1)
    assert min(log_factors) >= -math.log(4)
    assert max(log_factors) <= math.log(4)


def test_scaled_prices_are_charged():
    env = MarketEnv(price_spread=4.0)
    ratios = []
    for seed in range(200):
        spec = offered(env.reset(seed=seed)[1])["gpt-5"]
        (record,) = json.loads(env.step(call("gpt-5"))[4]["calls_json"])
        price = spec["price"]
        assert record["cost_usd"] == pytest.approx(
            price["per_input_token_usd"] * record["input_tokens"]
            + price["per_output_token_usd"] * record["output_tokens"]
        )
        ratios.append(record["latency_s"] / spec["latency_s"])
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.12)


def test_random_preferences_are_told_and_use_offered_tools():
    train, test = (MarketEnv(**RANDOM_MARKET, split=split) for split in ("train", "test"))
    words = {"train": set(), "test": set()}
    for seed in range(200):
        for split, env in (("train", train), ("test", test)):
            observation, info = env.reset(seed=seed)
            preference = json.loads(info["preference_json"])
            assert set(preference["weights"]) == {*offered(info), "outcome", "cost", "latency"}
            assert observation.endswith(preference["text"])
            words[split].add(preference["text"])
    assert not words["train"] & words["test"]


def test_fixed_preferences():
    observation, info = MarketEnv().reset(seed=1)
    assert json.loads(info["preference_json"]) == {
        "weights": dict.fromkeys(TOOL_NAMES, 0.0) | dict(BALANCED),
        "text": "",
    }
    assert observation == task_from_id(info["task_id"]).question
    _, info = MarketEnv(preference={"outcome": 1.0, "cost": 0.3}).reset(seed=1)
    weights = json.loads(info["preference_json"])["weights"]
    assert (weights["outcome"], weights["cost"], weights["latency"]) == (1.0, 0.3, 0.0)


def test_subset_of_tools():
    env = MarketEnv(tools=["gpt-5", "calculator"])
    assert list(offered(env.reset(seed=0)[1])) == ["calculator", "gpt-5"]
    observation, _, _, _, info = env.step(call("search"))
    assert info["error_type"] == "unknown_tool"
    assert "calculator, gpt-5" in observation


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "dev"}, "split: expected one of train, test, got 'dev'"),
        ({"types": []}, "types: expected a list of names"),
        ({"types": "lookup"}, "types: expected a list of names"),
        ({"types": ["poetry"]}, "types: expected one of arithmetic"),
        ({"tools": ["gpt-6"]}, "tools: expected one of calculator"),
        ({"tools": ["calculator"], "randomize_tools": True}, "cannot solve every type"),
        ({"price_spread": 0.5}, "price_spread: expected a finite factor of at least 1"),
        ({"price_spread": math.nan}, "price_spread"),
        ({"preference": "cheap"}, "preference: expected 'balanced', 'random'"),
        ({"preference": {"speed": 1.0}}, "preference: expected one of"),
        ({"preference": {"cost": 2.0}}, r"\[0, 1\]"),
        ({"max_turns": 0}, "max_turns"),
    ],
)
def test_bad_settings_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MarketEnv(**kwargs)


def test_vector_environments():
    envs = gym.make_vec("orchestra/Market-v0", num_envs=3, vectorization_mode="sync")
    questions, _ = envs.reset(seed=[1, 2, 2])
    assert questions[1] == questions[2] != questions[0]
    observations, *_ = envs.step([call("search")] * 3)
    assert observations[1] == observations[2]
    envs.close()
