"""A policy as a run needs it: shapes, weights, tokenizer and chat format, from a folder or from a preset."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from orchestra_jax.config import ConfigError, ModelSection, TextConfig
from orchestra_jax.distributed import on_writer
from orchestra_jax.models.config import ModelConfig, preset
from orchestra_jax.models.convert import companion_files
from orchestra_jax.models.decoder import Params, init_param, init_params, param_specs
from orchestra_jax.models.hf import load_hf, read_config, save_hf
from orchestra_jax.models.hf_config import config_to_hf
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.tokenizer import load_tokenizer

Shardings = Callable[[ModelConfig], Mapping[str, Sharding] | None]
"""Where each weight of a model goes, by name; None: everything on this process' first device."""


@dataclass(frozen=True)
class Policy:
    """What it takes to read a task and write a turn."""

    config: ModelConfig
    params: Params
    chat: ChatFormat


def load_policy(model: ModelSection, text: TextConfig, seed: int, shardings: Shardings | None = None) -> Policy:
    """The policy that a config describes; a preset gets fresh weights drawn from `seed`.

    Args:
      model: which.
      text: its tokenizer.
      seed: of fresh weights, which do not depend on where they go (but for rounding).
      shardings: where the weights go, each host making or reading its own part only.

    Raises:
      ConfigError: a file is missing or does not fit; names the key or the file.
    """
    config, chat = read_policy(model, text)
    try:
        placed = shardings(config) if shardings else None
        if model.path is not None:
            params = load_hf(model.path, dtype=model.dtype, shardings=placed)[1]
        else:
            params = draw_params(config, seed, jnp.dtype(model.dtype), placed)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return Policy(config, params, chat)


def read_policy(model: ModelSection, text: TextConfig) -> tuple[ModelConfig, ChatFormat]:
    """A policy without its weights: shapes and tokenizer. Raises as `load_policy`."""
    try:
        tokenizer = load_tokenizer(text.tokenizer or model.path or "")
        chat = ChatFormat(tokenizer)
        if model.path is not None:
            config = read_config(model.path)
        else:
            assert model.preset is not None
            config = preset(model.preset, **model.overrides)
            config_to_hf(config)  # what cannot be exported could not be saved at the end
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding {config.vocab_size} rows"
            )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return replace(config, valid_vocab_size=tokenizer.vocab_size), chat


def draw_params(
    config: ModelConfig, seed: int, dtype: jnp.dtype, shardings: Mapping[str, Sharding] | None = None
) -> Params:
    """Random parameters; with `shardings` each is made where it goes, and no device ever holds a whole one."""
    key = jax.random.key(seed)
    if shardings is None:
        return init_params(config, key, dtype)
    return {
        name: jax.jit(partial(init_param, config, name, dtype=dtype), out_shardings=shardings[name])(key)
        for name in param_specs(config)
    }


def save_policy(folder: Path, policy: Policy, params: Params) -> None:
    """Writes `params` as a Hugging Face folder, the tokenizer's files beside the weights; the folder appears whole.

    Every process that holds a part of the parameters calls this; the first one writes.
    """
    staging = folder.with_name(folder.name + ".tmp")
    on_writer(lambda: shutil.rmtree(staging, ignore_errors=True))
    save_hf(staging, policy.config, params, files=companion_files(policy.chat.tokenizer.source))

    def install() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)

    on_writer(install)
