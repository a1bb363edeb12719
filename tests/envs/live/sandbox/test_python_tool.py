"""The Python tool: what it says, what it refuses to start with, and that it runs as a tool of an environment."""

import asyncio
import logging
import sys
import time
from pathlib import Path

import pytest
from orchestra_envs.calls import run_calls
from orchestra_envs.limits import Limiter
from orchestra_envs.live.sandbox import Limits, RunResult, achieved_isolation, isolation, package_links, python_tool
from orchestra_envs.live.sandbox.tool import describe
from orchestra_envs.loop import run_on_loop
from orchestra_envs.parse import ToolCall
from orchestra_envs.tools import Price, ToolArgumentError


@pytest.fixture
def tier() -> str:
    """The best tier of this machine, which the tests of the tool run in."""
    found = achieved_isolation().tier
    if found == "none":
        pytest.skip(achieved_isolation().summary())
    return found


def test_the_tool_runs_code(tier: str) -> None:
    tool = python_tool(isolation=tier)
    assert run_on_loop(tool.function(code="print('a')\nx = 20\nx * 2 + 2")) == "a\n42"
    assert run_on_loop(tool.function(code="print('a')")) == "a"
    assert run_on_loop(tool.function(code="1 / 0")).endswith("ZeroDivisionError: division by zero\n[exit status 1]")
    assert tool.price == Price(per_second_usd=0.0000083)
    assert (tool.clock, tool.source, tool.backend) == ("measured", "live", f"python-sandbox:{tier}")
    assert tool.timeout_s > 30
    assert "numpy" in tool.description


def test_calls_of_an_episode_are_timed_priced_and_cut(tier: str) -> None:
    tool = python_tool(isolation=tier, max_output_chars=100)
    calls = [
        ToolCall("python", {"code": "import time; time.sleep(0.2); print('x' * 1000)"}),
        ToolCall("python", {"code": "while True: pass", "more": 1}),
    ]
    first, second = run_on_loop(
        run_calls(calls, {"python": tool}, lambda _: pytest.fail("no context is asked for"), max_output_chars=4000)
    )
    assert (first.status, first.source) == ("ok", "live")
    assert first.text == "x" * 67 + "\n[900 characters cut]\n" + "x" * 33
    assert 0.2 < first.latency_s < 20
    assert first.cost_usd == pytest.approx(0.0000083 * first.latency_s)
    assert (second.error_type, second.cost_usd) == ("invalid_arguments", 0.0)


def test_packages_can_be_imported_and_others_not(tier: str) -> None:
    tool = python_tool(isolation=tier, packages=["numpy"])
    assert run_on_loop(tool.function(code="import numpy as np\nint(np.arange(5).sum())")) == "10"
    assert "ModuleNotFoundError" in run_on_loop(tool.function(code="import pydantic"))
    assert "ModuleNotFoundError" in run_on_loop(tool.function(code="import orchestra_envs"))
    bare = python_tool(isolation=tier, packages=[])
    assert "ModuleNotFoundError" in run_on_loop(bare.function(code="import numpy"))


def test_required_packages_come_along() -> None:
    names = {name for name, _ in package_links(["pydantic"])}
    assert {"pydantic", "pydantic_core", "typing_extensions.py"} <= names
    assert "numpy" not in names


def test_event_loops_children_and_threads_work(tier: str) -> None:
    code = """
import asyncio, subprocess, sys, threading
async def one(): return 1
found = []
thread = threading.Thread(target=lambda: found.append(2)); thread.start(); thread.join()
third = subprocess.run([sys.executable, "-I", "-c", "print(3)"], capture_output=True, text=True).stdout.strip()
asyncio.run(one()), found, third
"""
    assert run_on_loop(python_tool(isolation=tier).function(code=code)) == "(1, [2], '3')"


def test_nothing_is_inherited(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    code = "import os, sys\nsorted(os.environ), sys.stdin.read(), sys.argv, [p for p in sys.path if 'orchestra' in p]"
    text = run_on_loop(python_tool(isolation=tier).function(code=code))
    names = "['HOME', 'LANG', 'OPENBLAS_NUM_THREADS', 'PATH']"
    assert text.startswith(f"({names}, '', ['program.py'], ")
    assert "orchestra_envs" not in text


def test_too_long_code_is_an_argument_error(tier: str) -> None:
    with pytest.raises(ToolArgumentError, match="at most"):
        run_on_loop(python_tool(isolation=tier).function(code="#" * 1_000_001))


def test_the_limiter_is_shared_unless_given(tier: str) -> None:
    assert python_tool(isolation=tier).limiter is python_tool(isolation=tier).limiter
    limiter = Limiter(max_concurrency=3)
    assert python_tool(isolation=tier, limiter=limiter).limiter is limiter
    given = python_tool(isolation=tier, limiter={"max_concurrency": 5}, price={"per_call_usd": 0.1})
    assert given.limiter is not None
    assert (given.limiter.max_concurrency, given.price) == (5, Price(per_call_usd=0.1))


BAD = {
    "isolation": ({"isolation": "prison"}, "isolation must be one of full, kernel, limits"),
    "memory_mb": ({"memory_mb": 3}, "memory_mb must be a whole number from 64 to 1048576, not 3"),
    "cpu_s": ({"cpu_s": float("nan")}, "cpu_s must be a number"),
    "timeout_s": ({"timeout_s": -1}, "wall_s must be a number"),
    "max_processes": ({"max_processes": True}, "max_processes must be a whole number"),
    "max_output_chars": ({"max_output_chars": 0}, "max_output_chars must be"),
    "packages": ({"packages": ["no-such-package-anywhere"]}, "'no-such-package-anywhere' is not installed here"),
    "a string of packages": ({"packages": "numpy"}, "packages must be a list"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_configuration_is_told(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        python_tool(**arguments)


REFUSED = {
    "user_namespace": ("full", r"this machine gives 'kernel'. Missing: .*user_namespace.*user.max_user_namespaces"),
    "net_namespace": ("full", r"Missing: net_namespace: .*or ask for less with isolation='kernel'"),
    "landlock": ("kernel", r"gives 'limits'. Missing: landlock: .*kernel of 5.13.*isolation='limits'"),
    "seccomp": ("kernel", r"gives 'limits'. Missing: seccomp: .*CONFIG_SECCOMP_FILTER"),
    "rlimits": ("limits", r"gives 'none'. Missing: rlimits: "),
}


@pytest.mark.parametrize("missing", list(REFUSED))
def test_less_isolation_than_asked_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, message = REFUSED[missing]
    if isolation.TIERS.index(achieved_isolation().tier) < isolation.TIERS.index(asked):
        pytest.skip(achieved_isolation().summary())
    python_tool(isolation=asked)
    monkeypatch.setattr(isolation, "simulated_missing", frozenset({missing}))
    with pytest.raises(ValueError, match=message):
        python_tool(isolation=asked)


def test_the_default_wants_a_kernel_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "simulated_missing", frozenset({"landlock"}))
    with pytest.raises(ValueError, match="isolation='kernel' is asked for"):
        python_tool()
    if achieved_isolation().tier == "limits":
        assert run_on_loop(python_tool(isolation="limits").function(code="1 + 1")) == "2"


def test_what_was_achieved_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    isolation._achieved.cache_clear()
    with caplog.at_level(logging.INFO):
        first = achieved_isolation()
        assert achieved_isolation() is first
    assert [record.message for record in caplog.records] == [f"Python sandbox: {first.summary()}"]
    assert "self_test" in first.mechanisms


def test_long_output_keeps_both_ends_and_counts_the_rest() -> None:
    result = RunResult(("a" * 900 + "é" * 900).encode(), 2700, 0, "", 0.0, 0.0)
    assert describe(result, Limits(), 300) == "a" * 200 + "\n[1500 characters cut]\n" + "é" * 100


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 5])
def test_cut_output_ends_at_a_character(num_bytes: int) -> None:
    data = "a€b".encode()
    result = RunResult(data[:num_bytes], len(data), None, "output", 0.0, 0.0)
    text = describe(result, Limits(), 300)
    assert text.splitlines()[0].strip() == {1: "a", 2: "a", 3: "a", 4: "a€", 5: "a€b"}[num_bytes]
    assert "\ufffd" not in text


def test_many_calls_run_at_once(tier: str) -> None:
    tool = python_tool(isolation=tier)

    async def many() -> list[str]:
        return await asyncio.gather(*(tool.function(code="import time; time.sleep(1); 5") for _ in range(16)))

    start_s = time.monotonic()
    assert run_on_loop(many()) == ["5"] * 16
    assert time.monotonic() - start_s < 10


def test_the_launcher_needs_nothing_installed() -> None:
    folder = Path(isolation.__file__).parent
    allowed = {*sys.builtin_module_names, *sys.stdlib_module_names, "_files", "_kernel"}
    for name in ("_launcher", "_kernel", "_files"):
        for line in (folder / f"{name}.py").read_text().splitlines():
            if line.startswith(("import ", "from ")):
                assert line.split()[1].partition(".")[0] in allowed, line
