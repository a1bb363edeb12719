"""The sampler against the plain forward pass: same tokens, same logprobs, no influence of neighbours or of turns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import forward, init_params
from orchestra_jax.models.logprobs import logprobs_of
from orchestra_jax.sampler.sampler import Sampler, _append, _generate, _prefill, bucket, sample_tokens

CONFIG = preset("market-tiny", vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8)
STOP = 95


@pytest.fixture(scope="module")
def params():
    # Larger weights than the initial ones, so that the distributions are far from uniform.
    return jax.tree.map(lambda x: 3 * x, init_params(CONFIG, jax.random.key(1)))


def make(rows, capacity=64, max_new_tokens=8, seed=0):
    return Sampler(CONFIG, rows=rows, capacity=capacity, max_new_tokens=max_new_tokens, stop_ids=[STOP], seed=seed)


def prompts(n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 90, rng.integers(2, 20)).tolist() for _ in range(n)]


def generate(sampler, params, state, limit=8, temperature=1.0, trajectories=None):
    rows = sampler.rows
    trajectories = np.arange(rows) if trajectories is None else trajectories
    return sampler.generate(params, state, np.full(rows, limit), np.full(rows, temperature), np.asarray(trajectories))


@jax.jit
def padded_logits(params, tokens):
    return forward(CONFIG, params, tokens)


def full_logits(params, ids):
    tokens = np.zeros((1, 64), np.int32)  # one shape; what stands after a token cannot change its logits
    tokens[0, : len(ids)] = ids
    return np.asarray(padded_logits(params, tokens))[0, : len(ids)]


def test_greedy_equals_repeated_full_forward(params):
    batch = prompts(4)
    sampler = make(4)
    out, _ = generate(sampler, params, sampler.start(params, batch), temperature=0.0)
    for prompt, tokens, count in zip(batch, out.tokens, out.counts):
        ids = list(prompt)
        for token in tokens[:count]:
            assert token == full_logits(params, ids)[-1].argmax()
            ids.append(int(token))


def test_logprobs_equal_the_trainers(params):
    batch = prompts(5)
    sampler = make(5)
    out, _ = generate(sampler, params, sampler.start(params, batch), temperature=0.7)
    for prompt, tokens, logprobs, count in zip(batch, out.tokens, out.logprobs, out.counts):
        ids = prompt + tokens[:count].tolist()
        rows = full_logits(params, ids)[len(prompt) - 1 : -1]
        expected, _ = logprobs_of(jnp.asarray(rows), jnp.asarray(tokens[:count]), 0.7)
        # float32, another order of summation: 1e-4 is ten times what is seen.
        np.testing.assert_allclose(logprobs[:count], expected, atol=1e-4)


def test_turn_by_turn_equals_one_long_prefill(params):
    batch, observations = prompts(3, seed=1), prompts(3, seed=2)
    sampler = make(3)
    first, state = generate(sampler, params, sampler.start(params, batch), limit=5)
    turns, _ = generate(sampler, params, sampler.append(params, state, observations), temperature=0.0)
    whole = [p + t[:c].tolist() + o for p, t, c, o in zip(batch, first.tokens, first.counts, observations)]
    other = make(3)
    once, _ = generate(other, params, other.start(params, whole), temperature=0.0)
    np.testing.assert_array_equal(turns.tokens, once.tokens)
    np.testing.assert_allclose(turns.logprobs, once.logprobs, atol=1e-4)


def test_row_does_not_depend_on_its_neighbours(params):
    batch = prompts(6, seed=3)
    sampler = make(6)
    together, _ = generate(sampler, params, sampler.start(params, batch))
    neighbours = [batch[0], *prompts(5, seed=9)]
    changed, _ = generate(sampler, params, sampler.start(params, neighbours), trajectories=[0, 11, 12, 13, 14, 15])
    np.testing.assert_array_equal(together.tokens[0], changed.tokens[0])
    np.testing.assert_array_equal(together.logprobs[0], changed.logprobs[0])
    # Another place in the batch: the trajectory's number keys its randomness, not its row.
    moved, _ = generate(sampler, params, sampler.start(params, batch[::-1]), trajectories=np.arange(6)[::-1])
    np.testing.assert_array_equal(together.tokens, moved.tokens[::-1])


def test_group_members_share_a_prompt_but_not_their_randomness(params):
    prompt = prompts(1, seed=4)[0]
    sampler = make(8)
    out, _ = generate(sampler, params, sampler.start(params, [prompt] * 8))
    assert len({tuple(row) for row in out.tokens}) > 4
    alone = make(1)
    single, _ = generate(alone, params, alone.start(params, [prompt]), trajectories=[3])
    np.testing.assert_array_equal(out.tokens[3], single.tokens[0])


def test_limits_temperatures_and_stops_are_per_row(params):
    batch = [prompts(1, seed=5)[0]] * 4
    sampler = make(4, max_new_tokens=6)
    limits, temperatures = np.array([0, 1, 6, 6]), np.array([1.0, 1.0, 0.0, 0.0])
    out, state = sampler.generate(params, sampler.start(params, batch), limits, temperatures, np.arange(4))
    assert out.counts.tolist()[:2] == [0, 1]
    np.testing.assert_array_equal(out.tokens[2], out.tokens[3])
    np.testing.assert_array_equal(np.asarray(state.cache.lengths), len(batch[0]) + out.counts)
    greedy = out.tokens[2, 0]
    stopper = Sampler(CONFIG, rows=4, capacity=64, max_new_tokens=6, stop_ids=[int(greedy)], seed=0)
    out, _ = stopper.generate(params, stopper.start(params, batch), limits, temperatures, np.arange(4))
    assert out.stopped[2]
    assert out.counts[2] == 1
    assert out.tokens[2, 0] == greedy


def test_capacity_ends_a_turn(params):
    sampler = make(1, capacity=12, max_new_tokens=8)
    out, state = generate(sampler, params, sampler.start(params, [[1] * 10]))
    assert out.counts[0] == 2
    assert not out.stopped[0]
    assert int(state.cache.lengths[0]) == 12


def test_padding_ids_are_never_sampled(params):
    config = preset(
        "market-tiny",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        head_dim=8,
        valid_vocab_size=10,
    )
    sampler = Sampler(config, rows=16, capacity=64, max_new_tokens=8, stop_ids=[STOP], seed=0)
    out, _ = generate(sampler, params, sampler.start(params, [[1, 2, 3]] * 16), temperature=5.0)
    assert out.tokens.max() < 10
    assert np.isfinite(out.logprobs).all()


def test_sampling_distribution_by_chi_square():
    row = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    n = 20_000
    tokens, _ = sample_tokens(
        jnp.broadcast_to(row, (n, 5)), jnp.ones(n), jax.random.key(3), jnp.arange(n), jnp.zeros(n, jnp.int32)
    )
    counts = np.bincount(np.asarray(tokens), minlength=5)
    expected = n * np.exp(row)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 18.47  # the 99.9% point of chi-square with 4 degrees of freedom; the key is fixed


def test_nothing_recompiles_in_steady_state(params):
    sampler = make(4)

    def rollout(seed):
        batch = [p[: 2 + seed % 10] + [1] * 3 for p in prompts(4, seed)]
        state = sampler.start(params, batch, num_prompt_slots=4)
        _, state = generate(sampler, params, state, limit=1 + seed % 8, temperature=seed / 10)
        state = sampler.append(params, state, [[5] * (1 + (seed + i) % 9) for i in range(4)])
        generate(sampler, params, state)

    rollout(0)
    sizes = [f._cache_size() for f in (_prefill, _append, _generate)]
    for seed in range(1, 6):
        rollout(seed)
    assert [f._cache_size() for f in (_prefill, _append, _generate)] == sizes


def test_bad_input_is_named(params):
    sampler = make(2, capacity=16)
    with pytest.raises(ValueError, match="2 rows, got 1"):
        sampler.start(params, [[1]])
    with pytest.raises(ValueError, match="empty"):
        sampler.start(params, [[1], []])
    with pytest.raises(ValueError, match=r"rollout\.max_tokens"):
        sampler.start(params, [[1], [1] * 16])
    with pytest.raises(ValueError, match="stop id"):
        Sampler(CONFIG, rows=1, capacity=8, max_new_tokens=4, stop_ids=[], seed=0)


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 49, 65, 200)] == [16, 16, 24, 24, 32, 48, 64, 96, 256]
