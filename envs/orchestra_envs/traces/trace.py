"""What is kept of an episode: plain frozen data that a store writes, an importer makes and a replay reads.

A cost, latency or outcome that nobody measured is None, never 0. Token arrays are there only where a policy of ours
sampled them; text alone (a chat log) is a whole trace too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SCHEMA_VERSION = 1
"""Of the fields below; a store says which one it was written with."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of a tool."""

    tool: str
    arguments_json: str
    """Canonical JSON (RFC 8785) of the arguments as they were called; the text as it stands where it is no JSON."""
    result: str = ""
    status: str = "ok"
    """"ok" or "error"."""
    error_type: str | None = None
    cost_usd: float | None = None
    latency_s: float | None = None
    cost_known: bool = True
    """False where the cost is an estimate, or unknown."""
    attempts: int = 1
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    source: str = "live"
    """"live", "recorded", "simulated" or "imported"."""
    backend: str = ""
    """Who answered: model, endpoint or index, and version; part of the key of a replay."""
    schema_hash: str = ""
    """Of the tool's JSON schema at the time (`keys.schema_hash`); part of the key of a replay."""
    state_hash: str | None = None
    """Of the world before the call, for tools that change or read it; None: the tool has no state."""
    call_id: str | None = None
    """The id that the log gave it."""


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One turn of the policy, and what came back."""

    text: str
    """As the policy wrote it, calls included."""
    calls: tuple[TracedCall, ...] = ()
    observation: str | None = None
    """What the policy read next; None after the last turn."""
    observation_role: str = "tool"
    """"tool" or "user"."""
    cost_usd: float | None = None
    latency_s: float | None = None
    reward: float | None = None
    """The environment's own, of this step."""
    started_unix_s: float | None = None
    """Wall clock; for the record only, nothing is computed from it."""


@dataclass(frozen=True, slots=True)
class TracedTokens:
    """The ledger of a trajectory that a policy of ours sampled: four arrays of one length."""

    tokens: np.ndarray
    """int32."""
    mask: np.ndarray
    """bool, True where the policy sampled the token."""
    logprobs: np.ndarray
    """float32; 0.0 where the mask is False."""
    versions: np.ndarray
    """int32, the policy version; -1 where the mask is False."""
    prompt_length: int
    tokenizer: str
    """Fingerprint of the tokenizer (SHA-256 of its tokenizer.json): tokens of another one mean something else."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One episode from reset to its end."""

    trace_id: str
    """Unique in a store."""
    env_id: str
    task_id: str
    task: str
    """The first observation."""
    turns: tuple[TracedTurn, ...]
    tools_json: str = "[]"
    """OpenAI-format tool schemas that the task offered, prices in `x-price` as the environments tell them."""
    preference_json: str = ""
    """As `info["preference_json"]` of the reset; "" where none was stated."""
    system: str = ""
    """A system prompt of the log, or the task's instructions."""
    seed: int | None = None
    replica: int = 0
    group: str = ""
    """Traces of one task that may be compared (a GRPO group); "": `task_id`."""
    policy: str = ""
    """Who acted."""
    policy_version: int | None = None
    outcome: float | None = None
    """In [0, 1]; None where unknown."""
    episode_return: float | None = None
    cost_usd: float | None = None
    latency_s: float | None = None
    cost_known: bool = True
    num_format_errors: int = 0
    end_reason: str = ""
    tokens: TracedTokens | None = None
    env_kwargs_json: str = "{}"
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of packages: {"orchestra-envs": "0.1.0"}."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, whatever an importer found beside."""
