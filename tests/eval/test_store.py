"""The folder of an evaluation: what is kept, what a crash may cost, and what is refused."""

import json

import pytest

from orchestra_jax.config import ConfigError
from orchestra_jax.eval.store import EvalStore

SPEC = {"version": 1, "seed": 0, "suites": {"market": {"num_tasks": 4}}, "policies": {"random": {"scripted": "random"}}}


def record(number, trial=0, **extra):
    return {"number": number, "trial": trial, "outcome": 1.0, "end_reason": "answered", **extra}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "out"
    store = EvalStore(folder, SPEC)
    for number in range(3):
        store.append("market", "random", record(number))
    store.close()
    return folder


def lines_of(folder):
    return folder / "episodes" / "market" / "random.jsonl"


def test_what_was_kept_is_found_again(folder):
    store = EvalStore(folder, SPEC)
    assert store.finished("market", "random") == {(n, 0): record(n) for n in range(3)}
    assert store.finished("market", "always:gpt-5") == {}
    store.close()


def test_a_line_cut_by_a_crash_is_removed_and_the_next_one_is_whole(folder):
    whole = lines_of(folder).read_bytes()
    lines_of(folder).write_bytes(whole[:-9])
    store = EvalStore(folder, SPEC)
    assert set(store.finished("market", "random")) == {(0, 0), (1, 0)}
    store.append("market", "random", record(2))
    store.close()
    assert lines_of(folder).read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_told_with_its_number(folder):
    lines = lines_of(folder).read_text().splitlines(keepends=True)
    lines_of(folder).write_text(lines[0] + "{broken\n" + lines[2])
    store = EvalStore(folder, SPEC)
    with pytest.raises(ConfigError, match=r"random\.jsonl: line 2 is damaged"):
        store.finished("market", "random")
    store.close()


def test_dropped_episodes_are_tried_again_and_the_last_line_of_an_episode_counts(folder):
    store = EvalStore(folder, SPEC)
    store.append("market", "random", record(1, end_reason="infra_error"))
    store.append("market", "random", record(2, outcome=0.5))
    found = store.finished("market", "random")
    assert set(found) == {(0, 0), (2, 0)}
    assert found[2, 0]["outcome"] == 0.5
    store.close()


def test_another_evaluation_is_refused_with_what_differs(folder):
    other = {**SPEC, "seed": 1, "suites": {"market": {"num_tasks": 8}}}
    with pytest.raises(
        ConfigError, match=r"another evaluation: seed was 0, is 1; suites\.market\.num_tasks was 4, is 8"
    ):
        EvalStore(folder, other)
    EvalStore(folder, SPEC).close()  # the refusal left it as it was, and unlocked


def test_more_policies_and_suites_may_join(folder):
    more = {**SPEC, "suites": {"service": {}}, "policies": {"oracle": {"scripted": "oracle"}}}
    EvalStore(folder, more).close()
    held = json.loads((folder / "eval.json").read_text())
    assert (set(held["suites"]), set(held["policies"])) == ({"market", "service"}, {"random", "oracle"})
    with pytest.raises(ConfigError, match=r"policies\.oracle\.scripted"):
        EvalStore(folder, {**SPEC, "policies": {"oracle": {"scripted": "other"}}})


def test_one_process_at_a_time(folder):
    first = EvalStore(folder, SPEC)
    with pytest.raises(ConfigError, match="another evaluation is writing"):
        EvalStore(folder, SPEC)
    first.close()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="holds something else"):
        EvalStore(tmp_path, SPEC)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        EvalStore(tmp_path / "file" / "below", SPEC)


def test_names_with_colons_and_slashes_are_files(tmp_path):
    store = EvalStore(tmp_path / "out", SPEC)
    store.append("market", "../x:greedy", record(0))
    assert store.finished("market", "../x:greedy") == {(0, 0): record(0)}
    store.close()
    assert not list(tmp_path.glob("x*"))
