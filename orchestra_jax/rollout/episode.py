"""One finished episode: what the trainer, the evaluation and the report need to know of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from orchestra_jax.rollout.ledger import Trajectory

ENDS_WITHOUT_ANSWER = frozenset(
    {"length", "context", "max_turns", "budget", "format_errors", "truncated", "tool_errors"}
)
"""End reasons of trajectories that never gave an answer."""


@dataclass(slots=True)
class Turn:
    """A message of the episode, for display. The tokens that are trained are in the ledger."""

    role: str
    text: str
    num_tokens: int
    start: int
    """Index of its first token in the ledger."""
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Episode:
    """An episode from reset to its end."""

    seed: int
    replica: int
    prompt: str = ""
    trajectory: Trajectory = field(default_factory=Trajectory)
    turns: list[Turn] = field(default_factory=list)
    task_id: str = ""
    tool_names: tuple[str, ...] = ()
    """The tools that the task offered."""
    preference: dict[str, float] = field(default_factory=dict)
    outcome: float | None = None
    """In [0, 1]; None where the environment reports none."""
    episode_return: float = 0.0
    """Sum of the environment's own rewards."""
    cost_usd: float = 0.0
    latency_s: float = 0.0
    cost_known: bool = True
    """False if a part of the cost is an estimate."""
    tool_counts: Counter[str] = field(default_factory=Counter)
    error_counts: Counter[str] = field(default_factory=Counter)
    """Failed calls by the type of their fault."""
    num_format_errors: int = 0
    end_reason: str = ""
    infra_failure: bool = False
    """The environment, a tool's backend or the sampler failed: nothing to learn from."""
    token_texts: Callable[[Sequence[int]], list[str]] | None = field(default=None, repr=False, compare=False)
    """The tokenizer's, for the text of each sampled token in the record; None leaves them out."""

    @property
    def answered(self) -> bool:
        """Whether the policy brought the episode to its end itself."""
        return self.end_reason not in ENDS_WITHOUT_ANSWER

    def to_json(self, **extra: Any) -> dict[str, Any]:
        """The readable record of the run folder's `episodes/`, one JSON object; `extra` keys are added to it."""
        ledger = self.trajectory
        turns = []
        for turn in self.turns:
            entry: dict[str, Any] = {"role": turn.role, "text": turn.text, "num_tokens": turn.num_tokens}
            if turn.role == "assistant":
                sampled = slice(turn.start, turn.start + turn.num_tokens)
                logprobs = ledger.logprobs[sampled]
                entry["logprob_mean"] = round(sum(logprobs) / max(1, len(logprobs)), 5)
                entry["logprobs"] = [round(x, 4) for x in logprobs]
                if self.token_texts:
                    entry["tokens"] = self.token_texts(ledger.tokens[sampled])
            if turn.calls:
                entry["calls"] = turn.calls
                entry["cost_usd"] = sum(call.get("cost_usd", 0.0) for call in turn.calls)
                entry["latency_s"] = max(call.get("latency_s", 0.0) for call in turn.calls)
            turns.append(entry)
        return {
            "task_id": self.task_id,
            "seed": self.seed,
            "member": self.replica,
            "prompt": self.prompt,
            "turns": turns,
            "outcome": self.outcome,
            "return": self.episode_return,
            "cost_usd": self.cost_usd,
            "cost_known": self.cost_known,
            "latency_s": self.latency_s,
            "tool_counts": dict(self.tool_counts),
            "end_reason": self.end_reason,
            **extra,
        }


def describe(episode: Episode, info: dict[str, Any]) -> None:
    """Enters what the environment told at its reset: task, tools, preference, and whether it reports an outcome."""
    episode.task_id = str(info.get("task_id") or episode.seed)
    if "outcome" in info:
        episode.outcome = 0.0  # until the environment says otherwise: no answer is a wrong answer
    if info.get("tools_json"):
        episode.tool_names = tuple(t["function"]["name"] for t in json.loads(info["tools_json"]))
    if info.get("preference_json"):
        episode.preference = json.loads(info["preference_json"])["weights"]


def charge(episode: Episode, info: dict[str, Any], reward: SupportsFloat) -> list[dict[str, Any]]:
    """Adds one environment step to the episode; returns the step's call records."""
    calls = json.loads(info["calls_json"]) if info.get("calls_json") else []
    episode.episode_return += float(reward)
    episode.cost_usd += float(info.get("cost_usd", 0.0))
    episode.latency_s += float(info.get("latency_s", 0.0))
    episode.tool_counts.update(call["tool"] for call in calls)
    episode.error_counts.update(call["error_type"] for call in calls if call.get("error_type"))
    episode.cost_known = bool(info.get("cost_known", True))
    episode.num_format_errors = int(info.get("episode_format_errors", 0))
    if "outcome" in info:
        episode.outcome = float(info["outcome"])
    episode.infra_failure |= bool(info.get("drop", False))
    return calls
