"""`orchestra eval`: any policies, each with its own tokenizer, on the same tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestra_envs.baselines import POLICY_NAMES
from orchestra_envs.judge import keep_verdicts
from rich.console import Console

from orchestra_jax.config import ConfigError, EvalConfig, ModelSection, RunConfig, TextConfig
from orchestra_jax.eval.endpoint import PREFIX, Orchestrator, read_orchestrator
from orchestra_jax.eval.evaluate import (
    DEFAULT_CONCURRENCY,
    REFERENCE_POLICY,
    Contenders,
    check_endpoints,
    evaluate_suites,
    scripted_names,
)
from orchestra_jax.eval.store import EvalStore
from orchestra_jax.eval.suites import Suite, own_suite, read_suites
from orchestra_jax.eval.table import print_evaluation
from orchestra_jax.rollout.policy import Policy, load_policy
from orchestra_jax.rollout.setup import check_fit, eval_kwargs

SCRIPTED_PREFIXES = ("always:", "published:")
NO_REFERENCE = "none"

_WHOLE_FILE_BYTES = 64 * 2**20
_SAMPLE_BYTES = 2**20


def evaluate(
    config: RunConfig | None,
    policies: Sequence[str],
    *,
    suites: Sequence[str | Suite] = (),
    trials: int = 1,
    concurrency: int = DEFAULT_CONCURRENCY,
    reference: str = REFERENCE_POLICY,
    out: str | None = None,
    json_file: str | None = None,
) -> dict[str, Any]:
    """Evaluates `policies`, prints their table to standard output, and the progress to standard error.

    Args:
      config: environment, `eval` (its defaults if the config has none), limits and temperature of rollouts. None goes
        with `suites` where no policy is a folder.
      policies: folders in Hugging Face layout or run folders (which mean their `model/`), names of scripted policies
        (random, cheapest, oracle, always:TOOL), and `endpoint:...` (see `orchestra_jax.eval.endpoint`); NAME=POLICY
        names a folder or an endpoint. None: the config's model and its baselines.
      suites: suites themselves, or see `orchestra_jax.eval.suites.read_suites`; none: the tasks of the config's `env`
        and `eval`.
      trials: episodes of each task.
      concurrency: episodes under way at once of policies that are no weights of ours.
      reference: the policy that preference scores are relative to. `random` takes part if it is the reference, whoever
        else does; another must be one of the policies. `none`: no scores.
      out: folder for the episodes and summary.json; the same command goes on with what it holds.
      json_file: where to write the summary, shaped like a run's summary.json.

    Returns:
      The summary.

    Raises:
      ConfigError: no such policy or suite, or one does not fit the other; found before anything is evaluated.
      KeyboardInterrupt: a signal came; with `out`, what was finished is kept.
    """
    for name, number in (("--trials", trials), ("--concurrency", concurrency)):
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, not {number}")
    has_config = config is not None
    if config is None:
        if not suites:
            raise ConfigError("give a CONFIG, or --suite to say what to evaluate on")
        config = RunConfig(model=ModelSection(preset="market-tiny"), text=TextConfig(tokenizer="market"))
    config = config.model_copy(update={"eval": config.eval or EvalConfig()})
    output = None if json_file is None else _writable(Path(json_file))
    chosen = [suite for suite in suites if isinstance(suite, Suite)]
    chosen += read_suites(named, config) if (named := [text for text in suites if isinstance(text, str)]) else []
    chosen = chosen or [own_suite(config)]
    contenders = _contenders(config, policies, has_config=has_config)
    contenders = _checked(chosen, contenders, reference, key="--policy" if policies else "eval.baselines")
    store = None if out is None else EvalStore(Path(out), _spec(config, chosen, contenders))
    keep_verdicts(None if out is None else Path(out) / "verdicts")
    try:
        evaluation = evaluate_suites(
            chosen,
            contenders,
            config,
            console=Console(stderr=True),
            trials=trials,
            reference=None if reference == NO_REFERENCE else reference,
            concurrency=concurrency,
            store=store,
            by_suite=bool(suites),
        )
        if store:
            store.write_summary(evaluation.summary)
    except KeyboardInterrupt:
        kept = f"; what was finished is kept in {out}, the same command goes on from it" if out else ""
        raise KeyboardInterrupt(f"interrupted{kept}") from None
    finally:
        keep_verdicts(None)
        if store:
            store.close()
    if output is not None:
        output.write_text(json.dumps(evaluation.summary, indent=1), encoding="utf-8")
    print_evaluation(evaluation.summary)
    return evaluation.summary


def _contenders(config: RunConfig, policies: Sequence[str], *, has_config: bool) -> Contenders:
    """Who is meant by `--policy`, or the config's model and baselines."""
    assert config.eval is not None
    if not policies:
        if not has_config:
            raise ConfigError("give --policy, or a CONFIG whose model and baselines are evaluated")
        load = partial(load_policy, config.model, config.text, config.seed)
        return Contenders({_model_name(config.model): load}, config.eval.baselines)
    scripted = [text for text in policies if _is_scripted(text)]
    endpoints: dict[str, Orchestrator] = {}
    folders = []
    for text in policies:
        name, equals, rest = text.partition("=")
        if text.startswith(PREFIX) or (equals and rest.startswith(PREFIX)):
            own_name, orchestrator = read_orchestrator((text if text.startswith(PREFIX) else rest)[len(PREFIX) :])
            label = own_name if text.startswith(PREFIX) else name
            _check_name(label, text)
            if label in endpoints:
                raise ConfigError(f"--policy: two policies are called {label!r}; tell them apart with NAME={PREFIX}...")
            endpoints[label] = orchestrator
        elif not _is_scripted(text):
            folders.append(text)
    loaders = _loaders(config, folders)
    if folders and not has_config:
        raise ConfigError(
            f"--policy {folders[0]}: a policy in a folder needs a CONFIG, which says how its prompts are "
            "written and how long its episodes may be (a run's own config.yaml will do)"
        )
    for name in endpoints:
        if name in loaders:
            raise ConfigError(f"--policy: two policies are called {name!r}; tell them apart with NAME=...")
    return Contenders(loaders, scripted, endpoints)


def _checked(suites: Sequence[Suite], contenders: Contenders, reference: str, *, key: str) -> Contenders:
    """The contenders, with `random` if preference scores need it, when all of them fit all suites."""
    scripted = list(contenders.scripted)
    for suite in suites:
        with_random = reference == REFERENCE_POLICY
        where = key if len(suites) == 1 else f"{key}, suite {suite.name}"
        scripted += scripted_names(suite.config, contenders.scripted, where, with_reference=with_random)
        for load in contenders.models.values():
            # Loads every policy twice, so that a folder that lacks a file is found before the first long evaluation.
            check_fit(suite.config, load(), eval_kwargs(suite.config))
        if contenders.endpoints:
            check_endpoints(suite)
    checked = Contenders(contenders.models, list(dict.fromkeys(scripted)), contenders.endpoints)
    known = [*checked.models, *(f"{name}:greedy" for name in checked.models), *checked.scripted, *checked.endpoints]
    if reference not in (REFERENCE_POLICY, NO_REFERENCE, *known):
        raise ConfigError(f"--reference {reference}: it is none of the policies ({', '.join(known)})")
    return checked


def _is_scripted(text: str) -> bool:
    return text.startswith(SCRIPTED_PREFIXES) or text in POLICY_NAMES


def _loaders(config: RunConfig, texts: Sequence[str]) -> dict[str, Callable[[], Policy]]:
    """Policies in folders by name: what loads each."""
    loaders: dict[str, Callable[[], Policy]] = {}
    for text in texts:
        name, folder = _named_folder(text)
        if name in loaders:
            raise ConfigError(f"--policy: two policies are called {name!r}; tell them apart with NAME=FOLDER")
        model = ModelSection(path=str(folder), dtype=config.model.dtype, remat=config.model.remat)
        loaders[name] = partial(load_policy, model, _text_of(config, folder), config.seed)
    return loaders


def _named_folder(text: str) -> tuple[str, Path]:
    """NAME=FOLDER or FOLDER, which is then called after itself; a run folder means its trained policy."""
    name, equals, rest = text.partition("=")
    folder = Path(text if Path(text).is_dir() or not equals else rest)
    if folder == Path(text) or not equals:
        name = folder.resolve().name
    _check_name(name, text)
    if not folder.is_dir():
        scripted = ", ".join(POLICY_NAMES)
        raise ConfigError(
            f"--policy {text}: no such folder, no scripted policy of that name ({scripted}), and no {PREFIX}MODEL"
        )
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        folder = folder / "model"
        if not folder.is_dir():
            raise ConfigError(f"--policy {text}: the run has no {folder} yet; its training has not finished")
    return name, folder


def _check_name(name: str, text: str) -> None:
    if _is_scripted(name) or ":" in name or "/" in name or not name:
        raise ConfigError(f"--policy {text}: {name!r} cannot be its name (scripted policies have such names)")


def _text_of(config: RunConfig, folder: Path) -> TextConfig:
    """The folder's own tokenizer if it has one, else that of the config."""
    own = (folder / "tokenizer.json").is_file()
    tokenizer = None if own else config.text.tokenizer or config.model.path
    return TextConfig(tokenizer=tokenizer, tools=config.text.tools)


def _model_name(model: ModelSection) -> str:
    return Path(model.path).resolve().name if model.path is not None else str(model.preset)


def _spec(config: RunConfig, suites: Sequence[Suite], contenders: Contenders) -> dict[str, Any]:
    """What decides the episodes of an evaluation, as plain JSON."""
    policies: dict[str, Any] = {name: {"scripted": name} for name in contenders.scripted}
    policies |= {name: _model_identity(load) for name, load in contenders.models.items()}
    policies |= {name: orchestrator.identity() for name, orchestrator in contenders.endpoints.items()}
    return {
        "version": 1,
        "seed": config.seed,
        "tools_in_prompts": config.text.tools,
        "suites": {suite.name: suite.spec() for suite in suites},
        "policies": policies,
    }


def _model_identity(load: Callable[[], Policy]) -> dict[str, Any]:
    """Which weights a loader (a partial of `load_policy`) means: a preset and its seed, or a digest of the files."""
    model, text, seed = load.args  # type: ignore[attr-defined]
    tokenizer = text.tokenizer
    if model.path is None:
        fresh = {"preset": model.preset, "overrides": model.overrides, "seed": seed}
        return {**fresh, "dtype": model.dtype, "tokenizer": tokenizer}
    files = sorted([*Path(model.path).glob("*.safetensors"), *Path(model.path).glob("*.json")])
    return {"weights": _digest(files), "dtype": model.dtype, "tokenizer": tokenizer and Path(tokenizer).name}


def _digest(files: Sequence[Path]) -> str:
    """Of names, sizes and content; of files above 64 MiB the first, the middle and the last MiB."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        starts: Mapping[int, int] = {0: size}
        if size > _WHOLE_FILE_BYTES:
            starts = dict.fromkeys((0, size // 2, size - _SAMPLE_BYTES), _SAMPLE_BYTES)
        with file.open("rb") as stream:
            for start, length in starts.items():
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()[:16]


def _writable(file: Path) -> Path:
    """Finds out before the evaluation that its result could not be written; leaves no trace."""
    existed = file.exists()
    try:
        with file.open("a", encoding="utf-8"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror or error}") from None
    return file
