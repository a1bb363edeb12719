"""A run killed at any moment and resumed equals one that was not: same metrics but for times, same parameters."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestra_jax.cli.main import main
from orchestra_jax.train import run as run_module

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_config

ROOT = Path(__file__).parents[2]
STEPS = 6
WARM = 129
"""Updates of the warm start; there is a checkpoint after 100."""


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[..., subprocess.Popen[str]]:
    """Starts `orchestra train` in a process of its own. Compiled programs are kept for the next one."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs"), os.environ.get("PYTHONPATH", "")])

    def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "orchestra_jax.cli.main", "train", str(config), *arguments]
        return subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **cache, "PYTHONPATH": path}
        )

    return start


@pytest.fixture(scope="module")
def finish(start) -> Callable[..., str]:
    """Runs `orchestra train` to its end; what it wrote to standard error."""

    def finish(config: Path, *arguments: str) -> str:
        process = start(config, *arguments)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return errors

    return finish


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, finish) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    finish(write_config(folder))
    return folder / "run"


@pytest.fixture
def finished(unbroken, tmp_path) -> Path:
    """The config of a copy of that run; the copy lies in tmp_path/run."""
    shutil.copytree(unbroken, tmp_path / "run")
    return write_config(tmp_path)


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    timed = ("time/", "sampler/device_idle_share")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


def num_rows(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not reached():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < deadline, "the run never came to this point"
        time.sleep(0.002)


def assert_same_run(a: Path, b: Path) -> None:
    assert rows(a) == rows(b)
    for folder in ("warm_start", "model"):
        assert (a / folder / "model.safetensors").read_bytes() == (b / folder / "model.safetensors").read_bytes()
    assert json.loads((a / "summary.json").read_text()) == json.loads((b / "summary.json").read_text())
    for name in (f"train-{STEPS:06d}", "eval-trained"):
        assert (a / "episodes" / f"{name}.jsonl").read_text() == (b / "episodes" / f"{name}.jsonl").read_text()


def test_the_run_learns_so_that_comparing_it_means_something(unbroken):
    phases = [(row["phase"], row["step"]) for row in rows(unbroken)]
    assert phases == [("sft", n) for n in range(1, WARM + 1)] + [("train", n) for n in range(1, STEPS + 1)]
    for row in rows(unbroken)[WARM:]:
        assert row["optimizer/grad_norm"] > 0
        assert row["reward/std"] > 0
    assert len({row["cost/mean_usd"] for row in rows(unbroken)[WARM:]}) > 1
    start, trained = ((unbroken / name / "model.safetensors").read_bytes() for name in ("warm_start", "model"))
    assert start != trained


@pytest.mark.slow
def test_killed_at_many_moments(unbroken, tmp_path, start, finish):
    config, folder = write_config(tmp_path), tmp_path / "run"
    rng = random.Random(0)
    moments = {
        "before the first update": lambda: (folder / "config.yaml").exists(),
        "in the warm start, after its checkpoint": lambda: num_rows(folder) >= 104,
        "between the warm start and training": lambda: (folder / "warm_start").exists(),
        "in training, before its first checkpoint": lambda: num_rows(folder) > WARM,
        "while a checkpoint is written": lambda: (folder / "checkpoints" / "rl" / "4").exists(),
        "in training, after a checkpoint": lambda: num_rows(folder) >= WARM + 5,
        "in the evaluation": lambda: (folder / "model").exists(),
    }
    for reached in moments.values():
        process = start(config)
        wait_until(reached, process)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finish(config)
    assert_same_run(folder, unbroken)


@pytest.mark.slow
def test_signals_write_a_checkpoint_and_exit_with_130(unbroken, tmp_path, start, finish):
    config, folder = write_config(tmp_path), tmp_path / "run"
    moments = (
        (signal.SIGINT, lambda: num_rows(folder) >= 10, "sft", 10, WARM),
        (signal.SIGTERM, lambda: num_rows(folder) >= WARM + 1, "rl", 1, STEPS),
    )
    for number, reached, phase, first, last in moments:
        process = start(config)
        wait_until(reached, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert errors.splitlines()[-1].startswith("orchestra: interrupted; a checkpoint is written")
        marks = [mark.parent.name for mark in (folder / "checkpoints" / phase).glob("*/COMMITTED.json")]
        newest = max(map(int, marks))
        assert first <= newest < last
        assert newest == rows(folder)[-1]["step"]

    process = start(config)
    wait_until((folder / "model").exists, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("orchestra: interrupted")
    assert not (folder / "summary.json").exists()
    finish(config)
    assert_same_run(folder, unbroken)


def test_overwrite_starts_anew_and_the_same_seed_gives_the_same_run(unbroken, finished, tmp_path, finish):
    folder = tmp_path / "run"
    (folder / "notes.txt").write_text("mine")
    (folder / "metrics.jsonl").write_text("{}\n")
    finish(finished, "--overwrite")
    assert_same_run(folder, unbroken)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_damaged_checkpoint_is_passed_over(unbroken, finished, tmp_path, finish):
    """The newest is damaged and the results are gone: the run goes on from the one before it."""
    folder = tmp_path / "run"
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    damage(folder / "checkpoints" / "rl" / str(STEPS))
    assert f"resuming after step {STEPS - 2} of {STEPS}" in finish(finished)
    assert_same_run(folder, unbroken)


def test_damaged_checkpoints_alone_are_one_line(finished, tmp_path, capsys):
    shutil.rmtree(tmp_path / "run" / "model")
    for checkpoint in (tmp_path / "run" / "checkpoints" / "rl").iterdir():
        damage(checkpoint)
    assert main(["train", str(finished)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("orchestra: every checkpoint in ")
    assert last.endswith("--overwrite starts the run anew")


def damage(checkpoint: Path) -> None:
    largest = max((file for file in checkpoint.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_a_finished_run_is_only_reported_again(finished, tmp_path, capsys, monkeypatch):
    def state() -> dict[Path, tuple[int, int]]:
        files = (file for file in (tmp_path / "run").rglob("*") if file.is_file() and file.name != "report.html")
        return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}

    before = state()
    monkeypatch.setattr(run_module, "load_policy", None)
    assert main(["train", str(finished)]) == 0
    assert state() == before
    text = capsys.readouterr().err
    assert "finished; --overwrite starts it anew" in text
    assert "trained:greedy" in text
    assert str(tmp_path / "run" / "model") in text


def test_only_what_is_missing_is_done_again(unbroken, finished, tmp_path, monkeypatch):
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    monkeypatch.setattr(run_module, "warm_start", None)
    monkeypatch.setattr(run_module, "train_policy", None)
    assert main(["train", str(finished)]) == 0
    assert_same_run(tmp_path / "run", unbroken)


def test_eval_of_a_run_gives_its_summary(unbroken, finished, tmp_path):
    out = tmp_path / "out.json"
    # In the order of the run's own evaluation: a comparison is of the first with the second.
    policies = [f"warm_start={tmp_path / 'run' / 'warm_start'}", f"trained={tmp_path / 'run'}", "always:calculator"]
    flags = [argument for policy in policies for argument in ("--policy", policy)]
    assert main(["eval", str(finished), *flags, "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == json.loads((unbroken / "summary.json").read_text())


def test_another_config_is_refused(finished, tmp_path, capsys):
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["train", str(finished), "train.steps=7", "env.kwargs.max_turns=2", "seed=4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "seed is 3 there, 4 here; env.kwargs.max_turns is 3 there, 2 here; and 1 more" in line
    assert "--overwrite" in line
    assert main(["train", str(finished), "--overwrite", "sft.router=nobody"]) == 2  # nothing is deleted for a mistake
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_may_be_moved(finished, tmp_path, capsys):
    (tmp_path / "run").rename(tmp_path / "moved")
    assert main(["train", str(finished), f"output_dir={tmp_path / 'moved'}"]) == 0
    assert "finished" in capsys.readouterr().err
