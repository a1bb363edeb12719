"""The train step: what is learned from a batch depends neither on how it is packed, nor split, nor padded."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import forward, param_specs
from orchestra_jax.rl import policy_loss
from orchestra_jax.rollout.ledger import Trajectory
from orchestra_jax.rollout.pack import PackedBatch, TrainSequence, pack, pad_rows
from orchestra_jax.train.step import (
    StepSettings,
    TrainState,
    _train_step,
    batch_loss,
    init_train_state,
    make_optimizer,
    train_step,
)

VOCAB = 48
# The last 5 rows of the embedding are padding of the vocabulary, as in checkpoints.
CONFIG = preset(
    "market-tiny",
    vocab_size=VOCAB + 5,
    valid_vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    head_dim=4,
)
SETTINGS = StepSettings(CONFIG, entropy_coef=0.05, kl_coef=0.1, temperature=0.8)
ROW_TOKENS, ROW_TARGETS, ROWS = 48, 24, 16
LEARNING_RATE = 0.1
SGD = optax.sgd(LEARNING_RATE)  # parameters move by the gradient itself
ADAM = make_optimizer(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)


def random_params(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray((spec.init_std is None) + rng.normal(0, spec.init_std or 0.1, spec.shape), jnp.float32)
        for name, spec in param_specs(CONFIG).items()
    }


PARAMS, REFERENCE = random_params(0), random_params(1)


def random_trajectory(rng: np.random.Generator, prompt: list[int]) -> Trajectory:
    """One to three turns with observations between; logprobs near those of a flat distribution."""
    trajectory = Trajectory()
    trajectory.append_context(prompt)
    for turn in range(rng.integers(1, 4)):
        if turn:
            trajectory.append_context(rng.integers(0, VOCAB, rng.integers(0, 5)).tolist())
        count = int(rng.integers(1, 6))
        logprobs = rng.normal(-np.log(VOCAB), 0.7, count)
        trajectory.append_sampled(rng.integers(0, VOCAB, count).tolist(), logprobs.tolist(), [0] * count)
    return trajectory


def random_sequences(seed: int, groups: int = 3, size: int = 4) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 9)).tolist() for _ in range(groups)]
    return [
        TrainSequence(random_trajectory(rng, prompt), float(rng.normal()), float(rng.choice([0.01, 0.02, 0.05])))
        for prompt in prompts
        for _ in range(size)
    ]


SEQUENCES = random_sequences(0)
BATCH = pack(SEQUENCES, ROW_TOKENS, ROW_TARGETS)
assert 4 <= BATCH.tokens.shape[0] <= 7  # several rows, a number that few splits divide


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(settings, params, batch, reference=None):
    return jax.value_and_grad(partial(batch_loss, settings), has_aux=True)(params, batch, reference)


@partial(jax.jit, static_argnums=0)
def loss_alone(settings, params, batch, reference=None):
    return batch_loss(settings, params, batch, reference)


@jax.jit
def full_logits(params, tokens):
    return forward(CONFIG, params, tokens)


def logprobs_alone(sequences: list[TrainSequence], temperature: float) -> list[float]:
    """Of every sampled token, by the plain forward pass over each trajectory in a row of its own."""
    tokens = np.zeros((32, ROW_TOKENS), np.int32)
    for row, sequence in zip(tokens, sequences):
        row[: len(sequence.trajectory.tokens)] = sequence.trajectory.tokens
    scores = np.asarray(jax.nn.log_softmax(full_logits(PARAMS, tokens)[..., :VOCAB] / temperature))
    return [
        float(scores[row, i - 1, sequence.trajectory.tokens[i]])
        for row, sequence in enumerate(sequences)
        for i in range(len(sequence.trajectory.tokens))
        if sequence.trajectory.mask[i]
    ]


def in_order(sequences: list[TrainSequence], batch: PackedBatch, values: np.ndarray) -> list[float]:
    """Values [rows, targets] in the order of the sequences' sampled tokens, matched by (token, behaviour logprob)."""
    live = batch.weights > 0
    found = dict(zip(batch.behavior_logprobs[live].tolist(), np.asarray(values)[live].tolist(), strict=True))
    assert len(found) == live.sum()  # the random logprobs tell the tokens apart
    wanted = [t.logprobs[i] for t in (s.trajectory for s in sequences) for i in range(len(t.tokens)) if t.mask[i]]
    return [found[float(np.float32(logprob))] for logprob in wanted]


def step_on(batch, *, rows, max_micro_batches, optimizer=SGD, settings=SETTINGS, state=None, params=PARAMS):
    state = init_train_state(params, optimizer) if state is None else state
    return train_step(
        settings,
        optimizer,
        state,
        batch,
        micro_batch_rows=rows,
        max_micro_batches=max_micro_batches,
        reference=REFERENCE if settings.kl_coef else None,
    )


def close(a, b, atol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # float32 has 1.2e-7 of relative precision; sums of a few hundred terms in another order lose some digits of it.
        np.testing.assert_allclose(x, y, atol=atol, rtol=2e-6)


def identical(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# ----------------------------------------------------------------------------------------------------------
# packing
# ----------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_any_packing_gives_the_logprobs_and_gradients_of_each_trajectory_alone(seed, random):
    sequences = random_sequences(seed)
    shuffled = random.sample(sequences, len(sequences))  # groups torn apart: prompts are shared here and there
    batch = pad_rows(pack(shuffled, ROW_TOKENS, ROW_TARGETS), ROWS)
    (_, metrics), packed = loss_and_gradient(SETTINGS, PARAMS, batch, REFERENCE)
    expected = logprobs_alone(sequences, SETTINGS.temperature)
    np.testing.assert_allclose(in_order(sequences, batch, metrics["logprobs"]), expected, atol=1e-5)

    alone = [pack([sequence], ROW_TOKENS, ROW_TARGETS) for sequence in sequences]
    own_rows = pad_rows(PackedBatch(*(np.concatenate(parts) for parts in zip(*alone, strict=True))), ROWS)
    close(packed, loss_and_gradient(SETTINGS, PARAMS, own_rows, REFERENCE)[1], atol=3e-6)
    assert max(float(jnp.abs(g).max()) for g in packed.values()) > 1e-3  # not 0 = 0


def test_remat_and_all_rows_at_once_change_nothing(monkeypatch):
    batch = pad_rows(BATCH, ROWS)
    plain = loss_and_gradient(SETTINGS, PARAMS, batch, REFERENCE)
    for remat in ("layer", "attention"):
        close(plain, loss_and_gradient(replace(SETTINGS, remat=remat), PARAMS, batch, REFERENCE), atol=1e-6)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    at_once = jax.jit(jax.value_and_grad(partial(batch_loss, SETTINGS), has_aux=True))(PARAMS, batch, REFERENCE)
    close(plain, at_once, atol=1e-5)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_loss_is_that_of_the_formula_on_unpacked_trajectories(kind):
    # A row a trajectory, so that "the sequence" of GSPO is the row: no packing, no segments.
    settings_ = StepSettings(CONFIG, loss=kind)
    loss, _ = loss_alone(settings_, PARAMS, pad_rows(BATCH, ROWS))
    width = max(s.trajectory.num_sampled for s in SEQUENCES)
    new, old, advantage, weight = np.zeros((4, len(SEQUENCES), width), np.float32)
    values = iter(logprobs_alone(SEQUENCES, 1.0))
    for row, sequence in enumerate(SEQUENCES):
        count = sequence.trajectory.num_sampled
        new[row, :count] = [next(values) for _ in range(count)]
        old[row, :count] = [x for x, m in zip(sequence.trajectory.logprobs, sequence.trajectory.mask) if m]
        advantage[row], weight[row, :count] = sequence.advantage, sequence.weight
    expected, _ = policy_loss(*map(jnp.asarray, (new, old, advantage, weight)), kind=kind)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("settings_", [SETTINGS, replace(SETTINGS, loss="gspo", kl_kind="k3")], ids=["ppo", "gspo"])
def test_gradient_by_finite_differences(settings_):
    # Behaviour logprobs near the policy's own: no ratio crosses a clip bound within the difference.
    rng = np.random.default_rng(1)
    _, metrics = loss_alone(SETTINGS, PARAMS, pad_rows(BATCH, ROWS), REFERENCE)
    own = np.asarray(metrics["logprobs"])
    batch = pad_rows(BATCH, ROWS)._replace(behavior_logprobs=own + rng.uniform(-0.1, 0.1, own.shape).astype(np.float32))
    _, gradient = loss_and_gradient(settings_, PARAMS, batch, REFERENCE)
    for name in PARAMS:
        norm = float(jnp.sqrt(jnp.vdot(gradient[name], gradient[name])))
        assert norm > 1e-3
        direction = gradient[name] / norm
        step = 5e-4 / float(jnp.abs(direction).max())
        up, down = (
            loss_and_gradient(settings_, PARAMS | {name: PARAMS[name] + sign * step * direction}, batch, REFERENCE)[0][
                0
            ]
            for sign in (1, -1)
        )
        # float32: the loss is known to about 1e-7, the difference is norm * step.
        assert float(up - down) / (2 * step) == pytest.approx(norm, rel=0.02, abs=3e-7 / step), name


def test_terms_of_the_loss():
    batch = pad_rows(BATCH, ROWS)
    plain = StepSettings(CONFIG, temperature=0.8)
    policy, metrics = loss_alone(plain, PARAMS, batch, REFERENCE)
    assert "kl/reference" not in metrics
    assert float(policy) == float(metrics["loss"])
    whole, parts = loss_alone(SETTINGS, PARAMS, batch, REFERENCE)
    expected = policy - 0.05 * parts["entropy"] + 0.1 * parts["kl/reference"]
    assert float(whole) == pytest.approx(float(expected), abs=1e-6)
    assert float(parts["loss"]) == pytest.approx(float(policy), abs=1e-7)  # reported without the terms
    assert 0 < float(parts["entropy"]) < np.log(VOCAB) * batch.weights.sum()
    _, same = loss_alone(SETTINGS, PARAMS, batch, PARAMS)
    assert float(same["kl/reference"]) == pytest.approx(0.0, abs=1e-9)


def test_what_stands_in_padding_does_not_matter():
    batch = pad_rows(BATCH, ROWS)
    padding = batch.weights == 0
    garbage = batch._replace(
        tokens=np.where(batch.segments == 0, 7, batch.tokens),
        positions=np.where(batch.segments == 0, 99, batch.positions),
        targets=np.where(padding, VOCAB + 2, batch.targets),  # an id whose logprob is -inf
        behavior_logprobs=np.where(padding, np.nan, batch.behavior_logprobs),
        advantages=np.where(padding, np.nan, batch.advantages),
    )
    (loss, metrics), gradient = loss_and_gradient(SETTINGS, PARAMS, batch, REFERENCE)
    (loss_, metrics_), gradient_ = loss_and_gradient(SETTINGS, PARAMS, garbage, REFERENCE)
    del metrics["logprobs"], metrics_["logprobs"]
    close((loss, metrics, gradient), (loss_, metrics_, gradient_), atol=1e-6)


# ----------------------------------------------------------------------------------------------------------
# the step
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "max_micro_batches", "row_tokens", "row_targets"), [(1, 8, 48, 24), (3, 3, 48, 24), (2, 4, 150, 70)]
)
def test_micro_batches_padding_and_width_change_nothing(rows, max_micro_batches, row_tokens, row_targets):
    batch = pack(SEQUENCES, row_tokens, row_targets)
    state, values, logprobs = step_on(batch, rows=rows, max_micro_batches=max_micro_batches)
    (_, metrics), gradient = loss_and_gradient(SETTINGS, PARAMS, pad_rows(BATCH, ROWS), REFERENCE)
    expected = {name: PARAMS[name] - LEARNING_RATE * gradient[name] for name in PARAMS}
    close(state.params, expected, atol=1e-6)
    assert logprobs.shape == batch.targets.shape
    whole = in_order(SEQUENCES, pad_rows(BATCH, ROWS), metrics.pop("logprobs"))
    np.testing.assert_allclose(in_order(SEQUENCES, batch, logprobs), whole, atol=1e-5)
    assert values["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert values["skipped"] == 0
    for name, value in metrics.items():
        assert values[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


def test_adam_updates_do_not_depend_on_the_split():
    states = []
    for rows, count in ((1, 8), (2, 4)):
        state = None
        for _ in range(3):
            state, _, _ = step_on(BATCH, rows=rows, max_micro_batches=count, optimizer=ADAM, state=state)
        assert int(state.num_updates) == 3
        states.append(state.params)
    # Adam divides a gradient by its size, its rounding too: a weight with a gradient of 1e-7 is known to a part of a
    # learning rate only. All weights but a few in a thousand agree to 1e-6.
    differences = np.concatenate([np.abs(states[0][name] - states[1][name]).ravel() for name in PARAMS])
    assert np.quantile(differences, 0.995) < 1e-6
    assert differences.max() < 1e-3


def test_state_is_consumed_but_the_start_is_kept():
    before = jax.device_get(PARAMS)
    state = init_train_state(PARAMS, ADAM)
    step_on(BATCH, rows=2, max_micro_batches=4, optimizer=ADAM, state=state)
    assert state.params["norm"].is_deleted()
    identical(PARAMS, before)


def moved_state() -> TrainState:
    """A state with moments that are not zero, so that an update by them alone would show."""
    state, values, _ = step_on(BATCH, rows=2, max_micro_batches=4, optimizer=ADAM)
    assert values["skipped"] == 0
    assert int(state.num_updates) == 1
    return state


@pytest.mark.parametrize("what", ["no rows", "weight 0"])
def test_nothing_to_learn_changes_nothing_and_is_counted(what):
    empty = pack([], ROW_TOKENS, ROW_TARGETS) if what == "no rows" else BATCH._replace(weights=0 * BATCH.weights)
    state = moved_state()
    before = jax.device_get(state)
    after, values, logprobs = step_on(empty, rows=2, max_micro_batches=4, optimizer=ADAM, state=state)
    assert values["skipped"] == 1
    assert values["loss"] == 0
    assert values["grad_norm"] == 0
    assert logprobs.shape == empty.targets.shape
    identical(after, before)  # parameters, both moments, Adam's count, updates: no weight decay either


@pytest.mark.parametrize("what", ["advantage", "overflow"])
def test_a_gradient_that_is_not_finite_is_skipped_and_learning_goes_on(what):
    if what == "advantage":
        bad = BATCH._replace(advantages=np.where(BATCH.weights > 0, np.inf, 0).astype(np.float32))
    else:
        bad = BATCH._replace(weights=np.where(BATCH.weights > 0, 1e38, 0).astype(np.float32))
    state = moved_state()
    before = jax.device_get(state)
    state, values, _ = step_on(bad, rows=2, max_micro_batches=4, optimizer=ADAM, state=state)
    assert values["skipped"] == 1
    assert not np.isfinite(values["grad_norm"])
    identical(state, before)
    state, values, _ = step_on(BATCH, rows=2, max_micro_batches=4, optimizer=ADAM, state=state)
    assert values["skipped"] == 0
    assert int(state.num_updates) == 2
    assert not np.array_equal(state.params["norm"], before.params["norm"])


def test_batches_of_any_number_of_rows_compile_once():
    state = moved_state()
    before = _train_step._cache_size()
    for count in (12, 1, 0, 7, 2):
        batch = pack(SEQUENCES[:count], ROW_TOKENS, ROW_TARGETS)
        state, _, _ = step_on(batch, rows=2, max_micro_batches=4, optimizer=ADAM, state=state)
    assert _train_step._cache_size() == before
    assert int(state.num_updates) == 5


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="cannot be padded to 2"):
        step_on(BATCH, rows=1, max_micro_batches=2)


def test_learning_does_what_advantages_say():
    """Five updates raise the logprobs of praised trajectories and lower those of blamed ones."""
    sequences = [replace(s, advantage=1.0 if i % 2 else -1.0, weight=0.01) for i, s in enumerate(SEQUENCES)]
    batch = pack(sequences, ROW_TOKENS, ROW_TARGETS)
    _, metrics = loss_alone(SETTINGS, PARAMS, pad_rows(batch, ROWS), REFERENCE)
    own = np.asarray(metrics["logprobs"])[: batch.tokens.shape[0]]
    batch, state = batch._replace(behavior_logprobs=own), None
    for _ in range(6):
        state, _, logprobs = step_on(batch, rows=2, max_micro_batches=4, optimizer=ADAM, state=state)
    change = logprobs - own
    assert change[batch.advantages > 0].mean() > 0.05
    assert change[batch.advantages < 0].mean() < -0.05


# ----------------------------------------------------------------------------------------------------------
# the optimizer
# ----------------------------------------------------------------------------------------------------------


def updates_of(optimizer, gradient, params, count):
    state, out = optimizer.init(params), []
    for _ in range(count):
        update, state = optimizer.update(gradient, state, params)
        out.append({name: float(value[0]) for name, value in update.items()})
    return out


def test_matrices_alone_are_decayed_and_the_rate_is_decoupled():
    params = {name: jnp.full(3, 2.0) for name in ("layers.q_proj", "embed_tokens", "layers.q_norm", "norm")}
    params |= {name: jnp.full(3, 2.0) for name in ("layers.q_bias", "layers.input_layernorm")}
    optimizer = make_optimizer(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0)
    (update,) = updates_of(optimizer, jax.tree.map(jnp.zeros_like, params), params, 1)
    decayed = {name for name, value in update.items() if value}
    assert decayed == {"layers.q_proj", "embed_tokens"}
    assert update["embed_tokens"] == pytest.approx(-0.1 * 0.5 * 2.0)


def test_learning_rate_warms_up_and_ends_at_its_fraction():
    params = {"w": jnp.zeros(1)}
    optimizer = make_optimizer(
        learning_rate=1.0, weight_decay=0.0, max_grad_norm=1.0, warmup_updates=4, total_updates=10, final_fraction=0.25
    )
    # With a constant gradient Adam's step is the learning rate.
    rates = [-u["w"] for u in updates_of(optimizer, {"w": jnp.ones(1)}, params, 12)]
    np.testing.assert_allclose(rates[:5], [0.0, 0.25, 0.5, 0.75, 1.0], atol=1e-5)
    assert all(a > b for a, b in pairwise(rates[4:11]))
    np.testing.assert_allclose(rates[7], 0.625, atol=1e-5)  # half of a cosine
    np.testing.assert_allclose(rates[10:], 0.25, atol=1e-5)
    constant = make_optimizer(learning_rate=0.5, weight_decay=0.0, max_grad_norm=1.0)
    np.testing.assert_allclose([-u["w"] for u in updates_of(constant, {"w": jnp.ones(1)}, params, 4)], 0.5, atol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    # Adam hides a constant scale, so the second gradient is small: what it is small against tells the clip.
    def second_update(norm):
        optimizer = make_optimizer(learning_rate=1.0, weight_decay=0.0, max_grad_norm=norm, betas=(0.5, 0.5))
        params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
        state = optimizer.init(params)
        _, state = optimizer.update({"a": jnp.full(1, 30.0), "b": jnp.full(1, 40.0)}, state, params)
        update, _ = optimizer.update({"a": jnp.full(1, 0.3), "b": jnp.full(1, 0.4)}, state, params)
        return float(update["a"][0])

    # First moments (0.25 g1 + 0.5 g2) / 0.75, second (0.25 g1^2 + 0.5 g2^2) / 0.75, with g1 = 0.6 where clipped to 1.
    def expected(first):
        return -((0.25 * first + 0.5 * 0.3) / 0.75) / np.sqrt((0.25 * first**2 + 0.5 * 0.3**2) / 0.75)

    assert second_update(1.0) == pytest.approx(expected(0.6), rel=1e-5)
    assert second_update(1e9) == pytest.approx(expected(30.0), rel=1e-5)
