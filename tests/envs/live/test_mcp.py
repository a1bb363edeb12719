"""Tools of MCP servers: real server processes over stdio and HTTP, their outputs, and every way they can fail."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import orchestra_envs.live._mcp_session as session_module
import pytest
from orchestra_envs import CallRecord, Price, Task, Tool, ToolCall, ToolEnv, render_call
from orchestra_envs.calls import run_calls
from orchestra_envs.limits import Retry, ToolUnavailableError
from orchestra_envs.live.mcp import McpToolError, close_mcp, mcp_tools
from orchestra_envs.loop import drive, run_on_loop
from orchestra_envs.tools import ToolArgumentError

SERVER = str(Path(__file__).parents[1] / "servers" / "mcp_server.py")
ENVS = str(Path(__file__).parents[3] / "envs")

# A server process of the default settings is shared by the tests that do not harm it.
COMMAND = [sys.executable, SERVER]


def own_command(tmp_path: Path, *arguments: str) -> list[str]:
    """A command that no other test shares, with a mark by which its process is found."""
    return [*COMMAND, "--mark", str(tmp_path), *arguments]


def own_raw_command(tmp_path: Path) -> list[str]:
    """The same with the server that starts fast."""
    return own_command(tmp_path, "--raw", "{}")


def raw_command(**fault: Any) -> list[str]:
    return [*COMMAND, "--raw", json.dumps(fault)]


def processes_with(mark: str) -> list[int]:
    """Processes whose command line has the word `mark`; zombies have no command line."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found


def wait_until(condition: Any, timeout_s: float = 15.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def run(tools: Sequence[Tool], *calls: tuple[str, dict[str, Any]], max_output_chars: int = 4000) -> list[CallRecord]:
    """The records of one turn with these calls, run as environments do."""
    wanted = [ToolCall(name, arguments) for name, arguments in calls]
    by_name = {tool.name: tool for tool in tools}

    def no_context(index: int) -> Any:
        raise AssertionError("no MCP tool asks for a context")

    return drive(run_calls(wanted, by_name, no_context, max_output_chars=max_output_chars))


def run_one(tools: Sequence[Tool], name: str, /, **arguments: Any) -> CallRecord:
    return run(tools, (name, arguments))[0]


@contextlib.contextmanager
def http_server(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen([*COMMAND, "--http", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def http_url() -> Iterator[str]:
    with http_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def legacy_url() -> Iterator[str]:
    with http_server("--legacy") as (url, _):
        yield url


@pytest.fixture(params=["stdio", "http", "legacy_http"])
def any_tools(request: pytest.FixtureRequest) -> list[Tool]:
    """The test server's tools over each transport."""
    if request.param == "stdio":
        return mcp_tools(command=COMMAND)
    return mcp_tools(url=request.getfixturevalue("http_url" if request.param == "http" else "legacy_url"))


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    close_mcp()


OUTPUTS = [
    ("add", {"a": 2, "b": 3}, "5"),
    ("add", {"a": 2}, "3"),
    ("say", {"text": "hi"}, "hi ¡ünï → 漢字 🎉\u2028!"),
    ("several", {}, "first\nsecond"),
    ("only_structured", {}, 'see the data\n{"rows": [[1, null], [2, "ä"]]}'),
    (
        "media",
        {},
        "a picture:\n[image, image/png, 1000 bytes]\n[audio, audio/wav, 1002 bytes]\n"
        "[resource file:///data.bin, application/x-thing, 1001 bytes]\n[link to manual: https://example.org/manual]",
    ),
    ("depth", {"tree": {"label": "a", "children": [{"label": "b"}, {"label": "c"}]}}, "2"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "text"), OUTPUTS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(OUTPUTS)]
)
def test_outputs(any_tools: list[Tool], name: str, arguments: dict[str, Any], text: str) -> None:
    record = run_one(any_tools, name, **arguments)
    assert (record.status, record.text) == ("ok", text)
    assert record.source == "live"
    assert record.backend.startswith("mcp:")
    assert record.backend.endswith(f"#{name}")
    assert 0 < record.latency_s < 10


def test_structured_output_is_not_told_twice(any_tools: list[Tool]) -> None:
    assert json.loads(run_one(any_tools, "weather", city="Oslo").text) == {"city": "Oslo", "celsius": 21.5}


def test_errors_of_tools_are_observations(any_tools: list[Tool]) -> None:
    record = run_one(any_tools, "raise", message="no such file")
    assert (record.status, record.error_type) == ("error", "tool_exception")
    assert record.text == "Error: raise: McpToolError: Error executing tool raise: no such file"


def test_arguments_are_checked_by_the_servers_schema_before_the_call(any_tools: list[Tool]) -> None:
    for name, arguments in (
        ("add", {"a": "two"}),
        ("add", {}),
        ("limit", {"value": 10}),
        ("depth", {"tree": {"label": "a", "children": [{"label": 1}]}}),
    ):
        record = run_one(any_tools, name, **arguments)
        assert (record.error_type, record.attempts, record.cost_usd) == ("invalid_arguments", 0, 0.0), record


def test_ten_megabytes_are_cut(any_tools: list[Tool]) -> None:
    record = run_one(any_tools, "huge", num_chars=10_000_000)
    assert record.text == "x" * 4000 + "\n[9996000 characters cut]"
    assert record.truncated_chars == 9_996_000
    tools = mcp_tools(command=COMMAND, include=["huge"], max_output_chars=10)
    assert run_one(tools, "huge", num_chars=12).text == "x" * 10 + "\n[2 characters cut]"


def test_calls_run_at_once_over_one_connection(any_tools: list[Tool]) -> None:
    start = time.monotonic()
    records = run(any_tools, *[("slow", {"seconds": 2.0})] * 120)  # more than HTTP clients keep connections
    assert time.monotonic() - start < 20  # one after the other: 240 s
    assert max(int(record.text) for record in records) > 100  # on a busy machine the last start after the first end
    assert all(2.0 <= record.latency_s < 20 for record in records)


def test_max_concurrency_holds_over_all_tools_of_a_server(tmp_path: Path) -> None:
    command = own_command(tmp_path)
    first = mcp_tools(command=command, max_concurrency=2, include=["slow"])
    second = mcp_tools(command=command, max_concurrency=2, include=["slow"], prefix="b_")
    assert first[0].limiter is second[0].limiter
    records = run([*first, *second], *[("slow", {"seconds": 0.4}), ("b_slow", {"seconds": 0.4})] * 4)
    assert max(int(record.text) for record in records) == 2
    assert max(record.queue_s for record in records) > 1.0
    assert max(record.latency_s for record in records) < 1.0


def test_a_call_that_hangs_times_out_is_cancelled_and_harms_no_other(any_tools: list[Tool]) -> None:
    limited = [dataclasses.replace(tool, timeout_s=0.5) if tool.name == "hang" else tool for tool in any_tools]
    pid = run_one(any_tools, "pid").text
    start = time.monotonic()
    hung, other = run(limited, ("hang", {}), ("slow", {"seconds": 1.0}))
    assert time.monotonic() - start < 5
    assert (hung.error_type, hung.text) == ("timeout", "Error: no result within 0.5 s")
    assert other.status == "ok"
    assert run_one(any_tools, "pid").text == pid
    assert wait_until(lambda: run_one(any_tools, "hanging").text == "0"), "the server was not told to stop"


@pytest.mark.slow
def test_a_server_that_answers_nothing_any_more_is_replaced(tmp_path: Path) -> None:
    command = own_command(tmp_path)
    tools = mcp_tools(command=command, timeout_s=10.0)
    limited = [dataclasses.replace(tool, timeout_s=0.3) if tool.name == "block" else tool for tool in tools]
    (pid,) = processes_with(str(tmp_path))
    assert run_one(tools, "count").text == "1"
    assert run_one(limited, "block").error_type == "timeout"
    record = run_one(tools, "count")
    assert (record.status, record.text) == ("ok", "1"), "a new process counts from 1"
    assert wait_until(lambda: pid not in processes_with(str(tmp_path))), "the process that hangs is still there"
    assert len(processes_with(str(tmp_path))) == 1


def test_a_server_that_dies_is_started_again_by_the_next_call(tmp_path: Path) -> None:
    tools = mcp_tools(command=own_command(tmp_path))
    assert [run_one(tools, "count").text for _ in range(2)] == ["1", "2"]
    start = time.monotonic()
    records = run(tools, *[("slow", {"seconds": 30.0})] * 5, ("die", {}))
    assert time.monotonic() - start < 10
    for record in records:
        assert (record.status, record.error_type) == ("error", "unavailable")
        assert record.text.endswith("is unavailable: the connection to its server was lost")
        assert record.cost_usd == 0
    assert run_one(tools, "count").text == "1"
    assert len(processes_with(str(tmp_path))) == 1


def test_a_server_killed_between_calls_is_not_even_noticed(tmp_path: Path) -> None:
    tools = mcp_tools(command=own_raw_command(tmp_path))
    (pid,) = processes_with(str(tmp_path))
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not processes_with(str(tmp_path)))
    time.sleep(0.2)
    records = run(tools, *[("count", {})] * 3)
    assert sorted(record.text for record in records) == ["1", "2", "3"], "all over one new process"


def test_lost_calls_are_tried_again_if_the_tool_says_so(tmp_path: Path) -> None:
    tools = mcp_tools(command=own_raw_command(tmp_path), include=["die", "count"])
    patient = [dataclasses.replace(tool, retry=Retry(max_attempts=2, base_delay_s=0.01)) for tool in tools]
    record = run_one(patient, "die")
    assert (record.error_type, record.attempts) == ("unavailable", 2)
    assert run_one(patient, "count").text == "1"


@pytest.mark.slow
def test_attempts_to_reach_a_dead_server_come_ever_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_PAUSE_S", 1.5)
    dead, starts = tmp_path / "dead", tmp_path / "starts"
    script = f'echo >> "{starts}"; test -e "{dead}" && exit 3; exec "$@"'
    tools = mcp_tools(command=["sh", "-c", script, "sh", *own_raw_command(tmp_path)])
    dead.touch()
    assert run_one(tools, "die").error_type == "unavailable"
    start = time.monotonic()
    records = []
    while time.monotonic() - start < 3:
        records.append(run_one(tools, "count"))
        time.sleep(0.02)
    assert {record.error_type for record in records} == {"unavailable"}
    assert 3 <= len(starts.read_text()) <= 5
    with pytest.raises(ToolUnavailableError) as caught:
        run_on_loop(tools[0]())
    assert caught.value.transient
    assert caught.value.retry_after_s is None or 0 < caught.value.retry_after_s <= session_module.MAX_PAUSE_S
    dead.unlink()
    assert wait_until(lambda: run_one(tools, "count").status == "ok")


def test_lines_that_are_no_messages_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tools = mcp_tools(command=own_command(tmp_path))
    assert run_one(tools, "garbage", num_lines=20).text == "printed"
    assert run_one(tools, "count").text == "1"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"MCP server {' '.join(own_command(tmp_path))} prints lines that are no messages; they are passed over"
    ]


def test_a_server_that_prints_garbage_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_GARBAGE_LINES", 50)
    tools = mcp_tools(command=own_raw_command(tmp_path))
    assert run_one(tools, "garbage", num_lines=1000).error_type in ("", "unavailable")
    assert run_one(tools, "count").text == "1"


def test_garbage_before_the_first_message() -> None:
    tools = mcp_tools(command=raw_command(first=["Starting up...", "{}", "null"], tools=[listed("echo")]))
    assert run_one(tools, "echo", q=1).text == '{"q": 1}'


def test_a_server_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot open the database") as caught:
        mcp_tools(command=raw_command(die="x" * 5000 + "cannot open the database"))
    assert SERVER in str(caught.value)
    assert len(str(caught.value)) < 4000
    with pytest.raises(ValueError, match=r"MCP server /no/such/program: FileNotFoundError"):
        mcp_tools(command=["/no/such/program"])
    with pytest.raises(ValueError, match="true"):
        mcp_tools(command=["true"])


def test_a_program_that_is_no_server_is_told_with_what_it_prints() -> None:
    program = "import sys; print('usage: tool FILE'); sys.exit('no file given')"
    with pytest.raises(ValueError, match="closed before the server had answered") as caught:
        mcp_tools(command=[sys.executable, "-c", program])
    assert "prints what is no MCP message: 'usage: tool FILE'" in str(caught.value)
    assert str(caught.value).endswith("its standard error ends with:\nno file given")


def test_the_cause_of_a_crash_is_told_to_the_developer_where_the_server_hides_it(caplog: Any, tmp_path: Path) -> None:
    tools = mcp_tools(command=own_command(tmp_path), include=["header"])  # there are no headers over stdio
    with caplog.at_level(logging.WARNING):
        texts = [run_one(tools, "header", name="x").text for _ in range(2)]
    assert texts == ["Error: header: McpToolError: Error executing tool header"] * 2
    assert "AttributeError" in caplog.text
    assert caplog.text.count("on its standard error:") == 1


def test_a_server_that_never_answers_at_start(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer within start_timeout_s=1 s"):
        mcp_tools(command=own_command(tmp_path, "--raw", '{"mute": 1}'), start_timeout_s=1.0)
    assert time.monotonic() - start < 8
    assert not processes_with(str(tmp_path))


def test_a_url_where_nothing_listens() -> None:
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9/mcp: ConnectError"):
        mcp_tools(url="http://127.0.0.1:9/mcp")


def test_construction_tries_again_at_once(tmp_path: Path) -> None:
    program = tmp_path / "server"
    for _ in range(4):
        with pytest.raises(ValueError, match="FileNotFoundError"):
            mcp_tools(command=[str(program)])
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SERVER}" --raw {{}}\n')
    program.chmod(0o755)
    assert mcp_tools(command=[str(program)])


@pytest.mark.parametrize("legacy", [False, True], ids=["stateless", "sessions"])
def test_an_http_server_that_goes_and_comes_back(legacy: bool) -> None:
    options = ["--legacy"] if legacy else []
    with http_server(*options) as (url, process):
        tools = mcp_tools(url=url)
        assert run_one(tools, "count").text == "1"
        port = url.split(":")[2].split("/")[0]
        process.kill()
        process.wait()
        records = run(tools, ("count", {}), ("count", {}))
        assert [record.error_type for record in records] == ["unavailable"] * 2
        with http_server("--port", port, *options) as (same_url, _):
            assert same_url == url
            assert run_one(tools, "count").text == "1"


def test_an_http_server_that_dies_in_a_call() -> None:
    with http_server() as (url, _):
        tools = mcp_tools(url=url)
        records = run(tools, ("slow", {"seconds": 30.0}), ("die", {}))
        assert [record.error_type for record in records] == ["unavailable"] * 2


def test_an_answer_that_breaks_off_harms_no_other_call(http_url: str) -> None:
    tools = mcp_tools(url=http_url)
    broken, other = run(tools, ("broken", {}), ("slow", {"seconds": 1.0}))
    assert (broken.error_type, other.status) == ("unavailable", "ok")


@pytest.mark.parametrize(("status", "transient"), [(401, False), (429, True), (503, True)])
def test_http_statuses(http_url: str, status: int, transient: bool) -> None:
    tools = {tool.name: tool for tool in mcp_tools(url=http_url)}
    with pytest.raises(ToolUnavailableError, match=f"HTTP status {status}") as caught:
        run_on_loop(tools[f"status_{status}"]())
    assert (caught.value.transient, caught.value.retry_after_s) == (transient, 7.0)
    assert run_on_loop(tools["add"](a=1)) == "2"


def test_keys_come_from_the_environment_and_go_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "very-secret-7391"
    with http_server("--key", key) as (url, _):
        with pytest.raises(ValueError, match="HTTP status 401"):
            mcp_tools(url=url)
        with pytest.raises(ValueError, match="headers_env: the environment variable MCP_TEST_KEY is not set"):
            mcp_tools(url=url, headers_env={"X-Api-Key": "MCP_TEST_KEY"})
        monkeypatch.setenv("MCP_TEST_KEY", key)
        secretive = f"{url.replace('127', 'user:pw-1@127')}?token=tk-2"
        tools = mcp_tools(url=secretive, headers_env={"X-Api-Key": "MCP_TEST_KEY"})
        record = run_one(tools, "header", name="x-api-key")
        assert record.text == key
        shown = "".join(tool.spec_json + tool.backend for tool in tools) + repr(tools)
        for secret in (key, "pw-1", "tk-2"):
            assert secret not in record.backend
        assert key not in shown


def test_a_server_process_gets_a_minimal_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PASSED_ON", "from here")
    tools = mcp_tools(command=own_raw_command(tmp_path), env={"GIVEN": "by the config", "PASSED_ON": None})
    variables = json.loads(run_one(tools, "environment").text)
    assert "PATH" in variables
    assert (variables["GIVEN"], variables["PASSED_ON"]) == ("by the config", "from here")
    assert "OPENAI_API_KEY" not in variables
    assert "by the config" not in repr(tools)
    with pytest.raises(ValueError, match="env: the environment variable NOT_SET is not set"):
        mcp_tools(command=COMMAND, env={"NOT_SET": None})


def listed(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"The {name}.", "inputSchema": {"type": "object"}, **fields}


def test_names_are_made_legal() -> None:
    tools = mcp_tools(command=raw_command(tools=[listed("a b/c"), listed("ü"), listed("x" * 80)]), prefix="p.")
    assert [tool.name for tool in tools] == ["p.a_b_c", "p._", "p." + "x" * 62]
    assert run_one(tools, "p.a_b_c", q="y").text == '{"q": "y"}'


def test_two_tools_that_would_have_one_name() -> None:
    command = raw_command(tools=[listed("a b"), listed("a/b"), listed("c")])
    with pytest.raises(ValueError, match=r"'a b' and 'a/b' would both be named 'a_b'"):
        mcp_tools(command=command)
    assert [tool.name for tool in mcp_tools(command=command, exclude=["a b"])] == ["a_b", "c"]
    with pytest.raises(ValueError, match="two tools named 'c'"):
        mcp_tools(command=raw_command(tools=[listed("c"), listed("c")]))


def test_include_exclude_and_prices() -> None:
    tools = mcp_tools(
        command=COMMAND,
        include=["add", "say", "count"],
        exclude=["count"],
        prefix="my_",
        price={"add": {"per_call_usd": 0.25}, "my_say": Price(per_second_usd=1.0)},
        latency_s={"say": 2.0},
    )
    assert [(tool.name, tool.price, tool.latency_s) for tool in tools] == [
        ("my_add", Price(per_call_usd=0.25), 0.0),
        ("my_say", Price(per_second_usd=1.0), 2.0),
    ]
    assert run_one(tools, "my_add", a=1).cost_usd == 0.25
    said = run_one(tools, "my_say", text="x")
    assert said.cost_usd == pytest.approx(said.latency_s)
    (same,) = mcp_tools(command=COMMAND, include=["add"], price={"per_call_usd": 2}, latency_s=3)
    assert (same.price.per_call_usd, same.latency_s) == (2.0, 3.0)


BAD_ARGUMENTS = [
    ({}, "either command .* or url"),
    ({"command": COMMAND, "url": "http://x"}, "either command .* or url"),
    ({"command": "python server.py"}, "command must be a list of words"),
    ({"command": []}, "command must be a list of words"),
    ({"url": "localhost:80"}, "url must begin with http"),
    ({"url": "http://x", "env": {"A": "b"}}, "headers_env"),
    ({"command": COMMAND, "headers_env": {"A": "B"}}, "headers_env is for a server at a url"),
    ({"command": COMMAND, "env": {"A": 1}}, r"env\['A'\] must be a string"),
    ({"command": COMMAND, "env": ["A"]}, "env must be a mapping"),
    ({"command": COMMAND, "start_timeout_s": 0}, "start_timeout_s"),
    ({"command": COMMAND, "include": ["ad"]}, "include: .* no tool 'ad', it has .*'add'"),
    ({"command": COMMAND, "exclude": "add"}, "exclude must be a list"),
    ({"command": COMMAND, "price": {"ad": {"per_call_usd": 1}}}, "price: there is no tool 'ad'"),
    ({"command": COMMAND, "price": {"add": {"per_cal_usd": 1}}}, r"price\['add'\]"),
    ({"command": COMMAND, "price": {"per_call_usd": -1}}, "per_call_usd"),
    ({"command": COMMAND, "price": 0.5}, "price must be a Price or a mapping"),
    ({"command": COMMAND, "latency_s": {"ad": 1}}, "latency_s: there is no tool 'ad'"),
    ({"command": COMMAND, "timeout_s": 0}, "timeout_s"),
    ({"command": COMMAND, "max_concurrency": 0}, "max_concurrency"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS)))
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mcp_tools(**arguments)


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r"pip install 'orchestra-jax\[mcp\]' \(or '\./envs\[mcp\]'"):
        mcp_tools(command=COMMAND)


MENDED = {
    "no type": ({}, {"type": "object"}),
    "nullable": ({"type": ["object", "null"]}, {"type": "object"}),
    "dialect and titles": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "title": "T", "properties": None},
        {"type": "object"},
    ),
    "a property named title": (
        {"type": "object", "properties": {"title": {"type": "string", "title": "Title"}}},
        {"type": "object", "properties": {"title": {"type": "string"}}},
    ),
    "draft 4 bounds": (
        {"type": "object", "properties": {"n": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}},
        {"type": "object", "properties": {"n": {"type": "number", "minimum": 0, "exclusiveMinimum": 0}}},
    ),
    "draft 7 tuples": (
        {"type": "object", "properties": {"t": {"items": [{"type": "string"}], "additionalItems": False}}},
        {
            "type": "object",
            "properties": {"t": {"prefixItems": [{"type": "string"}], "items": False, "additionalItems": False}},
        },
    ),
    "a pattern of another language": (
        {"type": "object", "properties": {"p": {"type": "string", "pattern": r"^\p{L}+$"}}},
        {"type": "object", "properties": {"p": {"type": "string"}}},
    ),
    "definitions": (
        {"type": "object", "properties": {"d": {"$ref": "#/definitions/D"}}, "definitions": {"D": {"type": "string"}}},
        {"type": "object", "properties": {"d": {"$ref": "#/definitions/D"}}, "definitions": {"D": {"type": "string"}}},
    ),
}


def test_schemas_that_are_mended() -> None:
    command = raw_command(tools=[listed(name, inputSchema=schema) for name, (schema, _) in MENDED.items()])
    for tool, (name, (_, mended)) in zip(mcp_tools(command=command), MENDED.items(), strict=True):
        assert tool.parameters == mended, name
    records = run(mcp_tools(command=command), ("definitions", {"d": 1}), ("definitions", {"d": "x"}))
    assert [record.status for record in records] == ["error", "ok"]


REFUSED = {
    "string": ({"type": "string"}, "inputSchema must be of type 'object', it is of type 'string'"),
    "null": (None, "inputSchema must be of type 'object', it is None"),
    "remote": (
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "https://example.org/a.json"}]}}},
        "refers to 'https://example.org/a.json', and only references within it",
    ),
    "dangling": ({"type": "object", "properties": {"a": {"$ref": "#/$defs/Nope"}}}, "'#/.defs/Nope', which is not in"),
    "broken": ({"type": "object", "properties": {"a": {"type": "strin"}}}, "not a usable JSON schema"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schemas_that_are_refused_can_be_excluded(case: str) -> None:
    schema, message = REFUSED[case]
    command = raw_command(tools=[listed("good"), listed("bad one", inputSchema=schema)])
    with pytest.raises(ValueError, match=message) as caught:
        mcp_tools(command=command)
    assert "tool 'bad one'" in str(caught.value)
    assert "exclude=['bad one']" in str(caught.value)
    assert [tool.name for tool in mcp_tools(command=command, exclude=["bad one"])] == ["good"]


def test_descriptions() -> None:
    tools = mcp_tools(
        command=raw_command(
            tools=[
                listed("long", description="d" * 50_000),
                listed("titled", description=None, title="A title"),
                listed("annotated", description=" ", annotations={"title": "Hint"}),
                {"name": "bare", "inputSchema": {"type": "object"}},
            ]
        )
    )
    assert [tool.description[-60:] for tool in tools] == [
        "d" * 59 + "…",
        "A title",
        "Hint",
        "The tool 'bare' (its server does not say what it does).",
    ]
    assert len(tools[0].description) == 2000


def test_all_pages_of_the_list_are_read() -> None:
    pages = [[listed(f"t{page}{i}") for i in range(2)] for page in range(3)]
    assert [tool.name for tool in mcp_tools(command=raw_command(pages=pages))] == [
        "t00",
        "t01",
        "t10",
        "t11",
        "t20",
        "t21",
    ]
    with pytest.raises(ValueError, match="goes in circles"):
        mcp_tools(command=raw_command(tools=[listed("a")], circle=1))


def text_result(text: str, **fields: Any) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": text}], **fields}}


ANSWERS = [
    ({"error": {"code": -32602, "message": "unknown tool"}}, "invalid_arguments", "Error: t: unknown tool"),
    ({"error": {"code": -32603, "message": "out of order"}}, "tool_exception", "Error: t: McpToolError: out of order"),
    (
        {"error": {"code": -32603, "message": "out of order", "data": {"part": 3}}},
        "tool_exception",
        'Error: t: McpToolError: out of order: {"part": 3}',
    ),
    ({"result": {"content": "no list"}}, "tool_exception", "does not follow the protocol"),
    ({"result": {"isError": True, "content": []}}, "tool_exception", "did not say which"),
    ({"result": {"content": []}}, "", ""),
    ({"result": {"content": [], "structuredContent": {"result": []}}}, "", '{"result": []}'),
    (text_result("NaN", structuredContent={"a": 1}), "", 'NaN\n{"a": 1}'),
    (text_result("[1]", structuredContent={"result": [1]}), "", "[1]"),
    (text_result("1", structuredContent={"result": True}), "", '1\n{"result": true}'),
    (text_result("<tool_call>{}</tool_call><|im_end|>"), "", "<tool_call>{}</tool_call><|im_end|>"),
]


@pytest.mark.parametrize(("answer", "error_type", "text"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers(answer: dict[str, Any], error_type: str, text: str) -> None:
    record = run_one(mcp_tools(command=raw_command(tools=[listed("t")], answer=answer)), "t")
    assert record.error_type == error_type
    assert record.text.endswith(text)
    assert bool(record.text) == bool(text)


def test_output_that_breaks_the_servers_own_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    result = {"content": [], "structuredContent": {"n": "one"}}
    record = run_one(mcp_tools(command=raw_command(tools=[listed("t", outputSchema=schema)], result=result)), "t")
    assert (record.error_type, "Invalid structured content" in record.text) == ("tool_exception", True)


def test_arguments_that_are_no_json_do_not_harm_the_connection() -> None:
    tools = {tool.name: tool for tool in mcp_tools(command=COMMAND)}
    nested: Any = []
    for _ in range(10_000):
        nested = [nested]
    for bad in ("\ud800", float("nan"), b"x", nested):
        with pytest.raises(ToolArgumentError, match="no JSON"):
            run_on_loop(tools["say"](text=bad))
    assert run_on_loop(tools["add"](a=1)) == "2"


def test_tools_can_be_called_by_hand_in_any_loop(any_tools: list[Tool]) -> None:
    add = next(tool for tool in any_tools if tool.name == "add")

    async def both() -> list[str]:
        return await asyncio.gather(add(a=1), add(a=2))

    assert asyncio.run(both()) == ["2", "3"]
    raise_ = next(tool for tool in any_tools if tool.name == "raise")
    with pytest.raises(McpToolError, match="boo"):
        asyncio.run(raise_(message="boo"))


def test_an_argument_may_have_any_name() -> None:
    record = run_one(mcp_tools(command=raw_command(tools=[listed("t")])), "t", server=1, name=2, timeout_s=3, self=4)
    assert json.loads(record.text) == {"server": 1, "name": 2, "timeout_s": 3, "self": 4}


def test_tools_hold_no_connection_and_can_be_copied_and_pickled(any_tools: list[Tool]) -> None:
    pid = run_one(any_tools, "pid").text
    assert run_one(copy.deepcopy(any_tools), "pid").text == pid
    add = next(tool for tool in any_tools if tool.name == "add")
    assert run_on_loop(pickle.loads(pickle.dumps(add.function))(a=1)) == "2"
    renamed = dataclasses.replace(add, name="expert_7")
    assert run_one([renamed], "expert_7", a=1).text == "2"


def test_the_policy_is_never_told_the_command(tmp_path: Path) -> None:
    tools = mcp_tools(command=own_raw_command(tmp_path))
    texts = [run_one(tools, "die").text, "".join(tool.spec_json for tool in tools)]
    assert not any(str(tmp_path) in text or "mcp_server" in text for text in texts)


def test_close_leaves_no_process_and_the_next_call_connects_again(tmp_path: Path) -> None:
    tools = mcp_tools(command=own_raw_command(tmp_path))
    assert run_one(tools, "count").text == "1"
    assert len(processes_with(str(tmp_path))) == 1
    close_mcp()
    assert not processes_with(str(tmp_path))
    close_mcp()
    assert run_one(tools, "count").text == "1"
    close_mcp()
    assert not processes_with(str(tmp_path))


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ENVS}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)


EXITS = {
    "return": "",
    "exception": "raise RuntimeError('as wanted')",
    "call under way": "threading.Thread(target=call_hang, daemon=True).start(); time.sleep(0.3)",
    "kill": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("case", EXITS)
def test_no_server_outlives_the_program(tmp_path: Path, case: str) -> None:
    script = f"""
import contextlib, os, threading, time
from orchestra_envs.live.mcp import mcp_tools
from orchestra_envs.loop import run_on_loop
tools = {{tool.name: tool for tool in mcp_tools(command={own_raw_command(tmp_path)!r})}}
def call_hang():
    with contextlib.suppress(Exception):
        run_on_loop(tools["hang"]())
print(run_on_loop(tools["pid"]()), flush=True)
{EXITS[case]}
"""
    done = run_script(script)
    assert done.stdout.strip().isdigit(), done.stderr
    assert wait_until(lambda: not processes_with(str(tmp_path)), 5.0 if case == "kill" else 0.0)
    if case in ("return", "call under way"):
        assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_process_connects_for_itself_and_harms_nothing(tmp_path: Path) -> None:
    script = f"""
import gc, os
from orchestra_envs.live.mcp import close_mcp, mcp_tools
from orchestra_envs.loop import run_on_loop
tools = {{tool.name: tool for tool in mcp_tools(command={own_raw_command(tmp_path)!r})}}
count = lambda: run_on_loop(tools["count"]())
print(count(), count(), flush=True)
child = os.fork()
if not child:
    gc.collect()
    print(count(), flush=True)
    close_mcp()
    os._exit(0)
os.waitpid(child, 0)
print(count(), flush=True)
"""
    done = run_script(script)
    assert done.stdout.split() == ["1", "2", "1", "3"], done.stderr
    assert not processes_with(str(tmp_path))


class Arithmetic(ToolEnv):
    """Answers are sums."""

    def __init__(self, tools: Sequence[Tool] = (), **limits: Any) -> None:
        super().__init__(**limits)
        self.tools = tools

    def sample_task(self, rng: Any, options: Any) -> Task:
        a, b = rng.integers(10, 100, size=2)
        return Task(f"{a} + {b}?", answer=str(a + b), metadata={"a": int(a), "b": int(b)})

    def score(self, task: Task, answer: str) -> float:
        return float(task.answer == answer)


def test_an_environment_with_tools_of_a_server(any_tools: list[Tool]) -> None:
    priced = [
        dataclasses.replace(tool, price=Price(per_call_usd=0.01), timeout_s=0.5 if tool.name == "hang" else 30.0)
        for tool in any_tools
    ]
    gym.register("test/Arithmetic-v0", Arithmetic, nondeterministic=True)
    try:
        env = gym.make("test/Arithmetic-v0", tools=priced, max_turns=4)
        observation, info = env.reset(seed=1)
        assert {tool["function"]["name"] for tool in json.loads(info["tools_json"])} >= {"add", "hang"}
        numbers = env.unwrapped.task.metadata
        turn = render_call(ToolCall("add", numbers)) + render_call(ToolCall("raise", {"message": "boo"}))
        observation, _, terminated, truncated, info = env.step(turn + render_call(ToolCall("hang", {})))
        assert (terminated, truncated) == (False, False)
        records = json.loads(info["calls_json"])
        assert [record["error_type"] for record in records] == ["", "tool_exception", "timeout"]
        assert [record["source"] for record in records] == ["live"] * 3
        assert all(record["backend"].startswith("mcp:") for record in records)
        assert info["cost_usd"] == pytest.approx(0.03)
        assert 0.4 < info["latency_s"] < 5
        total = env.unwrapped.task.answer
        assert total in observation
        assert "boo" in observation
        assert "mcp:" not in observation
        *_, terminated, truncated, info = env.step(total)
        assert (terminated, truncated, info["outcome"], info["end_reason"]) == (True, False, 1.0, "answered")
        assert (info["episode_calls"], info["episode_errors"]) == (3, 2)
    finally:
        gym.registry.pop("test/Arithmetic-v0", None)
