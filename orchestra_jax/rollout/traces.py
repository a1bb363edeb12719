"""Supervised traces: episodes of scripted policies as token ledgers, the same form as sampled ones."""

from __future__ import annotations

from collections.abc import Iterable

import gymnasium as gym
import numpy as np
from orchestra_envs.baselines import Episode, make_policy, run_episode

from orchestra_jax.rollout.ledger import UNSAMPLED, Trajectory
from orchestra_jax.rollout.rollout import task_prompt_ids
from orchestra_jax.text.chat import ChatFormat


def scripted_episodes(env: gym.Env, policy: str, seeds: Iterable[int], replicas: int = 1) -> list[Episode]:
    """Episodes of the named scripted policy: `replicas` of each task, one after the other."""
    scripted = make_policy(policy)
    return [run_episode(env, scripted, seed, replica) for seed in seeds for replica in range(replicas)]


def trace_to_trajectory(chat: ChatFormat, tool_style: str, episode: Episode) -> Trajectory:
    """The ledger of a scripted episode: its assistant turns are what is learned (mask 1).

    The tokens were not sampled by a policy, so their logprobs are 0.0 and a supervised loss must not read them.
    """
    question, *messages = episode.messages
    prompt = task_prompt_ids(chat, tool_style, question["content"], episode.reset_info)
    return _ledger(chat, prompt, messages)


DRILL_RESULTS = ("Answer: {}", "{}", "The value is {}.")


def copy_drill(chat: ChatFormat, rng: np.random.Generator) -> Trajectory:
    """A made-up exercise: a result with a random number of up to three digits, and the answer that repeats it."""
    value = int(rng.integers(1000))
    result = DRILL_RESULTS[int(rng.integers(len(DRILL_RESULTS)))].format(value)
    turns = [{"role": "tool", "content": result}, {"role": "assistant", "content": f"Answer: {value}"}]
    return _ledger(chat, [], turns)


def _ledger(chat: ChatFormat, prompt: list[int], messages: Iterable[dict[str, str]]) -> Trajectory:
    trajectory = Trajectory()
    trajectory.append_context(prompt)
    for message in messages:
        if message["role"] == "assistant":
            ids = chat.turn_ids(message["content"])
            trajectory.append_sampled(ids, [0.0] * len(ids), [UNSAMPLED] * len(ids))
        else:
            trajectory.append_context(chat.observation_ids(message["content"], message["role"]))
    return trajectory
