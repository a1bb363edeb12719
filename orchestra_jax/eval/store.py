"""The folder of an evaluation (`orchestra eval --out FOLDER`): finished episodes, kept as they come.

    eval.json                      what was evaluated; the same command goes on, another one is refused
    episodes/SUITE/POLICY.jsonl    one finished episode a line
    verdicts/                      of language models that judged, so that none is paid for twice
    summary.json                   when all is done

A line is written whole and flushed at once, so that a killed evaluation loses at most the episodes under way; a line
that a crash of the machine cut is removed when the folder is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from orchestra_jax.config import ConfigError

Key = tuple[int, int]
"""Number of the task within its suite, and trial."""

_SYNC_EVERY_S = 1.0
_SHOWN_DIFFERENCES = 3


def read_episodes(folder: Path, suite: str, policy: str) -> list[dict[str, Any]]:
    """The episodes that a finished evaluation's folder holds of a policy, by task and trial; the last try of each.

    Raises:
      OSError: there are none.
    """
    lines = episodes_file(folder, suite, policy).read_text(encoding="utf-8").splitlines()
    last = {(record["number"], record["trial"]): record for record in map(json.loads, lines)}
    return [last[key] for key in sorted(last)]


def episodes_file(folder: Path, suite: str, policy: str) -> Path:
    """Where an evaluation keeps the episodes of a policy."""
    return folder / "episodes" / _file_name(suite) / f"{_file_name(policy)}.jsonl"


class EvalStore:
    """Keeps the episodes of one evaluation; one process at a time.

    Args:
      folder: made if it is not there.
      spec: plain JSON that says what is evaluated, with "suites" and "policies" by name. What the folder holds must
        agree with it for the names that both have; new ones are added.

    Raises:
      ConfigError: the folder holds another evaluation (says what differs), is used by another process, cannot be
        written, or a file in it is damaged.
    """

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder = folder
        self._files: dict[Path, IO[bytes]] = {}
        self._synced_s = time.monotonic()
        self._is_closed = False
        plain = json.loads(json.dumps(spec))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open(plain)
        except BlockingIOError:
            raise ConfigError(f"--out {folder}: another evaluation is writing into it") from None
        except OSError as error:
            raise ConfigError(f"--out {folder}: {error.strerror or error}") from None

    def finished(self, suite: str, policy: str) -> dict[Key, dict[str, Any]]:
        """The episodes that the folder holds; those dropped as "infra_error" are left out, to be tried again.

        Raises:
          ConfigError: a line in the middle of the file is damaged.
        """
        file = self._file(suite, policy)
        if not file.is_file():
            return {}
        found: dict[Key, dict[str, Any]] = {}
        good_bytes = 0
        lines = file.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it is cut")
                record = json.loads(line)
                found[record["number"], record["trial"]] = record
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise ConfigError(f"{file}: line {number} is damaged ({error}); delete the line") from None
                os.truncate(file, good_bytes)  # the last one was being written
                break
            good_bytes += len(line)
        return {key: record for key, record in found.items() if record.get("end_reason") != "infra_error"}

    def append(self, suite: str, policy: str, record: Mapping[str, Any]) -> None:
        """Keeps one finished episode; it has "number" and "trial". One that ends after `close` is not kept."""
        if self._is_closed:
            return
        file = self._file(suite, policy)
        if file not in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._files[file] = file.open("ab")
        self._files[file].write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._files[file].flush()
        if time.monotonic() - self._synced_s > _SYNC_EVERY_S:
            self._sync()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, whole or not at all."""
        self._sync()
        _write_json(self.folder / "summary.json", summary)

    def close(self) -> None:
        """Closes the files; another process may open the folder."""
        self._is_closed = True
        self._sync()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.close()

    def _open(self, spec: dict[str, Any]) -> None:
        file = self.folder / "eval.json"
        if not file.is_file():
            if any(path.name != ".lock" for path in self.folder.iterdir()):
                raise ConfigError(f"--out {self.folder}: it holds something else, and no eval.json; give a new folder")
            _write_json(file, spec)
            return
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            merged = {**held, **spec}
            for part in ("suites", "policies"):
                merged[part] = {**held[part], **spec[part]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({error}); give a new folder") from None
        differing = list(_differences(held, merged, ""))
        if differing:
            more = len(differing) - _SHOWN_DIFFERENCES
            listed = "; ".join(differing[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            raise ConfigError(f"--out {self.folder} holds another evaluation: {listed}; give a new folder")
        if merged != held:
            _write_json(file, merged)

    def _file(self, suite: str, policy: str) -> Path:
        return episodes_file(self.folder, suite, policy)

    def _sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())
        self._synced_s = time.monotonic()


def _differences(held: Any, wanted: Any, key: str) -> Iterator[str]:
    """What of `held` is otherwise in `wanted`, as "key: was X, is Y"."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        for name in dict.fromkeys([*held, *wanted]):
            inner = f"{key}.{name}" if key else name
            if name not in held and not key:
                continue
            if key in ("suites", "policies") and name not in held:
                continue
            yield from _differences(held.get(name), wanted.get(name), inner)
    elif held != wanted:
        yield f"{key} was {_short(held)}, is {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _file_name(name: str) -> str:
    """A name as a file's: what is not letters, digits, dot, dash or underscore is written as its code."""
    text = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"%{ord(found[0]):02X}", name)
    return f"%2E{text[1:]}" if text.startswith(".") else text


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    staging = file.with_name(file.name + ".tmp")
    staging.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(staging, file)
