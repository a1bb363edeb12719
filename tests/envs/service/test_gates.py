"""The generator's gates, on tasks of every domain: who plays by the rules scores 1, all who cheat or guess score 0.

The quick run takes four tasks of each kind (one of each number of goals), the slow one 44 of each: over 300 a domain.
"""

import json
import random
import re

import numpy as np
import pytest
from orchestra_envs import ToolCall, render_call
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.env import ServiceEnv
from orchestra_envs.service.generate import service_task_from_id, solution
from orchestra_envs.tools import canonical_json

QUICK, MANY = 4, 44
SIZES = [pytest.param(QUICK, id="quick"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]


def task_ids(domain, per_kind):
    return [
        f"{split}/{domain}/{kind}/{index}"
        for kind in DOMAINS[domain].goals
        for split, start, end in (("train", 0, per_kind * 3 // 4), ("test", per_kind * 3 // 4, per_kind))
        for index in range(start, end)
    ]


def play(env, task_id, turns, seed=0):
    """The outcome of saying these turns (a list, or a function of the last observation), 0 if the user never ends."""
    observation, info = env.reset(seed=seed, options={"task_id": task_id})
    next_turn = turns if callable(turns) else iter([*turns, *["I have nothing to add."] * 99]).__next__
    while True:
        action = next_turn(observation) if callable(turns) else next_turn()
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            return info["outcome"]


def verification(task):
    return render_call(task.person.verification)


def reports(task, rng):
    return [" ".join(goal.reports[int(rng.integers(len(goal.reports)))] for goal in task.goals)]


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("per_kind", SIZES)
def test_golden_actions_solve_every_task(domain, per_kind):
    env = ServiceEnv()
    for number, task_id in enumerate(task_ids(domain, per_kind)):
        env.reset(seed=number, options={"task_id": task_id, "replica": number})
        turns = env.demonstrate(env.task, np.random.default_rng(number))
        for turn in turns[:-1]:
            _, _, terminated, truncated, info = env.step(turn)
            assert not terminated, (task_id, turn)
            assert not truncated, (task_id, turn)
        _, _, terminated, _, info = env.step(turns[-1])
        assert terminated, task_id
        assert (info["outcome"], info["end_reason"]) == (1.0, "user_ended"), (task_id, env.judgement())
        assert env.task.metadata["world"].digest() == env.task.metadata["service_task"].golden.digest()


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("per_kind", SIZES)
def test_doing_nothing_scores_nothing(domain, per_kind):
    env = ServiceEnv(max_turns=5)
    phrases = [
        "Goodbye.",
        "Everything has been done successfully. Is there anything else?",
        "I am sorry, I cannot do that, it is against our rules.",
        "###STOP###",
        "42",
    ]
    for task_id in task_ids(domain, per_kind):
        for phrase in phrases:
            assert play(env, task_id, [phrase] * 5) == 0.0, (task_id, phrase)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("per_kind", SIZES)
def test_telling_without_doing_and_doing_without_telling_score_nothing(domain, per_kind):
    """The right words alone, the right writes alone, and right words with verification but without a look."""
    rng = np.random.default_rng(0)
    env = ServiceEnv(max_turns=40)
    for task_id in task_ids(domain, per_kind):
        task = service_task_from_id(task_id)
        words = reports(task, rng)
        assert play(env, task_id, words * 8) == 0.0, task_id
        assert play(env, task_id, [verification(task), *words * 8]) == 0.0, task_id
        if task.facts:
            actions = [render_call(call) for call in task.actions]
            assert play(env, task_id, [*actions, *["It has been done."] * 8]) == 0.0, task_id


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("per_kind", SIZES)
@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_telling_everything_scores_nothing(domain, per_kind, chunk):
    """Reading out all records that the tools show, one, two or all in a message, with a refusal in each.

    One record at a time is by chance the right answer to a request that must be refused, when its record comes first.
    """
    outcomes = []
    env = ServiceEnv(max_turns=200)
    for task_id in task_ids(domain, per_kind):
        task = service_task_from_id(task_id)
        env.reset(seed=0, options={"task_id": task_id})
        looks = look_at_everything(task)
        records = []
        outcome = 0.0
        for turn in looks:
            _, _, terminated, _, info = env.step(turn)
            for record in json.loads(info["calls_json"]):
                if record["status"] == "ok":
                    result = json.loads(record["text"]) if record["text"][0] in "[{" else []
                    records += result if isinstance(result, list) else [result]
        texts = [spoken(record) for record in records]
        for start in range(0, len(texts), chunk):
            message = " ".join(texts[start : start + chunk])
            _, _, terminated, truncated, info = env.step(f"I am sorry, I cannot do it. {message}.")
            if terminated or truncated:
                outcome = info["outcome"]
                break
        outcomes.append(outcome)
    assert sum(outcomes) <= (0.04 * len(outcomes) + 1 if chunk < 1000 else 0)


def look_at_everything(task):
    person, me = task.person, {"customer_id", "patient_id", "guest_id", "card_number"}
    turns = [verification(task)]
    for tool in DOMAINS[task.domain].tools:
        required = tool.parameters.get("required", [])
        if tool.name.startswith(("list_", "get_")) and set(required) <= me:
            turns.append(render_call(ToolCall(tool.name, dict.fromkeys(required, person.id))))
        if tool.name.startswith("find_"):
            turns += [render_call(ToolCall(tool.name, {"words": word})) for word in ("e", "a", "o")]
    return turns


def spoken(record):
    """A record in words, its ids included, as a policy that reads it out would say it."""
    return ", ".join(f"{key} {value}" for key, value in record.items() if isinstance(value, str | int | float))


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("per_kind", SIZES)
def test_doing_all_writes_scores_nothing(domain, per_kind):
    """A policy that changes all it can, and tells the right facts."""
    env = ServiceEnv(max_turns=200)
    rng = np.random.default_rng(0)
    for task_id in task_ids(domain, per_kind):
        task = service_task_from_id(task_id)
        makers = DOMAINS[domain].goals.values()
        goals = [goal for make in makers for goal in make(task.start, task.person, random.Random(0))]
        writes = [render_call(call) for goal in (*task.goals, *goals) for call in goal.writes]
        turns = [verification(task), "\n".join(writes[:120]), *reports(task, rng) * 8]
        assert play(env, task_id, turns) == 0.0, task_id


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("per_kind", SIZES)
def test_a_random_policy_scores_nothing(domain, per_kind):
    """Random tools with values that it has seen, and random messages."""
    env = ServiceEnv(max_turns=15)
    ids = task_ids(domain, per_kind)
    outcomes = []
    for number, task_id in enumerate(ids):
        rng = np.random.default_rng(number)
        seen = ["2026-06-01", "saver"]

        def act(observation, rng=rng, seen=seen):
            seen += re.findall(r"[A-Z]{1,2}-\d+|\d{4}-\d\d-\d\d|\d+\.\d+|\S+@\S+\w|\b\d{5}\b", observation)
            if rng.random() < 0.4:
                phrases = ("It has been done: {}.", "I cannot do that. {}", "Is it {}?", "Your e-mail and {}?", "{}")
                return str(rng.choice(phrases)).format(rng.choice(seen))
            tool = DOMAINS[domain].tools[int(rng.integers(12))]
            arguments = {}
            for name, schema in tool.parameters["properties"].items():
                value = str(rng.choice(schema.get("enum", seen)))
                number = re.fullmatch(r"\d+(\.\d+)?", value)
                arguments[name] = float(value) if schema.get("type") == "number" and number else value
            return render_call(ToolCall(tool.name, arguments))

        outcomes.append(play(env, task_id, act))
    assert np.mean(outcomes) <= 0.01


@pytest.mark.parametrize("domain", DOMAINS)
def test_order_of_independent_changes_does_not_matter(domain):
    env = ServiceEnv(max_turns=60)
    for task_id in task_ids(domain, QUICK):
        task = service_task_from_id(task_id)
        calls = [call for goal in reversed(task.goals) for call in (*goal.reads, *goal.writes)]
        turns = [verification(task)] if task.golden.verified else []
        turns += [render_call(call) for call in calls]
        turns += [" ".join(goal.reports[0] for goal in reversed(task.goals))] * 9
        if not task.first_wishes:
            assert play(env, task_id, turns) == 1.0, task_id


@pytest.mark.parametrize("domain", DOMAINS)
def test_golden_arguments_are_the_only_ones(domain):
    """Any golden change with another amount, day or id ends elsewhere, or is refused: outcome 0."""
    env = ServiceEnv(max_turns=60)
    rng = np.random.default_rng(1)
    for task_id in task_ids(domain, QUICK):
        task = service_task_from_id(task_id)
        writes = [(position, call) for position, call in enumerate(task.actions) if call in writes_of(task)]
        if not writes:
            continue
        position, call = writes[int(rng.integers(len(writes)))]
        name = str(rng.choice(list(call.arguments)))
        value = call.arguments[name]
        changed = value + 1 if isinstance(value, int | float) else value[:-1] + ("1" if value[-1] != "1" else "2")
        actions = list(task.actions)
        actions[position] = ToolCall(call.name, call.arguments | {name: changed})
        turns = [*(render_call(action) for action in actions), *reports(task, rng) * 9]
        assert play(env, task_id, turns) == 0.0, (task_id, call, changed)


def writes_of(task):
    return [call for goal in task.goals for call in goal.writes]


@pytest.mark.parametrize("domain", DOMAINS)
def test_kinds_of_tasks(domain):
    """Changes, refusals and look-ups; one to four goals; vague users, users who change their mind, goals in stages."""
    tasks = [service_task_from_id(task_id) for task_id in task_ids(domain, 12)]
    outcomes = [goal.outcome for task in tasks for goal in task.goals]
    shares = {outcome: outcomes.count(outcome) / len(outcomes) for outcome in ("write", "refuse", "inform")}
    assert shares["write"] > 0.35, shares
    assert shares["refuse"] > 0.08, shares
    assert shares["inform"] > 0.1, shares
    assert {len(task.goals) for task in tasks} == {1, 2, 3, 4}
    assert sum(bool(task.first_wishes) for task in tasks) > len(tasks) * 0.08
    assert sum(bool(task.vague) for task in tasks) > len(tasks) * 0.15
    assert sum(len(task.stages) > 1 for task in tasks) > len(tasks) * 0.2
    assert len({task.opening for task in tasks}) > 0.95 * len(tasks)
    assert len({solution(task.goals) for task in tasks}) == len(tasks)
    assert all(fact.question for task in tasks for fact in task.facts)
    canonical_json([task.scenario() for task in tasks])
