"""A public library: loans, renewals, reservations, fines, lost books."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestra_envs.parse import ToolCall
from orchestra_envs.service.domains import people
from orchestra_envs.service.domains.people import days, said
from orchestra_envs.service.goals import Domain, Fact, Goal, GoalWriter, Person, call, column, policy_text, references
from orchestra_envs.service.world import World, cents_of, day_of, has_words, new_id, service_tool, show, usd, world_of
from orchestra_envs.tools import CallContext, ToolArgumentError

POLICY = policy_text(
    company="a public library",
    agent="the service agent",
    person="member",
    proof="card number and postcode",
    public="the catalogue",
    rules="""
- A loan can be renewed if it has been renewed fewer than 2 times (students: 3 times) and nobody is waiting for the
  title. It is then due 21 days from today (students: 28 days), films 7 days from today for everybody. Tell the
  member the new due date. Otherwise refuse, and tell the date on which it is due.
- A title can be reserved for a branch unless it is of the kind "reference". It is expected 14 days from today, plus
  14 days for each person who is waiting already. Tell the member the expected day. Reference titles are read in the
  house: refuse, and tell the shelf.
- For a lost item members pay the replacement price plus 6.50 dollars; students pay the replacement price alone.
  Tell the member the charge.
- For each open loan that is overdue a running fine of 25 cents a day is due, at most 8 dollars a loan; the fines in
  the member's record come on top. What a member owes is the sum of both. With pay_fine only the fines in the record
  can be paid, all at once.
- A reservation can be cancelled or moved to another branch at any time.
""",
)

BRANCHES = ("Central", "Northgate", "Riverside", "Old Mill")
SUBJECTS = ("Lanterns", "Rivers", "Clocks", "Orchards", "Glaciers", "Bridges", "Comets", "Weavers", "Harbours", "Moths")
PATTERNS = ("A History of {}", "The Secret Life of {}", "Among the {}", "{} at Night", "The Book of {}")
MAX_RENEWALS, STUDENT_MAX_RENEWALS = 2, 3
LOAN_DAYS, STUDENT_LOAN_DAYS, FILM_DAYS, WAITING_DAYS = 21, 28, 7, 14
LOST_FEE_CENTS, FINE_CENTS_PER_DAY, MAX_RUNNING_FINE_CENTS = 650, 25, 800


@dataclass(frozen=True, slots=True)
class Member:
    """A member; `fines` are those that were entered, without the running ones."""

    id: str
    name: str
    postcode: str
    email: str
    student: bool
    fines_cents: int


@dataclass(frozen=True, slots=True)
class Title:
    """Something to borrow; `kind` is book, film or reference, `waiting` the number of reservations for it."""

    id: str
    name: str
    kind: str
    shelf: str
    replacement_price_cents: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Loan:
    """A borrowed title; `status` is open or lost."""

    id: str
    member_id: str
    title_id: str
    due: dt.date
    renewals: int
    status: str = "open"
    charged_cents: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reserved title; `status` is waiting or cancelled."""

    id: str
    member_id: str
    title_id: str
    branch: str
    status: str = "waiting"


# The tools.


@service_tool()
def verify_member(context: CallContext, card_number: str, postcode: str) -> dict[str, Any]:
    """Establish who the member is. Returns their record.

    Args:
        card_number: such as M-12345.
        postcode: the five-digit postcode that the member states.
    """
    proof = {"id": card_number.strip().upper(), "postcode": postcode.strip()}
    return world_of(context).verify(Member, "card number and postcode", **proof)


@service_tool()
def get_member(context: CallContext, card_number: str) -> dict[str, Any]:
    """The record of a verified member.

    Args:
        card_number: such as M-12345.
    """
    return show(world_of(context).find_private(Member, card_number))


@service_tool()
def find_titles(context: CallContext, words: str) -> list[dict[str, Any]]:
    """Titles of the catalogue that have these words in their name, ten at most.

    Args:
        words: such as "lanterns".
    """
    world = world_of(context)
    return world.show([title for title in world.rows(Title) if has_words(title.name, words)][:10])


@service_tool()
def get_title(context: CallContext, title_id: str) -> dict[str, Any]:
    """One title: kind, shelf, replacement price, how many people are waiting.

    Args:
        title_id: such as T-123.
    """
    return show(world_of(context).find(Title, title_id))


@service_tool()
def list_loans(context: CallContext, card_number: str) -> list[dict[str, Any]]:
    """The loans of a verified member.

    Args:
        card_number: such as M-12345.
    """
    world = world_of(context)
    member = world.find_private(Member, card_number)
    return world.show(world.rows(Loan, member_id=member.id))


@service_tool()
def list_reservations(context: CallContext, card_number: str) -> list[dict[str, Any]]:
    """The reservations of a verified member.

    Args:
        card_number: such as M-12345.
    """
    world = world_of(context)
    member = world.find_private(Member, card_number)
    return world.show(world.rows(Reservation, member_id=member.id))


@service_tool(write=True)
def renew_loan(context: CallContext, loan_id: str, due: str) -> dict[str, Any]:
    """Renew a loan.

    Args:
        loan_id: such as L-12345.
        due: the new due date, YYYY-MM-DD.
    """
    world = world_of(context)
    loan, day = _open_loan(world, loan_id), day_of(due)
    if day <= world.today:
        raise ToolArgumentError(f"{due} is not in the future")
    return world.put(replace(loan, due=day, renewals=loan.renewals + 1))


@service_tool(write=True)
def report_lost(context: CallContext, loan_id: str, charge_usd: float) -> dict[str, Any]:
    """Enter that a borrowed item is lost.

    Args:
        loan_id: such as L-12345.
        charge_usd: what the member pays for it, in dollars.
    """
    world = world_of(context)
    return world.put(replace(_open_loan(world, loan_id), status="lost", charged_cents=cents_of(charge_usd)))


@service_tool(write=True)
def reserve_title(context: CallContext, card_number: str, title_id: str, branch: str) -> dict[str, Any]:
    """Reserve a title for a verified member.

    Args:
        card_number: such as M-12345.
        title_id: such as T-123.
        branch: Central, Northgate, Riverside or Old Mill.
    """
    world = world_of(context)
    member, title = world.find_private(Member, card_number), world.find(Title, title_id)
    reservation_id = new_id("H", member.id, title.id)
    if any(row.status == "waiting" for row in world.rows(Reservation, member_id=member.id, title_id=title.id)):
        raise ToolArgumentError(f"{title_id} is reserved for this member already")
    world.put(replace(title, waiting=title.waiting + 1))
    return world.put(Reservation(reservation_id, member.id, title.id, _branch(branch)))


@service_tool(write=True)
def move_reservation(context: CallContext, reservation_id: str, branch: str) -> dict[str, Any]:
    """Have a reserved title sent to another branch.

    Args:
        reservation_id: such as H-12345.
        branch: Central, Northgate, Riverside or Old Mill.
    """
    world = world_of(context)
    return world.put(replace(_waiting(world, reservation_id), branch=_branch(branch)))


@service_tool(write=True)
def cancel_reservation(context: CallContext, reservation_id: str) -> dict[str, Any]:
    """Cancel a reservation.

    Args:
        reservation_id: such as H-12345.
    """
    world = world_of(context)
    reservation = _waiting(world, reservation_id)
    title = world.find(Title, reservation.title_id)
    world.put(replace(title, waiting=max(0, title.waiting - 1)))
    return world.put(replace(reservation, status="cancelled"))


@service_tool(write=True)
def pay_fine(context: CallContext, card_number: str, amount_usd: float) -> dict[str, Any]:
    """Take the fines in a member's record from the card that they have left with us.

    Args:
        card_number: such as M-12345.
        amount_usd: all fines in the record, in dollars.
    """
    world = world_of(context)
    member, cents = world.find_private(Member, card_number), cents_of(amount_usd)
    if cents != member.fines_cents or not cents:
        raise ToolArgumentError(f"the fines in the record are {usd(member.fines_cents)}, not {usd(cents)}")
    return world.put(replace(member, fines_cents=0))


TOOLS = (
    verify_member,
    get_member,
    find_titles,
    get_title,
    list_loans,
    list_reservations,
    renew_loan,
    report_lost,
    reserve_title,
    move_reservation,
    cancel_reservation,
    pay_fine,
)


def _open_loan(world: World, loan_id: str) -> Loan:
    return world.find_private(Loan, loan_id, owner="member_id", status="open")


def _waiting(world: World, reservation_id: str) -> Reservation:
    return world.find_private(Reservation, reservation_id, owner="member_id", status="waiting")


def _branch(name: str) -> str:
    for branch in BRANCHES:
        if name.strip().lower() == branch.lower():
            return branch
    raise ToolArgumentError(f"there is no branch {name!r}; branches: {', '.join(BRANCHES)}")


# The world.


def make_world(rng: random.Random) -> tuple[World, Person]:
    """A library with 20 titles and 4 members; the first of them, with 6 loans and 3 reservations, is the user."""
    today = people.today(rng)
    titles = _titles(rng)
    members = [
        Member(
            member_id,
            name,
            people.postcode(rng),
            people.email_of(rng, name),
            rng.random() < 0.4,
            rng.randrange(150, 2900, 25),
        )
        for member_id, name in people.ids_and_names(rng, "M", 4)
    ]
    lent = [title for title in titles if title.kind != "reference"]
    records: list[Any] = [*titles, *members]
    loan_ids, reservation_ids = iter(people.distinct(rng, "L", 20)), iter(people.distinct(rng, "H", 20))
    for member, num_loans, num_reservations in zip(members, (6, 2, 1, 1), (3, 1, 1, 0)):
        chosen = rng.sample(lent, num_loans + num_reservations)
        for title in chosen[:num_loans]:
            due = today + days(rng.randint(-30, 20))
            records.append(Loan(next(loan_ids), member.id, title.id, due, rng.randint(0, 3)))
        for title in chosen[num_loans:]:
            records.append(Reservation(next(reservation_ids), member.id, title.id, rng.choice(BRANCHES)))
    user = members[0]
    verification = call("verify_member", card_number=user.id, postcode=user.postcode)
    identity = {"card number": user.id, "postcode": user.postcode}
    return World(today, records), people.protagonist(user, identity, verification)


def _titles(rng: random.Random) -> list[Title]:
    names = [pattern.format(subject) for subject in SUBJECTS for pattern in rng.sample(PATTERNS, 2)]
    titles = []
    for title_id, name in zip(people.distinct(rng, "T", len(names), digits=3), names):
        kind = rng.choice(("book", "book", "book", "film", "reference"))
        shelf = f"{rng.choice('ABCDEFGH')}{rng.randint(10, 99)}-{rng.randint(10, 99)}"
        price_cents = rng.randrange(900, 7000, 50)
        titles.append(Title(title_id, name, kind, shelf, price_cents, rng.choice((0, 0, 0, 1, 2, 3))))
    return titles


# The goals.


def _loans(world: World, person: Person) -> Iterator[tuple[Loan, Title]]:
    for loan in world.rows(Loan, member_id=person.id, status="open"):
        yield loan, world.tables[Title][loan.title_id]


def _loan_reads(person: Person, title: Title) -> tuple[ToolCall, ...]:
    return (call("list_loans", card_number=person.id), call("find_titles", words=title.name))


def _renew(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    student = world.tables[Member][person.id].student
    dues = [loan.due for loan in world.rows(Loan, member_id=person.id)]
    for loan, title in _loans(world, person):
        max_renewals = STUDENT_MAX_RENEWALS if student else MAX_RENEWALS
        term_days = FILM_DAYS if title.kind == "film" else STUDENT_LOAN_DAYS if student else LOAN_DAYS
        due = world.today + days(term_days)
        goal = partial(
            Goal,
            kind="renew_loan",
            asks=(
                f'Please renew my loan of "{title.name}". Tell me the new due date; if it cannot be renewed, tell me '
                "on which date it is due.",
                f'I would like to keep "{title.name}" for longer. Until when can I have it, and if that is not '
                "possible, when is it due?",
            ),
            vague="I would like to renew a loan.",
            known={"title": f'"{title.name}"'},
            reads=_loan_reads(person, title),
            needs=references(loan),
        )
        if loan.renewals >= max_renewals or title.waiting:
            yield _not_renewed(loan, title, dues, goal)
            continue
        yield goal(
            outcome="write",
            writes=(call("renew_loan", loan_id=loan.id, due=due.isoformat()),),
            tells=(Fact.day(due, f'Until when can I keep "{title.name}"?'),),
            proposal=f'renew "{title.name}" until {said(due)}',
            reports=(
                f'"{title.name}" has been renewed and is due on {said(due)}.',
                f'I have renewed "{title.name}": the new due date is {due.isoformat()}.',
            ),
        )


def _not_renewed(loan: Loan, title: Title, dues: Sequence[dt.date], goal: GoalWriter) -> Goal:
    why = "somebody is waiting for it" if title.waiting else "it has been renewed too often"
    return goal(
        outcome="refuse",
        tells=(Fact.day(loan.due, f'When is "{title.name}" due?', dues),),
        reports=(
            f'I am sorry, I cannot renew "{title.name}": {why}. The due date is {said(loan.due)}.',
            f'It is not possible to renew "{title.name}", as {why}; due on {loan.due.isoformat()}.',
        ),
    )


def _reserve(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    mine = {loan.title_id for loan in world.rows(Loan, member_id=person.id)}
    mine |= {reservation.title_id for reservation in world.rows(Reservation, member_id=person.id)}
    shelves = tuple(title.shelf for title in world.rows(Title))
    for title in world.rows(Title):
        branch = rng.choice(BRANCHES)
        expected = world.today + days(WAITING_DAYS * (1 + title.waiting))
        if title.id in mine:
            continue
        goal = partial(
            Goal,
            kind="reserve_title",
            asks=(
                f'Please reserve "{title.name}" for me at the {branch} branch. Tell me for which day it is expected; '
                "if it is not lent, tell me on which shelf it stands.",
                f'I would like to read "{title.name}" and fetch it at {branch}. When can I expect it? If it cannot be '
                "reserved I need the shelf.",
            ),
            vague="I would like to reserve something.",
            known={"title": f'"{title.name}"', "branch": branch},
            reads=(call("find_titles", words=title.name),),
            needs=references(title),
        )
        if title.kind == "reference":
            yield _reference_title(title, shelves, goal)
            continue
        arguments = {"card_number": person.id, "title_id": title.id, "branch": branch}
        yield goal(
            outcome="write",
            writes=(call("reserve_title", **arguments),),
            tells=(Fact.day(expected, f'When can I expect "{title.name}"?'),),
            proposal=f'reserve "{title.name}" at {branch}, expected on {said(expected)}',
            reports=(
                f'"{title.name}" has been reserved at {branch}; it is expected on {said(expected)}.',
                f'I have reserved "{title.name}" for {branch}, probably from {expected.isoformat()} on.',
            ),
        )


def _reference_title(title: Title, shelves: tuple[str, ...], goal: GoalWriter) -> Goal:
    return goal(
        outcome="refuse",
        tells=(Fact("name", title.shelf, f'On which shelf is "{title.name}"?', shelves),),
        reports=(
            f'I am sorry, I cannot reserve "{title.name}": it is a reference work, on shelf {title.shelf}.',
            f'"{title.name}" is read in the house and not possible to reserve; the shelf is {title.shelf}.',
        ),
    )


def _reservations(world: World, person: Person) -> Iterator[tuple[Reservation, Title, tuple[ToolCall, ...]]]:
    for reservation in world.rows(Reservation, member_id=person.id, status="waiting"):
        title = world.tables[Title][reservation.title_id]
        reads = (
            call("find_titles", words=title.name),
            call("list_reservations", card_number=person.id),
        )
        yield reservation, title, reads


def _cancel_reservation(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for reservation, title, reads in _reservations(world, person):
        yield Goal(
            kind="cancel_reservation",
            outcome="write",
            asks=(
                f'Please cancel my reservation of "{title.name}".',
                f'I do not want "{title.name}" any more: cancel the reservation.',
            ),
            vague="I would like to cancel a reservation.",
            known={"title": f'"{title.name}"'},
            reads=reads,
            writes=(call("cancel_reservation", reservation_id=reservation.id),),
            proposal=f'cancel the reservation of "{title.name}"',
            reports=(
                f'The reservation of "{title.name}" has been cancelled.',
                f'I have cancelled your reservation of "{title.name}".',
            ),
        )


def _move_reservation(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for reservation, title, reads in _reservations(world, person):
        branch = rng.choice([name for name in BRANCHES if name != reservation.branch])
        arguments = {"reservation_id": reservation.id, "branch": branch}
        yield Goal(
            kind="move_reservation",
            outcome="write",
            asks=(
                f'Please send my reserved "{title.name}" to the {branch} branch.',
                f'I would rather fetch "{title.name}", which I reserved, at {branch}.',
            ),
            vague="I would like to fetch a reservation elsewhere.",
            known={"title": f'"{title.name}"', "branch": branch},
            reads=reads,
            writes=(call("move_reservation", **arguments),),
            proposal=f'send "{title.name}" to {branch}',
            reports=(
                f'"{title.name}" has been moved to {branch}.',
                f'I have changed the branch of "{title.name}" to {branch}.',
            ),
        )


def _lost(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    student = world.tables[Member][person.id].student
    for loan, title in _loans(world, person):
        charge_cents = title.replacement_price_cents + (0 if student else LOST_FEE_CENTS)
        arguments = {"loan_id": loan.id, "charge_usd": charge_cents / 100}
        yield Goal(
            kind="report_lost",
            outcome="write",
            asks=(
                f'I have lost "{title.name}", which I borrowed. Please enter it and tell me the charge.',
                f'My borrowed "{title.name}" is gone. Report it as lost and say what I have to pay.',
            ),
            vague="I have lost something that I borrowed.",
            known={"title": f'"{title.name}"'},
            reads=_loan_reads(person, title),
            writes=(call("report_lost", **arguments),),
            tells=(Fact.amount(charge_cents, f'What do I pay for "{title.name}"?'),),
            proposal=f'enter "{title.name}" as lost, for a charge of {usd(charge_cents)}',
            reports=(
                f'"{title.name}" has been entered as lost; the charge is {usd(charge_cents)}.',
                f'I have entered the loss of "{title.name}", you pay {usd(charge_cents)}.',
            ),
        )


def _pay(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    fines_cents = world.tables[Member][person.id].fines_cents
    yield Goal(
        kind="pay_fine",
        outcome="write",
        asks=(
            "I would like to pay the fines that are in my record. Please do it and tell me the amount.",
            "Please take what I have to pay in entered fines from my card, and tell me how much it was.",
        ),
        writes=(call("pay_fine", card_number=person.id, amount_usd=fines_cents / 100),),
        tells=(Fact.amount(fines_cents, "How much were the fines in my record?"),),
        proposal=f"take the fines of {usd(fines_cents)} from your card",
        reports=(
            f"The fines of {usd(fines_cents)} have been paid.",
            f"I have booked the payment of {usd(fines_cents)}.",
        ),
    )


def _owed(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    member = world.tables[Member][person.id]
    loans = world.rows(Loan, member_id=person.id, status="open")
    late_days = [max(0, (world.today - loan.due).days) for loan in loans]
    running_cents = sum(min(late * FINE_CENTS_PER_DAY, MAX_RUNNING_FINE_CENTS) for late in late_days)
    total_cents = member.fines_cents + running_cents
    yield Goal(
        kind="amount_owed",
        outcome="inform",
        asks=(
            "How much do I owe the library today, entered fines and running fines together?",
            "Tell me what I owe altogether today, the running fines for overdue loans included.",
        ),
        reads=(call("list_loans", card_number=person.id),),
        tells=(Fact.amount(total_cents, "How much do I owe altogether?"),),
        reports=(f"You owe {usd(total_cents)} altogether.", f"The sum of all your fines is {usd(total_cents)} today."),
        needs=references(member, *(loans if running_cents else ())),
    )


def _shelf(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    shelves = tuple(title.shelf for title in world.rows(Title))
    for title in world.rows(Title):
        expected = world.today + days(WAITING_DAYS * (1 + title.waiting))
        if title.kind == "reference":
            continue
        yield Goal(
            kind="title_question",
            outcome="inform",
            asks=(
                f'On which shelf is "{title.name}", and for which day could I expect it if I reserved it today?',
                f'I only want to know the shelf of "{title.name}", and when a reservation made now would be ready.',
            ),
            known={"title": f'"{title.name}"'},
            reads=(call("find_titles", words=title.name),),
            tells=(
                Fact("name", title.shelf, f'On which shelf is "{title.name}"?', shelves),
                Fact.day(expected, "For which day could I expect it?"),
            ),
            reports=(
                f'"{title.name}" is on shelf {title.shelf}; a reservation would be ready on {said(expected)}.',
                f"The shelf is {title.shelf}, and reserved today it is expected on {expected.isoformat()}.",
            ),
            needs=references(title),
            needs_identity=False,
        )


DOMAIN = Domain(
    name="library",
    policy=POLICY,
    tools=TOOLS,
    make_world=make_world,
    goals={
        "renew_loan": _renew,
        "reserve_title": _reserve,
        "cancel_reservation": _cancel_reservation,
        "move_reservation": _move_reservation,
        "report_lost": _lost,
        "pay_fine": _pay,
        "amount_owed": _owed,
        "title_question": _shelf,
    },
    changeable=("renew_loan", "reserve_title", "cancel_reservation", "move_reservation", "report_lost"),
    alternatives={
        "card_number": column(Member),
        "title_id": column(Title),
        "loan_id": column(Loan),
        "reservation_id": column(Reservation),
        "branch": BRANCHES,
    },
)
