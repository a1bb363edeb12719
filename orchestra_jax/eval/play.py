"""Episodes of policies that are no weights of ours: scripted ones, and models behind endpoints; many at once."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from orchestra_envs.baselines import run_episode
from orchestra_envs.env import ToolEnv, bare_tool_env
from orchestra_envs.loop import drive, on_loop

from orchestra_jax.config import ConfigError
from orchestra_jax.eval.suites import EvalTask

log = logging.getLogger(__name__)

Record = dict[str, Any]

INFRA_ERROR = "infra_error"


@dataclass(frozen=True)
class EvalJob:
    """One episode: a task, and the trial of it (the environment's replica)."""

    task: EvalTask
    trial: int


@dataclass(frozen=True)
class PolicyTurn:
    """What a policy wrote, and what writing it cost.

    `end_reason` says that the turn must not be run, for it was cut ("length") or there was no room ("context"), or that
    the policy could not be reached ("infra_error").
    """

    text: str
    cost_usd: float = 0.0
    cost_known: bool = True
    latency_s: float = 0.0
    end_reason: str = ""
    shown: dict[str, Any] = field(default_factory=dict)
    """More about the turn, for the record."""


class EpisodePolicy(Protocol):
    """A policy for one episode; both methods may be async. The scripted ones of `orchestra_envs.baselines` will do."""

    def reset(
        self, env: gym.Env, observation: str, info: dict[str, Any], rng: np.random.Generator
    ) -> Awaitable[None] | None:
        """Begin; what `env.reset` gave."""

    def act(self, observation: str, info: dict[str, Any]) -> Awaitable[PolicyTurn] | Awaitable[str] | PolicyTurn | str:
        """The next turn, given the newest observation and info."""


def play_all(
    make_env: Callable[[], gym.Env],
    make_policy: Callable[[], EpisodePolicy],
    jobs: Sequence[EvalJob],
    *,
    concurrency: int,
    on_record: Callable[[Record], None],
) -> None:
    """Plays all jobs, at most `concurrency` at once; `on_record` gets each episode's record when it ends.

    Environments that are no `ToolEnv` are played one after the other, by scripted policies only.

    Raises:
      Whatever a policy, an environment or `on_record` raises; the other episodes are cancelled.
    """
    if not jobs:
        return
    first = make_env()
    if bare_tool_env(first) is None:
        try:
            for job in jobs:
                on_record(_play_plain(first, make_policy(), job))
        finally:
            first.close()
        return
    # Made here and not on the tools' loop: making live tools may wait for that loop.
    envs = [first, *(make_env() for _ in range(min(concurrency, len(jobs)) - 1))]
    try:
        drive(_play_all([_bare(env) for env in envs], make_policy, jobs, on_record))
    finally:
        for env in envs:
            env.close()


async def _play_all(
    envs: Sequence[ToolEnv],
    make_policy: Callable[[], EpisodePolicy],
    jobs: Sequence[EvalJob],
    on_record: Callable[[Record], None],
) -> None:
    queue = iter(jobs)

    async def work(env: ToolEnv) -> None:
        for job in queue:
            on_record(await play(env, make_policy(), job))

    if len(envs) == 1:
        await work(envs[0])
        return
    await on_loop()
    workers = [asyncio.create_task(work(env)) for env in envs]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def play(env: ToolEnv, policy: EpisodePolicy, job: EvalJob) -> Record:
    """One episode as a record of a run's `episodes/`, with "number" and "trial" of the job."""
    observation, info = await env.areset(seed=job.task.seed, options=reset_options(job))
    record = _begun(job, observation, info)
    await _result_of(policy.reset(env, observation, info, np.random.default_rng([job.task.seed, job.trial])))
    counts: Counter[str] = Counter()
    while not record["end_reason"]:
        turn = await _result_of(policy.act(observation, info))
        if isinstance(turn, str):
            turn = PolicyTurn(turn)
        _charge_turn(record, turn)
        if turn.end_reason:
            record["end_reason"] = turn.end_reason
            break
        observation, reward, terminated, truncated, info = await env.astep(turn.text)
        calls = json.loads(info["calls_json"])
        counts.update(call["tool"] for call in calls)
        record["return"] += float(reward)
        if observation:
            _add_observation(record, observation, info, calls)
        record["cost_usd"] += info["cost_usd"]
        record["latency_s"] += info["latency_s"]
        record["cost_known"] = record["cost_known"] and bool(info["cost_known"])
        record["num_format_errors"] = info["episode_format_errors"]
        if terminated or truncated:
            record["outcome"] = info["outcome"]
            record["end_reason"] = INFRA_ERROR if info["drop"] else info["end_reason"]
    record["tool_counts"] = dict(counts)
    return record


def reset_options(job: EvalJob) -> dict[str, Any]:
    """The options of `reset` for a job."""
    listed = {} if job.task.task_id is None else {"task_id": job.task.task_id}
    return {"replica": job.trial, **listed}


def _begun(job: EvalJob, observation: str, info: dict[str, Any]) -> Record:
    preference = json.loads(info.get("preference_json") or "{}")
    return {
        "phase": "eval",
        "number": job.task.number,
        "trial": job.trial,
        "task_id": info["task_id"] or str(job.task.seed),
        "seed": job.task.seed,
        "member": job.trial,
        "prompt": observation,
        "turns": [],
        "outcome": 0.0,
        "return": 0.0,
        "cost_usd": 0.0,
        "cost_known": True,
        "latency_s": 0.0,
        "tool_counts": {},
        "num_format_errors": 0,
        "end_reason": "",
        "weights": preference.get("weights", {}),
    }


def _charge_turn(record: Record, turn: PolicyTurn) -> None:
    """Enters what the policy wrote; its own cost and seconds are part of the episode's, and told apart."""
    entry = {"role": "assistant", "text": turn.text, **turn.shown}
    record["turns"].append(entry)
    if not turn.shown:
        return
    entry |= {"cost_usd": turn.cost_usd, "latency_s": turn.latency_s}
    for field_name, value in (("cost_usd", turn.cost_usd), ("latency_s", turn.latency_s)):
        record[field_name] += value
        record[f"policy_{field_name}"] = record.get(f"policy_{field_name}", 0.0) + value
    record["cost_known"] = record["cost_known"] and turn.cost_known
    if turn.end_reason == INFRA_ERROR:
        record["error"] = turn.shown.get("error", "")


def _add_observation(record: Record, observation: str, info: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    entry: dict[str, Any] = {"role": "tool" if calls or info["num_errors"] else "user", "text": observation}
    if calls:
        entry |= {"calls": calls, "cost_usd": info["cost_usd"], "latency_s": info["latency_s"]}
    record["turns"].append(entry)


def _play_plain(env: gym.Env, policy: EpisodePolicy, job: EvalJob) -> Record:
    """A scripted policy in an environment that is no `ToolEnv`, or has other wrappers around it."""
    episode = run_episode(env, policy, job.task.seed, job.trial)  # type: ignore[arg-type]
    weights = json.loads(episode.reset_info["preference_json"] or "{}").get("weights", {})
    return {
        "phase": "eval",
        "number": job.task.number,
        "trial": job.trial,
        "task_id": episode.task_id or str(episode.seed),
        "seed": episode.seed,
        "member": job.trial,
        "prompt": episode.messages[0]["content"],
        "turns": [{"role": m["role"], "text": m["content"]} for m in episode.messages[1:]],
        "outcome": episode.outcome,
        "return": episode.reward,
        "cost_usd": episode.cost_usd,
        "latency_s": episode.latency_s,
        "tool_counts": episode.tool_counts,
        "end_reason": episode.end_reason,
        "weights": weights,
    }


def _bare(env: gym.Env) -> ToolEnv:
    bare = bare_tool_env(env)
    if bare is None:
        raise ConfigError(f"{env}: the environment is no ToolEnv")
    return bare


async def _result_of(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value
    await on_loop()
    return await value
