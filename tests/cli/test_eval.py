"""`orchestra eval`: any policies on the same held-out tasks; mistakes are found before the first evaluation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from orchestra_jax.cli.main import main
from orchestra_jax.config import load_config
from orchestra_jax.eval.store import EvalStore
from orchestra_jax.models.decoder import init_params
from orchestra_jax.rollout.policy import load_policy, save_policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """The tiny config; beside it two policies with other fresh weights, the second in a run folder."""
    folder = tmp_path_factory.mktemp("eval")
    file = write_config(folder, env={"eval_kwargs": {"split": "test"}}, eval={"modes": ["sample", "greedy"]})
    run = load_config(file)
    policy = load_policy(run.model, run.text, seed=0)
    for seed, target in ((1, folder / "first"), (2, folder / "finished" / "model")):
        target.parent.mkdir(exist_ok=True)
        save_policy(target, replace(policy), init_params(policy.config, jax.random.key(seed)))
    (folder / "finished" / "config.yaml").write_text(file.read_text())
    return file


@pytest.fixture
def evaluate(config, tmp_path, capsys):
    def evaluate(*arguments: str) -> tuple[dict, str]:
        out = tmp_path / "out.json"
        assert main(["eval", str(config), *arguments, "--json", str(out)]) == 0, capsys.readouterr().err
        return json.loads(out.read_text()), capsys.readouterr().out

    return evaluate


@pytest.fixture
def mistake(config, capsys):
    """Runs `orchestra eval` that must fail; the one line on standard error."""

    def mistake(*arguments: str) -> str:
        assert main(["eval", str(config), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("orchestra: ")
        return line

    return mistake


def test_policies_of_every_kind_in_one_table(evaluate, config):
    folder = config.parent
    summary, table = evaluate(
        "--policy", str(folder / "first"), "--policy", f"mine={folder / 'finished'}", "--policy", "always:gpt-5-mini"
    )
    names = {"first", "first:greedy", "mine", "mine:greedy", "always:gpt-5-mini", "random"}
    keys = {"env_id", "seed", "eval_seed", "trials", "reference", "policies", "comparisons"}
    assert set(summary) == keys
    assert len(summary["comparisons"]) == len(names) * (len(names) - 1) // 2
    assert set(summary["policies"]) == names
    for name, entry in summary["policies"].items():
        assert name in table
        assert entry["num_episodes"] == 6
        for key in ("accuracy", "cost_usd", "latency_s", "preference"):
            low, high = entry["ci95"][key]
            assert low <= entry[key] <= high
    assert summary["policies"]["always:gpt-5-mini"]["cost_usd"] > 0


def test_without_policies_the_configs_model_and_its_baselines(evaluate):
    summary, _ = evaluate("eval.modes=[greedy]")
    assert set(summary["policies"]) == {"market-tiny:greedy", "always:calculator", "random"}


def test_the_result_depends_on_the_policy_and_not_on_its_neighbours(evaluate, config):
    arguments = ["--policy", f"a={config.parent / 'first'}"]
    alone = evaluate(*arguments)[0]["policies"]
    both = evaluate("--policy", "oracle", *arguments, "--policy", str(config.parent / "finished"))[0]["policies"]
    assert {name: both[name] for name in alone} == alone


def test_preference_scores_use_the_weights_of_the_task(evaluate):
    """The reference against itself scores its outcome's weight, and cents and minutes by their own weights."""
    scripted = ["--policy", "always:calculator", "--policy", "oracle"]
    for weights in ({"outcome": 1, "cost": 0, "latency": 0}, {"outcome": 0.25, "cost": 0, "latency": 0}):
        summary, _ = evaluate(f"env.kwargs.preference={json.dumps(weights)}", *scripted)
        entry = summary["policies"]["oracle"]
        assert entry["accuracy"] == 1.0
        assert entry["preference"] == pytest.approx(weights["outcome"])


def test_held_out_tasks_are_those_of_eval_kwargs(evaluate):
    test, _ = evaluate("--policy", "random", "eval.num_tasks=32")
    train, _ = evaluate("--policy", "random", "eval.num_tasks=32", "env.eval_kwargs.split=train")
    assert test["policies"] != train["policies"]


def test_a_policy_without_tokenizer_uses_the_configs(evaluate, config, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(config.parent / "first", bare)
    (bare / "tokenizer.json").unlink()
    with_own = evaluate("--policy", f"x={config.parent / 'first'}")
    assert evaluate("--policy", f"x={bare}") == with_own


def test_a_policy_uses_its_own_tokenizer(mistake, config, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(config.parent / "first", other)
    (other / "tokenizer.json").write_text("{")
    assert str(other / "tokenizer.json") in mistake("--policy", str(other))


def test_names_that_cannot_be(mistake, config):
    first = config.parent / "first"
    assert "no such folder" in mistake("--policy", "nothing")
    assert "no such folder" in mistake("--policy", f"x={first}x")
    assert "'random' cannot be its name" in mistake("--policy", f"random={first}")
    assert "'a:greedy' cannot be its name" in mistake("--policy", f"a:greedy={first}")
    assert "'' cannot be its name" in mistake("--policy", f"={first}")
    assert "two policies are called 'first'" in mistake("--policy", str(first), "--policy", f"{first}/")


def test_policies_that_do_not_fit(mistake, config, tmp_path):
    assert "always:gpt-9: no such tool" in mistake("--policy", "always:gpt-9")
    assert "config.json" in mistake("--policy", str(tmp_path))
    (tmp_path / "config.yaml").write_text("a run that has not finished")
    assert "has not finished" in mistake("--policy", str(tmp_path))
    broken = tmp_path / "broken"
    shutil.copytree(config.parent / "first", broken)
    (broken / "model.safetensors").unlink()
    # The good one comes first: nothing may be evaluated before the broken one is found.
    assert "safetensors" in mistake("--policy", str(config.parent / "first"), "--policy", str(broken))
    assert "prompt" in mistake("rollout.max_tokens=48", "train.row_tokens=64")
    assert "max_position_embeddings" in mistake("rollout.max_tokens=2000", "train.row_tokens=2000")


def test_a_result_file_that_cannot_be_written_is_found_first(mistake, tmp_path):
    assert str(tmp_path) in mistake("--policy", "random", "--json", str(tmp_path))
    assert "No such file" in mistake("--policy", "random", "--json", str(tmp_path / "none" / "x.json"))
    mistake("--policy", "always:gpt-9", "--json", str(tmp_path / "x.json"))
    assert not (tmp_path / "x.json").exists()


def test_suites_and_trials(evaluate, config, tmp_path):
    """Two suites in one JSON: rows SUITE/POLICY, each suite with its own comparisons; episodes of two trials."""
    env = {"id": "orchestra/Market-v0", "kwargs": {"types": ["arithmetic"], "max_turns": 2, "tools": ["calculator"]}}
    suites = {"sums": {"env": env, "num_tasks": 5}, "more": {"env": env, "num_tasks": 3, "seed": 7}}
    (tmp_path / "suites.yaml").write_text(json.dumps({"suites": suites}))
    policy = f"first={config.parent / 'first'}"
    summary, table = evaluate("--suite", str(tmp_path / "suites.yaml"), "--policy", policy, "--trials", "2")
    names = {"first", "first:greedy", "random"}
    assert set(summary["policies"]) == {f"{suite}/{name}" for suite in suites for name in names}
    assert summary["trials"] == 2
    for suite, num_tasks in (("sums", 5), ("more", 3)):
        part = summary["suites"][suite]
        assert set(part["policies"]) == names
        assert len(part["comparisons"]) == 3
        entry = part["policies"]["random"]
        assert (entry["num_tasks"], entry["num_episodes"]) == (num_tasks, 2 * num_tasks)
        assert entry["pass_hat_k"] == [1.0, 1.0]  # the only tool is always right
        assert suite in table
    assert "pass^k" in table


def test_an_interrupted_evaluation_goes_on_to_the_same_numbers(evaluate, config, tmp_path, monkeypatch, capsys):
    policy = ["--policy", f"x={config.parent / 'first'}", "--policy", "always:gpt-5-mini", "--trials", "2"]
    whole, _ = evaluate(*policy)
    out = tmp_path / "out"
    kept = []

    def append(store, suite, label, record):
        if len(kept) == 17:  # in the second of the model's two modes
            os.kill(os.getpid(), signal.SIGTERM)
        kept.append((label, record["number"], record["trial"]))
        keep(store, suite, label, record)

    keep = EvalStore.append
    monkeypatch.setattr(EvalStore, "append", append)
    assert main(["eval", str(config), *policy, "--out", str(out)]) == 130
    assert f"what was finished is kept in {out}" in capsys.readouterr().err
    monkeypatch.setattr(EvalStore, "append", keep)
    assert 17 < len(kept) < 24
    resumed, _ = evaluate(*policy, "--out", str(out))
    assert resumed == whole
    assert json.loads((out / "summary.json").read_text()) == whole
    lines = [line for file in out.glob("episodes/*/*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == 4 * 6 * 2  # nothing twice
    # Once more: nothing is left to do, so no weights are loaded for it; other weights are another evaluation.
    monkeypatch.setattr("orchestra_jax.eval.evaluate.build_rollout", None)
    assert evaluate(*policy, "--out", str(out))[0] == whole
    other = [word.replace("first", "finished") for word in policy]
    assert main(["eval", str(config), *other, "--out", str(out)]) == 2
    assert "policies.x.weights was" in capsys.readouterr().err
    assert main(["eval", str(config), *policy, "--out", str(out), "rollout.temperature=0.5"]) == 2
    assert "suites.held_out.rollout.temperature was 1.0, is 0.5" in capsys.readouterr().err


def test_the_reference_of_preference_scores(evaluate, mistake):
    names = ["--policy", "always:gpt-5-mini", "--policy", "oracle"]
    summary, _ = evaluate(*names, "--reference", "oracle")
    assert set(summary["policies"]) == {"always:gpt-5-mini", "oracle"}
    assert summary["reference"] == "oracle"
    without, _ = evaluate(*names, "--reference", "none")
    assert without["policies"]["oracle"]["preference"] is None
    assert "none of the policies" in mistake(*names, "--reference", "gpt-5")


def test_what_must_be_said_without_a_config(config, capsys):
    def error(*arguments):
        assert main(["eval", *arguments]) == 2
        return capsys.readouterr().err

    assert "give a CONFIG, or --suite" in error("--policy", "random")
    assert "give --policy, or a CONFIG" in error("--suite", "market")
    assert "no such folder" in error("--suite", "market", "--policy", "nothing")
    assert "needs a CONFIG" in error("--suite", "market", "--policy", str(config.parent / "first"))
    assert "--trials must be at least 1" in error("--suite", "market", "--policy", "random", "--trials", "0")
    assert "a CONFIG must stand before it" in error("eval.num_tasks=3", "--policy", "random")


def test_an_environment_without_tools_has_no_preference_scores(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "plain_env.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out.json"
    overrides = ["env={id: 'plain_env:tests/Plain-v0'}", "eval.baselines=[]", "eval.modes=[greedy]"]
    assert main(["eval", str(config), *overrides, "--json", str(out)]) == 0
    (entry,) = json.loads(out.read_text())["policies"].values()
    assert entry["preference"] is None
    capsys.readouterr()
    assert main(["eval", str(config), overrides[0], "--policy", "random"]) == 2
    assert "tells no tools" in capsys.readouterr().err


def test_failed_judging_does_not_look_like_accuracy(config, tmp_path, monkeypatch, capsys):
    """Right answers need no judge, and wrong ones get no verdict: what is left over is all right."""
    (tmp_path / "quiz_env.py").write_text(QUIZ)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out.json"
    overrides = [
        "env={id: 'quiz_env:tests/Quiz-v0'}",
        "eval.num_tasks=16",
        "--policy",
        "always:two",
        "--policy",
        "random",
    ]
    assert main(["eval", str(config), *overrides, "--json", str(out)]) == 0
    policies = json.loads(out.read_text())["policies"]
    assert (policies["always:two"]["accuracy"], policies["always:two"]["num_infra_errors"]) == (None, 16)
    assert policies["random"]["num_episodes"] + policies["random"]["num_infra_errors"] == 16
    assert 0 < policies["random"]["num_infra_errors"] < 16
    printed = capsys.readouterr()
    assert "WARNING: always:two: accuracy is not known, it would count none of 16 episodes" in printed.err
    assert "WARNING: random: accuracy " in printed.err
    assert "0 (of 16)" in printed.out


def test_what_the_judge_did_is_in_the_summary(config, tmp_path, monkeypatch, capsys):
    """Nobody listens: every answer that needs the judge is dropped, and the judge's account says why."""
    (tmp_path / "quiz_tools.py").write_text(QUIZ.replace("tests/Quiz-v0", "tests/QuizTools-v0"))
    monkeypatch.syspath_prepend(tmp_path)
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(f'{{"question": "Who is {n}?", "answer": "Ada"}}\n' for n in range(8)))
    judge = {"model": "away", "base_url": "http://127.0.0.1:9/v1", "api_key_env": None, "retry": {"max_attempts": 1}}
    kwargs = {"path": str(questions), "judge": judge, "tools": [{"kind": "function", "function": "quiz_tools:one"}]}
    env = json.dumps({"id": "orchestra/QA-v0", "kwargs": kwargs})
    out = tmp_path / "out.json"
    for _ in range(2):  # the second counts its own alone
        assert main(["eval", str(config), f"env={env}", "--policy", "random", "--json", str(out)]) == 0
        (account,) = json.loads(out.read_text())["judges"]
        assert (account["model"], account["cost_usd"], account["cost_known"]) == ("away", None, False)
        assert account["num_failures"] == sum(account["failures"].values()) == 6
        assert "WARNING: the judge away gave no verdict 6 times" in capsys.readouterr().err


def test_an_environment_with_an_empty_list_of_tools_has_no_reference(config, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "Who is it?", "answer": "Ada"}\n')
    env = json.dumps({"id": "orchestra/QA-v0", "kwargs": {"path": str(questions)}})
    out = tmp_path / "out.json"
    policy = str(config.parent / "first")
    assert main(["eval", str(config), f"env={env}", "eval.modes=[greedy]", "--policy", policy, "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["policies"]) == {"first:greedy"}


QUIZ = '''
import gymnasium as gym
from orchestra_envs import Task, ToolEnv, tool


@tool
def one() -> str:
    """One."""
    return "1"


@tool
def two() -> str:
    """Two."""
    return "2"


class Quiz(ToolEnv):
    tools = [one, two]

    def sample_task(self, rng, options):
        return Task("What is 1?", answer="1")

    def score(self, task, answer):
        if task.answer in answer:
            return 1.0
        raise RuntimeError("the judge is away")


gym.register("tests/Quiz-v0", Quiz)
'''

PLAIN = '''
import gymnasium as gym
from orchestra_envs import UnicodeText


class Plain(gym.Env):
    """A Gymnasium environment of text that is no ToolEnv: is the answer of even length?"""

    observation_space = action_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say something.", {"outcome": 0.0}

    def step(self, action):
        outcome = float(len(action) % 2 == 0)
        return "", outcome, True, False, {"outcome": outcome}


gym.register("tests/Plain-v0", Plain)
'''
