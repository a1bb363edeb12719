"""Policies on the same held-out tasks: trained ones through the sampler, scripted ones through the same environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from orchestra_envs.baselines import make_policy, run_episode
from orchestra_envs.preference import preference_score, preference_vector

from orchestra_jax.config import ConfigError, EvalConfig
from orchestra_jax.eval.stats import summarize
from orchestra_jax.models.decoder import Params
from orchestra_jax.rollout.rollout import Job, Rollout

REFERENCE_POLICY = "random"
"""The preference score compares with a reference policy on the same task; this one runs in every evaluation."""

FIRST_EVAL_TRAJECTORY = 2**31
"""Trajectory numbers of evaluations start here, far from those of training."""


def eval_seeds(config: EvalConfig) -> list[int]:
    """The tasks of an evaluation. They depend on nothing but `eval.seed`; training draws below 2^30, this above."""
    return np.random.default_rng(config.seed).integers(2**30, 2**31, config.num_tasks).tolist()


def evaluate_policy(
    rollout: Rollout, params: Params, seeds: Sequence[int], *, greedy: bool, temperature: float = 1.0, version: int = 0
) -> list[dict[str, Any]]:
    """One episode per task; records as in the run folder's `episodes/`."""
    jobs = [
        Job(seed, 0, FIRST_EVAL_TRAJECTORY + number, 0.0 if greedy else temperature)
        for number, seed in enumerate(seeds)
    ]
    records = []
    for episode in rollout.run(params, jobs, policy_version=version):
        record = episode.to_json(phase="eval", weights=episode.preference)
        record["outcome"] = 0.0 if episode.outcome is None else episode.outcome
        if episode.infra_failure:
            record["end_reason"] = "infra_error"
        records.append(record)
    return records


def evaluate_scripted(env: gym.Env, name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One episode per task of a scripted policy (random, cheapest, oracle, always:TOOL).

    Raises:
      ConfigError: there is no such policy, or it cannot act in this environment.
    """
    try:
        policy = make_policy(name)
        episodes = [run_episode(env, policy, seed) for seed in seeds]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"eval.baselines: {name!r} cannot act here: {error}") from None
    return [
        {
            "phase": "eval",
            "task_id": e.task_id,
            "seed": e.seed,
            "member": e.replica,
            "prompt": e.messages[0]["content"],
            "turns": [{"role": m["role"], "text": m["content"]} for m in e.messages[1:]],
            "outcome": e.outcome,
            "return": e.reward,
            "cost_usd": e.cost_usd,
            "latency_s": e.latency_s,
            "tool_counts": e.tool_counts,
            "end_reason": e.end_reason,
        }
        for e in episodes
    ]


def add_preference_scores(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> None:
    """Writes each record's "preference" score relative to the reference policy's record of the same task.

    ToolOrchestra appendix L with its sign mended, see `orchestra_envs.preference`. Where a task states no preference,
    outcome, cost and latency weigh 1.
    """
    by_seed = {record["seed"]: record for record in reference}
    for record in records:
        weights = record.get("weights") or {"outcome": 1.0, "cost": 1.0, "latency": 1.0}
        record["preference"] = preference_score(
            _vector(record), _vector(by_seed[record["seed"]]), weights, correct=record["outcome"] > 0.5
        )


def _vector(record: dict[str, Any]) -> dict[str, float]:
    return preference_vector(record["tool_counts"], record["outcome"], record["cost_usd"], record["latency_s"])


def summary_entry(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A policy's entry in summary.json: means, 95% intervals, and accuracy by task type where ids tell it."""
    return summarize(records)
