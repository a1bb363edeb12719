"""The wrapper over tau2-bench, with a stand-in for the package and a real endpoint on the loopback interface."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orchestra_envs
import pytest
from orchestra_envs import ToolCall, render_call
from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.tau2 import Tau2Env, library
from orchestra_envs.tau2.speaker import read_speaker

sys.path.insert(0, str(Path(__file__).parent))
from servers.openai_server import Answer, OpenAIServer

FAKE = Path(__file__).parent / "fake_tau2"
FAST = {"max_attempts": 2, "base_delay_s": 0.01}
LEND = render_call(ToolCall("lend_book", {"book_id": "b1", "reader": "ann"}))
LEND_TO_BOB = render_call(ToolCall("lend_book", {"book_id": "b2", "reader": "bob"}))


def forget_tau2() -> dict[str, Any]:
    """Takes tau2 out of the loaded modules; returns them."""
    library.load.cache_clear()
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tau2"}


@pytest.fixture(autouse=True)
def tau2_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in is what `import tau2` finds, even where the real one is installed."""
    loaded = forget_tau2()
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    monkeypatch.syspath_prepend(str(FAKE))
    yield FAKE
    forget_tau2()
    sys.modules.update(loaded)


def says(body: dict[str, Any]) -> Answer | str:
    """A user who does what the agent's last words tell: DO {"name", "arguments"}; SAY words; BYE."""
    last = body["messages"][-1]
    words = last.get("content") or ""
    if last["role"] == "tool":
        return f"Result: {words}"
    if words.startswith("DO "):
        return calls(**json.loads(words[3:]))
    if words.startswith("SAY "):
        return words[4:]
    return "Thank you. ###STOP###" if "BYE" in words else "Hello, I need a book."


def calls(name: str, arguments: dict[str, Any] | str, text: str | None = None) -> Answer:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": written}
    return Answer(text, tool_calls=[{"id": "call_1", "type": "function", "function": function}])


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(says) as running:
        yield running


def endpoint(server: OpenAIServer, model: str = "user", **fields: Any) -> dict[str, Any]:
    return {"model": model, "base_url": server.base_url, "api_key_env": None, "retry": FAST, **fields}


def make(server: OpenAIServer, task_id: str = "", **kwargs: Any) -> tuple[Tau2Env, str, dict[str, Any]]:
    """An environment in its first episode."""
    env = Tau2Env(domain="desk", **{"user": endpoint(server), **kwargs})
    observation, info = env.reset(seed=1, options={"task_id": task_id} if task_id else {})
    return env, observation, info


def play(env: Tau2Env, *turns: str) -> tuple[list[str], dict[str, Any]]:
    """The observations after the turns, and the last info. No turn may come after the end."""
    observations = []
    for turn in turns:
        observation, _, terminated, truncated, info = env.step(turn)
        observations.append(observation)
        info = {**info, "terminated": terminated, "truncated": truncated}
    return observations, info


# The package.


class _Absent:
    """Makes the import system find no tau2."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "tau2":
            raise ModuleNotFoundError("No module named 'tau2'", name="tau2")


def test_the_error_without_tau2_says_what_to_install_and_what_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_Absent(), *sys.meta_path])
    with pytest.raises(ImportError) as caught:
        orchestra_envs.make("orchestra/Tau2-v0", user={"model": "m"})
    message = str(caught.value)
    for part in ("not on the package index", "git clone", "Python 3.12", "TAU2_DATA_DIR"):
        assert part in message
    assert "\n" not in message


def test_the_package_of_the_index_is_told_from_tau2_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("RATES = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"another package of that name.*magnetic.*git clone"):
        Tau2Env(user={"model": "m"})


def test_a_missing_dependency_of_tau2_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("")
    (tmp_path / "tau2" / "registry.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"importing tau2\.registry failed: No module named 'no_such_dependency'"):
        Tau2Env(user={"model": "m"})


def test_a_missing_data_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAU2_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere.*TAU2_DATA_DIR.*before Python starts"):
        Tau2Env(user={"model": "m"})


def test_the_older_one_of_toolorchestra_has_no_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    class _WithoutGym:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "tau2.gym":
                raise ModuleNotFoundError("No module named 'tau2.gym'", name="tau2.gym")

    monkeypatch.setattr(sys, "meta_path", [_WithoutGym(), *sys.meta_path])
    assert library.load().registry.get_domains() == ["desk", "branch"]


def test_nothing_is_imported_before_an_environment_is_made() -> None:
    importlib.reload(library)
    assert "tau2" not in sys.modules


# A whole episode.


def test_golden_actions_score_one(server: OpenAIServer) -> None:
    env, observation, info = make(server, "lend")
    assert observation == "Hello, I need a book."
    assert "Lend no book to a reader with a locked card." in info["instructions"]
    names = [spec["function"]["name"] for spec in json.loads(info["tools_json"])]
    assert names == ["find_book", "lend_book", "list_shelves", "transfer_to_human_agents"]
    observations, info = play(env, render_call(ToolCall("find_book", {"title": "Emma"})), LEND, "Lent. BYE")
    assert json.loads(observations[0]) == {"book_id": "b1", "title": "Emma", "holder": None}
    assert observations[2] == "Thank you."
    assert (info["outcome"], info["end_reason"], info["terminated"], info["drop"]) == (1.0, "user_ended", True, False)
    assert (info["episode_cost_usd"], info["episode_latency_s"]) == (0.0, 0.0)


@pytest.mark.parametrize("task_id", ["lend", "unlock", "told", "asserted"])
def test_doing_nothing_scores_zero_and_is_no_fault(server: OpenAIServer, task_id: str) -> None:
    env, _, _ = make(server, task_id)
    _, info = play(env, "BYE")
    assert (info["outcome"], info["end_reason"], info["drop"]) == (0.0, "user_ended", False)


def test_the_wrong_change_scores_zero(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    _, info = play(env, LEND, LEND_TO_BOB, "BYE")
    assert info["outcome"] == 0.0


def test_episodes_do_not_see_each_other(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    other, _, _ = make(server, "lend")
    play(other, LEND)
    play(env, LEND_TO_BOB)
    env.reset(seed=1, options={"task_id": "lend"})
    assert '"holder": null' in play(env, render_call(ToolCall("find_book", {"title": "Dracula"})))[0][0]
    assert '"holder": "ann"' in play(other, render_call(ToolCall("find_book", {"title": "Emma"})))[0][0]


def test_an_error_of_a_tool_is_an_observation(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    observations, info = play(env, render_call(ToolCall("find_book", {"title": "Ulysses"})))
    assert observations == ["Error: find_book: There is no book Ulysses"]
    assert info["num_errors"] == 1
    assert not info["truncated"]


@pytest.mark.parametrize("task_id", ["lend", "unlock"])
def test_demonstrations_name_the_golden_actions(server: OpenAIServer, task_id: str) -> None:
    env, _, _ = make(server, task_id)
    turns = env.demonstrate(env.task, env.episode_rng)
    assert "lend_book" in turns[-2]
    assert turns[-1] == "That is done."
    if task_id == "unlock":
        assert turns[0] == "Please do this on your side: unlock_card(reader=bob)"


# The user.


def test_the_users_tools_change_the_world_and_stay_their_own(server: OpenAIServer) -> None:
    env, _, _ = make(server, "unlock")
    request = server.requests[0]
    assert [tool["function"]["name"] for tool in request["tools"]] == ["look_at_card", "unlock_card"]
    assert "You are Bob" in request["messages"][0]["content"]
    assert request["messages"][1] == {"role": "user", "content": "Hi! How can I help you today?"}
    do = 'DO {"name": "unlock_card", "arguments": {"reader": "bob"}}'
    observations, info = play(env, LEND_TO_BOB, do, LEND_TO_BOB, "BYE")
    assert observations[:2] == ["Error: lend_book: The card is locked", "Result: The card is open now"]
    assert info["outcome"] == 1.0
    seen = server.requests[-1]["messages"]
    assert not any("holder" in str(message.get("content")) for message in seen)  # the agent's calls are not shown
    assert [message["role"] for message in seen[-6:]] == ["assistant", "user", "assistant", "tool", "assistant", "user"]


def test_a_task_may_leave_the_user_without_tools(server: OpenAIServer) -> None:
    env, _, _ = make(server, "told")
    play(env, "SAY hm")
    assert "tools" not in server.requests[-1]


def test_reasoning_and_markers_of_the_policy_do_not_reach_the_user(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    turn = "<think>secret plan ###STOP###</think>One moment ###STOP### please.###TRANSFER### ###OUT-OF-SCOPE###"
    observations, info = play(env, turn)
    assert observations == ["Hello, I need a book."]
    assert not info["terminated"]
    assert server.requests[-1]["messages"][-1]["content"] == "One moment please."
    assert "secret" not in json.dumps(server.requests)


def test_a_turn_of_markers_alone_is_not_sent(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    num_requests = len(server.requests)
    observations, info = play(env, "###STOP###")
    assert "no words" in observations[0]
    assert not info["terminated"]
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("marker", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
def test_the_users_markers_end_the_dialogue_and_are_not_shown(server: OpenAIServer, marker: str) -> None:
    env, _, _ = make(server, "lend")
    play(env, LEND)
    server.script = [f"Fine.\n{marker}"]
    observations, info = play(env, "Lent.")
    assert observations == ["Fine."]
    assert (info["end_reason"], info["outcome"]) == ("user_ended", 1.0)


@pytest.mark.parametrize(
    "text", ["<think>should I say ###STOP###?</think>Go on.", "or ###STOP###?</think>Go on.", "Go on.<think>###STOP###"]
)
def test_markers_in_the_users_reasoning_end_nothing(server: OpenAIServer, text: str) -> None:
    env, _, _ = make(server, "lend")
    server.script = [text]
    observations, info = play(env, "Well?")
    assert observations == ["Go on."]
    assert not info["terminated"]


def test_a_stop_in_one_breath_with_a_yes(server: OpenAIServer) -> None:
    for let_agent_finish, outcome in ((False, 0.0), (True, 1.0)):
        server.script = says
        env, _, _ = make(server, "lend", let_agent_finish=let_agent_finish)
        server.script = ["Yes, lend it to me. ###STOP###"]
        observations, info = play(env, "Shall I?")
        assert observations == ["Yes, lend it to me."]
        if let_agent_finish:
            num_requests = len(server.requests)
            _, info = play(env, LEND, "Lent to you.")
            assert len(server.requests) == num_requests  # the user has left
        assert (info["end_reason"], info["outcome"]) == ("user_ended", outcome)


def test_a_bare_stop_ends_at_once_even_if_the_agent_may_finish(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend", let_agent_finish=True)
    server.script = ["###STOP###"]
    assert play(env, "Shall I?")[1]["end_reason"] == "user_ended"


def test_a_user_who_leaves_before_the_agent_speaks(server: OpenAIServer) -> None:
    server.script = ["###STOP###"]
    env, observation, _ = make(server, "lend")
    assert "leaves" in observation
    assert play(env, LEND)[1]["end_reason"] == "user_ended"


def test_calls_of_the_user_that_cannot_be_read_are_asked_again(server: OpenAIServer) -> None:
    env, _, _ = make(server, "unlock")
    server.script = [calls("unlock_card", '{"reader": '), "I did it."]
    server.requests.clear()
    observations, info = play(env, "Unlock it.")
    assert observations == ["I did it."]
    server.script = says
    _, info = play(env, "BYE")
    assert info["drop"] is False


def test_the_user_pays_only_where_a_price_is_given(server: OpenAIServer) -> None:
    price = {"per_call_usd": 0.25}
    env, _, info = make(server, "lend", user=endpoint(server, price=price))
    assert info["episode_cost_usd"] == 0.0  # the opening is not the policy's doing
    _, info = play(env, 'DO {"name": "look_at_card", "arguments": {"reader": "ann"}}')
    assert info["cost_usd"] == 0.5  # two requests: the call, and the words after it


def test_seeds(server: OpenAIServer) -> None:
    def seeds(seed: int, replica: int) -> tuple[str, list[int]]:
        env = Tau2Env(domain="desk", user=endpoint(server))
        server.requests.clear()
        _, info = env.reset(seed=seed, options={"replica": replica})
        play(env, "SAY a", "SAY b")
        return info["task_id"], [request["seed"] for request in server.requests]

    first, again, replica = seeds(5, 0), seeds(5, 0), seeds(5, 1)
    assert first == again
    assert (replica[0], replica[1][0]) == (first[0], first[1][0])  # the same task and opening
    assert replica[1][1:] != first[1][1:]
    make(server, "lend", user=endpoint(server, seeded=False))
    assert "seed" not in server.requests[-1]


def test_a_user_who_cannot_be_reached(server: OpenAIServer) -> None:
    server.script = [Answer("down", status=503)]
    for turn in ("Hello?", LEND):
        env, observation, _ = make(server, "lend")
        assert observation
        _, info = play(env, turn)
        assert (info["end_reason"], info["drop"], info["outcome"]) == ("infra_error", True, 0.0)
    server.script = says
    env, _, _ = make(server, "lend")
    server.requests.clear()
    server.script = [Answer("down", status=503)]
    _, info = play(env, "Hello?")
    assert (info["end_reason"], info["drop"]) == ("infra_error", True)
    assert len(server.requests) == FAST["max_attempts"]


def test_transient_faults_of_the_user_are_tried_again(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    server.requests.clear()
    server.script = [Answer("slow down", status=429, headers={"Retry-After": "0"}), "Here I am."]
    assert play(env, "Hello?")[0] == ["Here I am."]


def test_a_silent_user_is_given_up(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend")
    server.script = [Answer("")]
    _, info = play(env, "Hello?")
    assert (info["end_reason"], info["drop"]) == ("infra_error", True)


# Experts.


def with_expert(
    server: OpenAIServer, expert: Callable[[dict[str, Any]], Answer | str], **fields: Any
) -> dict[str, Any]:
    """One endpoint for the user and the expert, told apart by the model's name."""
    server.script = lambda body: expert(body) if body["model"] == "big" else says(body)
    price = {"per_call_usd": 0.5}
    return {"experts": [endpoint(server, "big", **{"price": price, "clock": "declared", "latency_s": 7, **fields})]}


ASK = render_call(ToolCall("call_expert_1", {}))


def test_an_expert_calls_tools_in_the_policys_place(server: OpenAIServer) -> None:
    kwargs = with_expert(server, lambda body: calls("lend_book", {"book_id": "b1", "reader": "ann"}))
    env, _, info = make(server, "lend", **kwargs)
    names = [spec["function"]["name"] for spec in json.loads(info["tools_json"])]
    assert names == ["find_book", "lend_book", "list_shelves", "call_expert_1"]
    assert "ask an expert instead" in info["instructions"]
    observations, info = play(env, render_call(ToolCall("find_book", {"title": "Emma"})), ASK)
    assert "lend_book(book_id='b1', reader='ann')" in observations[1]
    assert '"holder": "ann"' in observations[1]
    assert (info["cost_usd"], info["latency_s"]) == (0.5, 7.0)
    record = json.loads(info["calls_json"])[0]
    assert record["source"] == "live"
    assert record["backend"] == f"openai:big@{server.base_url}"
    seen = server.requests[-1]
    assert "transfer_to_human_agents" in [tool["function"]["name"] for tool in seen["tools"]]
    assert "Lend no book" in seen["messages"][0]["content"]
    assert [message["role"] for message in seen["messages"][1:]] == ["assistant", "user", "assistant", "tool"]
    assert seen["messages"][2]["content"] == "Hello, I need a book."
    _, info = play(env, "BYE")
    assert info["outcome"] == 1.0


def test_an_expert_speaks_in_the_policys_place(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend", **with_expert(server, lambda body: "<think>hm</think>SAY So? ###STOP###"))
    observations, info = play(env, ASK)
    assert observations == ["It said to the user:\nSAY So?\n\nThe user answered:\nSo?"]
    assert not info["terminated"]


def test_a_user_who_leaves_during_an_experts_move_ends_the_episode(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend", **with_expert(server, lambda body: "That is done. BYE"))
    _, info = play(env, LEND, ASK)
    assert (info["end_reason"], info["outcome"], info["terminated"]) == ("user_ended", 1.0, True)


@pytest.mark.parametrize("answer", [Answer("down", status=500), Answer("")], ids=["status 500", "empty"])
def test_an_expert_that_fails_is_an_observation(server: OpenAIServer, answer: Answer) -> None:
    env, _, _ = make(server, "lend", **with_expert(server, lambda body: answer))
    observations, info = play(env, ASK)
    assert observations[0].startswith("Error: call_expert_1 is unavailable")
    assert (info["error_type"], info["terminated"], info["truncated"]) == ("unavailable", False, False)
    record = json.loads(info["calls_json"])[0]
    assert record["attempts"] == FAST["max_attempts"]
    _, info = play(env, LEND, "BYE")
    assert info["outcome"] == 1.0


def test_a_user_lost_during_an_experts_move_drops_the_episode(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend", **with_expert(server, lambda body: "Hello?"))
    num_requests = len(server.requests)
    server.script = lambda body: "Hello?" if body["model"] == "big" else Answer("down", status=503)
    _, info = play(env, ASK)
    assert (info["end_reason"], info["drop"]) == ("infra_error", True)
    models = [request["model"] for request in server.requests[num_requests:]]
    assert models == ["big", "user", "user"]  # the expert is not asked again for it


def test_experts_of_one_turn_do_not_talk_over_each_other(server: OpenAIServer) -> None:
    kwargs = with_expert(server, lambda body: Answer("SAY yes", delay_s=0.1))
    kwargs["experts"] *= 2
    env, _, _ = make(server, "lend", **kwargs)
    observations, info = play(env, ASK + ASK.replace("_1", "_2"))
    assert observations[0].count("It said to the user") == 1
    assert "one expert a turn" in observations[0]
    assert info["cost_usd"] == 0.5


def test_at_most_six_calls_of_an_experts_answer_run(server: OpenAIServer) -> None:
    call = calls("list_shelves", {}).tool_calls[0]
    many = [{**call, "id": f"call_{number}"} for number in range(9)]
    env, _, _ = make(server, "lend", **with_expert(server, lambda body: Answer(None, tool_calls=many)))
    assert play(env, ASK)[0][0].count("It called list_shelves()") == 6


def test_experts_can_be_disguised_and_repriced(server: OpenAIServer) -> None:
    kwargs = with_expert(server, lambda body: "SAY yes")
    env, _, info = make(server, "lend", randomize={"aliases": True, "price_spread": 4.0}, **kwargs)
    specs = {spec["function"]["name"]: spec for spec in json.loads(info["tools_json"])}
    (alias,) = specs.keys() - {"find_book", "lend_book", "list_shelves"}
    assert alias != "call_expert_1"
    observations, info = play(env, render_call(ToolCall(alias, {})))
    assert "The user answered:\nyes" in observations[0]
    assert info["cost_usd"] == pytest.approx(specs[alias]["price"]["per_call_usd"])
    assert info["cost_usd"] != 0.5


# Limits.


def test_turns_and_errors_are_limited(server: OpenAIServer) -> None:
    env, _, _ = make(server, "lend", max_turns=2)
    _, info = play(env, LEND, "SAY hm")
    assert (info["end_reason"], info["truncated"], info["outcome"]) == ("max_turns", True, 0.0)
    env, _, _ = make(server, "lend", max_errors=3)
    bad = render_call(ToolCall("find_book", {"title": "?"}))
    unknown = render_call(ToolCall("no_such_tool", {}))
    _, info = play(env, 'DO {"name": "look_at_card", "arguments": {"reader": "nobody"}}', bad, unknown)
    assert (info["end_reason"], info["truncated"], info["drop"]) == ("too_many_errors", True, False)


def test_a_world_that_does_not_replay_drops_the_episode(server: OpenAIServer) -> None:
    tasks = str(FAKE / "data/tau2/domains/desk/tasks.json")
    env = Tau2Env(domain="branch", tasks=tasks, user=endpoint(server), nl_judge="ignore")
    env.reset(seed=0, options={"task_id": "lend"})
    _, info = play(env, render_call(ToolCall("draw_number", {})), LEND, "BYE")
    assert (info["end_reason"], info["drop"]) == ("infra_error", True)


def test_an_assertion_that_holds(server: OpenAIServer) -> None:
    env, _, _ = make(server, "asserted")
    _, info = play(env, render_call(ToolCall("lend_book", {"book_id": "b2", "reader": "ann"})), "BYE")
    assert info["outcome"] == 1.0


def test_a_conversation_that_the_task_brings_along(server: OpenAIServer) -> None:
    env, observation, _ = make(server, "told")
    assert server.requests == []  # the user has spoken already
    assert "User: Is Emma there?\nAgent called find_book(title='Emma')\nResult: {" in observation
    assert observation.endswith("User: Who has it?")
    _, info = play(env, "Bob has it. BYE")
    assert info["outcome"] == 1.0


def test_solo() -> None:
    env = Tau2Env(domain="desk", solo=True)
    observation, info = env.reset(seed=0, options={"task_id": "unlock"})
    assert observation == "Bob's card is locked. He wants Dracula."
    assert "Lend no book" in info["instructions"]
    names = [spec["function"]["name"] for spec in json.loads(info["tools_json"])]
    assert names[-2:] == ["look_at_card", "unlock_card"]
    unlock = render_call(ToolCall("unlock_card", {"reader": "bob"}))
    _, info = play(env, unlock, LEND_TO_BOB, "All done.")
    assert (info["end_reason"], info["outcome"]) == ("answered", 1.0)
    env.reset(seed=0, options={"task_id": "lend"})
    assert play(env, "All done.")[1]["outcome"] == 0.0
    assert {env.reset(seed=seed)[1]["task_id"] for seed in range(12)} == {"lend", "unlock"}


# Tasks and judges.


def task_ids(server: OpenAIServer, **kwargs: Any) -> list[str]:
    return list(Tau2Env(user=endpoint(server), **{"domain": "desk", **kwargs})._tasks)


def test_which_tasks(server: OpenAIServer, tmp_path: Path) -> None:
    assert task_ids(server) == ["lend", "unlock", "told", "asserted"]
    assert task_ids(server, split="test") == ["told"]
    assert task_ids(server, tasks="desk_small") == ["lend"]
    assert task_ids(server, tasks=["told", "lend"]) == ["told", "lend"]
    assert task_ids(server, tasks=["judged_for_show"]) == ["judged_for_show"]  # beyond tau2-bench's own choice
    path = tmp_path / "toolscale.json"
    path.write_text(json.dumps([{"id": "x", "user_scenario": {"instructions": "You are Ann."}}]))
    assert task_ids(server, domain="branch", tasks=str(path)) == ["x"]


def test_a_task_from_a_file_is_played(server: OpenAIServer, tmp_path: Path) -> None:
    lend = json.loads((FAKE / "data/tau2/domains/desk/tasks.json").read_text())[0]
    lend["evaluation_criteria"]["actions"][1]["arguments"]["another_tools_argument"] = None  # as in ToolScale's table
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([lend]))
    env = Tau2Env(domain="branch", tasks=str(path), user=endpoint(server))
    env.reset(seed=0)
    assert play(env, LEND, "BYE")[1]["outcome"] == 1.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"domain": "moon"}, r"domain: expected one of desk, branch, got 'moon'"),
        ({"domain": "branch"}, r"tasks: 'branch' has no task set of its own; give the path"),
        ({"tasks": "nowhere.json"}, r"tasks: 'nowhere.json' is no task set \(desk, .*and no file"),
        ({"tasks": ["lend", "fly"]}, r"tasks: desk has no task 'fly'; it has lend, unlock"),
        ({"tasks": []}, r"tasks: .* has no tasks"),
        ({"split": "dev"}, r"split: Invalid task split name: dev"),
        ({"tasks": "desk_small", "split": "train"}, r"split: the task set 'desk_small' has no splits"),
        ({"user": None}, r"user: name the model"),
        ({"user": "gpt-5"}, r"user must be a mapping"),
        ({"user": {"model": ""}}, r"user: Endpoint.model must be"),
        ({"user": {"model": "m", "temprature": 1}}, r"user: unknown field 'temprature'; fields: model, .*temperature"),
        ({"user": {"model": "m", "price": {"per_call_usd": -1}}}, r"user\.price.*per_call_usd"),
        ({"user": {"model": "m", "retry": {"max_attempts": 0}}}, r"user\.retry: Retry.max_attempts"),
        ({"experts": [{"model": "no-such-model"}]}, r"experts\[0\]\.price: .*no-such-model"),
        ({"experts": [{"model": "m", "price": {}, "name": "a b"}]}, r"experts\[0\]: .*'a b'"),
        ({"experts": ["gpt-5"]}, r"experts\[0\] must be a mapping"),
        ({"max_errors": 0}, r"max_errors must be a whole number"),
        ({"nl_judge": "skip"}, r"nl_judge must be a mapping"),
        ({"tasks": ["judged", "lend"]}, r"nl_judge: the reward of 1 of 2 tasks"),
        ({"retrieval": "bm25_grep"}, r"domain 'desk' \(retrieval_variant='bm25_grep', .*TypeError"),
        ({"solo": True, "tasks": ["told"]}, r"solo: none of the tasks has a ticket"),
    ],
)
def test_mistakes_are_told(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tau2Env(**{"domain": "desk", "user": {"model": "m"}, **kwargs})


def test_an_unknown_task_of_an_episode_is_told(server: OpenAIServer) -> None:
    with pytest.raises(ValueError, match=r"task_id: there is no task 'fly', but lend"):
        make(server, "fly")


def test_files_of_tasks_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    for text, message in (("{", "is no JSON"), ("{}", "must hold a list"), ('[{"id": "x"}]', "task 0: .*")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Tau2Env(domain="desk", tasks=str(path), user={"model": "m"})


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [("1: yes\n2: yes", 1.0), ("1. Yes\n2. No, it did", 0.0), ("**1**: yes\n- 2: YES", 1.0)],
)
def test_assertions_in_words_are_judged_by_the_model_that_is_named(
    server: OpenAIServer, verdict: str, outcome: float
) -> None:
    server.script = lambda body: verdict if body["model"] == "judge" else says(body)
    env, _, _ = make(server, "judged", tasks=["judged"], nl_judge=endpoint(server, "judge"))
    _, info = play(env, "Good day. BYE")
    assert info["outcome"] == outcome
    question = server.requests[-1]["messages"][-1]["content"]
    assert "Agent: Good day. BYE" in question
    assert "2. The agent lends no book." in question


def test_a_judge_without_a_verdict_drops_the_episode(server: OpenAIServer) -> None:
    server.script = lambda body: "1: yes" if body["model"] == "judge" else says(body)
    env, _, _ = make(server, "judged", tasks=["judged"], nl_judge=endpoint(server, "judge"))
    _, info = play(env, "BYE")
    assert (info["end_reason"], info["drop"]) == ("infra_error", True)


def test_assertions_in_words_can_be_left_out(server: OpenAIServer) -> None:
    env, _, _ = make(server, "judged", tasks=["judged"], nl_judge="ignore")
    assert play(env, "BYE")[1]["outcome"] == 1.0
    env, _, _ = make(server, "judged", tasks=["judged"], nl_judge="ignore")
    assert play(env, LEND, "BYE")[1]["outcome"] == 0.0


# Many at once.


def test_episodes_wait_together(server: OpenAIServer) -> None:
    server.script = lambda body: Answer(str(says(body)), delay_s=0.3)
    envs = [Tau2Env(domain="desk", user=endpoint(server)) for _ in range(32)]

    async def episode(number: int, env: Tau2Env) -> tuple[str, float]:
        await env.areset(seed=0, options={"task_id": "lend"})
        observation, *_ = await env.astep(f"SAY {number}")
        await env.astep(LEND)
        *_, info = await env.astep("BYE")
        return observation, info["outcome"]

    async def together() -> list[tuple[str, float]]:
        return await asyncio.gather(*(episode(number, env) for number, env in enumerate(envs)))

    start = time.perf_counter()
    results = asyncio.run(together())
    assert results == [(str(number), 1.0) for number in range(32)]
    assert time.perf_counter() - start < 9.0  # one after the other: 29 s


def test_equal_configurations_share_a_limiter() -> None:
    config = {"model": "m", "limiter": {"max_concurrency": 2}}
    assert read_speaker("user", dict(config)) is read_speaker("user", dict(config))
    limiter = Limiter(max_concurrency=1)
    speaker = read_speaker("user", {"model": "m", "limiter": limiter, "retry": Retry(1)})
    assert speaker.limiter is limiter


def test_the_limiter_bounds_the_users_requests(server: OpenAIServer) -> None:
    server.script = lambda body: Answer("hm", delay_s=0.02)
    user = endpoint(server, limiter={"max_concurrency": 2})
    envs = [Tau2Env(domain="desk", user=user) for _ in range(6)]

    async def together() -> None:
        await asyncio.gather(*(env.areset(seed=0, options={"task_id": "lend"}) for env in envs))

    asyncio.run(together())
    assert server.max_under_way == 2


@pytest.mark.parametrize("solo", [False, True])
def test_the_contract_of_environments(server: OpenAIServer, solo: bool) -> None:
    kwargs = {} if solo else with_expert(server, lambda body: "SAY yes")
    problems = orchestra_envs.check("orchestra/Tau2-v0", domain="desk", user=endpoint(server), solo=solo, **kwargs)
    # Half a character is a message to the user like any other: neither an error nor the end.
    assert [problem for problem in problems if "ud800" not in problem] == []
