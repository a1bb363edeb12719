"""`configs/service.yaml`, two steps of it in small: the warm start on demonstrations, GRPO, the evaluation."""

import json
import math
from pathlib import Path

import pytest

from orchestra_jax.cli.main import main

CONFIG = Path(__file__).parents[3] / "configs/service.yaml"
SMALL_POLICY = "{hidden_size: 32, intermediate_size: 64, num_layers: 1, head_dim: 8, max_position_embeddings: 4096}"
SMALL = [
    f"model.overrides={SMALL_POLICY}",
    "sft.num_tasks=4",
    "sft.copy_drills=64",
    "rollout.tasks_per_step=1",
    "rollout.group_size=2",
    "rollout.max_turn_tokens=40",
    "train.steps=2",
    "train.episodes_every=1",
    "eval.num_tasks=1",
    "eval.modes=[sample]",
]


@pytest.mark.slow
def test_two_steps(tmp_path):
    assert main(["train", str(CONFIG), f"output_dir={tmp_path}", *SMALL]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["sft/loss"] for line in metrics if line["phase"] == "sft"]
    assert losses
    assert all(map(math.isfinite, losses))
    assert [line["step"] for line in metrics if line["phase"] == "train"] == [1, 2]
    for step in (1, 2):
        episodes = read_episodes(tmp_path, f"train-{step:06d}")
        assert len(episodes) == 2
        assert len({episode["task_id"] for episode in episodes}) == 1
        for episode in episodes:
            assert episode["task_id"].startswith("train/library/")
            assert "You are the service agent of a public library." in episode["prompt"]
            assert episode["turns"][0]["role"] == "assistant"
            assert {turn["role"] for turn in episode["turns"]} <= {"assistant", "user", "tool"}
    (demonstrated,) = read_episodes(tmp_path, "eval-demonstration")
    assert demonstrated["task_id"].startswith("test/library/")
    assert demonstrated["outcome"] == 1.0


def read_episodes(folder, name):
    return [json.loads(line) for line in (folder / f"episodes/{name}.jsonl").read_text().splitlines()]
