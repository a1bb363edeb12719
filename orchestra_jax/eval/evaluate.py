"""Policies on the same tasks: weights of ours through the sampler, all others through the same environments."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestra_envs.baselines import make_policy
from orchestra_envs.env import bare_tool_env
from orchestra_envs.judge import JudgeUsage, judge_usage
from orchestra_envs.preference import preference_score, preference_vector
from rich.console import Console

from orchestra_jax.config import ConfigError, EvalConfig, RunConfig
from orchestra_jax.eval.compare import compare_all
from orchestra_jax.eval.endpoint import Orchestrator, make_policies
from orchestra_jax.eval.play import INFRA_ERROR, EvalJob, Record, play_all
from orchestra_jax.eval.stats import summarize
from orchestra_jax.eval.store import EvalStore
from orchestra_jax.eval.suites import EvalTask, Suite, own_suite, suite_tasks
from orchestra_jax.models.decoder import Params
from orchestra_jax.report.console import make_progress
from orchestra_jax.rollout.episode import Episode
from orchestra_jax.rollout.policy import Policy
from orchestra_jax.rollout.rollout import Job, Rollout
from orchestra_jax.rollout.setup import build_rollout, check_scripted, eval_kwargs, make_env
from orchestra_jax.signals import signals_noted

REFERENCE_POLICY = "random"
"""The preference score compares with a reference policy on the same task: this one, unless another is named."""

FIRST_EVAL_TRAJECTORY = 2**31
"""Trajectory numbers of evaluations start here, far from those of training."""

DEFAULT_CONCURRENCY = 64
"""Episodes under way at once of policies that are no weights of ours."""

HOPELESS_AFTER = 8
"""An endpoint that failed in every one of its first so many episodes is not asked any further."""

Records = list[Record]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: the content of summary.json, and the episodes of each policy by suite and name."""

    summary: dict[str, Any]
    suites: dict[str, dict[str, Records]]

    @property
    def records(self) -> dict[str, Records]:
        """The episodes by policy, of an evaluation on one suite."""
        (records,) = self.suites.values()
        return records


@dataclass(frozen=True)
class Contenders:
    """Who is evaluated, by name.

    Attributes:
      models: what loads each. They are called one after the other, so that one set of weights is held at a time.
      scripted: names for `orchestra_envs.baselines.make_policy`.
      endpoints: orchestrators behind endpoints.
    """

    models: Mapping[str, Callable[[], Policy]] = field(default_factory=dict)
    scripted: Sequence[str] = ()
    endpoints: Mapping[str, Orchestrator] = field(default_factory=dict)


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
      policies: by name, what loads each.
      scripted: names for `orchestra_envs.baselines.make_policy`.
      console: where progress goes.

    Raises:
      ConfigError: the environment cannot be made, or a scripted policy cannot act in it.
    """
    suite = own_suite(config)
    names = scripted_names(config, scripted)
    return evaluate_suites([suite], Contenders(policies, names), config, console=console)


def evaluate_suites(
    suites: Sequence[Suite],
    contenders: Contenders,
    config: RunConfig,
    *,
    console: Console,
    trials: int = 1,
    reference: str | None = REFERENCE_POLICY,
    concurrency: int = DEFAULT_CONCURRENCY,
    store: EvalStore | None = None,
    by_suite: bool = False,
) -> Evaluation:
    """Evaluates everybody on every suite.

    Args:
      suites: the tasks.
      contenders: the policies. Scripted ones play in the suites where they can act (see `scripted_names`).
      config: `seed`, and `eval.modes` of the models.
      trials: episodes of each task. They differ in the tools' luck and in what is sampled.
      reference: the label of the policy that preference scores are relative to; None, or one that is not there: no
        scores.
      concurrency: episodes under way at once of policies that are no weights of ours.
      store: where finished episodes are kept, and taken from.
      by_suite: the summary has "suites" even if there is only one.

    Raises:
      ConfigError: an environment cannot be made, or a policy cannot act in it or cannot be reached.
    """
    modes = (config.eval or EvalConfig()).modes
    judged_before = {id(usage): copy.deepcopy(usage) for _, usage in judge_usage()}
    tasks = {suite.name: suite_tasks(suite) for suite in suites}
    labels = len(contenders.models) * len(modes) + len(contenders.scripted) + len(contenders.endpoints)
    total = labels * trials * sum(map(len, tasks.values()))
    found: dict[str, dict[str, Records]] = {suite.name: {} for suite in suites}
    with make_progress(console, description="evaluation") as progress:
        work = _Work(trials, concurrency, store, partial(_tell, progress, Counter(), total))
        for name, load in contenders.models.items():
            for suite in suites:
                found[suite.name] |= _evaluate_model(suite, name, load, tasks[suite.name], modes, work)
        for suite in suites:
            for name, orchestrator in contenders.endpoints.items():
                make_endpoint = make_policies(orchestrator)
                records = _evaluate_others(suite, name, make_endpoint, tasks[suite.name], work, is_endpoint=True)
                found[suite.name][name] = records
            for name in contenders.scripted:
                make = partial(make_policy, name)
                found[suite.name][name] = _evaluate_others(suite, name, make, tasks[suite.name], work)
    parts = {}
    for suite in suites:
        by_policy = found[suite.name]
        for episodes in by_policy.values() if reference in by_policy else ():
            add_preference_scores(episodes, by_policy[str(reference)])
        parts[suite.name] = _part(suite, by_policy, reference if reference in by_policy else None)
    summary = _summary(config, parts, trials, by_suite=by_suite or len(suites) > 1)
    if judges := _judges(judged_before):
        summary["judges"] = judges
    if problems := {name: dict(o.problems) for name, o in contenders.endpoints.items() if o.problems}:
        summary["failed_requests"] = problems
    for warning in _warnings(summary, contenders.endpoints):
        console.print(
            f"WARNING: {warning}", style="bold red", markup=False, emoji=False, highlight=False, soft_wrap=True
        )
    return Evaluation(summary, found)


# ----------------------------------------------------------------------------------------------------------
# episodes
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """How episodes are made: trials of each task, how many at once, where they are kept, who is told of each."""

    trials: int
    concurrency: int
    store: EvalStore | None
    tell: Callable[[], None]

    def jobs(self, tasks: Sequence[EvalTask]) -> list[EvalJob]:
        """All episodes, trial by trial."""
        return [EvalJob(task, trial) for trial in range(self.trials) for task in tasks]


def _tell(progress: Callable[[int, int], None], done: Counter[str], total: int) -> None:
    done["episodes"] += 1
    progress(done["episodes"], total)


def _remaining(
    suite: str, label: str, jobs: Sequence[EvalJob], work: _Work
) -> tuple[dict[tuple[int, int], Record], list[EvalJob]]:
    """The episodes that the store holds, and the jobs that it lacks.

    Raises:
      ConfigError: the tasks behind the numbers are others now (a file of questions was changed).
    """
    finished = work.store.finished(suite, label) if work.store else {}
    held: dict[tuple[int, int], Record] = {}
    missing = []
    for job in jobs:
        record = finished.get((job.task.number, job.trial))
        if record is None:
            missing.append(job)
            continue
        if record["seed"] != job.task.seed or job.task.task_id not in (None, record["task_id"]):
            raise ConfigError(
                f"suite {suite}: task {job.task.number} was {record['task_id']!r} when {label} played it, and is "
                "another now: the suite's data have changed; give --out a new folder"
            )
        held[job.task.number, job.trial] = record
        work.tell()
    return held, missing


def _keep(suite: str, label: str, kept: dict[tuple[int, int], Record], work: _Work, record: Record) -> None:
    """Enters a finished episode."""
    kept[record["number"], record["trial"]] = record
    if work.store:
        work.store.append(suite, label, record)
    work.tell()


def _in_order(jobs: Sequence[EvalJob], kept: Mapping[tuple[int, int], Record]) -> Records:
    return [kept[job.task.number, job.trial] for job in jobs]


def _evaluate_model(
    suite: Suite, name: str, load: Callable[[], Policy], tasks: Sequence[EvalTask], modes: Sequence[str], work: _Work
) -> dict[str, Records]:
    """Episodes of a policy in each mode, by label; it is loaded only if one is missing."""
    labels = {mode: f"{name}:greedy" if mode == "greedy" else name for mode in modes}
    jobs = work.jobs(tasks)
    parts = {mode: _remaining(suite.name, label, jobs, work) for mode, label in labels.items()}
    if any(missing for _, missing in parts.values()):
        policy = load()
        config = suite.config
        # As many rows as for the whole: what an episode samples must not depend on how many were there before it.
        rows = min(config.rollout.rows or config.trajectories_per_step, len(jobs))
        rollout = build_rollout(config, policy, eval_kwargs(config), rows)
        try:
            for mode, (kept, missing) in parts.items():
                temperature = 0.0 if mode == "greedy" else config.rollout.temperature
                on_record = partial(_keep, suite.name, labels[mode], kept, work)
                evaluate_policy(rollout, policy.params, missing, len(tasks), temperature, on_record)
        finally:
            rollout.close()
    return {labels[mode]: _in_order(jobs, kept) for mode, (kept, _) in parts.items()}


def evaluate_policy(
    rollout: Rollout,
    params: Params,
    jobs: Sequence[EvalJob],
    num_tasks: int,
    temperature: float,
    on_record: Callable[[Record], None],
) -> None:
    """Plays jobs with weights of ours (temperature 0 is greedy); `on_record` gets each episode when it ends.

    What is sampled depends on the number of the task and the trial, not on the other jobs.
    """
    numbered = [
        Job(
            job.task.seed,
            job.trial,
            FIRST_EVAL_TRAJECTORY + (job.trial * num_tasks + job.task.number) % 2**31,
            temperature,
            job.task.task_id,
        )
        for job in jobs
    ]

    with signals_noted() as received:

        def watch(number: int, episode: Episode) -> None:
            if episode.end_reason:
                on_record(_record(jobs[number], episode))
            if received:
                raise KeyboardInterrupt

        rollout.run(params, numbered, policy_version=0, watch=watch)


def _record(job: EvalJob, episode: Episode) -> Record:
    record = episode.to_json(phase="eval", number=job.task.number, trial=job.trial, weights=episode.preference)
    record["outcome"] = 0.0 if episode.outcome is None else episode.outcome
    record["num_format_errors"] = episode.num_format_errors
    if episode.infra_failure:
        record["end_reason"] = INFRA_ERROR
    return record


def _evaluate_others(
    suite: Suite,
    name: str,
    make: Callable[[], Any],
    tasks: Sequence[EvalTask],
    work: _Work,
    *,
    is_endpoint: bool = False,
) -> Records:
    """Episodes of a scripted policy, or of one behind an endpoint."""
    jobs = work.jobs(tasks)
    kept, missing = _remaining(suite.name, name, jobs, work)
    failed: list[bool] = []

    def on_record(record: Record) -> None:
        _keep(suite.name, name, kept, work, record)
        failed.append(bool(record.get("error")))
        if is_endpoint and len(failed) == HOPELESS_AFTER and all(failed):
            raise ConfigError(
                f"endpoint {name}: it failed in each of its first {HOPELESS_AFTER} episodes, so no more is asked: "
                f"{record['error']}"
            )

    make_one = partial(make_env, suite.config, eval_kwargs(suite.config))
    # A simulated tool does not wait: one environment is as fast as many, and needs no thread.
    waits = is_endpoint or not _is_simulated(suite)
    play_all(make_one, make, missing, concurrency=work.concurrency if waits else 1, on_record=on_record)
    return _in_order(jobs, kept)


def _is_simulated(suite: Suite) -> bool:
    """Whether nothing in the suite's environment waits, as far as its tools say."""
    env = make_env(suite.config, eval_kwargs(suite.config))
    try:
        bare = bare_tool_env(env)
        judge = getattr(bare, "judge", None)
        return bare is not None and all(t.inline for t in bare.tools) and not getattr(judge, "is_async", False)
    finally:
        env.close()


# ----------------------------------------------------------------------------------------------------------
# who can play
# ----------------------------------------------------------------------------------------------------------


def scripted_names(
    config: RunConfig, names: Sequence[str], key: str = "eval.baselines", *, with_reference: bool = True
) -> list[str]:
    """The scripted policies that an evaluation of `names` runs: those, and the reference where there are tools.

    Raises:
      ConfigError: one does not exist or cannot act in the environment; the message starts with `key`.
    """
    kwargs = eval_kwargs(config)
    check_scripted(config, key, names, kwargs)
    reference = [REFERENCE_POLICY] if with_reference and _offers_a_tool(config, kwargs) else []
    return list(dict.fromkeys([*names, *reference]))


def check_endpoints(suite: Suite) -> None:
    """Raises ConfigError where policies behind endpoints cannot act in the suite's environment."""
    env = make_env(suite.config, eval_kwargs(suite.config))
    try:
        if bare_tool_env(env) is None:
            raise ConfigError(
                f"suite {suite.name}: {suite.config.env.id} is no ToolEnv, and an endpoint plays in nothing else"
            )
    finally:
        env.close()


def _offers_a_tool(config: RunConfig, env_kwargs: dict[str, Any]) -> bool:
    """Whether the environment tells at reset of at least one tool that a scripted policy can call."""
    env = make_env(config, env_kwargs)
    info = env.reset(seed=0)[1]
    env.close()
    return bool(json.loads(info.get("tools_json") or "[]"))


# ----------------------------------------------------------------------------------------------------------
# the summary
# ----------------------------------------------------------------------------------------------------------


def _part(suite: Suite, records: Mapping[str, Records], reference: str | None) -> dict[str, Any]:
    """What was found in one suite."""
    return {
        "env_id": suite.config.env.id,
        "eval_seed": suite.seed,
        "reference": reference,
        "policies": {name: summarize(episodes) for name, episodes in records.items()},
        "comparisons": compare_all(records),
    }


def _summary(config: RunConfig, parts: Mapping[str, dict[str, Any]], trials: int, *, by_suite: bool) -> dict[str, Any]:
    """The summary: that of the only suite, or "suites" by name and under "policies" the rows SUITE/POLICY of all."""
    head = {"seed": config.seed, "trials": trials}
    if not by_suite:
        (part,) = parts.values()
        return {**head, **part}
    if len(parts) == 1:
        (part,) = parts.values()
        return {**head, "suites": dict(parts), "policies": part["policies"]}
    rows = {f"{suite}/{name}": entry for suite, part in parts.items() for name, entry in part["policies"].items()}
    return {**head, "suites": dict(parts), "policies": rows}


def _judges(before: Mapping[int, JudgeUsage]) -> list[dict[str, Any]]:
    """What the language models that judged did and cost since `before`, which is keyed by the account's identity."""
    spent = [(model, usage.since(before.get(id(usage), JudgeUsage()))) for model, usage in judge_usage()]
    return [
        {"model": model, **usage.as_dict()}
        for model, usage in spent
        if usage.num_llm_calls or usage.num_failures or usage.num_cached
    ]


def _warnings(summary: Mapping[str, Any], endpoints: Mapping[str, Orchestrator]) -> Iterator[str]:
    """What must be known before the numbers are believed: one line each."""
    for name, entry in summary["policies"].items():
        if entry["warning"]:
            yield f"{name}: {entry['warning']}"
    for judge in summary.get("judges", []):
        if judge["num_failures"]:
            yield f"the judge {judge['model']} gave no verdict {judge['num_failures']} times: {judge['failures']}"
    for name, orchestrator in endpoints.items():
        if orchestrator.price is None:
            yield (
                f"{name}: the price of {orchestrator.settings.model} is not known, so its own tokens cost "
                "nothing here; give `price` in an endpoint file, 0 and 0 for a model of yours"
            )


def add_preference_scores(records: Records, reference: Records) -> None:
    """Writes each record's "preference" score relative to the reference policy's record of the same task and trial.

    ToolOrchestra appendix L with its sign mended, see `orchestra_envs.preference`. Where a task states no preference,
    outcome, cost and latency weigh 1. None where the reference's episode was dropped: there is nothing to compare with.
    """
    known = {_episode_key(record): record for record in reference if record.get("end_reason") != INFRA_ERROR}
    for record in records:
        compared = known.get(_episode_key(record))
        if compared is None:
            record["preference"] = None
            continue
        weights = record["weights"] or {"outcome": 1.0, "cost": 1.0, "latency": 1.0}
        record["preference"] = preference_score(
            _vector(record), _vector(compared), weights, correct=record["outcome"] > 0.5
        )


def _episode_key(record: Record) -> tuple[int, int]:
    return record["seed"], record.get("trial", 0)


def _vector(record: Record) -> dict[str, float]:
    return preference_vector(record["tool_counts"], record["outcome"], record["cost_usd"], record["latency_s"])
