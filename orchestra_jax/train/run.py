"""A whole run: supervised warm start, GRPO, evaluation, report. One folder, resumable at any moment.

Everything that a step does is a function of the parameters and of (seed, step): tasks, replicas, sampling. So a run
that was killed and resumed from its last checkpoint gives the same numbers as one that was not.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from rich.console import Console

from orchestra_jax.config import ConfigError, RunConfig
from orchestra_jax.distributed import ends_for_all, from_writer, gather_objects, is_writer, on_writer, together
from orchestra_jax.eval.evaluate import evaluate_policies, scripted_names
from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, param_specs
from orchestra_jax.parallel.local import to_local
from orchestra_jax.parallel.mesh import check_divides, make_mesh, shardings
from orchestra_jax.parallel.rules import param_partition
from orchestra_jax.report import write_report
from orchestra_jax.report.console import make_progress, policies_table
from orchestra_jax.rl import mismatch_metrics
from orchestra_jax.rollout.episode import Episode
from orchestra_jax.rollout.policy import Policy, load_policy, save_policy
from orchestra_jax.rollout.rollout import Job, Rollout
from orchestra_jax.rollout.setup import build_rollout, check_fit, check_scripted, eval_kwargs, make_env
from orchestra_jax.signals import signals_noted
from orchestra_jax.train.checkpoint import CheckpointError, CheckpointStore
from orchestra_jax.train.folder import RunFolder, find_run, open_run
from orchestra_jax.train.learn import Lesson, episode_metrics, max_rows, pack_lesson, teach
from orchestra_jax.train.metrics import Metrics, MetricsWriter, NoMetrics
from orchestra_jax.train.sft import sft_batches
from orchestra_jax.train.step import (
    StepSettings,
    TrainState,
    init_train_state,
    make_optimizer,
    state_partitions,
    train_step,
)
from orchestra_jax.train.trackers import open_trackers

SFT_CHECKPOINT_EVERY = 100


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT came; a checkpoint has been written."""

    def __init__(self) -> None:
        super().__init__("interrupted; a checkpoint is written, the same command goes on from it")


# ----------------------------------------------------------------------------------------------------------
# the parts of a run
# ----------------------------------------------------------------------------------------------------------


def loss_settings(config: RunConfig, model: ModelConfig) -> StepSettings:
    """The compiled part of the RL loss."""
    return StepSettings(
        model=model,
        loss=config.loss.kind,
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        dual_clip=config.loss.dual_clip,
        entropy_coef=config.loss.entropy_coef,
        kl_coef=config.loss.kl_coef,
        kl_kind=config.loss.kl_kind,
        temperature=config.rollout.temperature,
        remat=config.model.remat,
        dtype=config.model.dtype,
    )


def run_mesh(config: RunConfig, model: ModelConfig) -> Mesh | None:
    """The mesh that a run trains on, over all devices; None on a single one.

    Raises:
      ConfigError: the devices, the model or the batch cannot be split in this way.
    """
    try:
        mesh = make_mesh(config.mesh.model_dump())
        check_mesh(config, model, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return mesh


def placement(config: RunConfig, model: ModelConfig) -> dict[str, Sharding] | None:
    """Where a run's weights go: split over its mesh, or (None) on its only device; raises as `run_mesh`."""
    mesh = run_mesh(config, model)
    if mesh is None:
        return None
    return shardings(mesh, {name: param_partition(spec.axes) for name, spec in param_specs(model).items()})


def anyone_stops(stop: list[int]) -> bool:
    """Whether a signal came to any process of the run: then all of them stop after the same step."""
    return any(gather_objects(bool(stop)))


def check_mesh(config: RunConfig, model: ModelConfig, mesh: Mesh | None) -> None:
    """Checks that weights, rows and tokens can be split as the mesh says.

    Raises:
      ValueError: names the size and the mesh axes.
    """
    check_divides(
        mesh,
        {
            "train.micro_batch_rows": (config.train.micro_batch_rows, ["data", "fsdp"]),
            "train.row_tokens": (config.row_tokens, ["sequence", "tensor"]),
            "the model's number of KV heads": (model.num_kv_heads, ["tensor"]),
            "the model's intermediate size": (model.intermediate_size, ["tensor"]),
            "the model's vocabulary": (model.vocab_size, ["tensor"]),
            "the model's hidden size": (model.hidden_size, ["fsdp"]),
        },
    )


def warm_start(
    config: RunConfig,
    folder: RunFolder,
    policy: Policy,
    metrics: Metrics,
    console: Console,
    stop: list[int],
) -> Params:
    """Clones the router's traces; the result is written to `warm_start/` and returned."""
    sft = config.sft
    assert sft is not None
    env = make_env(config, config.env.kwargs)
    batches = sft_batches(config, sft, env, policy.chat)
    env.close()
    total = len(batches)
    optimizer = make_optimizer(
        learning_rate=sft.optimizer.learning_rate,
        weight_decay=sft.optimizer.weight_decay,
        max_grad_norm=sft.optimizer.max_grad_norm,
        betas=(sft.optimizer.beta1, sft.optimizer.beta2),
        warmup_updates=sft.optimizer.warmup_updates,
        total_updates=total,
        final_fraction=sft.optimizer.final_fraction,
        moment_dtype=sft.optimizer.moment_dtype,
    )
    settings = StepSettings(model=policy.config, loss="reinforce", remat=config.model.remat, dtype=config.model.dtype)
    mesh = run_mesh(config, policy.config)
    micro_batches = -(-sft.rows_per_update // config.train.micro_batch_rows)
    with (
        CheckpointStore(folder.path / "checkpoints" / "sft", keep_latest=1) as store,
        make_progress(console, description="warm start") as progress,
    ):
        state, done = restore(store, init_train_state(policy.params, optimizer, policy.config, mesh), metrics, "sft")
        for batch in batches[done:]:
            started = time.perf_counter()
            state, values, _ = train_step(
                settings,
                optimizer,
                state,
                batch,
                micro_batch_rows=config.train.micro_batch_rows,
                max_micro_batches=micro_batches,
                mesh=mesh,
            )
            done += 1
            metrics.write(
                {
                    "step": done,
                    "phase": "sft",
                    "sft/loss": values["loss"],
                    "sft/grad_norm": values["grad_norm"],
                    "time/update_s": time.perf_counter() - started,
                }
            )
            progress(done, total)
            stopping = anyone_stops(stop)
            if stopping or (done % SFT_CHECKPOINT_EVERY == 0 and done < total):
                save(store, done, state, metrics, wait=stopping)
            if stopping:
                raise Interrupted
    metrics.flush()
    params = as_saved(config, state.params)
    save_policy(folder.warm_start, policy, params)
    return params


def as_saved(config: RunConfig, params: Params) -> Params:
    """Trained weights in the dtype in which they are saved, and sampled with."""
    return {name: value.astype(config.model.dtype) for name, value in params.items()}


def save(store: CheckpointStore, step: int, state: TrainState, metrics: Metrics, *, wait: bool = False) -> None:
    """A checkpoint after update `step`: parameters, optimizer, counters, and how far metrics.jsonl goes."""
    host_state = {"step": step, "policy_version": step, "metrics_bytes": metrics.flush()}
    store.save(step, state._asdict(), host_state, wait=wait)


def restore(store: CheckpointStore, state: TrainState, metrics: Metrics, phase: str) -> tuple[TrainState, int]:
    """The newest complete checkpoint of a phase, or `state` as it is and step 0; metrics.jsonl is cut to match.

    Raises:
      ConfigError: the checkpoints are damaged.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state._asdict())
    try:
        found = store.restore_latest(abstract)
    except CheckpointError as error:
        raise ConfigError(f"{error}; --overwrite starts the run anew") from None
    if found is None:
        metrics.drop_phase(phase)
        return state, 0
    step, arrays, host_state = found
    metrics.truncate(host_state["metrics_bytes"])
    return TrainState(**arrays), step


def step_jobs(config: RunConfig, step: int) -> list[Job]:
    """The episodes of a step: which tasks, and which random numbers; a function of (seed, step) alone."""
    seeds = np.random.default_rng([config.seed, 0, step]).integers(0, 2**30, config.rollout.tasks_per_step)
    first = step * config.trajectories_per_step
    return [
        Job(int(seed), member, (first + group * config.rollout.group_size + member) % 2**31, config.rollout.temperature)
        for group, seed in enumerate(seeds)
        for member in range(config.rollout.group_size)
    ]


def train_policy(
    config: RunConfig,
    folder: RunFolder,
    policy: Policy,
    start: Params,
    metrics: Metrics,
    console: Console,
    stop: list[int],
) -> Params:
    """GRPO from `start`; the result is written to `model/` and returned."""
    steps = config.train.steps
    optimizer = make_optimizer(
        learning_rate=config.optimizer.learning_rate,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        warmup_updates=config.optimizer.warmup_updates,
        total_updates=steps * config.train.minibatches,
        final_fraction=config.optimizer.final_fraction,
        moment_dtype=config.optimizer.moment_dtype,
    )
    settings = loss_settings(config, policy.config)
    mesh = run_mesh(config, policy.config)
    store = CheckpointStore(folder.path / "checkpoints" / "rl", keep_latest=config.train.keep_checkpoints)
    state, done = restore(store, init_train_state(start, optimizer, policy.config, mesh), metrics, "train")
    if done:
        console.print(f"resuming after step {done} of {steps}")
    rows = config.rollout.rows or config.trajectories_per_step
    rollout = build_rollout(config, policy, config.env.kwargs, rows)
    reference = start if config.loss.kl_coef else None
    if reference is not None and mesh is not None:
        reference = jax.device_put(reference, shardings(mesh, state_partitions(policy.config, state).params))
    compile_sampler(config, rollout, state.params, folder, console)
    try:
        with make_progress(console, description="training") as progress:
            for step in range(done + 1, steps + 1):
                state, row = one_step(config, folder, rollout, settings, optimizer, state, step, reference, mesh)
                metrics.write(row)
                progress(
                    step,
                    steps,
                    reward=row["reward/mean"],
                    accuracy=row.get("outcome/accuracy"),
                    cost_usd=row["cost/mean_usd"],
                )
                last, stopping = step == steps, anyone_stops(stop)
                if stopping or last or step % config.train.checkpoint_every == 0:
                    save(store, step, state, metrics, wait=stopping or last)
                if stopping:
                    raise Interrupted
    finally:
        rollout.close()
        store.close()
    params = as_saved(config, state.params)
    save_policy(folder.model, policy, params)
    return params


def open_metrics(config: RunConfig, folder: RunFolder) -> Metrics:
    """Who is told of every step; only the first process of a run tells.

    Raises:
      ConfigError: the package of a tracker is not installed.
    """
    if not is_writer():
        return NoMetrics()
    return MetricsWriter(folder.path, open_trackers(config.trackers, folder.path, config.model_dump()))


def sampled_with(config: RunConfig, params: Params) -> Params:
    """Weights as this process samples with them: in the model's dtype; where there are several processes, its own copy.

    The trainer's own arrays serve where they have that dtype already.
    """
    if jax.process_count() > 1:
        return to_local(as_saved(config, params))
    same = all(value.dtype == config.model.dtype for value in params.values())
    return params if same else as_saved(config, params)


def compile_sampler(config: RunConfig, rollout: Rollout, params: Params, folder: RunFolder, console: Console) -> None:
    """Compiles all shapes of the sampler before the first step, and says what that took; the list goes into a file."""
    local = sampled_with(config, params)

    def warm_up() -> list[tuple[str, float]]:
        rollout.engine.use(local, 0)
        return rollout.engine.warm_up()

    times = together(warm_up, "compiling the sampler")
    on_writer(lambda: folder.write_warm_up(times))
    seconds: dict[str, list[float]] = {}
    for name, second in times:
        seconds.setdefault(name.split()[0], []).append(second)
    kinds = ", ".join(f"{len(all_)} of {kind} in {sum(all_):.1f} s" for kind, all_ in seconds.items())
    console.print(f"sampler: {len(times)} shapes ready: {kinds}; all of them in warm_up.json", highlight=False)


def one_step(
    config: RunConfig,
    folder: RunFolder,
    rollout: Rollout,
    settings: StepSettings,
    optimizer: Any,
    state: TrainState,
    step: int,
    reference: Params | None,
    mesh: Mesh | None,
) -> tuple[TrainState, dict[str, Any]]:
    """Rollouts, rewards, update. Returns the new state and the row for metrics.jsonl."""
    started = time.perf_counter()
    episodes, sampler_metrics = play_step(config, rollout, state.params, step)
    rolled_out = time.perf_counter()
    size = config.rollout.group_size
    groups = [episodes[i : i + size] for i in range(0, len(episodes), size)]
    lesson = teach(config, groups)
    batches = pack_lesson(config, groups, lesson)
    packed = time.perf_counter()
    row: dict[str, Any] = {"step": step, "phase": "train", "policy_version": step}
    row |= episode_metrics(episodes, lesson) | sampler_metrics
    for index, batch in enumerate(batches):
        state, values, logprobs = train_step(
            settings,
            optimizer,
            state,
            batch,
            micro_batch_rows=config.train.micro_batch_rows,
            max_micro_batches=-(-max_rows(config) // config.train.micro_batch_rows),
            reference=reference,
            mesh=mesh,
        )
        if index == 0:
            # Before the first update trainer and sampler have the same weights: what differs is numerics.
            row |= mismatch_metrics(logprobs, batch.behavior_logprobs, batch.weights)
        for name, value in values.items():
            key = LOSS_NAMES.get(name, f"loss/{name.replace('/', '_')}")
            row[key] = row.get(key, 0.0) + value / len(batches)
    row |= {
        "time/rollout_s": rolled_out - started,
        "time/pack_s": packed - rolled_out,
        "time/update_s": time.perf_counter() - packed,
    }
    if step % config.train.episodes_every == 0 or step in (1, config.train.steps):
        on_writer(
            lambda: folder.write_episodes(f"train-{step:06d}", train_records(episodes, lesson, step, size)),
            "writing episodes",
        )
    return state, row


def play_step(config: RunConfig, rollout: Rollout, params: Params, step: int) -> tuple[list[Episode], dict[str, float]]:
    """All episodes of a step, in order, on every process, each of which plays its share: whole groups, dealt in turn.

    What follows (rewards, filters, denominators, packing) is computed from all of them by every process, so that it
    agrees whatever a host's own episodes are worth.

    Returns:
      The episodes, and what the sampler did: means over the processes.
    """
    jobs, size = step_jobs(config, step), config.rollout.group_size
    groups = [jobs[i : i + size] for i in range(0, len(jobs), size)]
    mine = [job for group in groups[jax.process_index() :: jax.process_count()] for job in group]
    weights = sampled_with(config, params)
    played = together(lambda: rollout.run(weights, mine, policy_version=step - 1), "playing episodes")
    shares = [iter(share) for share in gather_episodes(played)]
    episodes = [next(shares[group % len(shares)]) for group in range(len(groups)) for _ in range(size)]
    measured = gather_objects(rollout.engine.metrics())
    return episodes, {name: sum(m[name] for m in measured) / len(measured) for name in measured[0]}


def gather_episodes(played: list[Episode]) -> list[list[Episode]]:
    """Every process' episodes, on all of them."""
    if jax.process_count() == 1:
        return [played]
    texts = played[0].token_texts if played else None
    shares = gather_objects([replace(episode, token_texts=None) for episode in played])
    return [[replace(episode, token_texts=texts) for episode in share] for share in shares]


LOSS_NAMES = {"loss": "loss/policy", "entropy": "policy/entropy", "grad_norm": "optimizer/grad_norm"}


def train_records(episodes: list[Episode], lesson: Lesson, step: int, group_size: int) -> list[dict[str, Any]]:
    """The step's trajectories as readable records."""
    return [
        episode.to_json(
            step=step,
            phase="train",
            policy="training",
            group=index // group_size,
            reward=None if np.isnan(lesson.rewards[index]) else float(lesson.rewards[index]),
            advantage=float(lesson.advantages[index]),
            dropped=lesson.dropped[index],
        )
        for index, episode in enumerate(episodes)
    ]


def evaluate_run(
    config: RunConfig, folder: RunFolder, policy: Policy, weights: dict[str, Params], console: Console
) -> dict[str, Any]:
    """Evaluates the policy with each of the `weights`, and the baselines; writes summary.json and returns it."""
    assert config.eval is not None
    local = {name: sampled_with(config, params) for name, params in weights.items()}

    def evaluate() -> dict[str, Any]:
        return _evaluate(config, folder, policy, local, console)

    # By the first process alone: the others wait.
    return from_writer(on_writer(evaluate, "the evaluation")) or {}


def _evaluate(
    config: RunConfig, folder: RunFolder, policy: Policy, weights: dict[str, Params], console: Console
) -> dict[str, Any]:
    assert config.eval is not None
    policies = {name: partial(replace, policy, params=params) for name, params in weights.items()}
    evaluation = evaluate_policies(config, policies, config.eval.baselines, console)
    for name, records in evaluation.records.items():
        folder.write_episodes(f"eval-{name.replace(':', '-')}", [{**record, "policy": name} for record in records])
    folder.write_summary(evaluation.summary)
    return evaluation.summary


# ----------------------------------------------------------------------------------------------------------
# the commands
# ----------------------------------------------------------------------------------------------------------


def train(config: RunConfig, *, overwrite: bool = False, console: Console | None = None) -> dict[str, Any] | None:
    """`orchestra train`: warm start if configured, GRPO, evaluation, report. Resumes what was begun.

    A finished run is only reported again.

    Returns:
      The summary, or None where the config has no evaluation.

    Raises:
      ConfigError: the user's mistake, in one line.
      Interrupted: a signal came; a checkpoint was written.
    """
    with ends_for_all():
        return _train_or_report(config, overwrite=overwrite, console=_console(console))


def _console(console: Console | None) -> Console:
    """Where progress goes; nowhere but on the first process."""
    return console or Console(stderr=True, quiet=not is_writer())


def _train_or_report(config: RunConfig, *, overwrite: bool, console: Console) -> dict[str, Any] | None:
    folder = find_together(config, overwrite=overwrite)
    if from_writer(not overwrite and folder.model.is_dir() and (config.eval is None or folder.summary.is_file())):
        console.print(f"{folder.path} holds this run, finished; --overwrite starts it anew", highlight=False)
        summary = from_writer(on_writer(folder.read_summary))
    else:
        summary = _train(config, folder, console, overwrite=overwrite)
    if summary is not None:
        console.print(policies_table(summary))
    report = on_writer(lambda: write_report(folder.path))
    console.print(f"policy: {folder.model}\nreport: {report}", soft_wrap=True, highlight=False)
    return summary


def find_together(config: RunConfig, *, overwrite: bool) -> RunFolder:
    """The run's folder; the first process looks, and raises for all of them what `find_run` raises."""
    on_writer(lambda: find_run(config, overwrite=overwrite), "finding the run")
    return RunFolder(Path(config.output_dir))


def load_run(config: RunConfig) -> Policy:
    """The policy to start from, on the run's mesh, after everything was checked that could stop the run later.

    Raises:
      ConfigError: a mistake of the user's, found by any of the processes.
    """

    def load() -> Policy:
        policy = load_policy(config.model, config.text, config.seed, partial(placement, config))
        check_run(config, policy)
        return policy

    return together(load, "loading the policy")


def _train(config: RunConfig, folder: RunFolder, console: Console, *, overwrite: bool) -> dict[str, Any] | None:
    policy = load_run(config)
    on_writer(lambda: open_run(folder, config, overwrite=overwrite))
    with signals_noted(Interrupted) as stop, open_metrics(config, folder) as metrics:
        start = starting_params(config, folder, policy, metrics, console, stop)
        if from_writer(folder.model.is_dir()):
            trained = load_weights(config, folder.model)
        else:
            trained = train_policy(config, folder, policy, start, metrics, console, stop)
    if config.eval is None:
        return None
    weights = {"warm_start" if config.sft else "start": start, "trained": trained}
    return evaluate_run(config, folder, policy, weights, console)


def check_run(config: RunConfig, policy: Policy) -> None:
    """Finds what would stop the run later, before anything is trained or written.

    Raises:
      ConfigError: environment, prompts, router or baselines do not fit.
    """
    most_sampled = check_fit(config, policy, config.env.kwargs)
    if config.row_targets < most_sampled:
        raise ConfigError(
            f"train.row_targets ({config.row_targets}) is less than what an episode can sample ({most_sampled})"
        )
    if config.sft is not None:
        check_scripted(config, "sft.router", [config.sft.router], config.env.kwargs)
    if config.eval is not None:
        check_fit(config, policy, eval_kwargs(config))
        scripted_names(config, config.eval.baselines)


def starting_params(
    config: RunConfig,
    folder: RunFolder,
    policy: Policy,
    metrics: Metrics,
    console: Console,
    stop: list[int],
) -> Params:
    """What RL starts from: the warm start, made now or found in the folder, or the model as it is."""
    if config.sft is None:
        return policy.params
    if from_writer(folder.warm_start.is_dir()):
        return load_weights(config, folder.warm_start)
    return warm_start(config, folder, policy, metrics, console, stop)


def load_weights(config: RunConfig, saved: Path) -> Params:
    """The weights that the run has saved in one of its folders."""
    model = config.model.model_copy(update={"path": str(saved), "preset": None, "overrides": {}})
    load = partial(load_policy, model, config.text, config.seed, partial(placement, config))
    return together(load, "loading weights").params


def sft(config: RunConfig, *, overwrite: bool = False, console: Console | None = None) -> Path:
    """`orchestra sft`: the warm start alone. Returns the folder of the policy.

    Raises:
      ConfigError: the config has no `sft` section, or another mistake of the user's.
      Interrupted: a signal came; a checkpoint was written.
    """
    if config.sft is None:
        raise ConfigError("the config has no sft section: add one, for example `sft: {router: habit}`")
    console = _console(console)
    with ends_for_all():
        return _sft(config, overwrite=overwrite, console=console)


def _sft(config: RunConfig, *, overwrite: bool, console: Console) -> Path:
    folder = find_together(config, overwrite=overwrite)
    if overwrite or not from_writer(folder.warm_start.is_dir()):
        policy = load_run(config)
        on_writer(lambda: open_run(folder, config, overwrite=overwrite))
        with signals_noted(Interrupted) as stop, open_metrics(config, folder) as metrics:
            warm_start(config, folder, policy, metrics, console, stop)
    return folder.warm_start
