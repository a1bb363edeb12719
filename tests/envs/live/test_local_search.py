"""Local search: documents into passages, a BM25 index that is never half, vectors from a real embedding endpoint."""

import copy
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestra_envs import Task, ToolCall, ToolEnv, render_call
from orchestra_envs.limits import Retry, ToolUnavailableError
from orchestra_envs.live import dense
from orchestra_envs.live.local_search import (
    build_index,
    fuse,
    local_search_tool,
    open_index,
    search,
    words_of,
)
from orchestra_envs.live.passages import Document, documents, passage_spans, passages

from tests.envs.servers.search_server import EmbeddingServer, Fault, embedding

LIBRARY = {
    "owls": "The barn owl hunts at night. It hears a mouse under the snow and flies without a sound.",
    "bread": "Sourdough needs flour, water and salt. The starter must be fed with flour every day.",
    "tides": "Tides rise and fall twice a day because the moon pulls the water of the sea.",
    "steel": "Steel is iron with a little carbon. Too much carbon makes it brittle.",
    "bees": "Honey bees dance to tell the hive where flowers grow. A hive holds 50,000 bees.",
    "zug": "Der Zug nach Zürich fährt um 7 Uhr vom Gleis 3 ab. Die Straße ist gesperrt.",
    "tokyo": "東京は日本の首都です。人口は約1400万人です。",
    "hindi": "दिल्ली भारत की राजधानी है।",
    "emoji": "Launch checklist 🚀: fuel, ice, guidance.",
}
GOLD = [
    ("where do owls hear mice under snow", "owls"),
    ("feeding a sourdough starter", "bread"),
    ("moon and sea water", "tides"),
    ("brittle carbon iron", "steel"),
    ("how many bees in a hive", "bees"),
    ("ZUG NACH ZÜRICH", "zug"),
    ("strasse gesperrt", "zug"),
    ("Zu\u0308rich", "zug"),
    ("日本の首都", "tokyo"),
    ("राजधानी", "hindi"),
    ("guidance fuel", "emoji"),
]


def as_objects(library):
    return [{"id": name, "text": text} for name, text in library.items()]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    place = tmp_path_factory.mktemp("library") / "index"
    build_index(as_objects(LIBRARY), place)
    return place


class _Searcher(ToolEnv):
    def __init__(self, *tools):
        super().__init__()
        self.tools = tools

    def sample_task(self, rng, options):
        return Task("?")

    def score(self, task, answer):
        return 1.0


def call(tool, query):
    """The record of one call as an episode makes it."""
    env = _Searcher(tool)
    env.reset(seed=0)
    *_, info = env.step(render_call(ToolCall(tool.name, {"query": query})))
    (record,) = json.loads(info["calls_json"])
    return record


# Gold and scores


@pytest.mark.parametrize(("query", "right"), GOLD, ids=[str(i) for i in range(len(GOLD))])
def test_the_right_passage_comes_first(library, query, right):
    index = open_index(library)
    ((number, score), *_) = search(index, query, 3)
    assert index.passage(number).id == f"{right}#0"
    assert score > 0


def test_scores_are_lucenes_bm25(tmp_path):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abcdefghij"), rng.integers(1, 30))) for _ in range(40)]
    build_index(texts, tmp_path / "index", k1=1.2, b=0.6)
    index = open_index(tmp_path / "index")
    counts = np.array([[text.split().count(word) for word in "abcdefghij"] for text in texts])
    lengths = counts.sum(1)
    num_with = (counts > 0).sum(0)
    idf = np.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
    tf = counts / (counts + 1.2 * (1 - 0.6 + 0.6 * lengths[:, None] / lengths.mean()))
    for query in ("a", "c f", "j a b"):
        expected = (tf * idf)[:, ["abcdefghij".index(word) for word in query.split()]].sum(1)
        found = dict(search(index, query, 40))
        assert set(found) == set(np.flatnonzero(expected))
        for number, score in found.items():
            assert score == pytest.approx(expected[number], rel=1e-5)
        assert list(found) == sorted(found, key=lambda number: (-found[number], number))


def test_a_word_said_twice_counts_once_and_unknown_words_nothing(library):
    index = open_index(library)
    assert search(index, "owl owl owl qqqq", 5) == search(index, "owl", 5)
    assert search(index, "qqqq", 5) == []
    assert search(index, "!!!", 5) == []


def test_equal_scores_keep_the_order_of_the_documents(tmp_path):
    build_index(["same words"] * 20, tmp_path / "index")
    assert [number for number, _ in search(open_index(tmp_path / "index"), "same", 7)] == list(range(7))


def test_the_title_is_searched_in_every_passage(tmp_path):
    text = "\n\n".join(f"Paragraph {i} says nothing of note." for i in range(40))
    build_index(
        [{"title": "Quokka", "text": text}, "something else"], tmp_path / "index", max_chars=200, overlap_chars=0
    )
    index = open_index(tmp_path / "index")
    found = search(index, "quokka", 100)
    assert len(found) == len(index) - 1 > 3
    record = call(local_search_tool(index, top_k=1), "quokka")
    assert record["text"].startswith("[1] Quokka (doc0#0)\nParagraph 0")


def test_words():
    assert words_of("The quick_brown FOX's 2.5") == ["the", "quick", "brown", "fox", "s", "2", "5"]
    assert words_of("Straße ÉCOLE e\u0301cole") == ["strasse", "école", "école"]
    assert words_of("東京 x") == ["東", "京", "東京", "x"]
    assert words_of("राजधानी") == [unicodedata.normalize("NFKC", "राजधानी")]
    assert words_of("🚀 … \x00") == []


# Passages


@given(
    st.text(alphabet=st.sampled_from("ab .\n\u0301é東🚀"), max_size=300),
    st.integers(1, 40),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_passages_hold_the_whole_text(text, max_chars, data):
    overlap_chars = data.draw(st.integers(0, max_chars // 2))
    spans = passage_spans(text, max_chars=max_chars, overlap_chars=overlap_chars)
    covered = set()
    for start, end in spans:
        assert 0 < end - start <= max_chars
        assert not text[start].isspace()
        assert not text[end - 1].isspace()
        covered.update(range(start, end))
    assert all(i in covered for i, char in enumerate(text) if not char.isspace())
    assert [start for start, _ in spans] == sorted({start for start, _ in spans})
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start >= end - overlap_chars


def test_passages_end_with_paragraphs_where_they_can():
    text = "\n\n".join(["word " * 30 + "end."] * 4)
    pieces = [text[start:end] for start, end in passage_spans(text, max_chars=200, overlap_chars=0)]
    assert len(pieces) == 4
    assert all(piece.startswith("word") and piece.endswith("end.") for piece in pieces)


def test_passages_never_split_a_letter_from_its_accent():
    text = "e\u0301" * 500
    for start, end in passage_spans(text, max_chars=101, overlap_chars=11):
        assert text[start] == "e"
        assert text[end - 1] == "\u0301"


def test_passage_ids_are_the_documents_with_a_number():
    text = "word " * 100
    ids = [passage.id for passage in passages([Document("a/b.txt", "", text)], max_chars=200, overlap_chars=20)]
    assert ids == [f"a/b.txt#{i}" for i in range(len(ids))]
    assert len(ids) == 3


# Files


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "docs"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "config.txt").write_text("hidden")
    (root / "plain.txt").write_text("plain text", encoding="utf-8")
    (root / "bom.md").write_bytes("\ufeffwith a mark".encode())
    (root / "sub" / "page.html").write_text(
        "<html><head><title>My &amp; page</title><style>p{color:red}</style></head>"
        "<body><script>evil()</script><p>First<br>line</p><p>caf&eacute; <b>bo</b>ld</p></body>"
    )
    (root / "one.json").write_text(json.dumps({"id": "own", "title": "T", "content": "from json"}))
    (root / "many.json").write_text(json.dumps([{"text": "first"}, {"text": ""}, 7, {"name": "x"}]))
    (root / "lines.jsonl").write_text('{"_id": 5, "text": "line one"}\n\n{broken\n{"text": "line \\ud800 four"}\n')
    (root / "latin.txt").write_bytes("café".encode("latin-1"))
    (root / "wide.txt").write_bytes("wide".encode("utf-16"))
    (root / "binary.txt").write_bytes(b"\x7fELF\x00\x01")
    (root / "empty.txt").write_text("")
    (root / "blank.html").write_text("<p> </p>")
    (root / "picture.png").write_bytes(b"\x89PNG")
    (root / "broken-link.txt").symlink_to(root / "nothing")
    os.mkfifo(root / "pipe.txt")
    return root


def test_every_file_is_read_or_named(folder):
    problems = []
    found = {document.id: document for document in documents(folder, problems.append)}
    assert {name: document.text for name, document in found.items()} == {
        "plain.txt": "plain text",
        "bom.md": "with a mark",
        "sub/page.html": "First\nline\n\ncafé bold",
        "own": "from json",
        "many.json[0]": "first",
        "5": "line one",
        "lines.jsonl:4": "line ? four",
        "latin.txt": "café",
        "wide.txt": "wide",
    }
    assert (found["sub/page.html"].title, found["own"].title) == ("My & page", "T")
    lost = {problem.where: problem.reason for problem in problems if problem.lost}
    assert sorted(lost) == [
        "binary.txt",
        "blank.html",
        "broken-link.txt",
        "empty.txt",
        "lines.jsonl:3",
        "many.json[1]",
        "many.json[2]",
        "many.json[3]",
        "picture.png",
        "pipe.txt",
    ]
    assert lost["lines.jsonl:3"].startswith("not JSON")
    assert lost["picture.png"] == ".png: not a known text format"
    assert {problem.where for problem in problems if not problem.lost} == {"latin.txt", "wide.txt"}


def test_the_report_counts_and_the_index_keeps_it(folder, tmp_path):
    report = build_index(folder, tmp_path / "index")
    assert (report.num_documents, report.num_passages, report.num_lost) == (9, 9, 10)
    index = open_index(tmp_path / "index")
    assert (index.manifest["num_documents"], index.manifest["num_lost"]) == (9, 10)
    (stored,) = (tmp_path / "index").glob("build-*/report.json")
    assert len(json.loads(stored.read_text())) == 12


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
def test_file_names_that_are_not_utf8_do_no_harm(tmp_path):
    root = os.fsencode(tmp_path / "docs")
    os.mkdir(root)
    for name in (b"good\xff.txt", b"bad\xff.png"):
        with open(os.path.join(root, name), "w") as file:
            file.write("words")
    os.symlink(root, os.path.join(root, b"link\xff"))
    report = build_index(tmp_path / "docs", tmp_path / "index")
    assert (report.num_documents, report.num_lost) == (1, 2)
    assert open_index(tmp_path / "index").passage(0).id == "good?.txt#0"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_and_folders_are_named(tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "secret.txt").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    problems = []
    assert list(documents(tmp_path, problems.append)) == []
    assert sorted(problem.where for problem in problems) == ["closed", "secret.txt"]


def test_an_index_inside_the_folder_is_not_indexed(tmp_path):
    (tmp_path / "a.txt").write_text("alpha")
    for _ in range(2):
        assert build_index(tmp_path, tmp_path / "index").num_documents == 1


def test_one_file_is_a_source_too(tmp_path):
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(5)))
    assert build_index(tmp_path / "docs.jsonl", tmp_path / "index").num_documents == 5
    assert open_index(tmp_path / "index").passage(4).id == "docs.jsonl:5#0"


def test_equal_documents_make_equal_indexes(folder, tmp_path):
    first, second = (build_index(folder, tmp_path / name).checksum for name in ("a", "b"))
    assert first == second
    assert build_index(folder, tmp_path / "c", k1=1.0).checksum != first
    (folder / "plain.txt").write_text("plainer text")
    assert build_index(folder, tmp_path / "b").checksum != first


# The folder of the index


def test_building_again_replaces_the_index_and_leaves_nothing(tmp_path):
    place = tmp_path / "index"
    build_index(["old words"], place)
    old = open_index(place)
    build_index(["new words"], place)
    assert search(old, "old", 1), "who holds the old index can go on"
    assert old.passage(0).text == "old words"
    new = open_index(place)
    assert search(new, "new", 1)
    assert not search(new, "old", 1)
    assert len(list(place.glob("build-*"))) == 1


def test_a_failed_build_leaves_the_old_index(tmp_path):
    place = tmp_path / "index"
    build_index(["old words"], place)

    def broken():
        yield "new words"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        build_index(broken(), place)
    with pytest.raises(ValueError, match="no words"):
        build_index(["", "…"], place)
    assert search(open_index(place), "old", 1)
    assert len(list(place.glob("build-*"))) == 1


BUILDER = """
import sys, time
from orchestra_envs.live.local_search import build_index

def texts(word, slow):
    for i in range(300):
        if slow and i == 150:
            print("half", flush=True)
            time.sleep(60)
        yield f"{word} number{i}"

build_index(texts(sys.argv[2], sys.argv[3] == "slow"), sys.argv[1])
print("done", flush=True)
"""


def builder(place, word, how):
    import orchestra_envs

    path = os.pathsep.join([str(Path(orchestra_envs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(place), word, how],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_build_killed_halfway_leaves_the_old_index_and_the_next_one_sweeps(tmp_path):
    place = tmp_path / "index"
    build_index(["old words"], place)
    with builder(place, "new", "slow") as process:
        assert process.stdout.readline() == "half\n"
        assert len(list(place.glob("build-*"))) == 2
        build_index(["newer words"], place)
        assert len(list(place.glob("build-*"))) == 2, "another's work in progress stays"
        process.send_signal(signal.SIGKILL)
    assert search(open_index(place), "newer", 1)
    build_index(["newest words"], place)
    assert search(open_index(place), "newest", 1)
    assert len(list(place.glob("build-*"))) == 1


def test_an_index_whose_first_build_was_killed_is_told_from_none(tmp_path):
    place = tmp_path / "index"
    with builder(place, "new", "slow") as process:
        process.stdout.readline()
        process.kill()
    with pytest.raises(ValueError, match="never finished"):
        open_index(place)
    build_index(["words"], place)
    assert len(open_index(place)) == 1


def test_two_processes_that_build_at_once_leave_one_whole_index(tmp_path):
    place = tmp_path / "index"
    processes = [builder(place, word, "fast") for word in ("red", "green")]
    for process in processes:
        assert process.communicate(timeout=60)[0] == "done\n"
    index = open_index(place)
    assert len(index) == 300
    assert sorted(len(search(index, word, 300)) for word in ("red", "green")) == [0, 300]
    assert len(list(place.glob("build-*"))) == 1


def test_readers_never_see_a_half_index_while_it_is_replaced(tmp_path):
    place = tmp_path / "index"
    build_index(["word 0"], place)
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                index = open_index(place)
                assert index.passage(0).text.startswith("word")
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(15):
        build_index([f"word {number}"], place)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_index_that_is_none_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match="no such folder; make it with `orchestra index"):
        open_index(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="no search index"):
        open_index(tmp_path / "other")
    (tmp_path / "other" / "file").write_text("x")
    with pytest.raises(ValueError, match="other things in it"):
        build_index(["x"], tmp_path / "other")
    with pytest.raises(ValueError, match="is a file"):
        build_index(["x"], tmp_path / "other" / "file")
    with pytest.raises(ValueError, match="no file or folder"):
        build_index(tmp_path / "nowhere", tmp_path / "index")
    assert not list(tmp_path.glob("index/build-*"))


def damage_manifest(place, **changes):
    manifest = json.loads((place / "index.json").read_text())
    (place / "index.json").write_text(json.dumps({**manifest, **changes}))


def test_a_damaged_index_is_refused(tmp_path):
    place = tmp_path / "index"
    build_index(["some words", "more words"], place)
    (text,) = place.glob("build-*/passages.jsonl")
    whole = text.read_bytes()
    text.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"damaged \(passages.jsonl has .* bytes, not"):
        open_index(place)
    text.unlink()
    with pytest.raises(ValueError, match=r"passages.jsonl is missing"):
        open_index(place)
    text.write_bytes(whole)
    assert len(open_index(place)) == 2
    damage_manifest(place, format=0)
    with pytest.raises(ValueError, match="has format 0"):
        open_index(place)
    damage_manifest(place, format=1, build="../../etc")
    with pytest.raises(ValueError, match="damaged"):
        open_index(place)
    (place / "index.json").write_text("{half")
    with pytest.raises(ValueError, match="damaged"):
        open_index(place)
    build_index(["whole again"], place)
    assert len(open_index(place)) == 1


def test_an_index_is_opened_once_a_process(library):
    index = open_index(library)
    assert open_index(str(library)) is index
    assert open_index(library / ".." / "index") is index
    assert copy.deepcopy(index) is index
    assert cloudpickle.loads(cloudpickle.dumps(index)) is index


def test_a_pickle_of_an_index_that_was_replaced_is_refused(tmp_path):
    build_index(["old"], tmp_path / "index")
    pickled = cloudpickle.dumps(open_index(tmp_path / "index"))
    build_index(["new"], tmp_path / "index")
    with pytest.raises(ValueError, match="built anew"):
        cloudpickle.loads(pickled)


def test_passages_are_mapped_and_not_read(tmp_path):
    build_index((f"word{i} " + "filler " * 100 for i in range(2000)), tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert isinstance(index._offsets, np.memmap)
    assert not index.bm25.scores["data"].flags.owndata
    assert index.passage(1999).text.startswith("word1999")


def test_threads_can_search_at_once(library):
    index = open_index(library)
    expected = {query: search(index, query, 3) for query, _ in GOLD}
    wrong = []

    def work():
        for query, found in list(expected.items()) * 20:
            if search(index, query, 3) != found:
                wrong.append(query)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# The tool


def test_the_tool_says_where_passages_come_from(library):
    record = call(local_search_tool(library, top_k=2), "sourdough flour")
    assert record["status"] == "ok"
    assert record["text"] == f"[1] (bread#0)\n{LIBRARY['bread']}"
    assert (record["source"], record["cost_usd"], record["latency_s"]) == ("live", 0, 0.05)
    assert record["backend"] == f"bm25:{open_index(library).checksum[:16]}"


def test_records_of_bm25_are_the_same_each_time(library):
    tool = local_search_tool(library, price={"per_call_usd": 0.001})
    assert call(tool, "water") == call(copy.deepcopy(tool), "water")
    assert call(cloudpickle.loads(cloudpickle.dumps(tool)), "water")["cost_usd"] == 0.001


def test_the_clock_can_be_measured(library):
    assert call(local_search_tool(library, clock="measured", latency_s=9), "water")["latency_s"] < 5


def test_nothing_found_is_an_answer(library):
    record = call(local_search_tool(library), "qqqq")
    assert (record["status"], record["text"]) == ("ok", "No passage matches. Try other words.")


def test_an_empty_query_is_a_wrong_argument_and_a_long_one_is_cut(library):
    tool = local_search_tool(library, top_k=1)
    assert call(tool, " \n")["error_type"] == "invalid_arguments"
    record = call(tool, "owl " * 100_000)
    assert record["text"].startswith("[1] (owls#0)")
    assert "cut to its first 2000 characters" in record["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fuzzy"}, "mode must be one of bm25, dense, hybrid"),
        ({"mode": "dense"}, "has no vectors"),
        ({"top_k": 0}, "top_k"),
        ({"price": {"usd": 1}}, "price"),
    ],
    ids=["mode", "vectors", "top_k", "price"],
)
def test_wrong_arguments_are_named(library, arguments, message):
    with pytest.raises(ValueError, match=message):
        local_search_tool(library, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_chars": 0},
        {"max_chars": 100, "overlap_chars": 51},
        {"overlap_chars": -1},
        {"k1": -1},
        {"b": 2},
        {"k1": math.nan},
        {"vector_dtype": "int8"},
        {"embedder": {"name": "x"}},
        {"embedder": {"model": ""}},
        {"embedder": {"model": "m", "base_url": "127.0.0.1"}},
        {"embedder": {"model": "m", "batch_size": 0}},
    ],
    ids=str,
)
def test_wrong_settings_of_a_build_make_no_folder(tmp_path, arguments):
    with pytest.raises(ValueError):
        build_index(["x"], tmp_path / "index", **arguments)
    assert not (tmp_path / "index").exists()


# Vectors


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MY_KEY", "sk-secret")
    monkeypatch.setattr(dense, "BUILD_RETRY", Retry(max_attempts=3, base_delay_s=0.0))
    with EmbeddingServer() as running:
        yield running


def endpoint(server, **fields):
    return {"model": "small", "base_url": f"{server.url}/v1", "api_key_env": "MY_KEY", **fields}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dense_search_finds_the_nearest_vectors(server, tmp_path, dtype):
    texts = list(LIBRARY.values())
    report = build_index(
        as_objects(LIBRARY), tmp_path / "index", embedder=endpoint(server, batch_size=2), vector_dtype=dtype
    )
    assert report.embedding_tokens == sum(len(text.split()) for text in texts)
    assert len(server.requests) == 5
    assert open_index(tmp_path / "index").vectors.dtype == dtype
    query = "what does the moon do to the water of the sea"
    vectors = np.array([embedding(text) for text in texts])
    wanted = np.array(embedding(query))
    cosine = vectors @ wanted / np.linalg.norm(vectors, axis=1) / np.linalg.norm(wanted)
    best = [list(LIBRARY)[i] for i in np.argsort(-cosine, kind="stable")[:3]]
    tool = local_search_tool(
        tmp_path / "index", mode="dense", embedder=endpoint(server), price={"per_input_token_usd": 1e-6}
    )
    record = call(tool, query)
    assert [line.split("(")[1][:-3] for line in record["text"].split("\n") if line.startswith("[")] == best
    assert (record["input_tokens"], record["cost_usd"]) == (11, pytest.approx(11e-6))
    assert record["backend"].startswith("dense:")
    assert record["backend"].endswith("+small")
    assert server.requests[-1][1]["Authorization"] == "Bearer sk-secret"


def test_prefixes_go_before_passages_and_queries(server, tmp_path):
    build_index(["one"], tmp_path / "index", embedder=endpoint(server, passage_prefix="P: ", query_prefix="Q: "))
    call(local_search_tool(tmp_path / "index", mode="dense", embedder={"base_url": f"{server.url}/v1"}), "two")
    assert [request[2]["input"] for request in server.requests] == [["P: one"], ["Q: two"]]


def test_hybrid_search_fuses_ranks(server, tmp_path):
    build_index(as_objects(LIBRARY), tmp_path / "index", embedder=endpoint(server))
    record = call(local_search_tool(tmp_path / "index", mode="hybrid", embedder=endpoint(server)), "honey bees dance")
    assert record["text"].startswith("[1] (bees#0)")
    assert record["backend"].startswith("hybrid:")
    assert fuse([[3, 1], [1, 2]], 3) == [
        (1, pytest.approx(1 / 62 + 1 / 61)),
        (3, pytest.approx(1 / 61)),
        (2, pytest.approx(1 / 62)),
    ]
    assert fuse([[5], [4]], 2) == [(4, pytest.approx(1 / 61)), (5, pytest.approx(1 / 61))]


def test_another_model_than_the_indexs_is_refused(server, tmp_path):
    build_index(["one"], tmp_path / "index", embedder=endpoint(server))
    with pytest.raises(ValueError, match="'small', not 'large'"):
        local_search_tool(tmp_path / "index", mode="dense", embedder=endpoint(server, model="large"))


def test_an_endpoint_that_recovers_is_asked_again_while_building(server, tmp_path):
    server.faults.extend([Fault(status=429, headers={"Retry-After": "0"}), Fault(breaks=True)])
    build_index(["one", "two"], tmp_path / "index", embedder=endpoint(server))
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "num_requests"),
    [(Fault(status=401, body='{"error": {"message": "bad key sk-secret"}}'), 1), (Fault(status=500), 3)],
    ids=["401", "500"],
)
def test_an_endpoint_that_fails_leaves_the_old_index(server, tmp_path, fault, num_requests):
    build_index(["old"], tmp_path / "index")
    server.faults.extend([fault] * 3)
    with pytest.raises(ToolUnavailableError, match=f"answered {fault.status}") as raised:
        build_index(["new"], tmp_path / "index", embedder=endpoint(server))
    assert "sk-secret" not in str(raised.value)
    assert len(server.requests) == num_requests
    assert search(open_index(tmp_path / "index"), "old", 1)


@pytest.mark.parametrize(
    "body",
    [
        '{"data": []}',
        '{"data": null}',
        '{"data": [{"index": 0, "embedding": []}]}',
        '{"data": [{"index": 0, "embedding": [1, NaN]}]}',
        '{"data": [{"index": 3, "embedding": [1, 2]}]}',
        '{"data": [{"index": 0, "embedding": "AAAA"}]}',
        "[]",
        "no JSON",
    ],
    ids=str,
)
def test_answers_without_usable_vectors_are_observations(server, tmp_path, body):
    build_index(["one"], tmp_path / "index", embedder=endpoint(server))
    tool = local_search_tool(
        tmp_path / "index", mode="dense", embedder=endpoint(server), retry={"max_attempts": 2, "base_delay_s": 0}
    )
    server.faults.extend([Fault(body=body, headers={"Content-Type": "application/json"})] * 2)
    record = call(tool, "one")
    assert (record["error_type"], record["attempts"]) == ("unavailable", 2)
    assert call(tool, "one")["status"] == "ok"


def test_an_endpoint_that_hangs_or_is_gone_is_an_observation(server, tmp_path):
    build_index(["one"], tmp_path / "index", embedder=endpoint(server))
    server.faults.append(Fault(delay_s=1.0))
    slow = local_search_tool(
        tmp_path / "index", mode="dense", embedder=endpoint(server, request_timeout_s=0.2), retry=None
    )
    assert "within 0.2 s" in call(slow, "one")["text"]
    gone = endpoint(server, base_url="http://127.0.0.1:9/v1")
    assert (
        "no connection"
        in call(local_search_tool(tmp_path / "index", mode="dense", embedder=gone, retry=None), "x")["text"]
    )


def test_openais_endpoint_needs_a_key(server, tmp_path, monkeypatch):
    monkeypatch.delenv("MY_KEY")
    build_index(["one"], tmp_path / "index", embedder=endpoint(server))  # a server of one's own does not
    tool = local_search_tool(tmp_path / "index", mode="dense", embedder={"api_key_env": "MY_KEY"})
    record = call(tool, "one")
    assert (record["error_type"], record["attempts"]) == ("unavailable", 1)
    assert "MY_KEY" in record["text"]


def test_dense_searches_of_many_episodes_run_at_once(server, tmp_path):
    build_index(["one"], tmp_path / "index", embedder=endpoint(server))
    tool = local_search_tool(tmp_path / "index", mode="dense", embedder=endpoint(server))
    ok = json.dumps({"data": [{"index": 0, "embedding": [1.0] * 64}]})
    server.faults.extend([Fault(delay_s=0.5, body=ok, headers={"Content-Type": "application/json"})] * 6)
    env = _Searcher(tool)
    env.reset(seed=0)
    start = time.perf_counter()
    env.step("".join(render_call(ToolCall(tool.name, {"query": f"q{i}"})) for i in range(6)))
    assert time.perf_counter() - start < 2.5
