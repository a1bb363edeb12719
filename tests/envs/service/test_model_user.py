"""A user played by a language model: a real local endpoint, told what to say."""

import sys
from pathlib import Path

from orchestra_envs import render_call
from orchestra_envs.service.env import ServiceEnv
from orchestra_envs.service.generate import make_service_task
from orchestra_envs.service.model_user import END_MARKER

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers.openai_server import Answer, OpenAIServer

TASK = "train/shop/cancel_order/0"


def env_with(server, **kwargs):
    return ServiceEnv(user={"model": "customer", "base_url": server.base_url, "api_key_env": None}, **kwargs)


def test_the_model_speaks_for_the_user():
    with OpenAIServer(["My postcode is 12345.", "Yes, please."]) as server:
        env = env_with(server)
        observation, _ = env.reset(seed=0, options={"task_id": TASK})
        assert observation == make_service_task("train", "shop", "cancel_order", 0).opening
        answer, reward, terminated, truncated, info = env.step("<think>secret</think>Your postcode, please? ###STOP###")
        assert answer == "My postcode is 12345."
        assert (terminated, truncated, info["drop"]) == (False, False, False)
        answer, *_ = env.step("Shall I go ahead?")
        assert answer == "Yes, please."
    first, second = (request["messages"] for request in server.requests)
    person = env.task.metadata["service_task"].person
    assert first[0]["role"] == "system"
    assert all(value in first[0]["content"] for value in person.known.values())
    assert first[1:] == [
        {"role": "assistant", "content": observation},
        {"role": "user", "content": "Your postcode, please?"},
    ]
    assert second[3:] == [
        {"role": "assistant", "content": "My postcode is 12345."},
        {"role": "user", "content": "Shall I go ahead?"},
    ]
    assert reward == 0.0


def test_what_the_user_costs_is_not_charged():
    with OpenAIServer([Answer("Fine.", usage={"prompt_tokens": 10**6, "completion_tokens": 10**6})]) as server:
        env = env_with(server, budget_usd=0.01)
        env.reset(seed=0, options={"task_id": TASK})
        *_, info = env.step("Hello.")
        assert info["cost_usd"] == info["episode_cost_usd"] == 0.0


def test_the_model_cannot_end_the_conversation_too_early():
    with OpenAIServer([f"Thanks, bye! {END_MARKER}"]) as server:
        env = env_with(server)
        env.reset(seed=0, options={"task_id": TASK})
        task = env.task.metadata["service_task"]
        answer, _, terminated, *_ = env.step("Shall I go ahead?")
        assert (answer, terminated) == ("Thanks, bye!", False)
        for call in task.actions:
            env.step(render_call(call))
        answer, _, terminated, _, info = env.step(task.goals[0].reports[0])
        assert (answer, terminated, info["end_reason"], info["outcome"]) == ("Thanks, bye!", True, "user_ended", 1.0)


def test_the_model_cannot_go_on_for_ever():
    with OpenAIServer(["And the weather?"]) as server:
        env = env_with(server)
        env.reset(seed=0, options={"task_id": TASK})
        task = env.task.metadata["service_task"]
        for call in task.actions:
            env.step(render_call(call))
        *_, terminated, _, _ = env.step(task.goals[0].reports[0])
        assert not terminated
        *_, terminated, _, info = env.step("Sunny.")
        assert terminated
        assert info["outcome"] == 1.0


def test_a_short_fault_is_mended():
    with OpenAIServer([Answer(status=503), Answer("Hello.")]) as server:
        env = env_with(server)
        env.reset(seed=0, options={"task_id": TASK})
        assert env.step("Hello.")[0] == "Hello."
    assert len(server.requests) == 2


def test_an_endpoint_that_fails_drops_the_episode():
    with OpenAIServer([Answer("no such model", status=404)]) as server:
        env = env_with(server)
        env.reset(seed=0, options={"task_id": TASK})
        *_, terminated, truncated, info = env.step("Hello.")
    assert (terminated, truncated, info["drop"], info["end_reason"]) == (False, True, True, "infra_error")


def test_a_change_of_mind_is_part_of_the_role():
    tasks = (make_service_task("train", "shop", "return_item", index) for index in range(0, 400, 4))
    task = next(task for task in tasks if task.first_wishes)
    with OpenAIServer(["Yes."]) as server:
        env = env_with(server)
        env.reset(seed=0, options={"task_id": task.id})
        env.step("Shall I go ahead?")
    role = server.requests[0]["messages"][0]["content"]
    assert task.first_wishes[0].asks[0] in role
    assert task.goals[0].asks[0] in role
