"""Meshes and rules: sizes, checks, and what without a mesh costs nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from orchestra_jax.models.config import PRESETS
from orchestra_jax.models.decoder import param_specs
from orchestra_jax.parallel.mesh import check_divides, make_mesh, mesh_shape
from orchestra_jax.parallel.rules import (
    MESH_AXES,
    PARAM_RULES,
    constrain,
    gathered_partition,
    param_partition,
    use_weight,
)


def sizes(**given: int) -> dict[str, int]:
    return {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | given


def test_the_free_axis_takes_what_is_left():
    assert mesh_shape(sizes(data=2, fsdp=-1, tensor=4), 32) == (2, 4, 4, 1)
    assert mesh_shape(sizes(fsdp=-1), 1) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("given", "devices", "message"),
    [
        (sizes(fsdp=3), 8, "asks for 3 devices, there are 8"),
        (sizes(fsdp=-1, tensor=3), 8, "8 devices cannot be divided by 3"),
        (sizes(fsdp=-1, data=-1), 8, "only one of"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, devices, message):
    with pytest.raises(ValueError, match=message):
        mesh_shape(given, devices)


def test_one_device_needs_no_mesh_and_is_left_alone():
    assert make_mesh(sizes(fsdp=-1), jax.devices()[:1]) is None
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", "time") is x
    assert str(jax.make_jaxpr(lambda w: use_weight(w, ("embed", "mlp")))(x)).count("custom") == 0


def test_every_logical_axis_of_every_preset_has_a_rule():
    for config in PRESETS.values():
        for spec in param_specs(config).values():
            assert set(spec.axes) <= PARAM_RULES.keys()
            assert len(param_partition(spec.axes)) == len(spec.shape)


def test_gathering_removes_fsdp_alone():
    assert param_partition(("layers", "embed", "mlp")) == PartitionSpec(None, "fsdp", "tensor")
    assert gathered_partition(("layers", "embed", "mlp")) == PartitionSpec(None, None, "tensor")


def test_a_size_that_cannot_be_split_is_named():
    mesh = AbstractMesh((2, 3, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    check_divides(mesh, {"rows": (12, ["data", "fsdp"])})
    with pytest.raises(ValueError, match=r"rows \(10\) must be a multiple of mesh.data x mesh.fsdp \(6\)"):
        check_divides(mesh, {"rows": (10, ["data", "fsdp"])})
