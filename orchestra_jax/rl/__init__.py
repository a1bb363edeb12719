"""The mathematics of learning, as pure functions: rewards, advantages, filters and policy losses."""

from orchestra_jax.rl.advantage import (
    DROP_REASONS,
    batch_advantages,
    drop_reason,
    group_advantages,
    group_drop_reasons,
    homogeneous,
)
from orchestra_jax.rl.policy_loss import (
    MAX_LOG_RATIO,
    kl_penalty,
    mismatch_metrics,
    policy_loss,
    token_weights,
    truncated_importance_weights,
)
from orchestra_jax.rl.reward import CORRECT_ABOVE, group_rewards

__all__ = [
    "CORRECT_ABOVE",
    "DROP_REASONS",
    "MAX_LOG_RATIO",
    "batch_advantages",
    "drop_reason",
    "group_advantages",
    "group_drop_reasons",
    "group_rewards",
    "homogeneous",
    "kl_penalty",
    "mismatch_metrics",
    "policy_loss",
    "token_weights",
    "truncated_importance_weights",
]
