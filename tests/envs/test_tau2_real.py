"""The wrapper over the real tau2-bench, where a clone of it is installed (see `orchestra_envs.tau2`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orchestra_envs
import pytest
from orchestra_envs import ToolCall, render_call
from orchestra_envs.tau2 import Tau2Env, library

pytest.importorskip("tau2.gym", reason="needs a clone of tau2-bench")

sys.path.insert(0, str(Path(__file__).parent))
from servers.openai_server import Answer, OpenAIServer


def says(body: dict[str, Any]) -> Answer | str:
    """A user who makes the call that the agent asks for, DO {"name", "arguments"}, and leaves after BYE."""
    last = body["messages"][-1]
    words = last.get("content") or ""
    if words.startswith("DO ") and last["role"] == "user":
        call = json.loads(words[3:])
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        return Answer(None, tool_calls=[{"id": "1", "type": "function", "function": function}])
    return "Thanks. ###STOP###" if "BYE" in words else "Please go on."


@pytest.fixture(scope="module")
def user() -> Iterator[dict[str, Any]]:
    with OpenAIServer(says) as server:
        yield {"model": "user", "base_url": server.base_url, "api_key_env": None}


def golden_turns(task: Any, *, solo: bool) -> list[str]:
    """The golden actions, the user's as requests, then what is to be told."""
    turns = []
    for action in task.evaluation_criteria.actions or []:
        if action.requestor == "user" and not solo:
            turns.append("DO " + json.dumps({"name": action.name, "arguments": action.arguments}))
        else:
            turns.append(render_call(ToolCall(action.name, action.arguments)))
    return [*turns, "BYE " + ", ".join(task.evaluation_criteria.communicate_info or [])]


def outcomes(env: Tau2Env, *, golden: bool, solo: bool = False) -> dict[str, float]:
    """The outcome of every task after its golden actions, or after nothing."""
    found = {}
    for task_id, task in env._tasks.items():
        _, info = env.reset(seed=0, options={"task_id": task_id})
        for turn in golden_turns(task, solo=solo) if golden else ["BYE"]:
            *_, info = env.step(turn)
        assert info["end_reason"] == ("answered" if solo else "user_ended"), task_id
        found[task_id] = info["outcome"]
    return found


def test_golden_actions_of_mock(user: dict[str, Any]) -> None:
    found = outcomes(Tau2Env(domain="mock", user=user), golden=True)
    # One lists no golden actions, one asks for a final database that its own assertion excludes.
    failed = {"update_task_with_history_and_env_assertions", "update_task_with_user_tools"}
    assert {task_id for task_id, outcome in found.items() if outcome == 0.0} == failed
    assert set(found.values()) == {0.0, 1.0}


def test_doing_nothing_in_mock(user: dict[str, Any]) -> None:
    found = outcomes(Tau2Env(domain="mock", user=user), golden=False)
    assert {task_id for task_id, outcome in found.items() if outcome} == {"create_task_1_nl_eval"}


@pytest.mark.slow
@pytest.mark.parametrize("solo", [False, True])
def test_telecom(user: dict[str, Any], solo: bool) -> None:
    try:
        env = Tau2Env(domain="telecom", tasks="telecom_small", user=user, solo=solo)
    except ValueError as error:
        pytest.skip(str(error))  # a clone without its large files
    assert set(outcomes(env, golden=True, solo=solo).values()) == {1.0}
    assert set(outcomes(env, golden=False, solo=solo).values()) == {0.0}


@pytest.mark.slow
def test_retail(user: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="assertions in natural language"):
        Tau2Env(domain="retail", user=user)
    env = Tau2Env(domain="retail", user=user, tasks=[str(number) for number in range(6)], nl_judge="ignore")
    assert set(outcomes(env, golden=True).values()) == {1.0}
    assert set(outcomes(env, golden=False).values()) == {0.0}


@pytest.mark.slow
def test_banking_with_local_retrieval(user: dict[str, Any]) -> None:
    pytest.importorskip("rank_bm25")
    tasks = list(library.load_tasks("banking_knowledge", None, None))[:4]
    env = Tau2Env(domain="banking_knowledge", tasks=tasks, user=user, retrieval="bm25_grep")
    assert set(outcomes(env, golden=True).values()) == {1.0}
    assert set(outcomes(env, golden=False).values()) == {0.0}


def test_retail_has_no_solo_mode() -> None:
    with pytest.raises(ValueError, match="none of the tasks has a ticket"):
        Tau2Env(domain="retail", solo=True, nl_judge="ignore")


def test_a_conversation_that_the_task_brings_along(user: dict[str, Any]) -> None:
    env = Tau2Env(domain="mock", user=user)
    observation, _ = env.reset(seed=0, options={"task_id": "update_task_with_history_and_env_assertions"})
    assert "Agent called create_task(" in observation
    env.step(render_call(ToolCall("update_task_status", {"task_id": "task_2", "status": "completed"})))
    assert env.step("BYE")[4]["outcome"] == 1.0


def test_the_prompts_are_those_of_tau2_bench(user: dict[str, Any]) -> None:
    env = Tau2Env(domain="mock", user=user)
    _, info = env.reset(seed=0, options={"task_id": "create_task_1"})
    environment = library.make_environment(library.World("mock"), None)
    assert environment.get_policy().strip() in info["instructions"]
    shown = [spec["function"] for spec in json.loads(info["tools_json"])]
    assert shown == [tool.openai_schema["function"] for tool in environment.get_tools()]


def test_the_contract_of_environments(user: dict[str, Any]) -> None:
    expert = {**user, "model": "big", "price": {"per_call_usd": 0.01}, "clock": "declared"}
    problems = orchestra_envs.check("orchestra/Tau2-v0", domain="mock", user=user, experts=[expert])
    assert [problem for problem in problems if "ud800" not in problem] == []
