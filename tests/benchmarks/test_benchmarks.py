"""Each benchmark runs end to end at its smallest size and says what it promises; peers that are absent are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accelerator, multi_turn, sampler_throughput
from benchmarks.peers.peer import Peer, PeerError, start_peers
from orchestra_jax.models import config as models

ROOT = Path(__file__).parents[2]
FAKE = str(Path(__file__).with_name("fake_worker.py"))


@pytest.fixture
def smallest(monkeypatch):
    """A preset of next to nothing."""
    tiny = models.preset("market-tiny", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=1, head_dim=8)
    monkeypatch.setitem(models.PRESETS, "market-tiny", tiny)


def faked(workers):
    return start_peers({name: (python, FAKE, flag) for name, (python, _, flag) in workers.items()})


def test_sampler_throughput(run, smallest, monkeypatch):
    monkeypatch.setattr(sampler_throughput, "start_peers", faked)
    monkeypatch.setattr(sampler_throughput, "ragged_work", lambda n, vocab: ([[1, 2, 3], [4] * 20], [3, 9]))
    small = ("--preset", "market-tiny", "--repeats", 1, "--hf-python", sys.executable)
    result = run(sampler_throughput, *small, "--rows", 2, "--ragged", 2)
    assert "jax" in result["machine"]
    assert result["peers"] == {"hf": {"pytest": pytest.__version__}, "tunix": "absent: --tunix-python was not given"}
    equal, ragged = result["rows"]
    assert (equal["work"], ragged["work"]) == ("2 equal rows", "2 ragged")
    assert ragged["tokens"] == 12
    for row in result["rows"]:
        # Of what the peer takes, whatever we take.
        assert row["ratios"]["hf float32"] == pytest.approx(
            row["tokens_per_s"]["ours float32"] / row["tokens_per_s"]["hf float32"], rel=0.05, abs=0.006
        )
        assert row["errors"] == {"hf bfloat16": "ValueError: no bfloat16 here"}
        assert row["limit_share"] >= 0
        assert row["limits"]["read_bytes_per_s"] > 0
    assert equal["sampler"]["sampler/slot_occupancy"] == 1.0


def test_the_limit_counts_what_must_be_read_and_multiplied():
    """By hand, for two rows of which one ends earlier."""
    config = models.preset("market-tiny")
    slow_reading = {"read_bytes_per_s": 1.0, "matmul_flops_per_s": 1e30}
    weights, token = 4 * config.num_parameters, 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    seconds = weights + (weights + 5 * token) + (weights + 4 * token)
    limit = sampler_throughput.limit_tokens_per_s(config, ([[1, 2], [1, 2, 3]], [1, 2]), slow_reading)
    assert limit == pytest.approx(3 / seconds)
    slow_matmul = {"read_bytes_per_s": 1e30, "matmul_flops_per_s": 1.0}
    limit = sampler_throughput.limit_tokens_per_s(config, ([[1, 2], [1, 2, 3]], [1, 2]), slow_matmul)
    assert limit == pytest.approx(3 / (2 * config.num_parameters * (5 + 2 + 1)))


def test_static_batches_hold_every_row_once_and_answers_of_like_lengths():
    work = sampler_throughput.ragged_work(10, 64)
    batches = sampler_throughput.static_batches(work, 4)
    assert [len(prompts) for prompts, _ in batches] == [4, 4, 2]
    assert sorted(p for prompts, _ in batches for p in prompts) == sorted(work[0])
    answers = [answer for _, answers in batches for answer in answers]
    assert answers == sorted(work[1])


def test_multi_turn(run, smallest, monkeypatch):
    monkeypatch.setattr(multi_turn, "start_peers", faked)
    sizes = ("--trajectories", 2, "--turns", 2, "--slowest-s", 0.11, "--repeats", 1)
    result = run(multi_turn, "--preset", "market-tiny", *sizes, "--tunix-python", sys.executable)
    assert "jax" in result["machine"]
    assert result["peers"]["tunix"] == {"pytest": pytest.__version__}
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["continuous", "lock-step", "full re-prefill", "no tools (limit)", "tunix"]
    assert set(result["ratios"]) == {"lock-step", "full re-prefill", "tunix"}
    assert result["limit_share"] > 0
    plan = multi_turn.draw_plan(2, 2, 64, 0.11)
    appended = sum(len(plan.observations[i][0]) for i in range(2))
    whole = sum(map(len, plan.prompts)) + appended + 2  # the last token of a turn is computed with what follows it
    assert rows["continuous"]["sampled_tokens"] == int(plan.lengths.sum())
    assert rows["continuous"]["prefilled_tokens"] <= whole < rows["full re-prefill"]["prefilled_tokens"]
    assert rows["continuous"]["wall_s"] >= 0.1  # the tool


def test_concurrency(tmp_path):
    """In a process of its own: it forks, and JAX has threads here."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.concurrency", "--episodes", "2", "--turns", "1", "--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(out.read_text("utf-8"))
    assert "gymnasium" in result["machine"]
    assert {row["name"] for row in result["rows"]} > set(result["ratios"])
    assert 0 < result["limit_share"] <= 1


def test_peers_say_what_they_cannot():
    peer = Peer(sys.executable, FAKE)
    assert peer.ask({"new_tokens": [1, 2]}) == {"seconds": 0.01, "tokens": 3}
    with pytest.raises(PeerError, match="ValueError: no bfloat16 here"):
        peer.ask({"dtype": "bfloat16"})
    with pytest.raises(PeerError, match=r"the worker ended with code 1: last words"):
        peer.ask({"kind": "die"})
    with pytest.raises(PeerError, match="the worker ended with code 1"):
        peer.ask({"new_tokens": [1]})
    peer.close()
    peers, about = start_peers({"a": ("/no/such/python", FAKE, "--a"), "b": (sys.executable, "no_such.py", "--b")})
    assert peers == {}
    assert "No such file" in about["a"]
    assert "no_such.py" in about["b"]


# The accelerator's script, on this machine's processor.


def test_accelerator_parts_and_their_failures(monkeypatch, tmp_path, capsys):
    """One part is done, one fails, one has no time: all of it is told."""
    out = tmp_path / "result.json"
    impossible = ["--preset", "market-tiny", "--context=-100"]
    arguments = [*impossible, "--parts", "peaks", "decode", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments])
    assert accelerator.main() == 1
    result = json.loads(out.read_text("utf-8"))
    assert {"machine", "preset", "peaks", "rows", "ratios", "limit_share", "failed"} == set(result)
    assert result["peaks"]["matmul_flops_per_s"] > 0
    assert list(result["failed"]) == ["decode"]
    assert "Error" in result["failed"]["decode"]
    assert "decode FAILED: exit code 1" in capsys.readouterr().out
    assert accelerator.run_part("engine", [], 0.01) == ([], "not done within 0 s")


def test_shares_are_of_the_rate_that_bounds():
    known = {"read_bytes_per_s": 4.0, "matmul_flops_per_s": 8.0, "sheet_bytes_per_s": 5.0, "sheet_flops_per_s": 10.0}
    row = accelerator.with_shares("decode", {"bytes_per_s": 2.0}, known)
    assert (row["measured_bandwidth_share"], row["sheet_bandwidth_share"]) == (0.5, 0.4)
    row = accelerator.with_shares("train", {"flops_per_s": 2.0}, known)
    assert (row["measured_mfu"], row["sheet_mfu"]) == (0.25, 0.2)


@pytest.mark.slow
def test_the_whole_accelerator_script(run):
    result = run(accelerator, "--preset", "market-tiny", "--smoke")
    assert result["failed"] == {}
    parts = [row["part"] for row in result["rows"]]
    assert parts == ["decode", "decode", "decode", "prefill", "train", "train-large", "engine"]
    assert 0 < result["limit_share"] < 2
    rates = np.array([row["tokens_per_s"] for row in result["rows"]])
    assert (rates > 0).all()
