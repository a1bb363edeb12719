"""Packs trajectories into rows of fixed shape for the train step.

Trajectories of a group start with the same prompt. It is written once per row, and each trajectory's continuation
attends to it as its prefix (`models.attention`): a group of 16 with a prompt of 150 tokens costs 150 + 16 short
continuations, not 16 prompts. Losses are taken at explicit (source, target) pairs, so the vocabulary projection runs
over the sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from orchestra_jax.models.attention import shares_prefixes
from orchestra_jax.rollout.ledger import Trajectory

OPEN_ROWS = 8
"""Older rows are full but for scraps; looking at them again would make packing quadratic."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A trajectory with what the loss needs to know about it."""

    trajectory: Trajectory
    advantage: float
    weight: float
    """Of each of its sampled tokens in the loss; denominators are in it already (`rl.token_weights`)."""


Array = Any
"""A NumPy array on the host, a JAX array inside the train step."""


class PackedBatch(NamedTuple):
    """Rows for the train step: [num_rows, row_tokens] and [num_rows, row_targets] arrays."""

    tokens: Array
    positions: Array
    segments: Array
    """int32, 0 is padding; every trajectory continuation, and every shared prompt, has its own."""
    prefixes: Array
    sources: Array
    """int32, index in the row of the token whose hidden state predicts the target."""
    targets: Array
    target_segments: Array
    """int32, the segment that the target belongs to; 0 is padding."""
    behavior_logprobs: Array
    advantages: Array
    weights: Array
    """float32, 0 at padding."""


def pack(
    sequences: Sequence[TrainSequence], row_tokens: int, row_targets: int, *, share_prompts: bool | None = None
) -> PackedBatch:
    """Packs sequences by first-fit over the rows opened last, in the order given.

    Neighbours in the order that share a prompt share it in the row too, so groups should be passed one after the other.

    Args:
      sequences: those with weight 0 or without sampled tokens are skipped.
      row_tokens: tokens of a row.
      row_targets: sampled tokens of a row.
      share_prompts: whether a prompt is written once a row; default: where attention can (`shares_prefixes`).

    Returns:
      A batch with as many rows as were needed (0 rows for no sequences).

    Raises:
      ValueError: a sequence is longer than a row (cutting it would train on another trajectory than was sampled), or
        has no prompt, so that nothing predicts its first token.
    """
    share_prompts = shares_prefixes() if share_prompts is None else share_prompts
    rows: list[_Row] = []
    for sequence in sequences:
        if sequence.weight == 0 or sequence.trajectory.num_sampled == 0:
            continue
        length, sampled = len(sequence.trajectory.tokens), sequence.trajectory.num_sampled
        if length > row_tokens or sampled > row_targets:
            raise ValueError(
                f"a trajectory of {length} tokens ({sampled} sampled) does not fit a row of {row_tokens} "
                f"({row_targets} sampled): raise train.row_tokens or train.row_targets, or lower rollout.max_tokens"
            )
        if sequence.trajectory.prompt_length == 0:
            raise ValueError("a trajectory has no prompt: nothing predicts its first token")
        for row in rows[-OPEN_ROWS:]:
            if row.has_room(sequence.trajectory, row_tokens, row_targets):
                break
        else:
            row = _Row(share_prompts)
            rows.append(row)
        row.add(sequence)
    return _to_arrays(rows, row_tokens, row_targets)


class _Row:
    """A row being filled: lists of equal length per token, and per target."""

    def __init__(self, share_prompts: bool) -> None:
        self.share_prompts = share_prompts
        self.tokens: list[tuple[int, int, int, int]] = []  # token, position, segment, prefix
        self.targets: list[tuple[int, int, int, float, float, float]] = []  # source, target, segment, logprob, A, w
        self.prompts: dict[tuple[int, ...], tuple[int, int]] = {}  # prompt -> its segment, its last token's index
        self.num_segments = 0

    def has_room(self, trajectory: Trajectory, row_tokens: int, row_targets: int) -> bool:
        needed = len(trajectory.tokens)
        if tuple(trajectory.tokens[: trajectory.prompt_length]) in self.prompts:
            needed -= trajectory.prompt_length
        return len(self.tokens) + needed <= row_tokens and len(self.targets) + trajectory.num_sampled <= row_targets

    def add(self, sequence: TrainSequence) -> None:
        trajectory = sequence.trajectory
        split = trajectory.prompt_length
        prompt = tuple(trajectory.tokens[:split])
        if prompt not in self.prompts:
            self.num_segments += 1
            segment = self.num_segments
            self.tokens.extend((token, i, segment, segment) for i, token in enumerate(prompt))
            self.prompts[prompt] = (segment, len(self.tokens) - 1)
        prefix, previous = self.prompts[prompt]
        if self.share_prompts:
            self.num_segments += 1
        else:
            del self.prompts[prompt]  # the trajectory goes on in its prompt's segment, and nobody else does
        for i in range(split, len(trajectory.tokens)):
            token = trajectory.tokens[i]
            if trajectory.mask[i]:
                self.targets.append(
                    (previous, token, self.num_segments, trajectory.logprobs[i], sequence.advantage, sequence.weight)
                )
            previous = len(self.tokens)
            self.tokens.append((token, i, self.num_segments, prefix))


def _to_arrays(rows: list[_Row], row_tokens: int, row_targets: int) -> PackedBatch:
    def table(name: str, width: int, columns: int) -> np.ndarray:
        out = np.zeros((columns, len(rows), width), np.float64)
        for r, row in enumerate(rows):
            if entries := getattr(row, name):
                out[:, r, : len(entries)] = np.array(entries, np.float64).T
        return out

    tokens = table("tokens", row_tokens, 4).astype(np.int32)
    targets = table("targets", row_targets, 6)
    return PackedBatch(*tokens, *targets[:3].astype(np.int32), *targets[3:].astype(np.float32))


def pad_rows(batch: PackedBatch, num_rows: int) -> PackedBatch:
    """The batch with empty rows appended up to `num_rows`; they have weight 0 everywhere.

    Raises:
      ValueError: the batch has more rows than that.
    """
    have = batch.tokens.shape[0]
    if have > num_rows:
        raise ValueError(f"a batch of {have} rows cannot be padded to {num_rows}")
    return PackedBatch(*(np.pad(x, ((0, num_rows - have), (0, 0))) for x in batch))
