"""Attention over packed rows and over a KV cache, grouped-query heads without repeating K and V.

Who may attend to whom is decided by three integers a token: its segment, the segment of its shared prefix, and its
position. With `segment == prefix` everywhere this is ordinary packing. When a group of trajectories shares one prompt,
the prompt is written once and each trajectory names it as its prefix, so that G trajectories cost one prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEG_INF = -1e30  # finite, so that a row that attends to nothing gives a mean of garbage and not a NaN

QUERY_BLOCK = 512


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, prefixes: jax.Array
) -> jax.Array:
    """Causal attention within segments and to their shared prefix.

    Args:
      q: [batch, time, heads, head_dim], already rotated.
      k, v: [batch, time, kv_heads, head_dim].
      positions: [batch, time] int32, position of the token in its trajectory.
      segments: [batch, time] int32, 0 is padding.
      prefixes: [batch, time] int32, the segment that this token's trajectory continues (its own, if none).

    Returns:
      [batch, time, heads, head_dim]; rows of padding are meaningless.
    """
    if q.shape[1] <= QUERY_BLOCK:
        return _attend_packed(q, k, v, positions, segments, prefixes, positions, segments)

    # Blocks of queries, recomputed in the backward pass: [heads, time, time] is never held at once.
    pad = -q.shape[1] % QUERY_BLOCK

    def to_blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def block(args):
        return _attend_packed(args[0], k, v, args[1], args[2], args[3], positions, segments)

    out = jax.lax.map(block, tuple(map(to_blocks, (q, positions, segments, prefixes))))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]]


def _attend_packed(q, k, v, q_positions, q_segments, q_prefixes, k_positions, k_segments):
    same = q_segments[:, :, None] == k_segments[:, None, :]
    prefix = q_prefixes[:, :, None] == k_segments[:, None, :]
    causal = k_positions[:, None, :] <= q_positions[:, :, None]
    mask = (same | prefix) & causal & (k_segments[:, None, :] > 0)
    return _attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)


def cached_attention(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of new tokens to everything of their row at or before their position.

    Args:
      q: [rows, time, heads, head_dim]; the new tokens' keys and values are in the cache already.
      k_cache, v_cache: [rows, kv_heads, capacity, head_dim].
      positions: [rows, time] int32.

    Returns:
      [rows, time, heads, head_dim].
    """
    slots = jnp.arange(k_cache.shape[2])
    return _attend(q, k_cache, v_cache, slots[None, None, :] <= positions[:, :, None])


def _attend(q, k, v, mask):
    """q [B,T,H,D], k and v [B,K,S,D], mask [B,T,S] -> [B,T,H,D]; scores and softmax in float32."""
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bksd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * (head_dim**-0.5), NEG_INF)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bksd->btkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, time, heads, head_dim).astype(q.dtype)
