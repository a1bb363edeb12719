"""The train step: packed rows in, new parameters out, micro-batches by a loop inside one compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, Remat, hidden_states, param_specs
from orchestra_jax.models.logprobs import token_logprobs
from orchestra_jax.parallel.mesh import in_mesh, shardings
from orchestra_jax.parallel.rules import activation_partition, active_mesh, param_partition
from orchestra_jax.rl import kl_penalty, policy_loss
from orchestra_jax.rl.policy_loss import KlKind, LossKind
from orchestra_jax.rollout.pack import PackedBatch, pad_rows


@dataclass(frozen=True)
class StepSettings:
    """What is compiled into a train step."""

    model: ModelConfig
    loss: LossKind = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KlKind = "k2"
    temperature: float = 1.0
    """That the tokens were sampled at; logprobs are taken at it."""
    remat: Remat = "none"
    dtype: str | None = None
    """To compute in, as a name; None: that of the parameters."""


class TrainState(NamedTuple):
    """Everything that an update changes."""

    params: Params
    opt_state: Any
    num_updates: jax.Array
    """int32 scalar: optimizer updates done."""


def make_optimizer(
    *,
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
    betas: tuple[float, float] = (0.9, 0.999),
    warmup_updates: int = 0,
    total_updates: int | None = None,
    final_fraction: float = 1.0,
    moment_dtype: str = "float32",
) -> optax.GradientTransformation:
    """AdamW with global-norm clipping; norms and biases are not decayed.

    Args:
      learning_rate: at its highest.
      weight_decay: decoupled, of matrices only.
      max_grad_norm: gradients are scaled down to this global norm.
      betas: of Adam's moments.
      warmup_updates: linear from 0.
      total_updates: where the cosine reaches `final_fraction`; None: constant.
      final_fraction: of `learning_rate`, at the end.
      moment_dtype: of the first moment.
    """
    if total_updates is None or final_fraction == 1.0:
        after = optax.constant_schedule(learning_rate)
    else:
        after = optax.cosine_decay_schedule(learning_rate, max(1, total_updates - warmup_updates), final_fraction)
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, learning_rate, max(1, warmup_updates)), after], [warmup_updates]
    )

    def decayed(params: Params) -> dict[str, bool]:
        return {name: not name.endswith(("norm", "bias")) for name in params}

    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(schedule, b1=betas[0], b2=betas[1], weight_decay=weight_decay, mask=decayed, mu_dtype=moment_dtype),
    )


def init_train_state(
    params: Params, optimizer: optax.GradientTransformation, config: ModelConfig | None = None, mesh: Mesh | None = None
) -> TrainState:
    """A fresh state for `params`: float32 copies of them (the step donates its state), and the optimizer's moments.

    Whatever dtype is computed in, updates are added up in float32: an update of 1e-6 is lost in bfloat16.

    Args:
      params: of any dtype, anywhere.
      optimizer: from `make_optimizer`.
      config: the model, needed with `mesh`.
      mesh: where the state goes, every array split as `state_partitions` says. None: it stays on its device.
    """

    def make(params: Params) -> TrainState:
        master = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        return TrainState(master, optimizer.init(master), jnp.int32(0))

    if mesh is None:
        return make(params)
    if config is None:
        raise ValueError("init_train_state needs the model's config to lay its state out on a mesh")
    partitions = state_partitions(config, jax.eval_shape(make, params))
    with in_mesh(mesh):
        return jax.jit(make, out_shardings=shardings(mesh, partitions))(params)


def state_partitions(config: ModelConfig, state: TrainState) -> TrainState:
    """How every array of a state (abstract ones will do) is split: moments as their weights, scalars not at all."""
    specs = param_specs(config)

    def partition(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        name = getattr(path[-1], "key", None) if path else None
        if name in specs and leaf.shape == specs[name].shape:
            return param_partition(specs[name].axes)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(partition, state)


def _pin(tree: Any, partitions: Any) -> Any:
    """Pins arrays to the mesh in context; without one they stay as they are."""
    if active_mesh() is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    wanted = jax.tree.leaves(partitions, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.unflatten(treedef, [jax.lax.with_sharding_constraint(x, p) for x, p in zip(leaves, wanted)])


def batch_loss(
    settings: StepSettings, params: Params, batch: PackedBatch, reference: Params | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of packed rows: a sum over targets with the weights in the batch, so micro-batch losses add up.

    Returns:
      The float32 loss and its parts: the metrics of `rl.policy_loss`, "entropy", "kl/reference", and "logprobs"
      [rows, targets].
    """

    def logprobs_under(weights: Params) -> tuple[jax.Array, jax.Array]:
        hidden = hidden_states(
            settings.model,
            weights,
            batch.tokens,
            batch.positions,
            batch.segments,
            batch.prefixes,
            remat=settings.remat,
            dtype=settings.dtype,
        )
        predicting = jnp.take_along_axis(hidden, batch.sources[..., None], axis=1)
        return token_logprobs(
            settings.model,
            weights,
            predicting,
            batch.targets,
            temperature=settings.temperature,
            dtype=settings.dtype,
        )

    logprobs, entropies = logprobs_under(params)
    loss, metrics = policy_loss(
        logprobs,
        batch.behavior_logprobs,
        batch.advantages,
        batch.weights,
        kind=settings.loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        segment_ids=batch.target_segments,
    )
    live = batch.weights > 0
    entropy = jnp.sum(batch.weights * jnp.where(live, entropies, 0.0))
    metrics = dict(metrics, entropy=entropy, loss=loss)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    if settings.kl_coef and reference is not None:
        reference_logprobs = jax.lax.stop_gradient(logprobs_under(reference)[0])
        penalty = jnp.sum(
            batch.weights * kl_penalty(logprobs, reference_logprobs, settings.kl_kind, mask=batch.weights)
        )
        loss = loss + settings.kl_coef * penalty
        metrics["kl/reference"] = penalty
    metrics["logprobs"] = logprobs
    return loss, jax.lax.stop_gradient(metrics)


def _combine(total: dict[str, jax.Array], new: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of micro-batches: weighted sums add up, maxima are maxima."""
    return {k: jnp.maximum(total[k], v) if k.endswith("/max") else total[k] + v for k, v in new.items()}


@partial(jax.jit, static_argnames=("settings", "optimizer"), donate_argnames=("state",))
def _train_step(
    settings: StepSettings,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: PackedBatch,
    num_micro_batches: jax.Array,
    reference: Params | None,
):
    grad_of = jax.value_and_grad(partial(batch_loss, settings), has_aux=True)
    partitions = state_partitions(settings.model, state)

    def micro_batch(index):
        return PackedBatch(*(jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in batch))

    def add(index, carry):
        grads, metrics, logprobs = carry
        (_, new), new_grads = grad_of(state.params, micro_batch(index), reference)
        logprobs = logprobs.at[index].set(new.pop("logprobs"))
        grads = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), grads, new_grads)
        return _pin(grads, partitions.params), _combine(metrics, new), logprobs

    shapes = jax.eval_shape(partial(batch_loss, settings), state.params, micro_batch(0), reference)[1]
    del shapes["logprobs"]
    zeros = (
        _pin(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params), partitions.params),
        {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()},
        jnp.zeros(batch.targets.shape, jnp.float32),
    )
    # The trip count is data: a batch with fewer micro-batches costs less and compiles nothing new.
    grads, metrics, logprobs = jax.lax.fori_loop(0, num_micro_batches, add, zeros)

    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updated = TrainState(optax.apply_updates(state.params, updates), opt_state, state.num_updates + 1)
    # Nothing to learn from, or a gradient that is not finite: leave everything, Adam's moments too, as it was.
    applies = (metrics["weight/sum"] > 0) & jnp.isfinite(norm)
    state = _pin(jax.tree.map(partial(jnp.where, applies), updated, state), partitions)
    metrics = dict(metrics, grad_norm=norm, skipped=(~applies).astype(jnp.float32))
    return state, metrics, logprobs


def batch_partitions() -> PackedBatch:
    """How the arrays of a stacked batch [micro-batches, rows, ...] are split."""
    tokens, targets = (PartitionSpec(None, *activation_partition("batch", axis)) for axis in ("time", None))
    per_token = {"tokens", "positions", "segments", "prefixes"}
    return PackedBatch(**{name: tokens if name in per_token else targets for name in PackedBatch._fields})


def _spread(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that all processes have whole, over the devices of all of them."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _whole(values: jax.Array) -> np.ndarray:
    """An array of all processes, on each of them."""
    if values.is_fully_addressable or values.is_fully_replicated:
        return np.asarray(values)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values, tiled=True))


def train_step(
    settings: StepSettings,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: PackedBatch,
    *,
    micro_batch_rows: int,
    max_micro_batches: int,
    reference: Params | None = None,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, float], np.ndarray]:
    """One optimizer update on a packed batch.

    Args:
      settings: the loss.
      optimizer: from `make_optimizer`.
      state: is consumed (donated).
      batch: any number of rows up to micro_batch_rows * max_micro_batches.
      micro_batch_rows: rows whose activations are held at once.
      max_micro_batches: fixes the shape; unused ones are not computed.
      reference: parameters for the KL term.
      mesh: what the state lies on; `data` x `fsdp` must divide micro_batch_rows, `sequence` x `tensor` the row.

    Returns:
      The new state, metrics as Python floats, and the logprobs [rows, targets] of the batch's targets under the
      parameters *before* the update.

    Raises:
      ValueError: the batch has too many rows.
    """
    rows = batch.tokens.shape[0]
    padded = pad_rows(batch, micro_batch_rows * max_micro_batches)
    stacked = PackedBatch(*(x.reshape(max_micro_batches, micro_batch_rows, -1) for x in padded))
    used = np.int32(-(-rows // micro_batch_rows))
    with in_mesh(mesh):
        if mesh is not None:
            stacked = PackedBatch(*map(_spread, stacked, shardings(mesh, batch_partitions())))
        state, metrics, logprobs = _train_step(settings, optimizer, state, stacked, used, reference)
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    return state, values, _whole(logprobs).reshape(-1, logprobs.shape[-1])[:rows]
