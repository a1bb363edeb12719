"""Supervised traces: episodes of scripted policies as token ledgers, the same form as sampled ones."""

from __future__ import annotations

from collections.abc import Iterable

import gymnasium as gym
from orchestra_envs.baselines import Episode, make_policy, run_episode

from orchestra_jax.rollout.ledger import UNSAMPLED, Trajectory
from orchestra_jax.rollout.rollout import task_prompt_ids
from orchestra_jax.text.chat import ChatFormat


def scripted_episodes(env: gym.Env, policy: str, seeds: Iterable[int]) -> list[Episode]:
    """One episode of the named scripted policy per seed."""
    scripted = make_policy(policy)
    return [run_episode(env, scripted, seed) for seed in seeds]


def trace_to_trajectory(chat: ChatFormat, tool_style: str, episode: Episode) -> Trajectory:
    """The ledger of a scripted episode: its assistant turns are what is learned (mask 1).

    The tokens were not sampled by a policy, so their logprobs are 0.0 and a supervised loss must not read them.
    """
    question, *messages = episode.messages
    prompt = task_prompt_ids(chat, tool_style, question["content"], episode.reset_info)
    return _ledger(chat, prompt, messages)


def trace_tail(chat: ChatFormat, episode: Episode) -> Trajectory:
    """The end of a scripted episode alone: its last observation as the context, and the turn that follows."""
    return _ledger(chat, [], episode.messages[-2:])


def _ledger(chat: ChatFormat, prompt: list[int], messages: Iterable[dict[str, str]]) -> Trajectory:
    trajectory = Trajectory()
    trajectory.append_context(prompt)
    for message in messages:
        if message["role"] == "assistant":
            ids = chat.turn_ids(message["content"])
            trajectory.append_sampled(ids, [0.0] * len(ids), UNSAMPLED)
        else:
            trajectory.append_context(chat.observation_ids(message["content"], message["role"]))
    return trajectory
