"""Supervised warm start: the policy clones the traces of a scripted router."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from orchestra_jax.config import ConfigError, RunConfig, SftConfig
from orchestra_jax.rollout.pack import PackedBatch, TrainSequence, pack
from orchestra_jax.rollout.traces import copy_drill, scripted_episodes, trace_to_trajectory
from orchestra_jax.text.chat import ChatFormat


def sft_batches(config: RunConfig, sft: SftConfig, env: gym.Env, chat: ChatFormat) -> list[PackedBatch]:
    """All batches of the warm start: `rows_per_update` packed rows each; drills first, then the epochs, shuffled.

    They depend on the config alone. The weights of a batch sum to 1: the loss is the mean negative logprob per token.

    Raises:
      ConfigError: the router is unknown or cannot act in this environment, or a trace does not fit.
    """
    seeds = np.random.default_rng([config.seed, 1]).integers(0, 2**30, sft.num_tasks).tolist()
    try:
        episodes = scripted_episodes(env, sft.router, seeds, sft.traces_per_task)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"sft.router {sft.router!r} cannot act in {config.env.id}: {error}") from None
    traces = [trace_to_trajectory(chat, config.text.tools, episode) for episode in episodes]
    if (longest := max(len(trace.tokens) for trace in traces)) > config.row_tokens:
        raise ConfigError(
            f"a trace has {longest} tokens, more than train.row_tokens ({config.row_tokens}): raise it, or "
            "rollout.max_tokens"
        )
    rng = np.random.default_rng([config.seed, 3])
    drills = [[copy_drill(chat, rng)] for _ in range(sft.copy_drills)]
    before, among = drills[: len(drills) // 2], drills[len(drills) // 2 :]
    size = sft.traces_per_task
    tasks = [traces[i : i + size] for i in range(0, len(traces), size)]
    batches: list[PackedBatch] = []
    for number, groups in enumerate([before] + [tasks + among] * sft.epochs):
        order = np.random.default_rng([config.seed, 2, number]).permutation(len(groups))
        sequences = [TrainSequence(t, advantage=1.0, weight=1.0) for i in order for t in groups[i]]
        rows = pack(sequences, config.row_tokens, config.row_targets)
        for start in range(0, rows.tokens.shape[0], sft.rows_per_update):
            batch = PackedBatch(*(x[start : start + sft.rows_per_update] for x in rows))
            batches.append(batch._replace(weights=batch.weights / batch.weights.sum()))
    return batches
