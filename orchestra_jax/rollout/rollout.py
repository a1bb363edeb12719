"""Rollouts: episodes over Gymnasium environments, sampled by the continuously batching engine.

As many episodes are under way as the engine has slots. An episode whose turn is finished steps its environment while
the others go on sampling, and comes back with the observation; one that has ended makes room for the next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import gymnasium as gym
from orchestra_envs.env import bare_tool_env
from orchestra_envs.loop import start

from orchestra_jax.models.decoder import Params
from orchestra_jax.rollout.episode import Episode, Turn, charge, describe
from orchestra_jax.sampler.engine import Engine, Request, SampledTurn
from orchestra_jax.sampler.stops import tool_call_stop
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.prompt import system_prompt

log = logging.getLogger(__name__)

CUT_MARKER = " [cut]"

SIGNAL_POLL_S = 0.5
"""The longest that an interrupt goes unnoticed while nothing but tools is at work."""


@dataclass(frozen=True)
class Job:
    """One episode to run. Jobs with equal `seed` are a group: same task, tools, prices and preference."""

    seed: int
    replica: int
    trajectory: int
    """Number that keys the sampling; distinct within a run, so that no two episodes share their randomness."""
    temperature: float = 1.0
    task_id: str | None = None
    """A task that the environment knows by its id, instead of one drawn by the seed."""


@dataclass(frozen=True)
class RolloutLimits:
    """What bounds an episode, in tokens."""

    max_turn_tokens: int
    max_observation_tokens: int
    max_sampled_tokens: int | None = None
    """Of all turns together; None: no such limit."""
    stop_after_tool_call: bool = False
    """A turn ends with its first tool call."""


def task_prompt_ids(chat: ChatFormat, tool_style: str, observation: str, info: dict[str, Any]) -> list[int]:
    """The prompt of an episode: the first observation and, where the environment has them, tools and preference."""
    system, tools = system_prompt(info, tool_style) if "tools_json" in info else (None, None)
    return chat.prompt_ids(system, observation, tools)


class Rollout:
    """Runs episodes with one engine and one set of environments.

    Args:
      make_env: makes one environment; called once per slot.
      engine: slots and capacity are its.
      chat: tokens of prompts, turns and observations.
      tool_style: how tools are told to the policy, see `text.prompt.system_prompt`.
      limits: token limits.
      env_threads: environments of other packages stepped at once; more than 1 pays where their `step` waits. A
        `ToolEnv` needs no threads: all its slow tools run at once.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        engine: Engine,
        chat: ChatFormat,
        *,
        tool_style: str,
        limits: RolloutLimits,
        env_threads: int = 1,
    ) -> None:
        self.envs = [make_env() for _ in range(engine.slots)]
        self.engine = engine
        self.chat = chat
        self.tool_style = tool_style
        self.limits = limits
        self._stops = tool_call_stop(chat.tokenizer) if limits.stop_after_tool_call else ((), ())
        self._tool_envs = [bare_tool_env(env) for env in self.envs]
        self._threads = ThreadPoolExecutor(env_threads) if env_threads > 1 else None

    def close(self) -> None:
        """Closes the environments and the threads."""
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for env in self.envs:
            env.close()

    def run(
        self,
        params: Params,
        jobs: Sequence[Job],
        *,
        policy_version: int,
        watch: Callable[[int, Episode], None] | None = None,
    ) -> list[Episode]:
        """Runs all jobs, as many at a time as the engine has slots; results in the order of the jobs.

        Environments that do not wait are stepped in a fixed order: the same jobs give the same episodes, bit for bit.

        Args:
          params: the policy's weights.
          jobs: what to run.
          policy_version: stamped on every sampled token.
          watch: told the number of a job (the key of its turns in the engine) and its episode after everything that
            changes it: its reset, a round of the engine while its turn is under way, a finished turn before the
            environment steps, an observation, its end.
        """
        self.engine.reset()
        self.engine.use(params, policy_version)
        episodes: dict[int, Episode] = {}
        answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        free = deque(range(len(self.envs)))
        rows: dict[int, int] = {}  # number of a job under way -> its environment
        waiting: set[int] = set()  # jobs whose environment is at work
        started = 0

        def call(number: int, method: str, *args: Any, **kwargs: Any) -> None:
            waiting.add(number)
            self._call(rows[number], method, args, kwargs, partial(_put, answers, number))

        while started < len(jobs) or rows:
            while free and started < len(jobs):
                rows[started], job = free.popleft(), jobs[started]
                listed = {} if job.task_id is None else {"task_id": job.task_id}
                call(started, "reset", seed=job.seed, options={"replica": job.replica, **listed})
                started += 1
            for number, answer in _take(answers, block=bool(waiting) and not self.engine.busy):
                waiting.discard(number)
                if number in episodes:
                    self._stepped(episodes[number], answer)
                else:
                    episodes[number] = self._begun(jobs[number], answer)
                if watch:
                    watch(number, episodes[number])
                if episodes[number].end_reason:
                    free.append(rows.pop(number))
                    self.engine.release(number)
                else:
                    self.engine.submit(self._request(number, jobs[number], episodes[number]))
            for turn in self.engine.run() if self.engine.busy else ():
                number = turn.key
                episode = episodes[number]
                self._record_turn(episode, turn)
                if watch:
                    watch(number, episode)
                if episode.end_reason:
                    free.append(rows.pop(number))
                    self.engine.release(number)
                else:
                    call(number, "step", episode.turns[-1].text)
            for number in rows if watch else ():
                if watch and number in episodes and number not in waiting:
                    watch(number, episodes[number])
        return [episodes[number] for number in range(len(jobs))]

    def _request(self, number: int, job: Job, episode: Episode) -> Request:
        limit = min(self.limits.max_turn_tokens, self._left(episode))
        stop_ids, stop_texts = self._stops
        return Request(
            number,
            episode.trajectory.tokens,
            limit,
            job.trajectory,
            job.temperature,
            stop_ids=stop_ids,
            stop_texts=stop_texts,
        )

    def _left(self, episode: Episode) -> int:
        """Tokens that the policy may still sample in an episode."""
        budget = self.limits.max_sampled_tokens
        return self.engine.capacity if budget is None else budget - episode.trajectory.num_sampled

    def _call(self, row: int, method: str, args: tuple, kwargs: dict[str, Any], done: Callable[[Any], None]) -> None:
        """Calls `reset` or `step` of a row's environment; `done` gets the result, or what was raised."""
        if tool_env := self._tool_envs[row]:
            start(getattr(tool_env, f"a{method}")(*args, **kwargs), done)
        elif self._threads:
            self._threads.submit(lambda: done(_result(getattr(self.envs[row], method), args, kwargs)))
        else:
            done(_result(getattr(self.envs[row], method), args, kwargs))

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
        room = self.engine.capacity - self.limits.max_turn_tokens
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

    def _record_turn(self, episode: Episode, turn: SampledTurn) -> None:
        begin = len(episode.trajectory.tokens)
        episode.trajectory.append_sampled(turn.tokens, turn.logprobs, turn.versions)
        text = self.chat.turn_text(turn.tokens)
        if self.chat.reasoning_open:
            # The tag is in the prompt. Without it, reasoning that was never closed would read as an answer.
            text = "<think>" + text
        episode.turns.append(Turn("assistant", text, len(turn.tokens), begin))
        if turn.error:
            log.error("a turn failed in the sampler (task seed %d): %s", episode.seed, turn.error)
            episode.end_reason, episode.infra_failure = "sampler_error", True
        elif not turn.stopped:
            # Cut by a limit: never parsed, repaired or executed. The tokens stay in the ledger.
            full = len(episode.trajectory.tokens) >= self.engine.capacity
            episode.end_reason = "context" if full else "length"

    def _stepped(self, episode: Episode, step: tuple[Any, Any, bool, bool, dict[str, Any]] | Exception) -> None:
        """Enters what a step of the environment gave."""
        try:
            if isinstance(step, Exception):
                raise step
            observation, reward, terminated, truncated, info = step
            calls = charge(episode, info, reward)
        except Exception:
            # A fault of the environment must not take the batch with it; it is counted, and the traceback kept.
            log.exception("the environment raised in step (task seed %d)", episode.seed)
            episode.end_reason, episode.infra_failure = "env_error", True
            return
        if terminated or truncated:
            episode.end_reason = str(info.get("end_reason") or ("terminated" if terminated else "truncated"))
            if calls or info.get("end_reason") == "user_ended":
                # Shown with what it cost, though the policy never reads it.
                role = _role(info, calls)
                episode.turns.append(Turn(role, str(observation), 0, len(episode.trajectory.tokens), calls))
        else:
            self._observe(episode, str(observation), calls, _role(info, calls))

    def _observe(self, episode: Episode, text: str, calls: list[dict[str, Any]], role: str) -> None:
        text, ids = self._fit(text, role)
        begin = len(episode.trajectory.tokens)
        if self.limits.stop_after_tool_call and episode.trajectory.tokens[-1] not in self.chat.stop_ids:
            ids = [self.chat.end_id, *ids]  # the turn was ended by its call: the template's end is not the policy's
        if self._left(episode) < 1:
            episode.end_reason = "length"
            episode.turns.append(Turn(role, text, 0, begin, calls))
            return
        if begin + len(ids) + self.limits.max_turn_tokens > self.engine.capacity:
            # No room to read this and answer. The earlier turns are kept as they are; nothing is cut from the left.
            episode.end_reason = "context"
            episode.turns.append(Turn(role, text, 0, begin, calls))
            return
        episode.trajectory.append_context(ids)
        episode.turns.append(Turn(role, text, len(ids), begin, calls))

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


def _result(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function returns or raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def _put(answers: SimpleQueue[tuple[int, Any]], number: int, answer: Any) -> None:
    answers.put((number, answer))


def _first(answers: SimpleQueue[tuple[int, Any]]) -> tuple[int, Any]:
    """The next answer. Waits in pieces: a signal that comes just before a wait is noticed only after it."""
    while True:
        with suppress(Empty):
            return answers.get(timeout=SIGNAL_POLL_S)


def _take(answers: SimpleQueue[tuple[int, Any]], *, block: bool) -> list[tuple[int, Any]]:
    """All answers there are; with `block`, waits for the first.

    Raises:
      KeyboardInterrupt: a tool was interrupted by the user.
    """
    taken = [_first(answers)] if block else []
    while True:
        try:
            taken.append(answers.get_nowait())
        except Empty:
            break
    for _, answer in taken:
        if isinstance(answer, KeyboardInterrupt | SystemExit):
            raise answer
    return taken
