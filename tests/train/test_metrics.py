"""metrics.jsonl, TensorBoard events and trackers: nothing twice after a resume, and nothing that stops a run."""

import importlib.util
import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboardX import SummaryWriter

from orchestra_jax.config import ConfigError, load_config
from orchestra_jax.train.folder import RunFolder, find_run, open_run
from orchestra_jax.train.metrics import MetricsWriter, _read_events
from orchestra_jax.train.trackers import Follower, open_trackers, tracked_name


def a_row(step, phase="train", **numbers):
    return {"step": step, "phase": phase, "policy_version": step, **numbers}


def events(folder):
    """(phase, tag, step) -> (values, wall times) of all TensorBoard events of a run."""
    found = {}
    for file in sorted((folder / "tensorboard").rglob("events.out.tfevents.*")):
        for event in _read_events(file):
            for value in event.summary.value:
                values, times = found.setdefault((file.parent.name, value.tag, event.step), ([], []))
                values.append(round(value.simple_value, 6))
                times.append(event.wall_time)
    return found


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- metrics.jsonl and TensorBoard ---


def test_numbers_go_to_both_and_what_is_not_finite_is_null(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(a_row(1, **{"reward/mean": 0.5, "optimizer/grad_norm": float("nan"), "note": "text"}))
    [row] = lines(tmp_path)
    assert row["optimizer/grad_norm"] is None
    assert {key: values for key, (values, _) in events(tmp_path).items()} == {("train", "reward/mean", 1): [0.5]}


def test_phases_do_not_share_a_curve(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(a_row(1, "sft", **{"time/update_s": 0.1}))
        metrics.write(a_row(1, "train", **{"time/update_s": 0.2}))
    assert {key[0]: values for key, (values, _) in events(tmp_path).items()} == {"sft": [0.1], "train": [0.2]}


def test_steps_done_again_after_a_resume_stand_once(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step in (1, 2):
            metrics.write(a_row(step, "sft", **{"sft/loss": 1.0 / step}))
        metrics.write(a_row(1, **{"reward/mean": 0.1}))
        kept = metrics.flush()
        for step in (2, 3):
            metrics.write(a_row(step, **{"reward/mean": 0.1 * step}))
    before = events(tmp_path)
    with MetricsWriter(tmp_path) as metrics:
        metrics.truncate(kept)
        for step in (2, 3, 4):
            metrics.write(a_row(step, **{"reward/mean": 0.1 * step}))
    after = events(tmp_path)
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 1, 2, 3, 4]
    assert {key: values for key, (values, _) in after.items()} == {
        ("sft", "sft/loss", 1): [1.0],
        ("sft", "sft/loss", 2): [0.5],
        **{("train", "reward/mean", step): [round(0.1 * step, 6)] for step in (1, 2, 3, 4)},
    }
    # What was not done again keeps the time at which it was measured.
    for key in (("sft", "sft/loss", 2), ("train", "reward/mean", 1)):
        assert after[key][1] == before[key][1]


def test_events_that_a_kill_kept_from_the_disk_come_back(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(a_row(step, **{"reward/mean": 0.5}))
        kept = metrics.flush()
    [file] = (tmp_path / "tensorboard" / "train").iterdir()
    file.write_bytes(file.read_bytes()[:-20])  # the last event is cut off
    with MetricsWriter(tmp_path) as metrics:
        metrics.truncate(kept)
    assert sorted(step for _, _, step in events(tmp_path)) == [1, 2, 3]


def test_a_phase_that_starts_again_leaves_nothing_of_its_first_try(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(a_row(1, "sft", **{"sft/loss": 1.0}))
        metrics.write(a_row(1, **{"reward/mean": 0.1}))
        metrics.write(a_row(2, **{"reward/mean": 0.2}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ph')  # killed while it wrote
    with MetricsWriter(tmp_path) as metrics:
        metrics.drop_phase("train")
        metrics.write(a_row(1, **{"reward/mean": 0.3}))
    assert {key: values for key, (values, _) in events(tmp_path).items()} == {
        ("sft", "sft/loss", 1): [1.0],
        ("train", "reward/mean", 1): [0.3],
    }


def test_a_phase_after_another_in_one_process_rewrites_nothing(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(a_row(1, "sft", **{"sft/loss": 1.0}))
        [before] = (tmp_path / "tensorboard").rglob("events*")
        metrics.drop_phase("train")
        metrics.write(a_row(1, **{"reward/mean": 0.1}))
    assert before.exists()
    assert len(events(tmp_path)) == 2


def test_events_of_an_older_version_are_taken_over(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(a_row(1, **{"reward/mean": 0.5}))
        kept = metrics.flush()
    for file in (tmp_path / "tensorboard").rglob("events*"):
        file.unlink()
    with SummaryWriter(str(tmp_path / "tensorboard")) as old:
        for _ in range(2):  # doubled, as a resume left them
            old.add_scalar("reward/mean", 0.5, 1, walltime=1e9)
    with MetricsWriter(tmp_path) as metrics:
        metrics.truncate(kept)
    assert events(tmp_path) == {("train", "reward/mean", 1): ([0.5], [1e9])}


# --- trackers ---


class FakeRun:
    """A tracker run that remembers."""

    def __init__(self, fail_at=None):
        self.rows, self.finished, self.fail_at = [], None, fail_at

    def log(self, index, phase, step, numbers):
        if self.fail_at == (phase, step):
            raise ConnectionError("no route to host")
        self.rows.append((index, phase, step, dict(numbers)))

    def finish(self, failed):
        self.finished = failed


def follow(folder, run, **more):
    opened = []

    def opener(folder, run_id, config):
        opened.append(run_id)
        return run

    return Follower("fake", folder, {"seed": 1}, opener, **more), opened


def test_every_row_is_told_once_over_a_resume(tmp_path):
    first = FakeRun()
    follower, opened = follow(tmp_path, first)
    with MetricsWriter(tmp_path, [follower]) as metrics:
        metrics.write(a_row(1, "sft", **{"sft/loss": 1.0}))
        kept = metrics.flush()
        for step in (1, 2):
            metrics.write(a_row(step, **{"reward/mean": 0.1 * step}))
    second = FakeRun()
    resumed, opened_again = follow(tmp_path, second)
    with MetricsWriter(tmp_path, [resumed]) as metrics:
        metrics.truncate(kept)
        for step in (1, 2, 3):
            metrics.write(a_row(step, **{"reward/mean": 0.1 * step}))
    assert opened == opened_again
    assert [row[:3] for row in first.rows] == [(0, "sft", 1), (1, "train", 1), (2, "train", 2)]
    assert [row[:3] for row in second.rows] == [(3, "train", 3)]  # the fourth row that it is told
    assert second.rows[0][3] == pytest.approx({"reward/mean": 0.3})
    assert first.finished is False


def test_a_tracker_that_fails_is_left_behind_and_its_losses_counted(tmp_path, caplog):
    broken, sound = FakeRun(fail_at=("train", 2)), FakeRun()
    follower, _ = follow(tmp_path, broken)
    other = Follower("other", tmp_path, {}, lambda *_: sound)
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path, [follower, other]) as metrics:
        for step in (1, 2, 3):
            metrics.write(a_row(step, **{"reward/mean": 0.1}))
    assert len(lines(tmp_path)) == len(sound.rows) == 3
    assert len(broken.rows) == 1
    assert follower.num_untold == 2
    assert "tracker fake failed, and is left out from train step 2 on: ConnectionError: no route" in caplog.text
    assert "2 steps never reached it" in caplog.text


def test_a_tracker_that_does_not_even_open(tmp_path, caplog):
    def opener(folder, run_id, config):
        raise SystemError("no login")

    follower = Follower("fake", tmp_path, {}, opener)
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path, [follower]) as metrics:
        metrics.write(a_row(1))
    assert len(lines(tmp_path)) == 1
    assert "SystemError: no login" in caplog.text


def test_a_slow_tracker_holds_nobody_up(tmp_path, caplog):
    gate = threading.Event()
    run = FakeRun()
    run.log = lambda *_: gate.wait(20)
    follower, _ = follow(tmp_path, run, close_timeout_s=0.05)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path, [follower]) as metrics:
        for step in range(1, 20):
            metrics.write(a_row(step))
    assert time.monotonic() - begun < 5
    assert "still sending after 0.05 s; not waited for" in caplog.text
    gate.set()


def test_an_interrupted_run_is_told_as_such(tmp_path):
    run = FakeRun()
    follower, _ = follow(tmp_path, run)

    def interrupted():
        with MetricsWriter(tmp_path, [follower]) as metrics:
            metrics.write(a_row(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert run.finished is True


def test_a_damaged_state_begins_a_new_tracker_run(tmp_path, caplog):
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "fake.json").write_text("{")
    run = FakeRun()
    follower, _ = follow(tmp_path, run)
    with MetricsWriter(tmp_path, [follower]) as metrics:
        metrics.write(a_row(7))
    assert len(run.rows) == 1
    assert json.loads((tmp_path / "tracking" / "fake.json").read_text())["told"] == {"train": 7}


def test_names_of_phases_do_not_collide():
    assert tracked_name("sft", "time/update_s") == "sft/time/update_s"
    assert tracked_name("sft", "sft/loss") == "sft/loss"
    assert tracked_name("train", "time/update_s") == "time/update_s"


def test_a_tracker_that_is_not_installed_is_the_users_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers: wandb is not installed: pip install 'orchestra-jax\[wandb\]'"):
        open_trackers(["wandb"], tmp_path, {})


def test_trackers_may_change_when_a_run_is_resumed(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{preset: market-tiny}}\ntext: {{tokenizer: market}}\noutput_dir: {tmp_path / 'run'}\n")
    folder = RunFolder(tmp_path / "run")
    open_run(folder, load_config(config), overwrite=False)
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert find_run(load_config(config, ["trackers=[wandb]"]), overwrite=False) == folder
    with pytest.raises(ConfigError, match="trackers"):
        load_config(config, ["trackers=[mlflow]"])


# --- the real ones, offline ---

RUN = """
import sys
from pathlib import Path
from orchestra_jax.train.metrics import MetricsWriter
from orchestra_jax.train.trackers import open_trackers

folder, name, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with MetricsWriter(folder, open_trackers([name], folder, {"seed": 7})) as metrics:
    for step in range(first, last + 1):
        metrics.write({"step": step, "phase": "train", "reward/mean": step / 8})
"""


def run_offline(folder, name, first, last):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO", "HF_"))}
    environment |= {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), name, str(first), str(last)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
needs_trackio = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")


@needs_wandb
def test_wandb_offline_goes_on_in_the_same_run(tmp_path):
    run_offline(tmp_path, "wandb", 1, 3)
    run_offline(tmp_path, "wandb", 2, 5)  # resumed from an older checkpoint: 2 and 3 again
    files = sorted(Path(tmp_path, "tracking", "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # one id
    text = b"".join(file.read_bytes() for file in files)
    assert b"reward/mean" in text
    for step in range(1, 6):  # values are written as JSON
        assert str(step / 8).encode() in text
    assert json.loads((tmp_path / "tracking" / "wandb.json").read_text())["told"] == {"train": 5}


@needs_trackio
def test_trackio_goes_on_in_the_same_run(tmp_path):
    run_offline(tmp_path, "trackio", 1, 3)
    run_offline(tmp_path, "trackio", 2, 5)
    with sqlite3.connect(tmp_path / "trackio" / "orchestra-jax.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows] == [
        (s, s / 8) for s in range(1, 6)
    ]
