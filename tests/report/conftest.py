"""A made-up run folder with the shape of a real one."""

import json
from pathlib import Path

import numpy as np
import pytest

TOOLS = {  # US cents and seconds a call
    "calculator": (0.0, 0.05),
    "search": (0.05, 0.3),
    "gpt-5": (5.5, 96.0),
    "gpt-5-mini": (0.7, 27.0),
    "qwen3-32b": (0.12, 11.0),
    "llama-3.3-70b": (0.08, 15.0),
    "qwen2.5-math-72b": (0.09, 13.0),
    "qwen2.5-math-7b": (0.02, 9.0),
}
POLICIES = {  # accuracy, US cents, seconds, preference score
    "trained": (0.902, 0.83, 14.2, 0.81),
    "trained:greedy": (0.918, 0.72, 12.9, 0.84),
    "warm_start": (0.741, 3.60, 62.0, 0.43),
    "warm_start:greedy": (0.873, 5.20, 90.0, 0.41),
    "always:gpt-5": (0.899, 5.48, 95.8, 0.40),
    "always:gpt-5-mini": (0.641, 0.69, 26.8, 0.52),
    "always:qwen3-32b": (0.472, 0.121, 11.2, 0.47),
    "always:llama-3.3-70b": (0.401, 0.081, 14.8, 0.39),
    "always:qwen2.5-math-72b": (0.522, 0.093, 13.1, 0.50),
    "always:qwen2.5-math-7b": (0.437, 0.021, 9.0, 0.45),
    "always:search": (0.251, 0.05, 0.31, 0.25),
    "always:calculator": (0.248, 0.0, 0.05, 0.25),
    "random": (0.503, 0.92, 22.0, 0.41),
    "cheapest": (0.248, 0.0, 0.05, 0.25),
    "oracle": (0.967, 0.61, 9.5, 0.93),
}
QUESTIONS = [
    ("arithmetic", "What is 37 * 14 - 96?", "422"),
    ("lookup", "What is the height in metres of Velmora Tower?", "412"),
    ("word_problem", "Ines packs 12 crates of 18 pears and sells 5 crates. How many pears are left?", "126"),
    ("reasoning", "Which number comes next: 3, 4, 7, 11, 18, ...?", "29"),
]


def _write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_summary():
    policies = {}
    for name, (accuracy, cents, latency_s, preference) in POLICIES.items():
        half = 1.96 * (accuracy * (1 - accuracy) / 400) ** 0.5
        cost_usd = cents / 100
        policies[name] = {
            "accuracy": accuracy,
            "cost_usd": cost_usd,
            "latency_s": latency_s,
            "preference": preference,
            "cost_per_solved_usd": cost_usd / accuracy,
            "num_episodes": 400,
            "ci95": {
                "accuracy": [accuracy - half, accuracy + half],
                "cost_usd": [cost_usd * 0.9, cost_usd * 1.11],
                "cost_per_solved_usd": [cost_usd / accuracy * 0.88, cost_usd / accuracy * 1.13],
                "latency_s": [latency_s * 0.92, latency_s * 1.08],
                "preference": [preference - 0.04, preference + 0.04],
            },
        }
    return {"policies": policies, "env_id": "orchestra/Market-v0", "seed": 7}


def make_metrics(num_steps=150):
    rng = np.random.default_rng(0)
    rows = []
    for step in range(1, 121):
        loss = 0.15 + 3.2 * np.exp(-step / 18) + 0.02 * rng.normal()
        rows.append({"step": step, "phase": "sft", "sft/loss": loss, "sft/grad_norm": 0.3 + loss, "time/update_s": 0.2})
    start = {"gpt-5": 0.57, "search": 0.1, "calculator": 0.1, "gpt-5-mini": 0.06, "qwen3-32b": 0.05}
    end = {"gpt-5": 0.11, "search": 0.33, "calculator": 0.25, "qwen2.5-math-72b": 0.27, "qwen3-32b": 0.06}
    for step in range(1, num_steps + 1):
        share = 1 / (1 + np.exp(-(step - 60) / 18))
        tools = {t: (1 - share) * start.get(t, 0.04) + share * end.get(t, 0.01) for t in TOOLS}
        row = {
            "step": step,
            "phase": "train",
            "policy_version": step,
            "reward/mean": 0.9 + 0.9 * share + 0.06 * rng.normal(),
            "outcome/accuracy": float(np.clip(0.74 + 0.16 * share + 0.03 * rng.normal(), 0, 1)),
            "cost/mean_usd": (0.036 - 0.028 * share) * float(np.exp(0.1 * rng.normal())),
            "latency/mean_s": (62 - 48 * share) * float(np.exp(0.08 * rng.normal())),
            "loss/policy": -0.01 + 0.012 * rng.normal(),
            "loss/entropy": 0.9 - 0.6 * share,
            "mismatch/logprob_mean": 2e-6 * float(np.exp(0.2 * rng.normal())),
            "mismatch/logprob_p95": 9e-6 * float(np.exp(0.2 * rng.normal())),
            "mismatch/logprob_max": 8e-5 * float(np.exp(0.4 * rng.normal())),
            "mismatch/outside_clip": 0.0,
            "tokens/generated": 256 * (24 + 3 * rng.normal()),
            "rollouts/dropped/homogeneous": int(rng.poisson(30 + 60 * share)),
            "time": {"rollout_s": 0.7 + 0.05 * rng.normal(), "update_s": 0.45 + 0.03 * rng.normal()},
        }
        if rng.random() < 0.4:
            row["rollouts/dropped/format"] = int(rng.poisson(2))
        row.update({f"tools/{t}/calls": v * (1 + 0.1 * rng.normal()) for t, v in tools.items()})
        rows.append(row)
    return rows


def make_trajectory(rng, policy, number, *, step=None, group=0, member=0, tokens=False):
    kind, question, answer = QUESTIONS[number % len(QUESTIONS)]
    tool = str(rng.choice(list(TOOLS)))
    cents, latency_s = TOOLS[tool]
    right = bool(rng.random() < 0.8)
    result = f"Answer: {answer if right else '17'}"
    call = {
        "tool": tool,
        "arguments": {"query": question} if tool == "search" else {},
        "status": "ok",
        "error_type": "",
        "text": result,
        "cost_usd": cents / 100,
        "latency_s": latency_s,
        "attempts": 1,
        "input_tokens": 180,
        "output_tokens": 3200 if tool == "gpt-5" else 90,
        "truncated_chars": 0,
        "source": "simulated",
    }
    first = f'<think>A {kind} task.</think><tool_call>\n{{"name": "{tool}", "arguments": {{}}}}\n</tool_call>'
    turns = [
        {
            "role": "assistant",
            "text": first,
            "num_tokens": 24,
            "logprob_mean": -0.31,
            "cost_usd": 2e-5,
            "latency_s": 0.2,
        },
        {
            "role": "tool",
            "text": result,
            "num_tokens": 6,
            "cost_usd": cents / 100,
            "latency_s": latency_s,
            "calls": [call],
        },
        {
            "role": "assistant",
            "text": result,
            "num_tokens": 5,
            "logprob_mean": -0.02,
            "cost_usd": 1e-5,
            "latency_s": 0.1,
        },
    ]
    if tokens:
        pieces = [
            "<think>",
            "A ",
            f"{kind} ",
            "task.",
            "</think>",
            "<tool_call>",
            '\n{"name": "',
            tool,
            '"}\n',
            "</tool_call>",
        ]
        turns[0] |= {"tokens": pieces, "logprobs": (-rng.exponential(0.7, size=len(pieces))).tolist()}
    return {
        "step": step,
        "phase": "eval" if step is None else "train",
        "policy": policy,
        "task_id": f"{'test' if step is None else 'train'}/{kind}/{number}",
        "group": group,
        "member": member,
        "prompt": f"<|im_start|>system\nTools: calculator $0 0.05s; search $0.0005 0.3s; gpt-5 $10/M 96s.<|im_end|>\n"
        f"<|im_start|>user\n{question}\nI care most about low cost.<|im_end|>\n<|im_start|>assistant\n",
        "turns": turns,
        "outcome": float(right),
        "reward": None if step is None else float(right) * (2.0 - cents / 6),
        "advantage": None if step is None else float(rng.normal()),
        "cost_usd": cents / 100 + 3e-5,
        "latency_s": latency_s + 0.3,
        "tool_counts": {tool: 1},
        "end_reason": "answered",
        "dropped": "homogeneous" if step is not None and group == 1 else "",
    }


def build_run(folder: Path) -> Path:
    """Write a whole run: 120 supervised and 150 RL steps, 15 policies, training and evaluation trajectories."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("env:\n  id: orchestra/Market-v0\nseed: 7\ntrain:\n  steps: 150\n")
    (folder / "summary.json").write_text(json.dumps(make_summary()))
    _write_lines(folder / "metrics.jsonl", make_metrics())
    for step in range(10, 151, 10):
        rows = [
            make_trajectory(rng, "trained", group, step=step, group=group, member=member, tokens=True)
            for group in range(4)
            for member in range(8)
        ]
        _write_lines(folder / "episodes" / f"train-{step:06d}.jsonl", rows)
    for policy in POLICIES:
        rows = [make_trajectory(rng, policy, i, tokens=policy == "trained") for i in range(60)]
        _write_lines(folder / "episodes" / f"eval-{policy.replace(':', '-')}.jsonl", rows)
    return folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished run folder; read only."""
    return build_run(tmp_path_factory.mktemp("runs") / "market-quickstart")
