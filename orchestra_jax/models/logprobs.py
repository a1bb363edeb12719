"""Log-probabilities and entropies of given tokens without ever holding [batch, time, vocab]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, logits


def token_logprobs(
    config: ModelConfig,
    params: Params,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_size: int = 256,
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
      chunk_size: tokens per chunk.

    Returns:
      logprobs and entropies, both [batch, time] float32, entropies in nats.
    """
    shape = targets.shape
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1)
    num_tokens = targets.shape[0]
    chunk_size = min(chunk_size, num_tokens)
    pad = -num_tokens % chunk_size
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk_size, hidden.shape[-1])
    targets = jnp.pad(targets, (0, pad)).reshape(-1, chunk_size)

    @jax.checkpoint
    def chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return logprobs_of(logits(config, params, args[0]), args[1], temperature)

    logprobs, entropies = jax.lax.map(chunk, (hidden, targets))
    return logprobs.reshape(-1)[:num_tokens].reshape(shape), entropies.reshape(-1)[:num_tokens].reshape(shape)


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
    logprobs = jnp.take_along_axis(all_logprobs, targets[..., None], axis=-1)[..., 0]
    probabilities = jnp.exp(all_logprobs)
    # 0 * -inf would be NaN for the ids that are never sampled.
    entropies = -jnp.sum(probabilities * jnp.where(probabilities > 0, all_logprobs, 0.0), axis=-1)
    return logprobs, entropies
