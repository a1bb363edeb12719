"""A peer: a worker process in an environment of its own, told by JSON lines what to run, answering by JSON lines.

Its first line is `{"versions": {...}}`; every answer is `{"seconds": s, "tokens": n}` or `{"error": text}`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """What a peer said of something that it cannot do, or of its end."""


class Peer:
    """A worker of this folder, started at once.

    Args:
        python: the Python of the peer's environment.
        worker: the file, from this folder.

    Raises:
        PeerError: it does not start; the text is the end of what it wrote.
    """

    def __init__(self, python: str, worker: str) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (open as long as the worker)
        command = [python, str(Path(__file__).parent / worker)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said, text=True)
        except OSError as error:
            raise PeerError(f"{python}: {error}") from None
        self.versions: dict[str, str] = self._answer()["versions"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            PeerError: it could not do it, or it ended.
        """
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will be its last words
        answer = self._answer()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the worker."""
        self._process.kill()
        self._process.wait()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        last = self._said.read().strip().splitlines()[-1:]
        raise PeerError(f"the worker ended with code {self._process.returncode}: {' '.join(last)}")


def start_peers(workers: dict[str, tuple[str | None, str, str]]) -> tuple[dict[str, Peer], dict[str, Any]]:
    """Starts the peers that were asked for.

    Args:
        workers: by the peer's name: the Python (None: not asked for), the worker's file, and the flag that asks.

    Returns:
        The peers that run, and for the JSON what each of all is: its versions, or why it is absent.
    """
    peers: dict[str, Peer] = {}
    about: dict[str, Any] = {}
    for name, (python, worker, flag) in workers.items():
        if python is None:
            about[name] = f"absent: {flag} was not given"
            continue
        try:
            peers[name] = Peer(python, worker)
            about[name] = peers[name].versions
        except PeerError as error:
            about[name] = f"absent: {error}"
    return peers, about
