"""Environment hosts: tools behind the server answer as they do within the run, found by the rendered config."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from orchestra_envs.calls import run_calls
from orchestra_envs.live.local_search import build_index
from orchestra_envs.live.mcp import close_mcp
from orchestra_envs.loop import run_on_loop
from orchestra_envs.parse import ToolCall
from orchestra_envs.toolbox import tools_from_config
from orchestra_envs.tools import CallRecord, Tool

from orchestra_jax.launch.needs import host_tools
from orchestra_jax.launch.tool_server import main
from tests.launch.test_render import tool_config

pytest.importorskip("mcp")

MCP_SERVER = Path(__file__).parents[1] / "envs" / "servers" / "mcp_server.py"


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("docs")
    build_index(["The barn owl hunts at night.", "Flour, water and salt."], folder / "index")
    return [
        {"kind": "local_search", "index": str(folder / "index"), "top_k": 1, "price": {"per_call_usd": 0.25}},
        {"kind": "mcp", "command": [sys.executable, str(MCP_SERVER)], "include": ["add", "raise"], "prefix": "t_"},
    ]


@pytest.fixture(scope="module")
def tools(entries, tmp_path_factory) -> Iterator[dict[str, Tool]]:
    """The tools as a training host sees them: made of the config that `host_tools` rewrote, over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config, hosted = host_tools(tool_config(entries), f"http://127.0.0.1:{port}")
    file = tmp_path_factory.mktemp("server") / "tools.yaml"
    file.write_text(yaml.safe_dump(hosted))
    command = [sys.executable, "-m", "orchestra_jax.launch.tool_server", str(file), "--host", "127.0.0.1"]
    path = os.pathsep.join(part for part in sys.path if part)
    server = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, "PYTHONPATH": path})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.1)
        yield {tool.name: tool for tool in tools_from_config(config.env.kwargs["tools"])}
    finally:
        close_mcp()
        server.terminate()
        server.wait(20)


def call(tools: dict[str, Tool], name: str, **arguments: Any) -> CallRecord:
    calls = run_calls([ToolCall(name, arguments)], tools, lambda _: None, max_output_chars=1000)
    (record,) = run_on_loop(calls)
    return record


def test_names_schemas_prices_and_told_latencies_are_those_of_the_tools_themselves(tools, entries):
    local = {tool.name: tool for tool in tools_from_config(entries)}
    assert list(tools) == list(local) == ["local_search", "t_add", "t_raise"]
    for name, tool in tools.items():
        assert tool.description == local[name].description
        assert tool.price == local[name].price
        assert tool.latency_s == local[name].latency_s
        assert tool.argument_error({}) == local[name].argument_error({})


def test_answers_and_costs_are_the_same(tools, entries):
    local = {tool.name: tool for tool in tools_from_config(entries)}
    for name, arguments in (("local_search", {"query": "owl"}), ("t_add", {"a": 2, "b": 5})):
        here, there = call(local, name, **arguments), call(tools, name, **arguments)
        assert (there.status, there.text, there.cost_usd) == (here.status, here.text, here.cost_usd)
        assert there.status == "ok"


def test_faults_are_observations(tools):
    wrong = call(tools, "local_search", question="owl")
    assert (wrong.status, wrong.error_type) == ("error", "invalid_arguments")
    raised = call(tools, "t_raise", message="out of ink")
    assert (raised.status, raised.error_type) == ("error", "tool_exception")
    assert "out of ink" in raised.text


def test_many_calls_at_once(tools):
    calls = [ToolCall("local_search", {"query": "flour"})] * 50
    records = run_on_loop(run_calls(calls, tools, lambda _: None, max_output_chars=1000))
    assert {record.status for record in records} == {"ok"}


def test_a_tool_that_cannot_be_made_ends_the_server_with_its_name(tmp_path, capsys):
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump([{"kind": "local_search", "index": str(tmp_path / "none")}]))
    with pytest.raises(SystemExit) as caught:
        main([str(file)])
    assert caught.value.code == 2
    assert "tools[0]" in capsys.readouterr().err
