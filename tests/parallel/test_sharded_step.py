"""The same step on one device and on 8 virtual ones in meshes of every shape: same numbers, everything split."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from orchestra_jax.models.decoder import param_specs
from orchestra_jax.parallel.rules import PARAM_RULES

PROGRAM = Path(__file__).with_name("sharded_step.py")
SHAPES = ("1x8x1x1", "2x4x1x1", "8x1x1x1", "1x2x4x1", "2x1x2x2", "1x1x1x8", "1x2x2x2")


@pytest.fixture(scope="module")
def results():
    flags = "--xla_force_host_platform_device_count=8"
    command = [sys.executable, str(PROGRAM), *SHAPES]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    alone, *others = json.loads(done.stdout.splitlines()[-1])
    return alone, dict(zip(SHAPES, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_mesh_gives_the_numbers_of_one_device(results, shape):
    alone, sharded = results[0], results[1][shape]
    # float32 sums of some hundred terms in another order; an AdamW update is the gradient's sign at first, times 1e-3,
    # so where a gradient is nearly 0 a weight may go another way by a part of that.
    np.testing.assert_allclose(sharded["losses"], alone["losses"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sharded["logprobs"], alone["logprobs"], atol=2e-5)  # before the first update
    for name, values in alone["params"].items():
        np.testing.assert_allclose(sharded["params"][name], values, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_both_moments_are_split_and_stay_so(results, shape):
    """Left to the compiler, results of a step may come back whole along fsdp, and its memory is lost silently."""
    sharded = results[1][shape]
    mesh = dict(zip(("data", "fsdp", "tensor", "sequence"), map(int, shape.split("x"))))
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        from sharded_step import CONFIG
    finally:
        sys.path.pop(0)
    for name, spec in param_specs(CONFIG).items():
        expected = [size // mesh.get(PARAM_RULES[axis] or "", 1) for size, axis in zip(spec.shape, spec.axes)]
        assert sharded["shards"][name] == [expected] * 3, name


@pytest.mark.slow
def test_no_mesh_compiles_twice(results):
    assert [results[0]["compiled"], *(result["compiled"] for result in results[1].values())] == [1] * (1 + len(SHAPES))
