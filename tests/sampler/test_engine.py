"""Continuous batching: the same tokens as the plain forward pass, whatever is interleaved, copied or evicted."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import forward, init_params
from orchestra_jax.models.logprobs import logprobs_of
from orchestra_jax.sampler import device
from orchestra_jax.sampler.engine import Engine, Request
from orchestra_jax.sampler.idle import DeviceClock
from orchestra_jax.sampler.sampler import Sampler
from orchestra_jax.sampler.weights import adopt

CONFIG = preset("market-tiny", vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8)
STOP = 95
CAPACITY = 300


@pytest.fixture(scope="module")
def params():
    # Larger weights than the initial ones, so that the distributions are far from uniform.
    return jax.tree.map(lambda x: 3 * x, init_params(CONFIG, jax.random.key(1)))


def make(params, slots=4, steps=4, chunk=32, seed=0, version=0, **options):
    options = {"stop_ids": [STOP], "seed": seed, "steps": steps, "chunk": chunk, "capacity": CAPACITY} | options
    engine = Engine(CONFIG, slots=slots, **options)
    engine.use(params, version)
    return engine


def run_all(engine, requests):
    for request in requests:
        engine.submit(request)
    turns = {}
    for _ in range(10_000):
        if not engine.busy:
            return turns
        turns.update({turn.key: turn for turn in engine.run()})
    raise AssertionError("the engine does not come to an end")


def prompts(n, seed=0, low=2, high=70):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 90, rng.integers(low, high)).tolist() for _ in range(n)]


@jax.jit
def padded_logits(params, tokens):
    return forward(CONFIG, params, tokens)


def full_logits(params, ids):
    tokens = np.zeros((1, CAPACITY), np.int32)  # one shape; what stands after a token cannot change its logits
    tokens[0, : len(ids)] = ids
    return np.asarray(padded_logits(params, tokens))[0, : len(ids)]


def assert_greedy(params, prompt, tokens):
    """Each token has the largest logit of the plain forward pass, but for float32's ties."""
    rows = full_logits(params, prompt + tokens)[len(prompt) - 1 : -1]
    for row, token in zip(rows, tokens, strict=True):
        assert row[token] >= row.max() - 1e-4


def test_more_conversations_than_slots(params):
    batch = prompts(11)
    turns = run_all(make(params), [Request(i, p, 9, i, 0.0) for i, p in enumerate(batch)])
    assert sorted(turns) == list(range(11))
    for index, prompt in enumerate(batch):
        turn = turns[index]
        assert_greedy(params, prompt, turn.tokens)
        assert turn.stopped == (turn.tokens[-1] == STOP)
        assert turn.stopped or len(turn.tokens) == 9
        assert STOP not in turn.tokens[:-1]


def test_logprobs_equal_the_trainers(params):
    batch = prompts(7, seed=3)
    turns = run_all(make(params), [Request(i, p, 20, i, 0.7) for i, p in enumerate(batch)])
    for index, prompt in enumerate(batch):
        turn = turns[index]
        rows = full_logits(params, prompt + turn.tokens)[len(prompt) - 1 : -1]
        expected, _ = logprobs_of(jnp.asarray(rows), jnp.asarray(turn.tokens), 0.7)
        # float32, another order of summation: 1e-4 is ten times what is seen.
        np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)


def test_samples_are_those_of_the_lock_step_sampler(params):
    """Keyed by (seed, trajectory, position): the two agree though they batch differently."""
    batch = prompts(6, seed=4, high=30)
    turns = run_all(make(params, slots=2, seed=5), [Request(i, p, 8, 10 + i) for i, p in enumerate(batch)])
    sampler = Sampler(CONFIG, rows=6, capacity=64, max_new_tokens=8, stop_ids=[STOP], seed=5)
    state = sampler.start(params, batch)
    out, _ = sampler.generate(params, state, np.full(6, 8), np.ones(6), 10 + np.arange(6))
    for index in range(6):
        assert turns[index].tokens == out.tokens[index, : out.counts[index]].tolist()


def test_a_groups_prompt_is_computed_once(params):
    (prompt,) = prompts(1, low=60, high=61)
    engine = make(params, slots=8)
    turns = run_all(engine, [Request(i, prompt, 6, i) for i in range(8)])
    assert engine.stats.prefilled_tokens == 60
    assert engine.stats.copied_tokens == 7 * 60
    alone = run_all(make(params, slots=1), [Request(i, prompt, 6, i) for i in range(8)])
    assert {key: turn.tokens for key, turn in turns.items()} == {key: turn.tokens for key, turn in alone.items()}


def test_the_counts_are_told(params):
    engine = make(params, slots=2)
    run_all(engine, [Request(i, [1, 2, 3 + i], 4, i) for i in range(2)])
    metrics = engine.metrics()
    assert metrics["sampler/prefilled_tokens"] == 6
    assert metrics["sampler/copied_tokens"] == metrics["sampler/reprefilled_tokens"] == 0
    assert 0.5 <= metrics["sampler/slot_occupancy"] <= 1.0
    engine.reset()
    assert engine.metrics()["sampler/prefilled_tokens"] == 0


def test_those_who_come_later_share_the_beginning(params):
    """The first has sampled on: its logits are not the prompt's any more, so the last token is computed again."""
    (prompt,) = prompts(1, low=60, high=61)
    engine = make(params)
    run_all(engine, [Request("first", prompt, 6, 0)])
    turn = run_all(engine, [Request("second", prompt, 6, 1, 0.0)])["second"]
    assert (engine.stats.prefilled_tokens, engine.stats.copied_tokens) == (61, 59)
    assert_greedy(params, prompt, turn.tokens)


def test_an_observation_costs_its_own_tokens_only(params):
    (prompt,) = prompts(1, low=50, high=51)
    engine = make(params)
    first = run_all(engine, [Request("a", prompt, 5, 0, 0.0)])["a"]
    before = engine.stats.prefilled_tokens
    conversation = prompt + first.tokens + [1, 2, 3]
    second = run_all(engine, [Request("a", conversation, 5, 0, 0.0)])["a"]
    assert engine.stats.prefilled_tokens - before == 3
    assert_greedy(params, conversation, second.tokens)


def test_a_turn_can_go_on_without_an_observation(params):
    (prompt,) = prompts(1, seed=9)
    engine = make(params)
    parts, tokens = list(prompt), []
    while len(tokens) < 12 and (not tokens or tokens[-1] != STOP):
        turn = run_all(engine, [Request("a", parts, 3, 0)])["a"]
        parts, tokens = parts + turn.tokens, tokens + turn.tokens
    assert engine.stats.prefilled_tokens == len(prompt)
    whole = run_all(make(params), [Request("a", prompt, len(tokens), 0)])["a"]
    assert whole.tokens == tokens


def test_parked_conversations_lose_their_slots_the_longest_parked_first(params):
    batch = prompts(3, seed=6, low=40, high=50)
    engine = make(params, slots=2)
    first = {}
    for index in (0, 1):  # both are parked afterwards, 0 the longer
        first |= run_all(engine, [Request(index, batch[index], 4, index, 0.0)])
    run_all(engine, [Request(2, batch[2], 4, 2, 0.0)])
    assert engine.stats.evictions == 1
    before = engine.stats.prefilled_tokens
    conversation = batch[1] + first[1].tokens + [7]
    run_all(engine, [Request(1, conversation, 4, 1, 0.0)])  # still there
    assert (engine.stats.prefilled_tokens - before, engine.stats.reprefilled_tokens) == (1, 0)
    conversation = batch[0] + first[0].tokens + [7]
    again = run_all(engine, [Request(0, conversation, 4, 0, 0.0)])[0]
    assert engine.stats.reprefilled_tokens == len(conversation) - 1
    assert_greedy(params, conversation, again.tokens)


def test_released_slots_go_first(params):
    batch = prompts(3, seed=6, low=40, high=50)
    engine = make(params, slots=2)
    for index in (0, 1):
        run_all(engine, [Request(index, batch[index], 4, index)])
    engine.release(1)
    run_all(engine, [Request(2, batch[2], 4, 2)])
    assert engine.stats.evictions == 0


def test_new_weights_forget_the_cache(params):
    (prompt,) = prompts(1, seed=8, low=40, high=41)
    engine = make(params, version=3)
    assert run_all(engine, [Request("a", prompt, 6, 0, 0.0)])["a"].versions == [3] * 6
    other = jax.tree.map(lambda x: -x, params)
    engine.use(other, 4)
    turn = run_all(engine, [Request("a", prompt, 6, 0, 0.0)])["a"]
    assert turn.versions == [4] * len(turn.tokens)
    assert_greedy(other, prompt, turn.tokens)


def test_a_long_prompt_does_not_hold_up_the_others(params):
    (long,), (short,) = prompts(1, low=140, high=141), prompts(1, seed=1, low=5, high=6)
    engine = make(params, chunk=32, steps=4)
    engine.submit(Request("long", long, 4, 0))
    engine.submit(Request("short", short, 4, 1))
    order = []
    while engine.busy:
        order += [turn.key for turn in engine.run()]
    assert order == ["short", "long"]


def test_the_end_of_a_slot_ends_the_turn(params):
    (prompt,) = prompts(1, low=CAPACITY - 3, high=CAPACITY - 2)
    turn = run_all(make(params), [Request("a", prompt, 50, 0, 0.0)])["a"]
    assert len(turn.tokens) <= 3
    assert_greedy(params, prompt, turn.tokens)


def test_a_prompt_almost_as_long_as_a_slot_that_is_shorter_than_a_chunk(params):
    """Padded lengths never exceed the capacity."""
    (prompt,) = prompts(1, low=CAPACITY - 3, high=CAPACITY - 2)
    turn = run_all(make(params, chunk=512), [Request("a", prompt, 50, 0, 0.0)])["a"]
    assert_greedy(params, prompt, turn.tokens)


def test_a_cancelled_turn_leaves_room(params):
    batch = prompts(3, seed=2)
    engine = make(params, slots=1)
    for index in range(3):
        engine.submit(Request(index, batch[index], 30, index))
    engine.run()
    engine.cancel(0)
    engine.cancel(1)
    turns = {}
    while engine.busy:
        turns.update({turn.key: turn for turn in engine.run()})
    assert list(turns) == [2]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", [], 4, 0), "a prompt is empty"),
        (Request("a", [1], 0, 0), "limit of a turn must be at least 1"),
        (Request("a", [1] * CAPACITY, 4, 0), f"leaves no room in a slot of {CAPACITY}"),
        (Request("a", [1, 96], 4, 0), "token ids must be from 0 to 95"),
        (Request("a", [1, -1], 4, 0), "token ids must be from 0 to 95"),
        (Request("a", [1], 4, -1), r"trajectory must be from 0 to 2\*\*32 - 1, not -1"),
        (Request("a", [1], 4, 0, stop_texts=("",)), "stop texts"),
    ],
    ids=["empty", "limit", "long", "vocabulary", "negative", "trajectory", "stop_text"],
)
def test_requests_that_cannot_be_served(params, request_, message):
    with pytest.raises(ValueError, match=message):
        make(params).submit(request_)


def test_mistakes(params):
    engine = make(params)
    engine.submit(Request("a", [1, 2], 4, 0))
    with pytest.raises(ValueError, match="conversation 'a' has a turn under way"):
        engine.submit(Request("a", [1, 2], 4, 0))
    with pytest.raises(RuntimeError, match=r"call use\(params, version\) first"):
        Engine(CONFIG, slots=1, capacity=32, stop_ids=[STOP], seed=0).run()
    with pytest.raises(ValueError, match="needs 1 to 8 stop ids, not 0"):
        Engine(CONFIG, slots=1, capacity=32, stop_ids=[], seed=0)
    with pytest.raises(ValueError, match="slots must be at least 1, not 0"):
        Engine(CONFIG, slots=0, capacity=32, stop_ids=[STOP], seed=0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.sampled_from([2, 4]), lookahead=st.sampled_from([0, 1, 2]))
def test_any_mixture_of_lengths_turns_arrivals_and_evictions(params, seed, slots, lookahead):
    """Conversations of random lengths, some with a common beginning, come and go; each token is the greedy one."""
    rng = np.random.default_rng(seed)
    engine = make(params, slots=slots, lookahead=lookahead)
    common = rng.integers(0, 90, 40).tolist()
    conversations = {
        key: (common if rng.random() < 0.5 else []) + rng.integers(0, 90, rng.integers(1, 50)).tolist()
        for key in range(9)
    }
    turns_left = {key: int(rng.integers(1, 4)) for key in conversations}
    waiting = list(conversations)
    under_way = set()
    while waiting or under_way:
        while waiting and rng.random() < 0.6:
            key = waiting.pop(int(rng.integers(len(waiting))))
            engine.submit(Request(key, list(conversations[key]), int(rng.integers(1, 10)), key, 0.0))
            under_way.add(key)
        for turn in engine.run():
            under_way.remove(turn.key)
            assert_greedy(params, conversations[turn.key], turn.tokens)
            observation = rng.integers(0, 90, rng.integers(0, 12)).tolist()
            conversations[turn.key] += turn.tokens + observation
            turns_left[turn.key] -= 1
            if turns_left[turn.key] and len(conversations[turn.key]) < CAPACITY - 1:
                waiting.append(turn.key)
            else:
                engine.release(turn.key)


def test_nothing_is_compiled_after_the_warm_up(params):
    engine = make(params, slots=3)
    compiled = engine.warm_up()
    assert {name.split()[0] for name, _ in compiled} == {"decode", "copy", "prefill"}
    functions = (device.sample_round, device.append_tokens, device.copy_slots)
    before = [function._cache_size() for function in functions]
    common = prompts(1, seed=1, low=40, high=41)[0]
    requests = [Request(i, p, 30, i) for i, p in enumerate(prompts(9, seed=2, low=1, high=150))]
    run_all(engine, [*requests, *(Request(100 + i, [*common, i], 7, i) for i in range(5))])
    assert engine.stats.copied_tokens > 0
    assert [function._cache_size() for function in functions] == before


def test_prefill_computes_little_beside_what_is_wanted(params):
    """One long prompt is not padded to the rows of a full call, nor short ones to the length of a long one."""
    engine = make(params, slots=8, chunk=150)
    engine.prefill_tokens = 128
    (long,) = prompts(1, low=140, high=141)
    run_all(engine, [Request("long", long, 2, 0, 0.0)])
    assert (engine.stats.prefilled_tokens, engine.stats.padded_tokens) == (140, 10)
    engine.reset()
    requests = [Request(i, p, 2, i, 0.0) for i, p in enumerate([long, *prompts(4, seed=1, low=10, high=15)])]
    turns = run_all(engine, requests)
    assert engine.stats.padded_tokens <= 10 + 8 * 16
    for request in requests:
        assert_greedy(params, request.tokens, turns[request.key].tokens)


def test_a_kernel_needs_one_filled_length(params):
    """It reads what is filled, whatever the shape: more lengths would be more to compile."""

    def decodes(**options):
        names = [name for name, _ in make(params, slots=1, capacity=300, chunk=16, **options).warm_up()]
        return [name for name in names if name.startswith(("decode", "prefill 1 x 16"))]

    assert decodes(direct=True) == ["prefill 1 x 16 of 300", "decode 1 of 300"]
    assert decodes(direct=False) == ["prefill 1 x 16 of 300", "decode 1 of 256", "decode 1 of 300"]


# What ends a turn.


def chars(token):
    """A token's text: letters by their number, so that stops can lie across tokens."""
    return bytes([97 + token % 26])


def test_a_turns_own_stop_ids(params):
    (prompt,) = prompts(1, seed=3)
    free = run_all(make(params), [Request("a", prompt, 30, 0, 0.0)])["a"].tokens
    stop = free[4]
    turn = run_all(make(params), [Request("a", prompt, 30, 0, 0.0, stop_ids=(stop,))])["a"]
    assert (turn.tokens, turn.stopped) == (free[: free.index(stop) + 1], True)
    with pytest.raises(ValueError, match="may have 7 stop ids of its own"):
        make(params).submit(Request("a", prompt, 30, 0, stop_ids=tuple(range(8))))


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_a_stop_text_across_tokens_ends_the_turn_and_the_conversation_goes_on(params, steps):
    (prompt,) = prompts(1, seed=3)
    free = run_all(make(params), [Request("a", prompt, 40, 0)])["a"].tokens
    text = b"".join(map(chars, free)).decode()
    stop = text[6:9]
    end = text.index(stop) + 3
    engine = make(params, steps=steps, token_bytes=chars)
    turn = run_all(engine, [Request("a", prompt, 40, 0, stop_texts=("{", stop))])["a"]
    assert (turn.tokens, turn.stopped, turn.stop_text) == (free[:end], True, stop)
    assert len(turn.logprobs) == len(turn.versions) == end
    # What the device sampled beyond the stop is forgotten: neither its cache nor its logits count.
    conversation = prompt + turn.tokens + [5, 6]
    again = run_all(engine, [Request("a", conversation, 8, 0, 0.0), Request("b", prompt + turn.tokens, 8, 1, 0.0)])
    assert_greedy(params, conversation, again["a"].tokens)
    assert_greedy(params, prompt + turn.tokens, again["b"].tokens)
    assert again["a"].cached_tokens == len(prompt) + end
    with pytest.raises(ValueError, match="stop texts need an engine with token_bytes"):
        make(params).submit(Request("a", prompt, 4, 0, stop_texts=("x",)))


class Alternating:
    """Allows even tokens after odd ones and odd ones after even ones; starts with even ones."""

    def __init__(self):
        self.accepted = []

    def mask(self):
        odd = len(self.accepted) % 2
        return np.array([0xAAAAAAAA if odd else 0x55555555] * 3, np.uint32)

    def accept(self, token):
        self.accepted.append(token)


def test_a_grammar_beside_turns_without_one(params):
    first, second = prompts(2, seed=5, low=20, high=30)
    grammar = Alternating()
    engine = make(params)
    turns = run_all(engine, [Request("g", first, 12, 0, 0.8, grammar=grammar), Request("f", second, 12, 1)])
    tokens = turns["g"].tokens
    assert grammar.accepted == tokens
    assert [token % 2 for token in tokens] == [i % 2 for i in range(len(tokens))]
    rows = full_logits(params, first + tokens)[len(first) - 1 : -1]
    for index, (row, token, logprob) in enumerate(zip(rows, tokens, turns["g"].logprobs, strict=True)):
        allowed = np.where(np.arange(96) % 2 == index % 2, row, -np.inf)
        expected, _ = logprobs_of(jnp.asarray(allowed)[None], jnp.asarray([token]), 0.8)
        np.testing.assert_allclose(logprob, expected[0], atol=1e-4)  # as for the logprobs above
    alone = run_all(make(params), [Request("f", second, 12, 1)])["f"]
    assert turns["f"].tokens == alone.tokens


class Breaking(Alternating):
    """Knows no mask, or takes no token, after the third."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def mask(self):
        if self.method == "mask" and len(self.accepted) == 3:
            raise ValueError("too deep")
        return super().mask()

    def accept(self, token):
        if self.method == "accept" and len(self.accepted) == 3:
            raise ValueError("too deep")
        super().accept(token)


@pytest.mark.parametrize("method", ["mask", "accept"])
def test_a_grammar_that_breaks_ends_its_own_turn(params, method):
    first, second = prompts(2, seed=5, low=20, high=30)
    engine = make(params, slots=2)
    grammar = Breaking(method)
    turns = run_all(engine, [Request("g", first, 12, 0, 0.8, grammar=grammar), Request("f", second, 12, 1, 0.0)])
    assert (turns["g"].error, turns["f"].error) == ("ValueError: too deep", None)
    assert turns["g"].tokens == grammar.accepted
    assert len(turns["g"].tokens) == len(turns["g"].logprobs) == len(turns["g"].versions) == 3
    assert_greedy(params, second, turns["f"].tokens)
    # Its slot is as good as any other, and the conversation can go on.
    conversation = first + turns["g"].tokens + [7]
    assert_greedy(params, conversation, run_all(engine, [Request("g", conversation, 6, 0, 0.0)])["g"].tokens)


def test_a_token_without_bytes_ends_its_own_turn(params):
    """A model's vocabulary may be larger than its tokenizer's."""
    first, second = prompts(2, seed=5, low=20, high=30)

    def token_bytes(token):
        raise KeyError(token)

    engine = make(params, token_bytes=token_bytes)
    turns = run_all(engine, [Request("a", first, 8, 0, stop_texts=("x",)), Request("b", second, 8, 1, 0.0)])
    assert turns["a"].error.startswith("KeyError")
    assert_greedy(params, second, turns["b"].tokens)


# Sampling.


@pytest.mark.parametrize("settings_", [{}, {"top_k": 3}, {"top_p": 0.6}], ids=["plain", "top_k", "top_p"])
def test_the_frequencies_are_those_of_the_distribution(params, settings_):
    """Chi-square of 2,000 first tokens; the seed is fixed, the 99.9% quantile leaves room for any one seed."""
    (prompt,) = prompts(1, seed=11, low=20, high=21)
    engine = make(params, slots=50)
    requests = [Request(i, prompt, 1, i, 4.0, **settings_) for i in range(2000)]
    turns = run_all(engine, requests)
    counts = np.bincount([turns[i].tokens[0] for i in range(2000)], minlength=96)
    row = full_logits(params, prompt)[-1].astype(np.float64) / 4.0
    probabilities = np.exp(row - row.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    if "top_k" in settings_:
        kept = order[:3]
    elif "top_p" in settings_:
        kept = order[: int(np.searchsorted(np.cumsum(probabilities[order]), 0.6)) + 1]
    else:
        kept = order
    narrowed = np.zeros(96)
    narrowed[kept] = probabilities[kept] / probabilities[kept].sum()
    assert counts[narrowed == 0].sum() == 0
    common = narrowed * 2000 >= 5
    expected = np.append(narrowed[common] * 2000, narrowed[~common].sum() * 2000)
    seen = np.append(counts[common], counts[~common].sum())
    live = expected > 0
    degrees = live.sum() - 1
    statistic = np.sum((seen - expected)[live] ** 2 / expected[live])
    # Wilson and Hilferty's approximation of the quantile.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3


# Weights.


def test_new_weights_in_the_middle_of_a_turn(params):
    """Every token is that of the weights whose version it bears, given the whole context."""
    (prompt,) = prompts(1, seed=8, low=40, high=41)
    other = jax.tree.map(lambda x: -x, params)
    engine = make(params, version=1, stop_ids=[94])
    engine.submit(Request("a", prompt, 24, 0, 0.0))
    for _ in range(4):
        assert engine.run() == []
    engine.use(other, 2)
    turn = run_all(engine, [])["a"]
    assert len(turn.tokens) == 24
    old = turn.versions.count(1)
    assert 0 < old < 24
    assert turn.versions == [1] * old + [2] * (24 - old)
    assert_greedy(params, prompt, turn.tokens[:old])
    assert_greedy(other, prompt + turn.tokens[:old], turn.tokens[old:])


def test_weights_are_cast_and_shared():
    params = init_params(CONFIG, jax.random.key(0))
    cast = adopt(params, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {jnp.dtype(jnp.bfloat16)}
    same = adopt(params)
    assert same["embed_tokens"].shape == params["embed_tokens"].shape
    for index, layer in enumerate(same["layers.q_proj"]):
        np.testing.assert_array_equal(layer, params["layers.q_proj"][index])


# Other ways to read the cache.


def test_the_kernels_path_gives_the_same(params):
    """What TPU and GPU run, with the portable implementation of their kernels."""
    batch = prompts(9, seed=4)
    requests = [Request(i, p, 8, i, 0.0) for i, p in enumerate(batch)]
    turns = run_all(make(params, slots=3, direct=True), requests)
    for index, prompt in enumerate(batch):
        assert_greedy(params, prompt, turns[index].tokens)


def test_an_int8_cache_changes_logprobs_little(params):
    """An entry is off by at most 1/254 of its vector's largest; with attention that is not sharp that stays small."""
    params = init_params(CONFIG, jax.random.key(1))
    batch = prompts(6, seed=6, low=30)
    engine = make(params, dtype=jnp.int8)
    turns = run_all(engine, [Request(i, p, 16, i, 0.7) for i, p in enumerate(batch)])
    worst = 0.0
    for index, prompt in enumerate(batch):
        turn = turns[index]
        rows = full_logits(params, prompt + turn.tokens)[len(prompt) - 1 : -1]
        expected, _ = logprobs_of(jnp.asarray(rows), jnp.asarray(turn.tokens), 0.7)
        worst = max(worst, float(np.abs(np.asarray(turn.logprobs) - np.asarray(expected)).max()))
    assert 1e-6 < worst < 0.05  # exact arithmetic would be below, 0.05 is above what the rounding of scores adds
    assert sum(a.nbytes for a in jax.tree.leaves(engine._state.cache.keys)) * 4 == sum(
        a.nbytes for a in jax.tree.leaves(make(params)._state.cache.keys)
    )


# What the device waited for.


def test_idle_time_is_told():
    clock = DeviceClock()
    now = time.perf_counter()
    clock.given(now, now - 1.0, jnp.zeros(1))  # there was work for a second, and nothing was given
    clock.settle()
    assert clock.idle_s == pytest.approx(1.0, abs=0.01)
    clock.reset()
    later = time.perf_counter()
    clock.given(later, later, jnp.zeros(1))
    clock.settle()
    assert clock.idle_s < 0.5


def test_streams_can_be_read_while_they_come(params):
    (prompt,) = prompts(1, seed=3)
    engine = make(params, stop_ids=[94])
    assert engine.partial("a") == []
    engine.submit(Request("a", prompt, 20, 0))
    seen = []
    while engine.busy:
        done = engine.run()
        if engine.busy:
            seen.append(engine.partial("a"))
    (turn,) = done
    assert all(tokens == turn.tokens[: len(tokens)] for tokens in seen)
    assert [len(tokens) for tokens in seen] == sorted(len(tokens) for tokens in seen)
    assert len({len(tokens) for tokens in seen}) > 2
