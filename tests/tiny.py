"""A run small enough for tests: a policy of 74,000 parameters on a small part of the market.

Small, but it learns: after the warm start its turns are calls of all tools, so that rewards, gradients and costs differ
from step to step. (Of a policy whose every gradient is 0, a comparison of two runs would say nothing.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

TASKS = {"types": ["arithmetic"], "tools": ["calculator", "search", "gpt-5-mini"], "max_turns": 3}
CONFIG: dict[str, Any] = {
    "seed": 3,
    "env": {"id": "orchestra/Market-v0", "kwargs": TASKS},
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
    "sft": {
        "router": "random",
        "num_tasks": 512,
        "copy_drills": 16,
        "rows_per_update": 1,
        "optimizer": {"learning_rate": 1e-2, "warmup_updates": 10, "final_fraction": 0.1},
    },
    "eval": {"num_tasks": 6, "baselines": ["always:calculator"], "modes": ["sample", "greedy"]},
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
