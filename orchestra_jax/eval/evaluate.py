"""Policies on the same held-out tasks: models through the sampler, scripted ones through the same environments."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from orchestra_envs.baselines import make_policy, run_episode
from orchestra_envs.judge import JudgeUsage, judge_usage
from orchestra_envs.preference import preference_score, preference_vector
from rich.console import Console

from orchestra_jax.config import EvalConfig, RunConfig
from orchestra_jax.eval.stats import summarize
from orchestra_jax.models.decoder import Params
from orchestra_jax.report.console import make_progress
from orchestra_jax.rollout.policy import Policy
from orchestra_jax.rollout.rollout import Job, Rollout
from orchestra_jax.rollout.setup import build_rollout, check_scripted, eval_kwargs, make_env

REFERENCE_POLICY = "random"
"""The preference score compares with a reference policy on the same task; this one runs in every evaluation."""

FIRST_EVAL_TRAJECTORY = 2**31
"""Trajectory numbers of evaluations start here, far from those of training."""

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: the content of summary.json, and each policy's episodes, as in `episodes/`."""

    summary: dict[str, Any]
    records: dict[str, Records]


def evaluate_policies(
    config: RunConfig,
    policies: Mapping[str, Callable[[], Policy]],
    scripted: Sequence[str],
    console: Console,
) -> Evaluation:
    """Evaluates policies, each in every mode of `eval.modes`, and scripted policies on the tasks of `config.eval`.

    The scripted policy `random` is added wherever the environment tells its tools: the preference scores of all
    others are relative to it.

    Args:
      config: environment, rollout limits and evaluation (the defaults of `eval` where it has none).
      policies: by name, what loads each. They are called one after the other, so that one set of weights is held
        at a time.
      scripted: names for `orchestra_envs.baselines.make_policy`.
      console: where progress goes.

    Raises:
      ConfigError: the environment cannot be made, or a scripted policy cannot act in it.
    """
    settings = config.eval or EvalConfig()
    kwargs = eval_kwargs(config)
    seeds = eval_seeds(settings)
    scripted = scripted_names(config, scripted)
    total = len(policies) * len(settings.modes) + len(scripted)
    rows = min(config.rollout.rows or config.trajectories_per_step, len(seeds))
    records: dict[str, Records] = {}
    judged_before = {id(usage): copy.deepcopy(usage) for _, usage in judge_usage()}
    with make_progress(console, description="evaluation") as progress:
        for name, load in policies.items():
            policy = load()
            rollout = build_rollout(config, policy, kwargs, rows)
            for mode in settings.modes:
                temperature = 0.0 if mode == "greedy" else config.rollout.temperature
                label = f"{name}:greedy" if mode == "greedy" else name
                records[label] = evaluate_policy(rollout, policy.params, seeds, temperature)
                progress(len(records), total)
            rollout.close()
            del policy, rollout
        env = make_env(config, kwargs)
        for name in scripted:
            records[name] = evaluate_scripted(env, name, seeds)
            progress(len(records), total)
        env.close()
    if REFERENCE_POLICY in records:
        for episodes in records.values():
            add_preference_scores(episodes, records[REFERENCE_POLICY])
    summary = {
        "env_id": config.env.id,
        "seed": config.seed,
        "eval_seed": settings.seed,
        "policies": {name: summarize(episodes) for name, episodes in records.items()},
    }
    if judges := _judges(judged_before):
        summary["judges"] = judges
    for warning in _warnings(summary):
        console.print(
            f"WARNING: {warning}", style="bold red", markup=False, emoji=False, highlight=False, soft_wrap=True
        )
    return Evaluation(summary, records)


def _judges(before: Mapping[int, JudgeUsage]) -> list[dict[str, Any]]:
    """What the language models that judged did and cost since `before`, which is keyed by the account's identity."""
    spent = [(model, usage.since(before.get(id(usage), JudgeUsage()))) for model, usage in judge_usage()]
    return [{"model": model, **usage.as_dict()} for model, usage in spent if usage.num_llm_calls or usage.num_failures]


def _warnings(summary: Mapping[str, Any]) -> Iterator[str]:
    """What must be known before the numbers are believed: one line each."""
    for name, entry in summary["policies"].items():
        if entry["warning"]:
            yield f"{name}: {entry['warning']}"
    for judge in summary.get("judges", []):
        if judge["num_failures"]:
            yield f"the judge {judge['model']} gave no verdict {judge['num_failures']} times: {judge['failures']}"


def scripted_names(config: RunConfig, names: Sequence[str], key: str = "eval.baselines") -> list[str]:
    """The scripted policies that an evaluation of `names` runs: those, and the reference where there are tools.

    Raises:
      ConfigError: one does not exist or cannot act in the environment; the message starts with `key`.
    """
    kwargs = eval_kwargs(config)
    check_scripted(config, key, names, kwargs)
    reference = [REFERENCE_POLICY] if _offers_a_tool(config, kwargs) else []
    return list(dict.fromkeys([*names, *reference]))


def _offers_a_tool(config: RunConfig, env_kwargs: dict[str, Any]) -> bool:
    """Whether the environment tells at reset of at least one tool that a scripted policy can call."""
    env = make_env(config, env_kwargs)
    info = env.reset(seed=0)[1]
    env.close()
    return bool(json.loads(info.get("tools_json") or "[]"))


def eval_seeds(config: EvalConfig) -> list[int]:
    """The tasks of an evaluation. They depend on nothing but `eval.seed`; training draws below 2^30, this above."""
    return np.random.default_rng(config.seed).integers(2**30, 2**31, config.num_tasks).tolist()


def evaluate_policy(rollout: Rollout, params: Params, seeds: Sequence[int], temperature: float) -> Records:
    """One episode per task (temperature 0 is greedy); records as in the run folder's `episodes/`."""
    jobs = [Job(seed, 0, FIRST_EVAL_TRAJECTORY + number, temperature) for number, seed in enumerate(seeds)]
    records = []
    for episode in rollout.run(params, jobs, policy_version=0):
        record = episode.to_json(phase="eval", weights=episode.preference)
        record["outcome"] = 0.0 if episode.outcome is None else episode.outcome
        if episode.infra_failure:
            record["end_reason"] = "infra_error"
        records.append(record)
    return records


def evaluate_scripted(env: gym.Env, name: str, seeds: Sequence[int]) -> Records:
    """One episode per task of a scripted policy (random, cheapest, oracle, always:TOOL)."""
    policy = make_policy(name)
    records = []
    for seed in seeds:
        episode = run_episode(env, policy, seed)
        preference = json.loads(episode.reset_info["preference_json"] or "{}")
        records.append(
            {
                "phase": "eval",
                "task_id": episode.task_id or str(episode.seed),
                "seed": episode.seed,
                "member": episode.replica,
                "prompt": episode.messages[0]["content"],
                "turns": [{"role": m["role"], "text": m["content"]} for m in episode.messages[1:]],
                "outcome": episode.outcome,
                "return": episode.reward,
                "cost_usd": episode.cost_usd,
                "latency_s": episode.latency_s,
                "tool_counts": episode.tool_counts,
                "end_reason": episode.end_reason,
                "weights": preference.get("weights", {}),
            }
        )
    return records


def add_preference_scores(records: Records, reference: Records) -> None:
    """Writes each record's "preference" score relative to the reference policy's record of the same task.

    ToolOrchestra appendix L with its sign mended, see `orchestra_envs.preference`. Where a task states no preference,
    outcome, cost and latency weigh 1. None where the reference's episode was dropped: there is nothing to compare with.
    """
    by_seed = {record["seed"]: record for record in reference if record.get("end_reason") != "infra_error"}
    for record in records:
        if record["seed"] not in by_seed:
            record["preference"] = None
            continue
        weights = record["weights"] or {"outcome": 1.0, "cost": 1.0, "latency": 1.0}
        record["preference"] = preference_score(
            _vector(record), _vector(by_seed[record["seed"]]), weights, correct=record["outcome"] > 0.5
        )


def _vector(record: dict[str, Any]) -> dict[str, float]:
    return preference_vector(record["tool_counts"], record["outcome"], record["cost_usd"], record["latency_s"])
