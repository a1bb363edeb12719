"""Stand-ins for prompted models, by published numbers of calls."""

import numpy as np
import pytest
from orchestra_envs.baselines import make_policy, run_episode
from orchestra_envs.market.env import MarketEnv
from orchestra_envs.market.published import CALLS_PER_TASK, WITH_EXPERTS, call_shares, draw_tool
from orchestra_envs.market.tools import TOOL_NAMES


def test_shares_are_those_of_figure_5():
    # ToolOrchestra, figure 5, for its own orchestrator: GPT-5 19.5%, mini 20.7%, Qwen3-32B 15.9%, searches 30.5%.
    shares = call_shares("orchestrator-8b")
    assert [round(100 * shares[name], 1) for name in ("gpt-5", "gpt-5-mini", "qwen3-32b", "search")] == [
        19.5,
        20.7,
        15.9,
        30.5,
    ]
    for model in CALLS_PER_TASK:
        assert sum(call_shares(model).values()) == pytest.approx(1.0)
        assert set(call_shares(model)) <= set(TOOL_NAMES)
        assert model in WITH_EXPERTS


def test_a_stand_in_calls_one_tool_by_its_share():
    env = MarketEnv(split="test")
    episodes = [run_episode(env, make_policy("published:gpt-5"), seed) for seed in range(400)]
    called = [tool for episode in episodes for tool in episode.tool_counts]
    assert len(called) == 400
    assert called.count("gpt-5-mini") / 400 == pytest.approx(5.6 / 10.0, abs=0.08)
    assert "llama-3.3-70b" not in called


def test_tools_that_are_not_offered_are_not_drawn():
    rng = np.random.default_rng(0)
    assert {draw_tool("gpt-5", ["search", "qwen3-32b"], rng) for _ in range(50)} == {"search"}
    assert {draw_tool("gpt-5", ["qwen3-32b", "llama-3.3-70b"], rng) for _ in range(50)} == {
        "qwen3-32b",
        "llama-3.3-70b",
    }


def test_an_unknown_model():
    with pytest.raises(ValueError, match="published:gpt-9: expected one of qwen3-8b"):
        make_policy("published:gpt-9")
