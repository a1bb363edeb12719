"""From a config to environments and a rollout, and the checks that find a config's mistakes before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from orchestra_envs import make
from orchestra_envs.baselines import make_policy

from orchestra_jax.config import ConfigError, RunConfig
from orchestra_jax.rollout.policy import Policy
from orchestra_jax.rollout.rollout import Rollout, RolloutLimits, task_prompt_ids
from orchestra_jax.sampler.engine import Engine

CHECKED_TASKS = 16
"""Tasks whose prompts are measured before a run begins."""


def make_env(config: RunConfig, kwargs: dict[str, Any]) -> gym.Env:
    """One environment of the run.

    Raises:
      ConfigError: no such environment, or it refuses its arguments.
    """
    try:
        return make(config.env.id, **kwargs)
    except (ValueError, TypeError, ImportError, gym.error.Error) as error:
        raise ConfigError(f"env.id {config.env.id}: {str(error).removeprefix(f'{config.env.id}: ')}") from None


def eval_kwargs(config: RunConfig) -> dict[str, Any]:
    """The arguments of the environment when evaluating."""
    return config.env.kwargs | config.env.eval_kwargs


def build_rollout(config: RunConfig, policy: Policy, env_kwargs: dict[str, Any], rows: int) -> Rollout:
    """Engine and environments for `rows` episodes at once."""
    engine = Engine(
        policy.config,
        slots=rows,
        capacity=config.rollout.max_tokens,
        stop_ids=policy.chat.stop_ids,
        seed=config.seed,
        dtype=cache_dtype(config, policy),
        token_bytes=policy.chat.tokenizer.token_bytes,
    )
    return Rollout(
        partial(make_env, config, env_kwargs),
        engine,
        policy.chat,
        tool_style=config.text.tools,
        limits=RolloutLimits(
            config.rollout.max_turn_tokens,
            config.rollout.max_observation_tokens,
            config.rollout.max_sampled_tokens,
            config.rollout.stop_after_tool_call,
        ),
        env_threads=config.rollout.env_threads,
    )


def cache_dtype(config: RunConfig, policy: Policy) -> jnp.dtype:
    """How keys and values are stored while sampling: as configured, else like the weights.

    XLA on CPU reads a bfloat16 cache at half the speed of a float32 one, so there it is float32.
    """
    if config.rollout.kv_cache is not None:
        return jnp.dtype(config.rollout.kv_cache)
    if jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    return policy.params["embed_tokens"].dtype


def check_fit(config: RunConfig, policy: Policy, env_kwargs: dict[str, Any]) -> int:
    """Checks that the policy can act in the environment: it takes text, and prompts leave room. No tool is called.

    Returns:
      The most tokens that a policy can sample in an episode: `max_turns` turns, within `rollout.max_tokens`. Where the
      environment has no `max_turns`, those of one turn.

    Raises:
      ConfigError: it cannot; names the keys to change.
    """
    limits, model = config.rollout, policy.config
    if limits.max_tokens > model.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_tokens ({limits.max_tokens}) is more than the model's max_position_embeddings "
            f"({model.max_position_embeddings})"
        )
    shortest = limits.max_tokens
    env = make_env(config, env_kwargs)
    try:
        if not isinstance(env.action_space, gym.spaces.Text) and not env.action_space.contains("text"):
            raise ConfigError(f"env.id {config.env.id}: takes actions of {env.action_space}; a policy here writes text")
        for seed in range(CHECKED_TASKS):
            observation, info = env.reset(seed=seed)
            if config.eval is not None and "outcome" not in info:
                raise ConfigError(
                    f"env.id {config.env.id}: reset reports no info['outcome'], so there is no accuracy to evaluate: "
                    "set eval=null (and reward.form=return)"
                )
            length = len(task_prompt_ids(policy.chat, config.text.tools, str(observation), info))
            shortest = min(shortest, length)
            if length > limits.max_tokens - limits.max_turn_tokens:
                raise ConfigError(
                    f"a task's prompt has {length} tokens; rollout.max_tokens ({limits.max_tokens}) less "
                    f"rollout.max_turn_tokens ({limits.max_turn_tokens}) leaves too few: raise rollout.max_tokens, or "
                    "shorten prompts (text.tools: compact)"
                )
        turns = getattr(env.unwrapped, "max_turns", 1)
    finally:
        env.close()
    most = limits.max_sampled_tokens or limits.max_tokens
    return min(turns * limits.max_turn_tokens, limits.max_tokens - shortest, most)


def check_scripted(config: RunConfig, key: str, names: Iterable[str], env_kwargs: dict[str, Any]) -> None:
    """Checks that scripted policies exist and can choose among the environment's tools. No tool is called.

    Raises:
      ConfigError: one does not or cannot; the message starts with `key`.
    """
    env = make_env(config, env_kwargs)
    try:
        for name in names:
            policy = make_policy(name)
            for seed in range(CHECKED_TASKS):
                observation, info = env.reset(seed=seed)
                if not info.get("tools_json"):
                    raise ValueError("it tells no tools (info['tools_json']), which scripted policies choose from")
                policy.reset(env, observation, info, np.random.default_rng(seed))
    except (ValueError, KeyError) as error:
        instead = "; set sft=null, or another sft.router" if key == "sft.router" else ""
        raise ConfigError(f"{key}: {name} cannot act in {config.env.id}: {error}{instead}") from None
    finally:
        env.close()
