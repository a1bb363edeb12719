"""Start the launcher, hand it one program, and read its answer."""

import asyncio
import contextlib
import marshal
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.live.sandbox._files import remove_tree

_START_S = 20.0
_HERE = str(Path(__file__).resolve().parent)
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); import _launcher; sys.path.pop(0); _launcher.main()"
_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
_BOX_PREFIX = "orchestra-sandbox-"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use. MB are 2^20 bytes.

    Args:
        wall_s: seconds by the clock.
        cpu_s: seconds of processor time, of all processes together.
        memory_mb: address space of each process, and private memory of all together.
        max_file_mb: all files of the work directory together.
        max_processes: processes and threads together.
        max_output_bytes: what is printed on both streams together; more ends the program.

    Raises:
        ValueError: one is out of range.
    """

    wall_s: float = 30.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    max_file_mb: int = 64
    max_processes: int = 16
    max_output_bytes: int = 1 << 18

    def __post_init__(self) -> None:
        for name, lowest, highest in _BOUNDS:
            value = getattr(self, name)
            kind = int if name not in ("wall_s", "cpu_s") else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= highest:
                what = "a whole number" if kind is int else "a number"
                raise ValueError(f"{name} must be {what} from {lowest} to {highest}, not {value!r}")


_BOUNDS = (
    ("wall_s", 0.1, 86400),
    ("cpu_s", 0.1, 86400),
    ("memory_mb", 64, 1 << 20),
    ("max_file_mb", 1, 1 << 20),
    ("max_processes", 1, 4096),
    ("max_output_bytes", 1024, 1 << 28),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The mechanisms that a call is run behind.

    Args:
        namespaces: "direct" (as root), "user" (within a user namespace) or "" (none).
        landlock: version of the kernel's interface; 0 for none.
        seccomp: whether system calls are filtered.
        drop_root: whether an unused user id is taken on.
    """

    namespaces: str = ""
    landlock: int = 0
    seccomp: bool = False
    drop_root: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of one program.

    Args:
        output: the first bytes of what it printed on both streams, in the order of printing.
        num_output_bytes: how many bytes were printed (at least, if `limit` is "output").
        exit_code: 0 to 255; minus the signal's number if one ended it; None if a limit did.
        limit: "", "cpu", "memory", "wall", "output", "processes" or "files": the limit it was killed for.
        cpu_s: processor seconds of all its processes.
        wall_s: seconds from the launcher's start to its answer.
        reads_past_permissions: whether CAP_DAC_READ_SEARCH was kept, since the interpreter lies where only root can
            read; Landlock (at tier "limits" nothing) then bounds what can be read.
    """

    output: bytes
    num_output_bytes: int
    exit_code: int | None
    limit: str
    cpu_s: float
    wall_s: float
    reads_past_permissions: bool = False


async def run_python(code: str, limits: Limits, plan: Plan, links: Sequence[tuple[str, str]] = ()) -> RunResult:
    """Run `code` behind the walls of `plan`. When this is cancelled, the program and all its children are killed.

    Args:
        code: the program.
        limits: what it may use.
        plan: of `achieved_isolation()`.
        links: of `package_links(...)`, the packages it may import.

    Raises:
        ToolUnavailableError: the launcher could not start, or could not put up a wall; the program was not run.
    """
    box = _make_box(plan)
    try:
        answer = await _exchange(_request(code, limits, plan, links, box), limits.wall_s + _START_S)
    finally:
        _remove_box(box)
    return _result(*_parse(answer), limits)


def run_python_blocking(code: str, limits: Limits, plan: Plan, links: Sequence[tuple[str, str]] = ()) -> RunResult:
    """`run_python` for plain code that runs before any event loop does."""
    box = _make_box(plan)
    try:
        answer = exchange_blocking(_request(code, limits, plan, links, box), limits.wall_s + _START_S)
    finally:
        _remove_box(box)
    return _result(*_parse(answer), limits)


def probe(missing: Sequence[str] = ()) -> dict[str, str]:
    """What the launcher finds on this machine: {mechanism: "yes" or "no: why"}; `missing` ones are not tried."""
    return _parse(exchange_blocking({"missing": sorted(missing)}, _START_S))[0]


def _request(code: str, limits: Limits, plan: Plan, links: Sequence[tuple[str, str]], box: str) -> dict[str, Any]:
    return {
        "code": code,
        "box": box,
        "namespaces": plan.namespaces,
        "landlock": plan.landlock,
        "seccomp": plan.seccomp,
        "drop_root": plan.drop_root,
        "links": [tuple(link) for link in links],
        "limits": {
            "wall_s": float(limits.wall_s),
            "cpu_s": float(limits.cpu_s),
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.max_file_mb << 20,
            "processes": limits.max_processes,
            "output_bytes": limits.max_output_bytes,
        },
    }


def _command() -> list[str]:
    # The interpreter under a virtual environment: the launcher must not see the environment's packages.
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return [executable, "-I", "-S", "-E", "-X", "utf8", "-c", _BOOT, _HERE]


def _encode(request: dict[str, Any]) -> bytes:
    body = marshal.dumps(request)
    return len(body).to_bytes(8, "big") + body


async def _exchange(request: dict[str, Any], timeout_s: float) -> bytes:
    try:
        process = await asyncio.create_subprocess_exec(
            *_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise ToolUnavailableError(f"the sandbox could not start: {error.strerror}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(ConnectionError):  # it died; its answer is empty then
            process.stdin.write(_encode(request))
            await process.stdin.drain()
        return await asyncio.wait_for(process.stdout.read(), timeout_s)
    except TimeoutError:
        raise ToolUnavailableError(f"the sandbox gave no answer within {timeout_s:g} s") from None
    finally:
        await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Let the launcher clean up and end; it does so as soon as its standard input is closed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _START_S / 2)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # the warden then kills the rest
        raise


def exchange_blocking(request: dict[str, Any], timeout_s: float) -> bytes:
    """Send one request to a new launcher and wait for the answer."""
    try:
        process = subprocess.Popen(
            _command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise ToolUnavailableError(f"the sandbox could not start: {error.strerror}") from error
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_encode(request))
                process.stdin.flush()
            return process.stdout.read()
        finally:
            timer.cancel()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]


def _parse(answer: bytes) -> tuple[dict[str, str], bytes]:
    head, found, output = answer.partition(b"\n\n")
    report = dict(line.partition(" ")[::2] for line in head.decode(errors="replace").splitlines())
    if not found:
        raise ToolUnavailableError("the sandbox ended without an answer")
    if report.get("failed"):
        raise ToolUnavailableError(f"the sandbox could not be put up: {report['failed']}")
    return report, output


def _result(report: dict[str, str], output: bytes, limits: Limits) -> RunResult:
    status, limit, cpu_s = int(report["status"]), report["limit"], float(report["cpu_s"])
    if status == -1 and not limit:
        raise ToolUnavailableError("the sandbox was killed from outside")
    exit_code = None if status == -1 else os.waitstatus_to_exitcode(status)
    if exit_code == -24 or (exit_code == -9 and not limit and cpu_s > limits.cpu_s - 0.1):  # SIGXCPU, SIGKILL
        limit = "cpu"
    return RunResult(
        output=output,
        num_output_bytes=int(report["num_bytes"]),
        exit_code=None if limit else exit_code,
        limit=limit,
        cpu_s=cpu_s,
        wall_s=float(report["wall_s"]),
        reads_past_permissions=report["reads_all"] == "1",
    )


# Boxes: folders of calls where there is no mount namespace. Their name tells whose they are.


def _make_box(plan: Plan) -> str:
    if plan.namespaces:
        return ""
    name = f"{_BOX_PREFIX}{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(8)}"
    path = os.path.join(os.path.realpath(tempfile.gettempdir()), name)
    os.mkdir(path, 0o700)
    return path


def _remove_box(box: str) -> None:
    """Remove what a launcher that was killed left behind."""
    if box and os.path.lexists(box):
        with contextlib.suppress(OSError):
            remove_tree(box)


def remove_stale_boxes() -> int:
    """Remove the boxes of processes that are gone (killed together with their launchers); how many there were."""
    folder, count = os.path.realpath(tempfile.gettempdir()), 0
    for name in os.listdir(folder):
        pid, _, rest = name.removeprefix(_BOX_PREFIX).partition("-")
        path = os.path.join(folder, name)
        if not name.startswith(_BOX_PREFIX) or not pid.isdigit() or rest.partition("-")[0] == _start_of(int(pid)):
            continue
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                _remove_box(path)
                count += 1
    return count


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks since the machine did; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
