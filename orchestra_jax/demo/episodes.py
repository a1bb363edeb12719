"""The episodes of the demonstration: the shipped policy and the strongest expert on the same held-out tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from orchestra_envs.baselines import STRONGEST_EXPERT, make_policy

from orchestra_jax.config import RunConfig, load_config
from orchestra_jax.rollout.episode import Episode, Turn, charge, describe
from orchestra_jax.rollout.policy import Policy, load_policy
from orchestra_jax.rollout.rollout import Job, Rollout
from orchestra_jax.rollout.setup import build_rollout, make_env

POLICY_FOLDER = Path(__file__).parent / "policy"
RIVAL = f"always:{STRONGEST_EXPERT}"

TASK_SEED = 1_000_003
"""Of the tasks: the seed that the quickstart's evaluation draws its held-out tasks by, so nobody picked them."""


class Stage:
    """What plays: the shipped policy, and the market for it and for its rival."""

    def __init__(self, policy: Policy, rollout: Rollout, env: gym.Env) -> None:
        self.num_parameters = sum(int(array.size) for array in policy.params.values())
        self._policy, self._rollout, self._env = policy, rollout, env

    def trained(self, seed: int) -> Episode:
        """The shipped policy on the task of `seed`, greedily."""
        job = Job(seed, replica=0, trajectory=seed, temperature=0.0)
        (episode,) = self._rollout.run(self._policy.params, [job], policy_version=0)
        return episode

    def rival(self, seed: int) -> Episode:
        """Always the strongest expert, on the same task."""
        return play_scripted(self._env, RIVAL, seed)


@contextmanager
def open_stage() -> Iterator[Stage]:
    """Loads the shipped policy; its weights are taken in float32."""
    config = stage_config()
    policy = load_policy(config.model, config.text, config.seed)
    rollout = build_rollout(config, policy, config.env.kwargs, rows=1)
    env = make_env(config, config.env.kwargs)
    try:
        yield Stage(policy, rollout, env)
    finally:
        rollout.close()
        env.close()


def stage_config() -> RunConfig:
    """The config beside the shipped policy, with the policy in it."""
    config = load_config(POLICY_FOLDER / "run.yaml")
    model = config.model.model_copy(update={"path": str(POLICY_FOLDER), "preset": None})
    return config.model_copy(update={"model": model, "text": config.text.model_copy(update={"tokenizer": None})})


def held_out_results() -> dict[str, Any]:
    """What both did on 512 held-out tasks, shaped like a run's summary.json."""
    return json.loads((POLICY_FOLDER / "held_out.json").read_text(encoding="utf-8"))


def task_seeds(num_tasks: int, seed: int = TASK_SEED) -> list[int]:
    """Seeds of held-out tasks: training draws below 2^30, this above."""
    return np.random.default_rng(seed).integers(2**30, 2**31, num_tasks).tolist()


def play_scripted(env: gym.Env, name: str, seed: int) -> Episode:
    """One episode of a scripted policy, with its turns and calls as a rollout records them (but no tokens)."""
    policy = make_policy(name)
    observation, info = env.reset(seed=seed, options={"replica": 0})
    episode = Episode(seed, replica=0, prompt=str(observation))
    describe(episode, info)
    policy.reset(env, str(observation), info, np.random.default_rng([seed, 0]))
    while not episode.end_reason:
        action = policy.act(str(observation), info)
        episode.turns.append(Turn("assistant", action, num_tokens=0, start=0))
        observation, reward, terminated, truncated, info = env.step(action)
        calls = charge(episode, info, reward)
        if calls:
            episode.turns.append(Turn("tool", str(observation), num_tokens=0, start=0, calls=calls))
        if terminated or truncated:
            episode.end_reason = str(info["end_reason"])
    return episode


def question_of(episode: Episode) -> str:
    """The task as the user asked it."""
    return episode.prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].strip()
