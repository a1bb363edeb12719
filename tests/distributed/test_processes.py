"""Two and four processes on one machine over gloo: the same run as one process with as many devices, kills included."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from orchestra_jax.config import parse_config
from orchestra_jax.train.run import step_jobs

ROOT = Path(__file__).parents[2]
HEARTBEAT_S = 12
STEPS = 8
CONFIG = {
    "seed": 11,
    "env": {"id": "lengths:test/Lengths-v0"},
    "model": {
        "preset": "market-tiny",
        "overrides": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "head_dim": 8},
    },
    "text": {"tokenizer": "market"},
    "mesh": {"data": 2, "fsdp": 2},
    "rollout": {"tasks_per_step": 4, "group_size": 4, "max_tokens": 48, "max_turn_tokens": 6, "rows": 8},
    "reward": {"form": "return"},
    "advantage": {"drop_unanswered": False, "homogeneity_threshold": 0.0},
    "loss": {"entropy_coef": 0.1},  # a policy with fresh weights earns nothing; this moves it
    "optimizer": {"learning_rate": 1e-2},
    "train": {"steps": STEPS, "micro_batch_rows": 4, "checkpoint_every": 1, "episodes_every": 1},
    "sft": None,
    "eval": None,
}
TOLERANCE = 1e-5
"""Of losses and parameters: sums of float32 may come in another order (parameters were seen to be bit-equal)."""


class Run:
    """`orchestra train` by some processes, four devices in all."""

    def __init__(self, folder: Path, num_processes: int, cache: Path, *arguments: str) -> None:
        config = folder.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(CONFIG | {"output_dir": str(folder)}))
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // num_processes}",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "ORCHESTRA_HEARTBEAT_S": str(HEARTBEAT_S),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs"), str(Path(__file__).parent)]),
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # To files: a pipe that nobody reads is full after a few tracebacks, and its process waits.
        self.logs = [folder.with_name(f"{folder.name}-{port}-{index}.log") for index in range(num_processes)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(num_processes):
            told = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(num_processes)]
            told += ["--process-id", str(index)]
            command = [sys.executable, "-m", "orchestra_jax.cli.main", "train", str(config)]
            with self.logs[index].open("wb") as log:
                told_here = told if num_processes > 1 else []
                self.processes.append(subprocess.Popen([*command, *told_here, *arguments], env=environment, stderr=log))

    def finish(self, timeout_s: float = 300) -> list[tuple[int, str]]:
        """Exit code and standard error of each process."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                process.wait(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running: {[log.read_text()[-3000:] for log in self.logs]}")
        finally:
            for process in self.processes:
                process.kill()
        return [(process.returncode, log.read_text()) for process, log in zip(self.processes, self.logs)]


def rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    timed = ("time/", "sampler/")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines if line[-1] == "\n"
    ]


def assert_same_run(a: Path, b: Path) -> None:
    assert [row["step"] for row in rows(a)] == [row["step"] for row in rows(b)]
    for first, second in zip(rows(a), rows(b)):
        assert first.keys() == second.keys()
        for name, value in first.items():
            if isinstance(value, float) and not name.startswith("mismatch/"):
                assert second[name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), (first["step"], name)
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (a, b))
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, atol=TOLERANCE, rtol=0, err_msg=name)
    for file in sorted((a / "episodes").iterdir()):
        texts = [
            [[turn["text"] for turn in json.loads(line)["turns"]] for line in path.read_text().splitlines()]
            for path in (file, b / "episodes" / file.name)
        ]
        assert texts[0] == texts[1], file.name


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache) -> Path:
    """The folder of a run by one process with four devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    [(code, errors)] = Run(folder, 1, cache).finish()
    assert code == 0, errors
    return folder


def wait_until(reached: Callable[[], bool], run: Run) -> None:
    deadline = time.monotonic() + 250
    while not reached():
        assert time.monotonic() < deadline, "the run never came to this point"
        assert all(process.poll() is None for process in run.processes), run.finish(10)
        time.sleep(0.02)


def newest_checkpoint(folder: Path) -> int:
    marks = (folder / "checkpoints" / "rl").glob("*/COMMITTED.json")
    return max((int(mark.parent.name) for mark in marks), default=0)


@pytest.mark.slow
def test_stopped_killed_and_finished_by_four_a_run_has_the_numbers_of_one_process(
    alone: Path, tmp_path: Path, cache: Path
) -> None:
    # What the comparison rests on: there are gradients, and process 0 has once nothing to give to one of them.
    assert all(row["optimizer/grad_norm"] > 0 for row in rows(alone))
    groups = [[job.seed % 2 for job in step_jobs(parse_config(CONFIG), step)[::4]] for step in range(1, STEPS + 1)]
    assert any(step[0] and step[2] and not (step[1] and step[3]) for step in groups)
    assert [4 * sum(step) for step in groups] == [row["rollouts/dropped/infra"] for row in rows(alone)]
    folder = tmp_path / "run"

    # A signal to one of two processes: both stop after the same step, and it is saved.
    run = Run(folder, 2, cache)
    wait_until(lambda: len(rows(folder)) >= 1, run)
    run.processes[1].send_signal(signal.SIGTERM)
    ends = run.finish(120)
    assert [code for code, _ in ends] == [130, 130], ends
    stopped = rows(folder)[-1]["step"]
    assert newest_checkpoint(folder) == stopped < STEPS - 2

    # One of two is killed: the other ends with a clear line, in bounded time.
    run = Run(folder, 2, cache)
    wait_until(lambda: len(rows(folder)) > stopped, run)
    run.processes[1].kill()
    killed_at = time.monotonic()
    (code, errors), (killed, _) = run.finish(2 * HEARTBEAT_S + 60)
    assert time.monotonic() - killed_at < 2 * HEARTBEAT_S + 60
    assert killed == -signal.SIGKILL
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("orchestra: another process of this run failed, was killed or cannot be reached")
    assert not (folder / "model").exists()

    # Four go on.
    ends = Run(folder, 4, cache).finish()
    assert [code for code, _ in ends] == [0] * 4, ends
    assert "resuming after step" in ends[0][1]
    assert_same_run(alone, folder)
    assert (folder / "report.html").is_file()

    # A mistake that only the first process can see is told by all.
    ends = Run(folder, 2, cache, "seed=2").finish(100)
    assert [code for code, _ in ends] == [2, 2], ends
    assert all("holds a run with another config" in errors for _, errors in ends)
