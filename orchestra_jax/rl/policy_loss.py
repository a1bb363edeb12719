"""Policy-gradient losses per token, with denominators fixed before the batch is split.

A loss is `sum_t weight_t * loss_t`. The weights come from the trained-token counts of the *whole* batch
(`token_weights`), so the sum of the micro-batch losses, and of their gradients, is that of the batch for any
split, padding or packing. A token of weight 0 (prompt, observation, padding, dropped trajectory) contributes
exactly nothing, whatever stands in its place, NaN included.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray

LossKind = Literal["ppo", "gspo", "cispo", "reinforce"]
KlKind = Literal["k1", "k2", "k3"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before `exp`: no ratio overflows float32. Beyond it the gradient is 0."""


def token_weights(
    num_trained_tokens: ArrayLike,
    mode: Aggregation = "token_mean",
    *,
    max_length: int | None = None,
    num_sequences: int | None = None,
) -> NDArray[np.float32]:
    """Weight of each trained token of each trajectory; computed on the host for the whole batch at once.

    With n_i trained tokens in trajectory i and N trajectories: "token_mean" `1 / sum_i n_i`; "sequence_mean"
    `1 / (N n_i)`; "constant" `1 / (N max_length)` (Dr. GRPO, arXiv 2503.20783).

    Args:
      num_trained_tokens: int [N]; 0 for a trajectory that is left out.
      mode: the aggregation.
      max_length: tokens, for "constant" only.
      num_sequences: N; by default the number of trajectories that have a trained token.

    Returns:
      float32 [N]; 0 where a trajectory has no trained token, hence all zeros for an empty batch.

    Raises:
      ValueError: unknown mode, a negative count, or `max_length` missing.
    """
    counts = np.asarray(num_trained_tokens)
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.integer) or np.any(counts < 0):
        raise ValueError(f"num_trained_tokens must be a vector of integers, at least 0, got {counts!r}")
    trained = counts > 0
    sequences = int(trained.sum()) if num_sequences is None else num_sequences
    if sequences < int(trained.sum()):
        raise ValueError(f"num_sequences={sequences} is less than the {trained.sum()} trajectories with trained tokens")
    if mode == "token_mean":
        denominator = np.full(counts.shape, float(counts.sum()))
    elif mode == "sequence_mean":
        denominator = sequences * counts.astype(np.float64)
    elif mode == "constant":
        if max_length is None or max_length < 1:
            raise ValueError(f"mode 'constant' needs max_length, a number of tokens of at least 1, got {max_length}")
        denominator = np.full(counts.shape, float(sequences * max_length))
    else:
        raise ValueError(f"mode must be 'token_mean', 'sequence_mean' or 'constant', got {mode!r}")
    return np.divide(1.0, denominator, out=np.zeros(counts.shape), where=trained).astype(np.float32)


def policy_loss(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    weights: Array,
    *,
    kind: LossKind = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    segment_ids: Array | None = None,
    importance_weights: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Weighted sum of token losses, and metrics.

    With ratio `r = exp(clamp(logprob - behavior_logprob, +-MAX_LOG_RATIO))`, advantage A, clipped ratio
    `c = clip(r, 1 - clip_low, 1 + clip_high)`, the loss of a token is

    * "ppo": `max(-A r, -A c)`, and for A < 0 at most `-A dual_clip` (arXiv 1707.06347; dual clip arXiv
      1912.09729);
    * "gspo": the same with the ratio of the sequence, `exp(mean_t log r_t)` over its tokens of non-zero
      weight (arXiv 2507.18071; its clip bounds are far smaller, about 3e-4);
    * "cispo": `-stop_gradient(c) A logprob` (arXiv 2506.13585; there only the upper bound binds: clip_low = 1);
    * "reinforce": `-A logprob`.

    Args:
      logprobs: [B, T] under the policy being trained; the only differentiated argument.
      behavior_logprobs: [B, T] under the policy the ratio is taken against.
      advantages: [B, T].
      weights: [B, T], at least 0, from `token_weights`; 0 wherever the policy did not sample the token.
      kind: the loss.
      clip_low, clip_high: distances of the clip bounds from 1.
      dual_clip: bound of the ratio for negative advantages, above 1 + clip_high; None for none.
      segment_ids: int [B, T], for "gspo" with packed rows: tokens of one sequence stand together and share an
        id. None: a row is one sequence.
      importance_weights: [B, T] factors on the token losses, not differentiated: see
        `truncated_importance_weights`.

    Returns:
      The loss, a float32 scalar, and float32 scalars by metric name. All metrics but "ratio/max" are weighted
      sums: add them up over micro-batches; with "constant" weights divide them by "weight/sum" (otherwise 1)
      to get means.
    """
    if kind not in ("ppo", "gspo", "cispo", "reinforce"):
        raise ValueError(f"kind must be 'ppo', 'gspo', 'cispo' or 'reinforce', got {kind!r}")
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0, got {clip_low} and {clip_high}")
    if dual_clip is not None and dual_clip <= 1.0 + clip_high:
        raise ValueError(f"dual_clip must be above 1 + clip_high = {1.0 + clip_high}, got {dual_clip}")

    weight = weights.astype(jnp.float32)
    live = weight != 0.0
    # Garbage is replaced before any arithmetic: a mask applied afterwards leaves NaN in the gradient (0 *
    # NaN).
    logprob = _keep(live, logprobs)
    behavior = jax.lax.stop_gradient(_keep(live, behavior_logprobs))
    advantage = jax.lax.stop_gradient(_keep(live, advantages))
    log_ratio = logprob - behavior
    if kind == "gspo":
        log_ratio = _sequence_mean(log_ratio, live, segment_ids)
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)

    if kind == "reinforce":
        token_loss = -advantage * logprob
    elif kind == "cispo":
        token_loss = -jax.lax.stop_gradient(clipped) * advantage * logprob
    else:
        token_loss = jnp.maximum(-advantage * ratio, -advantage * clipped)
        if dual_clip is not None:
            token_loss = jnp.where(advantage < 0.0, jnp.minimum(token_loss, -advantage * dual_clip), token_loss)
    if importance_weights is not None:
        token_loss = token_loss * jax.lax.stop_gradient(_keep(live, importance_weights))

    metrics = {
        "weight/sum": weight.sum(),
        "ratio/mean": (weight * ratio).sum(),
        "ratio/max": jnp.where(live, ratio, 0.0).max(),
        # Where the clip holds the gradient back: a bound only binds on the side that the advantage pushes to.
        "clip/low": (weight * ((ratio < 1.0 - clip_low) & (advantage < 0.0))).sum(),
        "clip/high": (weight * ((ratio > 1.0 + clip_high) & (advantage > 0.0))).sum(),
        # KL(behaviour || policy) by the low-variance estimator r - 1 - log r.
        "kl/behavior": (weight * (ratio - 1.0 - log_ratio)).sum(),
    }
    if dual_clip is not None and kind in ("ppo", "gspo"):
        metrics["clip/dual"] = (weight * ((ratio > dual_clip) & (advantage < 0.0))).sum()
    return (weight * token_loss).sum(), jax.lax.stop_gradient(metrics)


def kl_penalty(logprobs: Array, reference_logprobs: Array, kind: KlKind = "k2", *, mask: Array | None = None) -> Array:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled.

    With `d = logprob - reference_logprob`, clamped to +-MAX_LOG_RATIO: k1 `d`, k2 `d^2 / 2` (the "mse" loss
    of the paper's released code), k3 `exp(-d) - 1 + d`. As a loss, k2 has the gradient of the KL itself and
    k1 a gradient of mean zero: k1 belongs into a reward (http://joschu.net/blog/kl-approx.html).

    Args:
      logprobs, reference_logprobs: [B, T]; only the first is differentiated.
      kind: the estimator.
      mask: [B, T], non-zero at the policy's tokens; elsewhere the result is 0 with gradient 0, even for NaN
        inputs.

    Returns:
      float32 [B, T].
    """
    live = jnp.ones(logprobs.shape, bool) if mask is None else mask != 0
    difference = _keep(live, logprobs) - jax.lax.stop_gradient(_keep(live, reference_logprobs))
    difference = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        return jnp.exp(-difference) - 1.0 + difference
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")


def truncated_importance_weights(
    trainer_logprobs: Array, sampler_logprobs: Array, mask: Array, *, cap: float = 2.0
) -> Array:
    """`min(exp(trainer - sampler), cap)` at the tokens of `mask`, 0 elsewhere; float32 [B, T], not
    differentiated.

    Corrects for a sampler whose numerics differ from the trainer's when `policy_loss` takes its ratio against
    logprobs that the trainer recomputed. Where the ratio is taken against the sampler's own, it corrects
    already.
    """
    if cap < 1.0:
        raise ValueError(f"cap must be at least 1, got {cap}")
    live = mask != 0
    difference = _keep(live, trainer_logprobs) - _keep(live, sampler_logprobs)
    ratio = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jax.lax.stop_gradient(jnp.where(live, jnp.minimum(ratio, cap), 0.0))


def mismatch_metrics(
    trainer_logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> dict[str, float]:
    """How far trainer and sampler disagree on the same tokens under the same parameters (nats; NumPy, on the
    host).

    The mean alone hides bf16 noise, which is symmetric: hence also the 95th percentile, the maximum and the
    share of tokens whose ratio would be clipped.

    Args:
      trainer_logprobs, sampler_logprobs: [...] of equal shape.
      mask: non-zero at sampled tokens.
      clip_low, clip_high: the clip band of the loss.

    Returns:
      "mismatch/logprob_mean", "_p95", "_max" (of the absolute difference) and "mismatch/outside_clip"; empty
      if `mask` selects nothing.

    Raises:
      ValueError: shapes differ.
    """
    trainer = np.asarray(trainer_logprobs, dtype=np.float64)
    sampler = np.asarray(sampler_logprobs, dtype=np.float64)
    live = np.asarray(mask) != 0
    if not trainer.shape == sampler.shape == live.shape:
        raise ValueError(f"shapes differ: trainer {trainer.shape}, sampler {sampler.shape}, mask {live.shape}")
    if not live.any():
        return {}
    difference = trainer[live] - sampler[live]
    distance = np.abs(difference)
    outside = (difference < np.log1p(-clip_low)) | (difference > np.log1p(clip_high))
    return {
        "mismatch/logprob_mean": float(distance.mean()),
        "mismatch/logprob_p95": float(np.percentile(distance, 95)),
        "mismatch/logprob_max": float(distance.max()),
        "mismatch/outside_clip": float(outside.mean()),
    }


def _keep(live: Array, values: Array) -> Array:
    return jnp.where(live, values.astype(jnp.float32), 0.0)


def _sequence_mean(values: Array, live: Array, segment_ids: Array | None) -> Array:
    """Mean of `values` over the live tokens of each token's sequence, at every token; [B, T]."""
    if segment_ids is None:
        return jnp.broadcast_to(
            values.sum(axis=1, keepdims=True) / jnp.maximum(live.sum(axis=1, keepdims=True), 1), values.shape
        )
    # Numbering the runs makes any ids usable as indices: there are at most T runs in a row.
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    runs = jnp.cumsum(starts, axis=1)

    def mean_of_row(row: Array, row_live: Array, row_runs: Array) -> Array:
        sums = jax.ops.segment_sum(row, row_runs, num_segments=row.shape[0])
        counts = jax.ops.segment_sum(row_live.astype(jnp.float32), row_runs, num_segments=row.shape[0])
        return (sums / jnp.maximum(counts, 1.0))[row_runs]

    return jax.vmap(mean_of_row)(values, live, runs)
