"""Experiments from their YAML to the page: a tiny set of our own, and the ones that are shipped (read, not run)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from orchestra_jax.cli.main import main
from orchestra_jax.config import ConfigError
from orchestra_jax.experiments import conduct
from orchestra_jax.experiments.page import verdict, wish
from orchestra_jax.experiments.plan import Claim, evaluation_config, experiment_files, read_experiment
from orchestra_jax.experiments.runs import make_run, read_runs, with_starts
from orchestra_jax.rollout.policy import load_policy, save_policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import CONFIG, TASKS, write_config

SHIPPED = Path(__file__).parents[2] / "configs" / "experiments"

SHAPE = CONFIG["model"]["overrides"]
RUNS = {
    "base": "base.yaml",
    "runs": {
        "begin": {"title": "a warm start"},
        "dear": {"title": "cost weighs nothing", "start": "begin", "set": {"env.kwargs.preference": {"outcome": 1.0}}},
    },
}
EXPERIMENT = {
    "title": "(x) A small one",
    "question": "Does it run?",
    "reading": "It says nothing.",
    "runs": ["dear"],
    "policies": ["oracle"],
    "suites": {"sums": {"env": {"id": "orchestra/Market-v0", "kwargs": {**TASKS, "split": "test"}}, "num_tasks": 6}},
    "breakdowns": ["task_type"],
    "claims": [["sums", "accuracy", "oracle", ">", "dear:greedy"], ["sums", "cost_usd", "random", "<", "oracle"]],
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    write_config(folder, "base", train={"steps": 2, "episodes_every": 2}, sft={"num_tasks": 64}, eval=None)
    (folder / "runs.yaml").write_text(yaml.safe_dump(RUNS))
    (folder / "small.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return folder


def pretend_to_train(run):
    """In place of minutes of training: fresh weights, and a line of metrics."""
    model = run.config.model.model_copy(update={"path": None, "preset": "market-tiny", "overrides": SHAPE})
    policy = load_policy(model, run.config.text, seed=len(run.name))
    run.folder.mkdir(parents=True)
    save_policy(run.policy, policy, policy.params)
    row = {"phase": "train", "outcome/accuracy": 0.5, "cost/mean_usd": 0.01, "time/rollout_s": 30.0}
    (run.folder / "metrics.jsonl").write_text(json.dumps(row if run.start else {"time/update_s": 6.0}) + "\n")


def test_one_command_from_nothing_to_the_page(folder, tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(conduct, "make_run", lambda run: (made.append(run.name), pretend_to_train(run)))
    out, page = tmp_path / "out", tmp_path / "page.md"
    words = ["experiments", "small", "--configs", str(folder), "--out", str(out), "--page", str(page)]
    assert main(words) == 0, capsys.readouterr().err
    summary = json.loads((out / "seed-0/eval/small/summary.json").read_text())
    assert set(summary["suites"]["sums"]["policies"]) == {"dear", "dear:greedy", "oracle", "random"}
    text = page.read_text()
    for words_of_the_page in (
        "These are simulations",
        "| (x) | sums | accuracy of `oracle` > `dear:greedy` |",
        "Suite `sums`",
        "| `begin` | a warm start | fresh weights | 0.1 min |",
        "| `dear` | cost weighs nothing | begin | 50 to 50, 1.00 to 1.00, 0.5 |",
        "by the type of task",
        "| arithmetic | ",
        "No prompted model was run",
    ):
        assert words_of_the_page in text
    assert str(tmp_path) not in text.replace(f"--page {page}", "")
    # Once more: nothing is trained or played again.
    monkeypatch.setattr("orchestra_jax.eval.evaluate.build_rollout", None)
    assert main(words) == 0
    assert page.read_text() == text
    assert made == ["begin", "dear"]


def test_a_finished_run_is_left_alone_and_others_begin_as_they_should(folder, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("orchestra_jax.train.run.sft", lambda config: done.append("sft"))
    monkeypatch.setattr("orchestra_jax.train.run.train", lambda config: done.append("train"))
    runs = read_runs(folder, tmp_path / "runs")
    for run in runs.values():
        make_run(run)
    assert done == ["sft", "train"]
    for run in runs.values():
        run.policy.mkdir(parents=True)
        make_run(run)
    assert done == ["sft", "train"]


def test_a_page_of_what_there_is(folder, tmp_path):
    page = tmp_path / "page.md"
    words = ["experiments", "--configs", str(folder), "--out", str(tmp_path / "none"), "--page-only"]
    assert main([*words, "--page", str(page), "--seeds", "0", "1"]) == 0
    text = page.read_text()
    assert "**Not run.**" in text
    assert "| seed 0 | seed 1 |" in text
    assert text.count("**not run**") == 2 * 2 + 2 * 2  # two claims and two runs, of two seeds
    assert main(words) == 2


def test_runs_differ_in_what_is_set_and_share_their_start(folder, tmp_path):
    runs = read_runs(folder, tmp_path / "runs", ["seed=7"])
    begin, dear = runs["begin"].config, runs["dear"].config
    assert (begin.seed, dear.seed) == (7, 7)
    assert dear.model.path == str(tmp_path / "runs" / "begin" / "warm_start")
    assert (dear.sft, dear.env.kwargs["preference"]) == (None, {"outcome": 1.0})
    assert [run.name for run in with_starts(["dear"], runs)] == ["begin", "dear"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ["nobody"]}, "no run is called 'nobody'; there are begin, dear"),
        ({"question": None}, "question must be a text"),
        ({"suites": None}, "`suites` must be a mapping"),
        ({"breakdowns": ["mood"]}, "'mood' is none of task_type, wish"),
        ({"claims": [["sums", "accuracy", "a", ">"]]}, "expected .suite, metric"),
        ({"claims": [["sums", "speed", "oracle", ">", "random"]]}, "'speed' is none of"),
        ({"claims": [["sums", "accuracy", "oracle", ">", "begin"]]}, "'begin' is none of the policies"),
        ({"notes": "?"}, "unknown key 'notes'"),
    ],
)
def test_mistakes_in_an_experiment(folder, tmp_path, changes, message):
    (folder / "small.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    runs = read_runs(folder, tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_experiment(folder / "small.yaml", runs, evaluation_config(folder, 0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"base": "base.yaml", "runs": {"a": {"start": "b"}}}, "'b' is no warm start"),
        ({"base": "base.yaml", "runs": {"a": {"set": {"train.step": 1}}}}, "did you mean"),
        ({"base": "none.yaml", "runs": {"a": {}}}, "does not exist"),
        ({"runs": {"a": {}}}, "expected `base: FILE`"),
    ],
)
def test_mistakes_in_the_runs(folder, tmp_path, content, message):
    (folder / "runs.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        read_runs(folder, tmp_path)


def test_an_unknown_name(folder, capsys):
    assert main(["experiments", "big", "--configs", str(folder)]) == 2
    assert "big: no such experiment" in capsys.readouterr().err


def test_the_shipped_experiments_can_be_read_and_cover_the_paper(tmp_path):
    runs, config = read_runs(SHIPPED, tmp_path), evaluation_config(SHIPPED, 0)
    experiments = [read_experiment(file, runs, config) for file in experiment_files(SHIPPED)]
    assert [experiment.title[:3] for experiment in experiments] == ["(a)", "(b)", "(c)", "(d)", "(e)", "(f)", "(g)"]
    used = {run.name for experiment in experiments for run in with_starts(experiment.runs, runs)}
    assert used == set(runs)
    assert all(experiment.claims for experiment in experiments)


def comparison(difference, p_holm):
    entry = {"difference": difference, "ci95": [difference - 0.1, difference + 0.1], "p": 0.0, "p_holm": p_holm}
    return [{"a": "x", "b": "y", "accuracy": entry, "cost_usd": None}]


def test_verdicts():
    more, less = Claim("s", "accuracy", "x", ">", "y"), Claim("s", "accuracy", "y", ">", "x")
    assert verdict(more, comparison(0.2, 0.01)) == ("holds", "+20.0 points (+10.0 to +30.0)")
    assert verdict(less, comparison(0.2, 0.01)) == ("refuted", "-20.0 points (-30.0 to -10.0)")
    assert verdict(more, comparison(0.2, 0.2))[0] == "open"
    assert verdict(Claim("s", "cost_usd", "x", "<", "y"), comparison(0.2, 0.01)) == ("open", "not compared")


def test_wishes_in_words():
    assert wish({"outcome": 1.0, "cost": 0.0, "latency": 0.0, "gpt-5": 0.0}) == "only right"
    assert wish({"outcome": 1.0, "cost": 0.5, "latency": 0.5}) == "cheap and fast"
    assert wish({"outcome": 1.0, "cost": 0.25, "latency": 0.0, "gpt-5": 1.0}) == "a tool"
    assert wish({"outcome": 1.0, "cost": 0.0, "latency": 0.0, "gpt-5": 1.0, "search": 1.0}) == "2 tools"
