"""A policy as a run needs it: shapes, weights, tokenizer and chat format, from a folder or from a preset."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from orchestra_jax.config import ConfigError, ModelSection, TextConfig
from orchestra_jax.models.config import ModelConfig, preset
from orchestra_jax.models.convert import companion_files
from orchestra_jax.models.decoder import Params, init_params
from orchestra_jax.models.hf import load_hf, read_config, save_hf
from orchestra_jax.models.hf_config import config_to_hf
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Policy:
    """What it takes to read a task and write a turn."""

    config: ModelConfig
    params: Params
    chat: ChatFormat


def load_policy(model: ModelSection, text: TextConfig, seed: int) -> Policy:
    """The policy that a config describes; a preset gets fresh weights drawn from `seed`.

    Raises:
      ConfigError: a file is missing or does not fit; names the key or the file.
    """
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
        config = replace(config, valid_vocab_size=tokenizer.vocab_size)
        if model.path is not None:
            _, arrays = load_hf(model.path, dtype=model.dtype)
            params = {name: jnp.asarray(value) for name, value in arrays.items()}
        else:
            params = init_params(config, jax.random.key(seed), jnp.dtype(model.dtype))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return Policy(config, params, chat)


def save_policy(folder: Path, policy: Policy, params: Params) -> None:
    """Writes `params` as a Hugging Face folder, the tokenizer's files beside the weights; the folder appears whole."""
    staging = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    save_hf(staging, policy.config, jax.device_get(params), files=companion_files(policy.chat.tokenizer.source))
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
