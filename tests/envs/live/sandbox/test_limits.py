"""Limits of the sandbox: each is met, told in words, and nothing of the program is left afterwards."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.live.sandbox import Limits, Plan, RunResult, isolation, run_python
from orchestra_envs.live.sandbox.run import run_python_blocking
from orchestra_envs.live.sandbox.tool import describe

LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=300, max_file_mb=8, max_processes=12)
SHORT = Limits(wall_s=1, cpu_s=20, memory_mb=300, max_file_mb=8, max_processes=12)
QUICK = Limits(wall_s=20, cpu_s=1, memory_mb=300, max_file_mb=8, max_processes=12)


def cases(table: dict, quick: set[str]) -> list:
    """Names of cases; all but the quick ones are marked slow (many wait for a clock)."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in table]


def below(pid: int) -> set[int]:
    """Processes below `pid`, dead ones that nobody collected included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = {int(word) for word in task.read_text().split()}
        except OSError:
            continue
        found |= children.union(*map(below, children))
    return found


def boxes() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"orchestra-sandbox-{os.getpid()}-")}


def run(code: str, plan: Plan, limits: Limits = LIMITS) -> RunResult:
    result = run_python_blocking(code, limits, plan)
    assert not boxes()
    return result


BUSY = {
    "loop": "while True: pass",
    "number": "10 ** (10 ** 9)",
    "pattern": "import re; re.match('(a+)+$', 'a' * 50 + 'b')",
    "ignored signals": "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "children": "import os\nwhile True:\n    if os.fork() == 0:\n        for i in range(10 ** 6): pass\n"
    "        os._exit(0)\n    os.wait()",
}


@pytest.mark.parametrize("name", cases(BUSY, {"loop", "pattern", "children"}))
def test_processor_time_is_bounded(name: str, any_plan: Plan) -> None:
    result = run(BUSY[name], any_plan, QUICK)
    assert result.limit == "cpu"
    assert result.exit_code is None
    assert 0.8 < result.cpu_s < 3
    assert describe(result, QUICK, 1000) == "[killed: cpu limit of 1 s]"


IDLE = {
    "sleep": "import time; print('before'); time.sleep(1000)",
    "deaf": "import signal, time\nprint('before')\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    "time.sleep(1000)",
    "stopped": "import os, signal; print('before'); os.kill(os.getpid(), signal.SIGSTOP)",
    "threads": "import threading, time; print('before'); threading.Thread(target=time.sleep, args=(1000,)).start()",
    "input": "import os; print('before'); r, w = os.pipe(); os.read(r, 1)",
}


@pytest.mark.parametrize("name", cases(IDLE, {"sleep", "stopped"}))
def test_the_clock_is_bounded(name: str, any_plan: Plan) -> None:
    result = run(IDLE[name], any_plan, Limits(wall_s=0.5))
    assert result.limit == "wall"
    assert 0.5 <= result.wall_s < 5
    assert describe(result, Limits(wall_s=0.5), 1000) == "before\n[killed: wall clock limit of 0.5 s]"


def test_memory_of_one_process_is_bounded(any_plan: Plan) -> None:
    result = run("print('before')\nparts = []\nwhile True: parts.append(bytearray(10 ** 7))", any_plan)
    assert result.exit_code == 1
    assert describe(result, LIMITS, 1000).endswith("MemoryError\n[memory limit: 300 MB]\n[exit status 1]")
    assert run("try: bytearray(10 ** 10)\nexcept MemoryError: print('refused')", any_plan).output == b"refused\n"


def test_memory_of_all_processes_is_bounded(any_plan: Plan) -> None:
    code = """
import os, time
for i in range(8):
    if os.fork() == 0:
        block = bytearray(120 << 20)
        for j in range(0, len(block), 4096):
            block[j] = 1
        time.sleep(30)
time.sleep(30)
"""
    result = run(code, any_plan)
    assert result.limit == "memory"
    assert describe(result, LIMITS, 1000) == "[killed: memory limit of 300 MB]"


def test_memory_shared_with_children_counts_once(any_plan: Plan) -> None:
    code = """
import os, time
block = bytes(1) * (150 << 20)
child = os.fork()
if child == 0:
    time.sleep(0.5)
    os._exit(0)
os.waitpid(child, 0)
len(block) >> 20
"""
    assert run(code, any_plan, Limits(memory_mb=250)).output == b"150\n"


FORKS = {
    "bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "children of children": "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n"
    "    except OSError: pass",
    "sleepers": "import os, time\nfor i in range(400):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)",
    "threads": "import threading, time\nfor i in range(400): threading.Thread(target=time.sleep, args=(9,)).start()",
}


@pytest.mark.parametrize("name", cases(FORKS, {"bomb", "sleepers"}))
def test_the_number_of_processes_is_bounded(name: str, any_plan: Plan) -> None:
    before = below(os.getpid())
    result = run(FORKS[name], any_plan, SHORT)
    if name != "children of children":  # there the program ends, and the rest with it
        assert result.limit in ("processes", "wall", "cpu") or b"process limit: 12" in result.output, result
    assert below(os.getpid()) == before


def test_output_is_bounded(any_plan: Plan) -> None:
    result = run("while True: print('é' * 1000)", any_plan)
    assert result.limit == "output"
    assert len(result.output) == LIMITS.max_output_bytes
    assert result.num_output_bytes > LIMITS.max_output_bytes
    text = describe(result, LIMITS, 300)
    assert text.startswith("é" * 200 + "\n[")
    cut = f"[at least {result.num_output_bytes - LIMITS.max_output_bytes} bytes of output cut]"
    assert text.endswith(f"{cut}\n[killed: output limit of {LIMITS.max_output_bytes} bytes]")
    assert "\ufffd" not in text


FILES = {
    "one": "f = open('x', 'wb')\nwhile True: f.write(bytes(10 ** 6))",
    "many": "import time\nfor i in range(100): open(f'x{i}', 'wb').write(bytes(10 ** 6))\ntime.sleep(30)",
    "deleted": "import os, time\nfiles = []\nfor i in range(100):\n    f = open('x', 'wb'); f.write(bytes(10 ** 6))\n"
    "    f.flush(); os.unlink('x'); files.append(f)\ntime.sleep(30)",
    "small": "import time\nfor i in range(5000): open(f'x{i}', 'w')\ntime.sleep(30)",
    "reserved": "import os\nos.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 10 ** 10)",
}


@pytest.mark.parametrize("name", list(FILES))
def test_files_are_bounded(name: str, any_plan: Plan) -> None:
    text = describe(run(FILES[name], any_plan), LIMITS, 1000)
    assert "[file limit: 8 MB]" in text or text == "[killed: files limit of 8 MB and 4096 files]"


CLUTTER = """
import os
os.makedirs("closed/inner"); open("closed/inner/f", "w"); os.symlink(OUTSIDE, "link"); os.mkfifo("fifo")
os.mkdir("dark", 0); open(b"\\xff\\xfe", "w"); open("closed/g", "w"); os.symlink(OUTSIDE, "closed/link")
try:
    os.chmod("closed/inner", 0); os.chmod("closed", 0)
except OSError:
    pass
for i in range(300):
    os.mkdir("d" * 50); os.chdir("d" * 50)
print("done")
"""


def test_clutter_is_removed_and_links_are_not_followed(any_plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    result = run(f"OUTSIDE = {str(tmp_path)!r}\n" + CLUTTER, any_plan)
    assert result.output == b"done\n" or result.limit == "files"  # paths so long that nobody can look into them
    assert (tmp_path / "kept").exists()


ENDINGS = {
    "status": ("import sys; sys.exit(3)", 3, "[exit status 3]"),
    "words": ("import sys; sys.exit('no')", 1, "no\n[exit status 1]"),
    "at once": ("import os; os._exit(7)", 7, "[exit status 7]"),
    "crash": ("import ctypes; ctypes.string_at(0)", -11, "[killed by SIGSEGV]"),
    "own signal": ("import os; os.kill(os.getpid(), 9)", -9, "[killed by SIGKILL]"),
    "abort": ("import os; os.abort()", -6, "[killed by SIGABRT]"),
    "nothing": ("x = 1", 0, "[no output]"),
    "empty": ("", 0, "[no output]"),
    "forged": (
        "print('exit 0 0\\nlimit cpu\\n\\n'); import sys; sys.exit(5)",
        5,
        "exit 0 0\nlimit cpu\n[exit status 5]",
    ),
    "not text": ("import os; os.write(1, b'a\\xff\\xfeb')", 0, "a\ufffd\ufffdb4\n[2 invalid UTF-8 sequences replaced]"),
    "closed output": ("import os; os.close(1); os.close(2); print('x')", 120, "[exit status 120]"),
    "no code": ("\0", 1, None),
    "half a character": ("print('\\ud800')", 1, None),
    "half a character in the code": ("print('\ud800')", 1, None),
    "depth": ("def f(): f()\nf()", 1, None),
    "deep source": ("(" * 100000, 1, None),
}


@pytest.mark.parametrize("name", list(ENDINGS))
def test_endings_are_told(name: str, any_plan: Plan) -> None:
    code, exit_code, text = ENDINGS[name]
    result = run(code, any_plan)
    assert (result.exit_code, result.limit) == (exit_code, "")
    if text is not None:
        assert describe(result, LIMITS, 1000) == text


ORPHANS = """
import os, time
for i in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import signal
            for n in (1, 2, 15, 17): signal.signal(n, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
print("done")
"""


LASTS = {"end": "", "sleep": "time.sleep(1000)", "kill": "os.kill(os.getpid(), 9)", "loop": "while True: pass"}


@pytest.mark.parametrize("name", cases(LASTS, {"end", "sleep", "kill"}))
def test_orphans_are_killed(name: str, any_plan: Plan) -> None:
    before = below(os.getpid())
    result = run(ORPHANS + LASTS[name], any_plan, Limits(wall_s=1, cpu_s=1))
    assert result.output == b"done\n"
    assert below(os.getpid()) == before


def _gone(pids: set[int]) -> bool:
    give_up_s = time.monotonic() + 10
    while time.monotonic() < give_up_s:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


async def _until_running(task: asyncio.Task, before: set[int], num_processes: int) -> set[int]:
    while len(below(os.getpid()) - before) < num_processes:
        assert not task.done()
        await asyncio.sleep(0.01)
    return below(os.getpid()) - before


def test_cancelling_kills_all(any_plan: Plan) -> None:
    async def cancel() -> set[int]:
        before = below(os.getpid())
        task = asyncio.ensure_future(run_python(ORPHANS + "time.sleep(1000)", Limits(), any_plan))
        pids = await _until_running(task, before, 7)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pids

    assert _gone(asyncio.run(cancel()))
    assert not boxes()


def test_killing_the_supervisor_kills_all(any_plan: Plan) -> None:
    async def kill() -> set[int]:
        before = below(os.getpid())
        task = asyncio.ensure_future(run_python(ORPHANS + "time.sleep(1000)", Limits(), any_plan))
        await _until_running(task, before, 7)
        await asyncio.sleep(0.2)  # all of the orphans are there
        pids = below(os.getpid()) - before
        os.kill(min(pids), signal.SIGKILL)
        with pytest.raises(ToolUnavailableError, match="without an answer"):
            await task
        return pids

    assert _gone(asyncio.run(kill()))
    assert not boxes()


def test_killing_the_caller_kills_all_and_cleans_up(any_plan: Plan, tmp_path: Path) -> None:
    code = f"""
import tempfile
tempfile.tempdir = {str(tmp_path)!r}
from orchestra_envs.live.sandbox import *
from orchestra_envs.live.sandbox.run import run_python_blocking
run_python_blocking({ORPHANS + "time.sleep(1000)"!r}, Limits(wall_s=1000), {any_plan!r})
"""
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        if os.stat(parent).st_uid == os.getuid() and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        while len(below(caller.pid)) < 7:
            assert caller.poll() is None
            time.sleep(0.02)
        pids = below(caller.pid)
        caller.kill()
    assert _gone(pids)
    assert os.listdir(tmp_path) == []


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _many(count: int, plan: Plan) -> list[RunResult]:
    slots = asyncio.Semaphore(8)

    async def one(index: int) -> RunResult:
        async with slots:
            code = f"import os\nif os.fork() == 0: os.setsid(); import time; time.sleep(100)\nprint({index})"
            return await run_python(code, Limits(), plan)

    return await asyncio.gather(*map(one, range(count)))


def test_two_hundred_calls_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "simulated_missing", frozenset())
    plan = isolation.achieved_isolation().plan
    asyncio.run(_many(2, plan))
    before = below(os.getpid()), _open_files()
    results = asyncio.run(_many(200, plan))
    assert [int(result.output) for result in results] == list(range(200))
    assert (below(os.getpid()), _open_files()) == before
    assert not boxes()
