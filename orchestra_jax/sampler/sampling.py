"""One token a row from its logits: keyed randomness, and the logprob of the distribution that was drawn from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 256
"""Vocabulary entries per block: a draw finds its block first, then its token within."""


Array = Any
"""A jax.Array on the device, a np.ndarray where the host prepares it."""


class Restriction(NamedTuple):
    """What narrows the distributions of some rows; the others have the values that change nothing."""

    top_ps: Array
    """[rows] float32: the fewest likeliest tokens that hold this probability; 1 keeps all."""
    top_ks: Array
    """[rows] int32: this many of the likeliest tokens; 0 keeps all."""
    masks: Array
    """[rows, ceil(vocab_size / 32)] uint32: the allowed tokens, the lowest bit of a word first."""


def sample_tokens(
    row_logits: jax.Array, temperatures: jax.Array, key: jax.Array, trajectories: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token a row, keyed by (key, trajectory, position).

    The token is where the cumulative probability passes one uniform number, so that a row costs one draw and not one
    for every entry of the vocabulary; the sum is taken over blocks, then within one. Exact up to float32's rounding:
    a uniform number has 23 bits, so that tokens rarer than 1e-7 come a little too often or never.

    Args:
      row_logits: [rows, vocab] float32; -inf is never sampled.
      temperatures: [rows] float32; 0 is greedy, and its logprob that of temperature 1.
      key: the run's typed PRNG key.
      trajectories, positions: [rows] int32 or uint32.

    Returns:
      tokens [rows] int32 and their logprobs [rows] float32.
    """
    rows, vocab = row_logits.shape
    greedy = temperatures <= 0
    divisor = jnp.where(greedy, 1.0, temperatures)
    padded = jnp.pad(row_logits, ((0, 0), (0, -vocab % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, -1, BLOCK)
    block_tops = blocks.max(axis=2)
    top = block_tops.max(axis=1)
    sums = jnp.exp((blocks - top[:, None, None]) / divisor[:, None, None]).sum(axis=2)
    cumulative = jnp.cumsum(sums, axis=1)
    total = cumulative[:, -1]

    def uniform(trajectory: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, trajectory), position))

    target = jax.vmap(uniform)(trajectories, positions) * total
    drawn = jnp.minimum(jnp.sum(cumulative <= target[:, None], axis=1), sums.shape[1] - 1)
    block = jnp.where(greedy, jnp.argmax(block_tops, axis=1), drawn)
    before = jnp.take_along_axis(cumulative - sums, block[:, None], axis=1)
    entries = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    weights = jnp.exp((entries - top[:, None]) / divisor[:, None])
    drawn = jnp.sum(before + jnp.cumsum(weights, axis=1) <= target[:, None], axis=1)
    last = BLOCK - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=1)  # rounding must not lead past what can be sampled
    entry = jnp.where(greedy, jnp.argmax(entries, axis=1), jnp.minimum(drawn, last))
    chosen = jnp.take_along_axis(entries, entry[:, None], axis=1)[:, 0]
    return (block * BLOCK + entry).astype(jnp.int32), (chosen - top) / divisor - jnp.log(total)


def restrict(row_logits: jax.Array, temperatures: jax.Array, restriction: Restriction) -> jax.Array:
    """The logits with -inf where a row may not go: first its mask, then top-k, then top-p of what is left.

    Sampling from them gives logprobs that are renormalised over the allowed tokens.

    Args:
      row_logits: [rows, vocab] float32.
      temperatures: [rows] float32, of which top-p's probabilities are; 0 counts as 1.
      restriction: see there.
    """
    rows, vocab = row_logits.shape
    bits = jnp.arange(32, dtype=jnp.uint32)
    allowed = (restriction.masks[:, :, None] >> bits) & 1
    masked = jnp.where(allowed.reshape(rows, -1)[:, :vocab] > 0, row_logits, -jnp.inf)
    ordered = -jnp.sort(-masked, axis=1)
    ranks = jnp.arange(vocab)[None, :]
    counts = jnp.where(restriction.top_ks > 0, restriction.top_ks, vocab)[:, None]
    divisor = jnp.where(temperatures <= 0, 1.0, temperatures)[:, None]
    probabilities = jax.nn.softmax(jnp.where(ranks < counts, ordered, -jnp.inf) / divisor, axis=1)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    kept = (ranks < counts) & ((before < restriction.top_ps[:, None]) | (restriction.top_ps[:, None] >= 1))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=1, keepdims=True)
    return jnp.where(masked >= threshold, masked, -jnp.inf)
