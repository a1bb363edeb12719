"""The TPU kernels compiled ahead of time for real topologies, by libtpu on a machine without a TPU; nothing is run.

What is looked at is the optimized program of a decode loop or a chunk: that no array as large as the cache is made in
it (neither a copy nor a gather nor another layout), that the cache is donated, and that memory beside it is small.
"""

import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orchestra_jax.models.decode_attention import prefill_attention, sharded_attention, sharded_write, write_kv

pytest.importorskip("libtpu", reason="ahead-of-time compilation for TPU needs the libtpu wheel: pip install 'jax[tpu]'")

# Operations that make no array of their own. The kernels return the cache that they were given.
NO_COPY = {"parameter", "get-tuple-element", "tuple", "bitcast", "while"}
TPU_KERNEL = 'custom_call_target="tpu_custom_call"'
STEPS = 4


@pytest.fixture(autouse=True, scope="module")
def several_libtpu():
    """Several processes may load libtpu, and none asks the cloud what machine this is."""
    settings = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def mesh_of(topology: str, data: int, tensor: int) -> Mesh:
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[: data * tensor]
    return Mesh(np.array(devices).reshape(data, tensor), ("data", "tensor"))


def scatter(keys, values, k, v, slots, starts, counts):
    """What XLA would do by itself."""
    targets = jnp.where(jnp.arange(k.shape[1]) < counts[:, None], starts[:, None] + jnp.arange(k.shape[1]), 1 << 30)
    put = [x.at[slots[:, None], :, targets].set(new, mode="drop") for x, new in ((keys, k), (values, v))]
    return (*put, None, None)


def loop_of(attend, write):
    """Several steps of a layer: tokens are written, attended to, and make the next ones."""

    def run(cache, q, slots, starts, counts):
        def step(_, carry):
            (keys, values, *scales), q, starts = carry
            kv_heads = keys.shape[1]
            new = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[3])[:, :, :, 0]
            named = dict(zip(("key_scales", "value_scales"), scales))
            written = [x for x in write(keys, values, new, new, slots, starts, counts, **named) if x is not None]
            named = dict(zip(("key_scales", "value_scales"), written[2:]))
            return tuple(written), q + attend(q, *written[:2], slots, starts, counts, **named), starts + counts

        return jax.lax.fori_loop(0, STEPS, step, (cache, q, starts))

    return run


def compiled(
    mesh,
    *,
    rows,
    time,
    heads,
    kv_heads,
    head_dim,
    capacity,
    slots,
    dtype=jnp.bfloat16,
    cache_dtype=None,
    write=None,
):
    """The program, by `write` or else `write_kv`, and the bytes of the cache on each device."""

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    cache_dtype = cache_dtype or dtype
    cache = [array((slots, kv_heads, capacity, head_dim), cache_dtype, "data", "tensor")] * 2
    if cache_dtype == jnp.int8:
        cache += [array((slots, kv_heads, capacity), jnp.float32, "data", "tensor")] * 2
    q = array((rows, time, heads, head_dim), dtype, "data", None, "tensor")
    numbers = [array((rows,), jnp.int32, "data")] * 3
    attend = partial(prefill_attention, implementation="pallas_tpu")
    write = write or partial(write_kv, implementation="pallas_tpu")
    if mesh.size > 1:
        axes = {"mesh": mesh, "data": "data", "tensor": "tensor"}
        attend, write = sharded_attention(attend, **axes), sharded_write(write, **axes)
    program = jax.jit(loop_of(attend, write), donate_argnums=0).lower(tuple(cache), q, *numbers).compile()
    return program, sum(x.dtype.itemsize * int(np.prod(x.shape)) for x in cache) // mesh.size


def made(program, slots, kv_heads, capacity, head_dim) -> list[str]:
    """Operations of the optimized program that make as many numbers as keys have, or an array of the scales' shape."""
    found = []
    for line in program.as_text().splitlines():
        operation = re.match(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if operation is None or operation[2] in NO_COPY or TPU_KERNEL in line:
            continue
        shape = tuple(int(size) for size in operation[1].split(",") if size)
        if np.prod(shape) >= slots * kv_heads * capacity * head_dim or shape == (slots, kv_heads, capacity):
            found.append(line.strip()[:160])
    return found


QWEN3_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
QWEN2_05B = {"heads": 14, "kv_heads": 2, "head_dim": 64}
SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_dim": 64}


@pytest.mark.parametrize(
    ("topology", "model", "rows", "time", "dtype", "cache_dtype"),
    [
        ("v5e:2x2", QWEN3_8B, 64, 1, "bfloat16", "bfloat16"),
        ("v5p:2x2x1", QWEN3_8B, 64, 1, "bfloat16", "bfloat16"),
        ("v6e:2x2", QWEN3_8B, 64, 1, "bfloat16", "int8"),
        ("v5e:2x2", QWEN2_05B, 48, 1, "bfloat16", "int8"),
        ("v5e:2x2", SMOLLM2, 64, 1, "bfloat16", "bfloat16"),
        ("v5e:2x2", SMOLLM2, 64, 1, "float32", "float32"),
        ("v5e:2x2", QWEN3_8B, 4, 512, "bfloat16", "bfloat16"),
        ("v6e:2x2", QWEN3_8B, 4, 512, "bfloat16", "int8"),
        ("v5p:2x2x1", SMOLLM2, 4, 300, "bfloat16", "bfloat16"),
    ],
    ids=lambda value: f"{value['heads']}heads" if isinstance(value, dict) else str(value),
)
def test_no_copy_of_the_cache(topology, model, rows, time, dtype, cache_dtype):
    """A chunk may hold its queries some times over. A decode step needs next to nothing."""
    shape = {"rows": rows, "time": time, "dtype": jnp.dtype(dtype), "cache_dtype": jnp.dtype(cache_dtype), **model}
    program, cache_bytes = compiled(mesh_of(topology, 1, 1), **shape, capacity=4096, slots=64)
    assert program.as_text().count(TPU_KERNEL) == 2
    assert made(program, 64, model["kv_heads"], 4096, model["head_dim"]) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    queries = rows * time * model["heads"] * 128 * 4
    assert memory.temp_size_in_bytes < (1 << 20) + 4 * queries


def test_the_check_sees_the_copies_that_scatter_makes():
    shape = {"rows": 64, "time": 1, **QWEN3_8B, "capacity": 1024, "slots": 64}
    program, cache_bytes = compiled(mesh_of("v5e:2x2", 1, 1), **shape, write=scatter)
    assert any(" copy(" in line for line in made(program, 64, 8, 1024, 128))
    assert program.memory_analysis().temp_size_in_bytes > cache_bytes // 2


def test_a_long_context_fits_beside_the_cache():
    """24576 positions, chunks of 512: all scores of one row's 32 heads would be 1.6 GB."""
    shape = {"rows": 2, "time": 512, **QWEN3_8B, "capacity": 24576, "slots": 4}
    program, _ = compiled(mesh_of("v5e:2x2", 1, 1), **shape)
    assert program.memory_analysis().temp_size_in_bytes < 64 << 20


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, jnp.int8], ids=["bf16", "int8"])
def test_8b_over_a_mesh(cache_dtype):
    """Slots over `data`, the 8 kv heads over `tensor`: each device works on its own part and speaks with none."""
    shape = {"rows": 64, "time": 1, **QWEN3_8B, "capacity": 4096, "slots": 64, "cache_dtype": cache_dtype}
    program, cache_bytes = compiled(mesh_of("v5e:4x4", 2, 8), **shape)
    assert made(program, 32, 1, 4096, 128) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < 1 << 20
    text = program.as_text()
    assert text.count(TPU_KERNEL) == 2
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", text)
