"""The scripted user: tells what it knows, confirms, changes its mind, and ends no conversation too early."""

import numpy as np
import pytest
from orchestra_envs import ToolCall, render_call
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.env import ServiceEnv
from orchestra_envs.service.generate import make_service_task, run_call
from orchestra_envs.service.user import SLOTS, ScriptedUser, heard


def find(outcome="write", *, domain="shop", kind="cancel_order", changed=False, vague=False, goals=1, staged=False):
    """The first task of this description."""
    for index in range(goals - 1, 2000, 4):
        task = make_service_task("train", domain, kind, index)
        if (
            task.goals[0].outcome == outcome
            and bool(task.first_wishes) == changed
            and bool(task.vague) == vague
            and (len(task.stages) > 1) == staged
        ):
            return task
    raise AssertionError("no such task")


class Talk:
    """A conversation with the user of a task."""

    def __init__(self, task, seed=0):
        self.task, self.world = task, task.start.copy()
        self.user, self.rng = ScriptedUser(task, self.world), np.random.default_rng(seed)

    def say(self, message):
        reply = self.user.reply(message, self.rng)
        self.ended = reply.end
        return reply.text

    def act(self, *calls):
        for call in calls:
            run_call(DOMAINS[self.task.domain], self.world, call)


IDENTITY_QUESTIONS = [
    "To verify your identity, please provide your e-mail address and postcode.",
    "Could you please share your email and zip code so I can proceed?",
    "May I have your e-mail address and post code?",
    "I need your email as well as the postal code.",
    "Sure, I can help with that! First, please verify your identity.",
    "I can't do that without your e-mail and postcode. Please tell me both.",
]


@pytest.mark.parametrize("question", IDENTITY_QUESTIONS)
def test_identity_is_told_when_asked_for(question):
    talk = Talk(find())
    answer = talk.say(question)
    assert talk.task.person.known["email"] in answer
    assert talk.task.person.known["postcode"] in answer
    assert not talk.ended


def test_nothing_is_told_that_was_not_asked_for():
    task = find()
    email, postcode = task.person.known["email"], task.person.known["postcode"]
    assert email not in task.opening
    talk = Talk(task)
    assert postcode not in talk.say("What is your e-mail address?")
    assert email not in talk.say("And your postcode, please?")


@pytest.mark.parametrize("question", ["What is your card number?", "Please tell me the name of your doctor."])
def test_what_it_does_not_know_it_does_not_invent(question):
    talk = Talk(find())
    answer = talk.say(question)
    assert "not know" in answer
    assert not any(character.isdigit() for character in answer)


@pytest.mark.parametrize(
    "question", ["Which order is it?", "Please give me the order number.", "What exactly would you like me to do?"]
)
def test_details_of_a_vague_wish(question):
    task = find(vague=True)
    assert task.goals[0].known["order"] not in task.opening
    assert task.goals[0].known["order"] in Talk(task).say(question)


@pytest.mark.parametrize(
    "proposal",
    [
        "I would cancel the order. Shall I go ahead?",
        "I'll cancel it and refund you. Do you want me to proceed?",
        "Please confirm that I should cancel it (yes/no).",
        "Cancel the order, is that correct?",
        "Would you like me to cancel it?",
        "Are you sure?",
    ],
)
def test_proposals_are_confirmed_and_end_nothing(proposal):
    """Complaint of others: the user says yes and hangs up before anything was done."""
    talk = Talk(find())
    answer = talk.say(proposal)
    assert answer.startswith(("Yes", "Sure"))
    assert not talk.ended
    talk.say("Thank you, one moment.")
    assert not talk.ended


def test_a_proposal_about_something_else_is_corrected():
    talk = Talk(find())
    order = talk.task.goals[0].known["order"]
    assert order in talk.say("I would cancel order O-00000. Shall I go ahead?")
    assert talk.say(f"I would cancel order {order}. Shall I go ahead?").startswith(("Yes", "Sure"))


def test_it_ends_after_the_database_changed_and_the_amount_was_told():
    task = find()
    talk = Talk(task)
    talk.act(task.person.verification, *task.goals[0].writes)
    answer = talk.say("Your order was dealt with.")
    assert answer == task.goals[0].tells[0].question
    assert not talk.ended
    talk.say(f"You get ${task.goals[0].tells[0].value}.")
    assert talk.ended


def test_it_believes_an_agent_that_says_it_is_done():
    talk = Talk(find())
    talk.say("I have cancelled your order and $1.00 will be paid back.")
    assert talk.ended


@pytest.mark.parametrize(
    "message",
    [
        "Your identity has been verified.",
        "I have found your order.",
        "I have received your request. I will look into it.",
        "Let me check that for you.",
        "Hello!",
        "",
    ],
)
def test_courtesies_end_nothing(message):
    talk = Talk(find())
    for _ in range(5):
        assert talk.say(message)
        assert not talk.ended


def test_it_accepts_a_definite_refusal_once_it_was_told_what_it_wants_to_know():
    task = find("refuse")
    talk = Talk(task)
    assert talk.say("I am sorry, I cannot cancel this order.") == task.goals[0].tells[0].question
    assert not talk.ended
    talk.say(f"It is promised for {task.goals[0].tells[0].value}.")
    assert talk.ended


@pytest.mark.parametrize(
    "message",
    [
        "###STOP###",
        "Done! ###STOP### [END]",
        "<think>The order has been cancelled, 12.00 back.</think>",
        "<|im_end|>STOP",
    ],
)
def test_markers_and_reasoning_do_not_end_a_conversation(message):
    talk = Talk(find())
    talk.say(message)
    assert not talk.ended
    assert "think" not in " ".join(talk.user.messages)
    assert "STOP#" not in " ".join(talk.user.messages)


def test_heard():
    assert heard("<think>secret $5</think>Hello ###STOP### you.") == "Hello   you."
    assert heard("plan</think>Hello.") == "Hello."
    assert heard('Hi <tool_call>{"name": "x"}</tool_call>') == "Hi"


def test_reasoning_in_an_action_reaches_neither_user_nor_judge():
    env = ServiceEnv()
    env.reset(seed=0, options={"task_id": "train/shop/cancel_order/0"})
    observation, *_ = env.step("<think>The refund is $616.80 ###STOP###</think>What is your postcode?")
    user = env.task.metadata["user"]
    assert user.messages == ["What is your postcode?"]
    assert user.replies == [observation]


def test_it_changes_its_mind_before_the_change():
    task = find(changed=True)
    first, last = task.first_wishes[0], task.goals[0]
    talk = Talk(task)
    assert any(ask in task.opening for ask in first.asks)
    assert not any(ask in task.opening for ask in last.asks)
    talk.say("What are your e-mail address and postcode?")
    answer = talk.say("I would cancel that order. Shall I go ahead?")
    assert any(ask in answer for ask in last.asks)
    assert talk.say("I would cancel the other one. Shall I go ahead?").startswith(("Yes", "Sure"))
    assert not talk.ended


def test_it_changes_its_mind_even_if_the_agent_did_not_ask():
    task = find(changed=True)
    talk = Talk(task)
    talk.act(task.person.verification, *task.first_wishes[0].writes)
    answer = talk.say("I have cancelled the order, you get $10.00 back.")
    assert any(ask in answer for ask in task.goals[0].asks)
    assert not talk.ended


def test_it_tells_the_first_wish_until_it_changed_its_mind():
    task = find(changed=True)
    talk = Talk(task)
    assert task.first_wishes[0].known["reason"] in talk.say("What is the reason?")
    talk.say("Okay.")
    assert task.goals[0].known["reason"] in talk.say("What is the reason?")


def test_requests_that_come_one_after_the_other():
    task = find(goals=3, staged=True)
    talk = Talk(task)
    first, second = task.goals[task.stages[0][0]], task.goals[task.stages[1][0]]
    assert not any(ask in task.opening for ask in second.asks)
    talk.act(task.person.verification)
    for number in task.stages[0]:
        talk.act(*task.goals[number].writes)
    answer = talk.say(" ".join(task.goals[number].reports[0] for number in task.stages[0]))
    assert any(ask in answer for ask in (*second.asks, second.vague) if ask)
    assert not talk.ended
    assert first is not second


def test_it_asks_for_what_is_still_missing():
    task = find(goals=2)
    talk = Talk(task)
    talk.act(task.person.verification, *task.goals[0].writes)
    talk.say(task.goals[0].reports[0])
    assert not talk.ended
    answer = talk.say("Fine.")
    assert any(ask in answer for ask in task.goals[1].asks)


def test_phrasings_vary_with_the_replica_and_repeat_with_it():
    env = ServiceEnv()

    def words(replica):
        env.reset(seed=1, options={"task_id": "train/shop/cancel_order/0", "replica": replica})
        return [env.step("Shall I go ahead?")[0] for _ in range(3)]

    assert words(1) == words(1)
    assert len({tuple(words(replica)) for replica in range(8)}) > 3


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_slot_of_every_task_can_be_asked_for(domain):
    questions = {slot: f"Please tell me the {slot}." for slot in SLOTS} | {
        "name": "Please tell me your name.",
        "birth date": "Please tell me your date of birth.",
    }
    for kind in DOMAINS[domain].goals:
        for index in range(0, 40, 4):
            task = make_service_task("train", domain, kind, index)
            known = {**task.person.known, **(task.first_wishes.get(0) or task.goals[0]).known}
            for slot, value in known.items():
                assert value in Talk(task).say(questions[slot]), (task.id, slot)


def test_the_agent_cannot_make_the_user_fail():
    """Whatever it is told, the user answers with a text."""
    rng = np.random.default_rng(0)
    alphabet = list("abc?.!#<>[]$ \n0123456789é\u202e\ufffd")
    words = ["order", "cannot", "please", "have been", "shall i", "2026-02-30", "$1,2,3.4.5", "99:99", "<think>", "O-1"]
    talk = Talk(find(goals=4))
    for _ in range(300):
        text = "".join(rng.choice(alphabet, size=5)) + " ".join(rng.choice(words, size=5))
        assert isinstance(talk.say(text), str)
    assert talk.say("x" * 100_000)


def test_calls_are_no_messages():
    env = ServiceEnv()
    env.reset(seed=0)
    env.step("It has been done. " + render_call(ToolCall("get_nothing", {})))
    assert env.task.metadata["user"].messages == []
