"""Policy losses against plain NumPy formulas, finite differences and the invariances they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra_jax.rl import (
    MAX_LOG_RATIO,
    kl_penalty,
    mismatch_metrics,
    policy_loss,
    token_weights,
    truncated_importance_weights,
)

KINDS = ("ppo", "gspo", "cispo", "reinforce")
ROWS, LENGTH = 4, 6
LENGTHS = np.array([6, 3, 1, 4])


def make_batch(seed=0, spread=0.5):
    """Rows of different lengths, left aligned; logprobs differ from the behaviour's by about `spread`."""
    rng = np.random.default_rng(seed)
    behavior = -rng.exponential(1.0, (ROWS, LENGTH))
    mask = np.arange(LENGTH) < LENGTHS[:, None]
    advantages = np.where(mask, rng.normal(size=(ROWS, 1)), 0.0)
    weights = token_weights(LENGTHS)[:, None] * mask
    logprobs = behavior + spread * rng.normal(size=behavior.shape)
    return {
        "logprobs": jnp.asarray(logprobs, jnp.float32),
        "behavior_logprobs": jnp.asarray(behavior, jnp.float32),
        "advantages": jnp.asarray(advantages, jnp.float32),
        "weights": jnp.asarray(weights, jnp.float32),
    }


@jax.jit(static_argnames=("kind", "clip_low", "clip_high", "dual_clip"))
def loss_and_gradient(batch, **options):
    rest = {key: value for key, value in batch.items() if key != "logprobs"}

    def loss(logprobs):
        return policy_loss(logprobs, **rest, **options)[0]

    return jax.value_and_grad(loss)(batch["logprobs"])


def numpy_loss(batch, kind, clip_low, clip_high, dual_clip, importance=None):
    """The formulas again, token by token."""
    logprobs, behavior, advantages, weights = (np.asarray(x, np.float64) for x in batch.values())
    total = 0.0
    for row in range(ROWS):
        tokens = np.flatnonzero(weights[row])
        log_ratios = logprobs[row, tokens] - behavior[row, tokens]
        if kind == "gspo":
            log_ratios = np.full(len(tokens), log_ratios.mean())
        for t, log_ratio in zip(tokens, log_ratios):
            advantage, ratio = advantages[row, t], np.exp(log_ratio)
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            if kind == "reinforce":
                loss = -advantage * logprobs[row, t]
            elif kind == "cispo":
                loss = -clipped * advantage * logprobs[row, t]
            else:
                loss = -min(ratio * advantage, clipped * advantage)
                if dual_clip is not None and advantage < 0:
                    loss = min(loss, -dual_clip * advantage)
            total += weights[row, t] * loss * (1.0 if importance is None else importance[row, t])
    return total


# --- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("token_mean", 2.6), ("sequence_mean", 5.0), ("constant", 1.625)])
def test_aggregation_modes(mode, expected):
    """BR-26: row A has token losses [1, 1, 1, 1], row B [9]."""
    weights = token_weights([4, 1], mode, max_length=4 if mode == "constant" else None)
    assert weights.dtype == np.float32
    assert weights @ np.array([4.0, 9.0]) == pytest.approx(expected)


def test_constant_mode_does_not_depend_on_the_split():
    """BR-27: 4 rows of token sum 4, L = 8: 0.5 as one batch and as two micro-batches."""
    row_losses = token_weights([4] * 4, "constant", max_length=8) * 4.0
    assert row_losses.sum() == pytest.approx(0.5)
    assert row_losses[:2].sum() + row_losses[2:].sum() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_dropped_trajectories_weigh_nothing(mode):
    kept = token_weights([3, 5], mode, max_length=8)
    with_dropped = token_weights([3, 0, 5, 0], mode, max_length=8)
    np.testing.assert_array_equal(with_dropped, [kept[0], 0, kept[1], 0])
    np.testing.assert_array_equal(token_weights([0, 0], mode, max_length=8), [0, 0])
    assert token_weights(np.zeros(0, int), mode, max_length=8).shape == (0,)


def test_num_sequences_sets_the_denominator():
    np.testing.assert_allclose(token_weights([2, 4], "sequence_mean", num_sequences=8), [1 / 16, 1 / 32])
    np.testing.assert_allclose(token_weights([2, 4], "constant", max_length=4, num_sequences=8), [1 / 32] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_trained_tokens": [1.5]}, "integers"),
        ({"num_trained_tokens": [-1]}, "integers"),
        ({"num_trained_tokens": [1], "mode": "mean"}, "mode must be"),
        ({"num_trained_tokens": [1], "mode": "constant"}, "needs max_length"),
        ({"num_trained_tokens": [1, 1], "num_sequences": 1}, "num_sequences=1"),
    ],
)
def test_bad_weights_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        token_weights(**arguments)


# --- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_loss_equals_the_numpy_formula(kind, dual_clip):
    batch = make_batch(spread=0.8)
    loss, metrics = policy_loss(**batch, kind=kind, dual_clip=dual_clip)
    expected = numpy_loss(batch, kind, 0.2, 0.28, dual_clip)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert loss.dtype == jnp.float32
    assert float(metrics["weight/sum"]) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_weights_scale_the_token_losses(kind):
    batch = make_batch()
    importance = np.random.default_rng(1).uniform(0.5, 2.0, (ROWS, LENGTH))
    loss, _ = policy_loss(**batch, kind=kind, importance_weights=jnp.asarray(importance))
    np.testing.assert_allclose(loss, numpy_loss(batch, kind, 0.2, 0.28, 10.0, importance), rtol=1e-5)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "reinforce"])
def test_gradient_equals_finite_differences(kind):
    batch = make_batch(spread=0.3)
    _, gradient = loss_and_gradient(batch, kind=kind)
    numeric = np.zeros((ROWS, LENGTH))
    step = 1e-5
    for index in np.ndindex(ROWS, LENGTH):
        shifted = []
        for sign in (1, -1):
            logprobs = np.asarray(batch["logprobs"], np.float64)
            logprobs[index] += sign * step
            shifted.append(numpy_loss(batch | {"logprobs": logprobs}, kind, 0.2, 0.28, 10.0))
        numeric[index] = (shifted[0] - shifted[1]) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, atol=1e-5)
    assert np.abs(numeric).max() > 0.01


def test_cispo_gradient_is_that_of_weighted_log_likelihood():
    """Unlike PPO's it does not vanish where the ratio is clipped."""
    batch = make_batch(spread=2.0)
    _, gradient = loss_and_gradient(batch, kind="cispo", clip_low=0.2, clip_high=0.28)
    ratio = np.exp(np.asarray(batch["logprobs"] - batch["behavior_logprobs"]))
    expected = -np.asarray(batch["weights"] * batch["advantages"]) * np.clip(ratio, 0.8, 1.28)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),  # inside the band: d(-A r)/d(logprob) = -A r
        (1.5, 1.0, -1.28, 0.0),  # clipped above
        (0.5, 1.0, -0.5, -0.5),  # the lower bound does not bind for a positive advantage
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (2.0, -1.0, 2.0, 2.0),  # the upper bound does not bind for a negative advantage...
        (5.0, -1.0, 3.0, 0.0),  # ...but the dual clip (3) does
    ],
)
def test_ppo_by_hand(ratio, advantage, loss, slope):
    batch = {
        "logprobs": jnp.log(jnp.array([[ratio]])),
        "behavior_logprobs": jnp.zeros((1, 1)),
        "advantages": jnp.array([[advantage]]),
        "weights": jnp.ones((1, 1)),
    }
    value, gradient = loss_and_gradient(batch, dual_clip=3.0)
    assert float(value) == pytest.approx(loss, rel=1e-5)
    assert float(gradient[0, 0]) == pytest.approx(slope, rel=1e-5)


def test_metrics_by_hand():
    ratio = np.array([[1.5, 1.5, 0.5, 0.5, 12.0]])
    _, metrics = policy_loss(
        jnp.log(jnp.asarray(ratio)),
        jnp.zeros((1, 5)),
        jnp.array([[1.0, -1.0, 1.0, -1.0, -1.0]]),
        jnp.array([[0.1, 0.2, 0.3, 0.15, 0.25]]),
    )
    weights = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    expected = {
        "weight/sum": 1.0,
        "ratio/mean": weights @ ratio[0],
        "ratio/max": 12.0,
        "clip/low": 0.15,
        "clip/high": 0.1,
        "clip/dual": 0.25,
        "kl/behavior": weights @ (ratio[0] - 1 - np.log(ratio[0])),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name


def test_metrics_carry_no_gradient():
    batch = make_batch()
    rest = {key: value for key, value in batch.items() if key != "logprobs"}
    gradient = jax.grad(lambda x: policy_loss(x, **rest)[1]["ratio/mean"])(batch["logprobs"])
    np.testing.assert_array_equal(gradient, 0.0)


def test_on_policy_gradients_agree():
    """At ratio 1 PPO, CISPO and REINFORCE have the same gradient."""
    batch = make_batch(spread=0.0)
    gradients = [loss_and_gradient(batch, kind=kind)[1] for kind in ("ppo", "cispo", "reinforce")]
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-7)
    np.testing.assert_allclose(gradients[0], gradients[2], atol=1e-7)


# --- what must not change the gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, np.inf, 1e30])
def test_tokens_of_weight_0_contribute_nothing(kind, garbage):
    """BR-19: never exp(logprob - 0.0) on a token the policy did not sample."""
    clean = make_batch()
    dead = np.asarray(clean["weights"]) == 0
    dirty = {
        key: jnp.asarray(np.where(dead, garbage, np.asarray(value))) if key != "weights" else value
        for key, value in clean.items()
    }
    loss, gradient = loss_and_gradient(dirty, kind=kind, importance_weights=dirty["advantages"])
    clean_loss, clean_gradient = loss_and_gradient(clean, kind=kind, importance_weights=clean["advantages"])
    np.testing.assert_array_equal(loss, clean_loss)
    np.testing.assert_array_equal(gradient, clean_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[dead], 0.0)
    for name, value in policy_loss(**dirty, kind=kind)[1].items():
        np.testing.assert_array_equal(value, policy_loss(**clean, kind=kind)[1][name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_masked_is_loss_0(kind):
    """BR-21."""
    batch = {
        "logprobs": jnp.full((4, 6), -jnp.inf),
        "behavior_logprobs": jnp.full((4, 6), jnp.nan),
        "advantages": jnp.broadcast_to(jnp.array([[1.0], [-1.0], [1.0], [-1.0]]), (4, 6)),
        "weights": jnp.broadcast_to(token_weights([0, 0, 0, 0])[:, None], (4, 6)),
    }
    loss, gradient = loss_and_gradient(batch, kind=kind)
    assert float(loss) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    assert all(float(value) == 0.0 for value in policy_loss(**batch, kind=kind)[1].values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 1000),
    order=st.permutations(range(ROWS)),
    cut=st.integers(1, ROWS - 1),
    padding=st.sampled_from([0, 3]),
)
def test_gradient_does_not_depend_on_micro_batches_or_padding(kind, mode, seed, order, cut, padding):
    """BR-27, for every loss and aggregation."""
    batch = make_batch(seed)
    weights = token_weights(LENGTHS, mode, max_length=LENGTH)[:, None] * (np.asarray(batch["weights"]) > 0)
    batch["weights"] = jnp.asarray(weights)
    loss, gradient = loss_and_gradient(batch, kind=kind)

    total, pieces = 0.0, np.zeros((ROWS, LENGTH))
    for rows in (list(order[:cut]), list(order[cut:])):
        part = {
            key: jnp.asarray(np.pad(np.asarray(value)[rows], ((0, 0), (padding, padding))))
            for key, value in batch.items()
        }
        part_loss, part_gradient = loss_and_gradient(part, kind=kind)
        total += float(part_loss)
        pieces[rows] = np.asarray(part_gradient)[:, padding : padding + LENGTH]
    np.testing.assert_allclose(total, loss, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(pieces, gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [7, 900_000, -5, 7]])
def test_gspo_of_packed_rows_equals_one_row_each(ids):
    """Ids need not be small, sorted or unique beyond their neighbours."""
    batch = make_batch()
    loss, gradient = loss_and_gradient(batch, kind="gspo")
    keep = np.asarray(batch["weights"]) > 0
    packed = {key: jnp.asarray(np.asarray(value)[keep][None]) for key, value in batch.items()}
    segment_ids = jnp.asarray(np.repeat(ids, LENGTHS)[None])
    packed_loss, packed_gradient = loss_and_gradient(packed, kind="gspo", segment_ids=segment_ids)
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(packed_gradient[0], np.asarray(gradient)[keep], rtol=1e-5)


def test_gspo_counts_only_trained_tokens_of_a_segment():
    """An observation in the middle of a trajectory neither enters the mean ratio nor splits the sequence."""
    log_ratio = jnp.array([[0.1, 5.0, 0.3, 0.0]])
    weights = jnp.array([[0.5, 0.0, 0.5, 0.0]])
    segments = jnp.array([[1, 1, 1, 0]])
    _, metrics = policy_loss(log_ratio, jnp.zeros((1, 4)), jnp.ones((1, 4)), weights, kind="gspo", segment_ids=segments)
    assert float(metrics["ratio/mean"]) == pytest.approx(np.exp(0.2), rel=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_huge_log_ratios_stay_finite(kind):
    batch = make_batch()
    batch["behavior_logprobs"] = batch["behavior_logprobs"] - 1000.0
    loss, metrics = policy_loss(**batch, kind=kind, dual_clip=None)
    _, gradient = loss_and_gradient(batch, kind=kind, dual_clip=None)
    assert np.isfinite(loss)
    assert float(metrics["ratio/max"]) == pytest.approx(np.exp(MAX_LOG_RATIO), rel=1e-5)
    np.testing.assert_array_equal(gradient, 0.0)


def test_losses_compile_and_accept_bfloat16():
    batch = {key: value.astype(jnp.bfloat16) for key, value in make_batch().items()}
    for kind in KINDS:
        eager = policy_loss(**batch, kind=kind)[0]
        jitted = jax.jit(policy_loss, static_argnames="kind")(**batch, kind=kind)[0]
        assert eager.dtype == jnp.float32
        np.testing.assert_allclose(jitted, eager, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "trpo"}, "kind must be"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.1}, "dual_clip must be above"),
    ],
)
def test_bad_loss_options(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**make_batch(), **options)


# --- KL, importance weights, mismatch ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators(kind):
    difference = np.array([[-0.5, 0.0, 1.5]])
    formulas = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": np.exp(-difference) - 1 + difference,
    }
    reference = jnp.array([[-1.0, -2.0, -3.0]])
    penalty = kl_penalty(reference + difference, reference, kind)
    np.testing.assert_allclose(penalty, formulas[kind], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_are_unbiased(kind):
    """Summed over all tokens with the policy's probabilities they are the exact KL."""
    policy = np.array([0.5, 0.3, 0.2])
    reference = np.array([0.2, 0.2, 0.6])
    penalty = np.asarray(kl_penalty(jnp.log(policy), jnp.log(reference), kind))
    assert policy @ penalty == pytest.approx(policy @ np.log(policy / reference), rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_mask_keeps_garbage_out_of_the_gradient(kind):
    mask = jnp.array([[1, 0, 0]])
    logprobs, reference = jnp.array([[-1.0, -jnp.inf, jnp.nan]]), jnp.array([[-2.0, jnp.nan, -1.0]])
    penalty = kl_penalty(logprobs, reference, kind, mask=mask)
    gradient = jax.grad(lambda x: kl_penalty(x, reference, kind, mask=mask).sum())(logprobs)
    np.testing.assert_array_equal(penalty[0, 1:], 0.0)
    np.testing.assert_array_equal(gradient[0, 1:], 0.0)
    assert float(gradient[0, 0]) == pytest.approx({"k1": 1.0, "k2": 1.0, "k3": 1 - np.exp(-1)}[kind], rel=1e-5)


def test_kl_unknown_kind():
    with pytest.raises(ValueError, match="kind must be"):
        kl_penalty(jnp.zeros((1, 1)), jnp.zeros((1, 1)), "mse")


def test_truncated_importance_weights():
    trainer = jnp.log(jnp.array([[0.5, 0.5, 0.1, jnp.nan]]))
    sampler = jnp.log(jnp.array([[0.5, 0.1, 0.4, 0.5]]))
    weights = truncated_importance_weights(trainer, sampler, jnp.array([[1, 1, 1, 0]]), cap=2.0)
    np.testing.assert_allclose(weights, [[1.0, 2.0, 0.25, 0.0]], rtol=1e-5)
    with pytest.raises(ValueError, match="cap"):
        truncated_importance_weights(trainer, sampler, jnp.ones((1, 4)), cap=0.5)


def test_mismatch_metrics():
    sampler = np.full((2, 50), -1.0)
    difference = np.zeros((2, 50))
    difference[0, :4] = [0.3, -0.3, 0.2, -0.2]  # log(1.28) = 0.247 and log(0.8) = -0.223: the first two are outside
    mask = np.ones((2, 50))
    mask[1, 10:] = 0
    sampler[1, 10:] = np.nan
    metrics = mismatch_metrics(sampler + difference, sampler, mask)
    magnitudes = np.abs(np.concatenate([difference[0], difference[1, :10]]))
    assert metrics["mismatch/logprob_mean"] == pytest.approx(1.0 / 60)
    assert metrics["mismatch/logprob_p95"] == pytest.approx(np.percentile(magnitudes, 95))
    assert metrics["mismatch/logprob_max"] == pytest.approx(0.3)
    assert metrics["mismatch/outside_clip"] == pytest.approx(2 / 60)
    assert mismatch_metrics(sampler, sampler, np.zeros((2, 50))) == {}
    with pytest.raises(ValueError, match="shapes differ"):
        mismatch_metrics(sampler, sampler, mask[:1])
