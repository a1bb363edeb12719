"""Serves tools of a config over MCP's HTTP, for training hosts that lack the tools' files and programs.

    python -m orchestra_jax.launch.tool_server tools.yaml --port 8000

`tools.yaml` is a list of entries as in `env.kwargs.tools` (see `orchestra_envs.toolbox`). The tools of the i-th are at
`http://HOST:PORT/i/mcp`, for `{kind: mcp, url: ...}`. Calls are independent: any replica may answer any call, but a
started MCP server keeps its state in its own replica. There is no login: whoever reaches the port may call the tools.

Needs `pip install 'orchestra-jax[mcp]'`. No JAX is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from orchestra_envs.calls import run_calls
from orchestra_envs.loop import bridge
from orchestra_envs.parse import ToolCall
from orchestra_envs.toolbox import tools_from_config
from orchestra_envs.tools import CallContext, CallRecord, Tool

MAX_OUTPUT_CHARS = 1_000_000
"""Of one answer; the environment cuts it much shorter, where the policy reads it."""


def make_app(entries: Sequence[Mapping[str, Any]]) -> Any:
    """The ASGI application that serves the tools of each entry under its index.

    Raises:
      ValueError, ImportError: an entry cannot be made into tools; the message names it.
    """
    from starlette.applications import Starlette
    from starlette.routing import Mount

    apps = [
        _server(tools_from_config([entry], where=f"tools[{index}]")).streamable_http_app(
            # Without sessions, so that it does not matter which replica a call reaches.
            stateless_http=True,
            json_response=True,
            host="0.0.0.0",
        )
        for index, entry in enumerate(entries)
    ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for app in apps:
                await stack.enter_async_context(app.router.lifespan_context(app))
            yield

    return Starlette(routes=[Mount(f"/{index}", app=app) for index, app in enumerate(apps)], lifespan=lifespan)


def _server(tools: Sequence[Tool]) -> Any:
    """An MCP server of these tools."""
    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.shared.exceptions import MCPError

    by_name = {tool.name: tool for tool in tools}

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=tool.name, description=tool.description, input_schema=tool.parameters) for tool in tools
            ]
        )

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        record = await bridge(_run(by_name, ToolCall(params.name, dict(params.arguments or {}))))
        if record.status == "ok":
            return types.CallToolResult(content=[types.TextContent(text=record.text)])
        # Whoever called puts both in front again.
        text = record.text.removeprefix("Error: ").removeprefix(f"{params.name}: ")
        if record.error_type in ("unknown_tool", "invalid_arguments"):
            raise MCPError(types.INVALID_PARAMS, text)
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)

    return Server("orchestra-tools", on_list_tools=list_tools, on_call_tool=call_tool)


async def _run(tools: Mapping[str, Tool], call: ToolCall) -> CallRecord:
    """One call with its tool's retries and limits, as within an environment."""
    (record,) = await run_calls([call], tools, _no_context, max_output_chars=MAX_OUTPUT_CHARS)
    return record


def _no_context(_: int) -> CallContext:
    raise RuntimeError("a tool that wants to know of the episode runs with the episode, not on a tool server")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m orchestra_jax.launch.tool_server")
    parser.add_argument("tools", type=Path, help="YAML list of tools")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    try:
        app = make_app(yaml.safe_load(options.tools.read_text(encoding="utf-8")))
    except (OSError, ValueError, ImportError) as error:
        print(f"tool server: {options.tools}: {error}", file=sys.stderr)
        sys.exit(2)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=10)


if __name__ == "__main__":
    main()
