"""Suites: from names and files to tasks."""

import json

import pytest

from orchestra_jax.config import ConfigError, ModelSection, RunConfig, TextConfig
from orchestra_jax.eval.suites import own_suite, read_suites, suite_tasks

CONFIG = RunConfig(model=ModelSection(preset="market-tiny"), text=TextConfig(tokenizer="market"))


@pytest.fixture
def questions(tmp_path):
    """Seven questions in the layout of HLE, one of them with an image, and seven in that of FRAMES."""
    rows = [
        {"id": f"q{n}", "question": f"What is {n}?", "answer": str(n), "answer_type": "exactMatch"} for n in range(8)
    ]
    rows[7]["image"] = "data:image/png;base64,AAAA"
    (tmp_path / "hle.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    frames = "".join(f"{n}\tWho is {n}?\tperson {n}\n" for n in range(7))
    (tmp_path / "frames.tsv").write_text(f"\tPrompt\tAnswer\n{frames}")
    return tmp_path


def write(folder, **suites):
    file = folder / "suites.yaml"
    file.write_text(json.dumps({"suites": suites}))
    return str(file)


def qa(folder, name, **extra):
    return {"env": {"id": "orchestra/QA-v0", "kwargs": {"path": str(folder / name)}}, **extra}


@pytest.mark.parametrize("name", ["hle.jsonl", "frames.tsv"])
def test_all_questions_of_a_file_each_once(questions, name):
    (suite,) = read_suites([write(questions, quiz=qa(questions, name, num_tasks="all"))], CONFIG)
    tasks = suite_tasks(suite)
    assert [task.number for task in tasks] == list(range(7))
    assert len({task.task_id for task in tasks}) == len({task.seed for task in tasks}) == 7
    assert tasks == suite_tasks(suite)


def test_some_questions_of_a_file_are_distinct_and_depend_on_the_seed(questions):
    def chosen(seed):
        file = write(questions, quiz=qa(questions, "hle.jsonl", num_tasks=4, seed=seed))
        return [task.task_id for task in suite_tasks(read_suites([file], CONFIG)[0])]

    assert len(set(chosen(1))) == 4
    assert len({tuple(chosen(seed)) for seed in range(8)}) > 1
    too_many = write(questions, quiz=qa(questions, "hle.jsonl", num_tasks=9))
    with pytest.raises(ConfigError, match="quiz: num_tasks is 9, orchestra/QA-v0 has 7 tasks"):
        suite_tasks(read_suites([too_many], CONFIG)[0])


def test_generated_tasks_are_drawn_by_seed_and_have_no_all(tmp_path):
    env = {"id": "orchestra/Market-v0", "kwargs": {"split": "test"}}
    first, second = read_suites(
        [write(tmp_path, a={"env": env, "num_tasks": 5}, b={"env": env, "num_tasks": "all"})], CONFIG
    )
    seeds = [task.seed for task in suite_tasks(first)]
    assert len(seeds) == 5
    assert all(seed >= 2**30 for seed in seeds)
    assert [task.seed for task in suite_tasks(own_suite(CONFIG))][:5] == seeds  # the default seed of both
    with pytest.raises(ConfigError, match="lists no tasks"):
        suite_tasks(second)


def test_names_choose_among_files_and_what_is_built_in(tmp_path):
    file = write(tmp_path, mine={"env": {"id": "orchestra/Market-v0"}, "rollout": {"max_tokens": 900_000}})
    assert [s.name for s in read_suites([file], CONFIG)] == ["mine"]
    assert [s.name for s in read_suites([file, "service"], CONFIG)] == ["service"]
    (mine,) = read_suites([file, "mine"], CONFIG)
    assert mine.config.rollout.max_tokens == 900_000
    assert mine.config.rollout.max_turn_tokens == CONFIG.rollout.max_turn_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("suites: {}", "`suites` must be a mapping"),
        ("{a: 1}", "one key, `suites`"),
        ("suites: {a: {}}", "a: env: Field required"),
        ("suites: {a: {env: {id: x}, num_task: 3}}", "num_task: Extra inputs"),
        ("suites: {a: {env: {id: x}, num_tasks: 0}}", "num_tasks must be at least 1"),
        ("suites: {a/b: {env: {id: x}}}", "cannot be the name"),
        ("suites: {a: {env: {id: x}, rollout: {max_token: 3}}}", "suite a: max_token"),
        ("suites: [", "not valid YAML"),
    ],
)
def test_mistakes_in_a_file(tmp_path, content, message):
    (tmp_path / "s.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_suites([str(tmp_path / "s.yaml")], CONFIG)


def test_unknown_names(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing: no such suite \(market, service\)"):
        read_suites(["nothing"], CONFIG)
    with pytest.raises(ConfigError, match="No such file"):
        read_suites([str(tmp_path / "none.yaml")], CONFIG)
