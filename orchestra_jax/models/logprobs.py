"""Log-probabilities and entropies of given tokens without ever holding [batch, time, vocab]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, logits, param_specs
from orchestra_jax.parallel.rules import active_mesh, constrain, use_weight


def token_logprobs(
    config: ModelConfig,
    params: Params,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_size: int = 256,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of its distribution.

    The vocabulary projection runs over chunks of tokens and is recomputed in the backward pass, so that memory is
    [chunk_size, vocab] and not [batch * time, vocab].

    Args:
      config: the model.
      params: its weights (the head, or the tied embedding).
      hidden: [batch, time, hidden_size], the states that predict the targets.
      targets: [batch, time] int32.
      temperature: logits are divided by it, as the sampler's are.
      chunk_size: tokens per chunk and device.
      dtype: of the projection's operands; None: that of the weights.

    Returns:
      logprobs and entropies, both [batch, time] float32, entropies in nats.
    """
    batch, time = targets.shape
    mesh = active_mesh()
    ways = mesh.shape["data"] * mesh.shape["fsdp"] if mesh else 1
    # Chunks are cut along the rows' tokens: every device works on its own rows in every chunk.
    width = min(time, max(1, chunk_size * ways // batch))
    pad = -time % width
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, -1, width, hidden.shape[-1]).swapaxes(0, 1)
    chunks = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, -1, width).swapaxes(0, 1)
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    # In float32, so that its gradient is added up over the chunks in float32; multiplied by in `dtype`.
    head = use_weight(params[name], param_specs(config)[name].axes, dtype).astype(jnp.float32)

    @jax.checkpoint
    def chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores = logits(config, {name: head.astype(dtype or params[name].dtype)}, args[0])
        scores = constrain(scores, "batch", None, "vocab")
        return logprobs_of(scores, args[1], temperature)

    def rows(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(batch, -1)[:, :time]

    logprobs, entropies = jax.lax.map(chunk, (hidden, chunks))
    return rows(logprobs), rows(entropies)


def logprobs_of(
    logits_: jax.Array, targets: jax.Array, temperature: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """The one definition of a logprob, shared by trainer and sampler.

    Args:
      logits_: [..., vocab] float32, may hold -inf for ids that are never sampled.
      targets: [...] int32.
      temperature: a number, or an array [...].

    Returns:
      (logprobs, entropies), both [...] float32.
    """
    scaled = logits_ / jnp.asarray(temperature, jnp.float32)[..., None]
    all_logprobs = scaled - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    logprobs = _select(all_logprobs, targets)
    probabilities = jnp.exp(all_logprobs)
    # 0 * -inf would be NaN for the ids that are never sampled.
    entropies = -jnp.sum(probabilities * jnp.where(probabilities > 0, all_logprobs, 0.0), axis=-1)
    return logprobs, entropies


def _select(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[..., index] along the last axis."""
    if active_mesh() is None:
        return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
    # Where the vocabulary is split, a gather would collect all of it on every device; this adds up one number.
    hit = jnp.arange(values.shape[-1]) == index[..., None]
    return jnp.sum(jnp.where(hit, values, 0.0), axis=-1)
