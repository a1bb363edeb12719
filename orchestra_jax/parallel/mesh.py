"""Meshes from configs, and the checks that find a mesh's mistakes before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from orchestra_jax.parallel.rules import MESH_AXES


def mesh_shape(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    """The sizes of the mesh axes, in their order; one axis may be -1: whatever is left.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh: only one of {', '.join(free)} can be -1")
    text = ", ".join(f"{axis}={sizes[axis]}" for axis in MESH_AXES)
    if free and num_devices % known:
        raise ValueError(f"mesh ({text}): {num_devices} devices cannot be divided by {known}")
    if not free and known != num_devices:
        raise ValueError(f"mesh ({text}) asks for {known} devices, there are {num_devices}")
    return tuple(num_devices // known if sizes[axis] == -1 else sizes[axis] for axis in MESH_AXES)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """The mesh over `devices` (default: all), or None for a single device, which needs none.

    Devices of TPUs are laid out along their torus; the slices of a multi-slice system lie along `data`, whose traffic
    (one reduction of the gradients a micro-batch) is what the network between slices can bear.

    Raises:
      ValueError: the sizes do not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices))
    if len(devices) == 1:
        return None
    return Mesh(_arrange(shape, devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _arrange(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    from jax.experimental import mesh_utils

    num_slices = len({device.slice_index for device in devices if hasattr(device, "slice_index")}) or 1
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    if shape[0] % num_slices:
        raise ValueError(f"mesh.data ({shape[0]}) must be a multiple of the {num_slices} slices: they lie along it")
    return mesh_utils.create_hybrid_device_mesh(
        (shape[0] // num_slices, *shape[1:]),
        (num_slices, 1, 1, 1),
        devices=devices,
        allow_split_physical_axes=True,
    )


def in_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """The context in which programs for `mesh` are traced; none without one."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def shardings(mesh: Mesh, partitions: Any) -> Any:
    """A tree of `NamedSharding` from a tree of `PartitionSpec`, spelled as compiled programs spell their results.

    Mesh axes of size 1 and trailing Nones are left out: jit takes two spellings of one sharding for two programs.
    """

    def sharding(partition: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, _canonical(mesh, partition))

    return jax.tree.map(sharding, partitions, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _canonical(mesh: Mesh, partition: PartitionSpec) -> PartitionSpec:
    entries: list[Any] = []
    for entry in partition:
        axes = entry if isinstance(entry, tuple) else (entry,)
        split = tuple(axis for axis in axes if axis is not None and mesh.shape[axis] > 1)
        entries.append(split if len(split) > 1 else split[0] if split else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def check_divides(mesh: Mesh | None, sizes: Mapping[str, tuple[int, Sequence[str]]]) -> None:
    """Checks that quantities can be split: by name, (the quantity, the mesh axes that split it).

    Raises:
      ValueError: names the quantity, the axes and their size.
    """
    if mesh is None:
        return
    for name, (size, axes) in sizes.items():
        ways = int(np.prod([mesh.shape[axis] for axis in axes]))
        if size % ways:
            split = " x ".join(f"mesh.{axis}" for axis in axes)
            raise ValueError(f"{name} ({size}) must be a multiple of {split} ({ways})")
