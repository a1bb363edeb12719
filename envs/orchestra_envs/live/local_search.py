"""Search in documents of one's own: BM25, and vectors of an embedding model if asked for.

    from orchestra_envs.live.local_search import build_index, local_search_tool

    report = build_index("docs/", "docs.index")            # or: orchestra index docs/ docs.index
    search = local_search_tool("docs.index", top_k=3)      # a Tool; no network, no key

    build_index("docs/", "docs.index", embedder={"model": "bge-small", "base_url": "http://127.0.0.1:8080/v1"})
    search = local_search_tool("docs.index", mode="hybrid", embedder={"base_url": "http://127.0.0.1:8080/v1"})

Documents are cut into passages (`passages`), which are found by the words of the passage and of its document's title:
Lucene's BM25 by the bm25s library. Words are what Unicode calls so, without case; Chinese and Japanese characters
count singly and in pairs. There is no stemming and no list of stop words.

Passages, postings and vectors stay on disk and are memory-mapped; in memory are the vocabulary and what the system
caches. A million passages of 100 words (100,000 of them): 165 s (14 s) and 2.4 GB (0.3 GB) to build on one core, 1 GB
(0.1 GB) on disk, 10 MB of memory beside the system's cache to search in, 19 ms (1 ms) a query.

An index is replaced as a whole (`index_store`); tools that hold the old one keep it until they are made anew.
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from orchestra_envs.bm25 import import_bm25s
from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.live.dense import Embedder, best_of, embed, import_openai, nearest, write_vectors
from orchestra_envs.live.index_store import Stored, commit, new_build, read_index
from orchestra_envs.live.options import made
from orchestra_envs.live.passages import Document, Passage, Problem, documents, passages
from orchestra_envs.tools import Price, Tool, ToolArgumentError, ToolResult, canonical_json

Mode = Literal["bm25", "dense", "hybrid"]
MODES = ("bm25", "dense", "hybrid")
MAX_QUERY_CHARS = 2000
RANK_CONSTANT = 60
"""k of reciprocal rank fusion: a passage scores the sum of 1 / (k + rank) over both lists."""

DEFAULT_RETRY = Retry()
DEFAULT_DESCRIPTION = "Searches a library of documents. Returns the passages that match a query best, numbered."

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"


@dataclass(frozen=True)
class BuildReport:
    """What became of the documents. `problems` names everything that was left out or read otherwise than it stands."""

    num_documents: int
    num_passages: int
    checksum: str
    problems: tuple[Problem, ...] = ()
    embedding_tokens: int = 0

    @property
    def num_lost(self) -> int:
        """Files, lines and entries whose text is not in the index."""
        return sum(problem.lost for problem in self.problems)


@dataclass(frozen=True, eq=False)
class Index:
    """An index, opened by `open_index`. Copies and pickles are the same index, opened once a process."""

    path: Path
    manifest: Mapping[str, Any]
    bm25: Any
    vectors: np.ndarray | None
    _text: mmap.mmap
    _offsets: np.ndarray

    @property
    def checksum(self) -> str:
        """Identity of the passages and of how they were indexed (hex)."""
        return self.manifest["checksum"]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def passage(self, number: int) -> Passage:
        """The passage with this number (0 is the first)."""
        return Passage(*json.loads(self._text[int(self._offsets[number]) : int(self._offsets[number + 1])]))

    def __copy__(self) -> Index:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Index:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self.checksum)


def build_index(
    source: str | os.PathLike[str] | Iterable[str | Mapping[str, Any]],
    index: str | os.PathLike[str],
    *,
    max_chars: int = 1000,
    overlap_chars: int = 150,
    k1: float = 1.5,
    b: float = 0.75,
    embedder: Embedder | Mapping[str, Any] | None = None,
    vector_dtype: Literal["float32", "float16"] = "float32",
) -> BuildReport:
    """Builds the index of a folder, a file, or an iterable of texts or of objects with a "text".

    The folder `index` gets a new index or keeps the old one, whatever happens. Equal documents and settings give an
    equal checksum.

    Args:
        source: see `passages.documents` for the formats.
        index: a folder that does not exist, is empty or holds an index.
        max_chars: most characters of a passage.
        overlap_chars: how many of them may repeat the end of the passage before.
        k1: BM25's saturation of repeated words.
        b: BM25's weight of the passage's length, in [0, 1].
        embedder: the model (or its keyword arguments) for dense and hybrid search; None: BM25 alone.
        vector_dtype: "float16" halves the size of the vectors; search in them takes ten times as long.

    Raises:
        ValueError: an argument is not usable, or there is no text; ToolUnavailableError: the embedding endpoint fails.
    """
    if max_chars < 1 or not 0 <= overlap_chars <= max_chars // 2:
        raise ValueError(
            f"max_chars must be at least 1 and overlap_chars at most half of it, not {max_chars} and {overlap_chars}"
        )
    if not k1 >= 0 or not 0 <= b <= 1:
        raise ValueError(f"k1 must be at least 0 and b in [0, 1], not {k1!r} and {b!r}")
    if vector_dtype not in ("float32", "float16"):
        raise ValueError(f"vector_dtype must be float32 or float16, not {vector_dtype!r}")
    model = made(Embedder, embedder, "embedder")
    if model:
        import_openai()
    place = Path(index)
    problems: list[Problem] = []
    counted = _Counted(documents(source, problems.append, leave_out=place))
    settings = {"max_chars": max_chars, "overlap_chars": overlap_chars, "k1": k1, "b": b}
    with new_build(place) as folder:
        words, offsets, digest = _write_passages(
            folder, passages(counted, max_chars=max_chars, overlap_chars=overlap_chars)
        )
        if not words.vocabulary:
            raise ValueError(f"there are no words to index in {_name(source)}{_first_problems(problems)}")
        _write_bm25(folder / "bm25", words, k1=k1, b=b)
        dense, tokens = None, 0
        if model:
            texts = _stored_texts(folder, offsets)
            num_dimensions, tokens = write_vectors(folder / "vectors.npy", texts, len(offsets) - 1, model, vector_dtype)
            dense = {"model": model.model, "query_prefix": model.query_prefix, "num_dimensions": num_dimensions}
        digest.update(canonical_json([settings, dense]).encode())
        notes = [dataclasses.asdict(problem) for problem in problems]
        # File names need not be UTF-8: what is not becomes JSON's own escapes.
        told = json.dumps(notes, ensure_ascii=False, indent=0).encode("utf-8", "backslashreplace")
        (folder / "report.json").write_bytes(told)
        report = BuildReport(counted.number, len(offsets) - 1, digest.hexdigest(), tuple(problems), tokens)
        manifest = {
            "checksum": report.checksum,
            "num_documents": report.num_documents,
            "num_passages": report.num_passages,
            "num_lost": report.num_lost,
            "settings": settings,
            "dense": dense,
        }
        commit(place, folder, manifest)
    return report


def open_index(path: str | os.PathLike[str]) -> Index:
    """The index in a folder; the same object as long as the folder holds the same build.

    Raises:
        ValueError: there is no index, or it is unfinished, damaged or of another version.
    """
    place = Path(path).resolve()
    with _opened_lock:
        for _ in range(10):
            stored = read_index(place)
            known = _opened.get(place)
            if known and known[0] == stored.raw:
                return known[1]
            try:
                index = _load(stored)
            except FileNotFoundError:  # replaced while we were opening it
                continue
            _opened[place] = stored.raw, index
            return index
    raise ValueError(f"index {place} is replaced all the time: it could not be opened")


def search(index: Index, query: str, top_k: int) -> list[tuple[int, float]]:
    """Numbers and BM25 scores of the passages that share a word with `query`, best first, at most `top_k`.

    A word counts once, however often the query has it; equal scores keep the order of the documents.
    """
    vocabulary = index.bm25.vocab_dict
    known = [word for word in dict.fromkeys(words_of(query)) if word in vocabulary]
    if not known:
        return []
    found = best_of(index.bm25.get_scores(known), min(top_k, len(index)))
    return [(number, score) for number, score in found if score > 0]


def fuse(rankings: Iterable[Iterable[int]], top_k: int) -> list[tuple[int, float]]:
    """Reciprocal rank fusion: numbers and scores, best first; equal scores by number."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:top_k]


def local_search_tool(
    index: str | os.PathLike[str] | Index,
    *,
    name: str = "local_search",
    mode: Mode = "bm25",
    top_k: int = 3,
    price: Price | Mapping[str, float] | None = None,
    description: str = DEFAULT_DESCRIPTION,
    latency_s: float | None = None,
    clock: Literal["declared", "measured"] | None = None,
    timeout_s: float = 30.0,
    retry: Retry | Mapping[str, Any] | None = DEFAULT_RETRY,
    limiter: Limiter | Mapping[str, Any] | None = None,
    embedder: Embedder | Mapping[str, Any] | None = None,
) -> Tool:
    """Search in an index as a tool with the argument `query`.

    Args:
        index: the folder of an index, or an opened one.
        name: what the policy calls it.
        mode: "bm25" (a plain function, deterministic), "dense", or "hybrid" (both, fused by their ranks). The last two
            ask the embedding endpoint at each call.
        top_k: most passages of a search.
        price: None: free; the tokens of a query's embedding count as input tokens.
        description: what the policy is told.
        latency_s: what the policy is told to expect; None: 0.05 for bm25, 0.2 for the others.
        clock: None: "declared" for bm25, so that environments with it stay deterministic, "measured" for the others.
        timeout_s: of the whole call.
        retry: of transient faults of the embedding endpoint.
        limiter: shared by all episodes of the process.
        embedder: how to reach the model that the index was built with (its name need not be given); None: OpenAI's
            endpoint.

    Raises:
        ValueError: an argument is not usable, the index cannot be opened, has no vectors, or has another model's.
    """
    if mode not in MODES:
        raise ValueError(f"local_search: mode must be one of {', '.join(MODES)}, not {mode!r}")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"local_search: top_k must be a whole number of at least 1, not {top_k!r}")
    opened = index if isinstance(index, Index) else open_index(index)
    given_price = made(Price, price, "local_search: price") or Price()
    is_sparse = mode == "bm25"
    model = None if is_sparse else _query_embedder(opened, embedder)

    def search_words(query: str) -> str:
        wanted, note = _checked_query(query)
        return render(opened, search(opened, wanted, top_k), note)

    async def search_vectors(query: str) -> ToolResult:
        wanted, note = _checked_query(query)
        assert model is not None
        (vector, *_), tokens = await embed(model, [model.query_prefix + wanted])
        found = await asyncio.to_thread(_dense_search, opened, wanted, vector, mode, top_k)
        is_known = tokens is not None or not given_price.per_input_token_usd
        return ToolResult(render(opened, found, note), input_tokens=tokens or 0, cost_known=is_known)

    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
            "additionalProperties": False,
        },
        function=search_words if is_sparse else search_vectors,
        price=given_price,
        latency_s=(0.05 if is_sparse else 0.2) if latency_s is None else latency_s,
        timeout_s=timeout_s,
        clock=clock or ("declared" if is_sparse else "measured"),
        retry=None if is_sparse else made(Retry, retry, "local_search: retry"),
        limiter=made(Limiter, limiter, "local_search: limiter"),
        source="live",
        backend=f"{mode}:{opened.checksum[:16]}" + (f"+{model.model}" if model else ""),
    )


def render(index: Index, found: Iterable[tuple[int, float]], note: str = "") -> str:
    """The passages found, as numbered text with title and id."""
    blocks = []
    for position, (number, _) in enumerate(found, start=1):
        passage = index.passage(number)
        title = f"{passage.title} " if passage.title else ""
        blocks.append(f"[{position}] {title}({' '.join(passage.id.split())})\n{passage.text}")
    return "\n\n".join([*(blocks or ["No passage matches. Try other words."]), *([note] if note else [])])


def words_of(text: str) -> list[str]:
    """The words of a text as BM25 counts them, without case; Chinese and Japanese runs as characters and pairs."""
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    words = []
    for found in _word_pattern().finditer(folded):
        word = found[0]
        if found.lastgroup == "cjk":
            words += [*word, *(word[i : i + 2] for i in range(len(word) - 1))]
        else:
            words.append(word)
    return words


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    # Python's \w has no combining marks, without which words of Hindi or Arabic fall apart.
    marks = "".join(re.escape(chr(i)) for i in range(0x300, 0xFFFF) if unicodedata.category(chr(i))[0] == "M")
    letter = rf"[^\W_{_CJK}]"
    return re.compile(rf"(?P<cjk>[{_CJK}]+)|{letter}(?:{letter}|[{marks}])*")


class _Words:
    """The words of passages as numbers, and the vocabulary in the order in which it was met."""

    def __init__(self) -> None:
        self.vocabulary: dict[str, int] = {}
        self.passages: list[array.array[int]] = []

    def add(self, text: str) -> None:
        number = self.vocabulary.setdefault
        size = self.vocabulary.__len__
        self.passages.append(array.array("i", [number(word, size()) for word in words_of(text)]))


class _Counted:
    def __init__(self, items: Iterable[Document]) -> None:
        self.items = items
        self.number = 0

    def __iter__(self) -> Iterator[Document]:
        for item in self.items:
            self.number += 1
            yield item


def _write_passages(folder: Path, stream: Iterable[Passage]) -> tuple[_Words, array.array[int], Any]:
    """Writes the passages; their words, where each begins in the file (and where the last ends), and their SHA-256."""
    words, offsets, digest = _Words(), array.array("q", [0]), hashlib.sha256()
    with (folder / "passages.jsonl").open("wb") as file:
        for passage in stream:
            line = f"{canonical_json([passage.id, passage.title, passage.text])}\n".encode()
            file.write(line)
            digest.update(line)
            offsets.append(offsets[-1] + len(line))
            words.add(f"{passage.title}\n{passage.text}")
    np.save(folder / "offsets.npy", np.asarray(offsets, dtype=np.int64))
    return words, offsets, digest


def _write_bm25(folder: Path, words: _Words, *, k1: float, b: float) -> None:
    bm25 = import_bm25s().BM25(k1=k1, b=b, method="lucene", backend="numpy", csc_backend="numpy")
    bm25.index((words.passages, words.vocabulary), create_empty_token=False, show_progress=False)
    bm25.save(folder, show_progress=False)


def _stored_texts(folder: Path, offsets: array.array[int]) -> Iterator[str]:
    with (folder / "passages.jsonl").open("rb") as file:
        for line in file:
            _, title, text = json.loads(line)
            yield f"{title}\n{text}" if title else text


_opened: dict[Path, tuple[bytes, Index]] = {}
_opened_lock = threading.Lock()


def _load(stored: Stored) -> Index:
    files = stored.files
    bm25 = import_bm25s().BM25.load(files / "bm25", mmap=True, show_progress=False)
    # As plain arrays over the mapped files: slices of a memmap are slow to make.
    bm25.scores = {
        key: np.asarray(value) if isinstance(value, np.ndarray) else value for key, value in bm25.scores.items()
    }
    with (files / "passages.jsonl").open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    offsets = np.load(files / "offsets.npy", mmap_mode="r")
    vectors = np.load(files / "vectors.npy", mmap_mode="r") if stored.manifest["dense"] else None
    return Index(stored.path, stored.manifest, bm25, vectors, text, offsets)


def _reopen(path: str, checksum: str) -> Index:
    index = open_index(path)
    if index.checksum != checksum:
        raise ValueError(f"index {path} was built anew since it was pickled")
    return index


def _forget_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _opened_lock
    _opened_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _query_embedder(index: Index, given: Embedder | Mapping[str, Any] | None) -> Embedder:
    """How to embed queries to `index`, with the model that it was built with."""
    dense = index.manifest["dense"]
    if not dense:
        raise ValueError(f"index {index.path} has no vectors: build it with an embedding model, or say mode=bm25")
    if given is None or isinstance(given, Mapping):
        given = {"model": dense["model"], "query_prefix": dense["query_prefix"], **(given or {})}
    model = made(Embedder, given, "local_search: embedder")
    assert model is not None
    if model.model != dense["model"]:
        raise ValueError(
            f"index {index.path} was built with the embedding model {dense['model']!r}, not {model.model!r}: "
            "their vectors cannot be compared"
        )
    import_openai()
    return model


def _dense_search(index: Index, query: str, vector: np.ndarray, mode: Mode, top_k: int) -> list[tuple[int, float]]:
    assert index.vectors is not None
    if len(vector) != index.vectors.shape[1]:
        raise ValueError(f"the model gave a vector of {len(vector)} numbers; the index has {index.vectors.shape[1]}")
    if mode == "dense":
        return nearest(index.vectors, vector, min(top_k, len(index)))
    depth = min(max(50, 5 * top_k), len(index))
    rankings = search(index, query, depth), nearest(index.vectors, vector, depth)
    return fuse(([number for number, _ in ranking] for ranking in rankings), top_k)


def _checked_query(query: str) -> tuple[str, str]:
    wanted = query.strip()
    if not wanted:
        raise ToolArgumentError("the query is empty")
    if len(wanted) <= MAX_QUERY_CHARS:
        return wanted, ""
    return wanted[:MAX_QUERY_CHARS], f"The query was cut to its first {MAX_QUERY_CHARS} characters."


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "the documents given"


def _first_problems(problems: list[Problem]) -> str:
    named = "; ".join(f"{problem.where}: {problem.reason}" for problem in problems[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f" ({named}{more})" if named else ""
