"""Continuous batching: turns of many conversations over a fixed set of slots in one KV cache.

Every turn is submitted as the whole list of its conversation's tokens so far; what of it stands in a slot already is
not computed again. So an observation costs the prefill of its new tokens, a group's prompt is computed once and
copied, and a conversation that lost its slot while its tool was running is prefilled again, and counted. Slots are
filled as soon as they are free; nobody waits for the slowest::

    engine = Engine(config, slots=32, capacity=2048, stop_ids=(2,), seed=0)
    engine.use(params, version=0)
    engine.submit(Request("a", prompt_ids, limit=256, trajectory=7))
    while engine.busy:
        for turn in engine.run():           # one round: admissions, one chunk of prefill, a few tokens of decode
            ...                             # turn.key, turn.tokens, turn.logprobs, turn.stopped

Which conversation loses its slot: `release` gives slots back, and those are reused first, the longest unused first. If
there are none, a parked slot (its conversation's tool is running) is taken, the longest parked first.

Shapes are few: rows of a round and filled lengths are rounded up to bucket sizes, so that short contexts and thin
rounds cost less than full ones, and nothing is compiled once all sizes were seen (`warm_up` compiles them beforehand).

Randomness is keyed by (seed, trajectory, position), as in `sampler`, whose sampling function this uses.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import KVCache, Params, extend, init_cache, logits
from orchestra_jax.sampler.sampler import sample_tokens

MIN_SHARED_TOKENS = 16
"""Shorter common beginnings are computed again: copying them would not pay."""


PREFILL_ROWS = 8
"""Conversations prefilled by one call: one number, so that only lengths make shapes to compile."""


@dataclass(frozen=True)
class Request:
    """One turn to sample.

    Args:
        key: the conversation (anything hashable); its slot is kept for it between turns.
        tokens: the conversation so far, at least one token.
        limit: the most tokens of the turn, at least 1.
        trajectory: keys the randomness.
        temperature: 0 is greedy.
    """

    key: Any
    tokens: Sequence[int]
    limit: int
    trajectory: int
    temperature: float = 1.0


@dataclass(frozen=True)
class SampledTurn:
    """A finished turn. `stopped`: a stop token ended it, which is the last of `tokens`; else a limit did."""

    key: Any
    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    version: int
    """Of the weights that sampled it."""


@dataclass
class EngineStats:
    """What was done since the last `reset`; tokens are counts."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reprefilled_tokens: int = 0
    """Of the prefilled ones, those that had been in a slot that was taken away."""
    copied_tokens: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    """Decode steps times rows that were sampling."""
    evictions: int = 0
    busy_s: float = 0.0
    """Seconds in `run`, the host's part included."""
    device_s: float = 0.0
    """Seconds of `run` in which the host waited for the device."""

    def occupancy(self, slots: int) -> float:
        """Mean share of the slots that sampled in a decode step."""
        return self.slot_steps / max(1, self.decode_steps * slots)

    def metrics(self, slots: int) -> dict[str, float]:
        """The counts under their names in `metrics.jsonl`."""
        return {
            "sampler/slot_occupancy": self.occupancy(slots),
            "sampler/prefilled_tokens": self.prefilled_tokens,
            "sampler/reprefilled_tokens": self.reprefilled_tokens,
            "sampler/copied_tokens": self.copied_tokens,
            "time/sampler_s": self.busy_s,
        }


class _DeviceState(NamedTuple):
    cache: KVCache
    logits: jax.Array
    """[slots, vocab_size] float32, of the last token of each slot."""


@dataclass
class _Slot:
    """What the host knows of a slot."""

    tokens: list[int] = field(default_factory=list)
    """Whose keys and values it holds."""
    key: Hashable | None = None
    request: Request | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    touched: int = 0
    """The round in which it was last used."""

    @property
    def missing(self) -> int:
        """Tokens of the request that are not in the slot yet."""
        return 0 if self.request is None else len(self.request.tokens) + len(self.sampled) - len(self.tokens)


class _Place(NamedTuple):
    """The slot that a turn gets, and the slot whose first `length` tokens it takes over (itself, or one to copy)."""

    slot: int
    donor: int
    length: int


class Engine:
    """See the module's text.

    Args:
        config: the model.
        slots: conversations that sample at once.
        capacity: the most tokens of a conversation.
        stop_ids: token ids that end a turn.
        seed: of all sampling.
        dtype: of the KV cache.
        steps: tokens that a round decodes before the host looks at them.
        chunk: the most tokens of a conversation that one round prefills, so that long prompts do not hold up others.

    Raises:
        ValueError: there is no stop id, or a size is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        capacity: int,
        stop_ids: Sequence[int],
        seed: int,
        dtype: jnp.dtype = jnp.float32,
        steps: int = 16,
        chunk: int = 512,
    ) -> None:
        if not stop_ids:
            raise ValueError("the engine needs at least one stop id, or every turn runs to its limit")
        for name, value in (("slots", slots), ("capacity", capacity), ("steps", steps), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.config = config
        self.slots = slots
        self.capacity = capacity
        self.steps = steps
        self.chunk = min(chunk, capacity)
        self.prefill_rows = min(slots, PREFILL_ROWS)
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.key = jax.random.key(seed)
        self.stats = EngineStats()
        self._slots = [_Slot() for _ in range(slots)]
        self._queue: list[Request] = []
        self._under_way: set[Hashable] = set()
        self._evicted: dict[Hashable, int] = {}
        self._round = 0
        self._params: Params | None = None
        self._version = 0
        shape = (slots, config.vocab_size)
        self._state = _DeviceState(init_cache(config, slots, capacity, dtype), jnp.zeros(shape, jnp.float32))

    @property
    def busy(self) -> bool:
        """Whether a turn is queued or under way."""
        return bool(self._under_way)

    def use(self, params: Params, version: int) -> None:
        """Samples with these weights from now on; what the cache holds of other weights is forgotten.

        Raises:
            RuntimeError: turns are under way: half of their tokens would be of other weights.
        """
        if any(slot.request for slot in self._slots):
            raise RuntimeError("turns are under way: change the weights between turns")
        if params is not self._params:
            for slot in self._slots:
                slot.tokens = []
        self._params, self._version = params, version

    def reset(self) -> None:
        """Forgets all conversations and the statistics, so that what follows depends on nothing that was."""
        self._slots = [_Slot() for _ in self._slots]
        self._queue, self._under_way, self._evicted, self._round = [], set(), {}, 0
        self.stats = EngineStats()

    def submit(self, request: Request) -> None:
        """Queues a turn.

        Raises:
            ValueError: it has no tokens, its limit is below 1, it leaves no room to sample, or the conversation has a
                turn under way.
        """
        if not request.tokens:
            raise ValueError("a prompt is empty: the policy needs at least one token to start from")
        if request.limit < 1:
            raise ValueError(f"the limit of a turn must be at least 1 token, not {request.limit}")
        if len(request.tokens) >= self.capacity:
            raise ValueError(
                f"a conversation of {len(request.tokens)} tokens leaves no room in a slot of {self.capacity} "
                "(raise rollout.max_tokens or shorten the prompt)"
            )
        if request.key in self._under_way:
            raise ValueError(f"conversation {request.key!r} has a turn under way")
        self._under_way.add(request.key)
        self._queue.append(request)

    def release(self, key: Hashable) -> None:
        """The conversation is over: its slot may be reused at once."""
        self._evicted.pop(key, None)
        for slot in self._slots:
            if slot.key == key and slot.request is None:
                slot.key = None

    def cancel(self, key: Hashable) -> None:
        """Drops the conversation's turn, queued or under way, and releases it."""
        self._under_way.discard(key)
        self._queue = [request for request in self._queue if request.key != key]
        for slot in self._slots:
            if slot.key == key:
                slot.request = None
        self.release(key)

    def run(self) -> list[SampledTurn]:
        """One round; the turns that ended in it, in the order of their slots.

        Raises:
            RuntimeError: `use` was never called.
        """
        if self._params is None:
            raise RuntimeError("call use(params, version) first: there are no weights to sample with")
        start = time.perf_counter()
        self._round += 1
        self._admit()
        self._prefill()
        if self._queue:  # a group's first prompt may be complete now: the others take it over, its logits too
            self._admit()
        done = self._decode()
        self.stats.busy_s += time.perf_counter() - start
        return done

    def warm_up(self, params: Params) -> list[tuple[str, float]]:
        """Compiles every shape there can be, with nothing to do in it; what was compiled, and the seconds of each."""
        times: list[tuple[str, float]] = []

        def idle(rows: int) -> np.ndarray:
            """Slot (none), length, and limit or count of rows with nothing to do."""
            return np.stack([np.full(rows, self.slots, np.int32), *np.zeros((2, rows), np.int32)])

        def decode(rows: int, filled: int) -> _DeviceState:
            ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.int32)
            return self._sample(params, idle(rows), ones, zeros, filled)[0]

        def copy(rows: int, filled: int) -> _DeviceState:
            return _copy_slots(self._state, np.zeros((rows, 2), np.int32), filled=filled)

        def prefill(width: int, filled: int) -> _DeviceState:
            tokens = np.zeros((self.prefill_rows, width), np.int32)
            return _append(self.config, params, self._state, tokens, *idle(self.prefill_rows), filled=filled)

        for run, sizes in (
            (decode, _buckets(self.slots)),
            (copy, _buckets(self.slots)),
            (prefill, _widths(self.chunk)),
        ):
            for size, filled in itertools.product(sizes, _lengths(self.capacity)):
                if run is prefill and size > filled:
                    continue
                start = time.perf_counter()
                self._state = jax.block_until_ready(run(size, filled))
                times.append((f"{run.__name__} {size} of {filled}", time.perf_counter() - start))
        return times

    def _sample(self, params, table, temperatures, trajectories, filled):
        return _decode(
            self.config,
            params,
            self._state,
            *table,
            temperatures,
            self.key,
            trajectories.astype(np.uint32),
            filled=filled,
            steps=self.steps,
            stop_ids=self.stop_ids,
        )

    # A round's parts.

    def _admit(self) -> None:
        """Gives slots to queued turns, in their order; those that will share a beginning wait for the first of them."""
        slots = self._slots
        # Released slots first, then parked ones; the longest unused first.
        order = [index for index in range(self.slots) if slots[index].request is None]
        free = dict.fromkeys(sorted(order, key=lambda index: (slots[index].key is not None, slots[index].touched)))
        donors = {index: slot for index, slot in enumerate(slots) if slot.tokens}
        home = {slots[index].key: index for index in free if slots[index].key is not None}
        beginning = [slot.request.tokens for slot in slots if slot.request and slot.missing > 1]
        found: dict[tuple[int, ...], int] = {}
        waiting: list[Request] = []
        copies: list[tuple[int, int, int]] = []
        for request in self._queue:
            if not free:
                waiting.append(request)
                continue
            place = self._place(request, home.get(request.key), free, donors, found)
            if self._will_share(request, place.length, beginning):
                waiting.append(request)
                continue
            del free[place.slot]
            if place.donor != place.slot:
                copies.append((place.donor, place.slot, place.length))
                donors.pop(place.slot, None)  # it holds its new content only after this round's copies
                self.stats.copied_tokens += place.length
            home.pop(slots[place.slot].key, None)
            self._take_over(request, place)
            if slots[place.slot].missing > 1:
                beginning.append(request.tokens)
        self._queue = waiting
        self._copy(copies)

    def _place(
        self,
        request: Request,
        own: int | None,
        free: dict[int, None],
        donors: dict[int, _Slot],
        found: dict[tuple[int, ...], int],
    ) -> _Place:
        """Where a turn goes, and what it takes over.

        Args:
            request: the turn.
            own: the slot that was kept for its conversation.
            free: slots that can be taken, the best first.
            donors: slots whose content can be copied.
            found: donors found in this round, by the turn's tokens; entries are added.
        """
        if own is not None:
            tokens = self._slots[own].tokens
            if tokens and request.tokens[: len(tokens)] == tokens:
                return _Place(own, own, self._usable(own, len(tokens), request))
        prompt = tuple(request.tokens)
        donor = found.get(prompt)
        if donor not in donors:
            donor = max(donors, key=lambda i: _common(donors[i].tokens, request.tokens), default=None)
        longest = 0 if donor is None else _common(donors[donor].tokens, request.tokens)
        if donor is None or longest < MIN_SHARED_TOKENS:
            slot = next(iter(free)) if own is None else own
            return _Place(slot, slot, 0)
        found[prompt] = donor
        if donor == own or (own is None and donor in free and self._slots[donor].key is None):
            return _Place(donor, donor, self._usable(donor, longest, request))
        slot = next(iter(free)) if own is None else own
        return _Place(slot, donor, self._usable(donor, longest, request))

    def _take_over(self, request: Request, place: _Place) -> None:
        slot = self._slots[place.slot]
        if slot.key is not None and slot.key != request.key:
            self.stats.evictions += 1
            self._evicted[slot.key] = len(slot.tokens)
        had = min(self._evicted.pop(request.key, 0), len(request.tokens))
        self.stats.reprefilled_tokens += max(0, had - place.length)
        slot.tokens = list(request.tokens[: place.length])
        slot.key, slot.request, slot.touched = request.key, request, self._round
        slot.sampled, slot.logprobs = [], []

    def _usable(self, index: int, length: int, request: Request) -> int:
        """How much of a slot's beginning serves: all, if its logits are those of the request's last token."""
        if length == len(request.tokens) == len(self._slots[index].tokens):
            return length
        return min(length, len(request.tokens) - 1)

    def _will_share(self, request: Request, length: int, beginning: list[Sequence[int]]) -> bool:
        """Whether a beginning that another slot is about to compute is worth waiting for."""
        longest = max((_common(tokens, request.tokens) for tokens in beginning), default=0)
        return longest >= length + MIN_SHARED_TOKENS

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        if not copies:
            return
        rows = _bucket_of(len(copies), self.slots)
        table = np.zeros((rows, 2), np.int32)  # what is left over copies slot 0 into itself
        table[: len(copies)] = [copy[:2] for copy in copies]
        filled = _length_of(max(length for _, _, length in copies), self.capacity)
        self._state = _copy_slots(self._state, table, filled=filled)

    def _prefill(self) -> None:
        """One chunk of what is missing, for all slots that miss something: a few rows at a time, of like lengths."""
        missing = {i: min(slot.missing, self.chunk) for i, slot in enumerate(self._slots) if slot.missing > 0}
        order = sorted(missing, key=lambda index: (-missing[index], index))
        for first in range(0, len(order), self.prefill_rows):
            self._prefill_rows(order[first : first + self.prefill_rows], missing)

    def _prefill_rows(self, indices: list[int], missing: dict[int, int]) -> None:
        width = _width_of(missing[indices[0]], self.chunk)
        tokens = np.zeros((self.prefill_rows, width), np.int32)
        table = np.zeros((3, self.prefill_rows), np.int32)  # slot, length, count
        table[0] = self.slots
        for row, index in zip(self._rows(indices, self.prefill_rows), indices):
            slot, count = self._slots[index], missing[index]
            assert slot.request is not None
            length = len(slot.tokens)
            new = list(slot.request.tokens[length : length + count])
            tokens[row, :count] = new
            table[:, row] = index, length, count
            slot.tokens += new
            slot.touched = self._round
            self.stats.prefilled_tokens += count
        filled = _length_of(max(int((table[1] + table[2]).max()), width), self.capacity)
        self._state = _append(self.config, self._params, self._state, tokens, *table, filled=filled)

    def _rows(self, indices: list[int], rows: int) -> Sequence[int]:
        """The rows of a round for these slots: a round of all slots is in their order, and works in place."""
        return indices if rows == self.slots else range(len(indices))

    def _decode(self) -> list[SampledTurn]:
        """A few tokens for every slot whose prompt is complete."""
        indices = [i for i, slot in enumerate(self._slots) if slot.request and not slot.missing]
        if not indices:
            return []
        rows = _bucket_of(len(indices), self.slots)
        table = np.zeros((3, rows), np.int32)  # slot, length, limit
        table[0] = self.slots
        temperatures, trajectories = np.ones(rows, np.float32), np.zeros(rows, np.int64)
        placed = list(zip(self._rows(indices, rows), indices))
        for row, index in placed:
            slot = self._slots[index]
            assert slot.request is not None
            room = self.capacity - len(slot.tokens)
            table[:, row] = index, len(slot.tokens), min(slot.request.limit - len(slot.sampled), room)
            temperatures[row], trajectories[row] = slot.request.temperature, slot.request.trajectory
        filled = _length_of(min(int(table[1].max()) + self.steps, self.capacity), self.capacity)
        self._state, *outputs = self._sample(self._params, table, temperatures, trajectories, filled)
        waited = time.perf_counter()
        tokens, logprobs, counts, stopped = map(np.asarray, jax.device_get(outputs))
        self.stats.device_s += time.perf_counter() - waited
        self.stats.decode_steps += int(counts.max())
        self.stats.slot_steps += int(counts.sum())
        self.stats.sampled_tokens += int(counts.sum())
        done = []
        for row, index in placed:
            count = int(counts[row])
            self._take(self._slots[index], tokens[row, :count].tolist(), logprobs[row, :count].tolist())
            if turn := self._ended(self._slots[index], bool(stopped[row])):
                done.append(turn)
        return done

    def _take(self, slot: _Slot, tokens: list[int], logprobs: list[float]) -> None:
        slot.tokens += tokens
        slot.sampled += tokens
        slot.logprobs += logprobs
        slot.touched = self._round

    def _ended(self, slot: _Slot, stopped: bool) -> SampledTurn | None:
        request = slot.request
        assert request is not None
        if not (stopped or len(slot.sampled) >= request.limit or len(slot.tokens) >= self.capacity):
            return None
        slot.request = None
        self._under_way.discard(request.key)
        return SampledTurn(request.key, slot.sampled, slot.logprobs, stopped, self._version)


def _buckets(most: int) -> list[int]:
    """`most`, a quarter of it, a sixteenth, ... and 1."""
    sizes = [most]
    while sizes[0] > 1:
        sizes.insert(0, max(1, sizes[0] // 4))
    return sizes


def _bucket_of(count: int, most: int) -> int:
    return next(size for size in _buckets(most) if size >= count)


def _lengths(capacity: int) -> list[int]:
    """256, 512, 1024, ... and `capacity`."""
    sizes = [256]
    while sizes[-1] * 2 < capacity:
        sizes.append(sizes[-1] * 2)
    return [capacity] if capacity <= 256 else [*sizes, capacity]


def _length_of(length: int, capacity: int) -> int:
    return next(size for size in _lengths(capacity) if size >= length)


def _widths(chunk: int) -> list[int]:
    """1, 16, 32, 64, ... and `chunk`."""
    sizes = [1, 16]
    while sizes[-1] * 2 < chunk:
        sizes.append(sizes[-1] * 2)
    return [size for size in sizes if size < chunk] + [chunk]


def _width_of(count: int, chunk: int) -> int:
    return next(size for size in _widths(chunk) if size >= count)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common beginning of two lists, by halving."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


# --------------------------------------------------------------------------------------------------------------
# on the device
# --------------------------------------------------------------------------------------------------------------


def _in_place(state: _DeviceState, slots: jax.Array, filled: int) -> bool:
    """Whether a round is of all slots, in their order, and of all positions: nothing need be taken out."""
    return slots.shape[0] == state.logits.shape[0] and filled == state.cache.keys[0].shape[2]


def _view(state: _DeviceState, slots: jax.Array, lengths: jax.Array, filled: int) -> tuple[KVCache, jax.Array]:
    """The first `filled` positions of some slots as a cache of its own, and their logits.

    A slot out of range gives any other.
    """
    if _in_place(state, slots, filled):
        return state.cache._replace(lengths=lengths), state.logits

    def rows(array: jax.Array) -> jax.Array:
        return array[:, :, :filled][slots] if filled < array.shape[2] else array[slots]

    cache = KVCache(tuple(map(rows, state.cache.keys)), tuple(map(rows, state.cache.values)), lengths)
    return cache, state.logits[slots]


def _write_back(
    state: _DeviceState, view: KVCache, row_logits: jax.Array, slots: jax.Array, start: jax.Array, width: int
) -> _DeviceState:
    """Enters up to `width` new positions from `start` of each row of a view, and its logits, into its slot."""
    filled = view.keys[0].shape[2]
    if _in_place(state, slots, filled):
        return _DeviceState(view, row_logits)
    offsets = start[:, None] + jnp.arange(width)[None, :]
    targets = jnp.where(offsets < view.lengths[:, None], offsets, state.cache.keys[0].shape[2])  # dropped
    sources = jnp.minimum(offsets, filled - 1)

    def write(whole: jax.Array, part: jax.Array) -> jax.Array:
        new = jnp.take_along_axis(part, sources[:, None, :, None], axis=2)
        return whole.at[slots[:, None], :, targets].set(new.swapaxes(1, 2), mode="drop")

    keys = tuple(map(write, state.cache.keys, view.keys))
    values = tuple(map(write, state.cache.values, view.values))
    lengths = state.cache.lengths.at[slots].set(view.lengths, mode="drop")
    return _DeviceState(KVCache(keys, values, lengths), state.logits.at[slots].set(row_logits, mode="drop"))


@partial(jax.jit, static_argnames=("filled",), donate_argnames=("state",))
def _copy_slots(state: _DeviceState, table: jax.Array, *, filled: int) -> _DeviceState:
    """The first `filled` positions of slots into others, and their logits, one copy [source, target] after the other.

    What is beyond the wanted length is overwritten later, and so are the logits if more tokens follow. (Slices in a
    loop are plain memory copies; as one scatter they took several times as long as the decoding on CPU.)
    """

    def copy(index: jax.Array, state: _DeviceState) -> _DeviceState:
        source, target = table[index, 0], table[index, 1]

        def row(array: jax.Array) -> jax.Array:
            size = (1, array.shape[1], filled, array.shape[3]) if array.ndim == 4 else (1, *array.shape[1:])
            start = (0,) * (array.ndim - 1)
            return jax.lax.dynamic_update_slice(
                array, jax.lax.dynamic_slice(array, (source, *start), size), (target, *start)
            )

        keys, values = tuple(map(row, state.cache.keys)), tuple(map(row, state.cache.values))
        return _DeviceState(state.cache._replace(keys=keys, values=values), row(state.logits))

    return jax.lax.fori_loop(0, table.shape[0], copy, state)


@partial(jax.jit, static_argnames=("config", "filled"), donate_argnames=("state",))
def _append(config: ModelConfig, params: Params, state, tokens, slots, lengths, counts, *, filled: int) -> _DeviceState:
    """New tokens [rows, width] (counts[r] of them) behind the `lengths` that the slots hold."""
    view, row_logits = _view(state, slots, lengths, filled)
    hidden, view = extend(config, params, view, tokens, counts)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    row_logits = jnp.where((counts > 0)[:, None], logits(config, params, last), row_logits)
    return _write_back(state, view, row_logits, slots, lengths, tokens.shape[1])


@partial(jax.jit, static_argnames=("config", "filled", "steps", "stop_ids"), donate_argnames=("state",))
def _decode(
    config: ModelConfig,
    params: Params,
    state: _DeviceState,
    slots: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    temperatures: jax.Array,
    key: jax.Array,
    trajectories: jax.Array,
    *,
    filled: int,
    steps: int,
    stop_ids: tuple[int, ...],
):
    """Up to `steps` tokens a row; a row ends at a stop id or its limit: state, tokens, logprobs, counts, stopped."""
    rows = slots.shape[0]
    stops = jnp.asarray(stop_ids, jnp.int32)

    def keep_going(carry) -> jax.Array:
        return (carry[0] < steps) & jnp.any(carry[3])

    def one_token(carry):
        step, view, row_logits, active, stopped, tokens, logprobs, counts = carry
        new, new_logprobs = sample_tokens(row_logits, temperatures, key, trajectories, view.lengths)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, jnp.where(active, new, 0)[:, None], step, 1)
        logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, jnp.where(active, new_logprobs, 0.0)[:, None], step, 1)
        counts = counts + active
        hidden, view = extend(config, params, view, new[:, None], active.astype(jnp.int32))
        row_logits = jnp.where(active[:, None], logits(config, params, hidden[:, 0]), row_logits)
        stops_now = active & jnp.any(new[:, None] == stops, axis=1)
        return (
            step + 1, view, row_logits, active & ~stops_now & (counts < limits), stopped | stops_now,
            tokens, logprobs, counts,
        )  # fmt: skip

    start = (
        jnp.int32(0),
        *_view(state, slots, lengths, filled),
        limits > 0,
        jnp.zeros((rows,), bool),
        jnp.zeros((rows, steps), jnp.int32),
        jnp.zeros((rows, steps), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
    )
    _, view, row_logits, _, stopped, tokens, logprobs, counts = jax.lax.while_loop(keep_going, one_token, start)
    state = _write_back(state, view, row_logits, slots, lengths, steps)
    return state, tokens, logprobs, counts, stopped
