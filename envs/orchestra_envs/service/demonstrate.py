"""Assistant turns that solve a service task with the scripted user: warm starts, and a check of the generator.

The turns follow the policy: verify, look up, say what is going to be done and ask, act, report. Wordings, the grouping
of calls and now and then a mistaken first try (a mistyped id, which the tool refuses) are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from orchestra_envs.parse import ToolCall, render_call
from orchestra_envs.service.generate import pick
from orchestra_envs.service.goals import Goal, ServiceTask

_MISTAKE_SHARE = 0.2
_IDENTITY = (
    "To verify your identity, please tell me your {}.",
    "First I need to verify you: please give me your {}.",
    "Certainly. Could you tell me your {}, please?",
    "May I have your {}, please?",
)
_DETAILS = (
    "What exactly would you like me to do?",
    "Could you give me the details, please?",
    "Please tell me more about it.",
)
_PROPOSALS = (
    "I would {}. Shall I go ahead?",
    "I am going to {}. Is that okay?",
    "So I should {}. Do you want me to proceed?",
)
_CLOSERS = ("", " Is there anything else?", " Can I help you with anything else?", "")


def demonstration(task: ServiceTask, rng: np.random.Generator) -> list[str]:
    """The turns of one episode that solves `task`; other draws of `rng` give other wordings."""
    turns: list[str] = []
    is_verified = False
    may_err = rng.random() < _MISTAKE_SHARE
    for stage in task.stages:
        goals = [task.goals[number] for number in stage]
        needs_identity = not is_verified and any(goal.needs_identity for goal in goals)
        turns += _questions(task, needs_identity, any(number in task.vague for number in stage), rng)
        if needs_identity:
            turns.append(render_call(task.person.verification))
            is_verified = True
        wishes = [task.first_wishes.get(number, task.goals[number]) for number in stage]
        if wishes != goals:
            turns += _look_up(wishes, rng, may_err=may_err)
            turns.append(_proposal(wishes, rng) or _report(wishes, rng))
            may_err = False
        turns += _look_up(goals, rng, may_err=may_err)
        may_err = False
        if proposal := _proposal(goals, rng):
            turns.append(proposal)
            turns += _calls([call for goal in goals for call in goal.writes], rng)
        turns.append(_report(goals, rng) + pick(rng, _CLOSERS))
    return turns


def _questions(task: ServiceTask, needs_identity: bool, is_vague: bool, rng: np.random.Generator) -> list[str]:
    parts = []
    if needs_identity:
        slots = [
            {"email": "e-mail address", "birth date": "date of birth"}.get(s, s) for s in task.person.identity_slots
        ]
        parts.append(pick(rng, _IDENTITY).format(" and ".join(slots)))
    if is_vague:
        parts.append(pick(rng, _DETAILS))
    return [" ".join(parts)] if parts else []


def _look_up(goals: Sequence[Goal], rng: np.random.Generator, *, may_err: bool) -> list[str]:
    calls = list({render_call(call): call for goal in goals for call in goal.reads}.values())
    turns = _calls(calls, rng)
    if may_err and (typo := _mistyped(calls)):
        turns.insert(0, render_call(typo))
    return turns


def _mistyped(calls: Iterable[ToolCall]) -> ToolCall | None:
    """One of the calls with the last digit of an id missing, so that its tool refuses it."""
    for call in calls:
        for name, value in call.arguments.items():
            if name.endswith("_id") or name == "card_number":
                return ToolCall(call.name, call.arguments | {name: value[:-1]})
    return None


def _calls(calls: Sequence[ToolCall], rng: np.random.Generator) -> list[str]:
    """All in one turn, or, if they are few, perhaps one a turn."""
    texts = [render_call(call) for call in calls]
    if len(texts) <= 3 and rng.random() < 0.5:
        return texts
    return ["\n".join(texts)] if texts else []


def _proposal(goals: Sequence[Goal], rng: np.random.Generator) -> str:
    """The question before the changes of these goals, "" if they change nothing."""
    proposals = [goal.proposal for goal in goals if goal.outcome == "write"]
    if not proposals:
        return ""
    return pick(rng, _PROPOSALS).format("; and ".join(proposals))


def _report(goals: Sequence[Goal], rng: np.random.Generator) -> str:
    return " ".join(pick(rng, goal.reports) for goal in goals)
