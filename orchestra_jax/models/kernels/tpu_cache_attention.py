"""Attention of new tokens to a KV cache on TPU: a Mosaic kernel that fetches what is filled, from where it is.

The work is a list of (tile of queries, block of positions) pairs, made on the device from the rows' lengths; the grid
is as long as the list. A short row costs its own blocks and nothing for the longest one's, a row with nothing to do
costs nothing, and the next row's first block is on its way while the last one's is worked on. A decode step is a tile
of one token, a chunk of a prompt several tiles of many.

The heads that share keys are rows of one matrix, so that each block of keys is fetched and read once for all of them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

NEG_INF = -1e30

_LANES = 128
_TILE_ROWS = 512  # queries times heads a kv head: as many rows as keep the matrix unit busier than memory
_BLOCK_BYTES = 1 << 20  # keys and values fetched a grid step: long against the step's own cost, small against VMEM


class Work(NamedTuple):
    """The list of pairs, [items], and what it refers to, [tiles]; all int32, read by the scalar core."""

    item_tiles: jax.Array
    """[items] the tile of each pair, in ascending order; beyond `num_items` anything."""
    first_items: jax.Array
    """[tiles] where each tile's pairs begin."""
    slots: jax.Array
    """[tiles]."""
    starts: jax.Array
    """[tiles] position of the tile's first token."""
    ends: jax.Array
    """[tiles] one beyond the position of its last token, 0 if it has none."""
    num_items: jax.Array
    """[] how many pairs there are, at least 1."""


def plan_work(
    slots: jax.Array, starts: jax.Array, counts: jax.Array, *, tile: int, tiles: int, block: int, capacity: int
) -> Work:
    """The pairs of rows that each have `counts[r]` new tokens from position `starts[r]` on, in `tiles` tiles of `tile`.

    slots, starts, counts: [rows] int32, slots within bounds.
    """
    offsets = jnp.arange(tiles, dtype=jnp.int32) * tile
    tile_starts = (starts[:, None] + offsets).reshape(-1)
    tile_counts = jnp.clip(counts[:, None] - offsets, 0, tile).reshape(-1)
    ends = jnp.where(tile_counts > 0, tile_starts + tile_counts, 0)
    blocks = (ends + block - 1) // block
    last_items = jnp.cumsum(blocks)
    limit = blocks.shape[0] * -(-capacity // block)
    items = jnp.arange(limit, dtype=jnp.int32)
    item_tiles = jnp.sum(last_items[None, :] <= items[:, None], axis=1, dtype=jnp.int32)
    return Work(
        item_tiles=jnp.minimum(item_tiles, blocks.shape[0] - 1),
        first_items=last_items - blocks,
        slots=jnp.repeat(slots, tiles),
        starts=tile_starts,
        ends=ends,
        num_items=jnp.maximum(last_items[-1], 1),
    )


def cache_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each row's new tokens to its slot of the cache, in which their keys and values are already.

    Args:
      q: [rows, time, heads, head_dim].
      keys, values: [slots, kv_heads, capacity, head_dim], of q's dtype or int8.
      slots: [rows] int32 within bounds.
      starts: [rows] int32, position of the row's first new token.
      counts: [rows] int32, new tokens of the row; 0: nothing to do.
      key_scales, value_scales: [slots, kv_heads, capacity] float32, of an int8 cache.
      interpret: run the kernel by the interpreter, on any platform.

    Returns:
      [rows, time, heads, head_dim] of q's dtype, 0 beyond counts.
    """
    rows, time, heads, head_dim = q.shape
    _, kv_heads, capacity, _ = keys.shape
    group = heads // kv_heads
    tile = min(time, 1 << (_TILE_ROWS // group).bit_length() - 1)
    tiles = -(-time // tile)
    # Half of the heads each on chips of two cores; one head a step where there are enough queries to work on.
    block_heads = 1 if tile * group > _LANES or kv_heads % 2 else kv_heads // 2
    block = _block_positions(capacity, block_heads * head_dim * keys.dtype.itemsize * 2)
    work = plan_work(slots, starts, counts, tile=tile, tiles=tiles, block=block, capacity=capacity)

    padded = jnp.pad(q, ((0, 0), (0, tiles * tile - time), (0, 0), (0, 0)))
    # A tile's rows are token by token, the heads of a kv head beside each other.
    tiled = padded.reshape(rows, tiles, tile, kv_heads, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
    tiled = tiled.reshape(rows * tiles, kv_heads, tile * group, head_dim)

    # XLA lays an array out on TPU with positions last where head_dim alone does not fill a row of lanes. As that is how
    # the kernel reads it then, the exchange of the axes here costs nothing, and neither padding nor a copy is needed.
    transposed = head_dim % _LANES != 0
    if transposed:
        keys, values = keys.swapaxes(2, 3), values.swapaxes(2, 3)
    if transposed:
        cache_block = pl.BlockSpec((1, block_heads, head_dim, block), _transposed_block_index)
    else:
        cache_block = pl.BlockSpec((1, block_heads, block, head_dim), _block_index)

    scales = [] if key_scales is None or value_scales is None else [key_scales, value_scales]
    cache = [keys, values, *scales]
    if not interpret:
        # Else the compiler may fetch all of a small cache into VMEM beforehand, filled or not.
        cache = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in cache]
    out = pl.pallas_call(
        partial(_kernel, block=block, group=group, transposed=transposed, quantized=bool(scales)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv_heads // block_heads, work.num_items),
            in_specs=[
                pl.BlockSpec((1, block_heads, tile * group, head_dim), _tile_index),
                cache_block,
                cache_block,
                *[pl.BlockSpec((1, kv_heads, block), _scale_index) for _ in scales],
            ],
            out_specs=pl.BlockSpec((1, block_heads, tile * group, head_dim), _tile_index),
            scratch_shapes=[
                pltpu.VMEM((block_heads, tile * group, _LANES), jnp.float32),
                pltpu.VMEM((block_heads, tile * group, _LANES), jnp.float32),
                pltpu.VMEM((block_heads, tile * group, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(tiled.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="cache_attention",
    )(*work[:5], tiled, *cache)

    out = out.reshape(rows, tiles, kv_heads, tile, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
    out = out.reshape(rows, tiles * tile, heads, head_dim)[:, :time]
    # Tiles without work are never written.
    return jnp.where((jnp.arange(time) < counts[:, None])[:, :, None, None], out, 0)


def _block_positions(capacity: int, bytes_per_position: int) -> int:
    """Positions a block, a power of two of 128 to 1024, or the whole of a small cache."""
    block = 128
    while block < 1024 and 2 * block * bytes_per_position <= _BLOCK_BYTES:
        block *= 2
    return min(block, capacity)


def _tile_index(heads, item, item_tiles, *_):
    return item_tiles[item], heads, 0, 0


def _block_index(heads, item, item_tiles, first_items, slots, *_):
    tile = item_tiles[item]
    return slots[tile], heads, item - first_items[tile], 0


def _transposed_block_index(heads, item, item_tiles, first_items, slots, *_):
    tile = item_tiles[item]
    return slots[tile], heads, 0, item - first_items[tile]


def _scale_index(_, item, item_tiles, first_items, slots, *__):
    tile = item_tiles[item]
    return slots[tile], 0, item - first_items[tile]


def _kernel(
    item_tiles,
    first_items,
    _slots,
    starts,
    ends,
    q_ref,
    k_ref,
    v_ref,
    *refs,
    block: int,
    group: int,
    transposed: bool,
    quantized: bool,
) -> None:
    """One pair: scores of a tile against a block, folded into the tile's running softmax (all in float32)."""
    (k_scale_ref, v_scale_ref), refs = (refs[:2], refs[2:]) if quantized else ((None, None), refs)
    o_ref, max_ref, sum_ref, acc_ref = refs
    first_head, item = pl.program_id(0) * q_ref.shape[1], pl.program_id(1)
    tile = item_tiles[item]
    number = item - first_items[tile]
    begin, start, end = number * block, starts[tile], ends[tile]

    @pl.when(number == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, NEG_INF)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(masked: bool) -> None:
        for head in range(q_ref.shape[1]):
            _fold(
                q_ref[0, head],
                k_ref[0, head],
                v_ref[0, head],
                k_scale_ref[0, pl.ds(first_head + head, 1), :] if k_scale_ref is not None else None,
                v_scale_ref[0, pl.ds(first_head + head, 1), :] if v_scale_ref is not None else None,
                max_ref.at[head],
                sum_ref.at[head],
                acc_ref.at[head],
                bounds=(begin, start, end) if masked else None,
                group=group,
                transposed=transposed,
            )

    whole = begin + block <= start + 1  # all of the block is before or at the tile's first token

    @pl.when(whole)
    def _():
        step(masked=False)

    @pl.when(jnp.logical_not(whole))
    def _():
        step(masked=True)

    @pl.when(begin + block >= end)
    def _():
        o_ref[0] = (acc_ref[...] / sum_ref[:, :, :1]).astype(o_ref.dtype)


def _fold(q, k, v, k_scale, v_scale, max_ref, sum_ref, acc_ref, *, bounds, group: int, transposed: bool) -> None:
    """One head: q [tile * group, D] against k, v [block, D] ([D, block] if `transposed`) and scales [1, block]."""
    position_axis = 1 if transposed else 0

    def dot(x, y, axis):
        # float32 stays float32: the matrix unit would take it as bfloat16.
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        dims = (((1,), (axis,)), ((), ()))
        return jax.lax.dot_general(
            x.astype(q.dtype), y.astype(q.dtype), dims, precision=precision, preferred_element_type=jnp.float32
        )

    scores = dot(q, k, 1 - position_axis) * q.shape[-1] ** -0.5
    if k_scale is not None:
        scores = scores * k_scale
    if bounds is not None:
        begin, start, end = bounds
        positions = begin + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        # lax.div, since `//` asks which chip is there, and an ahead-of-time compilation has none.
        queries = start + jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0), group)
        scores = jnp.where((positions <= queries) & (positions < end), scores, NEG_INF)
        # What nobody has written may be anything, and 0 times NaN is NaN.
        filled = begin + jax.lax.broadcasted_iota(jnp.int32, v.shape, position_axis) < end
        v = jnp.where(filled, v.astype(jnp.float32), 0.0)
        if v_scale is not None:
            v_scale = jnp.where(begin + jax.lax.broadcasted_iota(jnp.int32, v_scale.shape, 1) < end, v_scale, 0.0)
    old_max = max_ref[:, :1]
    new_max = jnp.maximum(old_max, scores.max(axis=-1, keepdims=True))
    decay = jnp.exp(old_max - new_max)
    weights = jnp.exp(scores - new_max)
    max_ref[...] = jnp.broadcast_to(new_max, max_ref.shape)
    sum_ref[...] = sum_ref[...] * decay + weights.sum(axis=-1, keepdims=True)
    if v_scale is not None:
        weights = weights * v_scale
    acc_ref[...] = acc_ref[...] * decay + dot(weights, v, position_axis)
