"""Multi-turn sampling in JAX over a KV cache that stays between turns, all rows in lock-step.

The simple form of what `engine` does with continuous batching: rollouts use the engine, tests and benchmarks compare it
with this one, and both draw their tokens by `sample_tokens`.

A batch of rows goes through `start` (each distinct prompt is prefilled once and its cache shared by the rows of its
group), then `generate` and `append` in turn: generate until every row has stopped, append the observations (prefill of
the new tokens only), generate again. The logits of each row's last token are kept beside the cache, so that the first
token of a turn is sampled, and scored, like any other.

Randomness is keyed by (seed, trajectory, position): what a row samples does not depend on its neighbours, on its place
in the batch or on how its turns were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import KVCache, Params, extend, init_cache, logits
from orchestra_jax.sampler.sampling import sample_tokens


class SamplerState(NamedTuple):
    """What stays on the device between turns."""

    cache: KVCache
    logits: jax.Array
    """[rows, vocab_size] float32, of the last token of each row."""


class Generation(NamedTuple):
    """One turn of every row, on the host."""

    tokens: np.ndarray
    """[rows, max_new_tokens] int32, row r valid up to counts[r], its stop token included."""
    logprobs: np.ndarray
    """[rows, max_new_tokens] float32, of the distribution that was sampled from (temperature applied)."""
    counts: np.ndarray
    """[rows] int32."""
    stopped: np.ndarray
    """[rows] bool: ended by a stop token. False with counts > 0: the limit cut the turn."""


def bucket(length: int, *, smallest: int = 16) -> int:
    """The padded length that stands for `length`: powers of two and the halves between (16, 24, 32, 48, 64, ...)."""
    size = smallest
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


@partial(jax.jit, static_argnames=("config", "capacity", "dtype"))
def _prefill(config: ModelConfig, params: Params, tokens, counts, row_prompt, *, capacity: int, dtype) -> SamplerState:
    """Prefills each distinct prompt once, then hands its cache to every row of its group."""
    hidden, cache = extend(config, params, init_cache(config, tokens.shape[0], capacity, dtype), tokens, counts)
    last = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
    shared = jax.tree.map(lambda x: x[row_prompt], cache)
    return SamplerState(shared, logits(config, params, last)[row_prompt])


@partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def _append(config: ModelConfig, params: Params, state: SamplerState, tokens, counts) -> SamplerState:
    hidden, cache = extend(config, params, state.cache, tokens, counts)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return SamplerState(cache, jnp.where((counts > 0)[:, None], logits(config, params, last), state.logits))


@partial(jax.jit, static_argnames=("config", "max_new_tokens", "stop_ids"), donate_argnames=("state",))
def _generate(
    config: ModelConfig,
    params: Params,
    state: SamplerState,
    limits: jax.Array,
    temperatures: jax.Array,
    key: jax.Array,
    trajectories: jax.Array,
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
):
    rows, capacity = limits.shape[0], state.cache.capacity
    stops = jnp.asarray(stop_ids, jnp.int32)

    def keep_going(carry) -> jax.Array:
        step, active = carry[0], carry[2]
        return (step < max_new_tokens) & jnp.any(active)

    def one_token(carry):
        step, state, active, stopped, tokens, logprobs, counts = carry
        new, new_logprobs = sample_tokens(state.logits, temperatures, key, trajectories, state.cache.lengths)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, jnp.where(active, new, 0)[:, None], step, 1)
        logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, jnp.where(active, new_logprobs, 0.0)[:, None], step, 1)
        counts = counts + active
        hidden, cache = extend(config, params, state.cache, new[:, None], active.astype(jnp.int32))
        row_logits = jnp.where(active[:, None], logits(config, params, hidden[:, 0]), state.logits)
        stops_now = active & jnp.any(new[:, None] == stops, axis=1)
        stopped = stopped | stops_now
        active = active & ~stops_now & (counts < limits) & (cache.lengths < capacity)
        return step + 1, SamplerState(cache, row_logits), active, stopped, tokens, logprobs, counts

    active = (limits > 0) & (state.cache.lengths < capacity)
    start = (
        jnp.int32(0),
        state,
        active,
        jnp.zeros((rows,), bool),
        jnp.zeros((rows, max_new_tokens), jnp.int32),
        jnp.zeros((rows, max_new_tokens), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
    )
    _, state, _, stopped, tokens, logprobs, counts = jax.lax.while_loop(keep_going, one_token, start)
    return state, tokens, logprobs, counts, stopped


class Sampler:
    """Fixed shapes for one run: a number of rows, a capacity in tokens, a longest turn.

    Nothing is compiled after the first rollouts: prompts, and observations, are padded to a few bucket lengths; limits,
    temperatures and trajectory numbers are arrays.

    Args:
      config: the model.
      rows: sequences sampled at once.
      capacity: the most tokens that a row can hold, prompt and observations included.
      max_new_tokens: the most tokens of one turn.
      stop_ids: token ids that end a turn.
      seed: of all sampling.
      dtype: of the KV cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seed: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> None:
        if not stop_ids:
            raise ValueError("the sampler needs at least one stop id, or every turn runs to its limit")
        self.config = config
        self.rows = rows
        self.capacity = capacity
        self.max_new_tokens = max_new_tokens
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.key = jax.random.key(seed)
        self.dtype = jnp.dtype(dtype)

    def start(self, params: Params, prompts: Sequence[Sequence[int]], num_prompt_slots: int | None = None):
        """A new batch: one prompt a row, equal prompts prefilled once.

        Args:
          params: the weights to sample with.
          prompts: one list of ids a row, exactly `rows` of them.
          num_prompt_slots: how many distinct prompts to prepare for, a fixed number so that the shape is the same
            every time; default: as many as there are.

        Returns:
          The `SamplerState` to go on with.

        Raises:
          ValueError: the number of prompts is not `rows`, a prompt is empty, or leaves no room to answer.
        """
        if len(prompts) != self.rows:
            raise ValueError(f"the sampler has {self.rows} rows, got {len(prompts)} prompts")
        index: dict[tuple[int, ...], int] = {}
        row_prompt = np.array([index.setdefault(tuple(p), len(index)) for p in prompts], np.int32)
        distinct = list(index)
        if not all(distinct):
            raise ValueError("a prompt is empty: the policy needs at least one token to start from")
        longest = max(map(len, distinct))
        if longest >= self.capacity:
            raise ValueError(
                f"a prompt has {longest} tokens, which leaves no room in a row of {self.capacity} "
                "(raise rollout.max_tokens or shorten the prompt)"
            )
        slots = max(num_prompt_slots or 0, len(distinct))
        tokens, counts = _pad(distinct + [[0]] * (slots - len(distinct)), min(bucket(longest), self.capacity))
        return _prefill(self.config, params, tokens, counts, row_prompt, capacity=self.capacity, dtype=self.dtype)

    def generate(
        self,
        params: Params,
        state: SamplerState,
        limits: np.ndarray,
        temperatures: np.ndarray,
        trajectories: np.ndarray,
    ) -> tuple[Generation, SamplerState]:
        """One turn of each row: until a stop id, the row's limit or the end of its capacity.

        Args:
          params: the weights to sample with.
          state: is consumed (its buffers are donated).
          limits: [rows] int, the most tokens of this turn; 0 leaves a row alone.
          temperatures: [rows] float, 0 is greedy.
          trajectories: [rows] int, the number that keys each row's randomness.
        """
        state, *outputs = _generate(
            self.config,
            params,
            state,
            np.minimum(limits, self.max_new_tokens).astype(np.int32),
            np.asarray(temperatures, np.float32),
            self.key,
            np.asarray(trajectories, np.uint32),
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
        )
        return Generation(*map(np.asarray, jax.device_get(outputs))), state

    def append(self, params: Params, state: SamplerState, observations: Sequence[Sequence[int]]) -> SamplerState:
        """Appends each row's observation (possibly none) by prefill of the new tokens only.

        Raises:
          ValueError: there is not one observation a row. The caller keeps within the capacity.
        """
        if len(observations) != self.rows:
            raise ValueError(f"the sampler has {self.rows} rows, got {len(observations)} observations")
        longest = max(map(len, observations))
        if longest == 0:
            return state
        tokens, counts = _pad(observations, bucket(longest))
        return _append(self.config, params, state, tokens, counts)


def _pad(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one int32 array [rows, width] and their lengths [rows]; the padding is never read."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.array([len(ids) for ids in rows], np.int32)
