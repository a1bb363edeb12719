"""A world: the small database of one episode, and the helpers that typed tools are written with.

Records are frozen dataclasses with an `id`; a table holds the records of one class. Tools are module-level functions
that take a `CallContext`, from which `world_of` gives the database of the episode, so that a tool is built once per
process and any number of episodes run at once::

    @service_tool(write=True)
    def close_account(context: CallContext, account_id: str) -> dict[str, Any]:
        \"\"\"Close an account.\"\"\"
        world = world_of(context)
        account = world.find_private(Account, account_id, owner="customer_id", status="open")
        return world.put(replace(account, status="closed"))

Field names ending in `_cents` are whole cents; tools show and take US dollars (`_usd`).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from orchestra_envs.tools import CallContext, Price, Tool, ToolArgumentError, canonical_json, tool

Record = Any
"""A frozen dataclass with an `id` that no other record of its class has."""

R = TypeVar("R")

READ_PRICE, READ_LATENCY_S = Price(per_call_usd=0.0002), 0.2
WRITE_PRICE, WRITE_LATENCY_S = Price(per_call_usd=0.0005), 0.4
MAX_USD = 1e6


class World:
    """The database of one episode.

    Args:
        today: the day on which the episode happens.
        records: all records.

    `verified` has the ids of the people whose identity was established and is part of the state. `touched` has the
    references ("Order/O-17") of the records that successful calls have shown or changed; it is no part of the state.
    """

    def __init__(self, today: dt.date, records: Iterable[Record] = ()) -> None:
        self.today = today
        self.tables: dict[type, dict[str, Record]] = {}
        self.verified: set[str] = set()
        self.touched: set[str] = set()
        for record in records:
            self._insert(record)

    def copy(self) -> World:
        """An independent copy with nothing touched; records are immutable and shared."""
        other = World(self.today)
        other.tables = {kind: dict(rows) for kind, rows in self.tables.items()}
        other.verified = set(self.verified)
        return other

    def find(self, kind: type[R], record_id: str) -> R:
        """The record with this id; a `ToolArgumentError` if there is none. Counts as touched."""
        record = self.tables.get(kind, {}).get(record_id)
        if record is None:
            raise ToolArgumentError(f"there is no {words_of(kind)} {record_id!r}")
        self.touched.add(reference(record))
        return record

    def find_private(self, kind: type[R], record_id: str, *, owner: str = "id", status: str = "") -> R:
        """The record with this id, if its owner is verified.

        Args:
            kind: class of the record.
            record_id: its id.
            owner: the field with the id of the person whom it belongs to.
            status: what its field of that name must be, if given.

        Raises:
            ToolArgumentError: there is none, its owner is not verified, or it has another status.
        """
        record: Any = self.find(kind, record_id)
        if getattr(record, owner) not in self.verified:
            raise ToolArgumentError("the identity of the person whom this belongs to is not verified yet")
        if status and record.status != status:
            raise ToolArgumentError(f"{record_id} is {record.status}")
        return record

    def rows(self, kind: type[R], **equal: Any) -> list[R]:
        """The records of a class whose fields have these values, sorted by id. Does not count as touched."""
        found = [row for row in self.tables.get(kind, {}).values() if all(getattr(row, k) == equal[k] for k in equal)]
        return sorted(found, key=lambda row: row.id)

    def show(self, records: Iterable[Record]) -> list[dict[str, Any]]:
        """Records as JSON values, for a tool's result. They count as touched."""
        records = list(records)
        self.touched.update(map(reference, records))
        return [show(record) for record in records]

    def put(self, record: Record) -> dict[str, Any]:
        """Insert or replace a record; returns it as JSON values. Counts as touched."""
        self._insert(record)
        self.touched.add(reference(record))
        return show(record)

    def verify(self, kind: type[Any], particulars: str, **equal: Any) -> dict[str, Any]:
        """Note that a person's identity is established; returns the person's record as JSON values.

        Args:
            kind: class of the person's record.
            particulars: in words, what was asked for.
            **equal: what the fields of the record must be.

        Raises:
            ToolArgumentError: there is no such person.
        """
        for person in self.rows(kind, **equal):
            self.verified.add(person.id)
            return show(person) | {"identity": "verified"}
        raise ToolArgumentError(f"no {words_of(kind)} has this {particulars}")

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the whole state. The order of inserts does not matter."""
        return hashlib.sha256(canonical_json(self.state()).encode()).hexdigest()

    def state(self) -> dict[str, Any]:
        """The whole state as JSON values."""
        tables = {
            kind.__name__: {record_id: show(row) for record_id, row in rows.items()}
            for kind, rows in self.tables.items()
            if rows
        }
        return {"today": self.today.isoformat(), "verified": sorted(self.verified), "tables": tables}

    def same_state(self, other: World) -> bool:
        """Whether both have the same digest; told without computing it."""
        return self.verified == other.verified and self.tables == other.tables

    def changes(self, before: World) -> set[str]:
        """References of the records that differ from those of `before`."""
        changed = set()
        for kind in self.tables.keys() | before.tables.keys():
            now, then = self.tables.get(kind, {}), before.tables.get(kind, {})
            for key in now.keys() | then.keys():
                new, old = now.get(key), then.get(key)
                if new is not old and new != old:  # unchanged records are the same object: no need to compare them
                    changed.add(f"{kind.__name__}/{key}")
        return changed

    def _insert(self, record: Record) -> None:
        self.tables.setdefault(type(record), {})[record.id] = record


def reference(record: Record) -> str:
    """How a record is named across tables: "Order/O-17"."""
    return f"{type(record).__name__}/{record.id}"


def show(record: Any) -> Any:
    """A record as JSON values: cents as dollars under `_usd`, dates as ISO text, empty dates as null."""
    if isinstance(record, str | int | float | None):
        return record
    if isinstance(record, tuple | list):
        return [show(item) for item in record]
    if isinstance(record, dt.date):
        return record.isoformat()
    shown = {}
    for name, dollars in _fields(record.__class__):
        value = getattr(record, name)
        shown[dollars or name] = value / 100 if dollars else show(value)
    return shown


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, str], ...]:
    """The fields of a record class, each with its name in dollars if it is in cents, else ""."""
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple((n, n.removesuffix("_cents") + "_usd" if n.endswith("_cents") else "") for n in names)


def usd(cents: int) -> str:
    """An amount in words for people: 1250 gives "$12.50"."""
    return f"${cents / 100:,.2f}"


def cents_of(amount_usd: float) -> int:
    """Dollars, as a tool's argument, in whole cents.

    Raises:
        ToolArgumentError: below zero, above `MAX_USD` or not in whole cents.
    """
    cents = round(amount_usd * 100) if 0 <= amount_usd <= MAX_USD else -1
    if cents < 0 or abs(cents - amount_usd * 100) > 1e-4:
        raise ToolArgumentError(f"an amount must be 0 to {MAX_USD:g} dollars in whole cents, not {amount_usd!r}")
    return cents


def day_of(text: str) -> dt.date:
    """A tool's argument as a date; `ToolArgumentError` unless it is "YYYY-MM-DD"."""
    try:
        return dt.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise ToolArgumentError(f"a day is written YYYY-MM-DD, not {text!r}") from None


def new_id(prefix: str, *content: Any) -> str:
    """An id made from what the record is about, so that it does not depend on what was created before it."""
    number = int(hashlib.sha256(canonical_json([str(part) for part in content]).encode()).hexdigest(), 16) % 900_000
    return f"{prefix}-{100_000 + number}"


def unwrapped(text: str) -> str:
    """A text whose lines are continued by indented ones, with each on one line."""
    return re.sub(r"\n +", " ", text)


def words_of(kind: type) -> str:
    """A class name as words: RoomType gives "room type"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip()


def has_words(text: str, words: str) -> bool:
    """Whether a text has all these words, or parts of words, in it; case does not matter."""
    return all(word in text.lower() for word in words.lower().split())


def world_of(context: CallContext) -> World:
    """The database of the episode that a call belongs to."""
    return context.task.metadata["world"]


def service_tool(*, write: bool = False) -> Callable[[Callable[..., Any]], Tool]:
    """Decorator for a domain's tool: declared price and latency, run in the caller's thread since it never waits."""
    price, latency_s = (WRITE_PRICE, WRITE_LATENCY_S) if write else (READ_PRICE, READ_LATENCY_S)
    return tool(price=price, latency_s=latency_s, inline=True)
