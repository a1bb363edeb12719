"""An experiment as its YAML file describes it: training runs, other policies, suites, and claims fixed beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra_jax.config import ConfigError, EvalConfig, RunConfig, load_config
from orchestra_jax.eval.suites import Suite, make_suites
from orchestra_jax.experiments.runs import RUNS_FILE, TrainingRun, check_keys, read_yaml

METRICS = ("accuracy", "cost_usd", "latency_s", "preference")
BREAKDOWNS = ("task_type", "wish")
_KEYS = {"title", "question", "reading", "runs", "policies", "suites", "breakdowns", "claims"}


@dataclass(frozen=True)
class Claim:
    """What was expected before anything was run: in `suite`, policy `a` has more (">") or less ("<") than `b`."""

    suite: str
    metric: str
    a: str
    relation: str
    b: str


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    `runs` are names of training runs, which are evaluated sampled and greedy; `policies` others, as `orchestra eval
    --policy` takes them. Every policy plays every suite.
    """

    name: str
    title: str
    question: str
    reading: str
    runs: tuple[str, ...]
    policies: tuple[str, ...]
    suites: tuple[Suite, ...]
    breakdowns: tuple[str, ...]
    claims: tuple[Claim, ...]


def read_experiment(file: Path, runs: Mapping[str, TrainingRun], config: RunConfig) -> Experiment:
    """Reads an experiment.

    Args:
      file: its YAML.
      runs: the training runs that there are.
      config: limits of rollouts, where a suite has none of its own.

    Raises:
      ConfigError: names the file and the key.
    """
    content = read_yaml(file)
    check_keys(content, _KEYS, str(file))
    for key in ("title", "question", "reading"):
        if not isinstance(content.get(key), str):
            raise ConfigError(f"{file}: {key} must be a text")
    names = _texts(content, "runs", file)
    if unknown := [name for name in names if name not in runs]:
        raise ConfigError(f"{file}: runs: no run is called {unknown[0]!r}; there are {', '.join(runs)}")
    policies = _texts(content, "policies", file)
    breakdowns = _texts(content, "breakdowns", file)
    if unknown := [name for name in breakdowns if name not in BREAKDOWNS]:
        raise ConfigError(f"{file}: breakdowns: {unknown[0]!r} is none of {', '.join(BREAKDOWNS)}")
    suites = make_suites(content.get("suites"), config, str(file))
    labels = {*policies, "random", *(f"{name}{mode}" for name in names for mode in ("", ":greedy"))}
    claims = [_claim(entry, {s.name for s in suites}, labels, file) for entry in content.get("claims") or ()]
    return Experiment(
        name=file.stem,
        title=content["title"].strip(),
        question=content["question"].strip(),
        reading=content["reading"].strip(),
        runs=names,
        policies=policies,
        suites=tuple(suites),
        breakdowns=breakdowns,
        claims=tuple(claims),
    )


def experiment_files(folder: Path) -> list[Path]:
    """The experiments in a folder: every YAML file but the runs and their base.

    Raises:
      ConfigError: there are none.
    """
    shared = {RUNS_FILE, str(read_yaml(folder / RUNS_FILE).get("base"))}
    files = [file for file in folder.glob("*.yaml") if file.name not in shared]
    if not files:
        raise ConfigError(f"{folder}: it holds no experiment")
    return sorted(files, key=lambda file: str(read_yaml(file).get("title", "")))


def evaluation_config(folder: Path, seed: int) -> RunConfig:
    """The config whose rollout limits and prompts the evaluations use: the runs' base, with an `eval` section.

    `seed` is of what the policies sample; the tasks are fixed by the suites.

    Raises:
      ConfigError: it cannot be read.
    """
    base = read_yaml(folder / RUNS_FILE).get("base")
    config = load_config(folder / str(base), [f"seed={seed}"])
    return config.model_copy(update={"eval": EvalConfig()})


def _texts(content: Mapping[str, Any], key: str, file: Path) -> tuple[str, ...]:
    values = content.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{file}: {key} must be a list of names")
    return tuple(values)


def _claim(entry: Any, suites: set[str], labels: set[str], file: Path) -> Claim:
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 5:
        raise ConfigError(f'{file}: claims: expected [suite, metric, policy, "<" or ">", policy], got {entry!r}')
    claim = Claim(*map(str, entry))
    for value, known in ((claim.suite, suites), (claim.metric, set(METRICS)), (claim.relation, {"<", ">"})):
        if value not in known:
            raise ConfigError(f"{file}: claims: {value!r} is none of {', '.join(sorted(known))}")
    for label in (claim.a, claim.b):
        if label not in labels:
            raise ConfigError(f"{file}: claims: {label!r} is none of the policies ({', '.join(sorted(labels))})")
    return claim
