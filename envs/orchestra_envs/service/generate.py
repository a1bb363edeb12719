"""Generating service tasks: any number, from nothing but their id, and only those that are worth posing.

`make_service_task("train", "shop", "return_item", 17)` is a pure function. The first goal is of the kind in the id;
the index decides how many goals there are (1 + index % 4). A task belongs to "test" when the hash of its solution (the
golden actions and the facts, with all ids in them) says so, else to "train": no solution is in both.

Drafts are rejected, and drawn again, where

* `empty`: the world has no goal of that kind;
* `ambiguous`: the user's words fit a second goal with another solution;
* `conflict`: not enough goals were found that do not meddle with each other's records;
* `golden_fails`: a golden action is refused by its tool;
* `no_op`: doing nothing, or nothing but verifying the user, would solve a goal;
* `order`: the goals' actions, in reverse order, end elsewhere;
* `said_by_user`: a fact that must be told stands in the user's own words;
* `equal_facts`: one sentence would tell two facts;
* `loose`: a golden change with one argument replaced by another plausible value ends in the same database;
* `other_split`: the solution's hash belongs to the other split.
"""

from __future__ import annotations

import datetime as dt
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from orchestra_envs.env import Task
from orchestra_envs.parse import ToolCall
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.facts import canonical, mentions
from orchestra_envs.service.goals import Domain, Goal, Person, ServiceTask
from orchestra_envs.service.world import World
from orchestra_envs.tools import CallContext, ToolArgumentError

SPLITS = ("train", "test")
MAX_SUBGOALS = 4
REJECTIONS = (
    *("empty", "ambiguous", "conflict", "golden_fails", "no_op", "order"),
    *("said_by_user", "equal_facts", "loose", "other_split"),
)

_TEST_SHARE = 5  # one solution in five is a test task
_MAX_DRAFTS = 2000
_REFUSE_SHARE, _CHANGE_SHARE, _VAGUE_SHARE, _STAGED_SHARE = 0.45, 0.25, 0.25, 0.5
_ALTERNATIVES_PER_ARGUMENT = 4
_NO_RANDOMNESS = np.random.default_rng(0)  # the tools draw nothing
_GREETINGS = ("Hello.", "Good morning.", "Hi there,", "Good afternoon.", "Hello, this is {name}.", "Hi, {name} here.")
_JOINS = ("Also:", "Then there is another thing.", "And one more thing:", "Besides:")


class RejectedError(Exception):
    """A draft that is not worth posing; the message is one of `REJECTIONS`."""


@lru_cache(maxsize=1024)  # the replicas of a group pose the same task; about 45 kB each
def make_service_task(split: str, domain: str, kind: str, index: int) -> ServiceTask:
    """The task number `index` (0, 1, 2, ...) of a kind of first goal in a domain.

    Raises:
        ValueError: an unknown split, domain or kind, a negative index.
    """
    _check(split, domain, kind, index)
    return _accepted_draft(split, domain, kind, index, Counter())


def service_task_from_id(task_id: str) -> ServiceTask:
    """The task with an id such as "train/shop/return_item/17".

    Raises:
        ValueError: the id is not of that form.
    """
    parts = task_id.split("/") if isinstance(task_id, str) else []
    if len(parts) != 4 or not (parts[3].isascii() and parts[3].isdigit()):
        raise ValueError(
            f"task_id: expected 'split/domain/kind/index' such as 'train/shop/return_item/17', got {task_id!r}"
        )
    return make_service_task(parts[0], parts[1], parts[2], int(parts[3]))


def num_goals(index: int) -> int:
    """How many goals the task number `index` has."""
    return 1 + index % MAX_SUBGOALS


def rejections(split: str, domain: str, count: int) -> Counter[str]:
    """How often each reason rejected a draft while `count` tasks of each kind were made; "accepted" counts those."""
    reasons: Counter[str] = Counter()
    for kind in DOMAINS[domain].goals:
        for index in range(count):
            _accepted_draft(split, domain, kind, index, reasons)
            reasons["accepted"] += 1
    return reasons


def draft_service_task(rng: random.Random, split: str, domain_name: str, kind: str, index: int) -> ServiceTask:
    """One draft of a task; all its randomness comes from `rng`.

    Raises:
        RejectedError: it is not worth posing.
    """
    domain = DOMAINS[domain_name]
    world, person = domain.make_world(rng)
    goals, changed = _choose_goals(rng, domain, world, person, kind, num_goals(index))
    if _split_of(goals) != split:
        raise RejectedError("other_split")
    first_wishes = _first_wishes(rng, domain, world, person, goals)
    vague = _vague(rng, goals, first_wishes)
    stages = _stages(rng, len(goals))
    task = ServiceTask(
        id=f"{split}/{domain_name}/{kind}/{index}",
        domain=domain_name,
        person=person,
        goals=goals,
        stages=stages,
        first_wishes=first_wishes,
        vague=vague,
        opening="",
        start=world,
        golden=world,
        changed=changed,
        needs=frozenset().union(*changed, *(goal.needs for goal in goals)),
    )
    greeting = rng.choice(_GREETINGS).format(name=person.name)
    task = replace(task, opening=f"{greeting} {stage_words(task, stages[0], rng)}")
    golden = world.copy()
    _run_all(domain, golden, task.actions)
    task = replace(task, golden=golden)
    _check_worth(rng, domain, task)
    return task


def stage_words(task: ServiceTask, stage: Sequence[int], rng: random.Random | np.random.Generator) -> str:
    """How the user brings up the goals of a stage, as the first wish or vaguely where the task has it so."""
    words = []
    for number in stage:
        goal = task.first_wishes.get(number, task.goals[number])
        words.append(goal.vague if number in task.vague else pick(rng, goal.asks))
    return words[0] + "".join(f" {pick(rng, _JOINS)} {text}" for text in words[1:])


def pick(rng: random.Random | np.random.Generator, options: Sequence[str]) -> str:
    """One of several phrasings."""
    if isinstance(rng, random.Random):
        return rng.choice(options)
    return options[int(rng.integers(len(options)))]


def solution(goals: Sequence[Goal]) -> str:
    """What it takes to solve goals (look-ups, changes, facts) as text, whatever their order; decides the split."""
    return repr(sorted(f"{goal.kind} {goal.reads} {goal.golden}" for goal in goals))


def run_call(domain: Domain, world: World, call: ToolCall) -> Any:
    """Run one call on a database, without an environment.

    Raises:
        ToolArgumentError: the tool refuses it.
    """
    tool = next(tool for tool in domain.tools if tool.name == call.name)
    context = CallContext(_NO_RANDOMNESS, Task("none", metadata={"world": world}), ())
    return tool.function(context=context, **call.arguments)


def _accepted_draft(split: str, domain: str, kind: str, index: int, reasons: Counter[str]) -> ServiceTask:
    """The first draft that is worth posing; the reasons against those before it are counted."""
    rng = random.Random(f"{split}/{domain}/{kind}/{index}")
    for _ in range(_MAX_DRAFTS):
        try:
            return draft_service_task(rng, split, domain, kind, index)
        except RejectedError as error:
            reasons[str(error)] += 1
    raise RuntimeError(f"no task {split}/{domain}/{kind}/{index} in {_MAX_DRAFTS} drafts")


def _check(split: str, domain: str, kind: str, index: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    if domain not in DOMAINS:
        raise ValueError(f"domain: expected one of {', '.join(DOMAINS)}, got {domain!r}")
    if kind not in DOMAINS[domain].goals:
        raise ValueError(f"task kind: expected one of {', '.join(DOMAINS[domain].goals)}, got {kind!r}")
    if index < 0:
        raise ValueError(f"task index: expected 0 or more, got {index}")


def _choose_goals(
    rng: random.Random, domain: Domain, world: World, person: Person, kind: str, count: int
) -> tuple[tuple[Goal, ...], tuple[frozenset[str], ...]]:
    """Goals that do not meddle with each other, the first of the given kind, and the records that each changes."""
    goals: list[Goal] = []
    changed: list[frozenset[str]] = []
    for attempt in range(20):
        goal = _choose_goal(rng, domain, world, person, kind if not goals else rng.choice(list(domain.goals)))
        if goal is None and not goals:
            raise RejectedError("empty" if attempt == 0 else "conflict")
        if goal is not None:
            changes = _changes_of(domain, world, person, goal)
            if not any(_meddle(goal, changes, *other) for other in zip(goals, changed)):
                goals.append(goal)
                changed.append(changes)
        if len(goals) == count:
            return tuple(goals), tuple(changed)
    raise RejectedError("conflict")


def _choose_goal(rng: random.Random, domain: Domain, world: World, person: Person, kind: str) -> Goal | None:
    goals = list(domain.goals[kind](world, person, rng))
    refused = [goal for goal in goals if goal.outcome == "refuse"]
    others = [goal for goal in goals if goal.outcome != "refuse"]
    if not goals:
        return None
    pool = refused if not others or (refused and rng.random() < _REFUSE_SHARE) else others
    goal = rng.choice(pool)
    if any(other.asks[0] == goal.asks[0] and other.golden != goal.golden for other in goals):
        raise RejectedError("ambiguous")
    return goal


def _meddle(goal: Goal, changes: frozenset[str], other: Goal, other_changes: frozenset[str]) -> bool:
    same_wish = goal.kind == other.kind and goal.golden == other.golden
    return same_wish or bool(changes & (other_changes | other.needs) or other_changes & goal.needs)


def _changes_of(domain: Domain, world: World, person: Person, goal: Goal) -> frozenset[str]:
    """References of the records that solving one goal alone changes."""
    after = world.copy()
    after.verified.add(person.id)
    _run_all(domain, after, goal.writes)
    changes = frozenset(after.changes(world))
    if (goal.outcome == "write") != bool(changes) or (goal.outcome != "write" and not goal.tells):
        raise RejectedError("no_op")
    return changes


def _run_all(domain: Domain, world: World, calls: Iterable[ToolCall]) -> None:
    try:
        for call in calls:
            run_call(domain, world, call)
    except ToolArgumentError:
        raise RejectedError("golden_fails") from None


def _first_wishes(
    rng: random.Random, domain: Domain, world: World, person: Person, goals: Sequence[Goal]
) -> dict[int, Goal]:
    """With some probability, another wish of the same kind that the user states before the first goal."""
    goal = goals[0]
    if goal.kind not in domain.changeable or rng.random() >= _CHANGE_SHARE:
        return {}
    taken = {other.asks[0] for other in goals}
    goldens = {other.golden for other in goals}
    others = [
        other
        for other in domain.goals[goal.kind](world, person, rng)
        if other.asks[0] not in taken and other.golden not in goldens
    ]
    return {0: rng.choice(others)} if others else {}


def _vague(rng: random.Random, goals: Sequence[Goal], first_wishes: Mapping[int, Goal]) -> frozenset[int]:
    """The goals that the user brings up without their details."""
    return frozenset(
        number
        for number, goal in enumerate(goals)
        if goal.vague and goal.known and number not in first_wishes and rng.random() < _VAGUE_SHARE
    )


def _stages(rng: random.Random, count: int) -> tuple[tuple[int, ...], ...]:
    """All goals at once, or one after the other, or something between."""
    if count == 1 or rng.random() >= _STAGED_SHARE:
        return (tuple(range(count)),)
    stages: list[list[int]] = [[0]]
    for number in range(1, count):
        if rng.random() < 0.7:
            stages.append([number])
        else:
            stages[-1].append(number)
    return tuple(map(tuple, stages))


def _split_of(goals: Sequence[Goal]) -> str:
    return "test" if zlib.crc32(solution(goals).encode()) % _TEST_SHARE == 0 else "train"


def _check_worth(rng: random.Random, domain: Domain, task: ServiceTask) -> None:
    """The gates that need the whole task."""
    if not task.facts and task.golden.same_state(task.start):
        raise RejectedError("no_op")
    backwards = task.start.copy()
    backwards.verified.update(task.golden.verified)
    _run_all(domain, backwards, [call for goal in reversed(task.goals) for call in (*goal.reads, *goal.writes)])
    if not backwards.same_state(task.golden):
        raise RejectedError("order")
    if any(mentions(text, fact) for fact in task.facts for text in task.user_texts):
        raise RejectedError("said_by_user")
    if len({(fact.kind, canonical(fact.kind, fact.value)) for fact in task.facts}) < len(task.facts):
        raise RejectedError("equal_facts")
    for goal in task.goals:
        _check_tight(rng, domain, task, goal)


def _check_tight(rng: random.Random, domain: Domain, task: ServiceTask, goal: Goal) -> None:
    """No golden change may have an argument whose value does not matter."""
    start = task.start.copy()
    start.verified.add(task.person.id)
    golden = start.copy()
    _run_all(domain, golden, goal.writes)
    for position, call in enumerate(goal.writes):
        for argument, value in call.arguments.items():
            for other in _alternatives(rng, domain, task.start, argument, value):
                calls = list(goal.writes)
                calls[position] = ToolCall(call.name, call.arguments | {argument: other})
                if _ends_like(domain, start, calls, golden):
                    raise RejectedError("loose")


def _ends_like(domain: Domain, start: World, calls: Sequence[ToolCall], golden: World) -> bool:
    world = start.copy()
    try:
        _run_all(domain, world, calls)
    except RejectedError:
        return False
    return world.same_state(golden)


def _alternatives(rng: random.Random, domain: Domain, world: World, argument: str, value: Any) -> list[Any]:
    """Other values that a confused agent might give an argument."""
    if isinstance(value, int | float):
        return [other for other in (value + 1, value - 1, value * 2, 0) if other != value]
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        day = dt.date.fromisoformat(value)
        return [(day + dt.timedelta(offset)).isoformat() for offset in (-7, -1, 1, 7)]
    others = domain.other_values(world, argument, value)
    return rng.sample(others, min(len(others), _ALTERNATIVES_PER_ARGUMENT))
