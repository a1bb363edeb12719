"""Enters new keys and values into a KV cache on TPU, in place: a Mosaic kernel over the blocks that change.

XLA's own scatter is not fit for it. It wants the heads of a position beside each other, which is not how attention
reads them, and then copies the whole cache from one order to the other and back at every step. Here the few positions
around the new ones are read, overwritten where new, and put back; rows with nothing new cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128


def write_cache(
    arrays: Sequence[jax.Array],
    news: Sequence[jax.Array],
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """Each row's first `counts[r]` new entries at positions `starts[r]` on of its slot, of several arrays at once.

    Args:
      arrays: [slots, kv_heads, capacity] or [slots, kv_heads, capacity, head_dim] each; to be donated.
      news: [rows, time, kv_heads] or [rows, time, kv_heads, head_dim], of the arrays' dtypes.
      slots: [rows] int32 within bounds; no two rows with something new have the same.
      starts: [rows] int32.
      counts: [rows] int32; 0: nothing new.
      interpret: run the kernel by the interpreter, on any platform.

    Returns:
      The arrays.
    """
    rows, time = news[0].shape[:2]
    capacity = arrays[0].shape[2]
    views = [_positions_last(array) for array in arrays]
    axes = [3 if last and array.ndim == 4 else 2 for last, array in zip(views, arrays)]
    blocks = [min(_block(array, last, time), capacity) for last, array in zip(views, arrays)]
    per_row = (time + blocks[0] - 2) // blocks[0] + 1 if time > 1 else 1

    ends = starts + counts
    amounts = jnp.where(counts > 0, (ends - 1) // blocks[0] - starts // blocks[0] + 1, 0)
    last_items = jnp.cumsum(amounts)
    items = jnp.arange(rows * per_row, dtype=jnp.int32)
    item_rows = jnp.minimum(jnp.sum(last_items[None, :] <= items[:, None], axis=1, dtype=jnp.int32), rows - 1)
    scalars = (item_rows, last_items - amounts, slots, starts, ends)

    changed, specs, new_specs = [], [], []
    for array, new, last, axis, block in zip(arrays, news, views, axes, blocks):
        new = new.swapaxes(1, 2)  # [rows, kv_heads, time, ...]
        if last and array.ndim == 4:
            array, new = array.swapaxes(2, 3), new.swapaxes(2, 3)
        shape = [1, *array.shape[1:]]
        shape[axis] = block
        specs.append(pl.BlockSpec(tuple(shape), partial(_block_index, axis=axis, ndim=array.ndim, block=block)))
        if time > 1:
            new = _aligned(new, starts % block, axis, block, per_row * block)
        else:
            shape[axis] = 1
        new_specs.append(pl.BlockSpec(tuple(shape), partial(_new_index, axis=axis, ndim=array.ndim)))
        changed.append((array, new))

    inputs = [array for array, _ in changed]
    if not interpret:
        inputs = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in inputs]
    out = pl.pallas_call(
        partial(_kernel, axes=axes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(last_items[-1], 1),),
            in_specs=[*new_specs, *specs],
            out_specs=specs,
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs],
        input_output_aliases={len(scalars) + len(inputs) + index: index for index in range(len(inputs))},
        interpret=interpret,
        name="write_cache",
    )(*scalars, *[new for _, new in changed], *inputs)
    return [array.swapaxes(2, 3) if axis == 3 else array for array, axis in zip(out, axes)]


def _positions_last(array: jax.Array) -> bool:
    """Whether XLA has this array's positions last on TPU: see `tpu_cache_attention`."""
    return array.ndim == 3 or array.shape[3] % _LANES != 0


def _block(array: jax.Array, last: bool, time: int) -> int:
    """Positions a block: as few as memory is divided into for one new token, a good many for a chunk."""
    return _LANES if last or time > 1 else 32 // array.dtype.itemsize


def _aligned(new: jax.Array, shifts: jax.Array, axis: int, block: int, length: int) -> jax.Array:
    """`new`, each row's entries moved by `shifts[r]` < block along `axis`, which becomes `length` long."""
    pads = [(0, 0)] * new.ndim
    pads[axis] = (block, length - new.shape[axis])
    padded = jnp.pad(new, pads)
    take = partial(jax.lax.dynamic_slice_in_dim, slice_size=length, axis=axis - 1)
    return jax.vmap(lambda row, shift: take(row, block - shift))(padded, shifts)


def _block_index(item, item_rows, first_items, slots, starts, _, *, axis: int, ndim: int, block: int):
    row = item_rows[item]
    number = jax.lax.div(starts[row], block) + item - first_items[row]
    return (slots[row], *[number if dim == axis else 0 for dim in range(1, ndim)])


def _new_index(item, item_rows, first_items, *_, axis: int, ndim: int):
    row = item_rows[item]
    return (row, *[item - first_items[row] if dim == axis else 0 for dim in range(1, ndim)])


def _kernel(item_rows, first_items, _slots, starts, ends, *refs, axes: Sequence[int]) -> None:
    """One block of each array."""
    item = pl.program_id(0)
    row = item_rows[item]
    for new_ref, old_ref, out_ref, axis in zip(refs, refs[len(axes) :], refs[2 * len(axes) :], axes):
        block = out_ref.shape[axis]
        begin = (jax.lax.div(starts[row], block) + item - first_items[row]) * block
        positions = begin + jax.lax.broadcasted_iota(jnp.int32, out_ref.shape[1:], axis - 1)
        # Selected as 32 bits wide, for which every chip has a mask.
        wide = jnp.int32 if out_ref.dtype == jnp.int8 else jnp.float32
        is_new = (positions >= starts[row]) & (positions < ends[row])
        out_ref[0] = jnp.where(is_new, new_ref[0].astype(wide), old_ref[0].astype(wide)).astype(out_ref.dtype)
