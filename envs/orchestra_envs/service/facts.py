"""Reading values out of what an agent says, and deciding whether a fact was told.

Numbers are compared by value ("$12.5", "12.50", "1,250", "USD 1250.00"), dates in the usual notations, names without
regard to case and blanks. Parts of identifiers ("O-12345"), dates and clock times are no numbers.

Telling is not listing. A message with more than `MAX_VALUES + 2 * required` different values of a fact's kind tells
none of them (`required`: how many facts of that kind the task has; what the user said does not count). Nor does one
with `LISTING` decoys or more: values that the fact could have been, such as the due dates of the user's other loans.
And where the other messages together hold more than twice as many values, or more than `MAX_DECOYS` decoys, nothing
was told at all. So a policy can neither read out whole records nor go on guessing until one value is right, while one
that lists what there is to choose from, and later says what was asked, does well; as does a summary of four requests
with a fee, a refund and a total each.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache

from orchestra_envs.service.goals import Fact, FactKind

MAX_VALUES, LISTING, MAX_DECOYS = 4, 4, 2

_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
_MONTH = r"(?P<month>" + "|".join(f"{m[:3]}(?:{m[3:]})?" if m[3:] else m for m in _MONTHS) + r"|sept)\.?"
_DAY, _YEAR = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?:,?\s+(?P<year>\d{4}))?"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})\b",
        r"\b(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})\b",
        r"\b(?P<month>\d{1,2})/(?P<day>\d{1,2})/(?P<year>\d{4})\b",
        rf"\b{_DAY}\s+(?:of\s+)?{_MONTH}\b{_YEAR}",
        rf"\b{_MONTH}\s+{_DAY}\b{_YEAR}",
    )
)
_IDENTIFIER = re.compile(r"\b[A-Za-z]{1,3}-?\d[\w-]*")
_TIME = re.compile(r"\b(\d{1,2}):(\d{2})(?:\s*([ap])\.?m\b\.?)?", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_NUMBER_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)


@lru_cache(maxsize=8192)
def values_of(text: str, kind: FactKind, choices: tuple[str, ...] = ()) -> frozenset[str]:
    """The values of a kind that a text has in it, in canonical form ("12.5", "2026-03-14", "09:30", lower-case names).

    A date without a year is given as "-03-14". `choices`: the names to look for.
    """
    if kind == "name":
        flat = _flat(text)
        return frozenset(name for name in map(_flat, choices) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", flat))
    dates, rest = _take_dates(text)
    if kind == "date":
        return frozenset(dates)
    rest = _IDENTIFIER.sub(" ", rest)
    if kind == "time":
        return frozenset(_clock(found) for found in _TIME.finditer(rest))
    rest = _TIME.sub(" ", rest)
    words = (str(_WORDS.index(found.group().lower()) + 2) for found in _NUMBER_WORD.finditer(rest))
    return frozenset((*(_number(found.group()) for found in _NUMBER.finditer(rest)), *words))


@lru_cache(maxsize=1024)
def values_of_all(texts: tuple[str, ...], kind: FactKind, choices: tuple[str, ...]) -> frozenset[str]:
    """The values that any of the texts has in it; see `values_of`."""
    return frozenset().union(*(values_of(text, kind, choices) for text in texts))


def canonical(kind: FactKind, value: str) -> str:
    """A value as `values_of` gives it."""
    return _number(value) if kind == "number" else _flat(value)


def mentions(text: str, fact: Fact) -> bool:
    """Whether a text has the fact's value in it at all."""
    values = values_of(text, fact.kind, (fact.value,))
    return canonical(fact.kind, fact.value) in values or (fact.kind == "date" and fact.value[4:] in values)


def names_of(facts: Iterable[Fact]) -> tuple[str, ...]:
    """All names that facts of the kind "name" could have been."""
    names = (name for fact in facts if fact.kind == "name" for name in (fact.value, *fact.choices))
    return tuple(dict.fromkeys(names))


def told(facts: Sequence[Fact], messages: Sequence[str], user_texts: tuple[str, ...] = ()) -> list[bool]:
    """For each fact, whether the agent's messages tell it; see the module's text for what does not count."""
    telling = {kind: _telling(kind, facts, messages, user_texts) for kind in {fact.kind for fact in facts}}
    return [any(mentions(text, fact) for text in telling[fact.kind]) for fact in facts]


def _telling(
    kind: FactKind, facts: Sequence[Fact], messages: Sequence[str], user_texts: tuple[str, ...]
) -> Sequence[str]:
    """The messages that can tell facts of a kind; none if too much was said in them."""
    facts = [fact for fact in facts if fact.kind == kind]
    names = names_of(facts)
    users = _keys(kind, values_of_all(user_texts, kind, names))
    required = _keys(kind, (canonical(kind, fact.value) for fact in facts))
    decoys = _keys(kind, (canonical(kind, value) for fact in facts for value in fact.choices)) - required - users
    limit = MAX_VALUES + 2 * len(facts)
    said = {text: _keys(kind, values_of(text, kind, names)) - users for text in messages}
    telling = [text for text, values in said.items() if len(values) <= limit and len(values & decoys) < LISTING]
    together = frozenset().union(*(said[text] for text in telling))
    return telling if len(together) <= 2 * limit and len(together & decoys) <= MAX_DECOYS else ()


def _keys(kind: FactKind, values: Iterable[str]) -> frozenset[str]:
    """Values for counting: dates with and without their year are one."""
    return frozenset(value[-6:] if kind == "date" else value for value in values)


def _flat(text: str) -> str:
    return " ".join(text.lower().split())


def _take_dates(text: str) -> tuple[set[str], str]:
    """The dates in a text, and the text without them."""
    dates: set[str] = set()
    for pattern in _DATES:
        kept, position = [], 0
        for found in pattern.finditer(text):
            if day := _date(found):
                dates.add(day)
                kept.append(text[position : found.start()])
                position = found.end()
        text = " ".join([*kept, text[position:]])
    return dates, text


def _date(found: re.Match[str]) -> str:
    """ISO date, "-MM-DD" without a year, or "" if there is no such day."""
    month = found["month"].lower()
    number = int(month) if month.isdigit() else next(i for i, m in enumerate(_MONTHS, 1) if m[:3] == month[:3])
    try:
        day = dt.date(int(found["year"] or 2024), number, int(found["day"]))  # 2024 is a leap year
    except ValueError:
        return ""
    return day.isoformat() if found["year"] else day.isoformat()[4:]


def _clock(found: re.Match[str]) -> str:
    hour, minute, half = int(found[1]), found[2], (found[3] or "").lower()
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return f"{hour:02d}:{minute}"


def _number(text: str) -> str:
    """A number's value: thousands separators dropped, "12,5" and "12,50" read as decimals."""
    head, comma, tail = text.rpartition(",")
    if comma and len(tail) in (1, 2) and "," not in head and "." not in text:
        text = f"{head}.{tail}"
    return f"{Decimal(text.replace(',', '') or '0').normalize():f}"
