"""Advantages of a group of trajectories, and the filters that decide which trajectories enter the loss.

Everything is float64 NumPy on the host: groups are small, and in float32 identical rewards such as 0.1 would
not give a mean of exactly 0.1. A trajectory that could not be judged (NaN reward, or `valid` False) is left
out of every statistic and gets advantage 0; a trajectory that is merely filtered from the loss still counts
in the statistics.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

INFRA = "infra"
UNSCORABLE = "unscorable"
FORMAT_ERROR = "format_error"
NO_ANSWER = "no_answer"
HOMOGENEOUS = "homogeneous"
DROP_REASONS = (INFRA, UNSCORABLE, FORMAT_ERROR, NO_ANSWER, HOMOGENEOUS)
"""Why a trajectory is left out of the loss, in order of precedence; suffixes of the metric
`rollouts/dropped/<why>`."""


def group_advantages(
    rewards: ArrayLike, *, kind: AdvantageKind = "grpo", eps: float = 1e-6, valid: ArrayLike | None = None
) -> FloatArray:
    """Advantage of each of the G trajectories of one group.

    With mean m, sample standard deviation s (divisor n - 1) and n over the valid rewards:
    "grpo" `(r - m) / (s + eps)` (arXiv 2402.03300, 2511.21689 Eq. 3), "dr_grpo" `r - m` (arXiv 2503.20783),
    "rloo" `r - mean of the others` (arXiv 2402.14740). "reinforce_pp" needs the whole batch: see
    `batch_advantages`.

    Args:
      rewards: [G]; NaN where unscorable.
      kind: the estimator.
      eps: added to the standard deviation.
      valid: bool [G]; False rows are treated as NaN ones. None: all.

    Returns:
      float64 [G]; exactly 0 at invalid rows, and everywhere when all valid rewards are equal.

    Raises:
      ValueError: unknown kind, wrong shape, or an infinite reward.
    """
    if kind == "reinforce_pp":
        raise ValueError("'reinforce_pp' normalises over the whole batch: call batch_advantages instead")
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"kind must be 'grpo', 'dr_grpo', 'rloo' or 'reinforce_pp', got {kind!r}")
    reward, rows = _rewards_and_rows(rewards, valid)
    centred = _centred(reward, rows)
    if not centred.any():
        return centred
    if kind == "grpo":
        return centred / (reward[rows].std(ddof=1) + eps)
    if kind == "rloo":
        num_valid = rows.sum()
        return centred * (num_valid / (num_valid - 1))
    return centred


def batch_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    *,
    kind: AdvantageKind = "grpo",
    eps: float = 1e-6,
    valid: ArrayLike | None = None,
) -> FloatArray:
    """Advantages of a batch of N trajectories that belong to several groups.

    Each group on its own by `group_advantages`, except "reinforce_pp": rewards less their group's mean,
    divided by the sample standard deviation of those differences over the batch (arXiv 2501.03262, the
    variant with a group baseline).

    Args:
      rewards: [N]; NaN where unscorable.
      group_ids: [N], equal for trajectories of the same task; any order.
      kind, eps, valid: as in `group_advantages`, `valid` being [N].

    Returns:
      float64 [N].
    """
    reward, rows = _rewards_and_rows(rewards, valid)
    ids = np.asarray(group_ids)
    if ids.shape != reward.shape:
        raise ValueError(f"group_ids must have the shape of rewards {reward.shape}, got {ids.shape}")
    members = [np.flatnonzero(ids == group) for group in np.unique(ids)]
    advantage = np.zeros_like(reward)
    if kind != "reinforce_pp":
        for index in members:
            advantage[index] = group_advantages(reward[index], kind=kind, eps=eps, valid=rows[index])
        return advantage
    for index in members:
        advantage[index] = _centred(reward[index], rows[index])
    if not advantage.any():
        return advantage
    return advantage / (advantage[rows].std(ddof=1) + eps)


def homogeneous(rewards: ArrayLike, threshold: float = 0.1, *, valid: ArrayLike | None = None) -> bool:
    """True if the group's valid rewards hardly differ (sample standard deviation below `threshold`).

    Such a group says nothing about which trajectory was better, and dividing by its tiny deviation would
    amplify noise. Groups with fewer than two valid rewards are homogeneous.
    """
    reward, rows = _rewards_and_rows(rewards, valid)
    return bool(rows.sum() < 2 or reward[rows].std(ddof=1) < threshold)


def drop_reason(reward: float, *, format_error: bool = False, answered: bool = True, infra: bool = False) -> str:
    """Why one trajectory must not enter the loss: one of `DROP_REASONS`, or "" to keep it.

    Args:
      reward: NaN if unscorable.
      format_error: the policy broke the tool-call format.
      answered: the episode ended with an answer that could be judged right or wrong.
      infra: the environment, a tool or the scorer failed through no fault of the policy.
    """
    if infra:
        return INFRA
    if np.isnan(reward):
        return UNSCORABLE
    if format_error:
        return FORMAT_ERROR
    if not answered:
        return NO_ANSWER
    return ""


def group_drop_reasons(
    rewards: ArrayLike,
    *,
    format_errors: Sequence[bool] | None = None,
    answered: Sequence[bool] | None = None,
    infra: Sequence[bool] | None = None,
    homogeneity_threshold: float = 0.1,
) -> tuple[str, ...]:
    """`drop_reason` of each trajectory of a group, with "homogeneous" for those kept so far if the group
    hardly differs.

    Trajectories with a format error or without an answer count in the homogeneity test (they earned their
    reward); infra failures and unscorable ones do not.

    Returns:
      G strings, "" where the trajectory enters the loss.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    size = len(reward)
    columns = {
        "format_errors": [False] * size if format_errors is None else list(format_errors),
        "answered": [True] * size if answered is None else list(answered),
        "infra": [False] * size if infra is None else list(infra),
    }
    for name, column in columns.items():
        if len(column) != size:
            raise ValueError(f"{name} must have one entry per reward ({size}), got {len(column)}")
    judged = ~np.array(columns["infra"], dtype=bool)
    rest = HOMOGENEOUS if homogeneous(reward, homogeneity_threshold, valid=judged) else ""
    return tuple(
        drop_reason(r, format_error=bad_format, answered=has_answer, infra=failed) or rest
        for r, bad_format, has_answer, failed in zip(
            reward.tolist(), columns["format_errors"], columns["answered"], columns["infra"]
        )
    )


def _rewards_and_rows(rewards: ArrayLike, valid: ArrayLike | None) -> tuple[FloatArray, BoolArray]:
    """The rewards as float64 [G] and which of them enter the statistics, bool [G]."""
    reward = np.asarray(rewards, dtype=np.float64)
    if reward.ndim != 1:
        raise ValueError(f"rewards must have one dimension, got shape {reward.shape}")
    rows = ~np.isnan(reward)
    if valid is not None:
        mask = np.asarray(valid, dtype=bool)
        if mask.shape != reward.shape:
            raise ValueError(f"valid must have the shape of rewards {reward.shape}, got {mask.shape}")
        rows &= mask
    if np.isinf(reward[rows]).any():
        raise ValueError(f"rewards must be finite (or NaN: unscorable), got {reward.tolist()}")
    return reward, rows


def _centred(reward: FloatArray, rows: BoolArray) -> FloatArray:
    """Reward less the mean of the valid rows; exactly 0 at the others, and if all are equal."""
    centred = np.zeros_like(reward)
    # Compared by max == min and not by a small deviation: the mean of equal floats may be off by an ulp.
    if rows.any() and reward[rows].max() > reward[rows].min():
        centred[rows] = reward[rows] - reward[rows].mean()
    return centred
