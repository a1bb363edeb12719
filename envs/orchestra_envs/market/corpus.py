"""The market's library: facts about invented buildings, as sentences, and a real BM25 index over them.

Every entity and every value is made up and derived in code from a fixed seed, so that no model can know them
from elsewhere and the whole corpus needs no file. 400 buildings with five attributes each give 2,000 passages of
one sentence; the value is always the last word ("The height in metres of Velmora Tower is 412.").
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from orchestra_envs.bm25 import import_bm25s

_SEED = "orchestra market corpus 1"
# fmt: off
_FIRST = ("Vel", "Kar", "Bro", "Tal", "Mir", "Sol", "Dun", "Fen", "Gor", "Hal",
          "Jor", "Lem", "Nor", "Pel", "Quin", "Ros", "Sar", "Tor", "Ulm", "Zan")
_LAST = ("mora", "dak", "vin", "nara", "wick", "ton", "ria", "bel", "gard", "ost",
         "umi", "lak", "sted", "fyr", "hem", "ino", "pur", "rax", "zel", "oth")
# fmt: on
_KINDS = ("Tower", "Bridge", "Castle", "Mill", "Palace", "Temple", "Library", "Gate")

COLOURS = ("red", "blue", "green", "white", "black", "grey", "yellow", "brown", "orange", "purple")
EMBLEMS = ("owl", "fox", "wolf", "bear", "lion", "swan", "horse", "stag", "crow", "seal")
# Numbers stay below half of 1,000 so that the sum of two facts is still an answer of at most three digits.
NUMERIC_ATTRIBUTES = ("height in metres", "age in years", "number of steps")
WORD_ATTRIBUTES = {"colour": COLOURS, "emblem": EMBLEMS}
ATTRIBUTES = (*NUMERIC_ATTRIBUTES, *WORD_ATTRIBUTES)
_MAX_RANKED = 10


@dataclass(frozen=True, slots=True)
class Entity:
    """An invented building: `name` ("Velmora Tower") and `values`, one int or lower-case word per attribute."""

    name: str
    values: dict[str, int | str]

    @property
    def short_name(self) -> str:
        """The distinguishing word of the name, lower-case ("velmora"), as answers use it."""
        return self.name.split()[0].lower()


@cache
def entities() -> tuple[Entity, ...]:
    """All buildings of the corpus, always the same and in the same order."""
    rng = random.Random(_SEED)
    names = [f"{first}{last} {rng.choice(_KINDS)}" for first in _FIRST for last in _LAST]
    return tuple(Entity(name, _draw_values(rng)) for name in names)


def _draw_values(rng: random.Random) -> dict[str, int | str]:
    numbers = {attribute: rng.randint(10, 490) for attribute in NUMERIC_ATTRIBUTES}
    words = {attribute: rng.choice(values) for attribute, values in WORD_ATTRIBUTES.items()}
    return {**numbers, **words}


def passage(entity: Entity, attribute: str) -> str:
    """The one sentence of the corpus that states `attribute` of `entity`; the value comes last."""
    return f"The {attribute} of {entity.name} is {entity.values[attribute]}."


@cache
def passages() -> tuple[str, ...]:
    """Every passage of the corpus (entities x attributes)."""
    return tuple(passage(entity, attribute) for entity in entities() for attribute in ATTRIBUTES)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


@cache
def _index() -> Any:
    index = import_bm25s().BM25()
    index.index([_words(text) for text in passages()], show_progress=False)
    return index


@lru_cache(maxsize=4096)
def rank(query: str) -> tuple[int, ...]:
    """Indices into `passages()` of the best matches of `query` by BM25, best first, at most 10.

    Only passages that share a word with the query (score above zero) are returned; equal scores keep the order of
    the corpus, so that the result is the same on every machine.
    """
    known = [word for word in _words(query) if word in _index().vocab_dict]
    if not known:
        return ()
    scores = _index().get_scores(known)
    best = np.argsort(-scores, kind="stable")[:_MAX_RANKED]
    return tuple(int(i) for i in best if scores[i] > 0)


def retrieve(query: str, top_k: int = 1, seen: frozenset[str] = frozenset()) -> list[str]:
    """The `top_k` best passages for `query` that are not in `seen`, best first; [] if nothing matches."""
    texts = passages()
    return [texts[i] for i in rank(query) if texts[i] not in seen][:top_k]
