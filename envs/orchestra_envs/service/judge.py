"""Judging an episode by three criteria, all of which must hold for an outcome of 1.

* execution: the final database has the same canonical JSON (`World.digest`) as the golden one. Order does not matter.
* fidelity: every fact that had to be told was told, by the rules of `facts`.
* completeness: every record that a golden action changes, and every one that an answer rests on, was touched (shown or
  changed) by a successful call. Guessing right is not enough.

The outcome is their product as 0 or 1 each; a `Judgement` also has the shares, for reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestra_envs.service.facts import told
from orchestra_envs.service.goals import ServiceTask
from orchestra_envs.service.world import World


@dataclass(frozen=True)
class Judgement:
    """How an episode met the three criteria.

    `told` and `touched` have one entry for each fact (in the task's order) and each needed record (sorted).
    """

    execution: bool
    told: tuple[bool, ...]
    touched: tuple[bool, ...]

    @property
    def fidelity(self) -> float:
        """The share of the facts that were told, 1 if there are none."""
        return _share(self.told)

    @property
    def completeness(self) -> float:
        """The share of the needed records that were touched, 1 if there are none."""
        return _share(self.touched)

    @property
    def outcome(self) -> float:
        """1.0 if all criteria are met in full, else 0.0."""
        return float(self.execution and all(self.told) and all(self.touched))


def judge(task: ServiceTask, world: World, messages: Sequence[str]) -> Judgement:
    """Judge a final database and the agent's messages to the user (as `user.heard`)."""
    return Judgement(
        execution=world.same_state(task.golden),
        told=tuple(told(task.facts, messages, task.user_texts)),
        touched=tuple(reference in world.touched for reference in sorted(task.needs)),
    )


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met) if met else 1.0
