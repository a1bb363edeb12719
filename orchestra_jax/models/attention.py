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

    Scores are recomputed in the backward pass, and taken in blocks of queries: [heads, time, time] is never held.

    Args:
      q: [batch, time, heads, head_dim], already rotated.
      k, v: [batch, time, kv_heads, head_dim].
      positions: [batch, time] int32, position of the token in its trajectory.
      segments: [batch, time] int32, 0 is padding.
      prefixes: [batch, time] int32, the segment that this token's trajectory continues (its own, if none).

    Returns:
      [batch, time, heads, head_dim]; rows of padding are meaningless.
    """
    rows = (q, k, v, positions, segments, prefixes)
    if jax.default_backend() == "cpu":
        # One row's scores fit the cache: 2 to 3 times as fast as all rows at once.
        return jax.lax.map(lambda row: _attend_row(*row), rows)
    return jax.vmap(_attend_row)(*rows)


def _attend_row(q, k, v, positions, segments, prefixes):
    """`packed_attention` of one row, without the batch axis."""
    time = q.shape[0]

    @jax.checkpoint
    def block(args):
        block_q, block_positions, block_segments, block_prefixes = args
        same = block_segments[:, None] == segments[None, :]
        prefix = block_prefixes[:, None] == segments[None, :]
        causal = positions[None, :] <= block_positions[:, None]
        mask = (same | prefix) & causal & (segments[None, :] > 0)
        return _attend(block_q, k.transpose(1, 2, 0), v.swapaxes(0, 1), mask)

    queries = (q, positions, segments, prefixes)
    if time <= QUERY_BLOCK:
        return block(queries)
    pad = -time % QUERY_BLOCK
    blocks = tuple(
        jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, QUERY_BLOCK, *x.shape[1:]) for x in queries
    )
    return jax.lax.map(block, blocks).reshape(-1, *q.shape[1:])[:time]


def cached_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    *,
    transposed: bool = False,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> jax.Array:
    """Attention of new tokens to everything of their row at or before their position.

    Args:
      q: [rows, time, heads, head_dim]; the new tokens' keys and values are in the cache already.
      keys: [rows, kv_heads, capacity, head_dim], or [rows, kv_heads, head_dim, capacity] if `transposed`.
      values: [rows, kv_heads, capacity, head_dim].
      positions: [rows, time] int32.
      transposed: how the keys are laid out.
      key_scales, value_scales: [rows, kv_heads, capacity] float32, of an int8 cache: what its numbers are multiplied
        by. They are applied to scores and weights, so that no cache in full precision is ever made.

    Returns:
      [rows, time, heads, head_dim].
    """
    keys = keys if transposed else keys.swapaxes(2, 3)
    mask = jnp.arange(values.shape[2])[None, None, :] <= positions[:, :, None]
    scales = (key_scales, value_scales)
    if jax.default_backend() == "cpu":
        if q.shape[1] == 1:
            return _attend_one_token(q[:, 0], keys, values, mask[:, 0], scales)[:, None]
        # One row's scores fit the processor's cache.
        return jax.lax.map(lambda row: _attend(*row), (q, keys, values, mask, scales))
    return jax.vmap(_attend)(q, keys, values, mask, scales)


def _attend_one_token(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, scales) -> jax.Array:
    """`cached_attention` of one token a row by products and sums: q [R,H,D], keys [R,K,D,S], values [R,K,S,D].

    On CPU these become loops that read the cache where it is, up to twice as fast as batched dots of a few rows each.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.astype(jnp.float32).reshape(rows, kv_heads, -1, head_dim, 1) * head_dim**-0.5
    scores = jnp.sum(grouped * keys[:, :, None].astype(jnp.float32), axis=3)
    if scales[0] is not None:
        scores = scores * scales[0][:, :, None]
    scores = jnp.where(mask[:, None, None], scores, NEG_INF)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    normalizer = weights.sum(axis=-1)
    if scales[1] is not None:
        weights = weights * scales[1][:, :, None]
    out = jnp.sum(weights[..., None] * values[:, :, None].astype(jnp.float32), axis=3) / normalizer[..., None]
    return out.reshape(rows, heads, head_dim).astype(q.dtype)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scales=(None, None)) -> jax.Array:
    """q [T,H,D], k [K,D,S], v [K,S,D], mask [T,S], scales [K,S] -> [T,H,D]; scores and softmax in float32."""
    time, heads, head_dim = q.shape
    kv_heads, _, source = k.shape
    # The heads that share keys become rows of one matrix: keys and values are never repeated.
    grouped = q.reshape(time, kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = jnp.matmul(grouped, k.astype(q.dtype), preferred_element_type=jnp.float32) * head_dim**-0.5
    if scales[0] is not None:
        scores = scores * scales[0][:, None]
    scores = jnp.where(mask, scores.reshape(kv_heads, -1, time, source), NEG_INF)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    normalizer = weights.sum(axis=-1).reshape(kv_heads, -1, 1)
    weights = weights.reshape(kv_heads, -1, source)
    if scales[1] is not None:
        weights = weights * scales[1][:, None]
    out = jnp.matmul(weights.astype(q.dtype), v.astype(q.dtype), preferred_element_type=jnp.float32) / normalizer
    out = out.reshape(kv_heads, -1, time, head_dim).transpose(2, 0, 1, 3)
    return out.reshape(time, heads, head_dim).astype(q.dtype)
