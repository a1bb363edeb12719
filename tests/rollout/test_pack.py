"""Packing and the train step: sharing prompts, splitting and padding change neither logprobs nor gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import forward, init_params
from orchestra_jax.rollout.ledger import Trajectory
from orchestra_jax.rollout.pack import TrainSequence, pack, pad_rows
from orchestra_jax.train.step import (
    StepSettings,
    _train_step,
    batch_loss,
    init_train_state,
    make_optimizer,
    train_step,
)

CONFIG = preset("market-tiny", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8)
SETTINGS = StepSettings(CONFIG)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def sequences(params):
    """Two groups of three trajectories; two turns each, with an observation between."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(2):
        prompt = rng.integers(0, 64, 9).tolist()
        for _ in range(3):
            t = Trajectory()
            t.append_context(prompt)
            for _ in range(2):
                n = int(rng.integers(1, 5))
                t.append_sampled(rng.integers(0, 64, n).tolist(), (-4.2 + rng.normal(0, 0.2, n)).tolist(), 0)
                t.append_context(rng.integers(0, 64, 3).tolist())
            out.append(TrainSequence(t, float(rng.normal()), 0.05))
    return out


def expected_logprobs(params, trajectory):
    rows = jax.nn.log_softmax(forward(CONFIG, params, jnp.asarray([trajectory.tokens]))[0])
    return [float(rows[i - 1, t]) for i, (t, m) in enumerate(zip(trajectory.tokens, trajectory.mask)) if m]


@pytest.mark.parametrize("row_tokens", [32, 64, 128])
def test_logprobs_are_those_of_each_trajectory_alone(params, sequences, row_tokens):
    batch = pack(sequences, row_tokens, 64)
    _, metrics = batch_loss(SETTINGS, params, batch)
    got = sorted(np.asarray(metrics["logprobs"])[batch.weights > 0].tolist())
    expected = sorted(x for s in sequences for x in expected_logprobs(params, s.trajectory))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_gradient_does_not_depend_on_packing_splitting_or_padding(params, sequences):
    grad = jax.grad(lambda p, b: batch_loss(SETTINGS, p, b)[0])
    whole = grad(params, pack(sequences, 128, 64))
    alone = [grad(params, pack([s], 40, 24)) for s in sequences]
    added = jax.tree.map(lambda *parts: sum(parts), *alone)
    padded = grad(params, pad_rows(pack(sequences, 200, 99), 5))
    for name in whole:
        np.testing.assert_allclose(whole[name], added[name], atol=2e-6)
        np.testing.assert_allclose(whole[name], padded[name], atol=2e-6)


def test_gradient_by_finite_differences(params, sequences):
    settings = StepSettings(CONFIG, entropy_coef=0.1, kl_coef=0.2)
    reference = init_params(CONFIG, jax.random.key(1))
    batch = pack(sequences, 128, 64)
    loss = jax.jit(lambda p: batch_loss(settings, p, batch, reference)[0])
    gradient = jax.grad(loss)(params)
    direction = jax.tree.map(lambda g: g / jnp.sqrt(sum(jnp.vdot(x, x) for x in gradient.values())), gradient)
    step = 1e-3
    up = loss(jax.tree.map(lambda p, d: p + step * d, params, direction))
    down = loss(jax.tree.map(lambda p, d: p - step * d, params, direction))
    slope = sum(float(jnp.vdot(gradient[k], direction[k])) for k in gradient)
    # float32 losses of order 1, differences of 1e-2: rounding and the kinks of the clip stay below 2%.
    assert float(up - down) / (2 * step) == pytest.approx(slope, rel=2e-2)


def test_empty_batch_changes_nothing_and_is_counted(params, sequences):
    optimizer = make_optimizer(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    step = partial(train_step, SETTINGS, optimizer, micro_batch_rows=1, max_micro_batches=4)
    state, metrics, _ = step(init_train_state(params, optimizer), pack(sequences, 64, 40))
    assert metrics["skipped"] == 0
    assert int(state.num_updates) == 1
    before = jax.device_get(state)
    state, metrics, _ = step(state, pack([], 64, 40))
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_batches_of_any_size_compile_once(params, sequences):
    optimizer = make_optimizer(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    state = init_train_state(params, optimizer)
    sizes = set()
    for count in (6, 1, 3, 5):
        batch = pack(sequences[:count], 64, 40)
        state, _, _ = train_step(SETTINGS, optimizer, state, batch, micro_batch_rows=1, max_micro_batches=6)
        sizes.add(_train_step._cache_size())
    assert len(sizes) == 1


def test_trajectory_that_does_not_fit_is_an_error(sequences):
    with pytest.raises(ValueError, match=r"train\.row_tokens"):
        pack(sequences, 10, 10)


def test_ledger_keeps_its_lists_in_step():
    t = Trajectory()
    t.append_context([1, 2])
    t.append_sampled([5, 6], [-1.0, -2.0], 3)
    t.append_context([2])  # an end token appended by the harness, equal to the padding id: not trained
    assert t.mask == [0, 0, 1, 1, 0]
    assert t.prompt_length == 2
    assert len(t.tokens) == len(t.mask) == len(t.logprobs) == len(t.versions)
    with pytest.raises(ValueError, match="1 sampled tokens came with 2 logprobs"):
        t.append_sampled([1], [0.0, 0.0], 0)
