"""`orchestra solve`: a trained policy works on a question with live tools, and shows its turns as they come."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
from rich.console import Console
from rich.markup import escape

from orchestra_jax.config import ConfigError
from orchestra_jax.rollout.policy import Policy, load_policy
from orchestra_jax.rollout.rollout import Job, Rollout, RolloutLimits, task_prompt_ids
from orchestra_jax.rollout.setup import eval_kwargs, make_env
from orchestra_jax.sampler.engine import Engine
from orchestra_jax.solve.play import growing_text, play
from orchestra_jax.solve.question import check_keys, question_env, tools_of_file, tools_of_run
from orchestra_jax.solve.source import Source, limits_of, read_source
from orchestra_jax.solve.transcript import INTERRUPTED, answer_of, spent, task_rows
from orchestra_jax.solve.view import View

STEPS_A_ROUND = 4
"""Tokens between two looks at a turn under way: fewer than in training, so that they come evenly."""

MAX_SEED = 2**31


def solve(
    policy: str,
    question: str | None,
    *,
    task: int | None = None,
    tools: str | None = None,
    preference: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    budget_usd: float | None = None,
    json_file: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Lets a policy answer a question, or play a task of its run's environment, and shows how.

    Args:
      policy: a run folder, which gives the environment, the style of prompts and the limits too, or a Hugging Face
        folder; see `read_source`.
      question: the user's; None with `task`.
      task: the seed of a task of the run's environment, with the arguments that evaluations use.
      tools: a YAML file with the tools for the question; None: those of the run's environment.
      preference: what the user cares about, in words that follow the question.
      temperature: of sampling; 0 always takes the most likely token.
      seed: of sampling.
      max_turns: most turns; None: as in the run.
      max_tokens: most tokens of the conversation; None: as in the run, else up to 32,000.
      budget_usd: no call is made once the tools have cost so much; None: as in the run.
      json_file: where to write the trajectory, one line as in a run's `episodes/`.
      console: where to show it; None: standard output.

    Returns:
      The trajectory's record, with "answer" (None where there is none).

    Raises:
      ConfigError: a flag, a file, the policy or its tools are not usable; found before anything is asked or paid.
      KeyboardInterrupt: interrupted, after what came of it was shown and written; says what was spent.
      RuntimeError: the environment failed.
    """
    _check_flags(question, task, temperature, seed)
    source = read_source(policy)
    if question is not None:
        env = _question_env(source, question, tools, preference, max_turns=max_turns, budget_usd=budget_usd)
    else:
        if tools is not None or preference is not None:
            raise ConfigError("--tools and --preference go with a question; a task brings its own")
        env = _task_env(source, max_turns=max_turns, budget_usd=budget_usd)
    console = console or Console()
    with console.status(f"loading {escape(str(source.folder))}"):
        loaded = load_policy(source.model, source.text, seed)
    capacity, limits = limits_of(source, loaded.config, max_tokens)
    job = Job(seed if task is None else task, replica=0, trajectory=seed, temperature=temperature)
    observation, tool_names = _opening(env, loaded, source.text.tools, job, capacity, limits)
    output = None if json_file is None else _opened(json_file)
    rollout = _rollout(env, loaded, source.text.tools, capacity, limits, seed)
    view = View(console, lambda: growing_text(rollout))
    view.print(task_rows(observation, tool_names, label="question" if task is None else "task"))
    try:
        episode = play(rollout, loaded.params, job, view, scored=question is None)
    finally:
        rollout.close()
    record = episode.to_json(phase="solve", policy=str(source.folder), answer=answer_of(episode))
    if output is not None:
        output.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    if episode.end_reason == INTERRUPTED:
        raise KeyboardInterrupt(f"interrupted after {spent(episode)}")
    if episode.infra_failure:
        raise RuntimeError(f"the environment failed ({episode.end_reason}); the log says why")
    return record


def _check_flags(question: str | None, task: int | None, temperature: float, seed: int) -> None:
    if (question is None) == (task is None):
        raise ConfigError('ask one thing: a question, as in `orchestra solve POLICY "Who ...?"`, or --task SEED')
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature:g}: must be a finite number of at least 0")
    for flag, number in (("--seed", seed), ("--task", task or 0)):
        if not 0 <= number < MAX_SEED:
            raise ConfigError(f"{flag} {number}: must be at least 0 and less than 2^31")


def _question_env(
    source: Source,
    question: str,
    tools_file: str | None,
    preference: str | None,
    **limits: float | None,
) -> gym.Env:
    """The question with the tools of the file, or else of the run."""
    if tools_file is not None:
        tools = tools_of_file(tools_file)
    elif source.run is not None:
        tools = tools_of_run(source.run)
    else:
        raise ConfigError(f"{source.folder} is no run and names no tools: give them with --tools FILE")
    return question_env(question, tools, source.run, preference=preference or "", **limits)


def _task_env(source: Source, **limits: float | None) -> gym.Env:
    """The environment of the run, as evaluations make it, but for the limits that are given."""
    if source.run is None:
        raise ConfigError(f"--task plays a task of a run's environment, and {source.folder} is no run")
    kwargs = eval_kwargs(source.run) | {name: value for name, value in limits.items() if value is not None}
    check_keys(kwargs, "env.kwargs.tools")
    return make_env(source.run, kwargs)


def _opening(
    env: gym.Env, policy: Policy, style: str, job: Job, capacity: int, limits: RolloutLimits
) -> tuple[str, list[str]]:
    """What is asked and the names of the tools, once it is sure that they leave room for turns. No tool is called."""
    try:
        observation, info = env.reset(seed=job.seed, options={"replica": job.replica})
        length = len(task_prompt_ids(policy.chat, style, str(observation), info))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if length > capacity - limits.max_turn_tokens:
        most = policy.config.max_position_embeddings
        way = f"raise --max-tokens (the model holds {most}), or ask" if capacity < most else "ask"
        raise ConfigError(
            f"question and tools take {length} tokens, and of the {capacity} of a conversation a turn may need "
            f"{limits.max_turn_tokens}: {way} more shortly or with fewer tools"
        )
    tools = json.loads(info.get("tools_json") or "[]")
    return str(observation), [tool["function"]["name"] for tool in tools]


def _rollout(env: gym.Env, policy: Policy, style: str, capacity: int, limits: RolloutLimits, seed: int) -> Rollout:
    """The rollout of one conversation."""
    engine = Engine(
        policy.config,
        slots=1,
        capacity=capacity,
        stop_ids=policy.chat.stop_ids,
        seed=seed,
        dtype=policy.params["embed_tokens"].dtype,
        steps=STEPS_A_ROUND,
    )
    return Rollout(lambda: env, engine, policy.chat, tool_style=style, limits=limits)


def _opened(json_file: str) -> Path:
    """The file to write, found to be writable before anything is paid."""
    try:
        with open(json_file, "a", encoding="utf-8"):
            return Path(json_file)
    except OSError as error:
        raise ConfigError(f"--json {json_file}: {error.strerror or error}") from None
