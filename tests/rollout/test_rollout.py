"""Rollouts over the market and over foreign environments: the ledger holds what was sampled, token for token."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orchestra_envs import Task, ToolCall, ToolEnv, UnicodeText, make, render_call, tool

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import forward, init_params
from orchestra_jax.rollout.rollout import CUT_MARKER, Job, Rollout, RolloutLimits, task_prompt_ids
from orchestra_jax.sampler.engine import Engine, SampledTurn
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
    engine = Engine(
        CONFIG, slots=rows, capacity=capacity, stop_ids=chat.stop_ids, seed=0, dtype=jnp.float32, steps=8, chunk=256
    )
    return Rollout(make_env, engine, chat, tool_style="compact", limits=LIMITS)


class ScriptedEngine:
    """In place of the engine: every conversation gets the given turns (text, or token ids of a turn that was cut)."""

    def __init__(self, engine, chat, turns):
        self.slots, self.capacity = engine.slots, engine.capacity
        self.turns = [(chat.turn_ids(turn), True) if isinstance(turn, str) else (turn, False) for turn in turns]
        self.queue, self.said, self.released, self.version = [], {}, [], None

    def reset(self):
        self.said = {}

    def use(self, params, version):
        self.version = version

    @property
    def busy(self):
        return bool(self.queue)

    def submit(self, request):
        assert len(request.tokens) < self.capacity
        self.queue.append(request)

    def release(self, key):
        self.released.append(key)

    def run(self):
        requests, self.queue = self.queue, []
        return list(map(self._turn, requests))

    def _turn(self, request):
        number = self.said[request.key] = self.said.get(request.key, -1) + 1
        tokens, stopped = self.turns[number]
        return SampledTurn(request.key, list(tokens), [-0.5] * len(tokens), [self.version] * len(tokens), stopped)


class FailingEngine(ScriptedEngine):
    """Its second turn fails."""

    def _turn(self, request):
        turn = super()._turn(request)
        return replace(turn, stopped=False, error="ValueError: too deep") if self.said[request.key] else turn


def script(rollout, chat, turns):
    """Replaces sampling by given turns."""
    rollout.engine = ScriptedEngine(rollout.engine, chat, turns)


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


def test_a_slow_tool_holds_up_nobody_and_tools_overlap(chat, params):
    """Six episodes on three slots: the tools of one round meet each other; a slow one waits alone."""
    order, under_way, most = [], [0], [0]

    async def wait() -> str:
        """Waits."""
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(0.3)
        under_way[0] -= 1
        return "waited"

    class Waiting(ToolEnv):
        tools = (tool(wait),)

        def sample_task(self, rng, options):
            return Task("Wait.")

        def score(self, task, answer):
            order.append(answer)
            return 1.0

    rollout = build(chat, lambda: Waiting(max_turns=3), rows=3)
    script(rollout, chat, [render_call(ToolCall("wait", {})), "Answer: done"])
    episodes = rollout.run(params, [Job(seed, 0, seed) for seed in range(6)], policy_version=0)
    assert [episode.outcome for episode in episodes] == [1.0] * 6
    assert [episode.seed for episode in episodes] == list(range(6))
    assert most[0] == 3
    assert sorted(rollout.engine.released) == list(range(6))


def test_plain_environments_are_stepped_in_threads_where_asked(chat, params):
    barrier = threading.Barrier(2, timeout=20)

    class Meeting(Foreign):
        def step(self, action):
            barrier.wait()
            return super().step(action)

    rollout = build(chat, Meeting, rows=2)
    rollout._threads = ThreadPoolExecutor(2)
    script(rollout, chat, ["a", "b", "c"])
    episodes = rollout.run(params, [Job(1, k, k) for k in range(2)], policy_version=0)
    assert [episode.end_reason for episode in episodes] == ["terminated"] * 2
    rollout.close()


def test_an_interrupt_in_a_tool_is_the_users(chat, params):
    async def stop() -> str:
        """Is interrupted."""
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    class Stopping(ToolEnv):
        tools = (tool(stop),)

        def sample_task(self, rng, options):
            return Task("Stop.")

    rollout = build(chat, Stopping, rows=1)
    script(rollout, chat, [render_call(ToolCall("stop", {}))])
    with pytest.raises(KeyboardInterrupt):
        rollout.run(params, [Job(0, 0, 0)], policy_version=0)


def test_a_turn_that_fails_in_the_sampler_ends_its_episode_as_infrastructure(chat, params):
    rollout = build(chat, market, rows=1)
    ask = render_call(ToolCall("search", {"query": "x"}))
    rollout.engine = FailingEngine(rollout.engine, chat, [ask, ask])
    (episode,) = rollout.run(params, [Job(7, 0, 1)], policy_version=0)
    assert (episode.end_reason, episode.infra_failure) == ("sampler_error", True)
    assert [turn.role for turn in episode.turns] == ["assistant", "tool", "assistant"]
    assert rollout.engine.released == [0]
