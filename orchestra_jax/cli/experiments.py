"""`orchestra experiments`: the paper's experiments in simulation, and their page."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestra_jax.config import ConfigError

FOLDER = "configs/experiments"


def add_experiments_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    sub.add_argument("names", nargs="*", metavar="NAME", help="such as routing, reward, budget; default: all")
    sub.add_argument("--configs", default=FOLDER, metavar="DIR", help=f"where they are described; default: {FOLDER}")
    sub.add_argument(
        "--out", default="runs/experiments", metavar="DIR", help="for runs and evaluations; default: %(default)s"
    )
    sub.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="everything once for each; tasks stay the same",
    )
    sub.add_argument("--page", metavar="FILE", help="write the results of all experiments there, in Markdown")
    sub.add_argument("--page-only", action="store_true", help="run nothing; the page tells what there is")


def run_experiments(options: argparse.Namespace) -> None:
    """Runs the command."""
    from rich.console import Console

    from orchestra_jax.experiments.conduct import conduct, evaluation_folder, seed_folder
    from orchestra_jax.experiments.page import write_page
    from orchestra_jax.experiments.plan import evaluation_config, experiment_files, read_experiment
    from orchestra_jax.experiments.runs import read_runs

    if options.page_only and (not options.page or options.names):
        raise ConfigError("--page-only writes the page of all experiments: give --page FILE, and no names")
    folder, out, seeds = Path(options.configs), Path(options.out), list(dict.fromkeys(options.seeds))
    runs = {seed: read_runs(folder, seed_folder(out, seed) / "runs", [f"seed={seed}"]) for seed in seeds}
    configs = {seed: evaluation_config(folder, seed) for seed in seeds}
    files = experiment_files(folder)
    experiments = {
        seed: {file.stem: read_experiment(file, runs[seed], configs[seed]) for file in files} for seed in seeds
    }
    known = experiments[seeds[0]]
    if unknown := [name for name in options.names if name not in known]:
        raise ConfigError(f"{unknown[0]}: no such experiment in {folder}; there are {', '.join(known)}")
    names = [] if options.page_only else options.names or list(known)
    try:
        for seed in seeds:
            for name in names:
                target = evaluation_folder(out, seed, name)
                conduct(experiments[seed][name], runs[seed], configs[seed], target, Console(stderr=True))
    finally:
        # What is finished is worth a page, also after an interrupt.
        if options.page:
            command = f"orchestra experiments --seeds {' '.join(map(str, seeds))} --page {options.page}"
            write_page(Path(options.page), list(known.values()), runs, out, command)
