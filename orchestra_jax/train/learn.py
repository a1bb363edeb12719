"""From finished episodes to what the train step learns from: rewards, filters, advantages, weights, packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from orchestra_envs.judge import judge_usage

from orchestra_jax.config import ConfigError, RunConfig
from orchestra_jax.rl import DROP_REASONS, batch_advantages, group_drop_reasons, group_rewards, token_weights
from orchestra_jax.rollout.episode import Episode
from orchestra_jax.rollout.pack import PackedBatch, TrainSequence, pack


@dataclass(frozen=True)
class Lesson:
    """What a step's episodes teach; lists are in the order of the episodes."""

    rewards: np.ndarray
    """float64 [N], NaN where an episode could not be scored."""
    advantages: np.ndarray
    """float64 [N], 0 for dropped episodes."""
    dropped: tuple[str, ...]
    """N reasons, "" for episodes that enter the loss."""


def teach(config: RunConfig, groups: Sequence[Sequence[Episode]]) -> Lesson:
    """Rewards, advantages and filters of a step, group by group."""
    rewards: list[np.ndarray] = []
    valid: list[bool] = []
    dropped: list[str] = []
    for group in groups:
        group_reward = score_group(config, group)
        failed = [episode.infra_failure for episode in group]
        reasons = group_drop_reasons(
            group_reward,
            format_errors=[config.advantage.drop_format_errors and e.num_format_errors > 0 for e in group],
            answered=[e.answered or not config.advantage.drop_unanswered for e in group],
            infra=failed,
            homogeneity_threshold=config.advantage.homogeneity_threshold,
        )
        rewards.append(group_reward)
        valid.extend(not failure for failure in failed)
        dropped.extend(reasons)
    reward = np.concatenate(rewards)
    group_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    advantage = batch_advantages(reward, group_ids, kind=config.advantage.kind, valid=np.array(valid))
    return Lesson(reward, np.where([bool(reason) for reason in dropped], 0.0, advantage), tuple(dropped))


def score_group(config: RunConfig, group: Sequence[Episode]) -> np.ndarray:
    """Rewards [G] of the episodes of one task; NaN where there is nothing to score.

    Raises:
      ConfigError: the paper's reward needs an outcome and the environment reports none.
    """
    if config.reward.form == "return":
        returns = np.array([np.nan if e.infra_failure else e.episode_return for e in group])
        return np.where(np.isfinite(returns), returns, np.nan)
    if any(e.outcome is None and not e.infra_failure for e in group):
        raise ConfigError(
            f"environment {config.env.id} reports no info['outcome'], which reward.form={config.reward.form} needs: "
            "set reward.form=return to train on the environment's own rewards"
        )
    stated = next((e.preference for e in group if e.preference), None)  # an episode that never began has none
    preference = stated or {"outcome": 1.0, "cost": 1.0, "latency": 1.0}
    return group_rewards(
        [np.nan if e.outcome is None or e.infra_failure else e.outcome for e in group],
        [e.cost_usd for e in group],
        [e.latency_s for e in group],
        # A name that the policy made up is an error, not a tool.
        [{name: n for name, n in e.tool_counts.items() if name in e.tool_names} for e in group],
        preference,
        variant=config.reward.form,
        scale=config.reward.scale,
        guard=config.reward.guard,
        cost_budget_usd=config.reward.cost_budget_usd,
        latency_budget_s=config.reward.latency_budget_s,
    )


def pack_lesson(config: RunConfig, groups: Sequence[Sequence[Episode]], lesson: Lesson) -> list[PackedBatch]:
    """One packed batch per minibatch; whole groups, weights with the denominators of their minibatch."""
    size = len(groups[0])
    batches = []
    for chunk in np.array_split(np.arange(len(groups)), config.train.minibatches):
        members = [(group, member) for group in chunk for member in range(size)]
        kept = [(g, m) for g, m in members if not lesson.dropped[g * size + m]]
        lengths = np.array([groups[g][m].trajectory.num_sampled for g, m in kept], np.int64)
        weights = token_weights(lengths, config.loss.aggregation, max_length=config.row_targets)
        sequences = [
            TrainSequence(groups[g][m].trajectory, float(lesson.advantages[g * size + m]), float(weight))
            for (g, m), weight in zip(kept, weights)
        ]
        batches.append(pack(sequences, config.row_tokens, config.row_targets))
    return batches


def max_rows(config: RunConfig) -> int:
    """Rows that a minibatch can need at the very most: a bound from sizes alone, so that shapes never change."""
    groups = -(-config.rollout.tasks_per_step // config.train.minibatches)
    longest = config.rollout.max_tokens
    per_row = max(1, min(config.row_tokens // longest, config.row_targets // min(longest, config.row_targets)))
    return -(-groups * config.rollout.group_size // per_row)


def episode_metrics(episodes: Sequence[Episode], lesson: Lesson) -> dict[str, float]:
    """Means over a step's episodes, under the names of DESIGN section 4."""
    scored = lesson.rewards[np.isfinite(lesson.rewards)]
    outcomes = [e.outcome for e in episodes if e.outcome is not None and not (e.infra_failure or np.isnan(e.outcome))]
    metrics = {
        "reward/mean": float(scored.mean()) if scored.size else 0.0,
        "reward/std": float(scored.std()) if scored.size else 0.0,
        "return/mean": float(np.mean([e.episode_return for e in episodes])),
        "cost/mean_usd": float(np.mean([e.cost_usd for e in episodes])),
        "latency/mean_s": float(np.mean([e.latency_s for e in episodes])),
        "turns/mean": float(np.mean([sum(t.role == "assistant" for t in e.turns) for e in episodes])),
        "tokens/generated": float(sum(e.trajectory.num_sampled for e in episodes)),
        "tokens/trajectory_mean": float(np.mean([len(e.trajectory.tokens) for e in episodes])),
    }
    if outcomes:
        metrics["outcome/accuracy"] = float(np.mean(outcomes))
    calls: Counter[str] = sum((e.tool_counts for e in episodes), Counter())
    offered = sorted({name for e in episodes for name in e.tool_names})
    for name in offered:
        metrics[f"tools/{name}/calls"] = calls[name] / len(episodes)
    if unknown := sum(count for name, count in calls.items() if name not in offered):
        metrics["tools/unknown_calls"] = unknown / len(episodes)
    errors: Counter[str] = sum((e.error_counts for e in episodes), Counter())
    for error_type, count in sorted(errors.items()):
        metrics[f"tools/errors/{error_type}"] = count / len(episodes)
    if unknown_costs := sum(not e.cost_known for e in episodes):
        metrics["cost/estimated_episodes"] = unknown_costs
    for model, usage in judge_usage():  # of this process so far; a judge's bill is not the policy's
        if usage.price_known:
            metrics[f"judge/{model}/cost_usd"] = usage.cost_usd
        metrics[f"judge/{model}/failures"] = usage.num_failures
    counts = Counter(lesson.dropped)
    for reason in DROP_REASONS:
        metrics[f"rollouts/dropped/{reason}"] = counts[reason]
    metrics["rollouts/kept"] = counts[""]
    return metrics
