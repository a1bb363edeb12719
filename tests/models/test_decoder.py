"""Attention, decoder and logprobs against plain definitions, and the ways of computing them against each other."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orchestra_jax.models import attention
from orchestra_jax.models.attention import _splash, cached_attention, packed_attention
from orchestra_jax.models.config import LinearRopeScaling, ModelConfig, preset
from orchestra_jax.models.decoder import (
    Decoder,
    check_params,
    extend,
    forward,
    hidden_states,
    init_cache,
    init_params,
    logits,
    param_specs,
    rope_frequencies,
)
from orchestra_jax.models.logprobs import logprobs_of, token_logprobs

QWEN3 = preset(
    "market-tiny", vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, head_dim=4
)
QWEN2 = replace(QWEN3, model_type="qwen2", qk_norm=False, qkv_bias=True)
LLAMA = replace(QWEN3, model_type="llama", qk_norm=False, tie_word_embeddings=False)
FAMILIES = [QWEN3, QWEN2, LLAMA]
names = pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Weights far from the initial ones: no bias is 0, no norm 1, no distribution flat."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray((spec.init_std is None) + rng.normal(0, 2 * (spec.init_std or 0.1), spec.shape), jnp.float32)
        for name, spec in param_specs(config).items()
    }


@partial(jax.jit, static_argnums=0)
def full_logits(config, params, tokens):
    return forward(config, params, tokens)


@partial(jax.jit, static_argnums=0)
def packed_logits(config, params, *row):
    return logits(config, params, hidden_states(config, params, *row))


def packed_layout(rng: np.random.Generator, time: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, segments and prefixes [time] of prompts with one to three continuations each, and padding."""
    columns: list[tuple[int, int, int]] = []
    segment = 0
    longest = max(2, time // 6)
    while len(columns) < time - longest:
        segment += 1
        prompt = segment
        length = int(rng.integers(1, longest))
        columns += [(i, prompt, prompt) for i in range(length)]
        for _ in range(rng.integers(1, 4)):
            segment += 1
            columns += [(length + i, segment, prompt) for i in range(rng.integers(1, longest))]
    columns = columns[: time - 2] + [(0, 0, 0)] * max(0, time - len(columns[: time - 2]))
    positions, segments, prefixes = np.array(columns, np.int32).T
    return positions, segments, prefixes


def attention_by_loops(q, k, v, positions, segments, prefixes) -> np.ndarray:
    """The definition, in float64: each token of each head looks at what it may see."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    time, heads, head_dim = q.shape
    shared = heads // k.shape[1]
    out = np.zeros_like(q)
    for t in range(time):
        seen = [
            s
            for s in range(time)
            if segments[s] > 0 and segments[s] in (segments[t], prefixes[t]) and positions[s] <= positions[t]
        ]
        for head in range(heads):
            if seen:
                scores = k[seen, head // shared] @ q[t, head] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ v[seen, head // shared] / weights.sum()
    return out


def random_qkv(rng: np.random.Generator, batch: int, time: int):
    return tuple(jnp.asarray(rng.normal(0, 2, (batch, time, heads, 6)), jnp.float32) for heads in (4, 2, 2))


# ----------------------------------------------------------------------------------------------------------
# attention
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("block", [8, 512])
def test_packed_attention_is_the_definition(monkeypatch, backend, block):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # accelerators take all rows at once
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    rng = np.random.default_rng(0)
    layouts = [packed_layout(rng, 30) for _ in range(3)]
    qkv = random_qkv(rng, 3, 30)
    positions, segments, prefixes = (np.stack(x) for x in zip(*layouts))
    out = np.asarray(packed_attention(*qkv, positions, segments, prefixes))
    for row, layout in enumerate(layouts):
        expected = attention_by_loops(*(x[row] for x in qkv), *layout)
        real = layout[1] > 0
        np.testing.assert_allclose(out[row][real], expected[real], atol=2e-6)
    assert np.isfinite(out).all()  # padding attends to nothing: garbage, but no NaN


@pytest.mark.parametrize("time", [513, 1100])
def test_blocks_of_queries_give_the_same_values_and_gradients(monkeypatch, time):
    rng = np.random.default_rng(time)
    layout = tuple(x[None] for x in packed_layout(rng, time))
    qkv = random_qkv(rng, 1, time)
    cotangent = jnp.asarray(rng.normal(size=qkv[0].shape), jnp.float32) * (layout[1] > 0)[..., None, None]

    def both():
        out, pullback = jax.vjp(lambda *qkv: packed_attention(*qkv, *layout), *qkv)
        return out * (cotangent != 0), pullback(cotangent)

    blocks = both()
    monkeypatch.setattr(attention, "QUERY_BLOCK", time)
    whole = both()
    for a, b in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_at_once_and_row_by_row_give_the_same_gradients(monkeypatch):
    rng = np.random.default_rng(4)
    layout = tuple(np.stack(x) for x in zip(*[packed_layout(rng, 24) for _ in range(3)]))
    qkv = random_qkv(rng, 3, 24)

    def gradients():
        return jax.grad(lambda *qkv: jnp.sin(packed_attention(*qkv, *layout)).sum(), argnums=(0, 1, 2))(*qkv)

    by_row = gradients()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    at_once = gradients()
    for a, b in zip(by_row, at_once, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_cached_attention_sees_what_packed_attention_sees():
    rng = np.random.default_rng(1)
    q, k, v = random_qkv(rng, 2, 12)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    ones = np.ones_like(positions)
    packed = packed_attention(q, k, v, positions, ones, ones)
    # Only the last five tokens are new; the cache is longer than the row, and what lies beyond is garbage.
    garbage = jnp.full((2, 4, 2, 6), 1e3)
    caches = [jnp.concatenate([x, garbage], axis=1).swapaxes(1, 2) for x in (k, v)]
    cached = cached_attention(q[:, 7:], *caches, positions[:, 7:])
    np.testing.assert_allclose(cached, packed[:, 7:], atol=1e-6)


# ----------------------------------------------------------------------------------------------------------
# decoder
# ----------------------------------------------------------------------------------------------------------


@names
def test_packed_rows_equal_each_trajectory_alone(config):
    params = random_params(config)
    rng = np.random.default_rng(3)
    positions, segments, prefixes = packed_layout(rng, 40)
    tokens = rng.integers(0, 40, 40).astype(np.int32)
    row = (x[None] for x in (tokens, positions, segments, prefixes))
    packed = np.asarray(packed_logits(config, params, *row))[0]
    alone = np.zeros((segments.max(), 40), np.int32)  # a row each; what stands after it cannot matter
    for segment in range(1, segments.max() + 1):
        here = segments == segment
        prefix = prefixes[here][0]
        whole = tokens[here] if prefix == segment else np.concatenate([tokens[segments == prefix], tokens[here]])
        alone[segment - 1, : len(whole)] = whole
    expected = np.asarray(full_logits(config, params, alone))
    for index in np.flatnonzero(segments):
        np.testing.assert_allclose(packed[index], expected[segments[index] - 1, positions[index]], atol=1e-4)


def test_remat_changes_nothing():
    config = QWEN3
    params = random_params(config)
    rng = np.random.default_rng(5)
    row = tuple(x[None] for x in (rng.integers(0, 40, 24).astype(np.int32), *packed_layout(rng, 24)))

    def loss(params, remat):
        return jnp.sin(hidden_states(config, params, *row, remat=remat)).sum()

    plain = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, "none")
    for remat in ("layer", "attention"):
        recomputed = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, remat)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@names
def test_cache_in_any_pieces_equals_one_pass(config):
    params = random_params(config)
    tokens = np.random.default_rng(6).integers(0, 40, (2, 14)).astype(np.int32)
    expected = np.asarray(full_logits(config, params, tokens))
    cache = init_cache(config, 2, 16)
    grow = jax.jit(partial(extend, config))
    seen = []
    for start, stop in ((0, 6), (6, 7), (7, 7), (7, 14)):
        # Padding of the piece, and rows without new tokens, must leave no trace in the cache.
        piece = np.full((2, 8), 39, np.int32)
        piece[:, : stop - start] = tokens[:, start:stop]
        hidden, cache = grow(params, cache, piece, jnp.full((2,), stop - start))
        seen.append(np.asarray(logits(config, params, hidden))[:, : stop - start])
    np.testing.assert_allclose(np.concatenate(seen, axis=1), expected, atol=2e-5)
    assert cache.lengths.tolist() == [14, 14]


def test_position_matters_only_by_difference():
    # Rotary embedding: the same row moved by a constant gives the same result.
    params = random_params(QWEN3)
    tokens = jnp.asarray(np.random.default_rng(7).integers(0, 40, (1, 12)))
    positions, ones = jnp.arange(12)[None], jnp.ones((1, 12), jnp.int32)
    here, moved, stretched = (
        np.asarray(packed_logits(QWEN3, params, tokens, where, ones))
        for where in (positions, positions + 300, positions * 2)
    )
    np.testing.assert_allclose(moved, here, atol=3e-4)
    assert np.abs(stretched - here).max() > 0.1


@names
def test_specs_describe_the_parameters(config):
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    specs = param_specs(config)
    assert params.keys() == specs.keys()
    for name, spec in specs.items():
        assert params[name].shape == spec.shape
        assert len(spec.axes) == len(spec.shape)
    assert config.num_parameters == sum(p.size for p in params.values())
    check_params(config, params)


def test_new_weights_have_the_scale_that_their_spec_states():
    config = preset("market-tiny")
    params = init_params(config, jax.random.key(2))
    for name, spec in param_specs(config).items():
        value = np.asarray(params[name])
        if spec.init_std is None:
            assert (value == 1).all()
        else:
            assert value.std() == pytest.approx(spec.init_std, rel=0.02)


def test_a_wrong_weight_is_named():
    params = random_params(QWEN3)
    with pytest.raises(ValueError, match=r"layers\.q_proj has shape \(2, 3, 3\)"):
        check_params(QWEN3, params | {"layers.q_proj": jnp.zeros((2, 3, 3))})
    with pytest.raises(ValueError, match=r"unexpected weights: lm_head"):
        check_params(QWEN3, params | {"lm_head": jnp.zeros((16, 40))})
    with pytest.raises(ValueError, match="missing weights: norm"):
        check_params(QWEN3, {name: p for name, p in params.items() if name != "norm"})


def test_a_tied_head_is_the_embedding_also_after_an_update():
    params = random_params(QWEN3)
    tokens = jnp.asarray([[1, 2, 3]])
    moved = params | {"embed_tokens": params["embed_tokens"] + 1.0}
    ones = jnp.ones_like(tokens)
    hidden = hidden_states(QWEN3, moved, tokens, jnp.arange(3)[None], ones)
    np.testing.assert_allclose(
        full_logits(QWEN3, moved, tokens), hidden @ moved["embed_tokens"].T, atol=1e-4, rtol=1e-5
    )


def test_the_module_is_the_same_function_with_nnx_around_it():
    module = Decoder(LLAMA, random_params(LLAMA))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 9)))
    np.testing.assert_allclose(nnx.jit(module)(tokens), full_logits(LLAMA, module.params(), tokens), atol=1e-4)
    fresh = jax.eval_shape(lambda: Decoder(LLAMA, rngs=nnx.Rngs(3)).params())
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, module.params())
    gradients = nnx.jit(nnx.grad(lambda m: m(tokens).sum()))(module)
    expected = jax.jit(jax.grad(lambda p: forward(LLAMA, p, tokens).sum()))(module.params())
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients["weights"][name][...], gradient, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="params or rngs"):
        Decoder(LLAMA)
    with pytest.raises(ValueError, match="missing weights"):
        Decoder(LLAMA, {})


def test_linear_scaling_divides_positions_and_unknown_scaling_is_refused():
    scaled = replace(QWEN3, rope_scaling=LinearRopeScaling(4.0))
    np.testing.assert_allclose(rope_frequencies(scaled) * 4, rope_frequencies(QWEN3), rtol=1e-6)
    with pytest.raises(ValueError, match="not supported"):
        rope_frequencies(replace(QWEN3, rope_scaling="yarn"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "model.num_layers must be at least 1"),
        ({"num_kv_heads": 3}, "multiple of model.num_kv_heads"),
        ({"head_dim": 5}, "even"),
        ({"valid_vocab_size": 41}, "valid_vocab_size"),
        ({"hidden": 3}, "model.overrides"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        preset("market-tiny", **({"vocab_size": 40} | change))
    with pytest.raises(ValueError, match="there are market-tiny"):
        preset("market-huge")


# ----------------------------------------------------------------------------------------------------------
# logprobs
# ----------------------------------------------------------------------------------------------------------

PADDED = replace(QWEN3, valid_vocab_size=31)
PADDED_UNTIED = replace(LLAMA, valid_vocab_size=31)


def whole_logprobs(config, params, hidden, targets, temperature):
    """The definition: log-softmax over the valid vocabulary, in one piece."""
    head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]
    scores = jax.nn.log_softmax((hidden @ head)[..., : config.valid_vocab_size] / temperature, axis=-1)
    entropies = -(jnp.exp(scores) * scores).sum(-1)
    return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0], entropies


@pytest.mark.parametrize(
    ("config", "chunk_size"), [(QWEN3, 1), (LLAMA, 22), (PADDED, 7), (PADDED, 256), (PADDED_UNTIED, 7)]
)
def test_chunks_equal_one_log_softmax(config, chunk_size):
    params = random_params(config)
    rng = np.random.default_rng(8)
    hidden = jnp.asarray(rng.normal(0, 1, (2, 11, 16)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 31, (2, 11)))
    weights = jnp.asarray(rng.normal(size=(2, 2, 11)), jnp.float32)

    def loss(compute, params, hidden):
        logprobs, entropies = compute(params, hidden)
        return (weights[0] * logprobs + weights[1] * entropies).sum(), (logprobs, entropies)

    def chunked(params, hidden):
        return token_logprobs(config, params, hidden, targets, temperature=0.7, chunk_size=chunk_size)

    def whole(params, hidden):
        return whole_logprobs(config, params, hidden, targets, 0.7)

    results = [
        jax.jit(jax.value_and_grad(partial(loss, compute), argnums=(0, 1), has_aux=True))(params, hidden)
        for compute in (chunked, whole)
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.isfinite(a).all()  # -inf for padding ids must not reach a gradient as NaN
        np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-5)


def test_certain_and_impossible_tokens_have_finite_gradients():
    row = jnp.array([0.0, 200.0, -200.0, -jnp.inf])

    def both(row):
        logprobs, entropies = logprobs_of(row[None], jnp.array([1]))
        return (logprobs + entropies).sum()

    value, gradient = jax.value_and_grad(both)(row)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros(4))


def test_entropy_of_equal_choices_and_per_row_temperatures():
    flat = jnp.zeros((2, 8))
    logprobs, entropies = logprobs_of(flat, jnp.array([0, 5]), jnp.array([1.0, 0.1]))
    np.testing.assert_allclose(logprobs, -np.log(8), rtol=1e-6)
    np.testing.assert_allclose(entropies, np.log(8), rtol=1e-6)
    slope = jnp.asarray([[0.0, 1.0], [0.0, 1.0]])
    logprobs, _ = logprobs_of(slope, jnp.array([1, 1]), jnp.array([1.0, 0.5]))
    np.testing.assert_allclose(logprobs, [-np.log1p(np.exp(-1)), -np.log1p(np.exp(-2))], rtol=1e-6)


def test_bfloat16_weights_still_give_float32_logprobs():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_params(QWEN3))
    hidden = jnp.ones((1, 3, 16), jnp.bfloat16)
    logprobs, entropies = token_logprobs(QWEN3, params, hidden, jnp.array([[1, 2, 3]]))
    assert logprobs.dtype == entropies.dtype == jnp.float32
    every, _ = token_logprobs(QWEN3, params, jnp.ones((1, 40, 16), jnp.bfloat16), jnp.arange(40)[None])
    assert np.exp(every).sum() == pytest.approx(1.0, abs=1e-5)


def test_the_tpu_kernel_in_the_interpreter_agrees_with_ours():
    """Values and gradients of packed rows without shared prompts; float32, so what differs is the order of sums."""
    rng = np.random.default_rng(11)
    time, heads, kv_heads, head_dim = 256, 4, 2, 128
    q = jnp.asarray(rng.normal(size=(1, time, heads, head_dim)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(1, time, kv_heads, head_dim)), jnp.float32) for _ in range(2))
    lengths = (100, 90, 40)  # and 26 of padding
    segments = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(26)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, 26)]).astype(np.int32)
    live = jnp.asarray(segments > 0)[None, :, None, None]
    ids = segments[None]

    def ours(q, k, v):
        return jnp.where(live, packed_attention(q, k, v, positions[None], ids, ids), 0.0)

    def kernel(q, k, v):
        return jnp.where(live, _splash(q, k, v, jnp.asarray(ids), interpret=True), 0.0)

    np.testing.assert_allclose(kernel(q, k, v), ours(q, k, v), atol=2e-5)
    weights = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    gradients = [jax.grad(lambda *x, f=f: jnp.sum(weights * f(*x)), argnums=(0, 1, 2))(q, k, v) for f in (ours, kernel)]
    for expected, found in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
