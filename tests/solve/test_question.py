"""A question as an environment, and which tools it can be answered with."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest
from orchestra_envs.live.expert import expert_tool
from orchestra_envs.live.web_search import tavily
from orchestra_envs.qa import INSTRUCTIONS

from orchestra_jax.config import ConfigError, load_config
from orchestra_jax.solve.question import KEY_VARIABLES, check_keys, question_env, tools_of_file, tools_of_run

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_config

MODULE = '''
import gymnasium as gym
from orchestra_envs import CallContext, Task, ToolEnv, tool


@tool
def lookup(city: str) -> str:
    """Population of a city."""
    return "709"


@tool
def oracle(context: CallContext) -> str:
    """Knows the answer of a task."""
    return context.task.answer


class Cities(ToolEnv):
    tools = (lookup,)

    def sample_task(self, rng, options):
        return Task("Where?", answer="there")

    def score(self, task, answer):
        return 1.0


class Oracles(Cities):
    tools = (lookup, oracle)


gym.register("solve_tests/Cities-v0", Cities)
gym.register("solve_tests/Oracles-v0", Oracles)
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "solve_test_cities.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def run_of(tmp_path):
    """The config of a run with some environment."""

    def run_of(env_id: str, **kwargs):
        return load_config(write_config(tmp_path, env={"id": env_id, "kwargs": kwargs}))

    return run_of


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    return file


def test_the_question_is_asked_with_the_preference_behind_it_and_nothing_is_scored():
    env = question_env("Who?", [], None, preference="Keep it cheap.", max_turns=3)
    for seed in (0, 7):
        observation, info = env.reset(seed=seed)
        assert observation == "Who?\n\nKeep it cheap."
        assert (info["tools_json"], info["instructions"]) == ("[]", "")
    *_, terminated, truncated, info = env.step("Ada.")
    assert (terminated, truncated, info["end_reason"], info["outcome"]) == (True, False, "answered", 0.0)
    assert env.max_turns == 3


def test_limits_and_instructions_are_the_runs_unless_given(run_of):
    qa = run_of("orchestra/QA-v0", path="gone.jsonl", max_turns=5, budget_usd=0.5, max_output_chars=77)
    env = question_env("Who?", [], qa, budget_usd=0.25, max_turns=None)
    assert (env.max_turns, env.budget_usd, env.max_output_chars) == (5, 0.25, 77)
    assert env.reset(seed=0)[1]["instructions"] == INSTRUCTIONS
    own = run_of("orchestra/QA-v0", instructions="Answer in French.")
    assert question_env("Who?", [], own).reset(seed=0)[1]["instructions"] == "Answer in French."
    other = run_of("orchestra/Market-v0", instructions="no argument of a market")
    assert question_env("Who?", [], other).reset(seed=0)[1]["instructions"] == ""


@pytest.mark.parametrize(
    ("question", "limits", "named"),
    [("", {}, "question"), ("Q", {"max_turns": 0}, "max_turns"), ("Q", {"budget_usd": -1.0}, "budget_usd")],
)
def test_a_question_that_cannot_be_asked(question, limits, named):
    with pytest.raises(ConfigError, match=named):
        question_env(question, [], None, **limits)


def test_tools_of_a_file(tmp_path):
    file = write(tmp_path, "- {kind: function, function: 'solve_test_cities:lookup', price: {per_call_usd: 0.01}}\n")
    (tool,) = tools_of_file(file)
    assert (tool.name, tool.price.per_call_usd) == ("lookup", 0.01)
    assert tools_of_file(write(tmp_path, "[]")) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- {kind: exprt, name: a}", r"tools.yaml\[0\].kind: no kind 'exprt'; did you mean 'expert'"),
        ("- {kind: function, function: 'solve_test_cities:looku'}", "there is no 'looku'"),
        ("kind: python", "must be a list of tools"),
        ("", "must be a list of tools"),
        ("- [", "is not valid YAML"),
        ("- {kind: expert, name: a, model: m, api_key: secret}", "no keys or passwords"),
        ("- {kind: local_search, index: nowhere.index}", "nowhere.index"),
        ("- {kind: mcp, command: [no-such-program-here]}", "no-such-program-here"),
    ],
)
def test_a_file_that_makes_no_tools(tmp_path, monkeypatch, text, named):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(ConfigError, match=named):
        tools_of_file(write(tmp_path, text))
    with pytest.raises(ConfigError, match="No such file"):
        tools_of_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("entry", "variable"),
    [
        ({"kind": "expert", "name": "big", "model": "gpt-5"}, "OPENAI_API_KEY"),
        ({"kind": "expert", "name": "big", "model": "gpt-5", "api_key_env": "MY_KEY"}, "MY_KEY"),
        ({"kind": "web_search"}, "TAVILY_API_KEY"),
    ],
)
def test_a_key_that_is_not_set_is_named_before_the_tool_is_made(tmp_path, monkeypatch, caplog, run_of, entry, variable):
    monkeypatch.setenv(variable, "  ")
    file = write(tmp_path, json.dumps([entry]))
    with pytest.raises(ConfigError, match=rf"tools.yaml\[0\]: the environment variable {variable} is not set"):
        tools_of_file(file)
    with pytest.raises(ConfigError, match=rf"env.kwargs.tools\[0\]: .*{variable}"):
        tools_of_run(run_of("orchestra/QA-v0", path="gone.jsonl", tools=[entry]))
    with pytest.raises(ConfigError, match=variable):
        check_keys({"tools": [entry]}, "env.kwargs.tools")
    assert not caplog.records
    monkeypatch.setenv(variable, "k")
    assert len(tools_of_file(file)) == 1
    check_keys({"tools": ["calculator"]}, "env.kwargs.tools")  # a market's tools are names


def test_keys_are_looked_for_where_the_tools_look_for_them():
    for kind, builder in (("expert", expert_tool), ("web_search", tavily)):
        assert inspect.signature(builder).parameters["api_key_env"].default == KEY_VARIABLES[kind]


def test_tools_of_a_runs_environment(run_of):
    entry = {"kind": "function", "function": "solve_test_cities:oracle"}
    (oracle,) = tools_of_run(run_of("orchestra/QA-v0", path="gone.jsonl", tools=[entry]))  # the file is not needed
    assert oracle.name == "oracle"
    (lookup,) = tools_of_run(run_of("solve_test_cities:solve_tests/Cities-v0"))
    assert lookup.name == "lookup"


@pytest.mark.parametrize(
    ("env_id", "why"),
    [
        ("orchestra/Market-v0", "makes its tools for each of its tasks"),
        ("orchestra/Service-v0", "makes its tools for each of its tasks"),
        ("solve_test_cities:solve_tests/Oracles-v0", r"has tools that read its tasks \(oracle\)"),
        ("CartPole-v1", "tells no tools"),
    ],
)
def test_tools_that_know_only_their_own_tasks_are_refused(run_of, env_id, why):
    with pytest.raises(ConfigError, match=f"{why}, so .* --tools FILE, or .* --task SEED"):
        tools_of_run(run_of(env_id))
