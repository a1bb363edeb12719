"""Rollouts: a batch of episodes over Gymnasium environments, all turns sampled together.

One row of the sampler per episode. Every round samples a turn of each live row, steps the environments, and appends the
observations to the rows that go on. A row whose episode has ended waits without cost for the batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from orchestra_jax.models.decoder import Params
from orchestra_jax.rollout.episode import Episode, Turn, charge
from orchestra_jax.rollout.ledger import Trajectory
from orchestra_jax.sampler.sampler import Sampler
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.prompt import system_prompt

log = logging.getLogger(__name__)

CUT_MARKER = " [cut]"


@dataclass(frozen=True)
class Job:
    """One episode to run. Jobs with equal `seed` are a group: same task, tools, prices and preference."""

    seed: int
    replica: int
    trajectory: int
    """Number that keys the sampling; distinct within a run, so that no two episodes share their randomness."""
    temperature: float = 1.0


@dataclass(frozen=True)
class RolloutLimits:
    """What bounds an episode, in tokens."""

    max_turn_tokens: int
    max_observation_tokens: int


def task_prompt_ids(chat: ChatFormat, tool_style: str, observation: str, info: dict[str, Any]) -> list[int]:
    """The prompt of an episode: the first observation and, where the environment has them, tools and preference."""
    system, tools = system_prompt(info, tool_style) if "tools_json" in info else (None, None)
    return chat.prompt_ids(system, observation, tools)


class Rollout:
    """Runs batches of episodes with one sampler and one set of environments.

    Args:
      make_env: makes one environment; called once per row.
      sampler: rows, capacity and turn length are its.
      chat: tokens of prompts, turns and observations.
      tool_style: how tools are told to the policy, see `text.prompt.system_prompt`.
      limits: token limits.
      env_threads: environments stepped at once; more than 1 pays where `step` waits for a network.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        sampler: Sampler,
        chat: ChatFormat,
        *,
        tool_style: str,
        limits: RolloutLimits,
        env_threads: int = 1,
    ) -> None:
        self.envs = [make_env() for _ in range(sampler.rows)]
        self.sampler = sampler
        self.chat = chat
        self.tool_style = tool_style
        self.limits = limits
        self._threads = ThreadPoolExecutor(env_threads) if env_threads > 1 else None

    def close(self) -> None:
        """Closes the environments and the threads."""
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for env in self.envs:
            env.close()

    def run(
        self, params: Params, jobs: Sequence[Job], *, policy_version: int, num_groups: int | None = None
    ) -> list[Episode]:
        """Runs all jobs, as many at a time as the sampler has rows; results in the order of the jobs.

        Args:
          params: the policy's weights.
          jobs: what to run.
          policy_version: stamped on every sampled token.
          num_groups: distinct prompts to prepare for in a batch (a fixed shape).
        """
        episodes: list[Episode] = []
        rows = self.sampler.rows
        for start in range(0, len(jobs), rows):
            batch = list(jobs[start : start + rows])
            # A short last batch is filled up with copies that generate nothing, so that shapes stay the same.
            episodes.extend(self._run_batch(params, batch, policy_version, num_groups or rows))
        return episodes

    def _run_batch(self, params: Params, jobs: list[Job], version: int, num_groups: int) -> list[Episode]:
        rows = self.sampler.rows
        episodes = self._map(self._reset, range(len(jobs)), jobs)
        filler = rows - len(jobs)
        prompts = [e.trajectory.tokens for e in episodes] + [episodes[0].trajectory.tokens] * filler
        state = self.sampler.start(params, prompts, num_groups)
        temperatures = np.array([job.temperature for job in jobs] + [1.0] * filler, np.float32)
        trajectories = np.array([job.trajectory for job in jobs] + [0] * filler)

        live = [not episode.end_reason for episode in episodes]
        while any(live):
            limits = np.array([self.limits.max_turn_tokens if alive else 0 for alive in live] + [0] * filler)
            turn, state = self.sampler.generate(params, state, limits, temperatures, trajectories)
            observations: list[list[int]] = [[] for _ in range(rows)]
            running = [r for r, alive in enumerate(live) if alive]
            for r in running:
                count = int(turn.counts[r])
                tokens, logprobs = turn.tokens[r, :count].tolist(), turn.logprobs[r, :count].tolist()
                self._record_turn(episodes[r], tokens, logprobs, version, stopped=bool(turn.stopped[r]))
            stepping = [r for r in running if not episodes[r].end_reason]
            for r, ids in zip(stepping, self._map(self._step, stepping, [episodes[r] for r in stepping])):
                observations[r] = ids
            live = [not episode.end_reason for episode in episodes]
            if any(live):
                state = self.sampler.append(params, state, observations)
        return episodes

    def _map(self, function: Callable, *columns: Sequence) -> list:
        return list(self._threads.map(function, *columns) if self._threads else map(function, *columns))

    def _reset(self, row: int, job: Job) -> Episode:
        observation, info = self.envs[row].reset(seed=job.seed, options={"replica": job.replica})
        ids = task_prompt_ids(self.chat, self.tool_style, str(observation), info)
        room = self.sampler.capacity - self.limits.max_turn_tokens
        if len(ids) > room:
            raise ValueError(
                f"the prompt of task seed {job.seed} has {len(ids)} tokens; rollout.max_tokens "
                f"{self.sampler.capacity} less rollout.max_turn_tokens {self.limits.max_turn_tokens} leaves {room}"
            )
        episode = Episode(job.seed, job.replica, self.chat.tokenizer.decode(ids), Trajectory())
        episode.trajectory.append_context(ids)
        episode.task_id = str(info.get("task_id", job.seed))
        if "outcome" in info:
            episode.outcome = 0.0  # until the environment says otherwise: no answer is a wrong answer
        if info.get("tools_json"):
            episode.tool_names = tuple(t["function"]["name"] for t in json.loads(info["tools_json"]))
        if info.get("preference_json"):
            episode.preference = json.loads(info["preference_json"])["weights"]
        return episode

    def _record_turn(
        self, episode: Episode, tokens: list[int], logprobs: list[float], version: int, *, stopped: bool
    ) -> None:
        start = len(episode.trajectory.tokens)
        episode.trajectory.append_sampled(tokens, logprobs, version)
        episode.turns.append(Turn("assistant", self.chat.turn_text(tokens), len(tokens), start))
        if not stopped:
            # Cut by a limit: never parsed, repaired or executed. The tokens stay in the ledger.
            full = len(episode.trajectory.tokens) >= self.sampler.capacity
            episode.end_reason = "context" if full else "length"

    def _step(self, row: int, episode: Episode) -> list[int]:
        """Steps one environment; returns the observation's tokens, empty if the episode has ended."""
        try:
            observation, reward, terminated, truncated, info = self.envs[row].step(episode.turns[-1].text)
        except Exception:
            # A fault of the environment must not take the batch with it; it is counted, and the traceback kept.
            log.exception("the environment raised in step (task seed %d)", episode.seed)
            episode.end_reason, episode.infra_failure = "env_error", True
            return []
        calls = charge(episode, info, reward)
        if "outcome" in info:
            episode.outcome = float(info["outcome"])
        if info.get("drop"):
            episode.infra_failure = True
        if terminated or truncated:
            episode.end_reason = str(info.get("end_reason") or ("terminated" if terminated else "truncated"))
            if calls:
                episode.turns.append(Turn("tool", str(observation), 0, len(episode.trajectory.tokens), calls))
            return []
        return self._observe(episode, str(observation), calls, role="tool" if "calls_json" in info else "user")

    def _observe(self, episode: Episode, text: str, calls: list[dict[str, Any]], role: str) -> list[int]:
        text, ids = self._fit(text, role)
        start = len(episode.trajectory.tokens)
        if start + len(ids) + self.limits.max_turn_tokens > self.sampler.capacity:
            # No room to read this and answer. The earlier turns are kept as they are; nothing is cut from the left.
            episode.end_reason = "context"
            return []
        episode.trajectory.append_context(ids)
        episode.turns.append(Turn(role, text, len(ids), start, calls))
        return ids

    def _fit(self, text: str, role: str) -> tuple[str, list[int]]:
        """The observation cut to the limit, counted in tokens, at a character boundary, with a marker."""
        ids = self.chat.observation_ids(text, role)
        limit = self.limits.max_observation_tokens
        shown, keep = text, len(text)
        while len(ids) > limit and keep > 0:
            keep = min(keep - 1, int(keep * limit / len(ids)))
            shown = text[:keep] + CUT_MARKER
            ids = self.chat.observation_ids(shown, role)
        return shown, ids
