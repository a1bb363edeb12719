"""A run killed at any moment and resumed equals one that was not: same metrics but for times, same parameters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_config

ROOT = Path(__file__).parents[2]


def start(config: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "orchestra_jax.cli.main", "train", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def finish(config: Path) -> None:
    process = start(config)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    file = folder / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"the run never wrote {count} rows of metrics")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    finish(write_config(folder))
    return folder / "run"


@pytest.mark.slow
def test_sigkill_in_warm_start_and_in_training(unbroken, tmp_path):
    config = write_config(tmp_path)
    total = len(rows(unbroken))
    warm = sum(row["phase"] == "sft" for row in rows(unbroken))
    assert warm >= 2
    assert total == warm + 6
    for kill_at in (1, warm + 1, warm + 4):
        process = start(config)
        wait_for_rows(tmp_path / "run", kill_at, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(config)
    assert rows(tmp_path / "run") == rows(unbroken)
    assert_same_policy(tmp_path / "run", unbroken)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(unbroken, tmp_path):
    config = write_config(tmp_path)
    warm = sum(row["phase"] == "sft" for row in rows(unbroken))
    process = start(config)
    wait_for_rows(tmp_path / "run", warm + 1, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "checkpoint" in errors.splitlines()[-1]
    done = len(rows(tmp_path / "run"))
    assert warm < done < warm + 6
    finish(config)
    assert rows(tmp_path / "run") == rows(unbroken)
    assert_same_policy(tmp_path / "run", unbroken)


def assert_same_policy(a: Path, b: Path) -> None:
    for folder in ("warm_start", "model"):
        assert (a / folder / "model.safetensors").read_bytes() == (b / folder / "model.safetensors").read_bytes()
    assert json.loads((a / "summary.json").read_text()) == json.loads((b / "summary.json").read_text())
