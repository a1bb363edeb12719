"""Rollouts: a batch of episodes over Gymnasium environments, all turns sampled together.

One row of the sampler per episode. Every round samples a turn of each live row, steps the environments, and appends the
observations to the rows that go on. A row whose episode has ended waits without cost for the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from orchestra_envs.env import bare_tool_env
from orchestra_envs.loop import drive_all

from orchestra_jax.models.decoder import Params
from orchestra_jax.rollout.episode import Episode, Turn, charge, describe
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
      env_threads: environments of other packages stepped at once; more than 1 pays where their `step` waits. A
        `ToolEnv` needs no threads: all its slow tools run at once.
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
        self._tool_envs = [bare_tool_env(env) for env in self.envs]
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
        episodes = self._reset_all(jobs)
        live = [not episode.end_reason for episode in episodes]
        if not any(live):
            return episodes
        filler = rows - len(jobs)
        any_prompt = episodes[live.index(True)].trajectory.tokens
        prompts = [e.trajectory.tokens if alive else any_prompt for e, alive in zip(episodes, live)]
        state = self.sampler.start(params, prompts + [any_prompt] * filler, num_groups)
        temperatures = np.array([job.temperature for job in jobs] + [1.0] * filler, np.float32)
        trajectories = np.array([job.trajectory for job in jobs] + [0] * filler)

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
            steps = self._call_all("step", stepping, [((episodes[r].turns[-1].text,), {}) for r in stepping])
            for r, step in zip(stepping, steps):
                observations[r] = self._stepped(episodes[r], step)
            live = [not episode.end_reason for episode in episodes]
            if any(live):
                state = self.sampler.append(params, state, observations)
        return episodes

    def _call_all(self, method: str, rows: Sequence[int], arguments: Sequence[tuple[tuple, dict]]) -> list[Any]:
        """Calls `reset` or `step` of the rows' environments, all at once where they wait; results or exceptions."""

        def call(row: int, given: tuple[tuple, dict]) -> Any:
            try:
                return getattr(self.envs[row], method)(*given[0], **given[1])
            except Exception as error:
                return error

        results: dict[int, Any] = {}
        inner = {row: env for row in rows if (env := self._tool_envs[row])}
        given = dict(zip(rows, arguments))
        coroutines = [getattr(env, f"a{method}")(*given[row][0], **given[row][1]) for row, env in inner.items()]
        results.update(zip(inner, drive_all(coroutines)))
        others = [row for row in rows if row not in inner]
        run = self._threads.map if self._threads else map
        results.update(zip(others, run(call, others, [given[row] for row in others])))
        return [results[row] for row in rows]

    def _reset_all(self, jobs: Sequence[Job]) -> list[Episode]:
        """New episodes with their prompts; those that have no prompt, or no room to answer it, have ended already."""
        options = [((), {"seed": job.seed, "options": {"replica": job.replica}}) for job in jobs]
        return list(map(self._begun, jobs, self._call_all("reset", range(len(jobs)), options)))

    def _begun(self, job: Job, reset: tuple[Any, dict[str, Any]] | Exception) -> Episode:
        episode = Episode(job.seed, job.replica, token_texts=self.chat.tokenizer.token_texts)
        if isinstance(reset, Exception):
            log.error("the environment raised in reset (task seed %d)", job.seed, exc_info=reset)
            episode.end_reason, episode.infra_failure = "env_error", True
            return episode
        observation, info = reset
        describe(episode, info)
        ids = task_prompt_ids(self.chat, self.tool_style, str(observation), info)
        episode.prompt = self.chat.tokenizer.decode(ids)
        episode.trajectory.append_context(ids)
        room = self.sampler.capacity - self.limits.max_turn_tokens
        if len(ids) > room:
            log.warning(
                "no room for the task of seed %d: its prompt has %d tokens, rollout.max_tokens less "
                "rollout.max_turn_tokens is %d",
                job.seed,
                len(ids),
                room,
            )
            episode.end_reason = "context"
        return episode

    def _record_turn(
        self, episode: Episode, tokens: list[int], logprobs: list[float], version: int, *, stopped: bool
    ) -> None:
        start = len(episode.trajectory.tokens)
        episode.trajectory.append_sampled(tokens, logprobs, version)
        text = self.chat.turn_text(tokens)
        if self.chat.reasoning_open:
            # The tag is in the prompt. Without it, reasoning that was never closed would read as an answer.
            text = "<think>" + text
        episode.turns.append(Turn("assistant", text, len(tokens), start))
        if not stopped:
            # Cut by a limit: never parsed, repaired or executed. The tokens stay in the ledger.
            full = len(episode.trajectory.tokens) >= self.sampler.capacity
            episode.end_reason = "context" if full else "length"

    def _stepped(self, episode: Episode, step: tuple[Any, Any, bool, bool, dict[str, Any]] | Exception) -> list[int]:
        """Enters what a step of the environment gave; the observation's tokens, empty if the episode has ended."""
        try:
            if isinstance(step, Exception):
                raise step
            observation, reward, terminated, truncated, info = step
            calls = charge(episode, info, reward)
        except Exception:
            # A fault of the environment must not take the batch with it; it is counted, and the traceback kept.
            log.exception("the environment raised in step (task seed %d)", episode.seed)
            episode.end_reason, episode.infra_failure = "env_error", True
            return []
        if terminated or truncated:
            episode.end_reason = str(info.get("end_reason") or ("terminated" if terminated else "truncated"))
            if (
                calls or info.get("end_reason") == "user_ended"
            ):  # shown with what they cost, though the policy never reads it
                role = _role(info, calls)
                episode.turns.append(Turn(role, str(observation), 0, len(episode.trajectory.tokens), calls))
            return []
        return self._observe(episode, str(observation), calls, _role(info, calls))

    def _observe(self, episode: Episode, text: str, calls: list[dict[str, Any]], role: str) -> list[int]:
        text, ids = self._fit(text, role)
        start = len(episode.trajectory.tokens)
        if start + len(ids) + self.limits.max_turn_tokens > self.sampler.capacity:
            # No room to read this and answer. The earlier turns are kept as they are; nothing is cut from the left.
            episode.end_reason = "context"
            episode.turns.append(Turn(role, text, 0, start, calls))
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


def _role(info: dict[str, Any], calls: list[dict[str, Any]]) -> str:
    """Who speaks in an observation: tools (errors in their calls too), or the user."""
    return "tool" if calls or info.get("num_errors") else "user"
