"""Attention over packed rows and over a KV cache, grouped-query heads without repeating K and V.

Who may attend to whom is decided by three integers a token: its segment, the segment of its shared prefix, and its
position. With `segment == prefix` everywhere this is ordinary packing. When a group of trajectories shares one prompt,
the prompt is written once and each trajectory names it as its prefix, so that G trajectories cost one prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from orchestra_jax.parallel.rules import activation_partition, active_mesh, platform

NEG_INF = -1e30  # finite, so that a row that attends to nothing gives a mean of garbage and not a NaN

QUERY_BLOCK = 512

ATTENTION_RESIDUALS = "attention_residuals"
"""The name (`jax.ad_checkpoint.checkpoint_name`) of what attention's backward pass needs, for rematerialisation."""

SPLASH_BLOCK = 1024
"""Queries, and keys, of a block on TPU; the largest that fits the chip's vector memory with heads of 128."""


def shares_prefixes() -> bool:
    """Whether `packed_attention` on this platform lets segments continue another; the TPU's kernel does not."""
    return platform() != "tpu"


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, prefixes: jax.Array
) -> jax.Array:
    """Causal attention within segments and to their shared prefix.

    Scores are recomputed in the backward pass, and taken in blocks of queries: [heads, time, time] is never held. On a
    mesh each device takes its rows, its heads, and its part of the queries against all keys of the row.

    Args:
      q: [batch, time, heads, head_dim], already rotated.
      k, v: [batch, time, kv_heads, head_dim].
      positions: [batch, time] int32, position of the token in its trajectory.
      segments: [batch, time] int32, 0 is padding.
      prefixes: [batch, time] int32, the segment that this token's trajectory continues (its own, if none). Not read on
        TPU, see `shares_prefixes`.

    Returns:
      [batch, time, heads, head_dim]; rows of padding are meaningless.
    """
    if platform() == "tpu":
        return _splash(q, k, v, segments)
    if active_mesh() is None:
        return _attend_rows(q, k, v, positions, segments, prefixes, positions, segments)
    queries, keys = activation_partition("batch", "time"), activation_partition("batch", None)
    return jax.shard_map(
        _attend_rows,
        in_specs=(
            activation_partition("batch", "time", "heads"),
            activation_partition("batch", None, "kv_heads"),
            activation_partition("batch", None, "kv_heads"),
            queries,
            queries,
            queries,
            keys,
            keys,
        ),
        out_specs=activation_partition("batch", "time", "heads"),
        check_vma=False,
    )(q, k, v, positions, segments, prefixes, positions, segments)


def _attend_rows(*rows: jax.Array) -> jax.Array:
    """`_attend_row` of every row."""
    if platform() == "cpu":
        # One row's scores fit the cache: 2 to 3 times as fast as all rows at once.
        return jax.lax.map(lambda row: _attend_row(*row), rows)
    return jax.vmap(_attend_row)(*rows)


def _attend_row(q, k, v, positions, segments, prefixes, key_positions, key_segments):
    """`packed_attention` of one row, without the batch axis; the keys have ids of their own."""
    time = q.shape[0]

    @jax.checkpoint
    def block(args):
        block_q, block_positions, block_segments, block_prefixes = args
        same = block_segments[:, None] == key_segments[None, :]
        prefix = block_prefixes[:, None] == key_segments[None, :]
        causal = key_positions[None, :] <= block_positions[:, None]
        mask = (same | prefix) & causal & (key_segments[None, :] > 0)
        return _attend(block_q, k.transpose(1, 2, 0), v.swapaxes(0, 1), mask)

    queries = (q, positions, segments, prefixes)
    if time <= QUERY_BLOCK:
        return checkpoint_name(block(queries), ATTENTION_RESIDUALS)
    pad = -time % QUERY_BLOCK
    blocks = tuple(
        jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, QUERY_BLOCK, *x.shape[1:]) for x in queries
    )
    attended = jax.lax.map(block, blocks).reshape(-1, *q.shape[1:])[:time]
    return checkpoint_name(attended, ATTENTION_RESIDUALS)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`packed_attention` by JAX's kernel for TPUs: causal along the row, within segments.

    Within a segment the row's order is the order of positions, so the two masks are the same.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    time, heads = q.shape[1], q.shape[2]
    mesh = active_mesh()
    head_shards, time_shards = (mesh.shape["tensor"], mesh.shape["sequence"]) if mesh else (1, 1)
    block = min(SPLASH_BLOCK, time // time_shards)
    kernel = splash.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((time, time)) for _ in range(heads)]),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=min(512, block),
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=min(512, block),
            use_fused_bwd_kernel=True,
        ),
        head_shards=head_shards,
        q_seq_shards=time_shards,
        residual_checkpoint_name=ATTENTION_RESIDUALS,
        interpret=interpret,
    )

    def local(kernel, q, k, v, query_segments, key_segments):
        rows = jax.vmap(lambda q, k, v, a, b: kernel(q, k, v, segment_ids=splash.SegmentIds(a, b)))
        return rows(q, k, v, query_segments, key_segments)

    # Heads first, as the kernel wants them; it does not scale the scores.
    operands = ((q * q.shape[-1] ** -0.5).swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), segments, segments)
    if mesh is None:
        return local(kernel, *operands).swapaxes(1, 2)
    queries, keys = activation_partition("batch", "heads", "time"), activation_partition("batch", "kv_heads", None)
    return jax.shard_map(
        local,
        in_specs=(
            kernel.manual_sharding_spec(jax.sharding.NamedSharding(mesh, activation_partition("heads", "time"))),
            queries,
            keys,
            keys,
            activation_partition("batch", "time"),
            activation_partition("batch", None),
        ),
        out_specs=queries,
        check_vma=False,
    )(kernel, *operands).swapaxes(1, 2)


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
