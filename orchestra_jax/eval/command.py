"""`orchestra eval`: any policies, each with its own tokenizer, on the same held-out tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestra_envs.baselines import POLICY_NAMES
from rich.console import Console

from orchestra_jax.config import ConfigError, EvalConfig, ModelSection, RunConfig, TextConfig
from orchestra_jax.eval.evaluate import evaluate_policies, scripted_names
from orchestra_jax.report.console import policies_table
from orchestra_jax.rollout.policy import Policy, load_policy
from orchestra_jax.rollout.setup import check_fit, eval_kwargs

ALWAYS = "always:"


def evaluate(config: RunConfig, policies: Sequence[str], *, json_file: str | None = None) -> dict[str, Any]:
    """Evaluates `policies`, prints their table to standard output, and the progress to standard error.

    Args:
      config: environment, `eval` (its defaults if the config has none), limits and temperature of rollouts.
      policies: folders in Hugging Face layout or run folders (which mean their `model/`), as FOLDER or NAME=FOLDER,
        and names of scripted policies (random, cheapest, oracle, always:TOOL). None: the config's model and its
        baselines. `random` takes part in any case, for the preference scores are relative to it.
      json_file: where to write the summary, shaped like a run's summary.json.

    Returns:
      The summary.

    Raises:
      ConfigError: no such policy, or it does not fit the environment; found before anything is evaluated.
    """
    config = config.model_copy(update={"eval": config.eval or EvalConfig()})
    assert config.eval is not None
    output = None if json_file is None else _writable(Path(json_file))
    if policies:
        scripted = [text for text in policies if _is_scripted(text)]
        loaders = _loaders(config, [text for text in policies if not _is_scripted(text)])
    else:
        scripted = config.eval.baselines
        loaders = {_model_name(config.model): partial(load_policy, config.model, config.text, config.seed)}
    scripted_names(config, scripted, key="--policy" if policies else "eval.baselines")
    for load in loaders.values():
        # Loads every policy twice, so that a folder that lacks a file is found before the first long evaluation.
        check_fit(config, load(), eval_kwargs(config))
    console = Console(stderr=True)
    summary = evaluate_policies(config, loaders, scripted, console).summary
    if output is not None:
        output.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    Console().print(policies_table(summary))
    return summary


def _is_scripted(text: str) -> bool:
    return text.startswith(ALWAYS) or text in POLICY_NAMES


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
    if _is_scripted(name) or ":" in name or not name:
        raise ConfigError(f"--policy {text}: {name!r} cannot be its name (scripted policies have such names)")
    if not folder.is_dir():
        scripted = ", ".join(POLICY_NAMES)
        raise ConfigError(f"--policy {text}: no such folder, and no scripted policy of that name ({scripted})")
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        folder = folder / "model"
        if not folder.is_dir():
            raise ConfigError(f"--policy {text}: the run has no {folder} yet; its training has not finished")
    return name, folder


def _text_of(config: RunConfig, folder: Path) -> TextConfig:
    """The folder's own tokenizer if it has one, else that of the config."""
    own = (folder / "tokenizer.json").is_file()
    tokenizer = None if own else config.text.tokenizer or config.model.path
    return TextConfig(tokenizer=tokenizer, tools=config.text.tools)


def _model_name(model: ModelSection) -> str:
    return Path(model.path).resolve().name if model.path is not None else str(model.preset)


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
