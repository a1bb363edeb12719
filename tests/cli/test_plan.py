"""`orchestra plan` from the command line, on virtual devices and, where libtpu is, for a real topology."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml

CONFIG = {
    "model": {
        "preset": "market-tiny",
        "overrides": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16},
        "dtype": "bfloat16",
        "remat": "layer",
    },
    "mesh": {"fsdp": 2, "tensor": 2, "sequence": 2},
    "text": {"tokenizer": "market", "tools": "compact"},
    "rollout": {"tasks_per_step": 4, "group_size": 4, "max_tokens": 256, "max_turn_tokens": 32},
    "train": {"row_tokens": 512, "row_targets": 256, "micro_batch_rows": 2},
}


def plan(tmp_path, *arguments):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, "-m", "orchestra_jax.cli.main", "plan", str(config), *arguments]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_virtual_devices_are_planned_for(tmp_path):
    file = tmp_path / "plan.json"
    done = plan(tmp_path, "--topology", "cpu:8", "--usd-per-chip-hour", "1.5", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "fits: the compiler's peak" in done.stdout
    found = json.loads(file.read_text())
    assert found["fits"] is True
    assert found["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2}
    memory = found["hbm_gib_per_chip"]
    assert memory["parameters"] * 2 == pytest.approx(memory["optimizer"], rel=0.05)  # two moments
    assert memory["parameters"] < memory["peak"] < memory["limit"]
    # Recomputation of layers is a third of forward and backward, attention's more; the head's is another forward.
    assert 1.2 < found["flops_per_chip"] / found["model_flops_per_chip"] < 2.5
    assert {"all-gather", "all-reduce"} <= found["collectives"].keys()
    assert found["micro_batches"] == 8
    estimate = found["estimate"]
    assert estimate["usd_per_1000_steps"] == pytest.approx(1000 * estimate["step_s"] / 3600 * 8 * 1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:4x4"], "kinds: v4, v5e"),
        (["--topology", "cpu:many"], "give the number of devices"),
        (["--topology", "cpu:8", "--num-slices", "0"], "--num-slices must be at least 1"),
        (["--topology", "cpu:6"], "asks for 8 devices, there are 6"),
        (["--topology", "cpu:8", "train.micro_batch_rows=3"], "train.micro_batch_rows (3) must be a multiple"),
        (["--topology", "cpu:8", "--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, arguments, message):
    done = plan(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'orchestra-jax[plan]'"
)
def test_a_real_topology_is_compiled_for(tmp_path):
    file = tmp_path / "plan.json"
    overrides = ["model.overrides={num_heads: 8, num_kv_heads: 4, head_dim: 128}", "train.row_tokens=1024"]
    done = plan(tmp_path, *overrides, "--topology", "v5e:2x4", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["num_devices"] == 8
    assert found["hbm_gib_per_chip"]["limit"] == 15.75
    assert found["fits"] is True
