"""`orchestra/QA-v0`: questions with known answers from a file of yours, any tools, and a judge.

    env = orchestra_envs.make(
        "orchestra/QA-v0",
        path="questions.jsonl",                       # {"question": "...", "answer": "..."}, one a line
        tools=[{"kind": "python"}, {"kind": "web_search"}],   # see `orchestra_envs.toolbox`; or Tool objects
        judge={"model": "gpt-5-mini"},                # see `orchestra_envs.judge`; "exact", "numeric", "auto"
        split="train",
    )

Needs no server by itself; the tools and the judge name theirs.

Files: JSONL (`.jsonl`, `.ndjson`), a JSON list (`.json`), tables with a header (`.csv`, `.tsv`), in UTF-8. Layouts that
are known without `fields`: {"question", "answer"}; GSM8K (the answer after "####"); FRAMES as published (a TSV with
"Prompt" and "Answer"); HLE ("id", "question", "answer", "answer_type", "image", ...: multiple choice is judged by the
letter, and rows with an image are left out and counted). Several right answers stand in a list. All other fields come
with the task, in `Task.metadata["fields"]`, for tools that want them.

A row without an id gets one from its question, so that it keeps its place when the file is sorted or grows. The splits
"train" and "test" follow from the id alone, by a hash. Only the rows' places are kept in memory (24 bytes a row; a
`.json` file is kept whole) and read when they are asked for; the index is shared by all environments of the process.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from orchestra_envs.env import Preference, Task, ToolEnv
from orchestra_envs.example_arguments import example_arguments
from orchestra_envs.judge import Judge, JudgeUsage, extract_answer, is_number, make_judge, match, reference_answers
from orchestra_envs.parse import ToolCall, render_call
from orchestra_envs.preference import fixed_weights, sample_preference
from orchestra_envs.toolbox import tools_from_config
from orchestra_envs.tools import Tool

logger = logging.getLogger(__name__)

INSTRUCTIONS = 'End with a line "Answer: ..." that holds the short answer and nothing else.'
SPLITS = ("train", "test")
FIELDS: dict[str, tuple[str, ...]] = {
    "question": ("question", "prompt", "problem", "query"),
    "answer": ("answer", "answers", "ground_truth", "gold_answer", "expected_answer", "target"),
    "id": ("id", "question_id", "task_id", "uid"),
    "answer_type": ("answer_type",),
    "image": ("image",),
}
"""What a row is read for, and the names (in any case) that its fields may have, the first one found."""

_MULTIPLE_CHOICE = "multiplechoice"
_DEMONSTRATED_CALLS = 0.5  # share of demonstrations that call a tool first
_MAX_FIELD_CHARS = 1 << 27  # of a table's cell: images may stand there
_MAX_INDICES = 32


class QAEnv(ToolEnv):
    """Questions from a file; see the module's text.

    Args:
        path: the file.
        split: "train" or "test" takes that part of the rows, None all of them.
        test_fraction: the share of rows in "test".
        fields: names of the file's fields where they are not found by themselves, such as {"question": "Frage",
            "answer": "Antwort", "id": "Nr"}; see `FIELDS`.
        on_bad_row: "error" refuses a file with a row that cannot be used and names its line; "skip" leaves such rows
            out, counts them in `num_bad_rows` and says so once.
        tools: `Tool` objects and entries for `orchestra_envs.toolbox.tools_from_config`.
        judge: for `orchestra_envs.judge.make_judge`.
        preference: "balanced" (outcome 1, cost 0.5, latency 0.25, not told in words), "random" (drawn per episode and
            told in words; other words in the split "test"), or a mapping of weights in [0, 1] for "outcome", "cost",
            "latency" and tool names.
        instructions: `Task.instructions` of every task; "" for none.
        **limits: `max_turns` and the other arguments of `ToolEnv`.

    `reset(options={"task_id": ...})` poses that question, whatever the split.

    Attributes:
        num_tasks: questions in the split.
        num_bad_rows, num_image_rows, num_repeated_rows: rows of the file left out because they cannot be used, have an
            image, or have no id and a question that stood in an earlier row.

    Raises:
        ValueError: an argument makes no sense, the file cannot be read, or has no row for the split.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str],
        split: Literal["train", "test"] | None = None,
        test_fraction: float = 0.1,
        fields: Mapping[str, str] | None = None,
        on_bad_row: Literal["error", "skip"] = "error",
        tools: Sequence[Mapping[str, Any] | Tool] = (),
        judge: str | Mapping[str, Any] | Judge = "auto",
        preference: str | Mapping[str, float] = "balanced",
        instructions: str = INSTRUCTIONS,
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        if split is not None and split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)} or None, got {split!r}")
        if on_bad_row not in ("error", "skip"):
            raise ValueError(f"on_bad_row: expected 'error' or 'skip', got {on_bad_row!r}")
        if not isinstance(instructions, str):
            raise ValueError(f"instructions must be a text, not {instructions!r}")
        self.judge = make_judge(judge)
        self.tools = tools_from_config(tools)
        self._split = split
        self._instructions = instructions
        self._weights = fixed_weights(preference, [tool.name for tool in self.tools])
        self._file = _index(path, _field_names(fields), on_bad_row, self.judge.rules == "numeric")
        self._rows = self._file.rows_of(split, _fraction("test_fraction", test_fraction))
        if not len(self._rows):
            raise ValueError(
                f"{self._file.path}: no question for split {split!r} with test_fraction {test_fraction:g} "
                f"(the file has {len(self._file.offsets)} in all)"
            )
        self.num_tasks = len(self._rows)
        self.num_bad_rows = self._file.num_bad
        self.num_image_rows = self._file.num_images
        self.num_repeated_rows = self._file.num_repeated

    @property
    def judge_usage(self) -> JudgeUsage:
        """What the judge cost so far: its own account, over all environments of the process that share it."""
        return self.judge.usage

    def task_ids(self) -> Iterator[str]:
        """The ids of the split's questions, in the order of the file; each is read from there."""
        return (self._file.read(int(row)).id for row in self._rows)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A random question of the split, or the one that `options["task_id"]` names."""
        if "task_id" in options:
            question = self._file.find(options["task_id"])
        else:
            question = self._file.read(int(self._rows[int(rng.integers(len(self._rows)))]))
        names = [tool.name for tool in self.tools]
        if self._weights is None:
            preference = sample_preference(rng, names, split=self._split or "train")
        else:
            preference = Preference(dict.fromkeys(names, 0.0) | dict(self._weights), "")
        metadata = {
            "line": question.line,
            "multiple_choice": question.multiple_choice,
            "fields": dict(question.other_fields),
        }
        return Task(question.text, question.answers, question.id, preference, metadata, self._instructions)

    def score(self, task: Task, answer: str) -> Any:
        """1.0 if the judge finds the final turn right, else 0.0; a coroutine where a language model is to be asked."""
        multiple_choice = task.metadata["multiple_choice"]
        verdict = self.judge.quick(task.question, task.answer, answer, multiple_choice=multiple_choice)
        if verdict.by != "no_match" or not self.judge.is_async:
            return float(verdict.correct)
        return self._asked(task, answer)

    async def _asked(self, task: Task, answer: str) -> float:
        multiple_choice = task.metadata["multiple_choice"]
        verdict = await self.judge.verdict(task.question, task.answer, answer, multiple_choice=multiple_choice)
        return float(verdict.correct)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> Sequence[str]:
        """The right answer, half of the time after a short call of a random tool: the form, not the skill."""
        answer = _demonstrated_answer(task, self.judge)
        tools = list(self._offered(task))
        if tools and rng.random() < _DEMONSTRATED_CALLS:
            tool = tools[int(rng.integers(len(tools)))]
            arguments = _example_arguments(tool, task)
            if arguments is not None:
                return [render_call(ToolCall(tool.name, arguments)), answer]
        return [answer]

    def _offered(self, task: Task) -> Sequence[Tool]:
        """The tools of the episode under way if it is on `task` (they may have other names), else all."""
        if self._episode is not None and self.task.id == task.id:
            return self.offered_tools
        return self.tools


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], not {value!r}")
    return float(value)


def _field_names(fields: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """`fields` checked, in a form that can be hashed."""
    if fields is None:
        return ()
    if not isinstance(fields, Mapping):
        raise ValueError(f'fields must be a mapping such as {{"question": "Prompt"}}, not {fields!r}')
    for role, name in fields.items():
        if role not in FIELDS:
            raise ValueError(f"fields: expected one of {', '.join(FIELDS)}, got {role!r}")
        if not isinstance(name, str) or not name:
            raise ValueError(f"fields[{role!r}] must be the name of a field in the file, not {name!r}")
    return tuple(sorted(fields.items()))


# --- Demonstrations ----------------------------------------------------------------------------------------------


def _demonstrated_answer(task: Task, judge: Judge) -> str:
    """A final turn that states the answer, in the first form from which the judge reads it."""
    answer = task.answer[0]
    forms = (f"Answer: {answer}", f"<answer>{answer}</answer>", answer)
    for form in forms:
        if match(extract_answer(form), task.answer, multiple_choice=task.metadata["multiple_choice"]).correct:
            return form
    return forms[0]


def _example_arguments(tool: Tool, task: Task) -> dict[str, Any] | None:
    """Arguments that `tool` takes, the question where a text is wanted; None if its schema is too particular."""
    arguments = example_arguments(tool.parameters, task.question)
    for name in ("code", "program", "script"):
        if name in arguments:
            arguments[name] = f"print({task.answer[0]!r})"
    return arguments if not tool.argument_error(arguments) else None


# --- Rows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Question:
    """A row of the file, understood."""

    id: str
    text: str
    answers: tuple[str, ...]
    multiple_choice: bool
    line: int
    other_fields: Mapping[str, Any]
    has_own_id: bool


class _ImageRow(Exception):
    """The row has an image, which no text policy can see."""


def _understand(row: Any, names: Mapping[str, str], line: int) -> _Question:
    """The question of a row. Raises ValueError saying what is wrong with it, `_ImageRow` for one with an image."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be an object with fields, not {type(row).__name__}")
    found = {role: _find_field(row, role, names) for role in FIELDS}
    for role in ("question", "answer"):
        if found[role] is None:
            has = ", ".join(map(str, row)) or "none"
            raise ValueError(f'no field looks like the {role} (there are: {has}); name it in fields={{"{role}": ...}}')
    values = {role: row[name] for role, name in found.items() if name is not None}
    if values.get("image") not in (None, "", {}, []):
        raise _ImageRow
    text = values["question"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the question must be a text, not {_short(text)}")
    own_id = values.get("id")
    has_own_id = own_id not in (None, "")
    if has_own_id and (isinstance(own_id, bool) or not isinstance(own_id, str | int)):
        raise ValueError(f"the id must be a text or a whole number, not {_short(own_id)}")
    task_id = str(own_id) if has_own_id else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    answers = reference_answers(values["answer"])
    for value in (text, task_id, *answers):
        _check_unicode(value)
    answer_type = str(values.get("answer_type") or "").casefold().replace("_", "").replace(" ", "")
    others = {key: value for key, value in row.items() if key not in found.values()}
    return _Question(task_id, text, answers, answer_type == _MULTIPLE_CHOICE, line, others, has_own_id)


def _find_field(row: Mapping[str, Any], role: str, names: Mapping[str, str]) -> str | None:
    """The name of the row's field for `role`; None if there is none."""
    if role in names:
        return names[role] if names[role] in row else None
    for name in FIELDS[role]:
        if name in row:
            return name
    by_lower = {key.strip().casefold(): key for key in row if isinstance(key, str)}
    return next((by_lower[name] for name in FIELDS[role] if name in by_lower), None)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"it is not UTF-8: {_short(text)}") from None


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 60 else f"{text[:57]}..."


# --- Files -------------------------------------------------------------------------------------------------------

# What a scan yields for every row: its line (from 1), where it begins, and the row, or what is wrong with it.
_Scanned = tuple[int, int, Any, str]


def _scan_jsonl(path: Path) -> Iterator[_Scanned]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                offset, line = 3, line[3:]
            if line.strip():
                row, problem = _decode(line)
                yield number, offset, row, problem
            offset += len(line)


def _decode(line: bytes) -> tuple[Any, str]:
    try:
        return json.loads(line.decode(), parse_constant=_refuse_constant), ""
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at character {error.colno}"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _scan_table(path: Path, delimiter: str) -> Iterator[_Scanned]:
    """The rows of a table under the names of its header, which is the first row."""
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD_CHARS))
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        for line in file:
            position += len(line)
            yield line.decode("utf-8", "surrogateescape")

    with path.open("rb") as file:
        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            offset, line = position, reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if header is None:
                    raise ValueError(f"{path}, line {line}: the header is not a row of the table: {error}") from None
                yield line, offset, None, f"not a row of the table: {error}"
                continue
            if not any(cells):
                continue
            if header is None:
                header = _header(path, cells)
            elif len(cells) != len(header):
                yield line, offset, None, f"{len(cells)} fields, while the header has {len(header)}"
            else:
                yield line, offset, _row(header, cells), ""


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    header = [cell.removeprefix("\ufeff").strip() for cell in cells]
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise ValueError(f"{path}: the header has {twice[0]!r} twice")
    return header


def _row(header: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    return {name: cell for name, cell in zip(header, cells) if name}


def _read_json(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:  # of which UnicodeDecodeError is one
        raise ValueError(f"{path}: not JSON in UTF-8: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: a .json file must hold a list of rows, not {type(rows).__name__}")
    return rows


_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".ndjson", ".json", *_DELIMITERS)


@dataclass(frozen=True, eq=False)
class _QuestionFile:
    """A file and where its usable rows are; `hashes` are of their ids, `order` sorts them."""

    path: Path
    stamp: tuple[int, int]
    names: Mapping[str, str]
    rows: Sequence[Any] | None  # of a .json file
    header: Sequence[str]
    offsets: np.ndarray
    lines: np.ndarray
    hashes: np.ndarray
    order: np.ndarray
    num_bad: int
    num_images: int
    num_repeated: int

    def rows_of(self, split: str | None, test_fraction: float) -> np.ndarray:
        """The row numbers of a split, [num_rows]."""
        if split is None:
            return np.arange(len(self.offsets), dtype=np.uint32)
        in_test = self.hashes.astype(np.float64) < test_fraction * 2.0**64
        return np.flatnonzero(in_test == (split == "test")).astype(np.uint32)

    def read(self, row: int) -> _Question:
        """The question of a row, read from the file."""
        if _stamp(self.path) != self.stamp:
            raise RuntimeError(f"{self.path} has changed since it was read; make the environment again")
        return _understand(self._raw(int(self.offsets[row])), self.names, int(self.lines[row]))

    def find(self, task_id: Any) -> _Question:
        """The question of this id."""
        if isinstance(task_id, str):
            place = np.searchsorted(self.hashes, _hash(task_id), sorter=self.order)
            if place < len(self.order):
                question = self.read(int(self.order[place]))
                if question.id == task_id:
                    return question
        raise ValueError(f"task_id: {self.path} has no question {task_id!r}")

    def _raw(self, offset: int) -> Any:
        if self.rows is not None:
            return self.rows[offset]
        with self.path.open("rb") as file:
            file.seek(offset)
            delimiter = _DELIMITERS.get(self.path.suffix.casefold())
            if delimiter is None:
                return json.loads(file.readline().decode())
            lines = (line.decode("utf-8", "surrogateescape") for line in file)
            return _row(self.header, next(csv.reader(lines, delimiter=delimiter, strict=True)))


def _hash(task_id: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big"))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"path: cannot read {path}: {error.strerror or error}") from None
    return status.st_mtime_ns, status.st_size


_indices: dict[tuple[Any, ...], _QuestionFile] = {}
_indices_lock = threading.Lock()


def _forget_lock() -> None:
    """In a forked child: the lock may have been held by a thread that stayed with the parent."""
    global _indices_lock
    _indices_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _index(path: Any, names: tuple[tuple[str, str], ...], on_bad_row: str, numeric: bool) -> _QuestionFile:
    """The index of a file, made once a process for each way of reading it."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"path must be the path of a file with questions, not {path!r}")
    file = Path(path).expanduser().absolute()
    if file.suffix.casefold() not in SUFFIXES:
        raise ValueError(f"path: {file} must end in one of {', '.join(SUFFIXES)}")
    if file.is_dir():
        raise ValueError(f"path: {file} is a folder")
    key = (file, _stamp(file), names, on_bad_row, numeric)
    with _indices_lock:
        if key not in _indices:
            if len(_indices) >= _MAX_INDICES:
                _indices.pop(next(iter(_indices)))
            _indices[key] = _read_index(file, dict(names), on_bad_row, numeric)
        return _indices[key]


def _read_index(path: Path, names: Mapping[str, str], on_bad_row: str, numeric: bool) -> _QuestionFile:
    stamp = _stamp(path)
    suffix = path.suffix.casefold()
    rows = _read_json(path) if suffix == ".json" else None
    if rows is not None:
        scanned: Iterator[_Scanned] = ((number + 1, number, row, "") for number, row in enumerate(rows))
    elif suffix in _DELIMITERS:
        scanned = _scan_table(path, _DELIMITERS[suffix])
    else:
        scanned = _scan_jsonl(path)
    try:
        return _collect(scanned, path, stamp, names, rows, on_bad_row, numeric)
    except OSError as error:
        raise ValueError(f"path: cannot read {path}: {error.strerror or error}") from None


def _collect(
    scanned: Iterator[_Scanned],
    path: Path,
    stamp: tuple[int, int],
    names: Mapping[str, str],
    rows: Sequence[Any] | None,
    on_bad_row: str,
    numeric: bool,
) -> _QuestionFile:
    where = "line" if rows is None else "row"
    bad = _BadRows(path, where, refuse=on_bad_row == "error")
    # Arrays, since a list of a million pairs takes ten times the memory.
    hashes, offsets, lines, own_ids = array("Q"), array("q"), array("L"), bytearray()
    num_images = 0
    for line, offset, raw, problem in scanned:
        try:
            question = _checked(raw, problem, names, line, numeric)
        except _ImageRow:
            num_images += 1
        except ValueError as error:
            bad.add(line, str(error))
        else:
            hashes.append(int(_hash(question.id)))
            offsets.append(offset)
            lines.append(line)
            own_ids.append(question.has_own_id)
    unique, first = np.unique(np.array(hashes, dtype=np.uint64), return_index=True)
    is_first = np.zeros(len(hashes), dtype=bool)
    is_first[first] = True
    num_repeated = 0
    for row in np.flatnonzero(~is_first):
        if own_ids[row]:
            earlier = lines[int(first[np.searchsorted(unique, hashes[row])])]
            bad.add(lines[row], f"its id stands in {where} {earlier} already")
        else:
            num_repeated += 1
    if not hashes:
        first_problem = f"; {bad.first}" if bad.first else ""
        raise ValueError(
            f"path: {path} has no usable question ({bad.num} bad rows, {num_images} with images){first_problem}"
        )
    bad.warn()
    kept = np.flatnonzero(is_first)
    kept_hashes = np.array(hashes, dtype=np.uint64)[kept]
    return _QuestionFile(
        path=path,
        stamp=stamp,
        names=names,
        rows=rows,
        header=_table_header(path),
        offsets=np.array(offsets, dtype=np.int64)[kept],
        lines=np.array(lines, dtype=np.uint32)[kept],
        hashes=kept_hashes,
        order=np.argsort(kept_hashes).astype(np.uint32),
        num_bad=bad.num,
        num_images=num_images,
        num_repeated=num_repeated,
    )


@dataclass
class _BadRows:
    """Counts the rows that cannot be used, or refuses the first one."""

    path: Path
    where: str
    refuse: bool
    num: int = 0
    first: str = ""

    def add(self, line: int, problem: str) -> None:
        if self.refuse:
            hint = "on_bad_row='skip' leaves such rows out"
            raise ValueError(f"{self.path}, {self.where} {line}: {problem}; {hint}")
        self.num += 1
        self.first = self.first or f"{self.where} {line}: {problem}"

    def warn(self) -> None:
        if self.num:
            logger.warning(
                "%s: rows left out, as they cannot be used: %d; the first: %s", self.path, self.num, self.first
            )


def _checked(raw: Any, problem: str, names: Mapping[str, str], line: int, numeric: bool) -> _Question:
    if problem:
        raise ValueError(problem)
    question = _understand(raw, names, line)
    if numeric and not all(is_number(answer) for answer in question.answers):
        raise ValueError(f"judge 'numeric' cannot read the answer {_short(question.answers[0])} as a number")
    return question


def _table_header(path: Path) -> Sequence[str]:
    delimiter = _DELIMITERS.get(path.suffix.casefold())
    if delimiter is None:
        return ()
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        return _header(path, next(cells for cells in csv.reader(file, delimiter=delimiter, strict=True) if any(cells)))
