"""Many episodes at once from one process, with any policy that can wait.

Slow tools and remote policies overlap: a thousand episodes need one thread. Whoever is ready goes on; nobody waits for
the slowest::

    episodes = run_episodes(lambda: make("orchestra/QA-v0", path="questions.jsonl", tools=[...]),
                            make_policy=MyPolicy, seeds=range(500), concurrency=128)

A policy is made for each episode. It has `reset(env, observation, info, rng)` and `act(observation, info)`, either of
which may be async; the scripted ones of `orchestra_envs.baselines` will do, too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from orchestra_envs.baselines import Episode, EpisodeRecord
from orchestra_envs.env import ToolEnv, bare_tool_env
from orchestra_envs.loop import bridge, drive, on_loop


class AnyPolicy(Protocol):
    """A policy for one episode; both methods may be async."""

    def reset(
        self, env: gym.Env, observation: str, info: dict[str, Any], rng: np.random.Generator
    ) -> Awaitable[None] | None:
        """Begin; what `env.reset` gave."""

    def act(self, observation: str, info: dict[str, Any]) -> Awaitable[str] | str:
        """The text of the next turn, given the newest observation and info."""


def run_episodes(
    make_env: Callable[[], gym.Env],
    make_policy: Callable[[], AnyPolicy],
    seeds: Iterable[int],
    *,
    replicas: int = 1,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Run an episode for every seed and replica, at most `concurrency` at once; results by seed, then replica.

    Args:
        make_env: makes a `ToolEnv` (Gymnasium's own wrappers may be around it); called `concurrency` times at most.
        make_policy: makes the policy of one episode.
        seeds: the tasks.
        replicas: episodes of each task.
        concurrency: environments, and so episodes under way at once.
        on_episode: called with each episode when it ends, in that order.

    Raises:
        ValueError: `concurrency` or `replicas` is below 1, or an environment is no `ToolEnv`.
        Whatever a policy raises; the other episodes are cancelled.
    """
    return drive(arun_episodes(make_env, make_policy, seeds, replicas, concurrency, on_episode))


async def arun_episodes(
    make_env: Callable[[], gym.Env],
    make_policy: Callable[[], AnyPolicy],
    seeds: Iterable[int],
    replicas: int = 1,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """`run_episodes` as a coroutine, for any event loop."""
    for name, number in (("replicas", replicas), ("concurrency", concurrency)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
    jobs = [(seed, replica) for seed in seeds for replica in range(replicas)]
    # Made here and not on the tools' loop: making live tools may wait for that loop.
    envs = [_tool_env(make_env()) for _ in range(min(concurrency, len(jobs)))]
    try:
        return await bridge(_run_all(envs, make_policy, jobs, on_episode))
    finally:
        for env in envs:
            env.close()


async def arun_episode(env: gym.Env, policy: AnyPolicy, seed: int, replica: int = 0) -> Episode:
    """One episode, like `baselines.run_episode`, as a coroutine for any event loop.

    Raises:
        ValueError: the environment is no `ToolEnv`.
    """
    return await bridge(_play(_tool_env(env), policy, seed, replica))


async def _run_all(
    envs: list[ToolEnv],
    make_policy: Callable[[], AnyPolicy],
    jobs: list[tuple[int, int]],
    on_episode: Callable[[Episode], None] | None,
) -> list[Episode]:
    await on_loop()
    episodes: dict[int, Episode] = {}
    queue = iter(enumerate(jobs))

    async def work(env: ToolEnv) -> None:
        for index, (seed, replica) in queue:
            episodes[index] = await _play(env, make_policy(), seed, replica)
            if on_episode:
                on_episode(episodes[index])

    workers = [asyncio.create_task(work(env)) for env in envs]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return [episodes[index] for index in range(len(jobs))]


async def _play(env: ToolEnv, policy: AnyPolicy, seed: int, replica: int) -> Episode:
    observation, info = await env.areset(seed=seed, options={"replica": replica})
    record = EpisodeRecord(seed, replica, observation, info)
    await _result_of(policy.reset(env, observation, info, np.random.default_rng([seed, replica])))
    while not record.ended:
        action = await _result_of(policy.act(observation, info))
        observation, reward, terminated, truncated, info = await env.astep(action)
        record.add(action, observation, reward, terminated or truncated, info)
    return record.episode()


async def _result_of(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value
    await on_loop()
    return await value


def _tool_env(env: gym.Env) -> ToolEnv:
    bare = bare_tool_env(env)
    if bare is None:
        raise ValueError(
            f"{env}: only a ToolEnv without wrappers of other packages can wait without a thread; step others by "
            "gymnasium.vector"
        )
    return bare
