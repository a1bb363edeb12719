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

The device never waits for Python: `run` gives it the next round before it reads the last one's tokens. So the host sees
a turn's end one round late, and the device itself keeps lengths and limits and stops at stop ids. A round is over early
when an eighth of its rows has ended.

Which conversation loses its slot: `release` gives slots back, and those are reused first, the longest unused first. If
there are none, a parked slot (its conversation's tool is running) is taken, the longest parked first.

Shapes are few: rows of a round and filled lengths are rounded up to bucket sizes, so that short contexts and thin
rounds cost less than full ones, and nothing is compiled once all sizes were seen (`warm_up` compiles them beforehand).

Randomness is keyed by (seed, trajectory, position): see `sampling`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params
from orchestra_jax.sampler.device import Rows, Sampled, append_tokens, copy_slots, init_state, sample_round
from orchestra_jax.sampler.grammar import TokenGrammar
from orchestra_jax.sampler.idle import DeviceClock
from orchestra_jax.sampler.sampling import Restriction
from orchestra_jax.sampler.stops import StopMatcher
from orchestra_jax.sampler.weights import adopt

log = logging.getLogger(__name__)

MIN_SHARED_TOKENS = 16
"""Shorter common beginnings are computed again: copying them would not pay."""

PREFILL_ROWS = 8
"""Conversations prefilled by one call at the most."""

PREFILL_TOKENS = {"cpu": 256}
"""Tokens computed by one call of prefill, padding included, where one conversation does not need more: as few as keep
the platform's multipliers busy, for a call's rows are seldom all wanted. Every length has one number of rows, so that
only lengths make shapes to compile."""

DEFAULT_PREFILL_TOKENS = 1024

MAX_STOP_IDS = 8
"""Stop ids of one turn, the engine's included."""


@dataclass(frozen=True)
class Request:
    """One turn to sample.

    Args:
        key: the conversation (anything hashable); its slot is kept for it between turns.
        tokens: the conversation so far, at least one token.
        limit: the most tokens of the turn, at least 1.
        trajectory: keys the randomness.
        temperature: 0 is greedy.
        top_p: samples from the fewest likeliest tokens that hold this probability; 1: from all.
        top_k: samples from this many of the likeliest tokens; 0: from all.
        stop_ids: token ids that end the turn, beside the engine's own.
        stop_texts: strings that end it, wherever tokens divide them; the turn ends with the token that completes one.
        grammar: what may follow what; one object a turn. Such a turn takes a round for every token.

    Training wants the last five left as they are: the trainer's logprobs are of the whole distribution, those of a
    narrowed one are renormalised over what was allowed.
    """

    key: Any
    tokens: Sequence[int]
    limit: int
    trajectory: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    grammar: TokenGrammar | None = None


@dataclass(frozen=True)
class SampledTurn:
    """A finished turn."""

    key: Any
    tokens: list[int]
    logprobs: list[float]
    """Of the distribution that was sampled from: temperature applied, renormalised if it was narrowed."""
    versions: list[int]
    """Of the weights that sampled each token."""
    stopped: bool
    """A stop id or text ended it (an id is the last of `tokens`); else a limit did."""
    stop_text: str | None = None
    """The stop text that ended it."""
    cached_tokens: int = 0
    """How many of the request's tokens stood in a slot already."""
    error: str | None = None
    """A fault of this turn alone (its grammar's, say) ended it; the tokens are those before."""


@dataclass
class EngineStats:
    """What was done since the last `reset`; tokens are counts."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reprefilled_tokens: int = 0
    """Of the prefilled ones, those that had been in a slot that was taken away."""
    padded_tokens: int = 0
    """Computed by prefill beside those that were wanted."""
    copied_tokens: int = 0
    rounds: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    """Decode steps times rows that were sampling."""
    row_steps: int = 0
    """Decode steps times rows that were computed."""
    evictions: int = 0
    busy_s: float = 0.0
    """Seconds in `run`, waiting for the device included."""

    def occupancy(self, slots: int) -> float:
        """Mean share of the slots that sampled in a decode step."""
        return self.slot_steps / max(1, self.decode_steps * slots)


@dataclass
class _Slot:
    """What the host knows of a slot."""

    tokens: list[int] = field(default_factory=list)
    """Whose keys and values it holds."""
    key: Hashable | None = None
    request: Request | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stops: StopMatcher | None = None
    cached: int = 0
    """Tokens of the request that were there already."""
    fresh: bool = True
    """The device does not know the turn's length and limit yet."""
    ahead: int = 0
    """The most tokens that rounds under way can add to what the host knows."""
    exact: bool = False
    """The logits that the device has are those of the last of `tokens`, once no round is under way."""
    touched: int = 0
    """The round in which it was last used."""

    @property
    def missing(self) -> int:
        """Tokens of the conversation that are not in the slot yet."""
        return 0 if self.request is None else len(self.request.tokens) + len(self.sampled) - len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that the turn may still sample for all that the host knows, those of rounds under way included."""
        assert self.request is not None
        return self.request.limit - len(self.sampled)

    def begin(self, request: Request, tokens: list[int], stops: StopMatcher | None, exact: bool) -> None:
        """A new turn, of which `tokens` are here already."""
        self.key, self.request, self.tokens, self.cached = request.key, request, tokens, len(tokens)
        self.sampled, self.logprobs, self.versions, self.stops = [], [], [], stops
        self.fresh, self.ahead, self.exact = True, 0, exact

    def forget(self) -> None:
        """Nothing of its content counts any more."""
        self.tokens, self.fresh, self.ahead, self.exact = [], True, 0, False


class _Round(NamedTuple):
    """A round that the device has been given and whose tokens the host has not read."""

    sampled: Sampled
    placed: list[tuple[int, int, Request]]
    """Row, slot and turn."""
    steps: int
    rows: int
    version: int


class _Place(NamedTuple):
    """The slot that a turn gets, and the slot whose first `length` tokens it takes over (itself, or one to copy)."""

    slot: int
    donor: int
    length: int


class Engine:
    """See the module's text. One thread at a time may use it.

    Args:
        config: the model.
        slots: conversations that sample at once.
        capacity: the most tokens of a conversation.
        stop_ids: token ids that end every turn.
        seed: of all sampling.
        dtype: of the KV cache; int8 stores it quantised, at a quarter of float32's size.
        weights_dtype: to sample with; None: as the weights are that `use` is given.
        steps: the most tokens of a row that a round decodes before the host looks at them.
        chunk: the most tokens of a conversation that one round prefills, so that long prompts do not hold up others.
        lookahead: rounds that the device has been given before the host reads the oldest one's tokens.
        token_bytes: of a token id (`Tokenizer.token_bytes`); turns with stop texts need it.
        direct: whether the platform's attention kernel reads the cache; default: on TPU and GPU.

    Raises:
        ValueError: there is no stop id or too many, or a size is below 1.
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
        weights_dtype: Any = None,
        steps: int = 16,
        chunk: int = 512,
        lookahead: int = 1,
        token_bytes: Callable[[int], bytes] | None = None,
        direct: bool | None = None,
    ) -> None:
        if not 1 <= len(stop_ids) <= MAX_STOP_IDS:
            raise ValueError(
                f"the engine needs 1 to {MAX_STOP_IDS} stop ids, not {len(stop_ids)}: without one, every turn runs to "
                "its limit"
            )
        for name, value in (("slots", slots), ("capacity", capacity), ("steps", steps), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.config = config
        self.slots = slots
        self.capacity = capacity
        self.steps = steps
        self.chunk = min(chunk, capacity)
        self.prefill_tokens = PREFILL_TOKENS.get(jax.default_backend(), DEFAULT_PREFILL_TOKENS)
        self.lookahead = lookahead
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.key = jax.random.key(seed)
        self.stats = EngineStats()
        self.direct = jax.default_backend() != "cpu" if direct is None else direct
        self._weights_dtype = weights_dtype
        self._token_bytes = token_bytes
        self._clock = DeviceClock()
        self._given_at: float | None = None
        self._work_since = 0.0
        self._slots = [_Slot() for _ in range(slots)]
        self._queue: list[Request] = []
        self._under_way: set[Hashable] = set()
        self._evicted: dict[Hashable, int] = {}
        self._rounds: deque[_Round] = deque()
        self._finished: list[SampledTurn] = []
        self._round = 0
        self._params: Params | None = None
        self._weights: Params | None = None
        self._version = 0
        self._state = init_state(config, slots, capacity, dtype, False if self.direct else None)

    @property
    def busy(self) -> bool:
        """Whether a turn is queued or under way, or has ended and was not handed out yet."""
        return bool(self._under_way or self._finished)

    def use(self, params: Params, version: int) -> None:
        """Samples with these weights from now on; what the cache holds of other weights is forgotten.

        Turns under way go on with the new weights: their context is prefilled anew, and each token is stamped with the
        version that sampled it. On CPU the weights are copied (`weights.adopt`), elsewhere shared if they have the
        right dtype.
        """
        while self._rounds:
            self._finished += self._collect()
        if params is not self._params:
            self._weights = None  # the old ones go before the new ones come
            self._weights = adopt(params, dtype=self._weights_dtype)
            for slot in self._slots:
                slot.forget()
        self._params, self._version = params, version

    def reset(self) -> None:
        """Forgets all conversations and the statistics, so that what follows depends on nothing that was."""
        self._slots = [_Slot() for _ in self._slots]
        self._queue, self._under_way, self._evicted, self._round = [], set(), {}, 0
        self._rounds.clear()
        self._finished = []
        self.stats = EngineStats()
        self._clock.reset()

    def submit(self, request: Request) -> None:
        """Queues a turn.

        Raises:
            ValueError: it has no tokens, its limit is below 1, it leaves no room to sample, a setting is out of its
                range, or the conversation has a turn under way.
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
        if not 0 < request.top_p <= 1 or request.top_k < 0 or request.temperature < 0:
            raise ValueError("top_p must be in (0, 1], top_k and temperature must not be negative")
        if len(request.stop_ids) + len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"a turn may have {MAX_STOP_IDS - len(self.stop_ids)} stop ids of its own")
        if request.stop_texts and self._token_bytes is None:
            raise ValueError("stop texts need an engine with token_bytes")
        if not all(request.stop_texts):
            raise ValueError("stop texts must not be empty")
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.config.vocab_size:
            raise ValueError(f"token ids must be from 0 to {self.config.vocab_size - 1}, the model's vocabulary")
        if not 0 <= request.trajectory < 1 << 32:
            raise ValueError(f"trajectory must be from 0 to 2**32 - 1, not {request.trajectory}")
        if request.key in self._under_way:
            raise ValueError(f"conversation {request.key!r} has a turn under way")
        if not self._under_way:
            self._work_since = time.perf_counter()
        self._under_way.add(request.key)
        self._queue.append(request)

    def release(self, key: Hashable) -> None:
        """The conversation is over: its slot may be reused at once."""
        self._evicted.pop(key, None)
        for slot in self._slots:
            if slot.key == key and slot.request is None:
                slot.key = None

    def cancel(self, key: Hashable) -> None:
        """Drops the conversation's turn, queued or under way, and releases it; one that is not there is no error."""
        self._under_way.discard(key)
        self._queue = [request for request in self._queue if request.key != key]
        self._finished = [turn for turn in self._finished if turn.key != key]
        for slot in self._slots:
            if slot.key == key and slot.request is not None:
                # Rounds under way go on sampling for it, and nobody reads that.
                slot.request, slot.exact, slot.ahead = None, False, 0
        self.release(key)

    def partial(self, key: Hashable) -> list[int]:
        """The tokens so far of the conversation's turn, if it is under way."""
        return next((list(s.sampled) for s in self._slots if s.key == key and s.request is not None), [])

    def run(self) -> list[SampledTurn]:
        """One round: gives the device its next work and reads what an earlier round sampled.

        Returns:
            The turns that ended, in the order of their slots; often none.

        Raises:
            RuntimeError: `use` was never called.
        """
        if self._weights is None:
            raise RuntimeError("call use(params, version) first: there are no weights to sample with")
        start = time.perf_counter()
        self._given_at = None
        self._round += 1
        self._admit()
        self._prefill()
        if self._queue:  # a group's first prompt may be complete now: the others take it over, its logits too
            self._admit()
        given = self._decode()
        done, self._finished = self._finished, []
        if self._rounds and (not given or len(self._rounds) > self.lookahead):
            done += self._collect()
        self.stats.busy_s += time.perf_counter() - start
        return done

    def metrics(self) -> dict[str, float]:
        """What was done since the last `reset`, under its names in `metrics.jsonl`."""
        self._clock.settle()
        stats = self.stats
        return {
            "sampler/slot_occupancy": stats.occupancy(self.slots),
            "sampler/row_use": stats.slot_steps / max(1, stats.row_steps),
            "sampler/device_idle_share": self._clock.idle_share,
            "sampler/prefilled_tokens": stats.prefilled_tokens,
            "sampler/padded_tokens": stats.padded_tokens,
            "sampler/reprefilled_tokens": stats.reprefilled_tokens,
            "sampler/copied_tokens": stats.copied_tokens,
            "sampler/evictions": stats.evictions,
            "time/sampler_s": stats.busy_s,
        }

    def warm_up(self) -> list[tuple[str, float]]:
        """Compiles every shape there can be of turns without restrictions, with nothing to do in it.

        Returns:
            What was compiled, and the seconds of each.

        Raises:
            RuntimeError: `use` was never called.
        """
        if self._weights is None:
            raise RuntimeError("call use(params, version) first: there are no weights to sample with")
        jobs: list[tuple[str, Callable[[], Any]]] = []
        for filled in _lengths(self.capacity):
            jobs.append((f"copy of {filled}", partial(self._copied, [], filled)))
        for width, filled in itertools.product(_widths(self.chunk), self._prefill_lengths):
            if width <= filled:
                tokens, table = self._no_tokens(width)
                jobs.append(
                    (f"prefill {len(tokens)} x {width} of {filled}", partial(self._append, tokens, table, filled))
                )
        for size, filled in itertools.product(_buckets(self.slots), self._decode_lengths):
            sample = partial(self._sample, self._no_rows(size), None, filled, self.steps)
            jobs.append((f"decode {size} of {filled}", sample))
        times = []
        for name, job in jobs:
            start = time.perf_counter()
            self._state = jax.block_until_ready(job())[0]
            times.append((name, time.perf_counter() - start))
        return times

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
            if tokens and list(request.tokens[: len(tokens)]) == tokens:
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
        stops = None
        if request.stop_texts:
            assert self._token_bytes is not None
            stops = StopMatcher(request.stop_texts, self._token_bytes)
        # Taken over whole, its last token's logits come along; else none count until the rest is prefilled.
        whole = place.length == len(request.tokens)
        slot.begin(request, list(request.tokens[: place.length]), stops, exact=whole)
        slot.touched = self._round

    def _usable(self, index: int, length: int, request: Request) -> int:
        """How much of a slot's beginning serves: all, if its logits are those of the request's last token."""
        slot = self._slots[index]
        if slot.exact and not slot.ahead and length == len(request.tokens) == len(slot.tokens):
            return length
        return min(length, len(request.tokens) - 1)

    def _will_share(self, request: Request, length: int, beginning: list[Sequence[int]]) -> bool:
        """Whether a beginning that another slot is about to compute is worth waiting for."""
        longest = max((_common(tokens, request.tokens) for tokens in beginning), default=0)
        return longest >= length + MIN_SHARED_TOKENS

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        if not copies:
            return
        filled = _size_of(max(length for _, _, length in copies), _lengths(self.capacity))
        self._give()
        self._state, handle = self._copied([copy[:2] for copy in copies], filled)
        self._given(handle)

    @property
    def _decode_lengths(self) -> list[int]:
        """The filled lengths of decode's shapes; a kernel reads what is filled, whatever the shape."""
        return [self.capacity] if self.direct else _lengths(self.capacity)

    @property
    def _prefill_lengths(self) -> list[int]:
        """The same of prefill, where attention is a smaller part: every second one."""
        return [self.capacity] if self.direct else _lengths(self.capacity)[::-2][::-1]

    def _copied(self, copies: list[tuple[int, int]], filled: int):
        table = np.zeros((self.slots, 2), np.int32)
        table[: len(copies)] = np.reshape(copies, (-1, 2))
        return copy_slots(self._state, table, np.int32(len(copies)), filled=filled)

    def _prefill(self) -> None:
        """One chunk of what is missing, for all slots that miss something: a few rows at a time, of like lengths."""
        missing = {i: min(slot.missing, self.chunk) for i, slot in enumerate(self._slots) if slot.missing > 0}
        order = sorted(missing, key=lambda index: (-missing[index], index))
        while order:
            tokens, table = self._no_tokens(_width_of(missing[order[0]], self.chunk))
            self._prefill_rows(order[: len(tokens)], missing, tokens, table)
            order = order[len(tokens) :]

    def _no_tokens(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """A call of prefill with nothing to do: tokens [rows, width], and slots, lengths and counts [3, rows]."""
        rows = max(1, min(self.slots, PREFILL_ROWS, self.prefill_tokens // width))
        table = np.zeros((3, rows), np.int32)
        table[0] = self.slots
        return np.zeros((rows, width), np.int32), table

    def _prefill_rows(self, indices: list[int], missing: dict[int, int], tokens: np.ndarray, table: np.ndarray) -> None:
        """Fills in a call of prefill for these slots, and makes it."""
        for row, index in zip(self._rows(indices, len(tokens)), indices):
            slot, count = self._slots[index], missing[index]
            assert slot.request is not None
            length, prompt = len(slot.tokens), len(slot.request.tokens)
            new = list(slot.request.tokens[length : length + count])
            if length + count > prompt:  # a turn that goes on with new weights
                new += slot.sampled[max(0, length - prompt) : length + count - prompt]
            tokens[row, :count] = new
            table[:, row] = index, length, count
            slot.tokens += new
            slot.exact = True
            slot.touched = self._round
            self.stats.prefilled_tokens += count
        self.stats.padded_tokens += tokens.size - int(table[2].sum())
        filled = _size_of(max(int((table[1] + table[2]).max()), tokens.shape[1]), self._prefill_lengths)
        self._give()
        self._state, handle = self._append(tokens, table, filled)
        self._given(handle)

    def _append(self, tokens: np.ndarray, table: np.ndarray, filled: int):
        assert self._weights is not None
        return append_tokens(self.config, self._weights, self._state, tokens, *table, filled=filled, direct=self.direct)

    def _rows(self, indices: list[int], rows: int) -> Sequence[int]:
        """The rows of a round for these slots: a round of all slots is in their order, and works in place."""
        return indices if rows == self.slots else range(len(indices))

    def _decode(self) -> bool:
        """Gives the device a few tokens of every turn whose prompt is complete; whether there was one."""
        turns = {i: slot.request for i, slot in enumerate(self._slots) if slot.request and self._can_go_on(slot)}
        by_token = any(request.grammar for request in turns.values())
        if by_token and self._rounds:
            return False  # what a grammar allows next is known when the last token is
        masks = self._masks(turns)
        turns = {i: request for i, request in turns.items() if request.grammar is None or i in masks}
        if not turns:
            return False
        steps = 1 if by_token else self.steps
        size = _size_of(len(turns), _buckets(self.slots))
        rows = self._no_rows(size)
        placed = list(zip(self._rows(list(turns), size), turns, turns.values()))
        longest = 0
        for row, index, request in placed:
            slot = self._slots[index]
            length = len(slot.tokens)
            rows.slots[row], rows.fresh[row] = index, slot.fresh
            rows.lengths[row], rows.limits[row] = length, min(slot.room, self.capacity - length)
            rows.temperatures[row], rows.trajectories[row] = request.temperature, request.trajectory
            rows.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
            slot.fresh = False
            slot.ahead += steps
            longest = max(longest, length + slot.ahead)
        filled = _size_of(min(longest, self.capacity), self._decode_lengths)
        self._give()
        self._state, sampled = self._sample(rows, self._restriction(placed, size, masks), filled, steps)
        self._given(sampled.counts)
        self._rounds.append(_Round(sampled, placed, steps, size, self._version))
        return True

    def _can_go_on(self, slot: _Slot) -> bool:
        """Whether a turn has its prompt, and more to sample than rounds under way can give it."""
        if slot.missing:
            return False
        return min(slot.room, self.capacity - len(slot.tokens)) > slot.ahead

    def _no_rows(self, size: int) -> Rows:
        """Rows with nothing to do, as NumPy arrays to be filled in."""
        stop_ids = np.full((size, MAX_STOP_IDS), -1, np.int32)
        stop_ids[:, MAX_STOP_IDS - len(self.stop_ids) :] = self.stop_ids
        return Rows(
            slots=np.full(size, self.slots, np.int32),
            fresh=np.zeros(size, bool),
            lengths=np.zeros(size, np.int32),
            limits=np.zeros(size, np.int32),
            temperatures=np.ones(size, np.float32),
            trajectories=np.zeros(size, np.uint32),
            stop_ids=stop_ids,
        )

    def _masks(self, turns: dict[int, Request]) -> dict[int, np.ndarray]:
        """What grammars allow next, by slot; a turn whose grammar has no answer ends here, the others do not."""
        masks = {}
        for index, request in turns.items():
            if request.grammar:
                try:
                    masks[index] = request.grammar.mask()
                except Exception as fault:
                    self._finished.append(self._failed(self._slots[index], fault))
        return masks

    def _restriction(
        self, placed: list[tuple[int, int, Request]], size: int, masks: dict[int, np.ndarray]
    ) -> Restriction | None:
        """What narrows the rows' distributions, if anything does; `masks` by slot."""
        if not any(request.grammar or request.top_p < 1 or request.top_k for _, _, request in placed):
            return None
        words = -(-self.config.vocab_size // 32)
        restriction = Restriction(
            np.ones(size, np.float32), np.zeros(size, np.int32), np.full((size, words), 0xFFFFFFFF, np.uint32)
        )
        for row, index, request in placed:
            restriction.top_ps[row], restriction.top_ks[row] = request.top_p, request.top_k
            if (mask := masks.get(index)) is not None:
                restriction.masks[row, : len(mask)], restriction.masks[row, len(mask) :] = mask, 0
        return restriction

    def _sample(self, rows: Rows, restriction: Restriction | None, filled: int, steps: int):
        assert self._weights is not None
        size = len(rows.slots)
        leave_after = np.int32(max(1, size // 8))
        return sample_round(
            self.config,
            self._weights,
            self._state,
            rows,
            self.key,
            leave_after,
            restriction,
            filled=filled,
            steps=steps,
            direct=self.direct,
        )

    def _give(self) -> None:
        if self._given_at is None:
            self._given_at = time.perf_counter()

    def _given(self, handle: Any) -> None:
        """Tells the clock of work that the device was given, since the first of this round."""
        assert self._given_at is not None
        self._clock.given(self._given_at, self._work_since, handle)

    def _collect(self) -> list[SampledTurn]:
        """Reads the oldest round's tokens; the turns that ended."""
        sampled, placed, steps, size, version = self._rounds.popleft()
        tokens, logprobs, counts, stopped = map(np.asarray, jax.device_get(sampled))
        stats = self.stats
        stats.rounds += 1
        stats.decode_steps += int(counts.max())
        stats.row_steps += int(counts.max()) * size
        done = []
        for row, index, request in placed:
            slot, count = self._slots[index], int(counts[row])
            stats.slot_steps += count
            if slot.request is not request:
                continue  # it was cancelled, or a stop text had ended it
            slot.ahead -= steps
            stats.sampled_tokens += count
            if turn := self._take(
                slot, tokens[row, :count].tolist(), logprobs[row, :count].tolist(), bool(stopped[row]), version
            ):
                done.append(turn)
        if done and not self._under_way:
            self._work_since = time.perf_counter()
        return done

    def _take(
        self, slot: _Slot, tokens: list[int], logprobs: list[float], stopped: bool, version: int
    ) -> SampledTurn | None:
        """Enters what a round sampled for a slot; the turn, if it has ended."""
        request, text = slot.request, None
        assert request is not None
        try:
            found = slot.stops.feed(tokens) if slot.stops is not None else None
            if request.grammar:
                for token in tokens:
                    request.grammar.accept(token)
        except Exception as fault:  # of this turn alone: the others go on
            return self._failed(slot, fault)
        if found:
            kept, text = found
            slot.exact = kept == len(tokens) and stopped
            tokens, logprobs, stopped = tokens[:kept], logprobs[:kept], True
        slot.tokens += tokens
        slot.sampled += tokens
        slot.logprobs += logprobs
        slot.versions += [version] * len(tokens)
        slot.touched = self._round
        if not (stopped or slot.room <= 0 or len(slot.tokens) >= self.capacity):
            return None
        slot.request, slot.ahead = None, 0
        self._under_way.discard(request.key)
        return SampledTurn(request.key, slot.sampled, slot.logprobs, slot.versions, stopped, text, slot.cached)

    def _failed(self, slot: _Slot, fault: Exception) -> SampledTurn:
        """Ends a turn by a fault of its own; what the host knows of it is kept."""
        request = slot.request
        assert request is not None
        log.warning("a turn ended by a fault of its own", exc_info=fault)
        slot.request, slot.exact, slot.ahead = None, False, 0
        self._under_way.discard(request.key)
        error = f"{type(fault).__name__}: {fault}"
        return SampledTurn(request.key, slot.sampled, slot.logprobs, slot.versions, False, None, slot.cached, error)


def _buckets(most: int) -> list[int]:
    """1, and `most`, half of it, a quarter, ... down to 8: fewer rows than that cost about as much."""
    sizes = [most]
    while sizes[0] > 8:
        sizes.insert(0, -(-sizes[0] // 2))
    return sizes if sizes[0] == 1 else [1, *sizes]


def _size_of(count: int, sizes: list[int]) -> int:
    """The smallest of the sizes, which are in order, that is enough."""
    return next(size for size in sizes if size >= count)


def _lengths(capacity: int) -> list[int]:
    """256, 512, 1024, ... and `capacity`."""
    sizes = [256]
    while sizes[-1] * 2 < capacity:
        sizes.append(sizes[-1] * 2)
    return [capacity] if capacity <= 256 else [*sizes, capacity]


def _widths(chunk: int) -> list[int]:
    """1, 16, 32, 64, 96, 128, 192, 256, 384, ... and `chunk`."""
    sizes = [1, 16, 32, 64]
    while sizes[-1] < chunk:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return [size for size in sizes if size < chunk] + [chunk]


def _width_of(count: int, chunk: int) -> int:
    return _size_of(count, _widths(chunk))


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
