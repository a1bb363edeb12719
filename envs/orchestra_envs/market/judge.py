"""Exact judging of market answers: no model, no tolerance, no partial credit."""

from __future__ import annotations

import re

_MARKER = re.compile(r"answer\s*:", re.IGNORECASE)
_EDGES = " \t\r\n.,;:!?\"'`*()[]{}<>"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")


def extract_answer(text: str) -> str:
    """The part of a final turn that is judged: what follows the last "Answer:", else all of it."""
    return _MARKER.split(text)[-1].strip()


def normalise(answer: str) -> str:
    """Lower-case, blanks collapsed, punctuation removed at both ends."""
    return " ".join(answer.lower().split()).strip(_EDGES)


def is_correct(answer: str, truth: int | str) -> bool:
    """Whether a final turn states `truth`, ignoring case, blanks and outer punctuation.

    Numbers are compared by value ("412", "412.0" and " 412." are equal); anything besides the answer after the last
    "Answer:" ("412 metres", "412 or 413") is wrong.
    """
    given, wanted = normalise(extract_answer(answer)), normalise(str(truth))
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted):
        return float(given) == float(wanted)
    return bool(given) and given == wanted
