"""Copies of sharded weights that one process has by itself: every host samples with its own devices."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def to_local(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The same weights over the devices of this process alone; all processes call this. A single one gets its own.

    Within a process each weight is split over its last axis that can be, so that a host holds it once. What travels is
    what a host lacks, one weight at a time.
    """
    if jax.process_count() == 1:
        return dict(params)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = np.array(devices).reshape(jax.process_count(), -1)
    everywhere = Mesh(grid, ("process", "local"), axis_types=(AxisType.Auto,) * 2)
    here = Mesh(grid[jax.process_index()], ("local",), axis_types=(AxisType.Auto,))
    return {name: _own(value, everywhere, here) for name, value in params.items()}


def _own(value: jax.Array, everywhere: Mesh, here: Mesh) -> jax.Array:
    spec = _spec(value.shape, here.size)
    spread = jax.device_put(value, NamedSharding(everywhere, spec))
    parts = [shard.data for shard in spread.addressable_shards]
    if here.size == 1:
        return parts[0]
    return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(here, spec), parts)


def _spec(shape: tuple[int, ...], ways: int) -> PartitionSpec:
    axis = next((axis for axis in reversed(range(len(shape))) if shape[axis] % ways == 0), None)
    if ways == 1 or axis is None or len(shape) < 2:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, "local")
