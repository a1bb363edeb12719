"""Documents as passages: reads text files of several formats and cuts them into overlapping pieces.

    for passage in passages(documents("docs/", problems)):
        passage.id     # "guide/setup.md#3": the fourth passage of that file
        passage.text

Formats: .txt, .text, .md, .markdown, .rst; .html, .htm (tags stripped); .json (an object with a text, or a list of
those); .jsonl, .ndjson (one such object a line). The text of an object is its field "text", "contents", "content" or
"body"; "title" and "id" (or "_id") are used if they are there. Whatever cannot be read as it should is noted.
"""

from __future__ import annotations

import html.parser
import json
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_FIELDS = ("text", "contents", "content", "body")
PLAIN_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
HTML_SUFFIXES = (".html", ".htm")
JSON_SUFFIXES = (".json",)
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")

_SKIPPED_TAGS = frozenset(("script", "style", "noscript", "template", "svg"))
# fmt: off
_BLOCK_TAGS = frozenset((
    "address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figure", "footer", "form", "h1", "h2",
    "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td", "th", "tr",
    "ul",
))
# fmt: on
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE_END = re.compile(r"[.!?](?=\s)\s+|[。！？]|\n")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was not read as it stands. `lost` says whether its text is missing from the index."""

    where: str
    reason: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class Document:
    """One text with a name that does not change from build to build; `title` may be empty."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document; its id is the document's with the piece's number ("file.txt#0")."""

    id: str
    title: str
    text: str


Report = Callable[[Problem], None]


def documents(
    source: str | os.PathLike[str] | Iterable[str | Mapping[str, Any]], report: Report, *, leave_out: Path | None = None
) -> Iterator[Document]:
    """The documents of a folder (and its folders), of one file, or of an iterable of texts or objects.

    Files come sorted by name, hidden ones and links to folders are left out, and so is the folder `leave_out`.

    Raises:
        ValueError: there is no such path.
    """
    if not isinstance(source, str | os.PathLike):
        for number, item in enumerate(source):
            yield from _object_document(item, f"doc{number}", report)
        return
    path = Path(source)
    if path.is_dir():
        for file in _files(path, leave_out, report):
            yield from _file_documents(file, file.relative_to(path).as_posix(), report)
    elif path.exists():
        yield from _file_documents(path, path.name, report)
    else:
        raise ValueError(f"documents: there is no file or folder {str(path)!r}")


def passages(source: Iterable[Document], *, max_chars: int, overlap_chars: int) -> Iterator[Passage]:
    """The passages of documents, in order."""
    for document in source:
        for number, (start, end) in enumerate(
            passage_spans(document.text, max_chars=max_chars, overlap_chars=overlap_chars)
        ):
            yield Passage(f"{document.id}#{number}", document.title, document.text[start:end])


def passage_spans(text: str, *, max_chars: int, overlap_chars: int) -> list[tuple[int, int]]:
    """Start and end of each passage of `text`, at most `max_chars` long.

    A passage ends with a paragraph if one ends in its second half, else with a sentence, else with a word, else in the
    middle of it, but never between a letter and its accent. The next one begins up to `overlap_chars` before that
    end, with a word if there is one. Together they hold every character of the text that is not white space.
    """
    spans = []
    start = _skip_space(text, 0)
    while start < len(text):
        end = _passage_end(text, start, max_chars)
        spans.append((start, start + len(text[start:end].rstrip())))
        if _skip_space(text, end) == len(text):
            break
        start = _skip_space(text, _next_start(text, start, end, overlap_chars))
    return spans


def _passage_end(text: str, start: int, max_chars: int) -> int:
    limit = start + max_chars
    if len(text) <= limit:
        return len(text)
    earliest = start + max(1, max_chars // 2)
    for boundary in (_PARAGRAPH_END, _SENTENCE_END, _SPACE):
        ends = [found.end() for found in boundary.finditer(text, earliest, limit)]
        if ends:
            return ends[-1]
    end = limit
    while end > earliest and unicodedata.combining(text[end]):
        end -= 1
    return end


def _next_start(text: str, start: int, end: int, overlap_chars: int) -> int:
    """Where the passage after [start, end) begins: after `start`, at `end` at the latest."""
    earliest = max(start + 1, end - overlap_chars)
    if overlap_chars == 0 or earliest >= end:
        return end
    if text[earliest - 1].isspace():
        return earliest
    word = _SPACE.search(text, earliest, end)
    if word:
        return word.end()
    while earliest < end and unicodedata.combining(text[earliest]):
        earliest += 1
    return earliest


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _files(folder: Path, leave_out: Path | None, report: Report) -> Iterator[Path]:
    left_out = leave_out.resolve() if leave_out else None

    def note(error: OSError) -> None:
        name = Path(error.filename).relative_to(folder).as_posix()
        report(Problem(name, f"the folder cannot be read: {error.strerror}"))

    for parent, names, files in os.walk(folder, onerror=note):
        here = Path(parent)
        for name in names:
            if (here / name).is_symlink():
                report(Problem((here / name).relative_to(folder).as_posix(), "a link to a folder"))
        names[:] = sorted(name for name in names if not name.startswith(".") and left_out != (here / name).resolve())
        yield from (here / name for name in sorted(files) if not name.startswith("."))


def _file_documents(path: Path, name: str, report: Report) -> Iterator[Document]:
    name = name.encode("utf-8", "replace").decode()  # file names need not be UTF-8
    suffix = path.suffix.lower()
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            report(Problem(name, "not a regular file"))
        elif suffix in JSON_LINES_SUFFIXES:
            yield from _json_lines(path, name, report)
        elif suffix in JSON_SUFFIXES:
            yield from _json_file(_text_of(path.read_bytes(), name, report), name, report)
        elif suffix in HTML_SUFFIXES:
            source = _text_of(path.read_bytes(), name, report)
            title, text = ("", None) if source is None else _strip_html(source)
            yield from _checked(name, title, text, report)
        elif suffix in PLAIN_SUFFIXES:
            yield from _checked(name, "", _text_of(path.read_bytes(), name, report), report)
        else:
            report(Problem(name, f"{suffix or 'no suffix'}: not a known text format"))
    except OSError as error:
        report(Problem(name, f"cannot be read: {error.strerror or error}"))


def _text_of(data: bytes, name: str, report: Report) -> str | None:
    """The text of a file; None (and a note) if it is binary. Other encodings than UTF-8 are guessed, and noted."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        report(Problem(name, "UTF-16, not UTF-8", lost=False))
        return data.decode("utf-16", errors="replace")
    if b"\x00" in data:
        report(Problem(name, "binary"))
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        report(Problem(name, "not UTF-8; read as Windows-1252", lost=False))
        return data.decode("cp1252", errors="replace")


def _json_lines(path: Path, name: str, report: Report) -> Iterator[Document]:
    with path.open("rb") as lines:
        empty = True
        for number, line in enumerate(lines, start=1):
            where = f"{name}:{number}"
            if not line.strip():
                continue
            empty = False
            text = _text_of(line, where, report)
            if text is not None:
                yield from _json_document(text, where, report)
        if empty:
            report(Problem(name, "empty"))


def _json_file(text: str | None, name: str, report: Report) -> Iterator[Document]:
    if text is None:
        return
    if not text.strip():
        report(Problem(name, "empty"))
        return
    yield from _json_document(text, name, report)


def _json_document(text: str, where: str, report: Report) -> Iterator[Document]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        report(Problem(where, f"not JSON: {error}"))
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _object_document(item, f"{where}[{number}]", report)
    else:
        yield from _object_document(value, where, report)


def _object_document(value: Any, where: str, report: Report) -> Iterator[Document]:
    if isinstance(value, str):
        yield from _checked(where, "", value, report)
        return
    if not isinstance(value, Mapping):
        report(Problem(where, f"neither a text nor an object with one, but {type(value).__name__}"))
        return
    text = next((value[key] for key in TEXT_FIELDS if isinstance(value.get(key), str)), None)
    if text is None:
        report(Problem(where, f"no text in any of the fields {', '.join(TEXT_FIELDS)}"))
        return
    own_id = next((value[key] for key in ("id", "_id") if isinstance(value.get(key), str | int)), where)
    title = value.get("title")
    yield from _checked(str(own_id), title if isinstance(title, str) else "", text, report, where)


def _checked(name: str, title: str, text: str | None, report: Report, where: str | None = None) -> Iterator[Document]:
    if text is None:
        return
    if not text.strip():
        report(Problem(where or name, "empty"))
        return
    yield Document(_clean(name), " ".join(_clean(title).split()), _clean(text))


def _clean(text: str) -> str:
    """Without lone surrogates (JSON may hold them), which no UTF-8 file can."""
    return text.encode("utf-8", "replace").decode()


def _strip_html(source: str) -> tuple[str, str]:
    """The title and the visible text of an HTML page."""
    reader = _HtmlText()
    reader.feed(source)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    title = " ".join("".join(reader.title).split())
    return title, text or title


class _HtmlText(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self._skipped = ""
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if self._skipped:
            return
        if tag in _SKIPPED_TAGS:
            self._skipped = tag
        elif tag == "title":
            self._in_title = True
        elif tag in _BLOCK_TAGS:
            self.parts.append("\n\n" if tag == "p" else "\n")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        if tag not in _SKIPPED_TAGS:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._skipped:
            self._skipped = ""
        elif tag == "title":
            self._in_title = False
        elif tag in _BLOCK_TAGS and not self._skipped:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            (self.title if self._in_title else self.parts).append(data)
