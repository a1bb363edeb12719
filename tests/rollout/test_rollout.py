"""Rollouts over the market and over foreign environments: the ledger holds what was sampled, token for token."""

from __future__ import annotations

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orchestra_envs import UnicodeText, make

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import forward, init_params
from orchestra_jax.rollout.rollout import CUT_MARKER, Job, Rollout, RolloutLimits, task_prompt_ids
from orchestra_jax.sampler.sampler import Generation, Sampler
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.tokenizer import load_tokenizer

CONFIG = preset("market-tiny", hidden_size=32, intermediate_size=64, num_layers=1, head_dim=8)
LIMITS = RolloutLimits(max_turn_tokens=12, max_observation_tokens=24)


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer("market"))


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def build(chat, make_env, rows, capacity=256):
    sampler = Sampler(
        CONFIG, rows=rows, capacity=capacity, max_new_tokens=12, stop_ids=chat.stop_ids, seed=0, dtype=jnp.float32
    )
    return Rollout(make_env, sampler, chat, tool_style="compact", limits=LIMITS)


def script(rollout, chat, turns):
    """Replaces sampling by given turns (text, or token ids for a turn that a limit cut)."""
    queue = list(turns)

    def generate(params, state, limits, temperatures, trajectories):
        turn = queue.pop(0)
        ids = chat.turn_ids(turn) if isinstance(turn, str) else turn
        rows = rollout.sampler.rows
        tokens = np.zeros((rows, max(64, len(ids))), np.int32)
        tokens[:, : len(ids)] = ids
        counts = np.full(rows, len(ids)) * (np.asarray(limits) > 0)
        stopped = np.full(rows, isinstance(turn, str))
        return Generation(tokens, np.full(tokens.shape, -0.5, np.float32), counts, stopped), state

    rollout.sampler.generate = generate
    rollout.sampler.append = lambda params, state, observations: state


def market():
    return make("orchestra/Market-v0", types=["arithmetic"])


def test_ledger_holds_prompt_and_samples_and_logprobs_are_the_trainers(chat, params):
    rollout = build(chat, market, rows=4)
    episodes = rollout.run(params, [Job(7, k, 100 + k) for k in range(4)], policy_version=5)
    observation, info = market().reset(seed=7)
    prompt = task_prompt_ids(chat, "compact", observation, info)
    for episode in episodes:
        ledger = episode.trajectory
        assert ledger.tokens[: ledger.prompt_length] == prompt
        sampled = [i for i, m in enumerate(ledger.mask) if m]
        rows = jax.nn.log_softmax(forward(CONFIG, params, jnp.asarray([ledger.tokens]))[0])
        expected = [float(rows[i - 1, ledger.tokens[i]]) for i in sampled]
        np.testing.assert_allclose([ledger.logprobs[i] for i in sampled], expected, atol=1e-4)
        assert {ledger.versions[i] for i in sampled} == {5}


def test_rows_do_not_change_the_episodes(chat, params):
    jobs = [Job(seed, 0, seed) for seed in range(5)]
    many = build(chat, market, rows=5).run(params, jobs, policy_version=0)
    few = build(chat, market, rows=2).run(params, jobs, policy_version=0)
    assert [e.trajectory.tokens for e in many] == [e.trajectory.tokens for e in few]


def test_two_turns_of_a_script(chat, params):
    rollout = build(chat, market, rows=1)
    call = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    script(rollout, chat, [call, "Answer: none"])
    (episode,) = rollout.run(params, [Job(1, 0, 0)], policy_version=0)
    assert episode.tool_counts == {"calculator": 1}
    assert episode.end_reason == "answered"
    assert episode.outcome == 0.0
    sampled = [t for t, m in zip(episode.trajectory.tokens, episode.trajectory.mask) if m]
    assert sampled == chat.turn_ids(call) + chat.turn_ids("Answer: none")


def test_turn_cut_by_the_limit_is_not_executed(chat, params):
    rollout = build(chat, market, rows=1)
    ids = chat.turn_ids('<tool_call>\n{"name": "gpt-5", "arguments": {}}\n</tool_call>')[:-1]
    script(rollout, chat, [ids])
    (episode,) = rollout.run(params, [Job(1, 0, 0)], policy_version=0)
    assert episode.end_reason == "length"
    assert not episode.answered
    assert episode.cost_usd == 0
    assert not episode.tool_counts
    assert episode.trajectory.num_sampled == len(ids)


class Foreign(gym.Env):
    """Plain Gymnasium: three steps, long observations, and on demand a fault."""

    observation_space, action_space = UnicodeText(), UnicodeText()
    fault = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return "Say something.", {}

    def step(self, action):
        if self.fault:
            raise RuntimeError("the simulator broke")
        self.left -= 1
        return "é" * 500, 0.25, self.left == 0, False, {}


def test_foreign_environment_and_long_observations(chat, params):
    rollout = build(chat, Foreign, rows=2)
    script(rollout, chat, ["a", "b", "c"])
    episodes = rollout.run(params, [Job(1, k, k) for k in range(2)], policy_version=0)
    for episode in episodes:
        assert episode.episode_return == 0.75
        assert episode.outcome is None
        observations = [turn for turn in episode.turns if turn.role == "user"]
        assert len(observations) == 2
        assert all(t.num_tokens <= 24 and t.text.endswith(CUT_MARKER) and t.text.startswith("é") for t in observations)


def test_context_full_keeps_the_earlier_turns(chat, params):
    rollout = build(chat, Foreign, rows=1, capacity=48)
    script(rollout, chat, ["a", "b", "c"])
    (episode,) = rollout.run(params, [Job(1, 0, 0)], policy_version=0)
    assert episode.end_reason == "context"
    assert not episode.answered
    assert len(episode.trajectory.tokens) <= 48


def test_fault_of_an_environment_does_not_take_the_batch(chat, params):
    rollout = build(chat, Foreign, rows=2)
    rollout.envs[0].fault = True
    script(rollout, chat, ["a", "b", "c"])
    broken, whole = rollout.run(params, [Job(1, k, k) for k in range(2)], policy_version=0)
    assert broken.infra_failure
    assert whole.end_reason == "terminated"
