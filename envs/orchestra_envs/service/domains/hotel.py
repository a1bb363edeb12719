"""A hotel: bookings, changes of dates and rooms, breakfast, cancellations by rate."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from orchestra_envs.service.domains import people
from orchestra_envs.service.domains.people import days, said
from orchestra_envs.service.goals import Domain, Fact, Goal, GoalWriter, Person, call, column, policy_text, references
from orchestra_envs.service.world import World, cents_of, day_of, new_id, service_tool, show, usd, world_of
from orchestra_envs.tools import CallContext, ToolArgumentError

POLICY = policy_text(
    company="a hotel",
    agent="the booking agent",
    person="guest",
    proof="guest number and e-mail",
    public="rooms and prices",
    rules="""
- A new booking costs nights times the nightly price of the room; at the rate "saver" 20 percent less. Tell the
  guest the total.
- Bookings at the rate "saver" can be neither cancelled nor moved: refuse, and tell the guest the total that they
  have paid for it.
- A booking at the rate "flexible" that is cancelled 3 or more days before the arrival is paid back in full. Later,
  the price of one night (total divided by nights) is kept. Tell the guest the refund.
- A "flexible" booking can be moved to another arrival day if the room is free on all of its nights. It then costs
  nights times the nightly price of the room as it is today, plus 15 dollars if the old arrival is fewer than 7 days
  away. Tell the guest the new total. If the room is not free, refuse, and tell the first arrival day after the
  wished one on which it is free for the whole stay.
- A stay can be changed to another room type whatever the rate. The guest pays nights times the difference of the
  nightly prices; gold guests pay half of that. Changes to a cheaper room are not offered. Tell the guest the
  surcharge.
- Breakfast costs 14 dollars a night for each guest of the booking; gold guests pay nothing. Tell the guest the
  charge if there is one.
""",
)

Rate = Literal["flexible", "saver"]
ROOM_NAMES = (
    "Garden Single",
    "Courtyard Double",
    "Harbour Double",
    "Family Studio",
    "Tower Suite",
    "Roof Terrace Suite",
)
SAVER_DISCOUNT_PERCENT = 20
FREE_CANCEL_DAYS, LATE_MOVE_DAYS, LATE_MOVE_CENTS, BREAKFAST_CENTS = 3, 7, 1500, 1400
CALENDAR_DAYS, MAX_NIGHTS = 90, 30


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest; `gold` guests have advantages."""

    id: str
    name: str
    email: str
    gold: bool


@dataclass(frozen=True, slots=True)
class RoomType:
    """A type of room and the nights on which no more of it is free."""

    id: str
    name: str
    beds: int
    nightly_price_cents: int
    full_nights: tuple[dt.date, ...]


@dataclass(frozen=True, slots=True)
class Booking:
    """A stay; `status` is booked or cancelled."""

    id: str
    guest_id: str
    room_id: str
    arrival: dt.date
    nights: int
    guests: int
    rate: str
    total_cents: int
    status: str = "booked"
    breakfast: bool = False
    refund_cents: int = 0


# The tools.


@service_tool()
def verify_guest(context: CallContext, guest_id: str, email: str) -> dict[str, Any]:
    """Establish who the guest is. Returns their record.

    Args:
        guest_id: such as G-12345.
        email: the e-mail address that the guest states.
    """
    proof = {"id": guest_id.strip().upper(), "email": email.strip().lower()}
    return world_of(context).verify(Guest, "number and e-mail address", **proof)


@service_tool()
def get_guest(context: CallContext, guest_id: str) -> dict[str, Any]:
    """The record of a verified guest.

    Args:
        guest_id: such as G-12345.
    """
    return show(world_of(context).find_private(Guest, guest_id))


@service_tool()
def list_bookings(context: CallContext, guest_id: str) -> list[dict[str, Any]]:
    """All bookings of a verified guest.

    Args:
        guest_id: such as G-12345.
    """
    world = world_of(context)
    guest = world.find_private(Guest, guest_id)
    return world.show(world.rows(Booking, guest_id=guest.id))


@service_tool()
def get_booking(context: CallContext, booking_id: str) -> dict[str, Any]:
    """One booking of a verified guest.

    Args:
        booking_id: such as B-12345.
    """
    return show(world_of(context).find_private(Booking, booking_id, owner="guest_id"))


@service_tool()
def list_room_types(context: CallContext) -> list[dict[str, Any]]:
    """All room types with beds and nightly prices."""
    rooms = world_of(context).show(world_of(context).rows(RoomType))
    return [{key: value for key, value in room.items() if key != "full_nights"} for room in rooms]


@service_tool()
def check_availability(context: CallContext, room_id: str, arrival: str, nights: int) -> dict[str, Any]:
    """Whether a room type is free on all nights of a stay, and if not, the next arrival day on which it is.

    Args:
        room_id: such as R-123.
        arrival: YYYY-MM-DD.
        nights: how many, 1 to 30.
    """
    room, day = _room_and_day(world_of(context), room_id, arrival, nights)
    return {"free": _is_free(room, day, nights), "next_free_arrival": _next_free(room, day, nights).isoformat()}


@service_tool(write=True)
def create_booking(
    context: CallContext,
    guest_id: str,
    room_id: str,
    arrival: str,
    nights: int,
    guests: int,
    rate: Rate,
    total_usd: float,
) -> dict[str, Any]:
    """Book a stay for a verified guest.

    Args:
        guest_id: such as G-12345.
        room_id: such as R-123.
        arrival: YYYY-MM-DD.
        nights: how many, 1 to 30.
        guests: how many people.
        rate: flexible or saver.
        total_usd: the price of the whole stay, in dollars.
    """
    world = world_of(context)
    guest = world.find_private(Guest, guest_id)
    room, day = _free_room(world, room_id, arrival, nights)
    if not 1 <= guests <= room.beds:
        raise ToolArgumentError(f"{room.name} is for 1 to {room.beds} guests")
    booking_id = new_id("B", guest.id, room.id, day, nights, guests, rate)
    if world.rows(Booking, id=booking_id, status="booked"):
        raise ToolArgumentError(f"this stay is booked already, as {booking_id}")
    return world.put(Booking(booking_id, guest.id, room.id, day, nights, guests, rate, cents_of(total_usd)))


@service_tool(write=True)
def move_booking(context: CallContext, booking_id: str, arrival: str, total_usd: float) -> dict[str, Any]:
    """Move a booking to another arrival day, for as many nights.

    Args:
        booking_id: such as B-12345.
        arrival: the new day, YYYY-MM-DD.
        total_usd: the new price of the whole stay, in dollars.
    """
    world = world_of(context)
    booking = _open_booking(world, booking_id)
    _, day = _free_room(world, booking.room_id, arrival, booking.nights)
    return world.put(replace(booking, arrival=day, total_cents=cents_of(total_usd)))


@service_tool(write=True)
def change_room(context: CallContext, booking_id: str, room_id: str, surcharge_usd: float) -> dict[str, Any]:
    """Change a booking to another room type.

    Args:
        booking_id: such as B-12345.
        room_id: the new room type, such as R-123.
        surcharge_usd: what the guest pays on top for the whole stay, in dollars.
    """
    world = world_of(context)
    booking = _open_booking(world, booking_id)
    room, _ = _free_room(world, room_id, booking.arrival.isoformat(), booking.nights)
    if room.beds < booking.guests:
        raise ToolArgumentError(f"{room.name} has too few beds for {booking.guests} guests")
    total_cents = booking.total_cents + cents_of(surcharge_usd)
    return world.put(replace(booking, room_id=room.id, total_cents=total_cents))


@service_tool(write=True)
def add_breakfast(context: CallContext, booking_id: str, charge_usd: float) -> dict[str, Any]:
    """Add breakfast to a booking, for all of its guests and nights.

    Args:
        booking_id: such as B-12345.
        charge_usd: what it costs for the whole stay, in dollars; 0 for nothing.
    """
    world = world_of(context)
    booking = _open_booking(world, booking_id)
    if booking.breakfast:
        raise ToolArgumentError(f"{booking_id} has breakfast already")
    return world.put(replace(booking, breakfast=True, total_cents=booking.total_cents + cents_of(charge_usd)))


@service_tool(write=True)
def cancel_booking(context: CallContext, booking_id: str, refund_usd: float) -> dict[str, Any]:
    """Cancel a booking.

    Args:
        booking_id: such as B-12345.
        refund_usd: what is paid back, in dollars.
    """
    world = world_of(context)
    booking = _open_booking(world, booking_id)
    return world.put(replace(booking, status="cancelled", refund_cents=cents_of(refund_usd)))


@service_tool(write=True)
def change_guest_email(context: CallContext, guest_id: str, email: str) -> dict[str, Any]:
    """Change the e-mail address of a verified guest.

    Args:
        guest_id: such as G-12345.
        email: the new address.
    """
    world = world_of(context)
    guest = world.find_private(Guest, guest_id)
    return world.put(replace(guest, email=email.strip().lower()))


TOOLS = (
    verify_guest,
    get_guest,
    list_bookings,
    get_booking,
    list_room_types,
    check_availability,
    create_booking,
    move_booking,
    change_room,
    add_breakfast,
    cancel_booking,
    change_guest_email,
)


def _open_booking(world: World, booking_id: str) -> Booking:
    return world.find_private(Booking, booking_id, owner="guest_id", status="booked")


def _room_and_day(world: World, room_id: str, arrival: str, nights: int) -> tuple[RoomType, dt.date]:
    """The arguments that describe a stay, checked."""
    room, day = world.find(RoomType, room_id), day_of(arrival)
    if not 1 <= nights <= MAX_NIGHTS:
        raise ToolArgumentError(f"nights must be 1 to {MAX_NIGHTS}")
    return room, day


def _free_room(world: World, room_id: str, arrival: str, nights: int) -> tuple[RoomType, dt.date]:
    """The same, for a stay in the future for which the room is free."""
    room, day = _room_and_day(world, room_id, arrival, nights)
    if day <= world.today:
        raise ToolArgumentError(f"{arrival} is not in the future")
    if not _is_free(room, day, nights):
        raise ToolArgumentError(f"{room.name} is not free for {nights} nights from {arrival}")
    return room, day


def _is_free(room: RoomType, arrival: dt.date, nights: int) -> bool:
    return not any(arrival <= night < arrival + days(nights) for night in room.full_nights)


def _next_free(room: RoomType, arrival: dt.date, nights: int) -> dt.date:
    """The first day from `arrival` on that begins a free stay."""
    while not _is_free(room, arrival, nights):
        arrival += days(1)
    return arrival


# The world.


def make_world(rng: random.Random) -> tuple[World, Person]:
    """A hotel with 6 room types and 4 guests; the first of them, with 6 bookings, is the user."""
    today = people.today(rng)
    rooms = _rooms(rng, today)
    guests = [
        Guest(guest_id, name, people.email_of(rng, name), rng.random() < 0.4)
        for guest_id, name in people.ids_and_names(rng, "G", 4)
    ]
    booking_ids = iter(people.distinct(rng, "B", 20))
    bookings = [
        _random_booking(rng, next(booking_ids), guest, rooms, today)
        for guest, count in zip(guests, (6, 2, 1, 1))
        for _ in range(count)
    ]
    user = guests[0]
    verification = call("verify_guest", guest_id=user.id, email=user.email)
    person = people.protagonist(user, {"guest number": user.id, "email": user.email}, verification)
    return World(today, [*rooms, *guests, *bookings]), person


def _rooms(rng: random.Random, today: dt.date) -> list[RoomType]:
    prices_cents = sorted(rng.sample(range(6000, 26_000, 100), len(ROOM_NAMES)))
    rooms = []
    for room_id, name, beds, price_cents in zip(
        people.distinct(rng, "R", 6, digits=3), ROOM_NAMES, (1, 2, 2, 4, 2, 3), prices_cents
    ):
        full: set[dt.date] = set()
        for start in rng.sample(range(CALENDAR_DAYS), 7):
            full.update(today + days(start + night) for night in range(rng.randint(1, 3)))
        rooms.append(RoomType(room_id, name, beds, price_cents, tuple(sorted(full))))
    return rooms


def _random_booking(
    rng: random.Random, booking_id: str, guest: Guest, rooms: Sequence[RoomType], today: dt.date
) -> Booking:
    room, nights = rng.choice(rooms[:5]), rng.randint(2, 6)
    arrival = _next_free(room, today + days(rng.choice((1, 2, 4, rng.randint(5, 60)))), nights)
    rate = rng.choice(("flexible", "flexible", "saver"))
    paid_cents = nights * (room.nightly_price_cents - rng.choice((0, 500, 1000)))
    if rate == "saver":
        paid_cents = paid_cents * (100 - SAVER_DISCOUNT_PERCENT) // 100
    return Booking(booking_id, guest.id, room.id, arrival, nights, rng.randint(1, room.beds), rate, paid_cents)


# The goals.


def _booked_of(world: World, person: Person) -> list[Booking]:
    return world.rows(Booking, guest_id=person.id, status="booked")


def _stay(room: RoomType, arrival: dt.date, nights: int) -> dict[str, Any]:
    """A stay as the arguments of tools."""
    return {"room_id": room.id, "arrival": arrival.isoformat(), "nights": nights}


def _cancel(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for booking in _booked_of(world, person):
        early = (booking.arrival - world.today).days >= FREE_CANCEL_DAYS
        refund_cents = booking.total_cents if early else booking.total_cents - booking.total_cents // booking.nights
        goal = partial(
            Goal,
            kind="cancel_booking",
            asks=(
                f"Please cancel booking {booking.id}. Tell me what I get back; if it cannot be cancelled, tell me how "
                "much I have paid for it.",
                f"I have to cancel my stay {booking.id}. How much is the refund? And if the rate does not allow it, "
                "what have I paid altogether?",
            ),
            vague="I would like to cancel one of my stays.",
            known={"booking": booking.id},
            reads=(call("get_booking", booking_id=booking.id),),
            needs=references(booking),
        )
        if booking.rate == "saver":
            yield _saver_refused(world, booking, "cancel", goal)
            continue
        arguments = {"booking_id": booking.id, "refund_usd": refund_cents / 100}
        yield goal(
            outcome="write",
            writes=(call("cancel_booking", **arguments),),
            tells=(Fact.amount(refund_cents, "How much do I get back?"),),
            proposal=f"cancel booking {booking.id} and pay back {usd(refund_cents)}",
            reports=(
                f"Booking {booking.id} has been cancelled and {usd(refund_cents)} will be paid back.",
                f"I have cancelled {booking.id}. You get {usd(refund_cents)} back.",
            ),
        )


def _saver_refused(world: World, booking: Booking, what: str, goal: GoalWriter) -> Goal:
    total = usd(booking.total_cents)
    totals_cents = [other.total_cents for other in world.rows(Booking, guest_id=booking.guest_id)]
    fact = Fact.amount(booking.total_cents, "How much have I paid for that stay?", totals_cents)
    return goal(
        outcome="refuse",
        tells=(fact,),
        reports=(
            f"I am sorry, I cannot {what} booking {booking.id}: it has the saver rate. You have paid {total} for it.",
            f"With the saver rate it is not possible to {what} {booking.id}; the stay was {total}.",
        ),
    )


def _move(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for booking in _booked_of(world, person):
        room = world.tables[RoomType][booking.room_id]
        wished = booking.arrival + days(rng.randint(2, 25))
        fee_cents = LATE_MOVE_CENTS if (booking.arrival - world.today).days < LATE_MOVE_DAYS else 0
        total_cents = booking.nights * room.nightly_price_cents + fee_cents
        goal = partial(
            Goal,
            kind="move_booking",
            asks=(
                f"Please move booking {booking.id} to an arrival on {said(wished)}. Tell me the new total. If the "
                "room is not free then, tell me the next arrival day on which it is; if the rate does not allow "
                "moving, tell me what I have paid.",
                f"I would rather arrive on {wished.isoformat()} with booking {booking.id}. What is the total then? If "
                "it is full I need the first later arrival that works, and if I may not move it, the amount I paid.",
            ),
            vague="I would like to move one of my stays.",
            known={"booking": booking.id, "day": said(wished)},
            needs=references(booking),
        )
        stay = _stay(room, wished, booking.nights)
        reads = (call("get_booking", booking_id=booking.id),)
        if booking.rate == "saver":
            yield _saver_refused(world, booking, "move", partial(goal, reads=reads))
            continue
        goal = partial(goal, reads=(*reads, call("list_room_types"), call("check_availability", **stay)))
        if not _is_free(room, wished, booking.nights):
            yield _full(room, booking, _next_free(room, wished, booking.nights), goal)
            continue
        arguments = {"booking_id": booking.id, "arrival": wished.isoformat(), "total_usd": total_cents / 100}
        yield goal(
            outcome="write",
            writes=(call("move_booking", **arguments),),
            tells=(Fact.amount(total_cents, "What is the new total?"),),
            proposal=f"move booking {booking.id} to {said(wished)} for a total of {usd(total_cents)}",
            reports=(
                f"Booking {booking.id} has been moved to {said(wished)}; the total is {usd(total_cents)}.",
                f"I have moved it to {wished.isoformat()}, for {usd(total_cents)} altogether.",
            ),
        )


def _full(room: RoomType, booking: Booking, free: dt.date, goal: GoalWriter) -> Goal:
    return goal(
        outcome="refuse",
        tells=(Fact.day(free, "What is the next arrival day that works?"),),
        reports=(
            f"I am sorry, I cannot move booking {booking.id} to that day: the {room.name} is full. The next possible "
            f"arrival is {said(free)}.",
            f"It is not possible to move {booking.id} then; the first later arrival that works is {free.isoformat()}.",
        ),
    )


def _upgrade(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    gold = world.tables[Guest][person.id].gold
    for booking in _booked_of(world, person):
        old = world.tables[RoomType][booking.room_id]
        for new in world.rows(RoomType):
            difference_cents = new.nightly_price_cents - old.nightly_price_cents
            is_offered = difference_cents > 0 and new.beds >= booking.guests
            if not is_offered or not _is_free(new, booking.arrival, booking.nights):
                continue
            surcharge_cents = booking.nights * difference_cents // (2 if gold else 1)
            arguments = {"booking_id": booking.id, "room_id": new.id, "surcharge_usd": surcharge_cents / 100}
            stay, surcharge = _stay(new, booking.arrival, booking.nights), usd(surcharge_cents)
            yield Goal(
                kind="change_room",
                outcome="write",
                asks=(
                    f"I would like the {new.name} for booking {booking.id}. Change it and tell me the surcharge.",
                    f"Please put booking {booking.id} into the {new.name} and say what I have to pay on top.",
                ),
                vague="I would like a better room for one of my stays.",
                known={"booking": booking.id, "room": f"the {new.name}"},
                reads=(
                    call("get_booking", booking_id=booking.id),
                    call("list_room_types"),
                    call("check_availability", **stay),
                ),
                writes=(call("change_room", **arguments),),
                tells=(Fact.amount(surcharge_cents, "What do I pay on top?"),),
                proposal=f"change booking {booking.id} to the {new.name} for {surcharge} more",
                reports=(
                    f"Booking {booking.id} has been changed to the {new.name}; the surcharge is {surcharge}.",
                    f"I have changed the room to the {new.name}, for {surcharge} on top.",
                ),
            )


def _breakfast(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    gold = world.tables[Guest][person.id].gold
    for booking in _booked_of(world, person):
        charge_cents = 0 if gold else booking.nights * booking.guests * BREAKFAST_CENTS
        cost = f"for {usd(charge_cents)}" if charge_cents else "at no charge"
        yield Goal(
            kind="breakfast",
            outcome="write",
            asks=(
                f"Please add breakfast to booking {booking.id}. If it costs anything, tell me how much.",
                f"We would like breakfast on our stay {booking.id}. Book it and tell me the charge, if there is one.",
            ),
            vague="I would like breakfast with one of my stays.",
            known={"booking": booking.id},
            reads=(call("get_booking", booking_id=booking.id),),
            writes=(call("add_breakfast", booking_id=booking.id, charge_usd=charge_cents / 100),),
            tells=(Fact.amount(charge_cents, "What does breakfast cost?"),) if charge_cents else (),
            proposal=f"add breakfast to booking {booking.id} {cost}",
            reports=(
                f"Breakfast has been added to booking {booking.id} {cost}.",
                f"I have added breakfast to {booking.id} {cost}.",
            ),
        )


def _new_booking(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for room in world.rows(RoomType):
        nights, guests = rng.randint(2, 7), rng.randint(1, room.beds)
        rate = rng.choice(("flexible", "saver"))
        arrival = _next_free(room, world.today + days(rng.randint(3, 70)), nights)
        percent = 100 - SAVER_DISCOUNT_PERCENT if rate == "saver" else 100
        total_cents = nights * room.nightly_price_cents * percent // 100
        stay = _stay(room, arrival, nights)
        booking = stay | {"guest_id": person.id, "guests": guests, "rate": rate, "total_usd": total_cents / 100}
        people_words = "one person" if guests == 1 else f"{guests} people"
        yield Goal(
            kind="new_booking",
            outcome="write",
            asks=(
                f"Please book the {room.name} for {people_words} from {said(arrival)}, {nights} nights, at the {rate} "
                "rate. Tell me the total.",
                f"I want to stay {nights} nights in the {room.name}, arriving {arrival.isoformat()}, for "
                f"{people_words}, {rate} rate. Book it and say what it costs altogether.",
            ),
            vague="I would like to book another stay.",
            known={
                "room": f"the {room.name}",
                "day": said(arrival),
                "nights": f"{nights} nights",
                "guests": people_words,
                "rate": f"the {rate} rate",
            },
            reads=(call("list_room_types"), call("check_availability", **stay)),
            writes=(call("create_booking", **booking),),
            tells=(Fact.amount(total_cents, "What is the total of the new stay?"),),
            proposal=f"book the {room.name} for {nights} nights from {said(arrival)} for {usd(total_cents)}",
            reports=(
                f"The {room.name} has been booked; the total is {usd(total_cents)}.",
                f"I have booked your stay in the {room.name}, {usd(total_cents)} altogether.",
            ),
            needs=references(room),
        )


def _cheapest_room(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for beds in (2, 3):
        nights = rng.randint(2, 9)
        rooms = [room for room in world.rows(RoomType) if room.beds >= beds]
        room = min(rooms, key=lambda room: room.nightly_price_cents)
        total_cents = nights * room.nightly_price_cents
        yield Goal(
            kind="cheapest_room",
            outcome="inform",
            asks=(
                f"What is your cheapest room with at least {beds} beds, and what do {nights} nights in it cost at the "
                "flexible rate?",
                f"I need {beds} beds or more for {nights} nights, flexible rate. Which room is cheapest, and what is "
                "the total?",
            ),
            known={"guests": f"{beds} people", "nights": f"{nights} nights", "rate": "the flexible rate"},
            reads=(call("list_room_types"),),
            tells=(
                Fact("name", room.name, "Which room is it?", ROOM_NAMES),
                Fact.amount(total_cents, "What do all those nights cost?"),
            ),
            reports=(
                f"The {room.name} is the cheapest; {nights} nights cost {usd(total_cents)}.",
                f"That is the {room.name}, for {usd(total_cents)} altogether.",
            ),
            needs=references(room),
            needs_identity=False,
        )


def _stays_total(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    bookings = _booked_of(world, person)
    total_cents = sum(booking.total_cents for booking in bookings)
    yield Goal(
        kind="stays_total",
        outcome="inform",
        asks=(
            "How much do all my booked stays cost altogether, as they are booked today?",
            "Tell me the sum of the totals of all stays that I have booked so far, please.",
        ),
        reads=(call("list_bookings", guest_id=person.id),),
        tells=(Fact.amount(total_cents, "What do my stays cost altogether?"),),
        reports=(f"Your stays cost {usd(total_cents)} altogether.", f"The sum of your bookings is {usd(total_cents)}."),
        needs=references(*bookings),
    )


def _change_email(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for new in people.new_values(lambda: people.email_of(rng, person.name), person.known["email"]):
        yield Goal(
            kind="change_guest_email",
            outcome="write",
            asks=(f"My e-mail address is {new} from now on, please change it.", f"Please write to {new} in future."),
            vague="I have a new e-mail address.",
            known={"new email": new},
            writes=(call("change_guest_email", guest_id=person.id, email=new),),
            proposal=f"change your e-mail address to {new}",
            reports=(f"Your e-mail address has been changed to {new}.", f"I have updated the address to {new}."),
        )


DOMAIN = Domain(
    name="hotel",
    policy=POLICY,
    tools=TOOLS,
    make_world=make_world,
    goals={
        "cancel_booking": _cancel,
        "move_booking": _move,
        "change_room": _upgrade,
        "breakfast": _breakfast,
        "new_booking": _new_booking,
        "cheapest_room": _cheapest_room,
        "stays_total": _stays_total,
        "change_guest_email": _change_email,
    },
    changeable=("cancel_booking", "move_booking", "change_room", "breakfast", "new_booking", "change_guest_email"),
    alternatives={
        "guest_id": column(Guest),
        "room_id": column(RoomType),
        "booking_id": column(Booking),
        "rate": ("flexible", "saver"),
        "email": ("nobody@mail.example",),
    },
)
