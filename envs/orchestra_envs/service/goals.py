"""The plain data that service tasks are made of: facts, goals, domains, tasks; and what goal makers write them with.

A goal maker that does not know yet whether the policy allows a wish fixes what both outcomes share and goes on::

    goal = partial(Goal, kind="cancel", asks=(...), known={"order": order.id}, needs=references(order))
    if order.status == "shipped":
        yield goal(outcome="refuse", tells=(Fact.day(order.promised, "When will it arrive?"),), reports=(...))
    else:
        yield goal(outcome="write", writes=(call("cancel_order", order_id=order.id),), proposal=..., reports=(...))
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from orchestra_envs.parse import ToolCall
from orchestra_envs.service.world import Record, World, reference, unwrapped
from orchestra_envs.tools import Tool

FactKind = Literal["number", "date", "time", "name"]
GoalOutcome = Literal["write", "refuse", "inform"]


@dataclass(frozen=True)
class Fact:
    """Something the user must be told.

    `value` is "12.50" (number; dollars without sign), "2026-03-14" (date), "09:30" (time) or a text (name). `question`
    is how the user asks for it when the agent forgot. `choices`: what it could have been as well (all names of rooms,
    the due dates of the user's other loans); saying too many of those does not count as telling.
    """

    kind: FactKind
    value: str
    question: str
    choices: tuple[str, ...] = ()

    @classmethod
    def amount(cls, cents: int, question: str, choices_cents: Iterable[int] = ()) -> Fact:
        """A number of dollars."""
        return cls("number", _dollars(cents), question, tuple(map(_dollars, choices_cents)))

    @classmethod
    def day(cls, day: dt.date, question: str, choices: Iterable[dt.date] = ()) -> Fact:
        """A date."""
        return cls("date", day.isoformat(), question, tuple(choice.isoformat() for choice in choices))


@dataclass(frozen=True)
class Goal:
    """One thing the user wants.

    Args:
        kind: the domain's name for this sort of wish, such as "return_item".
        outcome: "write" (the database must change), "refuse" (the policy forbids it) or "inform" (a look-up).
        asks: the wish in the user's words, complete: two or more phrasings.
        vague: the wish without its details, which the user gives when asked; "" if there is no such form.
        known: what the user knows that belongs to it, by slot ("order", "item", see `user.SLOTS`).
        reads: golden look-ups, in order; they change nothing.
        writes: golden changes.
        tells: what must be told.
        proposal: what the agent is about to do, completing "I would ...".
        reports: sentences that say the outcome with all of `tells`: two or more phrasings.
        needs: references of records that must be looked at or changed; those that `writes` change are added.
        needs_identity: whether the user must be verified first.
    """

    kind: str
    outcome: GoalOutcome
    asks: tuple[str, ...]
    known: Mapping[str, str] = field(default_factory=dict)
    vague: str = ""
    reads: tuple[ToolCall, ...] = ()
    writes: tuple[ToolCall, ...] = ()
    tells: tuple[Fact, ...] = ()
    proposal: str = ""
    reports: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    needs_identity: bool = True

    @property
    def golden(self) -> str:
        """What solving it takes, as text: equal texts are equal solutions."""
        return repr((self.outcome, self.writes, [(fact.kind, fact.value) for fact in self.tells]))


@dataclass(frozen=True)
class Person:
    """The user of a task: the record's id and name, what they know of themselves by slot, and the verifying call."""

    id: str
    name: str
    known: Mapping[str, str]
    verification: ToolCall
    identity_slots: tuple[str, ...]


GoalWriter = Callable[..., Goal]
"""`Goal` with the fields that its outcomes share filled in (`functools.partial`)."""

GoalMaker = Callable[[World, Person, random.Random], Iterable[Goal]]
"""All goals of one kind that a person can have in a world; two goals with equal `asks` must have equal solutions."""


@dataclass(frozen=True)
class Domain:
    """A kind of world.

    Args:
        name: as in task ids.
        policy: the rules for the agent; "{today}" stands for the date.
        tools: all tools; names are unlike those of other domains.
        make_world: a random database and its protagonist, a pure function of the generator.
        goals: goal makers by kind.
        changeable: the kinds in which the user may change their mind from one goal to another of the same kind.
        alternatives: for the check that golden arguments are the only ones: plausible values by the argument's name,
            as such or as a function of the world (`column`).
    """

    name: str
    policy: str
    tools: tuple[Tool, ...]
    make_world: Callable[[random.Random], tuple[World, Person]]
    goals: Mapping[str, GoalMaker]
    changeable: tuple[str, ...]
    alternatives: Mapping[str, Sequence[str] | Callable[[World], Sequence[str]]]

    def instructions(self, today: dt.date) -> str:
        """The policy text on a day."""
        return self.policy.format(today=f"{today.isoformat()} ({today.strftime('%A')})")

    def other_values(self, world: World, argument: str, value: str) -> list[str]:
        """What else an argument of that name could plausibly be in a world."""
        values = self.alternatives.get(argument, ())
        return [other for other in (values(world) if callable(values) else values) if other != value]


@dataclass(frozen=True)
class ServiceTask:
    """One generated task; see `generate.make_service_task`.

    `start` and `golden` are the databases before and after; neither may be changed (`World.copy`). `first_wishes` has,
    for a goal that the user first states differently, the words of that first wish, by index of the goal.
    `stages` groups the indices of the goals by when the user brings them up.
    """

    id: str
    domain: str
    person: Person
    goals: tuple[Goal, ...]
    stages: tuple[tuple[int, ...], ...]
    first_wishes: Mapping[int, Goal]
    vague: frozenset[int]
    opening: str
    start: World
    golden: World
    changed: tuple[frozenset[str], ...]
    needs: frozenset[str]

    @cached_property
    def facts(self) -> tuple[Fact, ...]:
        """Everything that must be told."""
        return tuple(fact for goal in self.goals for fact in goal.tells)

    @property
    def actions(self) -> tuple[ToolCall, ...]:
        """The golden actions: verification, look-ups and changes."""
        verification = (self.person.verification,) if any(goal.needs_identity for goal in self.goals) else ()
        return verification + tuple(call for goal in self.goals for call in (*goal.reads, *goal.writes))

    @cached_property
    def user_texts(self) -> tuple[str, ...]:
        """Everything the user can say that has a value in it."""
        goals = (*self.goals, *self.first_wishes.values())
        asks = tuple(ask for goal in goals for ask in (*goal.asks, goal.vague))
        return (self.opening, *asks, *self.person.known.values(), *(v for goal in goals for v in goal.known.values()))

    def scenario(self) -> dict[str, Any]:
        """The task in the layout that tool-agent benchmarks use: user scenario and evaluation criteria, JSON values."""
        return {
            "id": self.id,
            "user_scenario": {
                "reason_for_call": self.opening,
                "known_info": dict(self.person.known),
                "requests": [{"ask": goal.asks[0], "known_info": dict(goal.known)} for goal in self.goals],
                "changes_of_mind": {str(i): goal.asks[0] for i, goal in self.first_wishes.items()},
            },
            "evaluation_criteria": {
                "actions": [{"name": call.name, "arguments": call.arguments} for call in self.actions],
                "communicate_info": [fact.value for fact in self.facts],
                "final_database_sha256": self.golden.digest(),
                "touched": sorted(self.needs),
            },
        }


def call(name: str, /, **arguments: Any) -> ToolCall:
    """A call of a tool."""
    return ToolCall(name, arguments)


def references(*records: Record) -> frozenset[str]:
    """The references of records, as `Goal.needs` has them."""
    return frozenset(map(reference, records))


def column(kind: type[Any], field_name: str = "id") -> Callable[[World], list[str]]:
    """For `Domain.alternatives`: that field of all records of a class."""
    return lambda world: [getattr(record, field_name) for record in world.rows(kind)]


def policy_text(*, company: str, agent: str, person: str, proof: str, public: str, rules: str) -> str:
    """The policy of a domain.

    Args:
        company, agent: as in "the reception agent" of "a clinic".
        person: what the company calls its users, such as "customer".
        proof: the particulars that establish who they are.
        public: what may be told to anybody.
        rules: the domain's own, one in a line that begins with "- "; lines are continued by indented ones.
    """
    return unwrapped(f"""You are {agent} of {company}. Today is {{today}}.
Help the {person} with the tools; never make up facts, and follow these rules:
- Verify the {person} ({proof}) before you look at or change anything that belongs to them. Questions about {public}
  need no verification.
- Before a change, say what you are going to do and ask for a yes. {person.capitalize()}s sometimes change their mind.
{rules.strip()}
- If a request is against the rules, say clearly that you cannot do it, and why.""")


def _dollars(cents: int) -> str:
    return f"{cents / 100:.2f}"
