"""Attention of the sampler: new tokens against a KV cache of slots, read in place and only as far as it is filled.

Row r's tokens live in slot `slots[r]` of the cache. No slot is gathered, no key is repeated for the heads that share
it, and an int8 cache is never made into one of full precision. One formula, three implementations:

* `pallas_tpu`: our kernel for TPU (`kernels/tpu_cache_attention.py`); the default there.
* `cudnn`: NVIDIA's fused attention, for decode steps of bfloat16 and float16; the default for these on GPU.
* `xla`: blocks of positions in a loop that ends where the longest row does, on any platform. The default elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from orchestra_jax.models.kernels.tpu_cache_attention import cache_attention
from orchestra_jax.models.kernels.tpu_cache_write import write_cache

Implementation = Literal["pallas_tpu", "pallas_interpret", "cudnn", "xla"]
"""`pallas_interpret` is `pallas_tpu` run by the interpreter, on any platform and slowly, for tests."""

NEG_INF = -1e30  # finite, so that a row that attends to nothing gives no NaN

XLA_BLOCK = 1024
"""Positions whose scores `xla` holds at a time, [rows, heads, time, XLA_BLOCK] float32."""


def quantize_kv(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys or values as int8, with a float32 scale for each slot, head and position: symmetric over head_dim.

    Args:
      x: [..., head_dim].

    Returns:
      int8 [..., head_dim] and scale [...]: `x` is their product to within scale / 2, that is 1/254 of the largest
      magnitude over head_dim. Zeros have scale 0.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    # Not divided by 0; whatever is as small as that becomes 0.
    return jnp.round(x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None]).astype(jnp.int8), scale


def decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    *,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention of one new token a row to everything in its slot.

    Args:
      q: [rows, heads, head_dim], already rotated.
      keys, values: [slots, kv_heads, capacity, head_dim] of q's dtype, or int8; the new token's are in them already.
      slots: [rows] int32, the slot of each row; out of range: nobody, the row's output is 0.
      lengths: [rows] int32, filled positions of the slot, the new token's among them; 0: nobody.
      key_scales, value_scales: [slots, kv_heads, capacity] float32 of an int8 cache (`quantize_kv`), else None.
      implementation: default: by `jax.default_backend()`.

    Returns:
      [rows, heads, head_dim] of q's dtype.

    Raises:
      ValueError: arrays that do not fit each other or the implementation.
    """
    chosen = implementation or _default(q, keys, time=1)
    if chosen == "cudnn":
        _check(q[:, None], keys, values, slots, key_scales, value_scales)
        return _cudnn_decode(q, keys, values, *_only_real(slots, lengths, keys.shape[0]))
    return prefill_attention(
        q[:, None],
        keys,
        values,
        slots,
        jnp.maximum(lengths - 1, 0),
        (lengths > 0).astype(jnp.int32),
        key_scales=key_scales,
        value_scales=value_scales,
        implementation=chosen,
    )[:, 0]


def prefill_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of a chunk of new tokens a row to its slot: what was there, and the chunk itself.

    Memory for scores is bounded by a block of positions, whatever the capacity.

    Args:
      q: [rows, time, heads, head_dim], already rotated; token t of row r is at position starts[r] + t.
      keys, values, slots, key_scales, value_scales, implementation: see `decode_attention`.
      starts: [rows] int32, filled positions before the chunk.
      counts: [rows] int32, new tokens of the row, at most `time`; 0: nobody.

    Returns:
      [rows, time, heads, head_dim] of q's dtype, 0 beyond counts.

    Raises:
      ValueError: arrays that do not fit each other or the implementation.
    """
    _check(q, keys, values, slots, key_scales, value_scales)
    chosen = implementation or _default(q, keys, time=q.shape[1])
    slots, counts = _only_real(slots, counts, keys.shape[0])
    arrays = (q, keys, values, jnp.minimum(slots, keys.shape[0] - 1), starts, counts, key_scales, value_scales)
    match chosen:
        case "pallas_tpu" | "pallas_interpret":
            return cache_attention(*arrays, interpret=chosen == "pallas_interpret")
        case "xla":
            return _xla_attention(*arrays)
        case _:
            raise ValueError(f"implementation {chosen!r} cannot attend from a chunk: choose 'pallas_tpu' or 'xla'")


def write_kv(
    keys: jax.Array,
    values: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """New tokens' keys and values into their rows' slots, quantised if the cache is.

    On TPU this is the only writer that leaves the cache where it is: XLA's scatter has it copied at every step.

    Args:
      keys, values, key_scales, value_scales: the cache as for `decode_attention`, to be donated.
      k, v: [rows, time, kv_heads, head_dim], k already rotated.
      slots: [rows] int32; out of range: nobody. No two rows write into the same slot.
      starts, counts: [rows] int32, row r's first counts[r] tokens go to positions starts[r] on.
      implementation: default: by `jax.default_backend()`.

    Returns:
      keys, values, key_scales and value_scales (None if they were).
    """
    slots, counts = _only_real(slots, counts, keys.shape[0])
    arrays, news = [keys, values], [k.astype(keys.dtype), v.astype(values.dtype)]
    if key_scales is not None and value_scales is not None:
        (k, new_key_scales), (v, new_value_scales) = quantize_kv(k), quantize_kv(v)
        arrays, news = [keys, values, key_scales, value_scales], [k, v, new_key_scales, new_value_scales]
    chosen = implementation or _default(k, keys, time=k.shape[1])
    if chosen in ("pallas_tpu", "pallas_interpret"):
        within = jnp.minimum(slots, keys.shape[0] - 1)
        written = write_cache(arrays, news, within, starts, counts, interpret=chosen == "pallas_interpret")
    else:
        offsets = jnp.arange(k.shape[1])
        targets = jnp.where(offsets < counts[:, None], starts[:, None] + offsets, keys.shape[2])  # dropped
        written = [a.at[slots[:, None], :, targets].set(new, mode="drop") for a, new in zip(arrays, news)]
    new_keys, new_values, *scales = written
    return new_keys, new_values, *(scales or (None, None))


def sharded_attention(attention: Callable[..., jax.Array], mesh: Mesh, *, data: str, tensor: str) -> Callable:
    """`decode_attention` or `prefill_attention` for a cache whose slots are sharded over `data`, heads over `tensor`.

    No device sees another's part of the cache. The rows are sharded over `data` too, and the slots that they name
    must be of the same shard (as they are when row r works in slot r).

    Args:
      attention: one of the two, or a partial of it.
      mesh: has both axes.
      data, tensor: their names.

    Returns:
      The same function of the whole arrays, slots numbered over the whole cache.
    """

    def call(q, keys, values, slots, *rest, key_scales=None, value_scales=None):
        scales = {} if key_scales is None else {"key_scales": key_scales, "value_scales": value_scales}
        cache, rows = PartitionSpec(data, tensor), PartitionSpec(data)
        heads = PartitionSpec(data, *[None] * (q.ndim - 3), tensor)

        def local(q, keys, values, slots, rest, scales):
            return attention(q, keys, values, _own(slots, keys, data), *rest, **scales)

        specs = (heads, cache, cache, rows, rows, cache)
        return _shard_map(local, mesh, specs, heads)(q, keys, values, slots, rest, scales)

    return call


def sharded_write(write: Callable[..., tuple], mesh: Mesh, *, data: str, tensor: str) -> Callable:
    """`write_kv` for a cache that is sharded as for `sharded_attention`."""

    def call(keys, values, k, v, slots, starts, counts, *, key_scales=None, value_scales=None):
        scales = {} if key_scales is None else {"key_scales": key_scales, "value_scales": value_scales}
        cache, rows = PartitionSpec(data, tensor), PartitionSpec(data)
        heads = PartitionSpec(data, None, tensor)

        def local(keys, values, k, v, slots, starts, counts, scales):
            written = write(keys, values, k, v, _own(slots, keys, data), starts, counts, **scales)
            return written if scales else written[:2]

        specs = (cache, cache, heads, heads, rows, rows, rows, cache)
        written = _shard_map(local, mesh, specs, cache)(keys, values, k, v, slots, starts, counts, scales)
        return written if scales else (*written, None, None)

    return call


def _own(slots: jax.Array, keys: jax.Array, data: str) -> jax.Array:
    """Slots of the whole cache as slots of this device's shard `keys`; another shard's are out of range."""
    return slots - jax.lax.axis_index(data) * keys.shape[0]


def _shard_map(function: Callable, mesh: Mesh, in_specs, out_specs) -> Callable:
    # Kernels do not say over which axes their results vary, hence no check of it.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _default(q: jax.Array, keys: jax.Array, *, time: int) -> Implementation:
    """The implementation for this platform."""
    match jax.default_backend():
        case "tpu":
            return "pallas_tpu"
        case "gpu" | "cuda" if time == 1 and keys.dtype == q.dtype and _cudnn_takes(q):
            return "cudnn"
        case _:
            return "xla"


def _check(q, keys, values, slots, key_scales, value_scales) -> None:
    """Raises ValueError where shapes or dtypes do not fit."""
    rows, _, heads, head_dim = q.shape
    num_slots, kv_heads, capacity, _ = keys.shape
    if keys.shape != values.shape or keys.shape[3] != head_dim:
        raise ValueError(
            f"keys {keys.shape} and values {values.shape} must be [slots, kv_heads, capacity, {head_dim}]: "
            f"the queries' head_dim is {head_dim}"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} kv heads evenly")
    if slots.shape != (rows,):
        raise ValueError(f"slots must be [{rows}], one a row, not {slots.shape}")
    if keys.dtype == jnp.int8:
        for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
            if scales is None or scales.shape != (num_slots, kv_heads, capacity):
                got = None if scales is None else scales.shape
                raise ValueError(f"an int8 cache needs {name} {(num_slots, kv_heads, capacity)}, not {got}")
    elif keys.dtype != q.dtype or values.dtype != q.dtype:
        raise ValueError(f"a cache of {keys.dtype} and {values.dtype} does not go with queries of {q.dtype}")
    elif key_scales is not None or value_scales is not None:
        raise ValueError(f"scales are for an int8 cache, this one is {keys.dtype}")


def _only_real(slots: jax.Array, counts: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """The same, with slot `num_slots` and 0 of whatever is counted for each row that has no slot."""
    real = (slots >= 0) & (slots < num_slots)
    return jnp.where(real, slots, num_slots), jnp.where(real, counts, 0)


# --------------------------------------------------------------------------------------------------------------
# XLA
# --------------------------------------------------------------------------------------------------------------


def _xla_attention(q, keys, values, slots, starts, counts, key_scales, value_scales) -> jax.Array:
    """`prefill_attention` by a loop over blocks of positions, with a running softmax in float32."""
    rows, time, _, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    block = min(XLA_BLOCK, capacity)
    # The heads that share keys become rows of one matrix: [rows, kv_heads, group * time, head_dim].
    grouped = q.reshape(rows, time, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, -1, head_dim)
    positions = starts[:, None] + jnp.arange(time)
    ends = jnp.where(counts > 0, starts + counts, 0)

    def fold(number, carry):
        old_max, total, acc = carry
        first = number * block
        begin = jnp.minimum(first, capacity - block)  # the last block may overlap the one before
        part = partial(_slot_blocks, slots=slots, begin=begin, block=block)
        source = begin + jnp.arange(block)
        visible = (source >= first) & (source <= positions[:, :, None])
        filled = source < ends[:, None]  # what nobody has written may be anything, and 0 times NaN is NaN
        scores = _dot(grouped, part(keys), 3) * head_dim**-0.5
        if key_scales is not None:
            scores = scores * part(key_scales)[:, :, None]
        by_time = scores.reshape(rows, kv_heads, -1, time, block)
        scores = jnp.where(visible[:, None, None], by_time, NEG_INF).reshape(scores.shape)
        new_max = jnp.maximum(old_max, scores.max(axis=-1, keepdims=True))
        decay, weights = jnp.exp(old_max - new_max), jnp.exp(scores - new_max)
        total = total * decay + weights.sum(axis=-1, keepdims=True)
        if value_scales is not None:
            weights = weights * jnp.where(filled[:, None], part(value_scales), 0)[:, :, None]
        own_values = jnp.where(filled[:, None, :, None], part(values), 0)
        return new_max, total, acc * decay + _dot(weights.astype(q.dtype), own_values, 2)

    empty = jnp.zeros((*grouped.shape[:3], 1), jnp.float32)
    blocks = (jnp.max(ends) + block - 1) // block
    start = (empty + NEG_INF, empty, jnp.zeros(grouped.shape, jnp.float32))
    _, total, acc = jax.lax.fori_loop(0, blocks, fold, start)
    out = (acc / jnp.maximum(total, 1e-30)).reshape(rows, kv_heads, -1, time, head_dim).transpose(0, 3, 1, 2, 4)
    real = jnp.arange(time) < counts[:, None]
    return jnp.where(real[:, :, None, None], out.reshape(q.shape), 0).astype(q.dtype)


def _slot_blocks(array: jax.Array, slots: jax.Array, begin: jax.Array, block: int) -> jax.Array:
    """`block` positions (axis 2) from `begin` on of each row's slot, and of no other: [rows, kv_heads, block, ...]."""

    def one(slot):
        start = (slot, 0, begin, *[0] * (array.ndim - 3))
        return jax.lax.dynamic_slice(array, start, (1, array.shape[1], block, *array.shape[3:]))[0]

    return jax.vmap(one)(slots)


def _dot(x: jax.Array, cached: jax.Array, axis: int) -> jax.Array:
    """x [rows, kv_heads, queries, n] with `axis` of cached [rows, kv_heads, block, head_dim], float32."""
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(x, cached.astype(x.dtype), dims, preferred_element_type=jnp.float32)


# --------------------------------------------------------------------------------------------------------------
# cuDNN
# --------------------------------------------------------------------------------------------------------------


def _cudnn_takes(q: jax.Array) -> bool:
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0


def _cudnn_decode(q, keys, values, slots, lengths) -> jax.Array:
    """`decode_attention` by cuDNN, of all slots at once: those without a row have length 1 and cost next to nothing.

    The public `jax.nn.dot_product_attention` takes [batch, positions, heads, head_dim] alone, which would copy the
    cache at every step; the function below it also takes our layout. It takes no page table here: that wants as many
    pages as rows have, and the queries are small enough to be brought to their slots instead.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    if keys.dtype != q.dtype or not _cudnn_takes(q):
        raise ValueError(
            f"cuDNN takes a bfloat16 or float16 cache with head_dim of at most 128, a multiple of 8: "
            f"this one is {keys.dtype} with {q.shape[-1]}, and the queries are {q.dtype}. Choose 'xla'."
        )
    num_slots = keys.shape[0]
    by_slot = jnp.zeros((num_slots, *q.shape[1:]), q.dtype).at[slots].set(q, mode="drop")
    slot_lengths = jnp.zeros((num_slots,), jnp.int32).at[slots].set(lengths, mode="drop")
    out = dot_product_attention(
        by_slot[:, :, None],
        keys,
        values,
        q_seqlen=jnp.ones((num_slots,), jnp.int32),
        kv_seqlen=jnp.maximum(slot_lengths, 1),
        scale=q.shape[-1] ** -0.5,
        mask_type=MaskType.PADDING,
        qkv_layout="BNTH",
    )[:, :, 0]
    mine = out.at[slots].get(mode="fill", fill_value=0)
    return jnp.where((lengths > 0)[:, None, None], mine, 0)
