"""Names, addresses and days that the worlds of all domains are filled with."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Mapping

from orchestra_envs.parse import ToolCall
from orchestra_envs.service.goals import Person
from orchestra_envs.service.world import Record

_FIRST = "Amara Bruno Celia Dario Elif Farid Greta Hugo Ines Jonas Kaya Lena Mateo Nadia Oskar Priya Rafael Sofia Uma"
_LAST = "Abel Brandt Costa Duarte Ekman Falk Grieg Hoxha Ivanov Jansen Keller Lund Moreau Novak Okafor Petit Rossi"
_STREETS = "Alder Lane,Birch Street,Canal Road,Dock Square,Elm Avenue,Foundry Walk,Garden Row,Harbour Street,Mill Hill"
_TOWNS = "Arden,Belmont,Corvin,Dunmere,Eastwick,Fairholm,Granton,Hollis"

FIRST_NAMES, LAST_NAMES = tuple(_FIRST.split()), tuple(_LAST.split())
STREETS, TOWNS = tuple(_STREETS.split(",")), tuple(_TOWNS.split(","))


def full_names(rng: random.Random, count: int) -> list[str]:
    """Different names."""
    last_names = rng.sample(LAST_NAMES, count)
    return [f"{rng.choice(FIRST_NAMES)} {last}" for last in last_names]


def email_of(rng: random.Random, name: str) -> str:
    """An e-mail address for a name."""
    first, last = name.lower().split()
    return f"{first}.{last}{rng.randint(10, 99)}@{rng.choice(('mail', 'post', 'inbox'))}.example"


def address(rng: random.Random) -> str:
    """A street address without commas."""
    return f"{rng.randint(2, 199)} {rng.choice(STREETS)} {rng.choice(TOWNS)}"


def postcode(rng: random.Random) -> str:
    """Five digits."""
    return str(rng.randint(10_000, 99_999))


def phone(rng: random.Random) -> str:
    """A telephone number."""
    return f"555-{rng.randint(1000, 9999)}"


def today(rng: random.Random) -> dt.date:
    """A day of 2026 with some weeks of the year before and after it."""
    return dt.date(2026, 3, 1) + dt.timedelta(rng.randrange(240))


def distinct(rng: random.Random, prefix: str, count: int, digits: int = 5) -> list[str]:
    """Different ids with a prefix."""
    numbers = rng.sample(range(10 ** (digits - 1), 10**digits), count)
    return [f"{prefix}-{number}" for number in numbers]


def ids_and_names(rng: random.Random, prefix: str, count: int) -> list[tuple[str, str]]:
    """The ids and names of different people."""
    return list(zip(distinct(rng, prefix, count), full_names(rng, count)))


def protagonist(record: Record, identity: Mapping[str, str], verification: ToolCall) -> Person:
    """The user of a world, from their record, the slots that prove who they are, and the call that verifies them."""
    return Person(record.id, record.name, {"name": record.name, **identity}, verification, tuple(identity))


def new_values(draw: Callable[[], str], old: str) -> list[str]:
    """At most two values, different from each other and from the old one."""
    return [value for value in dict.fromkeys((draw(), draw())) if value != old]


def days(count: int) -> dt.timedelta:
    """That many days."""
    return dt.timedelta(days=count)


def said(day: dt.date) -> str:
    """A day as people write it: "14 March 2026"."""
    return f"{day.day} {day.strftime('%B %Y')}"
