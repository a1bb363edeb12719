"""What the check of an environment finds, what it leaves alone, and what it never does (real calls, long waits)."""

import asyncio
import itertools
import time

import gymnasium as gym
import pytest
from orchestra_envs import CallContext, Reply, Task, Tool, ToolCall, ToolEnv, UnicodeText, check, render_call, tool
from orchestra_envs.conformance import Findings, examine


@pytest.fixture
def register(monkeypatch):
    """Registers a class, where pickle finds it, and forgets it after the test."""
    names = []

    def add(env_class, **kwargs):
        env_class.__qualname__ = env_class.__name__
        monkeypatch.setitem(globals(), env_class.__name__, env_class)
        names.append(f"conformance_test/{env_class.__name__}-v0")
        gym.register(names[-1], entry_point=env_class, **kwargs)
        return names[-1]

    yield add
    for name in names:
        gym.registry.pop(name, None)


class Sound(ToolEnv):
    def sample_task(self, rng, options):
        return Task(f"What is {rng.integers(1000)}?")

    def score(self, task, answer):
        return 0.0


# --- Scores, judges and users that fail ---


class NoScore(Sound):
    def score(self, task, answer):
        pass


class WordScore(Sound):
    def score(self, task, answer):
        return "right"


class PercentScore(Sound):
    def score(self, task, answer):
        return 100


class RaisingScore(Sound):
    def score(self, task, answer):
        return {"yes": 1.0}[answer]


class ReadsANumber(Sound):
    """Fails on answers without a number alone."""

    def score(self, task, answer):
        return float(int(answer.removeprefix("Answer: ")) == 3)


class FailingJudge(Sound):
    async def score(self, task, answer):
        await asyncio.sleep(0)
        raise RuntimeError("the judge is away")


class FailingUser(Sound):
    def reply(self, message):
        raise ConnectionError("the user is away")


class WordyUser(Sound):
    def reply(self, message):
        return "hm"


@pytest.mark.parametrize(
    ("env_class", "says"),
    [
        (
            NoScore,
            "the answer 'Answer: 1' (seed 0) ends in infra_error, as score returned None, not a number in [0, 1]",
        ),
        (WordScore, "score returned 'right', not a number in [0, 1]"),
        (PercentScore, "score returned 100, not a number in [0, 1]"),
        (RaisingScore, "score raised KeyError: 'Answer: 1'"),
        (ReadsANumber, "the answer 'I do not know.' (seed 1) ends in infra_error, as score raised ValueError: invalid"),
        (FailingJudge, "score raised RuntimeError: the judge is away"),
        (FailingUser, "reply raised ConnectionError: the user is away"),
        (WordyUser, "reply returned 'hm', not a Reply or None"),
    ],
)
def test_a_failing_hook_is_named_with_its_exception(register, env_class, says, caplog):
    problems = check(register(env_class))
    assert [problem for problem in problems if says in problem], problems
    assert not [record for record in caplog.records if record.name == "orchestra_envs.env"]


def test_a_user_who_talks_on_is_left_after_some_messages(register):
    class Talker(Sound):
        def reply(self, message):
            return Reply("Go on.")

    findings = examine(register(Talker), max_turns=1000)
    assert findings.problems == []
    assert "score was not tried with plain answers: no episode ended within 4 messages" in findings.notes


# --- Demonstrations ---


@tool
def lookup(city: str) -> str:
    """Population of a city."""
    return "709000"


class Shows(Sound):
    tools = (lookup,)
    turns: object = [render_call(ToolCall("lookup", {"city": "Oslo"})), "Answer: 709000"]

    def demonstrate(self, task, rng):
        return self.turns


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ("Answer: 1", "demonstrate must return a list of turns (strings), not 'Answer: 1'"),
        (None, "demonstrate must return a list of turns (strings), not None"),
        ([{"role": "assistant"}], "demonstrate must return strings; one of its turns is {'role': 'assistant'}"),
        (["<tool_call>{", "Answer: 1"], "turn 1 is in error"),
        ([render_call(ToolCall("look", {})), "Answer: 1"], "turn 1 is in error (unknown_tool)"),
        ([render_call(ToolCall("lookup", {})), "Answer: 1"], "turn 1 is in error (invalid_arguments)"),
        ([render_call(ToolCall("lookup", {"city": "Oslo"}))], "after all of its turns (1) the episode goes on"),
        ([], "after all of its turns (0) the episode goes on"),
    ],
    ids=["text", "none", "messages", "malformed", "unknown tool", "bad arguments", "no end", "empty"],
)
def test_demonstrations_that_teach_nothing(register, monkeypatch, turns, says):
    monkeypatch.setattr(Shows, "turns", turns)
    (problem,) = check(register(Shows))
    assert problem.startswith("demonstrate")
    assert says in problem


def test_a_demonstration_that_raises(register):
    class Broken(Sound):
        def demonstrate(self, task, rng):
            return [task.metadata["solution"]]

    assert check(register(Broken)) == ["demonstrate: KeyError: 'solution'"]


def test_good_demonstrations_pass(register):
    assert examine(register(Shows)) == Findings()


# --- Tools that cost, wait, or measure ---


def test_live_tools_are_never_called(register):
    calls = []

    @tool(source="live")
    def ask(text: str = "") -> str:
        """Costs dollars."""
        calls.append(text)
        return "42"

    class Live(Shows):
        tools = (
            ask,
            lookup,
        )

        def demonstrate(self, task, rng):
            return [render_call(ToolCall("ask", {})), "Answer: 42"]

    findings = examine(register(Live))
    assert findings.problems == []
    assert findings.notes == ["not called, being live: ask", "a demonstration was not played, for it calls ask"]
    assert calls == []


def test_a_tool_that_hangs_is_waited_for_once(register, monkeypatch):
    monkeypatch.setattr("orchestra_envs.conformance.CALL_TIMEOUT_S", 0.4)
    calls = []

    @tool
    async def hang() -> str:
        """Waits."""
        calls.append(1)
        await asyncio.sleep(30)
        return ""

    class Hanging(Sound):
        tools = (
            hang,
            lookup,
        )

    start_s = time.monotonic()
    findings = examine(register(Hanging))
    assert time.monotonic() - start_s < 10
    assert findings.problems == []
    assert calls == [1]
    (note,) = findings.notes
    assert note.startswith("hang was called once only, for that took 0.")


count = itertools.count()


@tool(clock="measured")
def stopwatch() -> str:
    """Never the same."""
    return str(next(count))


@tool
def luck(context: CallContext) -> str:
    """Of the process, not of the seed."""
    return str(next(count))


class Measured(Sound):
    tools = (
        stopwatch,
        lookup,
    )


class Lucky(Sound):
    tools = (luck,)


def test_tools_by_the_wall_clock_are_not_compared(register):
    findings = examine(register(Measured))
    assert findings.problems == []
    assert findings.notes == ["called by no comparison of equal seeds, for their clock is measured: stopwatch"]


def test_episodes_of_nondeterministic_environments_are_not_compared(register):
    assert any("differ after a call of luck" in problem for problem in check(register(Lucky)))
    gym.registry.pop("conformance_test/Lucky-v0")
    findings = examine(register(Lucky, nondeterministic=True))
    assert findings.problems == []
    assert findings.notes == [
        "registered as nondeterministic: only the tasks of equal seeds were compared, not their episodes"
    ]


def test_tasks_of_nondeterministic_environments_are_compared(register):
    class Drifting(Sound):
        def sample_task(self, rng, options):
            return Task("What?", id=str(next(count)))

    problems = check(register(Drifting, nondeterministic=True))
    assert "reset: two instances with equal seeds differ" in problems


def test_a_tool_that_takes_any_argument_refuses_none(register):
    schema = {"type": "object", "properties": {}, "additionalProperties": True}

    class Open(Sound):
        tools = (Tool(name="open", description="Takes all.", parameters=schema, function=lambda **_: "ok"),)

    assert check(register(Open)) == []


# --- Plain Gymnasium environments ---


class Plain(gym.Env):
    observation_space = action_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return str(self.np_random.integers(1000)), {}

    def step(self, action):
        return "", float(len(action) % 2), True, False, {"outcome": 1.0}


class PlainLuck(Plain):
    def step(self, action):
        return str(next(count)), 0.0, True, False, {}


class Grid(Plain):
    observation_space, action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 1, 0.0, True, False, {}


NOTE = "a plain Gymnasium environment: checked by Gymnasium's rules"


def test_a_plain_environment_is_checked_by_gymnasiums_rules(register):
    assert examine(register(Plain)) == Findings([], [NOTE])


def test_what_is_wrong_with_plain_environments(register):
    findings = examine(register(PlainLuck))
    assert any("differ" in problem or "deterministic" in problem for problem in findings.problems)
    assert findings.notes == [NOTE]
    findings = examine(register(Grid))
    assert findings.problems == [
        "observation_space is Discrete(4), no text: orchestra_envs.UnicodeText() takes every text",
        "action_space is Discrete(2), no text: orchestra_envs.UnicodeText() takes every text",
    ]
