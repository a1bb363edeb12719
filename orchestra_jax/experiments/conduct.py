"""Conducting experiments: the training runs that they need, one after the other, then the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from orchestra_jax.config import RunConfig
from orchestra_jax.experiments.plan import Experiment
from orchestra_jax.experiments.runs import TrainingRun, make_run, with_starts


def conduct(
    experiment: Experiment, runs: Mapping[str, TrainingRun], config: RunConfig, folder: Path, console: Console
) -> None:
    """Makes what the experiment lacks of its runs and its evaluation; what was done before is not done again.

    Args:
      experiment: which.
      runs: all training runs.
      config: for the evaluation.
      folder: the evaluation's.
      console: where the steps are told.

    Raises:
      ConfigError: a folder holds something else.
      KeyboardInterrupt: a signal came; the same call goes on.
    """
    from orchestra_jax.eval.command import evaluate

    for run in with_starts(experiment.runs, runs):
        if not run.is_finished:
            console.print(f"{experiment.name}: training run {run.name} ({run.title})", highlight=False)
            make_run(run)
    console.print(f"{experiment.name}: evaluation", highlight=False)
    policies = [f"{name}={runs[name].policy}" for name in experiment.runs]
    evaluate(config, [*policies, *experiment.policies], suites=experiment.suites, out=str(folder))


def seed_folder(out: Path, seed: int) -> Path:
    """Where everything of a seed lies: `runs/NAME` and `eval/NAME`."""
    return out / f"seed-{seed}"


def evaluation_folder(out: Path, seed: int, experiment: str) -> Path:
    """Where an experiment's episodes and summary of a seed lie."""
    return seed_folder(out, seed) / "eval" / experiment
