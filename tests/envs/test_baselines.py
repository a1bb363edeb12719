"""Scripted policies: what they call, what they answer, and their order in accuracy and cost."""

import json
from collections import Counter

import numpy as np
import pytest
from orchestra_envs import Task, ToolEnv, tool
from orchestra_envs.baselines import HABIT_SHARES, make_policy, result_value, run_episode
from orchestra_envs.market.env import MarketEnv
from orchestra_envs.market.plans import best_plan
from orchestra_envs.market.tasks import task_from_id
from orchestra_envs.market.tools import TOOL_NAMES

NUM_EPISODES = 200


@pytest.fixture(scope="module")
def env():
    return MarketEnv(split="test")


@pytest.fixture(scope="module")
def episodes(env):
    names = ("oracle", "habit", "random", "cheapest", "always:gpt-5", "always:calculator", "always:search")
    return {name: [run_episode(env, make_policy(name), seed) for seed in range(NUM_EPISODES)] for name in names}


def accuracy(episodes, task_type=""):
    return float(np.mean([episode.outcome for episode in episodes if f"/{task_type}" in episode.task_id]))


def mean_cost_usd(episodes):
    return float(np.mean([episode.cost_usd for episode in episodes]))


def test_order_of_the_baselines(episodes):
    assert accuracy(episodes["oracle"]) > 0.9
    assert 0.6 < accuracy(episodes["always:gpt-5"]) < accuracy(episodes["oracle"]) - 0.1
    assert accuracy(episodes["random"]) < accuracy(episodes["always:gpt-5"]) - 0.1
    assert mean_cost_usd(episodes["oracle"]) < mean_cost_usd(episodes["always:gpt-5"]) / 2
    assert mean_cost_usd(episodes["cheapest"]) < mean_cost_usd(episodes["oracle"]) / 10


def test_specialists_solve_their_type_alone(episodes):
    assert accuracy(episodes["always:calculator"], "arithmetic") == 1.0
    assert accuracy(episodes["always:search"], "lookup") == 1.0
    for task_type in ("lookup", "word_problem", "reasoning", "two_hop"):
        assert accuracy(episodes["always:calculator"], task_type) == 0.0


def test_an_episode_is_the_same_twice(env, episodes):
    for name in ("random", "habit"):
        assert run_episode(env, make_policy(name), 3) == episodes[name][3]
    assert run_episode(env, make_policy("always:gpt-5"), 3, replica=1) != episodes["always:gpt-5"][3]


def test_first_turn_and_last_turn(episodes):
    episode = episodes["always:search"][0]
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[1]["content"] == '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    assert episode.messages[-1]["content"] == f"Answer: {result_value(episode.messages[-2]['content'])}"
    assert episode.end_reason == "answered"
    assert episode.tool_counts == {"search": 1}
    assert episode.cost_usd == pytest.approx(0.0005)


def test_errors_are_answered_with_unknown(episodes):
    story = next(e for e in episodes["always:calculator"] if "word_problem" in e.task_id)
    assert story.messages[-1]["content"] == "Answer: unknown"
    assert story.messages[-2]["content"].startswith("Error: ")


def test_cheapest_falls_back(episodes):
    for episode in episodes["cheapest"]:
        is_arithmetic = "/arithmetic/" in episode.task_id
        expected = ["calculator"] if is_arithmetic else ["calculator", "qwen2.5-math-7b"]
        assert list(episode.tool_counts) == expected


def test_oracle_follows_its_rule(env, episodes):
    for episode in episodes["oracle"][:50]:
        plan = best_plan(task_from_id(episode.task_id), json.loads(episode.reset_info["tools_json"]))
        assert episode.tool_counts == dict(Counter(plan))


def test_habit_keeps_its_shares(env):
    """First calls over tasks for which the suitable tool is the calculator."""
    policy = make_policy("habit")
    num_draws = 1500
    observation, info = env.reset(seed=0, options={"task_id": "test/arithmetic/0"})
    first_calls: Counter[str] = Counter()
    for draw in range(num_draws):
        policy.reset(env, observation, info, np.random.default_rng(draw))
        text = policy.act(observation, info)
        first_calls[json.loads(text.split("\n")[1])["name"]] += 1
    uniform = HABIT_SHARES["random"] / len(TOOL_NAMES)
    assert first_calls["gpt-5"] / num_draws == pytest.approx(HABIT_SHARES["strongest"] + uniform, abs=0.05)
    assert first_calls["calculator"] / num_draws == pytest.approx(HABIT_SHARES["suitable"] + uniform, abs=0.05)
    assert set(first_calls) == set(TOOL_NAMES)


def test_random_markets():
    """Every policy runs where tools come and go; the oracle reads the prices of the episode."""
    env = MarketEnv(randomize_tools=True, price_spread=10.0)
    for name in ("oracle", "habit", "random", "cheapest", "always:gpt-5"):
        results = [run_episode(env, make_policy(name), seed) for seed in range(40)]
        assert all(episode.end_reason == "answered" for episode in results)
    not_offered = [e for e in results if '"gpt-5"' not in e.reset_info["tools_json"]]
    assert not_offered
    assert all(e.cost_usd == 0 and e.outcome == 0 for e in not_offered)


def test_policies_run_on_any_tool_environment():
    @tool(latency_s=1.0)
    def capital() -> str:
        """Says which city is the capital."""
        return "The capital is Oslo."

    class Cities(ToolEnv):
        tools = (capital,)

        def sample_task(self, rng, options):
            return Task("What is the capital?", answer="Oslo")

        def score(self, task, answer):
            return float(task.answer in answer)

    for name in ("always:capital", "random", "cheapest"):
        episode = run_episode(Cities(), make_policy(name), 0)
        assert episode.outcome == 1.0
        assert episode.latency_s == 1.0
    with pytest.raises(ValueError, match="split/type/index"):
        run_episode(Cities(), make_policy("oracle"), 0)


@pytest.mark.parametrize("name", ["random", "cheapest", "oracle", "habit", "always:gpt-5"])
def test_without_tools_there_is_nothing_to_choose(name):
    class Bare(ToolEnv):
        def sample_task(self, rng, options):
            return Task("2 + 2?", answer="4")

        def score(self, task, answer):
            return 0.0

    with pytest.raises(ValueError, match=f"^policy {name}: the environment offers no tools$"):
        run_episode(Bare(), make_policy(name), 0)


def test_unknown_names():
    with pytest.raises(ValueError, match="policy: expected one of always:<tool>, random"):
        make_policy("clever")
    with pytest.raises(ValueError, match="always:gtp-5: no such tool; the environment has calculator"):
        run_episode(MarketEnv(), make_policy("always:gtp-5"), 0)


@pytest.mark.parametrize(
    ("observation", "value"),
    [("Answer: 7", "7"), ("422", "422"), ("The emblem of X is owl.", "owl"), ("a\nb 12.", "12"), ("", "unknown")],
)
def test_result_value(observation, value):
    assert result_value(observation) == value
