"""FLOPs against formulas by hand, on programs with everything that the compiler's own count gets wrong."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import hidden_states, init_params, param_specs
from orchestra_jax.plan.flops import _attention, count_flops


def flops_of(function, *shapes, **options):
    return count_flops(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)), **options)


def test_a_product_counts_two_per_multiply():
    assert flops_of(jnp.dot, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 3, 5), (4, 5, 7)) == 4 * 2 * 3 * 5 * 7


def test_bodies_of_loops_count_as_often_as_they_run():
    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    assert flops_of(scanned, (3, 5), (6, 5, 5)) == 6 * 2 * 3 * 5 * 5

    def looped(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    assert flops_of(looped, (3, 5), (5, 5), while_trips=4) == 4 * 2 * 3 * 5 * 5


def test_the_dearer_branch_counts():
    def branches(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)

    assert flops_of(branches, (3, 5), (5, 5)) == 2 * 3 * 5 * 5


def test_rematerialisation_is_counted_as_work():
    def loss(x, w):
        return jax.checkpoint(lambda x: jnp.sin(x @ w))(x).sum()

    forward = 2 * 3 * 5 * 5
    # forward, again for the backward pass, and the gradients of both operands
    assert flops_of(jax.grad(loss, argnums=(0, 1)), (3, 5), (5, 5)) == 4 * forward


def test_training_a_decoder_is_six_per_parameter_and_token_and_attention():
    config = preset("market-tiny", num_layers=3)
    rows, time = 2, 64
    ids = np.ones((rows, time), np.int32)
    positions = np.broadcast_to(np.arange(time, dtype=np.int32), ids.shape)

    def loss(params):
        return hidden_states(config, params, ids, positions, ids).sum()

    counted = count_flops(jax.make_jaxpr(jax.grad(loss))(init_params(config, jax.random.key(0))))
    specs = param_specs(config)
    matrices = sum(int(np.prod(s.shape)) for n, s in specs.items() if n.startswith("layers.") and len(s.shape) > 2)
    tokens = rows * time
    # Ours on CPU computes whole squares of scores, and computes them again in the backward pass: 2 + 2 + 4 products.
    attention = 4 * 2 * 2 * rows * time**2 * config.num_heads * config.head_dim * config.num_layers
    # The first layer's input has no gradient to give on; nothing else may differ.
    assert counted == pytest.approx(6 * matrices * tokens + attention, rel=0.02)


def test_kernels_of_attention_count_by_formula_and_unknown_ones_are_refused():
    def kernel(name):
        aval = SimpleNamespace(shape=(8, 256, 64), ndim=3, dtype=np.dtype(np.float32))
        variable = SimpleNamespace(aval=aval)
        return SimpleNamespace(params={"name": name}, invars=[variable, variable, variable])

    one = 2 * 8 * 256 * 256 * 64 / 2
    assert _attention(kernel("splash_mha_fwd")) == 2 * one
    assert _attention(kernel("splash_mha_dkv_fused")) == 5 * one
    with pytest.raises(ValueError, match="mystery"):
        _attention(kernel("mystery"))
