"""Supervised warm start: the policy clones the traces of a scripted router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import gymnasium as gym
import numpy as np

from orchestra_jax.config import ConfigError, RunConfig, SftConfig
from orchestra_jax.rollout.ledger import UNSAMPLED, Trajectory
from orchestra_jax.rollout.pack import PackedBatch, TrainSequence, pack
from orchestra_jax.rollout.traces import scripted_episodes, trace_to_trajectory
from orchestra_jax.text.chat import ChatFormat


def sft_sequences(config: RunConfig, sft: SftConfig, env: gym.Env, chat: ChatFormat) -> list[TrainSequence]:
    """The traces to clone, tokenised; task seeds depend on the run's seed alone.

    Raises:
      ConfigError: the router is unknown or cannot act in this environment, or a trace does not fit.
    """
    seeds = np.random.default_rng([config.seed, 1]).integers(0, 2**30, sft.num_traces).tolist()
    try:
        episodes = scripted_episodes(env, sft.router, seeds)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"sft.router {sft.router!r} cannot act in {config.env.id}: {error}") from None
    sequences = [
        TrainSequence(trace_to_trajectory(chat, config.text.tools, episode), advantage=1.0, weight=1.0)
        for episode in episodes
    ]
    longest = max(len(s.trajectory.tokens) for s in sequences)
    if longest > config.row_tokens:
        raise ConfigError(
            f"a trace has {longest} tokens, more than train.row_tokens ({config.row_tokens}): raise it, or "
            "rollout.max_tokens"
        )
    return sequences


def tail(trajectory: Trajectory) -> Trajectory:
    """The end of a trace: its last observation as the context, and the turn that follows it."""
    end = len(trajectory.tokens)
    turn = end
    while turn > 0 and trajectory.mask[turn - 1]:
        turn -= 1
    start = turn
    while start > trajectory.prompt_length and not trajectory.mask[start - 1]:
        start -= 1
    short = Trajectory()
    short.append_context(trajectory.tokens[start:turn])
    short.append_sampled(trajectory.tokens[turn:], trajectory.logprobs[turn:], UNSAMPLED)
    return short


def sft_batches(config: RunConfig, sft: SftConfig, sequences: Sequence[TrainSequence]) -> list[PackedBatch]:
    """All batches of the warm start: `rows_per_update` packed rows each, reshuffled each epoch, tails first.

    The weights of a batch sum to 1: the loss is the mean negative logprob per token.
    """
    tails = [replace(s, trajectory=tail(s.trajectory)) for s in sequences if s.trajectory.num_sampled]
    tails = [s for s in tails if s.trajectory.prompt_length > 0]
    batches = []
    for epoch in range(sft.tail_epochs + sft.epochs):
        chosen = tails if epoch < sft.tail_epochs else sequences
        order = np.random.default_rng([config.seed, 2, epoch]).permutation(len(chosen))
        rows = pack([chosen[i] for i in order], config.row_tokens, config.row_targets)
        for start in range(0, rows.tokens.shape[0], sft.rows_per_update):
            batch = PackedBatch(*(x[start : start + sft.rows_per_update] for x in rows))
            batches.append(batch._replace(weights=batch.weights / batch.weights.sum()))
    return batches
