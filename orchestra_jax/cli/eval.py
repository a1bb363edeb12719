"""`orchestra eval`: its flags, and from them to the evaluation."""

from __future__ import annotations

import argparse

from orchestra_jax.config import ConfigError, load_config

CONFIG_SUFFIXES = (".yaml", ".yml")


def add_eval_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of the command. Light: `orchestra --help` should not wait for JAX."""
    sub.add_argument("config", nargs="?", help="YAML config; may be left out with --suite where no policy is a folder")
    sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="replace a value of the config")
    sub.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="POLICY",
        help="a folder with a policy, or endpoint:MODEL@BASE_URL, or endpoint:FILE.yaml (NAME=POLICY to name it), or "
        "random, cheapest, oracle, always:TOOL; repeatable; default: the config's model and its baselines",
    )
    sub.add_argument(
        "--suite",
        action="append",
        default=[],
        metavar="SUITE",
        help="what to evaluate on: a YAML file of suites, the name of one in it, or market, service; repeatable; "
        "default: the config's env and eval",
    )
    sub.add_argument("--trials", type=int, default=1, metavar="N", help="episodes of each task; tells pass^1 to pass^N")
    sub.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="episodes under way at once, where they wait"
    )
    sub.add_argument(
        "--reference",
        default="random",
        metavar="POLICY",
        help="what preference scores are relative to: random (which then takes part), one of the policies, or none",
    )
    sub.add_argument("--out", metavar="FOLDER", help="keep every episode there; the same command goes on after a stop")
    sub.add_argument("--json", metavar="FILE", help="write the summary there, shaped like summary.json")


def run_eval(options: argparse.Namespace) -> None:
    """Runs the command."""
    overrides = list(options.overrides)
    config = None
    if options.config is not None and "=" in options.config and not options.config.endswith(CONFIG_SUFFIXES):
        raise ConfigError(f"{options.config}: a CONFIG must stand before it")
    if options.config is not None:
        config = load_config(options.config, overrides)
    from orchestra_jax.eval.command import evaluate

    evaluate(
        config,
        options.policy,
        suites=options.suite,
        trials=options.trials,
        concurrency=options.concurrency,
        reference=options.reference,
        out=options.out,
        json_file=options.json,
    )
