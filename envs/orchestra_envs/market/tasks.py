"""The market's tasks: five types of short question, each in three difficulties, generated without limit.

`make_task(split, task_type, index)` is a pure function: the same arguments give the same task on every machine. A
task belongs to "test" when the hash of its content (the expression, the fact, the story's numbers; not its wording)
says so, and to "train" otherwise, so no fact or sum is ever seen in both splits, whatever the phrasing.

| type         | example                                                       | easy, medium, hard         |
|--------------|---------------------------------------------------------------|----------------------------|
| arithmetic   | What is 37 * 14 - 96?                                         | one, two, three operations |
| lookup       | What is the height in metres of Velmora Tower?                | well known to obscure fact |
| word_problem | Ana has 12 pens. Ana buys 3 boxes of 7. Ana loses 5. How many | two, three, four steps     |
|              | pens does Ana have now?                                       |                            |
| reasoning    | What number comes next: 3, 7, 11, 15?                         | simpler to harder rule     |
| two_hop      | Add the age in years of Kardak Mill to that of Brovin Gate.   | compare, add, subtract     |

Every answer is an integer from 0 to 999 or one lower-case word.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestra_envs.env import Task
from orchestra_envs.market import corpus

TASK_TYPES = ("arithmetic", "lookup", "word_problem", "reasoning", "two_hop")
DIFFICULTIES = ("easy", "medium", "hard")
SPLITS = ("train", "test")

_TEST_SHARE = 5  # one content in five is a test task
_MAX_ANSWER = 999
_PEOPLE = ("Ana", "Ben", "Cora", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jill")
_ITEMS = ("apples", "books", "coins", "eggs", "pens", "cards", "shells", "stamps")
_BOXES = ("boxes", "bags", "packs")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True, slots=True)
class _Draft:
    question: str
    answer: int | str
    content: str  # what makes the task this task, without its wording; decides the split
    choices: tuple[str, ...] = ()  # for words: what a wrong but plausible answer is taken from
    gold: tuple[str, ...] = ()  # the passages that hold the needed facts


@lru_cache(maxsize=16384)
def make_task(split: str, task_type: str, index: int) -> Task:
    """The task number `index` (0, 1, 2, ...) of a type in a split; its difficulty cycles with the index.

    The task's id is "split/type/index". `metadata` has "type", "difficulty", "choices" (plausible words, empty for
    numbers) and "gold" (the corpus passages that hold the facts, empty unless lookup or two_hop).

    Raises ValueError for an unknown split or type or a negative index.
    """
    _check(split, task_type, index)
    difficulty = index % len(DIFFICULTIES)
    rng = random.Random(f"{split}/{task_type}/{index}")
    draft = _GENERATORS[task_type](rng, difficulty)
    while not (0 <= _as_number(draft.answer) <= _MAX_ANSWER and _split_of(draft.content) == split):
        draft = _GENERATORS[task_type](rng, difficulty)
    metadata = {
        "type": task_type,
        "difficulty": DIFFICULTIES[difficulty],
        "choices": draft.choices,
        "gold": draft.gold,
    }
    return Task(draft.question, draft.answer, id=f"{split}/{task_type}/{index}", metadata=metadata)


def task_from_id(task_id: str) -> Task:
    """The task with this id ("test/lookup/17").

    Raises ValueError if it is not of that form.
    """
    parts = task_id.split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise ValueError(f"task_id: expected 'split/type/index' such as 'test/lookup/17', got {task_id!r}")
    return make_task(parts[0], parts[1], int(parts[2]))


def _check(split: str, task_type: str, index: int) -> None:
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    if task_type not in TASK_TYPES:
        raise ValueError(f"task type: expected one of {', '.join(TASK_TYPES)}, got {task_type!r}")
    if index < 0:
        raise ValueError(f"task index: expected 0 or more, got {index}")


def _split_of(content: str) -> str:
    return "test" if zlib.crc32(content.encode()) % _TEST_SHARE == 0 else "train"


def _as_number(answer: int | str) -> int:
    return answer if isinstance(answer, int) else 0


def _arithmetic(rng: random.Random, difficulty: int) -> _Draft:
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    x, y = rng.randint(2, 20), rng.randint(2, 20)
    expression, answer = rng.choice(
        (
            ((f"{a} + {b}", a + b), (f"{a} - {b}", a - b), (f"{x} * {b}", x * b)),
            ((f"{a} + {b} - {c}", a + b - c), (f"{x} * {y} + {c}", x * y + c), (f"{c} - {x} * {y}", c - x * y)),
            (
                (f"({a} + {b}) * {x} - {c}", (a + b) * x - c),
                (f"({a} - {b}) * {x} + {d}", (a - b) * x + d),
                (f"{a} + {x} * {y} - {d}", a + x * y - d),
            ),
        )[difficulty]
    )
    pattern = rng.choice(("What is {}?", "Compute {}.", "Calculate {}.", "Evaluate {}."))
    return _Draft(pattern.format(expression), answer, expression)


def _lookup(rng: random.Random, difficulty: int) -> _Draft:
    entity = rng.choice(corpus.entities())
    attribute = rng.choice(
        (("height in metres", "age in years"), ("number of steps",), ("colour", "emblem"))[difficulty]
    )
    pattern = rng.choice(
        (
            "What is the {} of {}?",
            "Look up the {} of {}.",
            "Find the {} of {}.",
            "Tell me the {} of {}.",
        )
    )
    return _Draft(
        pattern.format(attribute, entity.name),
        entity.values[attribute],
        f"{attribute} of {entity.name}",
        corpus.WORD_ATTRIBUTES.get(attribute, ()),
        (corpus.passage(entity, attribute),),
    )


def _two_hop(rng: random.Random, difficulty: int) -> _Draft:
    first, second = rng.sample(corpus.entities(), 2)
    attribute = rng.choice(corpus.NUMERIC_ATTRIBUTES)
    a, b = (int(entity.values[attribute]) for entity in (first, second))
    choices: tuple[str, ...] = ()
    answer: int | str
    if difficulty == 0:
        while a == b:
            return _two_hop(rng, difficulty)
        greater = rng.random() < 0.5
        adjective = "greater" if greater else "smaller"
        pattern = rng.choice(
            (f"Which has the {adjective} {{}}, {{}} or {{}}?", f"The {{}}: which is {adjective}, {{}} or {{}}?")
        )
        answer = (first if (a > b) == greater else second).short_name
        choices = (first.short_name, second.short_name)
    elif difficulty == 1:
        answer = a + b
        pattern = rng.choice(("Add the {} of {} to that of {}.", "What is the sum of the {} of {} and {}?"))
    else:
        answer = abs(a - b)
        pattern = rng.choice(
            ("What is the difference in {} between {} and {}?", "By how much do the {} of {} and {} differ?")
        )
    names = " and ".join(sorted((first.name, second.name)))
    return _Draft(
        pattern.format(attribute, first.name, second.name),
        answer,
        f"{attribute} of {names}",
        choices,
        (corpus.passage(first, attribute), corpus.passage(second, attribute)),
    )


def _word_problem(rng: random.Random, difficulty: int) -> _Draft:
    person, friend = rng.sample(_PEOPLE, 2)
    items = rng.choice(_ITEMS)
    total = rng.randint(5, 60)
    sentences = [f"{person} has {total} {items}."]
    for step in range(difficulty + 2):
        sentence, total = _story_step(rng, person, friend, total, product=step == 0)
        sentences.append(sentence)
    if rng.random() < 0.5:
        question = f"How many {items} does {person} have now?"
    else:
        question = f"Now how many {items} are left?"
    story = " ".join(sentences)
    return _Draft(f"{story} {question}", total, story)


def _story_step(rng: random.Random, person: str, friend: str, total: int, *, product: bool) -> tuple[str, int]:
    """One sentence of a story and the number of items after it; the first step always has a product in it."""
    n, k, m = rng.randint(2, 30), rng.randint(2, 9), rng.randint(2, 12)
    if product or rng.random() < 0.25:
        return f"{person} buys {k} {rng.choice(_BOXES)} of {m}.", total + k * m
    if total % 2 == 0 and rng.random() < 0.3:
        return f"{person} sells half.", total // 2
    if total > n and rng.random() < 0.7:
        return rng.choice((f"{person} gives {n} to {friend}.", f"{person} loses {n}.")), total - n
    return f"{person} finds {n} more.", total + n


def _reasoning(rng: random.Random, difficulty: int) -> _Draft:
    return rng.choice((_sequence, _calendar, _ordering))(rng, difficulty)


def _sequence(rng: random.Random, difficulty: int) -> _Draft:
    start, step, change = rng.randint(1, 99), rng.randint(2, 40), rng.randint(1, 12)
    if difficulty == 0:
        terms = [start + i * step for i in range(5)]
    elif difficulty == 1:
        terms = [start + i * step + change * (i * (i - 1) // 2) for i in range(5)]
    else:
        terms = [start, start + step]
        while len(terms) < 6:
            terms.append(terms[-1] + terms[-2])
    shown = ", ".join(str(term) for term in terms[:-1])
    pattern = rng.choice(("What number comes next: {}?", "Continue the sequence: {}.", "Which number follows: {}?"))
    return _Draft(pattern.format(shown), terms[-1], shown)


def _calendar(rng: random.Random, difficulty: int) -> _Draft:
    today = rng.randrange(7)
    n = rng.randint(*((2, 30), (31, 200), (31, 200))[difficulty])
    back = rng.randint(2, 30)
    name = _DAYS[today].capitalize()
    if difficulty == 2:
        moves, day = f"{n} days later and then {back} days earlier", (today + n - back) % 7
    elif rng.random() < 0.5:
        moves, day = f"{n} days later", (today + n) % 7
    else:
        moves, day = f"{n} days earlier", (today - n) % 7
    pattern = rng.choice(("Today is {}. Which weekday is it {}?", "It is {}. What day is it {}?"))
    return _Draft(pattern.format(name, moves), _DAYS[day], f"{name} {moves}", _DAYS)


def _ordering(rng: random.Random, difficulty: int) -> _Draft:
    more, most, least = rng.choice(
        (("older", "oldest", "youngest"), ("taller", "tallest", "shortest"), ("faster", "fastest", "slowest"))
    )
    people = rng.sample(_PEOPLE, 3 + difficulty)  # from most to least
    facts = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(people)]
    rng.shuffle(facts)
    wanted, position = rng.choice(_ranks(most, least, difficulty))
    answer = people[position].lower()
    question = f"{' '.join(facts)} Who is the {wanted}?"
    return _Draft(question, answer, f"{more} {people}", tuple(sorted(person.lower() for person in people)))


def _ranks(most: str, least: str, difficulty: int) -> Sequence[tuple[str, int]]:
    return ((most, 0), (least, -1)) if difficulty < 2 else ((f"second {most}", 1), (f"second {least}", -2))


_GENERATORS: dict[str, Callable[[random.Random, int], _Draft]] = {
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "word_problem": _word_problem,
    "reasoning": _reasoning,
    "two_hop": _two_hop,
}
