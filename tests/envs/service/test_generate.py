"""The generator rejects what is not worth posing: each gate is shown a draft that it must refuse."""

import random
from dataclasses import replace

import pytest
from orchestra_envs import ToolCall
from orchestra_envs.service import generate
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.generate import (
    REJECTIONS,
    RejectedError,
    draft_service_task,
    make_service_task,
    rejections,
    service_task_from_id,
)
from orchestra_envs.service.goals import Domain, Fact

SHOP = DOMAINS["shop"]


def goals_of(kind):
    """A goal maker that gives the real goals that are no refusals."""
    return lambda *world: [goal for goal in SHOP.goals[kind](*world) if goal.outcome != "refuse"]


def reasons(monkeypatch, change, kind="cancel_order", index=0, others=None):
    """Why drafts are rejected whose goals are those of the shop after `change`."""

    def make(*world):
        return [change(goal) for goal in goals_of(kind)(*world)]

    goals = {kind: make, **(others or {})}
    monkeypatch.setitem(generate.DOMAINS, "shop", replace(SHOP, goals=goals, changeable=()))
    found = set()
    for number in range(40):
        try:
            draft_service_task(random.Random(number), "train", "shop", kind, index)
            found.add("accepted")
        except RejectedError as error:
            found.add(str(error))
    return found - {"other_split"}


def test_the_control_is_accepted(monkeypatch):
    assert reasons(monkeypatch, lambda goal: goal) == {"accepted"}


def test_no_such_goal(monkeypatch):
    monkeypatch.setitem(generate.DOMAINS, "shop", replace(SHOP, goals={"cancel_order": lambda *world: []}))
    with pytest.raises(RejectedError, match="empty"):
        draft_service_task(random.Random(0), "train", "shop", "cancel_order", 0)


def test_ambiguous_words(monkeypatch):
    """Two orders, one sentence: nobody could know which is meant."""
    found = reasons(monkeypatch, lambda goal: replace(goal, asks=("Cancel my order.", "Please cancel it.")))
    assert "ambiguous" in found


def test_golden_actions_that_fail(monkeypatch):
    def change(goal):
        return replace(goal, writes=(ToolCall("cancel_order", {"order_id": "O-1", "reason": "found_cheaper"}),))

    assert reasons(monkeypatch, change) == {"golden_fails"}


def test_a_write_that_changes_nothing(monkeypatch):
    assert reasons(monkeypatch, lambda goal: replace(goal, writes=())) == {"no_op"}


def test_a_question_with_nothing_to_tell(monkeypatch):
    assert reasons(monkeypatch, lambda goal: replace(goal, outcome="inform", writes=(), tells=())) == {"no_op"}


def test_the_user_gives_the_answer_away(monkeypatch):
    def change(goal):
        return replace(goal, asks=(f"{goal.asks[0]} I expect {goal.tells[0].value}.", *goal.asks[1:]))

    assert reasons(monkeypatch, change) == {"said_by_user"}


def test_one_sentence_for_two_facts(monkeypatch):
    def change(goal):
        return replace(goal, tells=(*goal.tells, replace(goal.tells[0], question="And how much again?")))

    assert reasons(monkeypatch, change) == {"equal_facts"}


def test_an_argument_that_does_not_matter(monkeypatch):
    """The e-mail address is stored in lower case: its case does not matter, any other letter does."""

    def other_values(domain, world, argument, value):
        return [value.upper()] if argument == "email" else []

    goals = {"change_email": SHOP.goals["change_email"]}
    monkeypatch.setattr(Domain, "other_values", other_values)
    monkeypatch.setitem(generate.DOMAINS, "shop", replace(SHOP, goals=goals, changeable=()))
    found = set()
    for number in range(10):
        with pytest.raises(RejectedError) as error:
            draft_service_task(random.Random(number), "train", "shop", "change_email", 0)
        found.add(str(error.value))
    assert "loose" in found
    assert found <= {"loose", "other_split"}


def test_goals_that_meddle_with_each_other(monkeypatch):
    """Two goals about one order are never in one task; if there is nothing else, there is no task."""

    def returns_of_one(*world):
        goals = goals_of("return_item")(*world)
        return [
            goal for goal in goals if goal.writes[0].arguments["order_id"] == goals[0].writes[0].arguments["order_id"]
        ]

    monkeypatch.setitem(generate.DOMAINS, "shop", replace(SHOP, goals={"return_item": returns_of_one}, changeable=()))
    found = set()
    for number in range(30):
        try:
            draft_service_task(random.Random(number), "train", "shop", "return_item", 1)
        except RejectedError as error:
            found.add(str(error))
    assert "conflict" in found


@pytest.mark.parametrize("domain", DOMAINS)
def test_goals_of_a_task_have_records_of_their_own(domain):
    for kind in DOMAINS[domain].goals:
        for index in range(3, 20, 4):
            task = make_service_task("train", domain, kind, index)
            for number, changed in enumerate(task.changed):
                for other, others in enumerate(task.changed):
                    if other != number:
                        assert not changed & (others | task.goals[other].needs), task.id


def test_rejections_are_counted():
    counts = rejections("train", "clinic", 3)
    assert counts["accepted"] == 3 * len(DOMAINS["clinic"].goals)
    assert set(counts) - {"accepted"} <= set(REJECTIONS)
    assert counts["other_split"] > 0


def test_ids_name_tasks():
    task = service_task_from_id("test/hotel/breakfast/6")
    assert task.id == "test/hotel/breakfast/6"
    assert task.goals[0].kind == "breakfast"
    assert len(task.goals) == 3
    assert task is make_service_task("test", "hotel", "breakfast", 6)


def test_scenarios_show_the_whole_task():
    scenario = make_service_task("train", "shop", "return_item", 2).scenario()
    criteria = scenario["evaluation_criteria"]
    assert criteria["actions"][0]["name"] == "verify_customer"
    assert len(criteria["final_database_sha256"]) == 64
    assert len(scenario["user_scenario"]["requests"]) == 3


def test_facts_are_plain():
    with pytest.raises(AttributeError):
        Fact("number", "1", "?").value = "2"
