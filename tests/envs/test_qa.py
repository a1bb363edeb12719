"""`orchestra/QA-v0`: layouts of files, bad rows, splits, tools, judges, preferences and demonstrations."""

import csv
import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path

import orchestra_envs
import pytest
import yaml
from orchestra_envs import Price, tool
from orchestra_envs.baselines import make_policy, run_episode
from orchestra_envs.limits import Limiter
from orchestra_envs.parse import ToolCall, parse_turn, render_call
from orchestra_envs.qa import FIELDS, INSTRUCTIONS, SUFFIXES, QAEnv

sys.path.insert(0, str(Path(__file__).parent))
from servers.openai_server import Answer, OpenAIServer

PLAIN = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(50)]

# The columns of FRAMES as published (a TSV that pandas wrote) and of HLE; the rows are made up.
FRAMES_HEADER = [
    "",
    "Prompt",
    "Answer",
    *(f"wikipedia_link_{n}" for n in range(1, 11)),
    "wikipedia_link_11+",
    "reasoning_types",
    "wiki_links",
]
HLE_FIELDS = {
    "image": "",
    "image_preview": None,
    "author_name": "A. N. Author",
    "rationale": "Because.",
    "rationale_image": None,
    "raw_subject": "Geography",
    "category": "Other",
    "canary": "none",
}


@tool(price=Price(per_call_usd=0.01), latency_s=0.2)
def lookup(city: str) -> str:
    """Population of a city."""
    return {"Oslo": "709000"}.get(city, "unknown")


@tool
def python(code: str, seconds: int = 5) -> str:
    """Runs a program."""
    return f"ran {len(code)} characters"


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


TOOL_MODULE = '''
from orchestra_envs import tool


@tool
def lookup(city: str) -> str:
    """Finds it."""
    return city
'''


@pytest.fixture
def plain(tmp_path):
    return write_jsonl(tmp_path / "plain.jsonl", PLAIN)


def frames_rows():
    links = ["https://en.wikipedia.org/wiki/Oslo"] + [""] * 10
    rows = [
        ["0", 'Who wrote "The\nTower"?', "Ada Lovelace", *links, "Multiple constraints", "['https://a', 'https://b']"],
        ["1", "How many,\tin all?", "1,234", *links, "Numerical reasoning | Tabular reasoning", "['https://c']"],
        ["2", "Où est-ce\xa0?", "Zürich 東京", *links, "Temporal reasoning", "[]"],
    ]
    return rows


def write_table(path, header, rows, delimiter):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return str(path)


def tasks_of(env):
    """question -> task of every question of the split."""
    tasks = []
    for task_id in env.task_ids():
        env.reset(seed=0, options={"task_id": task_id})
        tasks.append(env.task)
    return {task.question: task for task in tasks}


def answer(env, text, task_id=None, seed=0):
    env.reset(seed=seed, options={} if task_id is None else {"task_id": task_id})
    return env.step(text)


# --- The environment ---


def test_an_episode(plain):
    env = QAEnv(path=plain, tools=[lookup])
    question, info = env.reset(seed=3)
    assert question.startswith("What is ")
    assert info["instructions"] == INSTRUCTIONS
    observation, reward, terminated, _, info = env.step(render_call(ToolCall("lookup", {"city": "Oslo"})))
    assert (observation, terminated, info["cost_usd"]) == ("709000", False, 0.01)
    right = env.task.answer[0]
    _, reward, terminated, _, info = env.step(f"I looked.\nAnswer: {right}.0")
    assert (reward, terminated, info["outcome"], info["end_reason"]) == (1.0, True, 1.0, "answered")
    assert answer(env, "Answer: -1")[1] == 0.0


def test_the_environments_checker_finds_nothing(plain, tmp_path, monkeypatch):
    (tmp_path / "checked_tools.py").write_text(TOOL_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    plain_tools = [{"kind": "function", "function": "checked_tools:lookup"}]
    assert orchestra_envs.check("orchestra/QA-v0", path=plain) == []
    assert orchestra_envs.check("orchestra/QA-v0", path=plain, tools=plain_tools) == []
    assert orchestra_envs.check("orchestra/QA-v0", path=plain, tools=plain_tools, preference="random") == []
    problems = orchestra_envs.check("orchestra/QA-v0", path=plain, tools=[lookup, python])
    assert [problem for problem in problems if "pickled" not in problem] == [], "Tool objects need not be picklable"


def test_equal_seeds_are_equal_tasks_and_groups_share_theirs(plain):
    one, other = QAEnv(path=plain), QAEnv(path=plain)
    for seed in range(20):
        reset = one.reset(seed=seed)
        assert reset == other.reset(seed=seed)
        assert reset == other.reset(seed=seed, options={"replica": 5})
    assert len({one.reset(seed=seed)[0] for seed in range(400)}) == len(PLAIN), "every question comes up"


def test_from_a_runs_yaml(tmp_path, monkeypatch, plain):
    config = """
    env:
      id: orchestra/QA-v0
      kwargs:
        path: plain.jsonl
        tools:
          - {kind: function, function: "yaml_tools:lookup", name: atlas, price: {per_call_usd: 0.5}}
        judge: {match: numeric, rel_tol: 0.01}
        preference: {outcome: 1, cost: 0.25, atlas: 0.5}
        max_turns: 3
    """
    (tmp_path / "yaml_tools.py").write_text(TOOL_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    section = yaml.safe_load(config)["env"]
    env = orchestra_envs.make(section["id"], **section["kwargs"])
    _, info = env.reset(seed=0)
    (spec,) = json.loads(info["tools_json"])
    assert (spec["function"]["name"], spec["price"]["per_call_usd"]) == ("atlas", 0.5)
    weights = json.loads(info["preference_json"])["weights"]
    assert weights == {"atlas": 0.5, "outcome": 1, "cost": 0.25, "latency": 0.0}
    assert env.step(render_call(ToolCall("atlas", {"city": "Oslo"})))[0] == "Oslo"
    assert env.unwrapped.max_turns == 3


def test_a_live_sandbox_from_plain_config(plain):
    env = orchestra_envs.make("orchestra/QA-v0", path=plain, tools=[{"kind": "python"}])
    env.reset(seed=0)
    assert "1764" in env.step(render_call(ToolCall("python", {"code": "print(42 ** 2)"})))[0]


def test_randomised_tools(plain):
    env = QAEnv(path=plain, tools=[lookup, python], randomize={"aliases": {"tools": ["*"]}})
    _, info = env.reset(seed=1)
    names = [spec["function"]["name"] for spec in json.loads(info["tools_json"])]
    called = set()
    for seed in range(30):
        for turn in run_episode(env, make_policy("demonstration"), seed, 0).messages:
            called |= {call.name for call in parse_turn(turn["content"]).calls}
    assert not called & {"lookup", "python"}, "demonstrations call tools by the names they have in the episode"
    assert names


# --- Layouts ---


def test_frames(tmp_path):
    path = write_table(tmp_path / "test.tsv", FRAMES_HEADER, frames_rows(), "\t")
    env = QAEnv(path=path)
    tasks = tasks_of(env)
    assert [task.answer for task in tasks.values()] == [("Ada Lovelace",), ("1,234",), ("Zürich 東京",)]
    first = tasks['Who wrote "The\nTower"?']
    assert first.metadata["fields"]["reasoning_types"] == "Multiple constraints"
    assert first.metadata["fields"]["wiki_links"] == "['https://a', 'https://b']"
    assert [task.metadata["line"] for task in tasks.values()] == [2, 4, 5], "a quoted question may hold line breaks"
    assert answer(env, "Answer: 1234", tasks["How many,\tin all?"].id)[1] == 1.0
    assert answer(env, "Answer: ZÜRICH 東京", tasks["Où est-ce\xa0?"].id)[1] == 1.0


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_tables(tmp_path, suffix, delimiter, mark):
    header = [f"{mark}question", "answer", "id"]
    rows = [["What?", "this, that", "a"], ['A "quoted"\r\none', "x", "b"]]
    env = QAEnv(path=write_table(tmp_path / f"q{suffix}", header, rows, delimiter))
    tasks = tasks_of(env)
    assert [(task.id, task.answer) for task in tasks.values()] == [("a", ("this, that",)), ("b", ("x",))]
    assert 'A "quoted"\r\none' in tasks


def test_hle(tmp_path):
    rows = [
        {"id": "h1", "question": "Which?\nA. Oslo\nB. Rome", "answer": "B", "answer_type": "multipleChoice"},
        {"id": "h2", "question": "How high?", "answer": "312 m", "answer_type": "exactMatch"},
        {"id": "h3", "question": "What is drawn?", "answer": "a cat", "answer_type": "exactMatch"},
    ]
    rows = [HLE_FIELDS | row for row in rows]
    rows[2]["image"] = "data:image/jpeg;base64,AAAA"
    env = QAEnv(path=write_jsonl(tmp_path / "hle.jsonl", rows))
    assert (env.num_tasks, env.num_image_rows, env.num_bad_rows) == (2, 1, 0)
    tasks = tasks_of(env)
    assert [task.id for task in tasks.values()] == ["h1", "h2"]
    assert next(iter(tasks.values())).metadata["fields"]["category"] == "Other"
    assert answer(env, "Answer: (b)", "h1")[1] == 1.0
    assert answer(env, "Answer: B) Rome", "h1")[1] == 1.0
    assert answer(env, "Answer: A", "h1")[1] == 0.0
    assert answer(env, "Answer: 312 metres", "h2")[1] == 1.0
    with pytest.raises(ValueError, match="no question 'h3'"):
        env.reset(options={"task_id": "h3"})


def test_a_file_of_images_alone_is_refused(tmp_path):
    rows = [{"question": "What?", "answer": "x", "image": {"bytes": "AA"}}]
    with pytest.raises(ValueError, match=r"no usable question .*1 with images"):
        QAEnv(path=write_jsonl(tmp_path / "q.jsonl", rows))


def test_gsm8k_and_several_right_answers(tmp_path):
    rows = [
        {"question": "How many?", "answer": "She has 3 + 4 = <<3+4=7>>7.\n#### 7"},
        {"question": "Who?", "answer": ["Ada Lovelace", "the Countess of Lovelace"]},
        {"question": "Is it so?", "answer": True},
    ]
    env = QAEnv(path=write_jsonl(tmp_path / "q.jsonl", rows))
    tasks = tasks_of(env)
    assert answer(env, "7.0", tasks["How many?"].id)[1] == 1.0
    assert answer(env, "Countess of Lovelace", tasks["Who?"].id)[1] == 1.0
    assert answer(env, "Yes.", tasks["Is it so?"].id)[1] == 1.0


def test_a_json_list(tmp_path):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([{"question": "What?", "answer": "this"}, {"question": "Who?", "answer": "she"}]))
    assert set(tasks_of(QAEnv(path=path))) == {"What?", "Who?"}


def test_other_names_of_fields(tmp_path):
    rows = [{"Frage": "Wer?", "Antwort": "Ada", "Nr": 7, "Typ": "multipleChoice", "question": "no", "answer": "no"}]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    env = QAEnv(path=path, fields={"question": "Frage", "answer": "Antwort", "id": "Nr"})
    env.reset(options={"task_id": "7"})
    assert (env.task.question, env.task.answer, env.task.id) == ("Wer?", ("Ada",), "7")
    assert set(FIELDS) == {"question", "answer", "id", "answer_type", "image"}


@pytest.mark.parametrize("name", ["Question", "prompt", "Problem", " query "])
def test_usual_names_of_fields_are_found(tmp_path, name):
    path = write_jsonl(tmp_path / "q.jsonl", [{name: "Who?", "Ground_Truth": "Ada"}])
    assert QAEnv(path=path).reset(seed=0)[0] == "Who?"


def test_blank_lines_and_marks_and_line_ends(tmp_path):
    path = tmp_path / "q.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"question": "A?", "answer": 1}\r\n\r\n   \n{"question": "B\xc3\xa9?", "answer": 2}')
    tasks = tasks_of(QAEnv(path=path))
    assert {question: task.metadata["line"] for question, task in tasks.items()} == {"A?": 1, "Bé?": 4}


# --- Bad rows ---


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b'{"question": "Q?", "answer": NaN}', "NaN is no JSON number"),
        (b'{"question": "Q?", "answer": 1e999}', "the answer is inf"),
        (b'{"question": "Q\xff?", "answer": 1}', "not UTF-8: byte 16"),
        (b'{"question": "Q\\ud800?", "answer": 1}', "not UTF-8"),
        (b'{"question": "Q?", "answer": "\\ud800"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "an object with fields, not list"),
        (b"null", "an object with fields, not NoneType"),
        (b"{}", "no field looks like the question"),
        (b'{"question": "Q?"}', "no field looks like the answer"),
        (b'{"answer": "A"}', "no field looks like the question"),
        (b'{"question": "", "answer": "A"}', "the question must be a text"),
        (b'{"question": "  ", "answer": "A"}', "the question must be a text"),
        (b'{"question": 3, "answer": "A"}', "the question must be a text"),
        (b'{"question": ["Q?"], "answer": "A"}', "the question must be a text"),
        (b'{"question": "Q?", "answer": null}', "the answer must be"),
        (b'{"question": "Q?", "answer": ""}', "the answer is empty"),
        (b'{"question": "Q?", "answer": {}}', "the answer must be"),
        (b'{"question": "Q?", "answer": []}', "the answer must be"),
        (b'{"question": "Q?", "answer": "A", "id": 1.5}', "the id must be"),
        (b'{"question": "Q?", "answer": "A", "id": ["x"]}', "the id must be"),
        (b'{"question": "Q?", "answer": "A", "id": "seen"}', "its id stands in line 1 already"),
    ],
)
def test_bad_rows_are_refused_by_line_or_left_out_and_counted(tmp_path, caplog, line, problem):
    path = tmp_path / "q.jsonl"
    good = [b'{"question": "First?", "answer": "A", "id": "seen"}', b'{"question": "Last?", "answer": "B", "id": "b"}']
    path.write_bytes(b"\n".join([good[0], line, good[1], line]))
    with pytest.raises(ValueError, match=r"q\.jsonl, line 2: .*on_bad_row='skip'") as caught:
        QAEnv(path=path)
    assert problem in str(caught.value)
    with caplog.at_level(logging.WARNING, "orchestra_envs"):
        env = QAEnv(path=path, on_bad_row="skip")
        QAEnv(path=path, on_bad_row="skip")
    assert (env.num_tasks, env.num_bad_rows) == (2, 2)
    assert set(tasks_of(env)) == {"First?", "Last?"}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "2" in warning
    assert "line 2" in warning


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("too,few", "2 fields, while the header has 3"),
        ("one,too,many,fields", "4 fields"),
        ('a,"b"c,d', "not a row of the table"),
        (",A,x", "the question must be a text"),
        ("Q?,,x", "the answer is empty"),
    ],
)
def test_bad_rows_of_tables(tmp_path, row, problem):
    path = tmp_path / "q.csv"
    path.write_text(f"question,answer,id\nFirst?,A,1\n{row}\nLast?,B,2\n")
    with pytest.raises(ValueError, match=r"q\.csv, line 3: ") as caught:
        QAEnv(path=path)
    assert problem in str(caught.value)
    env = QAEnv(path=path, on_bad_row="skip")
    assert set(tasks_of(env)) == {"First?", "Last?"}
    assert env.num_bad_rows == 1


def test_bytes_that_are_not_utf8_in_a_table(tmp_path):
    path = tmp_path / "q.csv"
    path.write_bytes(b"question,answer\nGood?,A\nBad\xff?,B\n")
    with pytest.raises(ValueError, match="line 3: it is not UTF-8"):
        QAEnv(path=path)


def test_a_quote_that_is_never_closed_is_no_question(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text('question,answer\nFirst?,A\n"never closed,B\nThird?,C\n')
    with pytest.raises(ValueError, match=r"q\.csv, line 3: not a row of the table"):
        QAEnv(path=path)


def test_a_huge_cell(tmp_path):
    path = write_table(
        tmp_path / "q.csv", ["question", "answer", "image"], [["Q?", "A", ""], ["P?", "A", "x" * 10**6]], ","
    )
    assert QAEnv(path=path).num_image_rows == 1


def test_questions_that_come_twice_without_ids_are_taken_once(tmp_path):
    rows = [{"question": "Q?", "answer": "A"}, {"question": "Q?", "answer": "B"}, {"question": "P?", "answer": "C"}]
    env = QAEnv(path=write_jsonl(tmp_path / "q.jsonl", rows))
    assert (env.num_tasks, env.num_repeated_rows) == (2, 1)
    assert tasks_of(env)["Q?"].answer == ("A",)


def test_the_numeric_judge_wants_numbers(tmp_path):
    path = write_jsonl(
        tmp_path / "q.jsonl", [{"question": "Q?", "answer": "12 km"}, {"question": "P?", "answer": "Oslo"}]
    )
    with pytest.raises(ValueError, match="line 2: judge 'numeric' cannot read the answer 'Oslo'"):
        QAEnv(path=path, judge="numeric")
    assert QAEnv(path=path, judge="numeric", on_bad_row="skip").num_tasks == 1
    assert QAEnv(path=path, judge="exact").num_tasks == 2


# --- Bad arguments ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": None}, "path must be"),
        ({"path": 3}, "path must be"),
        ({"path": ""}, "path must be"),
        ({"path": "no/such/file.jsonl"}, "path: cannot read .*no/such/file.jsonl"),
        ({"path": "questions.parquet"}, r"must end in one of \.jsonl"),
        ({"path": "."}, "must end in one of"),
        ({"split": "validation"}, "split: expected one of train, test"),
        ({"split": 1}, "split: expected"),
        ({"test_fraction": 1.5}, "test_fraction must be a number"),
        ({"test_fraction": True}, "test_fraction must be a number"),
        ({"test_fraction": math.nan}, "test_fraction must be a number"),
        ({"test_fraction": "0.1"}, "test_fraction must be a number"),
        ({"split": "test", "test_fraction": 0.0}, "no question for split 'test'"),
        ({"split": "train", "test_fraction": 1.0}, "no question for split 'train'"),
        ({"fields": ["question"]}, "fields must be a mapping"),
        ({"fields": {"qestion": "x"}}, "fields: expected one of question, answer"),
        ({"fields": {"question": 3}}, r"fields\['question'\] must be"),
        ({"fields": {"question": "nobody"}}, "line 1: no field looks like the question"),
        ({"on_bad_row": "ignore"}, "on_bad_row: expected"),
        ({"tools": "python"}, "tools must be a list"),
        ({"tools": [{"kind": "pyhton"}]}, r"tools\[0\].kind"),
        ({"tools": [lookup, lookup]}, "two tools are named 'lookup'"),
        ({"tools": [print]}, r"tools\[0\] must be a Tool"),
        ({"judge": "fuzzy"}, "judge: expected"),
        ({"judge": {"modle": "m"}}, "judge.modle"),
        ({"preference": "none"}, "preference: expected 'balanced'"),
        ({"preference": 3}, "preference: expected 'balanced'"),
        ({"preference": {"price": 1}}, "preference: expected one of outcome, cost, latency"),
        ({"preference": {"cost": 2}}, "weights"),
        ({"instructions": None}, "instructions must be a text"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turn": 3}, "max_turn"),
    ],
)
def test_bad_arguments(plain, arguments, message):
    with pytest.raises(ValueError, match=message):
        orchestra_envs.make("orchestra/QA-v0", **({"path": plain} | arguments))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_empty_files(tmp_path, suffix):
    path = tmp_path / f"empty{suffix}"
    path.write_text("[]" if suffix == ".json" else "")
    with pytest.raises(ValueError, match="no usable question"):
        QAEnv(path=path)


def test_files_that_are_no_files(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        QAEnv(path=tmp_path / "folder.jsonl")
    (tmp_path / "bad.json").write_text('[{"question": "Q?",\n "answer": }]')
    with pytest.raises(ValueError, match=r"bad\.json:2: not JSON"):
        QAEnv(path=tmp_path / "bad.json")
    (tmp_path / "object.json").write_text('{"question": "Q?", "answer": "A"}')
    with pytest.raises(ValueError, match="must hold a list"):
        QAEnv(path=tmp_path / "object.json")
    (tmp_path / "header.csv").write_text("question,question,answer\na,b,c\n")
    with pytest.raises(ValueError, match="'question' twice"):
        QAEnv(path=tmp_path / "header.csv")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(plain):
    os.chmod(plain, 0)
    with pytest.raises(ValueError, match="cannot read"):
        QAEnv(path=plain)


@pytest.mark.parametrize("task_id", ["nobody", "", 3, None, ["x"]])
def test_unknown_task_ids(plain, task_id):
    with pytest.raises(ValueError, match="has no question"):
        QAEnv(path=plain).reset(options={"task_id": task_id})


def test_a_file_that_changed_is_told(plain):
    env = QAEnv(path=plain)
    env.reset(seed=0)
    write_jsonl(Path(plain), [*PLAIN[:3], {"question": "New?", "answer": "A"}])
    with pytest.raises(RuntimeError, match="has changed"):
        env.reset(seed=0)
    assert QAEnv(path=plain).num_tasks == 4


# --- Splits ---


def test_splits_are_disjoint_complete_and_stable(tmp_path):
    rows = [{"question": f"Q{n}?", "answer": n, "id": f"row {n}"} for n in range(2000)]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    train, test = (QAEnv(path=path, split=split, test_fraction=0.2) for split in ("train", "test"))
    in_train, in_test = set(train.task_ids()), set(test.task_ids())
    assert not in_train & in_test
    assert len(in_train | in_test) == 2000 == train.num_tasks + test.num_tasks
    assert 320 < len(in_test) < 480
    assert {train.reset(seed=seed)[1]["task_id"] for seed in range(300)} <= in_train
    shuffled = write_jsonl(tmp_path / "r.jsonl", [*reversed(rows), {"question": "More?", "answer": 1, "id": "more"}])
    assert set(QAEnv(path=shuffled, split="test", test_fraction=0.2).task_ids()) - {"more"} == in_test
    smaller = set(QAEnv(path=path, split="test", test_fraction=0.1).task_ids())
    assert smaller < in_test, "a smaller test split is part of a larger one"
    assert train.reset(options={"task_id": min(in_test)})[1]["task_id"] == min(in_test)


def test_the_split_is_the_same_on_every_machine(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": f"Q{n}?", "answer": n, "id": str(n)} for n in range(30)])
    assert list(QAEnv(path=path, split="test").task_ids()) == ["18", "29"]


def test_ids_follow_the_question_and_not_its_place(tmp_path):
    ids = [QAEnv(path=write_jsonl(tmp_path / f"{n}.jsonl", PLAIN[n:])).task_ids() for n in (0, 10)]
    assert list(ids[0])[10:] == list(ids[1])


# --- Many environments, large files ---


def test_environments_of_a_process_share_the_index(plain):
    envs: list[QAEnv] = []
    threads = [threading.Thread(target=lambda: envs.append(QAEnv(path=plain))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len({id(env._file) for env in envs}) == 1
    assert envs[0].judge is envs[1].judge


def test_a_large_file_is_not_held_in_memory(tmp_path):
    rows = [{"question": f"What is {n}? " + "x" * 2000, "answer": n} for n in range(20_000)]
    env = QAEnv(path=write_jsonl(tmp_path / "q.jsonl", rows))
    held = sum(part.nbytes for part in (env._file.offsets, env._file.lines, env._file.hashes, env._file.order))
    assert held == 24 * len(rows)
    assert env._file.rows is None
    start = time.perf_counter()
    for seed in range(500):
        env.reset(seed=seed)
    assert time.perf_counter() - start < 2.0


# --- Preferences ---


def test_preferences(plain):
    def preferences(**arguments):
        env = QAEnv(path=plain, tools=[lookup, python], **arguments)
        return [json.loads(env.reset(seed=seed)[1]["preference_json"]) for seed in range(100)]

    assert all(told == {"weights": told["weights"], "text": ""} for told in preferences())
    assert preferences()[0]["weights"] == {"lookup": 0, "python": 0, "outcome": 1.0, "cost": 0.5, "latency": 0.25}
    drawn = preferences(preference="random", split="train")
    assert len({told["text"] for told in drawn}) > 10
    assert len({tuple(told["weights"].values()) for told in drawn}) > 5
    held_out = preferences(preference="random", split="test", test_fraction=0.5)
    assert not {told["text"] for told in drawn} & {told["text"] for told in held_out}
    env = QAEnv(path=plain, tools=[lookup], preference="random")
    observation, info = env.reset(seed=1)
    assert observation.endswith(json.loads(info["preference_json"])["text"])


@pytest.mark.parametrize("tools", [[], [lookup]], ids=["none", "one"])
def test_random_preferences_need_no_certain_number_of_tools(plain, tools):
    env = QAEnv(path=plain, tools=tools, preference="random")
    for seed in range(30):
        env.reset(seed=seed)


# --- Demonstrations ---


def test_demonstrations_are_right_and_half_of_them_call_a_tool(plain):
    env = QAEnv(path=plain, tools=[lookup, python])
    episodes = [run_episode(env, make_policy("demonstration"), seed, 0) for seed in range(100)]
    outcomes = []
    calls = []
    for episode in episodes:
        turns = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        assert len(turns) in (1, 2)
        calls += [call.name for turn in turns for call in parse_turn(turn).calls]
        outcomes.append(episode.outcome)
    assert outcomes == [1.0] * 100
    assert 30 < len(calls) < 70
    assert set(calls) == {"lookup", "python"}


@pytest.mark.parametrize(
    "answer_field",
    ["two\nlines", "Answer: x", r"x \boxed{2} y", "a <answer> b", "3.5", "C", ["b", "c"], True],
    ids=["lines", "mark", "boxed", "tag", "number", "letter", "list", "bool"],
)
def test_demonstrations_say_any_answer_so_that_it_counts(tmp_path, answer_field):
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "Q?", "answer": answer_field}])
    env = QAEnv(path=path)
    env.reset(seed=0)
    (turn,) = env.demonstrate(env.task, env.np_random)
    assert env.step(turn)[1] == 1.0


SCHEMAS = {
    "none": {},
    "text": {"properties": {"q": {"type": "string", "maxLength": 5}}, "required": ["q"]},
    "number": {"properties": {"n": {"type": "number", "minimum": 3}}, "required": ["n"]},
    "choice": {"properties": {"c": {"enum": ["x", "y"]}}, "required": ["c"]},
    "reference": {
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
    },
    "list": {"properties": {"l": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}, "required": ["l"]},
    "either": {"properties": {"e": {"anyOf": [{"type": "null"}, {"type": "string"}]}}, "required": ["e"]},
    "recursive": {
        "properties": {"n": {"$ref": "#/$defs/N"}},
        "required": ["n"],
        "$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}},
    },
    "particular": {"properties": {"d": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}}, "required": ["d"]},
}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_demonstrated_calls_fit_the_schema(plain, kind):
    tools = [orchestra_envs.Tool("t", "A tool.", {"type": "object", **SCHEMAS[kind]}, lambda **arguments: "done")]
    env = QAEnv(path=plain, tools=tools)
    called = False
    for seed in range(10):
        episode = run_episode(env, make_policy("demonstration"), seed, 0)
        results = [message["content"] for message in episode.messages if message["role"] == "tool"]
        assert set(results) <= {"done"}
        called |= bool(results)
    assert called == (kind not in ("recursive", "particular"))


# --- A language model as the judge ---


def judge_spec(server, **more):
    spec = {"model": "grader", "base_url": server.base_url, "api_key_env": None, "price": {"per_call_usd": 0.25}}
    return {**spec, "retry": {"max_attempts": 1}, **more}


def verdict_for(right):
    """A judge that finds the candidates right whose text holds `right`."""

    def answer(request):
        system, user = (message["content"] for message in request["messages"])
        code = system.split("VERDICT ")[1].split(":")[0]
        given = user.split("candidate's answer\n")[1]
        return f"VERDICT {code}: {'CORRECT' if right in given else 'INCORRECT'}"

    return answer


def test_a_language_model_judges_what_is_in_doubt(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "Who wrote it?", "answer": "Ada Lovelace"}])
    with OpenAIServer(verdict_for("Countess")) as server:
        env = orchestra_envs.make("orchestra/QA-v0", path=path, judge=judge_spec(server), tools=[lookup]).unwrapped
        assert answer(env, "Answer: Ada Lovelace")[1] == 1.0
        assert not server.requests
        _, reward, terminated, _, info = answer(env, "Answer: the Countess")
        assert (reward, terminated, info["outcome"]) == (1.0, True, 1.0)
        assert answer(env, "Answer: Grace Hopper")[1] == 0.0
        assert len(server.requests) == 2
    assert (info["episode_cost_usd"], info["cost_usd"], info["episode_latency_s"]) == (0.0, 0.0, 0.0)
    assert (env.judge_usage.num_llm_calls, env.judge_usage.cost_usd) == (2, 0.5)


def test_a_failing_judge_drops_the_episode(tmp_path, caplog):
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "Who wrote it?", "answer": "Ada Lovelace"}])
    with OpenAIServer([Answer("down", status=503)]) as server, caplog.at_level(logging.CRITICAL):
        env = QAEnv(path=path, judge=judge_spec(server))
        _, _, terminated, _, info = answer(env, "Answer: the Countess")
        assert (terminated, info["drop"], info["end_reason"]) == (True, True, "infra_error")
        _, reward, _, _, info = answer(env, "Answer: Ada Lovelace")
        assert (reward, info["drop"]) == (1.0, False), "what needs no judge is scored all the same"


def test_many_episodes_are_judged_at_once(tmp_path):
    import asyncio

    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "Who wrote it?", "answer": "Ada Lovelace"}])
    slow = verdict_for("Countess")

    async def play(env, number):
        await env.areset(seed=number)
        return await env.astep(f"Answer: the Countess, {number}")

    async def play_all(envs):
        return await asyncio.gather(*(play(env, number) for number, env in enumerate(envs)))

    with OpenAIServer(lambda request: Answer(slow(request), delay_s=0.3)) as server:
        envs = [QAEnv(path=path, judge=judge_spec(server, max_concurrency=32)) for _ in range(32)]
        QAEnv(path=path, judge=judge_spec(server, max_concurrency=32)).reset(seed=0)
        start = time.perf_counter()
        steps = asyncio.run(play_all(envs))
        assert time.perf_counter() - start < 4.0, "one after the other they would take 10 s"
    assert all(reward == 1.0 for _, reward, *_ in steps)


def test_tools_share_their_limits_over_environments(plain):
    spec = {"kind": "expert", "name": "big", "model": "m", "base_url": "http://127.0.0.1:9/v1", "price": {}}
    envs = [QAEnv(path=plain, tools=[spec | {"max_concurrency": 2}]) for _ in range(3)]
    assert isinstance(envs[0].tools[0].limiter, Limiter)
    assert len({id(env.tools[0].limiter) for env in envs}) == 1
