"""From logical axes to mesh axes: one table for weights, one for activations, and what pins arrays to them.

The mesh has four named axes. `data` holds whole copies, `fsdp` splits weights, optimizer state and rows, `tensor`
splits heads, MLP and vocabulary, `sequence` a row's tokens. Between layers the residual stream is split over `sequence`
and `tensor` along its tokens too (Korthikanti et al. 2022, arXiv 2205.05198), so that no chip holds it twice.

Without a mesh in context (`jax.set_mesh`) everything here leaves its argument as it is: one device needs no rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor", "sequence")

PARAM_RULES: dict[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "rank": None,
}
"""Mesh axis of each logical axis of a weight (`models.decoder.param_specs`)."""

ACTIVATION_RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "time": "sequence",
    "residual_time": ("sequence", "tensor"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
"""Mesh axes of each logical axis of an activation; axes that are not named are not split."""


def active_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh in context, or None where there is none or it has one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def platform() -> str:
    """The platform that is compiled for: the mesh's, which need not be this machine's, or the default backend's."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return device.platform if device is not None else jax.default_backend()


def param_partition(axes: Sequence[str]) -> PartitionSpec:
    """How a weight with these logical axes is stored."""
    return PartitionSpec(*(PARAM_RULES[axis] for axis in axes))


def gathered_partition(axes: Sequence[str]) -> PartitionSpec:
    """How a weight with these logical axes is computed with: whole along `fsdp`, still split along `tensor`."""
    return PartitionSpec(*(None if PARAM_RULES[axis] == "fsdp" else PARAM_RULES[axis] for axis in axes))


def activation_partition(*axes: str | None) -> PartitionSpec:
    """How an activation with these logical axes is split; None is not."""
    return PartitionSpec(*(ACTIVATION_RULES.get(axis) if axis else None for axis in axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to the mesh by the logical name of each of its axes.

    An axis that its mesh axes do not divide is left whole: the single token of a decode step, say.
    """
    mesh = active_mesh()
    if mesh is None:
        return x
    entries = activation_partition(*axes)
    fitting = [entry if size % _ways(mesh, entry) == 0 else None for size, entry in zip(x.shape, entries)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*fitting))


def _ways(mesh: jax.sharding.AbstractMesh, entry: str | tuple[str, ...] | None) -> int:
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    return math.prod(mesh.shape[axis] for axis in axes)


def use_weight(weight: jax.Array, axes: tuple[str, ...], dtype: Any = None) -> jax.Array:
    """A stored weight as it is computed with: cast first, so that less travels, then gathered along `fsdp`.

    Its gradient is pinned to the way the weight is stored: left to itself the compiler may keep gradients whole, and
    the memory that fsdp saves is lost.
    """
    dtype = weight.dtype if dtype is None else jnp.dtype(dtype)
    if active_mesh() is None:
        return weight.astype(dtype)
    return _gather(weight, axes, dtype.name)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight: jax.Array, axes: tuple[str, ...], dtype: str) -> jax.Array:
    stored = jax.lax.with_sharding_constraint(weight.astype(dtype), param_partition(axes))
    return jax.lax.with_sharding_constraint(stored, gathered_partition(axes))


def _gather_forward(weight: jax.Array, axes: tuple[str, ...], dtype: str) -> tuple[jax.Array, jax.Array]:
    return _gather(weight, axes, dtype), jnp.zeros((0,), weight.dtype)


def _gather_backward(axes: tuple[str, ...], dtype: str, witness: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    pinned = jax.lax.with_sharding_constraint(gradient, param_partition(axes))
    return (pinned.astype(witness.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)
