"""What the engine runs on the device: new tokens into slots, copies of slots, and rounds of sampling.

Three ways to read the cache, one result. *In place*: the rows of a round are all slots, in their order. *By kernel*
(`direct`): any slots, read in place by the platform's attention kernel. *By view*: some slots, whose filled part is
taken out for the round and written back, for platforms without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import KVCache, Params, extend, init_cache, logits
from orchestra_jax.sampler.sampling import Array, Restriction, restrict, sample_tokens


class DeviceState(NamedTuple):
    """What stays on the device, donated from call to call."""

    cache: KVCache
    logits: jax.Array
    """[slots, vocab_size] float32, of the last token of each slot."""
    remaining: jax.Array
    """[slots] int32, tokens that the slot's turn may still sample; 0: it has ended."""


class Rows(NamedTuple):
    """The rows of a round of sampling, [rows] each. A row of slot `num_slots` has nothing to do."""

    slots: Array
    """int32."""
    fresh: Array
    """bool: the turn's first round, `lengths` and `limits` count; else what the device knows itself does."""
    lengths: Array
    """int32, tokens in the slot."""
    limits: Array
    """int32, tokens that the turn may sample."""
    temperatures: Array
    """float32."""
    trajectories: Array
    """uint32."""
    stop_ids: Array
    """[rows, any] int32, -1 for none."""


class Sampled(NamedTuple):
    """What a round sampled, for the host to read."""

    tokens: jax.Array
    """[rows, steps] int32, row r valid up to counts[r]."""
    logprobs: jax.Array
    """[rows, steps] float32."""
    counts: jax.Array
    """[rows] int32."""
    stopped: jax.Array
    """[rows] bool: the last token is a stop id."""


def init_state(
    config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype, transposed: bool | None
) -> DeviceState:
    """Empty slots."""
    return DeviceState(
        init_cache(config, slots, capacity, dtype, transposed=transposed),
        jnp.zeros((slots, config.vocab_size), jnp.float32),
        jnp.zeros((slots,), jnp.int32),
    )


@partial(jax.jit, static_argnames=("filled",), donate_argnames=("state",))
def copy_slots(state: DeviceState, table: jax.Array, count: jax.Array, *, filled: int) -> tuple[DeviceState, jax.Array]:
    """The first `filled` positions of slots into others, and their logits, one copy after the other.

    What is beyond the wanted length is overwritten later, and so are the logits if more tokens follow. (Slices in a
    loop are plain memory copies; as one scatter they took several times as long as the decoding on CPU.)

    Args:
        state: is donated.
        table: [slots, 2] int32, source and target.
        count: how many rows of the table there are.
        filled: positions to copy.
    """

    def copy(index: jax.Array, state: DeviceState) -> DeviceState:
        source, target = table[index, 0], table[index, 1]

        def row(array: jax.Array, axis: int | None = None) -> jax.Array:
            size = [1, *array.shape[1:]]
            if axis is not None:
                size[axis] = filled
            start = (0,) * (array.ndim - 1)
            part = jax.lax.dynamic_slice(array, (source, *start), size)
            return jax.lax.dynamic_update_slice(array, part, (target, *start))

        return state._replace(cache=_map_cache(row, state.cache), logits=row(state.logits))

    return jax.lax.fori_loop(0, count, copy, state), count + 0


@partial(jax.jit, static_argnames=("config", "filled", "direct"), donate_argnames=("state",))
def append_tokens(
    config: ModelConfig,
    params: Params,
    state: DeviceState,
    tokens: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    filled: int,
    direct: bool,
) -> tuple[DeviceState, jax.Array]:
    """Prefill: new tokens [rows, width] (counts[r] of them) at positions `starts` of slots.

    Returns:
        The state, and something small that is ready when this is done.
    """
    cache = state.cache
    state = state._replace(cache=replace(cache, lengths=cache.lengths.at[slots].set(starts, mode="drop")))
    view, view_slots = _view(state, slots, filled, direct)
    hidden, view = extend(config, params, view, tokens, counts, filled=filled, slots=view_slots)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    rows_logits = jnp.where((counts > 0)[:, None], logits(config, params, last), _rows_of(state.logits, slots))
    state = _write_back(state, view, slots, starts, tokens.shape[1], direct)
    return state._replace(logits=state.logits.at[slots].set(rows_logits, mode="drop")), counts + 0


@partial(jax.jit, static_argnames=("config", "filled", "steps", "direct"), donate_argnames=("state",))
def sample_round(
    config: ModelConfig,
    params: Params,
    state: DeviceState,
    rows: Rows,
    key: jax.Array,
    leave_after: jax.Array,
    restriction: Restriction | None,
    *,
    filled: int,
    steps: int,
    direct: bool,
) -> tuple[DeviceState, Sampled]:
    """Up to `steps` tokens a row; a row ends at a stop id or its limit.

    Args:
        config: the model.
        params: its weights.
        state: is donated.
        rows: what to do. A round of all slots has them in their order.
        key: of all sampling.
        leave_after: the round is over when so many rows have ended, so that their slots are soon of use again.
        restriction: of the rows' distributions; None if there is none.
        filled: no slot is longer than this after the round.
        steps: the most tokens of a row.
        direct: whether the platform's kernel reads the cache.
    """
    slots, number = rows.slots, rows.slots.shape[0]
    state = _begin(state, rows)
    starts = _rows_of(state.cache.lengths, slots)
    remaining = jnp.where(slots < state.remaining.shape[0], _rows_of(state.remaining, slots), 0)
    view, view_slots = _view(state, slots, filled, direct)
    enough = jnp.sum(remaining > 0) - leave_after

    def keep_going(carry) -> jax.Array:
        active = jnp.sum(carry[3] > 0)
        return (carry[0] < steps) & (active > 0) & (active > enough)

    def one_token(carry):
        step, view, row_logits, remaining, stopped, tokens, logprobs, counts = carry
        active = remaining > 0
        choices = row_logits if restriction is None else restrict(row_logits, rows.temperatures, restriction)
        positions = starts + counts
        new, new_logprobs = sample_tokens(choices, rows.temperatures, key, rows.trajectories, positions)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, jnp.where(active, new, 0)[:, None], step, 1)
        logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, jnp.where(active, new_logprobs, 0.0)[:, None], step, 1)
        new_counts = active.astype(jnp.int32)
        hidden, view = extend(config, params, view, new[:, None], new_counts, filled=filled, slots=view_slots)
        row_logits = jnp.where(active[:, None], logits(config, params, hidden[:, 0]), row_logits)
        stops = active & jnp.any(new[:, None] == rows.stop_ids, axis=1)
        remaining = jnp.where(stops, 0, remaining - new_counts)
        return step + 1, view, row_logits, remaining, stopped | stops, tokens, logprobs, counts + new_counts

    start = (
        jnp.int32(0),
        view,
        _rows_of(state.logits, slots),
        remaining,
        jnp.zeros((number,), bool),
        jnp.zeros((number, steps), jnp.int32),
        jnp.zeros((number, steps), jnp.float32),
        jnp.zeros((number,), jnp.int32),
    )
    _, view, row_logits, remaining, stopped, tokens, logprobs, counts = jax.lax.while_loop(keep_going, one_token, start)
    state = _write_back(state, view, slots, starts, steps, direct)
    state = state._replace(
        logits=_set_rows(state.logits, slots, row_logits), remaining=_set_rows(state.remaining, slots, remaining)
    )
    return state, Sampled(tokens, logprobs, counts, stopped)


def _begin(state: DeviceState, rows: Rows) -> DeviceState:
    """Enters lengths and limits of turns that begin."""
    slots = jnp.where(rows.fresh, rows.slots, state.remaining.shape[0])
    return state._replace(
        cache=replace(state.cache, lengths=state.cache.lengths.at[slots].set(rows.lengths, mode="drop")),
        remaining=state.remaining.at[slots].set(rows.limits, mode="drop"),
    )


def _in_order(array: jax.Array, slots: jax.Array) -> bool:
    """Whether a round is of all slots, which are in their order then."""
    return slots.shape[0] == array.shape[0]


def _rows_of(array: jax.Array, slots: jax.Array) -> jax.Array:
    return array if _in_order(array, slots) else array[slots]


def _set_rows(array: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
    if _in_order(array, slots):
        return jnp.where((slots < array.shape[0]).reshape(-1, *[1] * (array.ndim - 1)), new, array)
    return array.at[slots].set(new, mode="drop")


def _view(state: DeviceState, slots: jax.Array, filled: int, direct: bool) -> tuple[KVCache, jax.Array | None]:
    """The cache in which a round works, and the slots of its rows in it (None: one after the other)."""
    cache = state.cache
    if direct:
        return cache, slots
    if _in_order(cache.lengths, slots):
        return cache, None

    def rows(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.slice_in_dim(array, 0, filled, axis=axis)[slots]

    return replace(_map_cache(rows, cache), lengths=cache.lengths[slots]), None


def _write_back(
    state: DeviceState, view: KVCache, slots: jax.Array, starts: jax.Array, width: int, direct: bool
) -> DeviceState:
    """Enters up to `width` new positions from `starts` of each row of a view into its slot."""
    cache = state.cache
    if direct or _in_order(cache.lengths, slots):
        return state._replace(cache=view)
    offsets = starts[:, None] + jnp.arange(width)[None, :]
    targets = jnp.where(offsets < view.lengths[:, None], offsets, cache.capacity)  # dropped
    sources = jnp.minimum(offsets, view.capacity - 1)
    numbers = jnp.arange(slots.shape[0])[:, None]

    def write(whole: jax.Array, axis: int, part: jax.Array) -> jax.Array:
        if axis == 3:
            return whole.at[slots[:, None], :, :, targets].set(part[numbers, :, :, sources], mode="drop")
        return whole.at[slots[:, None], :, targets].set(part[numbers, :, sources], mode="drop")

    lengths = cache.lengths.at[slots].set(view.lengths, mode="drop")
    return state._replace(cache=replace(_map_cache(write, cache, view), lengths=lengths))


def _map_cache(function: Callable[..., jax.Array], cache: KVCache, *others: KVCache) -> KVCache:
    """`function(array, axis of the positions, *others' arrays)` for each stored array; the lengths stay."""

    def arrays(name: str, axis: int):
        if getattr(cache, name) is None:
            return None
        rest = (getattr(other, name) for other in others)
        return tuple(function(array, axis, *parts) for array, *parts in zip(getattr(cache, name), *rest))

    return replace(
        cache,
        keys=arrays("keys", 3 if cache.transposed else 2),
        values=arrays("values", 2),
        key_scales=arrays("key_scales", 2),
        value_scales=arrays("value_scales", 2),
    )
