"""`ToolEnv`: Gymnasium's contract, endings, accounts, determinism, replicas, vector environments."""

import asyncio
import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import threading
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from orchestra_envs import CallContext, Preference, Price, Reply, Task, ToolCall, ToolEnv, ToolResult, render_call, tool
from orchestra_envs.env import INFO_TYPES, REWARD_PER_SECOND, REWARD_PER_USD


@tool(price=Price(per_call_usd=0.01), latency_s=2.0)
def lookup(q: str) -> str:
    """Look something up."""
    return f"about {q}"


@tool(price=Price(per_call_usd=0.02), latency_s=5.0)
async def ask(context: CallContext, q: str = "") -> ToolResult:
    """Ask an expert, who draws lots."""
    return ToolResult(f"{q or context.task.question} {context.rng.integers(10**9)} after {len(context.history)}")


@tool
def fail() -> None:
    """Always fails."""
    raise RuntimeError("out of order")


PREFERENCE = Preference({"outcome": 1.0, "cost": 0.5, "latency": 0.25, "lookup": 0.0}, "Be cheap.")


class Quiz(ToolEnv):
    tools = (lookup, ask, fail)

    def __init__(self, preference=None, **limits):
        super().__init__(**limits)
        self.preference = preference

    def sample_task(self, rng, options):
        number = options.get("number", int(rng.integers(10**6)))
        return Task(f"What is {number}? 東京", answer=str(number), id=f"quiz/{number}", preference=self.preference)

    def score(self, task, answer):
        return answer == task.answer


def call(name, **arguments):
    return render_call(ToolCall(name, arguments))


def calls_of(info):
    return json.loads(info["calls_json"])


@pytest.fixture(scope="module", autouse=True)
def _registered():
    gym.register("orchestra_test/Quiz-v0", entry_point=Quiz)
    yield
    gym.registry.pop("orchestra_test/Quiz-v0")


# Gymnasium.


@pytest.mark.parametrize("kwargs", [{}, {"preference": PREFERENCE, "max_format_errors": 2, "budget_usd": 1.0}])
def test_gymnasiums_checker_has_nothing_to_say(kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("orchestra_test/Quiz-v0", **kwargs).unwrapped)


def test_a_thousand_steps_without_a_warning():
    env = gym.make("orchestra_test/Quiz-v0", max_turns=5)
    actions = [call("lookup", q="é"), "", "<tool_call>{", call("ask"), call("fail"), "\ud800", "42", call("nope")]
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended = True
        for _ in range(1000):
            if ended:
                env.reset()
            _, _, terminated, truncated, _ = env.step(actions[rng.integers(len(actions))])
            ended = terminated or truncated


def test_step_needs_a_reset():
    env = Quiz()
    with pytest.raises(gym.error.ResetNeeded):
        env.step("4")
    env.reset(seed=0)
    env.step("4")
    with pytest.raises(gym.error.ResetNeeded):
        env.step("4")
    env.reset()
    with pytest.raises(gym.error.InvalidAction, match="ToolCall"):
        env.step(ToolCall("lookup", {}))


def test_a_failed_reset_leaves_no_episode_behind():
    class Picky(Quiz):
        def sample_task(self, rng, options):
            if "bad" in options:
                raise ValueError("no such task")
            return super().sample_task(rng, options)

    env = Picky()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="no such task"):
        env.reset(seed=0, options={"bad": 1})
    with pytest.raises(gym.error.ResetNeeded):
        env.step("4")


def test_info_has_the_same_keys_and_types_at_every_step():
    env = Quiz(PREFERENCE)
    infos = [env.reset(seed=0)[1]]
    infos += [env.step(action)[4] for action in (call("lookup", q="x"), "", "<tool_call>{}", call("fail"), "4")]
    for info in infos:
        assert {key: type(value) for key, value in info.items()} == dict(INFO_TYPES)
    assert len({id(info) for info in infos}) == len(infos)


# The first observation and what reset tells.


def test_reset_tells_the_task_tools_prices_and_preference():
    observation, info = Quiz(PREFERENCE).reset(seed=1, options={"number": 7})
    assert observation == "What is 7? 東京\n\nBe cheap."
    assert info["task_id"] == "quiz/7"
    assert [spec["function"]["name"] for spec in json.loads(info["tools_json"])] == ["lookup", "ask", "fail"]
    assert json.loads(info["tools_json"])[0] == lookup.spec()
    assert json.loads(info["preference_json"]) == {"weights": dict(PREFERENCE.weights), "text": "Be cheap."}
    observation, info = Quiz().reset(seed=1, options={"number": 7})
    assert observation == "What is 7? 東京"
    assert info["preference_json"] == ""
    silent = Preference(PREFERENCE.weights, "")
    assert Quiz(silent).reset(seed=1, options={"number": 7})[0] == "What is 7? 東京"


# Turns.


def test_an_answer_ends_the_episode():
    env = Quiz()
    env.reset(seed=0, options={"number": 7})
    observation, reward, terminated, truncated, info = env.step("<think>7?</think>\n7")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert (info["outcome"], info["end_reason"], info["turn"], info["drop"]) == (1.0, "answered", 1, False)
    env.reset(seed=0, options={"number": 7})
    assert env.step("8")[1:4] == (0.0, True, False)


def test_one_call():
    env = Quiz()
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("Let me see. " + call("lookup", q="Zürich 東京 🚲"))
    assert observation == "about Zürich 東京 🚲"  # BR-10: nothing is escaped
    assert not terminated
    assert not truncated
    assert reward == pytest.approx(-(REWARD_PER_USD * 0.01 + REWARD_PER_SECOND * 2.0))
    assert "Zürich 東京 🚲" in info["calls_json"]
    assert calls_of(info) == [
        {
            "tool": "lookup",
            "arguments": {"q": "Zürich 東京 🚲"},
            "status": "ok",
            "error_type": "",
            "text": "about Zürich 東京 🚲",
            "cost_usd": 0.01,
            "latency_s": 2.0,
            "attempts": 1,
            "input_tokens": 0,
            "output_tokens": 0,
            "truncated_chars": 0,
            "source": "simulated",
            "cost_known": True,
            "queue_s": 0.0,
            "backend": "",
            "raw_sha256": "",
            "state_hash": None,
        }
    ]


def test_the_state_before_each_call_is_in_its_record():
    class Counter(Quiz):
        tools = (lookup, fail)

        def state_hash(self, tool):
            return f"after {self.num_asked()}" if tool == "lookup" else None

        def num_asked(self):
            self.asked = getattr(self, "asked", -1) + 1
            return self.asked

    env = Counter()
    env.reset(seed=0)
    info = env.step(call("lookup", q="a") + call("fail") + call("lookup", q="b") + call("no such tool"))[4]
    assert [record["state_hash"] for record in calls_of(info)] == ["after 0", None, "after 1", None]


def test_several_calls_are_labelled_costs_add_and_latencies_overlap():
    env = Quiz()
    env.reset(seed=0)
    observation, _, _, _, info = env.step(call("lookup", q="a") + call("ask", q="b") + call("lookup", q="c"))
    assert observation.startswith("[1] lookup:\nabout a\n\n[2] ask:\nb ")
    assert observation.endswith("after 0\n\n[3] lookup:\nabout c")
    assert info["cost_usd"] == pytest.approx(0.04)
    assert info["latency_s"] == 5.0
    assert (info["num_calls"], info["num_errors"]) == (3, 0)
    _, _, _, _, info = env.step(call("lookup", q="d"))
    assert info["episode_cost_usd"] == pytest.approx(0.05)
    assert info["episode_latency_s"] == 7.0
    assert (info["episode_calls"], info["turn"], info["cost_usd"]) == (4, 2, 0.01)


@pytest.mark.parametrize(
    ("action", "error_type", "says"),
    [
        (call("nope"), "unknown_tool", "lookup, ask, fail"),
        (call("lookup"), "invalid_arguments", "'q' is a required property"),
        (call("lookup", q=3), "invalid_arguments", "not of type 'string'"),
        (call("fail"), "tool_exception", "RuntimeError: out of order"),
        ('<tool_call>{"name":"lookup","arguments":{"q":"a', "truncated_call", "</tool_call>"),
        ("<tool_call>{}</tool_call>", "missing_name", "name"),
        ("<tool_call>{'name':'lookup'}</tool_call>", "malformed_json", "JSON"),
        ('<tool_call>{"name":"lookup","arguments":[1]}</tool_call>', "bad_arguments", "list"),
        ("", "empty_turn", "answer"),
        ("  \n", "empty_turn", "answer"),
        ("<think>so it is 42", "empty_turn", "answer"),
    ],
)
def test_faults_are_observations_and_the_episode_goes_on(action, error_type, says):
    env = Quiz()
    env.reset(seed=0, options={"number": 42})
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation.startswith("Error: ")
    assert says in observation
    assert (info["error_type"], info["num_errors"], reward) == (error_type, 1, 0.0)
    assert not terminated
    assert not truncated
    assert env.step("42")[1] == 1.0


def test_valid_calls_run_beside_malformed_ones():
    env = Quiz()
    env.reset(seed=0)
    observation, _, _, _, info = env.step(call("lookup", q="a") + "<tool_call>{bad</tool_call>")
    assert observation.startswith("[1] lookup:\nabout a\n\nError: the tool call is not valid JSON")
    assert (info["num_calls"], info["num_errors"], info["error_type"]) == (1, 1, "malformed_json")
    assert info["episode_format_errors"] == 1


def test_br06_a_drafted_call_does_not_run():
    ran = []

    @tool
    def pay(n: int) -> str:
        """Pay."""
        ran.append(n)
        return "paid"

    class Shop(Quiz):
        tools = (pay,)

    env = Shop()
    env.reset(seed=0)
    env.step(f"<think>maybe {call('pay', n=1)} hmm</think>\n{call('pay', n=2)}")
    assert ran == [2]


def test_the_error_text_is_bounded():
    env = Quiz(max_output_chars=200)
    env.reset(seed=0)
    observation, *_ = env.step("<tool_call>{bad</tool_call>" * 1000)
    assert len(observation) < 300
    assert "characters cut" in observation
    observation, *_ = env.step(call("x" * 10_000))
    assert len(observation) < 300


def test_the_preference_weighs_the_step_reward():
    env = Quiz(PREFERENCE)
    env.reset(seed=0)
    reward = env.step(call("lookup", q="a"))[1]
    assert reward == pytest.approx(-(0.5 * REWARD_PER_USD * 0.01 + 0.25 * REWARD_PER_SECOND * 2.0))


# Endings.


def test_br35_format_errors_in_a_row():
    def turns_until_end(actions, **limits):
        env = Quiz(**limits)
        env.reset(seed=0)
        for number, action in enumerate(actions, start=1):
            _, _, terminated, truncated, info = env.step(action)
            assert not terminated
            if truncated:
                return number, info["end_reason"]
        return None

    bad, good = "<tool_call>hello", call("lookup", q="a")
    assert turns_until_end([bad] * 9, max_turns=5, max_format_errors=2) == (2, "format_errors")
    assert turns_until_end([bad] * 9, max_turns=5, max_format_errors=0) == (1, "format_errors")
    assert turns_until_end([bad] * 9, max_turns=5, max_format_errors=None) == (5, "max_turns")
    assert turns_until_end([bad, good] * 5, max_turns=5, max_format_errors=2) == (5, "max_turns")
    assert turns_until_end([""] * 9, max_turns=5, max_format_errors=3) == (3, "format_errors")
    assert turns_until_end([call("nope")] * 9, max_turns=5, max_format_errors=2) == (5, "max_turns")


def test_br38_the_last_turn_overwrites_nothing():
    def rewards(max_turns):
        env = Quiz(max_turns=max_turns)
        env.reset(seed=0)
        steps = [env.step(call("lookup", q="a")) for _ in range(max_turns)]
        assert [step[3] for step in steps] == [False] * (max_turns - 1) + [True]
        assert steps[-1][4]["end_reason"] == "max_turns"
        assert steps[-1][0] == "about a"
        return [step[1] for step in steps]

    assert sum(rewards(3)) == pytest.approx(3 * sum(rewards(1)))


def test_an_answer_in_the_last_turn_counts():
    env = Quiz(max_turns=1)
    env.reset(seed=0, options={"number": 7})
    assert env.step("7")[1:4] == (1.0, True, False)


def test_a_call_beyond_the_budget_is_refused_and_ends_the_episode():
    env = Quiz(budget_usd=0.02)
    env.reset(seed=0)
    for _ in range(2):
        assert not env.step(call("lookup", q="a"))[3]
    observation, reward, terminated, truncated, info = env.step(call("lookup", q="a"))
    assert (terminated, truncated, info["end_reason"], info["error_type"]) == (False, True, "budget", "budget")
    assert "budget" in observation
    assert (reward, info["cost_usd"], info["episode_cost_usd"]) == (0.0, 0.0, 0.02)
    env.reset(seed=0, options={"number": 7})
    env.step(call("lookup", q="a") * 2)
    assert env.step("7")[2], "an answer costs nothing and is welcome"


@pytest.mark.parametrize("grade", [RuntimeError("judge down"), SystemExit(1), float("nan"), 1.5, -1, "good", None])
def test_br34_a_failing_scorer_marks_the_episode(grade):
    class Broken(Quiz):
        def score(self, task, answer):
            if isinstance(grade, BaseException):
                raise grade
            return grade

    env = Broken()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("4")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["end_reason"], info["error_type"], info["drop"]) == ("infra_error", "infra_error", True)
    assert info["outcome"] == 0.0
    assert env.reset(seed=0)[1]["drop"] is False


# Determinism.


SCRIPT = [call("ask"), call("lookup", q="a") + call("ask", q="b"), "<tool_call>", call("fail"), "4"]


def play(env, seed, replica=0):
    steps = [env.reset(seed=seed, options={"replica": replica})]
    return steps + [env.step(action) for action in SCRIPT]


def test_same_seed_same_actions_same_trajectory():
    assert play(Quiz(), 3) == play(Quiz(), 3)
    assert play(Quiz(), 3) != play(Quiz(), 4)
    env = Quiz()
    first = play(env, 3)
    play(env, 9)
    assert play(env, 3) == first


def test_replicas_share_the_task_and_differ_in_the_tools_luck():
    trajectories = [play(Quiz(PREFERENCE), 5, replica) for replica in range(8)]
    assert all(trajectory[0] == trajectories[0][0] for trajectory in trajectories)
    assert len({trajectory[1][0] for trajectory in trajectories}) == 8
    assert play(Quiz(PREFERENCE), 5, 3) == trajectories[3]
    texts = [trajectory[1][0] for trajectory in (play(Quiz(), seed, 1) for seed in range(8))]
    assert len(set(texts)) == 8


def test_tools_may_change_from_episode_to_episode_but_not_within_a_group():
    class Market(Quiz):
        def sample_task(self, rng, options):
            return Task(f"{rng.integers(10**9)}")

        def episode_tools(self, task, rng):
            price = Price(per_call_usd=float(rng.integers(10**9)) / 10**9)
            return [dataclasses.replace(lookup, price=price)] + [ask] * int(rng.integers(2))

    def begin(seed, replica):
        question, info = Market().reset(seed=seed, options={"replica": replica})
        return question, info["tools_json"]

    assert begin(1, 0) == begin(1, 7)
    assert len({begin(seed, 0)[1] for seed in range(9)}) == 9
    question, tools_json = begin(1, 0)
    assert json.loads(tools_json)[0]["price"]["per_call_usd"] != int(question) / 10**9, "one stream for both"


def test_the_calls_of_an_episode_draw_different_lots():
    env = Quiz()
    env.reset(seed=0)
    observation, *_ = env.step(call("ask") * 3)
    lots = [line for line in observation.splitlines() if line.endswith("after 0")]
    assert len(set(lots)) == 3
    assert env.step(call("ask"))[0].endswith("after 3")


def test_br54_resets_without_a_seed_go_on_from_the_seed():
    one, two, other = Quiz(), Quiz(), Quiz()
    one.reset(seed=3)
    two.reset(seed=3, options={"replica": 4})
    one.step(call("ask"))
    later = [(one.reset()[0], other.reset(), two.reset()[0]) for _ in range(4)]
    assert [a for a, _, _ in later] == [b for _, _, b in later]
    assert len({a for a, _, _ in later}) == 4
    assert Quiz().reset()[0] != Quiz().reset()[0]


def test_256_interleaved_environments_do_not_disturb_each_other():
    alone = {seed: play(Quiz(), seed) for seed in (0, 100, 255)}
    envs = [Quiz() for _ in range(256)]
    trajectories = [[env.reset(seed=seed, options={"replica": 0})] for seed, env in enumerate(envs)]
    for action in SCRIPT:
        for env, trajectory in zip(envs, trajectories):
            np.random.random()  # the global generator is nobody's
            trajectory.append(env.step(action))
    for seed, trajectory in alone.items():
        assert trajectories[seed] == trajectory


def test_environments_in_threads_share_the_time_of_slow_tools():
    @tool
    async def slow() -> str:
        """Slow."""
        await asyncio.sleep(0.2)
        return "done"

    class Slow(Quiz):
        tools = (slow,)

    def run(seed):
        env = Slow()
        env.reset(seed=seed)
        return env.step(call("slow"))[0]

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert list(pool.map(run, range(32))) == ["done"] * 32
    assert time.perf_counter() - start < 1.5


def test_a_step_of_inline_tools_stays_in_its_thread():
    names = []

    class Inline(Quiz):
        tools = (
            dataclasses.replace(lookup, function=lambda q: names.append(threading.current_thread()) or q, inline=True),
        )

    env = Inline()
    env.reset(seed=0)
    env.step(call("lookup", q="a"))
    assert names == [threading.current_thread()]


# Conversations: opening, reply, ended; hooks that wait.


class Counter(ToolEnv):
    """The user counts with the policy, up to three."""

    tools = (ask,)

    def sample_task(self, rng, options):
        return Task("count", id="count", instructions="Count politely.")

    async def opening(self, task):
        await asyncio.sleep(0)
        return f"Hello, let us {task.question}."

    async def reply(self, message):
        await asyncio.sleep(0)
        number = int(message)
        if number < 0:
            raise RuntimeError("the user left")
        luck = int(self.episode_rng.integers(10**9))
        return Reply(f"{number + 1} {luck}", end=number >= 3, cost_usd=0.5, latency_s=2.0)

    async def score(self, task, answer):
        await asyncio.sleep(0)
        return float(answer == "3")


def test_a_user_replies_until_he_ends_it():
    env = Counter(max_turns=5)
    observation, info = env.reset(seed=0)
    assert (observation, info["instructions"]) == ("Hello, let us count.", "Count politely.")
    observation, reward, terminated, truncated, info = env.step("<think>secret</think>1")
    assert observation.startswith("2 ")
    assert (terminated, truncated, info["cost_usd"], info["latency_s"]) == (False, False, 0.5, 2.0)
    assert reward == pytest.approx(-0.5 * REWARD_PER_USD - 2.0 * REWARD_PER_SECOND)
    env.step(call("ask"))
    observation, reward, terminated, truncated, info = env.step("3")
    assert (terminated, truncated, info["end_reason"], info["outcome"]) == (True, False, "user_ended", 1.0)
    assert observation.startswith("4 ")
    assert info["episode_cost_usd"] == pytest.approx(0.5 + 0.02 + 0.5)
    assert [m["role"] for m in env.messages] == ["user", "assistant", "user", "assistant", "tool", "assistant", "user"]
    assert env.messages[1]["content"] == "1"  # nobody reads the reasoning


def test_a_user_who_never_ends_it_is_cut():
    env = Counter(max_turns=2)
    env.reset(seed=0)
    env.step("1")
    _, _, terminated, truncated, info = env.step("1")
    assert (terminated, truncated, info["end_reason"], info["outcome"]) == (False, True, "max_turns", 0.0)


def test_a_user_who_fails_marks_the_episode():
    env = Counter()
    env.reset(seed=0)
    observation, _, terminated, truncated, info = env.step("-1")
    assert (observation, terminated, truncated) == ("", False, True)
    assert (info["end_reason"], info["drop"]) == ("infra_error", True)


def test_the_users_luck_is_of_the_seed_and_the_replica():
    def first(seed, replica):
        env = Counter()
        env.reset(seed=seed, options={"replica": replica})
        return env.step("1")[0]

    assert first(0, 0) == first(0, 0)
    assert len({first(0, 0), first(0, 1), first(1, 0)}) == 3


@pytest.mark.parametrize(("complete", "expected"), [(True, (True, False, 1.0)), (False, (False, True, 0.0))])
def test_a_tool_can_end_the_episode(complete, expected):
    class Phone(Quiz):
        def ended(self):
            return ("hung_up", complete) if self.history else None

        def score(self, task, answer):
            return float(answer == "")

    env = Phone()
    env.reset(seed=0)
    observation, _, terminated, truncated, info = env.step(call("lookup", q="a"))
    assert (terminated, truncated, info["outcome"]) == expected
    assert (observation, info["end_reason"], info["num_calls"]) == ("about a", "hung_up", 1)
    with pytest.raises(gym.error.ResetNeeded):
        env.step("1")


def test_an_estimated_cost_is_flagged_to_the_end():
    class Vague(Quiz):
        tools = (dataclasses.replace(lookup, function=lambda q: ToolResult(q, cost_usd=0.1, cost_known=False)),)

    env = Vague()
    assert env.reset(seed=0)[1]["cost_known"] is True
    assert env.step(call("lookup", q="a"))[4]["cost_known"] is False
    assert env.step("1")[4]["cost_known"] is False


def test_episodes_run_on_any_event_loop():
    async def play():
        env = Counter()
        observation, _ = await env.areset(seed=0)
        return observation, (await env.astep("3"))[4]["outcome"]

    assert asyncio.run(play()) == ("Hello, let us count.", 1.0)


def test_a_cancelled_step_cancels_its_tools():
    cancelled = threading.Event()

    async def wait() -> str:
        """Waits."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    class Waiting(Quiz):
        tools = (tool(wait),)

    async def play():
        env = Waiting()
        await env.areset(seed=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.astep(call("wait")), 0.2)

    asyncio.run(play())
    assert cancelled.wait(5)


# Vector environments.


@pytest.mark.parametrize(
    "make",
    [
        lambda fns: SyncVectorEnv(fns),
        lambda fns: AsyncVectorEnv(fns, shared_memory=False, context="spawn"),
    ],
    ids=["sync", "async"],
)
def test_vector_environments(make):
    venv = make([Quiz] * 3)
    try:
        observations, infos = venv.reset(seed=[1, 2, 3], options={"number": 7})
        assert observations == ("What is 7? 東京",) * 3
        assert list(infos["task_id"]) == ["quiz/7"] * 3
        observations, rewards, terminated, _, infos = venv.step((call("lookup", q="a"), "<tool_call>", "7"))
        assert observations[0] == "about a"
        assert observations[1].startswith("Error")
        assert list(terminated) == [False, False, True]
        assert list(infos["num_errors"]) == [0, 1, 0]
        assert list(infos["outcome"]) == [0.0, 0.0, 1.0]
        assert rewards[2] == 1.0
        # BR-55: the step after the end only resets; its action is ignored.
        observations, rewards, terminated, _, infos = venv.step((call("lookup", q="b"),) * 3)
        assert observations[:2] == ("about b", "about b")
        assert observations[2].startswith("What is")
        assert (rewards[2], infos["turn"][2]) == (0.0, 0)
    finally:
        venv.close()


def test_make_vec():
    venv = gym.make_vec("orchestra_test/Quiz-v0", num_envs=2, vectorization_mode="sync", max_turns=3)
    observations, _ = venv.reset(seed=5)
    assert observations[0] == Quiz().reset(seed=5)[0]
    assert observations[0] != observations[1]
    venv.close()


def test_a_forked_process_gets_a_loop_of_its_own():
    program = """
import os
from orchestra_envs import Task, ToolCall, ToolEnv, render_call, tool
@tool
async def f() -> str:
    'F.'
    return "x"
class E(ToolEnv):
    tools = (f,)
    def sample_task(self, rng, options): return Task("Q?")
def once():
    env = E()
    env.reset(seed=0)
    return env.step(render_call(ToolCall("f", {})))[0]
assert once() == "x"
child = os.fork()
if child == 0:
    os._exit(0 if once() == "x" else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


# Values that must be refused.


@pytest.mark.parametrize(
    "limits",
    [
        {"max_turns": 0},
        {"max_turns": 2.0},
        {"max_turns": True},
        {"max_format_errors": -1},
        {"budget_usd": -1.0},
        {"budget_usd": float("nan")},
        {"max_output_chars": 0},
    ],
    ids=str,
)
def test_limits_are_checked(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        Quiz(**limits)


@pytest.mark.parametrize("replica", [-1, 1.0, "0", None, True])
def test_replicas_are_whole_numbers(replica):
    with pytest.raises(ValueError, match="replica"):
        Quiz().reset(seed=0, options={"replica": replica})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"outcome": 1, "cost": 1}, "latency"),
        ({"outcome": 1, "cost": 1, "latency": 1.5}, "latency"),
        ({"outcome": 1, "cost": -0.1, "latency": 1}, "cost"),
        ({"outcome": float("nan"), "cost": 1, "latency": 1}, "outcome"),
        ({"outcome": 1, "cost": 1, "latency": 1, "lookup": "much"}, "lookup"),
    ],
)
def test_preferences_are_checked(weights, message):
    with pytest.raises(ValueError, match=message):
        Preference(weights, "")


def test_tasks_and_tools_are_checked():
    with pytest.raises(ValueError, match="question"):
        Task("")
    with pytest.raises(ValueError, match="id"):
        Task("Q?", id=3)

    class Twice(Quiz):
        tools = (lookup, lookup)

    class Plain(Quiz):
        tools = (len,)

    with pytest.raises(ValueError, match="share a name"):
        Twice().reset(seed=0)
    with pytest.raises(ValueError, match="@tool"):
        Plain().reset(seed=0)
    with pytest.raises(NotImplementedError, match="sample_task"):
        ToolEnv().reset(seed=0)


# Mistakes in an environment's code.


def test_a_forgotten_comma():
    class OneTool(Quiz):
        tools = lookup

    with pytest.raises(ValueError, match=r"OneTool.tools must be a list of tools, .*is a comma missing"):
        OneTool()


def test_two_tools_of_one_name_are_found_at_once():
    class Twice(Quiz):
        tools = (lookup, lookup)

    with pytest.raises(ValueError, match="two tools share a name"):
        Twice()


def test_a_task_that_is_none():
    class Textual(Quiz):
        def sample_task(self, rng, options):
            return "What is 4?"

    with pytest.raises(ValueError, match=r"Textual.sample_task must return a Task, not 'What is 4\?'"):
        Textual().reset(seed=0)


def test_a_forgotten_super():
    class Hasty(ToolEnv):
        def __init__(self):
            pass

        def sample_task(self, rng, options):
            return Task("What is 4?")

    with pytest.raises(AttributeError, match=r"Hasty.__init__ must call super\(\).__init__\(\)"):
        Hasty().reset(seed=0)


def test_a_score_that_always_fails_does_not_flood_the_log(caplog):
    class Broken(Quiz):
        def score(self, task, answer):
            raise LookupError("no answers here")

    env = Broken()
    for seed in range(25):
        env.reset(seed=seed)
        assert env.step("4")[4]["drop"]
    assert caplog.text.count("Traceback") == 1
    assert len(caplog.records) == 2  # the first time, and the tenth
