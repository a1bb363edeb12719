"""An MCP server to test against, a process of its own.

    python tests/envs/servers/mcp_server.py                     # stdio
    python tests/envs/servers/mcp_server.py --http              # HTTP on 127.0.0.1; prints its URL
    python tests/envs/servers/mcp_server.py --http --port 8000 --key SECRET --legacy
    python tests/envs/servers/mcp_server.py --raw '{"tools": [...]}'    # stdio without the SDK: any listing, any fault

It is built with the server side of the official SDK (`--raw` is not, for answers that the SDK would not give).
"""

import argparse
import asyncio
import base64
import json
import os
import socket
import sys
import time
from typing import Annotated, Any

WIRE = os.dup(1)  # the SDK moves the standard output of its handlers away
GARBAGE = b'\xff\xfe not JSON at all\n{"jsonrpc": "2.0"}\n\n'


def make_server() -> Any:
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Audio, Context, Image
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import BlobResourceContents, CallToolResult, EmbeddedResource, ResourceLink, TextContent
    from pydantic import BaseModel, Field

    class Node(BaseModel):
        """A tree."""

        label: str
        children: list["Node"] = []

    class Weather(BaseModel):
        city: str
        celsius: float

    server = MCPServer("test", log_level="ERROR")
    state = {"count": 0, "slow": 0, "most_slow": 0, "hanging": 0}

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    async def slow(seconds: float) -> int:
        """Wait, then tell how many of these calls ran at once."""
        state["slow"] += 1
        state["most_slow"] = max(state["most_slow"], state["slow"])
        await asyncio.sleep(seconds)
        state["slow"] -= 1
        return state["most_slow"]

    @server.tool()
    async def hang() -> str:
        """Never answers."""
        state["hanging"] += 1
        try:
            await asyncio.sleep(3600)
        finally:
            state["hanging"] -= 1
        return "never"

    @server.tool()
    async def block() -> str:
        """Never answers, and neither does the server from then on."""
        time.sleep(3600)
        return "never"

    @server.tool()
    def hanging() -> int:
        """How many calls hang."""
        return state["hanging"]

    @server.tool(name="raise")
    def raise_(message: str) -> str:
        """Reports an error."""
        raise ToolError(message)

    @server.tool(structured_output=False)
    def huge(num_chars: int) -> str:
        """A long text."""
        return "x" * num_chars

    @server.tool(structured_output=False)
    def say(text: str) -> str:
        """Says it back."""
        return f"{text} ¡ünï → 漢字 🎉\u2028!"

    @server.tool()
    def weather(city: str) -> Weather:
        """Structured output."""
        return Weather(city=city, celsius=21.5)

    @server.tool()
    def only_structured() -> CallToolResult:
        """Structured output that its text does not tell."""
        return CallToolResult(
            content=[TextContent(text="see the data")], structured_content={"rows": [[1, None], [2, "ä"]]}
        )

    @server.tool()
    def several() -> list[str]:
        """Several texts."""
        return ["first", "second"]

    @server.tool(structured_output=False)
    def media() -> list[Any]:
        """Text, image, sound, a binary resource and a link."""
        blob = base64.b64encode(bytes(1001)).decode()
        resource = BlobResourceContents(uri="file:///data.bin", mime_type="application/x-thing", blob=blob)
        return [
            "a picture:",
            Image(data=bytes(1000), format="png"),
            Audio(data=bytes(1002), format="wav"),
            EmbeddedResource(resource=resource),
            ResourceLink(name="manual", uri="https://example.org/manual"),
        ]

    @server.tool()
    def depth(tree: Node) -> int:
        """The depth of a tree."""
        return 1 + max((depth(child) for child in tree.children), default=0)

    @server.tool()
    def count() -> int:
        """Counts its calls."""
        state["count"] += 1
        return state["count"]

    @server.tool()
    async def die() -> str:
        """Ends the server's process."""
        print("goodbye, cruel world", file=sys.stderr, flush=True)
        os._exit(7)

    @server.tool(structured_output=False)
    def garbage(num_lines: int) -> str:
        """Prints lines that are no messages."""
        os.write(WIRE, GARBAGE * num_lines)
        return "printed"

    @server.tool(structured_output=False)
    def environment() -> str:
        """The environment variables."""
        return json.dumps(dict(os.environ))

    @server.tool(structured_output=False)
    def header(name: str, ctx: Context) -> str:
        """An HTTP header of the call."""
        return ctx.request_context.request.headers.get(name, "none")

    @server.tool()
    def pid() -> int:
        """The server's process."""
        return os.getpid()

    @server.tool(structured_output=False)
    def limit(value: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Takes a digit."""
        return str(value)

    @server.tool()
    def broken() -> str:
        """Its answer breaks off over HTTP (see `gate`)."""
        return "not broken"

    for status in (401, 429, 503):

        @server.tool(name=f"status_{status}")
        def refused() -> str:
            """Answered with that HTTP status (see `gate`)."""
            return "not refused"

    return server


def gate(app: Any, key: str | None, legacy: bool) -> Any:
    """ASGI middleware: checks the key, refuses the tools `status_*`, breaks off in its answer to the tool `broken`, and
    knows no `server/discover` if legacy."""

    async def gated(scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers", ())}
        status = 0
        if scope["type"] == "http":
            if key is not None and headers.get("x-api-key") != key:
                status = 401
            elif legacy and headers.get("mcp-method") == "server/discover":
                status = 400
            elif (name := headers.get("mcp-name", "")).startswith("status_"):
                status = int(name.removeprefix("status_"))
            elif name == "broken":
                sizes = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
                await send({"type": "http.response.start", "status": 200, "headers": sizes})
                await send({"type": "http.response.body", "body": b'{"jsonrpc": "2.'})
                return
        if not status:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"7")]})
        await send({"type": "http.response.body", "body": b"<html>refused</html>"})

    return gated


def serve_http(port: int, key: str | None, legacy: bool) -> None:
    import uvicorn

    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(512)  # who reads the URL may connect at once
    print(f"http://127.0.0.1:{sock.getsockname()[1]}/mcp", flush=True)
    app = gate(make_server().streamable_http_app(), key, legacy)
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run(sockets=[sock])


RAW_TOOLS = [
    {"name": name, "description": f"See raw_text: {name}.", "inputSchema": {"type": "object"}}
    for name in ("count", "die", "environment", "garbage", "hang", "pid", "echo")
]


def raw_text(name: str, arguments: dict[str, Any], num_calls: int) -> str:
    """What a tool of the raw server answers: of those above, or its arguments."""
    if name == "die":
        print("goodbye, cruel world", file=sys.stderr, flush=True)
        os._exit(7)
    if name == "garbage":
        os.write(WIRE, GARBAGE * arguments["num_lines"])
        return "printed"
    texts = {"count": str(num_calls), "environment": json.dumps(dict(os.environ)), "pid": str(os.getpid())}
    return texts.get(name, json.dumps(arguments))


def serve_raw(fault: dict[str, Any]) -> None:
    """A server of the older protocol, which starts in a tenth of the time. `fault` may hold: die (exit at start with
    this text on standard error), mute (never answer), tools (the listing; RAW_TOOLS without one), pages (a listing in
    pages), circle (pages without end), result (of every call), answer (the whole message that answers a call), first
    (lines to print at start)."""
    num_calls = 0
    if "die" in fault:
        sys.exit(fault["die"])
    for line in fault.get("first", ()):
        print(line, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "mute" in fault or "id" not in message:
            continue
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        method = message["method"]
        if method == "initialize":
            reply["result"] = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        elif method == "tools/list":
            page = int(message.get("params", {}).get("cursor", 0))
            pages = fault.get("pages") or [fault.get("tools") or RAW_TOOLS]
            reply["result"] = {"tools": pages[min(page, len(pages) - 1)]}
            if "circle" in fault:
                reply["result"]["nextCursor"] = "0"
            elif page + 1 < len(pages):
                reply["result"]["nextCursor"] = str(page + 1)
        elif method == "tools/call" and "answer" in fault:
            reply.update(fault["answer"])
        elif method == "tools/call":
            name, arguments = message["params"]["name"], message["params"].get("arguments") or {}
            num_calls += name == "count"
            if name == "hang":
                continue
            text = raw_text(name, arguments, num_calls)
            reply["result"] = fault.get("result", {"content": [{"type": "text", "text": text}]})
        else:
            reply["error"] = {"code": -32601, "message": f"no method {method}"}
        print(json.dumps(reply), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--raw", type=json.loads)
    parser.add_argument("--mark", help="to be found by in the list of processes")
    options = parser.parse_args()
    if options.raw is not None:
        serve_raw(options.raw)
    elif options.http:
        serve_http(options.port, options.key, options.legacy)
    else:
        make_server().run()


if __name__ == "__main__":
    main()
