"""The sampler's attention: every implementation against the formula in NumPy, and the int8 cache against bounds."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from orchestra_jax.models import decode_attention as module
from orchestra_jax.models.config import preset
from orchestra_jax.models.decode_attention import decode_attention, prefill_attention, quantize_kv, write_kv
from orchestra_jax.models.decoder import extend, forward, init_cache, init_params, logits
from orchestra_jax.models.kernels.tpu_cache_attention import cache_attention, plan_work

implementations = pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])


def attended(q, keys, values, slots, starts, counts):
    """The formula, token by token, in float64: q [rows, time, heads, head_dim]; 0 where there is no token."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    out = np.zeros(q.shape)
    group = q.shape[2] // keys.shape[1]
    for row, (slot, start, count) in enumerate(zip(slots, starts, counts)):
        if 0 <= slot < keys.shape[0]:
            for token, head in np.ndindex(count, q.shape[2]):
                k, v = keys[slot, head // group, : start + token + 1], values[slot, head // group, : start + token + 1]
                scores = k @ q[row, token, head] / np.sqrt(q.shape[3])
                weights = np.exp(scores - scores.max())
                out[row, token, head] = weights @ v / weights.sum()
    return out


def ragged(seed, *, rows, time, heads, kv_heads, head_dim, capacity, slots, dtype=jnp.float32):
    """q, keys, values, slots, starts, counts: shuffled slots, one row of nobody's and one with nothing to do.

    Whatever no row may look at is NaN, so that looking at it shows.
    """
    rng = np.random.default_rng(seed)
    shapes = ((rows, time, heads, head_dim), *((slots, kv_heads, capacity, head_dim),) * 2)
    q, keys, values = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    chosen = rng.permutation(slots)[:rows].astype(np.int32)
    counts = rng.integers(1, time + 1, rows).astype(np.int32)
    starts = rng.integers(0, capacity - time + 1, rows).astype(np.int32)
    starts[0], counts[0] = capacity - time, time  # full to the last position
    counts[1] = 0
    chosen[2] = slots
    starts[3] = 0
    seen = np.zeros((slots, 1, capacity, 1), bool)
    for slot, start, count in zip(chosen, starts, counts):
        if slot < slots and count:
            seen[slot, 0, : start + count] = True
    keys, values = (np.where(seen, x, np.nan).astype(dtype) for x in (keys, values))
    return q, keys, values, chosen, starts, counts


@implementations
@pytest.mark.parametrize(
    ("ratio", "head_dim", "capacity", "dtype"),
    [
        # head_dim 64 lies across the lanes of a TPU, 128 along them. Capacities: one block, several, part of one more.
        pytest.param(1, 64, 200, "float32", id="ratio1-dim64-one_block"),
        pytest.param(2, 128, 2300, "float32", id="ratio2-dim128-part_of_a_block"),
        pytest.param(3, 64, 1500, "float32", id="ratio3-dim64-part_of_a_block"),
        pytest.param(4, 128, 1024, "float32", id="ratio4-dim128-whole_blocks"),
        pytest.param(3, 64, 1500, "bfloat16", id="ratio3-dim64-bf16"),
        pytest.param(4, 128, 700, "bfloat16", id="ratio4-dim128-bf16"),
    ],
)
def test_decode_is_the_formula(implementation, ratio, head_dim, capacity, dtype):
    """bfloat16: the softmax weights and the result are rounded to 8 bits, 2**-9 each of values up to about 4."""
    shape = {"heads": 2 * ratio, "kv_heads": 2, "head_dim": head_dim, "capacity": capacity, "dtype": jnp.dtype(dtype)}
    q, keys, values, slots, starts, counts = ragged(ratio, rows=6, time=1, slots=8, **shape)
    lengths = np.where(counts > 0, starts + 1, 0)
    got = jax.jit(partial(decode_attention, implementation=implementation))(q[:, 0], keys, values, slots, lengths)
    assert got.dtype == dtype
    want = attended(q, keys, values, slots, starts, counts)[:, 0]
    tolerance = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance, rtol=0)
    assert not np.asarray(got[1:3]).any()  # rows with nothing to do, or of nobody


@implementations
@pytest.mark.parametrize(
    ("time", "heads", "kv_heads", "head_dim", "capacity"),
    [(7, 6, 2, 64, 200), (300, 4, 2, 128, 1300), (600, 3, 1, 64, 1100)],
    ids=["one_tile", "tiles_and_blocks", "positions_last"],
)
def test_chunk_is_the_formula(implementation, time, heads, kv_heads, head_dim, capacity):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}
    case = ragged(time, rows=4, time=time, slots=5, **shape)
    got = jax.jit(partial(prefill_attention, implementation=implementation))(*case)
    np.testing.assert_allclose(got, attended(*case), atol=4e-6, rtol=0)


def test_kernel_reads_nothing_unwritten_and_has_no_races():
    """By the interpreter that fills memory with NaN, raises beyond bounds, and follows what is in flight."""
    for time, head_dim, capacity in ((1, 128, 300), (20, 64, 256)):
        shape = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "capacity": capacity}
        case = ragged(time, rows=4, time=time, slots=5, **shape)
        inside = (*case[:3], np.minimum(case[3], 4), case[4], np.where(case[3] < 5, case[5], 0))
        params = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="uninitialized")
        got = cache_attention(*inside, interpret=params)
        np.testing.assert_allclose(got, attended(*case), atol=4e-6, rtol=0)


@pytest.mark.parametrize("tile", [1, 4])
def test_plan_names_every_filled_block_once_and_no_other(tile):
    rng = np.random.default_rng(tile)
    rows, tiles, block, capacity = 5, 1 if tile == 1 else 3, 8, 50
    plan = jax.jit(partial(plan_work, tile=tile, tiles=tiles, block=block, capacity=capacity))
    for _ in range(20):
        counts = rng.integers(0, tile * tiles + 1, rows)
        starts = rng.integers(0, capacity - tile * tiles + 1, rows)
        slots = rng.permutation(rows)
        work = jax.tree.map(np.asarray, plan(*(x.astype(np.int32) for x in (slots, starts, counts))))
        got = []
        for item in range(int(work.num_items)):
            number = int(work.item_tiles[item])
            got.append((int(work.slots[number]), number % tiles, item - int(work.first_items[number])))
        want = []
        for row in range(rows):
            for part in range(tiles):
                end = starts[row] + min(counts[row], (part + 1) * tile)
                blocks = -(-end // block) if counts[row] > part * tile else 0
                want += [(slots[row], part, number) for number in range(blocks)]
        assert got == want or (not want and len(got) == 1)  # a grid has at least one step


# --------------------------------------------------------------------------------------------------------------
# writing
# --------------------------------------------------------------------------------------------------------------


@implementations
@pytest.mark.parametrize(
    ("time", "head_dim", "capacity", "dtype"),
    [
        (1, 128, 300, jnp.bfloat16),
        (1, 64, 256, jnp.float32),
        (1, 128, 300, jnp.int8),
        (20, 64, 300, jnp.int8),
        (300, 128, 700, jnp.bfloat16),
    ],
)
def test_write_enters_the_new_and_leaves_the_rest(implementation, time, head_dim, capacity, dtype):
    case = ragged(time, rows=4, time=time, heads=2, kv_heads=2, head_dim=head_dim, capacity=capacity, slots=5)
    slots, starts, counts = case[3:]
    rng = np.random.default_rng(0)
    cache = [rng.integers(-99, 99, (5, 2, capacity, head_dim)).astype(dtype) for _ in range(2)]
    scales = [rng.random((5, 2, capacity)).astype(np.float32) for _ in range(2 if dtype == jnp.int8 else 0)]
    k, v = (rng.normal(size=(4, time, 2, head_dim)).astype(jnp.bfloat16) for _ in range(2))

    write = jax.jit(partial(write_kv, implementation=implementation))
    named = dict(zip(("key_scales", "value_scales"), scales))
    got = [x for x in write(*cache, k, v, slots, starts, counts, **named) if x is not None]

    news = [k.astype(dtype), v.astype(dtype)]
    if scales:
        (k, k_scale), (v, v_scale) = jax.jit(quantize_kv)(k), jax.jit(quantize_kv)(v)
        news = [k, v, k_scale, v_scale]
    assert len(got) == len(news)
    for before, new, after in zip([*cache, *scales], news, got):
        want = np.array(before)
        for row, (slot, start, count) in enumerate(zip(slots, starts, counts)):
            if slot < 5:
                want[slot, :, start : start + count] = np.asarray(new[row, :count]).swapaxes(0, 1)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(np.asarray(after), want)


# --------------------------------------------------------------------------------------------------------------
# int8
# --------------------------------------------------------------------------------------------------------------


def test_quantized_is_within_half_a_step():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 2, 50, 64)) * np.exp(rng.normal(size=(3, 2, 50, 1)) * 3), jnp.float32)
    x = x.at[0, 0, 0].set(0.0)
    whole, scale = quantize_kv(x)
    assert whole.dtype == jnp.int8
    assert scale.shape == x.shape[:-1]
    error = np.abs(np.asarray(whole, np.float64) * np.asarray(scale, np.float64)[..., None] - np.asarray(x, np.float64))
    bound = np.abs(np.asarray(x)).max(axis=-1, keepdims=True) / 254
    assert (error <= bound * (1 + 1e-5)).all()
    assert not np.asarray(whole[0, 0, 0]).any()


def test_bfloat16_is_quantized_as_it_is():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    for a, b in zip(quantize_kv(x), quantize_kv(x.astype(jnp.float32))):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@implementations
@pytest.mark.parametrize(("time", "head_dim", "capacity"), [(1, 64, 1500), (1, 128, 700), (40, 128, 700)])
def test_int8_cache(implementation, time, head_dim, capacity):
    """It is the formula on what the cache says, exactly; and that is within the bounds of rounding of the truth.

    With every number of keys and values off by at most m / 254, m the largest over its head_dim, scores are off by
    e = |q|_1 max(m) / (254 sqrt(D)) at most, so each weight by a factor within exp(+-2e), and the result by
    (exp(2e) - 1) max|v| through the weights and max(m) / 254 through the values.
    """
    case = ragged(time, rows=5, time=time, heads=6, kv_heads=2, head_dim=head_dim, capacity=capacity, slots=6)
    q, keys, values, slots, starts, counts = case
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    (int_keys, key_scales), (int_values, value_scales) = jax.tree.map(np.asarray, [*map(quantize_kv, (keys, values))])
    seen = ~np.isnan(case[1][..., 0])
    named = {"key_scales": np.where(seen, key_scales, np.nan), "value_scales": np.where(seen, value_scales, np.nan)}
    attend = partial(prefill_attention, implementation=implementation)
    got = np.asarray(jax.jit(attend)(q, int_keys, int_values, slots, starts, counts, **named), np.float64)

    rounded = (int_keys * key_scales[..., None], int_values * value_scales[..., None])
    np.testing.assert_allclose(got, attended(q, *rounded, slots, starts, counts), atol=4e-6)
    score_error = np.abs(q).sum(axis=-1).max() * np.abs(keys).max() / 254 / head_dim**0.5
    largest = np.abs(values).max()
    bound = np.expm1(2 * score_error) * largest + largest / 254
    error = np.abs(got - attended(q, keys, values, slots, starts, counts)).max()
    assert 1e-4 < error < bound


def int8_logprobs(config, params, tokens, *, chunk):
    """Log-probabilities [time - 1] of the next tokens, by an int8 cache that is filled `chunk` tokens at a time."""

    @jax.jit
    def step(cache, part):
        hidden, cache = extend(config, params, cache, part, jnp.asarray([chunk]))
        return cache, jax.nn.log_softmax(logits(config, params, hidden)[0])

    parts = tokens.reshape(-1, 1, chunk)
    _, every = jax.jit(lambda: jax.lax.scan(step, init_cache(config, 1, tokens.shape[1], jnp.int8), parts))()
    return next_logprobs(every.reshape(tokens.shape[1], -1), tokens)


def next_logprobs(every, tokens):
    """What `every` [time, vocab] has for the token that follows each but the last, in float64."""
    return np.asarray(every, np.float64)[np.arange(tokens.shape[1] - 1), tokens[0, 1:]]


def test_int8_logprobs_of_prefill_and_decode():
    """Prefill and decode read the same rounded numbers, so they agree to float32's own rounding, not to int8's.

    Against full precision: a number's rounding error has standard deviation m / (254 sqrt(3)), and m of 32 normal
    numbers is 2.1 standard deviations of theirs: 0.5% relative. Weights change by as much as scores do (0.5% of a
    score of about 1), values by 0.5% at most, so each layer's attention by about 0.7%, and L independent layers' logits
    by at most 0.7% sqrt(L) of their own spread. A log-probability is a difference of two, times sqrt(2), and the
    largest of n = 60 is within 4 deviations.
    """
    config = preset(
        "market-tiny", vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, head_dim=32
    )
    params = init_params(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 60))
    true_logits = jax.jit(partial(forward, config))(params, tokens)[0]
    full = next_logprobs(jax.nn.log_softmax(true_logits), tokens)

    prefill, decode = (int8_logprobs(config, params, tokens, chunk=chunk) for chunk in (60, 1))
    np.testing.assert_allclose(prefill, decode, atol=2e-5)
    largest = np.abs(prefill - full).max()
    bound = 4 * 2**0.5 * 0.007 * 3**0.5 * float(true_logits.std())
    assert 2e-5 < largest < bound


# --------------------------------------------------------------------------------------------------------------
# choice, errors, memory, meshes
# --------------------------------------------------------------------------------------------------------------


def test_default_is_the_platforms(monkeypatch):
    q, keys = jnp.zeros((2, 4, 64), jnp.bfloat16), jnp.zeros((2, 2, 16, 64), jnp.bfloat16)
    for backend, dtype, time, want in [
        ("cpu", jnp.bfloat16, 1, "xla"),
        ("tpu", jnp.bfloat16, 1, "pallas_tpu"),
        ("tpu", jnp.float32, 512, "pallas_tpu"),
        ("gpu", jnp.bfloat16, 1, "cudnn"),
        ("gpu", jnp.float32, 1, "xla"),
        ("gpu", jnp.bfloat16, 512, "xla"),
    ]:
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert module._default(q.astype(dtype), keys.astype(dtype), time=time) == want
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert module._default(q, keys.astype(jnp.int8), time=1) == "xla"


def test_cudnn_gets_each_slots_query(monkeypatch):
    """What is handed to cuDNN, and what is made of its answer; cuDNN itself is played by the formula."""

    def played(q, keys, values, *, q_seqlen, kv_seqlen, scale, mask_type, qkv_layout):
        assert q.shape == (8, 6, 1, 64)
        assert (qkv_layout, mask_type.name, scale) == ("BNTH", "PADDING", 64**-0.5)
        assert (np.asarray(q_seqlen) == 1).all()
        every = np.arange(8)
        return jnp.asarray(attended(q.swapaxes(1, 2), keys, values, every, kv_seqlen - 1, q_seqlen)).swapaxes(1, 2)

    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.dot_product_attention", played)
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64, "capacity": 40, "dtype": jnp.bfloat16}
    q, keys, values, slots, starts, counts = ragged(0, rows=6, time=1, slots=8, **shape)
    lengths = np.where(counts > 0, starts + 1, 0)
    got = decode_attention(q[:, 0], keys, values, slots, lengths, implementation="cudnn")
    want = attended(q, keys, values, slots, starts, counts)[:, 0]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-6)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        decode_attention(
            *(x.astype(jnp.float32) for x in (q[:, 0], keys, values)), slots, lengths, implementation="cudnn"
        )
    with pytest.raises(ValueError, match="from a chunk"):
        prefill_attention(q, keys, values, slots, starts, counts, implementation="cudnn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": jnp.zeros((4, 2, 16, 32))}, "head_dim is 64"),
        ({"keys": jnp.zeros((4, 3, 16, 64)), "values": jnp.zeros((4, 3, 16, 64))}, "4 heads cannot share 3"),
        ({"keys": jnp.zeros((4, 2, 16, 64), jnp.bfloat16)}, "does not go with queries of float32"),
        (
            {"keys": jnp.zeros((4, 2, 16, 64), jnp.int8), "values": jnp.zeros((4, 2, 16, 64), jnp.int8)},
            "needs key_scales",
        ),
        ({"value_scales": jnp.zeros((4, 2, 16))}, "scales are for an int8 cache"),
        ({"slots": jnp.zeros(3, jnp.int32)}, r"slots must be \[2\]"),
    ],
)
def test_arrays_that_do_not_fit(change, message):
    arrays = {
        "q": jnp.zeros((2, 4, 64)),
        "keys": jnp.zeros((4, 2, 16, 64)),
        "values": jnp.zeros((4, 2, 16, 64)),
        "slots": jnp.zeros(2, jnp.int32),
        "lengths": jnp.ones(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**(arrays | change))


def test_a_long_context_needs_no_long_scores():
    """512 tokens of 8 heads against 24576 positions: all scores would be 384 MiB."""
    heads, time, capacity = 8, 512, 24576
    f32, i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = f32((2, 2, capacity, 64))
    compiled = jax.jit(prefill_attention).lower(f32((1, time, heads, 64)), cache, cache, i32, i32, i32).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * heads * time * module.XLA_BLOCK * 4


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from orchestra_jax.models.decode_attention import *
rng = np.random.default_rng(0)
mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
q, k, v = (jnp.asarray(rng.normal(size=(4, 3, heads, 64)), jnp.float32) for heads in (4, 2, 2))
cache = [jnp.asarray(rng.normal(size=(6, 2, 40, 64)), jnp.float32) for _ in range(2)]
quantized = [quantize_kv(x) for x in cache]
slots, starts, counts = jnp.asarray([2, 6, 3, 5]), jnp.asarray([5, 6, 30, 0]), jnp.asarray([3, 3, 2, 3])
names = {"key_scales": quantized[0][1], "value_scales": quantized[1][1]}
for implementation, keys, values, scales in (
    ("xla", *cache, {}), ("pallas_interpret", quantized[0][0], quantized[1][0], names)
):
    attend = partial(prefill_attention, implementation=implementation)
    write = partial(write_kv, implementation=implementation)
    def run(attend, write):
        written = write(keys, values, k, v, slots, starts, counts, **scales)
        named = dict(zip(scales, written[2:]))
        return written, attend(q, *written[:2], slots, starts, counts, **named)
    want = jax.jit(lambda: run(attend, write))()
    axes = {"mesh": mesh, "data": "data", "tensor": "tensor"}
    got = jax.jit(lambda: run(sharded_attention(attend, **axes), sharded_write(write, **axes)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
print("equal")
"""


def test_shards_of_a_mesh_together_are_the_whole():
    """On four devices: rows 0 and 1 name slots of the first half, 2 and 3 of the second, one of them nobody's."""
    root = Path(__file__).parents[2]
    flags = "--xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", ON_A_MESH], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
