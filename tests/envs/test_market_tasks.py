"""The generated tasks: pure, endless, disjoint between splits, and every answer right by a second way to solve it."""

import ast
import hashlib
import itertools
import re

import pytest
from orchestra_envs.market import corpus
from orchestra_envs.market.tasks import DIFFICULTIES, TASK_TYPES, make_task, task_from_id

NUM_TASKS = 1500
DIGEST = "dfdca361a0e98a196865c4de913751009f51364fe3454adbf7c89431a86c2176"
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def tasks_of(task_type, split="train", num_tasks=NUM_TASKS):
    return [make_task(split, task_type, index) for index in range(num_tasks)]


# The second solvers read nothing but the question (and the library's sentences).


def solve_arithmetic(question):
    expression = re.search(r"[(\d][\d ()+*-]*", question)[0]
    # Not the product's evaluator: compile restricted text and let Python compute.
    assert re.fullmatch(r"[\d ()+*-]+", expression)
    return eval(compile(ast.parse(expression.strip(), mode="eval"), "question", "eval"), {"__builtins__": {}})


LIBRARY = {text.removesuffix(".").rsplit(" is ", 1)[0].removeprefix("The "): text for text in corpus.passages()}


def fact(attribute, name):
    return LIBRARY[f"{attribute} of {name}"].removesuffix(".").rsplit(" ", 1)[1]


ATTRIBUTE = r"(height in metres|age in years|number of steps|colour|emblem)"
NAME = r"([A-Z][a-z]+ [A-Z][a-z]+)"


def solve_lookup(question):
    attribute, name = re.search(f"{ATTRIBUTE} of {NAME}", question).groups()
    value = fact(attribute, name)
    return int(value) if value.isdecimal() else value


def solve_two_hop(question):
    attribute = re.search(ATTRIBUTE, question)[1]
    names = re.findall(NAME, question)
    assert len(names) == 2, question
    first, second = (int(fact(attribute, name)) for name in names)
    if "greater" in question or "smaller" in question:
        better = max if "greater" in question else min
        return names[0 if better(first, second) == first else 1].split()[0].lower()
    if "differ" in question:
        return max(first, second) - min(first, second)
    assert "sum" in question or question.startswith("Add"), question
    return first + second


def solve_word_problem(question):
    *story, asked = re.split(r"(?<=\.) ", question)
    assert asked.endswith("?")
    person, start, items = re.fullmatch(r"(\w+) has (\d+) (\w+)\.", story[0]).groups()
    assert items in asked
    total = int(start)
    for sentence in story[1:]:
        assert sentence.startswith(person), sentence
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        verb = sentence.split()[1]
        if verb == "buys":
            total += numbers[0] * numbers[1]
        elif verb == "finds":
            total += numbers[0]
        elif verb in ("gives", "loses"):
            total -= numbers[0]
        elif sentence.endswith("sells half."):
            assert total % 2 == 0
            total //= 2
        else:
            pytest.fail(f"no rule for {sentence!r}")
        assert total >= 0, question
    return total


def solve_reasoning(question):
    if " is it " in question or "is it " in question:
        return solve_calendar(question)
    return solve_ordering(question) if "Who is" in question else solve_sequence(question)


def solve_calendar(question):
    day = WEEKDAYS.index(re.search(r"is (\w+day)\.", question)[1].lower())
    moves = re.findall(r"(\d+) days (later|earlier)", question)
    assert moves
    for number, direction in moves:
        for _ in range(int(number)):
            day = (day + (1 if direction == "later" else -1)) % 7
    return WEEKDAYS[day]


def solve_ordering(question):
    above = re.findall(r"(\w+) is \w+ than (\w+)\.", question)
    people = {person for pair in above for person in pair}
    # Each fact links neighbours, so the number of people above someone decides the place.
    beats = {person: {b for a, b in above if a == person} for person in people}

    def num_below(person):
        return sum(1 + num_below(other) for other in beats[person])

    ranked = sorted(people, key=num_below, reverse=True)
    if re.search("youngest|shortest|slowest", question):
        ranked.reverse()
    return ranked[1 if "second" in question else 0].lower()


def solve_sequence(question):
    terms = [int(number) for number in re.findall(r"\d+", question)]
    if len(terms) == 5:
        assert all(c == a + b for a, b, c in zip(terms, terms[1:], terms[2:]))
        return terms[-2] + terms[-1]
    differences = [b - a for a, b in itertools.pairwise(terms)]
    changes = {b - a for a, b in itertools.pairwise(differences)}
    assert len(changes) == 1, question
    return terms[-1] + differences[-1] + changes.pop()


SOLVERS = {
    "arithmetic": solve_arithmetic,
    "lookup": solve_lookup,
    "two_hop": solve_two_hop,
    "word_problem": solve_word_problem,
    "reasoning": solve_reasoning,
}


@pytest.mark.parametrize("task_type", TASK_TYPES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right_by_a_second_solver(task_type, split):
    for task in tasks_of(task_type, split):
        assert SOLVERS[task_type](task.question) == task.answer, task


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_answers_are_short(task_type):
    for task in tasks_of(task_type):
        if isinstance(task.answer, int):
            assert 0 <= task.answer <= 999
            assert not task.metadata["choices"]
        else:
            assert re.fullmatch("[a-z]+", task.answer)
            assert task.answer in task.metadata["choices"]


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_thousands_of_distinct_questions(task_type):
    assert len({task.question for task in tasks_of(task_type, num_tasks=6000)}) > 3000


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_splits_share_no_question(task_type):
    train = {task.question for task in tasks_of(task_type, "train", 6000)}
    test = {task.question for task in tasks_of(task_type, "test", 3000)}
    assert len(test) > 1000
    assert not train & test


def test_splits_share_no_fact_under_another_wording():
    train = {task.metadata["gold"] for task in tasks_of("lookup", "train", 6000)}
    test = {task.metadata["gold"] for task in tasks_of("lookup", "test", 3000)}
    assert not train & test


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_difficulty_can_be_read(task_type):
    """Easy, medium and hard take turns, and the numbers of steps rise with them."""
    tasks = tasks_of(task_type, num_tasks=300)
    assert [task.metadata["difficulty"] for task in tasks] == [DIFFICULTIES[i % 3] for i in range(300)]
    if task_type == "arithmetic":
        num_steps = [len(re.findall(r" [-+*] ", task.question)) for task in tasks]
    elif task_type == "word_problem":
        num_steps = [task.question.count(".") - 1 for task in tasks]
    else:
        return
    base = min(num_steps)
    assert num_steps == [base + i % 3 for i in range(300)]


def test_questions_are_short():
    longest = {task_type: max(len(t.question.split()) for t in tasks_of(task_type)) for task_type in TASK_TYPES}
    assert max(longest.values()) <= 40
    assert longest["arithmetic"] <= 10
    assert longest["lookup"] <= 12


def test_tasks_are_pure_and_stay_the_same():
    """A changed digest means that published results are no longer comparable: change it knowingly."""
    text = "\n".join(
        f"{task.id} {task.question} {task.answer}"
        for task_type in TASK_TYPES
        for split in ("train", "test")
        for task in tasks_of(task_type, split, 50)
    )
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST
    make_task.cache_clear()
    assert make_task("train", "reasoning", 5) == task_from_id("train/reasoning/5")


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="split: expected one of train, test, got 'valid'"):
        make_task("valid", "lookup", 0)
    with pytest.raises(ValueError, match="task type: expected one of arithmetic"):
        make_task("train", "poetry", 0)
    with pytest.raises(ValueError, match="got -1"):
        make_task("train", "lookup", -1)
    for task_id in ("lookup/3", "train/lookup/x", "train/lookup/-1", ""):
        with pytest.raises(ValueError, match="split/type/index"):
            task_from_id(task_id)
