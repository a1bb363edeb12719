"""A run small enough for tests: a policy of a few thousand parameters on the market."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "seed": 3,
    "env": {"id": "orchestra/Market-v0", "kwargs": {"types": ["arithmetic"], "max_turns": 3}},
    "model": {
        "preset": "market-tiny",
        "overrides": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "head_dim": 8},
    },
    "text": {"tokenizer": "market", "tools": "compact"},
    "rollout": {
        "tasks_per_step": 2,
        "group_size": 4,
        "max_tokens": 176,
        "max_turn_tokens": 10,
        "max_observation_tokens": 32,
    },
    "advantage": {"homogeneity_threshold": 0.0, "drop_unanswered": False, "drop_format_errors": False},
    "reward": {"form": "return"},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"steps": 6, "row_tokens": 256, "micro_batch_rows": 2, "checkpoint_every": 2, "episodes_every": 3},
    "sft": {"num_tasks": 16, "copy_drills": 16, "rows_per_update": 2, "optimizer": {"learning_rate": 1e-3}},
    "eval": {"num_tasks": 6, "baselines": ["always:calculator"], "modes": ["greedy"]},
}


def write_config(folder: Path, name: str = "run", **sections: Any) -> Path:
    """Writes the config, some sections updated, as folder/name.yaml; the run goes to folder/name."""
    data = copy.deepcopy(CONFIG)
    data["output_dir"] = str(folder / name)
    for key, value in sections.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and isinstance(data.get(key), dict) else value
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file
