"""How processes find each other: what was told, and by whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestra_jax import distributed
from orchestra_jax.config import ConfigError
from orchestra_jax.distributed import _cluster, _explicit, gather_objects, on_writer, together

TOLD = dict(zip(distributed.VARIABLES, ("10.0.0.1:1234", "4", "2")))
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


def test_flags_go_before_the_environment() -> None:
    assert _explicit(None, None, None, {}) is None
    assert _explicit(None, None, None, dict.fromkeys(distributed.VARIABLES, "")) is None
    assert _explicit(None, None, None, TOLD) == ("10.0.0.1:1234", 4, 2)
    assert _explicit("h:1", 8, 0, TOLD) == ("h:1", 8, 0)
    assert _explicit(None, None, 3, TOLD) == ("10.0.0.1:1234", 4, 3)
    assert _explicit("[::1]:80", 2, 1, {}) == ("[::1]:80", 2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", None, None), r"needs --num-processes \(or ORCHESTRA_NUM_PROCESSES\) and --process-id"),
        ((None, 2, 0), "needs --coordinator"),
        (("h", 2, 0), "must be HOST:PORT"),
        (("http://h:1", 2, 0), "must be HOST:PORT"),
        (("h:1", 2, 2), "--process-id 2 must be at least 0 and below --num-processes 2"),
        (("h:1", 0, 0), "below --num-processes 0"),
    ],
)
def test_half_a_set_up_is_told(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _explicit(*arguments, {})


def test_numbers_of_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be whole numbers"):
        _explicit(None, None, None, TOLD | {"ORCHESTRA_PROCESS_ID": "two"})
    monkeypatch.setenv("ORCHESTRA_HEARTBEAT_S", "soon")
    with pytest.raises(ConfigError, match="ORCHESTRA_HEARTBEAT_S must be a whole number of seconds"):
        distributed._heartbeat_s()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (SLURM, "SLURM"),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),  # a shell of salloc, not a step
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_machines_that_know_of_others(environment: dict[str, str], found: str | None) -> None:
    assert _cluster({"JAX_PLATFORMS": "cpu"} | environment) == found


def test_one_process_agrees_with_itself() -> None:
    assert gather_objects({"a": np.arange(2).tolist()}) == [{"a": [0, 1]}]
    assert on_writer(lambda: 3) == 3
    with pytest.raises(KeyError):
        together(lambda: {}["x"], "looking")
