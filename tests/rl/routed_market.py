"""The market under routers whose probabilities are known: logs, and the true value of another router by simulation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from orchestra_envs.baselines import result_value
from orchestra_envs.market.env import MarketEnv
from orchestra_envs.parse import ToolCall, render_call

TYPES = ("arithmetic", "lookup", "word_problem", "reasoning")
TOOLS = ("calculator", "search", "gpt-5", "gpt-5-mini", "qwen2.5-math-7b")
NUM_TURNS = 3
ANSWER = len(TOOLS)
"""The kind of decision beside the tools."""


@dataclass(frozen=True)
class Router:
    """Draws a tool by the type of the task; after its result asks another with probability `again`, then answers."""

    probs: Mapping[str, np.ndarray]
    """By type, [tools]."""
    again: float

    def decisions(self, task_type: str, turn: int) -> np.ndarray:
        """Probabilities [tools + 1] of what it does in a turn; the last is to answer."""
        share = (1.0, self.again, 0.0)[turn]
        return np.append(share * self.probs[task_type], 1.0 - share)


HABIT = Router(
    {
        "arithmetic": np.array([0.25, 0.05, 0.5, 0.1, 0.1]),
        "lookup": np.array([0.05, 0.25, 0.5, 0.1, 0.1]),
        "word_problem": np.array([0.05, 0.05, 0.55, 0.1, 0.25]),
        "reasoning": np.array([0.05, 0.05, 0.5, 0.3, 0.1]),
    },
    again=0.3,
)
"""Mostly the strongest."""
THRIFTY = Router(
    {
        "arithmetic": np.array([0.7, 0.02, 0.12, 0.08, 0.08]),
        "lookup": np.array([0.02, 0.7, 0.2, 0.04, 0.04]),
        "word_problem": np.array([0.02, 0.02, 0.36, 0.1, 0.5]),
        "reasoning": np.array([0.02, 0.02, 0.56, 0.35, 0.05]),
    },
    again=0.2,
)
"""Mostly what suits the task."""


@dataclass(frozen=True)
class Log:
    """N episodes: who did what at which probability, what came of it."""

    types: list[str]
    kinds: np.ndarray  # int [N, T]
    mask: np.ndarray  # bool [N, T]
    probs: np.ndarray  # [N, T, A] of the router that acted
    rewards: dict[str, np.ndarray]  # [N, T]
    tasks: list[int]

    def probs_under(self, router: Router) -> np.ndarray:
        """[N, T, A] of another router in the same states."""
        return np.array([[router.decisions(t, turn) for turn in range(NUM_TURNS)] for t in self.types])

    def log_ratios(self, router: Router) -> np.ndarray:
        """[N, T] of `router` to the one that acted."""
        with np.errstate(divide="ignore"):
            mine, theirs = np.log(self.probs_under(router)), np.log(self.probs)
        with np.errstate(invalid="ignore"):
            ratios = np.take_along_axis(mine - theirs, self.kinds[..., None], axis=2)[..., 0]
        return np.where(self.mask, ratios, 0.0)

    def features(self) -> np.ndarray:
        """[N, T, F]: the type of the task, and the number of the turn."""
        types = np.array([[t == name for name in TYPES] for t in self.types], float)
        turns = np.eye(NUM_TURNS)
        return np.array([[np.concatenate([row, turn]) for turn in turns] for row in types])


def market() -> MarketEnv:
    """The four types of single tasks."""
    return MarketEnv(types=list(TYPES), tools=list(TOOLS))


def play(env: MarketEnv, router: Router, seeds: list[int], rng: np.random.Generator) -> Log:
    """One episode of each task."""
    num = len(seeds)
    kinds, mask = np.zeros((num, NUM_TURNS), np.int64), np.zeros((num, NUM_TURNS), bool)
    probs = np.zeros((num, NUM_TURNS, len(TOOLS) + 1))
    rewards = {name: np.zeros((num, NUM_TURNS)) for name in ("accuracy", "cost_usd", "latency_s")}
    types = []
    for row, seed in enumerate(seeds):
        observation, info = env.reset(seed=seed, options={"replica": int(rng.integers(2**30))})
        types.append(info["task_id"].split("/")[1])
        probs[row] = [router.decisions(types[-1], turn) for turn in range(NUM_TURNS)]
        for turn in range(NUM_TURNS):
            kinds[row, turn] = kind = rng.choice(len(TOOLS) + 1, p=probs[row, turn])
            mask[row, turn] = True
            if kind == ANSWER:
                text = f"Answer: {result_value(observation)}"
            else:
                text = render_call(ToolCall(TOOLS[kind], {}))
            observation, _, terminated, truncated, info = env.step(text)
            rewards["cost_usd"][row, turn] = info["cost_usd"]
            rewards["latency_s"][row, turn] = info["latency_s"]
            if terminated or truncated:
                rewards["accuracy"][row, turn] = info["outcome"]
                break
    assert json.loads(info["calls_json"]) == []  # the last turn answered
    return Log(types, kinds, mask, probs, rewards, list(seeds))


def true_values(env: MarketEnv, router: Router, num: int, seed: int) -> dict[str, float]:
    """Means over `num` fresh tasks that the router itself plays."""
    log = play(env, router, list(range(2**30, 2**30 + num)), np.random.default_rng(seed))
    return {name: float(reward.sum(axis=1).mean()) for name, reward in log.rewards.items()}
