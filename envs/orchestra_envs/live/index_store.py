"""The folder of a local search index: replaced as a whole, never half.

    INDEX/
      index.json        the manifest; names the build that counts, its files and their sizes
      build-1f2e.../    passages.jsonl, offsets.npy, bm25/, vectors.npy, report.json
      .lock

A build writes into a folder of its own and at last replaces the manifest, which is one atomic step: whoever opens the
index finds the old build or the new one, whole. Builders hold a file lock on their folder (the system lets go of it
when they die), so what a killed one left is told from what another is still writing, and swept away by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not a POSIX system: builds are still replaced as a whole, but leftovers stay
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
"""Of the folder and of how text is cut into words: an index of another format must be built again."""

MANIFEST = "index.json"
_BUILD_NAME = re.compile(r"build-[0-9a-f]{16}")


@dataclass(frozen=True)
class Stored:
    """An index as it lies on disk: its manifest, the manifest's bytes, and the folder of its files."""

    path: Path
    manifest: Mapping[str, Any]
    raw: bytes
    files: Path


@contextlib.contextmanager
def new_build(index: Path) -> Iterator[Path]:
    """A new folder for the files of a build; it is gone again at the end unless `commit` was called.

    Raises:
        ValueError: `index` is a folder that holds other things, or no folder.
    """
    _check_place(index)
    index.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with _locked(index / ".lock"):
            folder = index / f"build-{secrets.token_hex(8)}"
            folder.mkdir()
            stack.enter_context(_locked(folder / ".lock"))
        try:
            yield folder
        finally:
            if _current(index) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)


def commit(index: Path, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Makes the build in `folder` the one that counts, and sweeps away older ones and what killed builders left."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    for path in files:
        _sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    whole = {"format": FORMAT, "build": folder.name, **manifest, "files": sizes}
    draft = index / f".{folder.name}.json"
    draft.write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
    _sync(draft)
    with _locked(index / ".lock"):
        os.replace(draft, index / MANIFEST)
        _sync(index)
        for other in index.glob("build-*"):
            if other != folder and _is_free(other):
                shutil.rmtree(other, ignore_errors=True)
        for other in index.glob(".build-*.json"):
            if not (index / other.name[1:-5]).exists():
                other.unlink(missing_ok=True)


def read_index(index: Path) -> Stored:
    """The index in a folder, its files checked by size.

    Raises:
        ValueError: there is none, it was never finished, it is damaged, or another version made it.
    """
    while True:
        raw = _manifest_bytes(index)
        try:
            return _checked(index, raw)
        except FileNotFoundError as error:
            # Replaced since we read the manifest? Then there is another one to read.
            if _manifest_bytes(index) == raw:
                missing = Path(error.filename).name
                raise ValueError(f"index {index} is damaged ({missing} is missing): build it again") from None


def _manifest_bytes(index: Path) -> bytes:
    try:
        return (index / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pass
    if not index.is_dir():
        raise ValueError(f"index {index}: there is no such folder; make it with `orchestra index DOCS {index}`")
    if any(_BUILD_NAME.fullmatch(path.name) for path in index.iterdir()):
        raise ValueError(f"index {index} was never finished (its build was interrupted, or still runs): build it again")
    raise ValueError(f"{index} is no search index (it has no {MANIFEST})")


def _checked(index: Path, raw: bytes) -> Stored:
    damaged = f"index {index} is damaged"
    try:
        manifest = json.loads(raw)
        version, build, sizes = manifest["format"], manifest["build"], manifest["files"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{damaged} ({MANIFEST} cannot be read): build it again") from None
    if version != FORMAT:
        raise ValueError(
            f"index {index} has format {version!r} and this version reads {FORMAT}: build it again with this version"
        )
    if not isinstance(build, str) or not _BUILD_NAME.fullmatch(build) or not isinstance(sizes, dict):
        raise ValueError(f"{damaged} ({MANIFEST} names no build): build it again")
    for name, size in sizes.items():
        found = (index / build / name).stat().st_size
        if found != size:
            raise ValueError(f"{damaged} ({name} has {found:,} bytes, not {size:,}): build it again")
    return Stored(index, manifest, raw, index / build)


def _current(index: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((index / MANIFEST).read_bytes())["build"])
    return ""


def _check_place(index: Path) -> None:
    if index.exists() and not index.is_dir():
        raise ValueError(f"index {index} is a file; name a folder")
    ours = re.compile(rf"\.lock|{re.escape(MANIFEST)}|\.?build-[0-9a-f]{{16}}(\.json)?")
    others = [path.name for path in index.iterdir() if not ours.fullmatch(path.name)] if index.exists() else []
    if others:
        raise ValueError(f"index {index} is a folder with other things in it ({min(others)}); name a new one")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_free(folder: Path) -> bool:
    """Whether no builder works in `folder`."""
    if not fcntl:
        return False
    try:
        with (folder / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not folder.exists()
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
