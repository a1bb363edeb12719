"""Tools of MCP servers (Model Context Protocol), over stdio or streamable HTTP, through the official SDK.

    tools = mcp_tools(command=["uvx", "mcp-server-time"], price={"per_call_usd": 0.001})      # started as a process
    tools = mcp_tools(url="https://host/mcp", headers_env={"X-Api-Key": "MY_KEY"}, include=["search"], prefix="web_")
    env = MyToolEnv(tools=tools)            # they are Tools like any others; names, schemas and texts are the server's
    close_mcp()                             # or let it happen at exit

Needs `pip install 'orchestra-jax[mcp]'`. A server to try it with: `uvx mcp-server-time`, or the test server,
`python tests/envs/servers/mcp_server.py` (stdio) and `python tests/envs/servers/mcp_server.py --http`, which prints its
URL.

All tools and episodes of a process share one connection to a server, and so its state; calls run concurrently over it.
A server process gets a minimal environment (PATH, HOME and their like) plus `env`. A connection that is lost is
opened again by the next call; a call under way then fails as "unavailable", since nobody knows whether it was done.
"""

import asyncio
import functools
import json
import re
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestra_envs.limits import Limiter, ToolUnavailableError
from orchestra_envs.live._mcp_session import (
    UNUSABLE,
    HttpFault,
    McpServer,
    NoServerError,
    Session,
    close_mcp,
    http_fault,
    link_to,
)
from orchestra_envs.live.options import install_hint, made
from orchestra_envs.loop import bridge, run_on_loop
from orchestra_envs.tools import DEFAULT_TIMEOUT_S, Price, Tool, ToolArgumentError, is_number

__all__ = ["McpToolError", "close_mcp", "mcp_tools"]

MAX_DESCRIPTION_CHARS = 2000

_HTTP_REFUSED = frozenset({401, 403, 404})
_HTTP_TRANSIENT = frozenset({408, 425, 429})


class McpToolError(RuntimeError):
    """An MCP tool reported an error, or its server refused the call."""


def mcp_tools(
    *,
    command: Sequence[str] | None = None,
    url: str | None = None,
    env: Mapping[str, str | None] | None = None,
    headers_env: Mapping[str, str] | None = None,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    prefix: str = "",
    price: Price | Mapping[str, Any] | None = None,
    latency_s: float | Mapping[str, float] = 0.0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_concurrency: int | None = None,
    max_output_chars: int | None = None,
    start_timeout_s: float = 30.0,
) -> list[Tool]:
    """Connect to an MCP server and make a `Tool` of each of its tools. Calls for the same server share a connection.

    Args:
        command: the program to start and its arguments, for a server that speaks stdio. It goes into the records, so
            put secrets in `env`.
        url: of a server that speaks streamable HTTP. Give either this or `command`.
        env: variables for the process; None as a value takes the variable of this process.
        headers_env: from an HTTP header to the environment variable that holds its value.
        include: names of the server's tools to take; None takes all.
        exclude: names of the server's tools to leave out.
        prefix: put before every name.
        price: of a call (a `Price` or a mapping of its fields), or a mapping from a tool's name to that; tools
            without a price are free.
        latency_s: what the policy is told to expect, for all or by tool name; records carry measured seconds.
        timeout_s: wall-clock limit of a call, connecting included if need be.
        max_concurrency: most calls under way at this server at once; None for no bound.
        max_output_chars: longer outputs are cut there.
        start_timeout_s: limit for starting the server and listing its tools.

    Raises:
        ValueError: an argument is wrong, the server cannot be reached (with the end of its standard error), or a tool
            of it cannot be used (named, so that it can be excluded).
        ImportError: the SDK is not installed.
    """
    server = _server(command, url, env, headers_env, start_timeout_s)
    try:
        import mcp  # noqa: F401  # here, and not on the tools' event loop: it takes a second
    except ImportError as error:
        raise ImportError(f"MCP servers need the MCP SDK: {install_hint('mcp')}") from error
    listed = _chosen(server, run_on_loop(_listed(server)), include, exclude)
    names = _legal_names(server, prefix, [tool.name for tool in listed])
    limiter = None if max_concurrency is None else _limiter(server, max_concurrency)
    prices, latencies_s = _prices(names, price), _latencies_s(names, latency_s)
    return [
        _tool(
            server,
            tool,
            name=names[tool.name],
            price=prices[tool.name],
            latency_s=latencies_s[tool.name],
            timeout_s=timeout_s,
            limiter=limiter,
            max_output_chars=max_output_chars,
        )
        for tool in listed
    ]


def _server(
    command: Sequence[str] | None,
    url: str | None,
    env: Mapping[str, str | None] | None,
    headers_env: Mapping[str, str] | None,
    start_timeout_s: float,
) -> McpServer:
    """The settings, checked."""
    if (command is None) == (url is None):
        raise ValueError("mcp_tools: give either command (for a server to start) or url (for one that runs)")
    if command is not None and (
        isinstance(command, str) or not command or not all(isinstance(part, str) and part for part in command)
    ):
        raise ValueError(f"mcp_tools: command must be a list of words like ['uvx', 'mcp-server-time'], not {command!r}")
    if url is not None and urllib.parse.urlsplit(str(url)).scheme not in ("http", "https"):
        raise ValueError(f"mcp_tools: url must begin with http:// or https://, not {url!r}")
    if env and url:
        raise ValueError("mcp_tools: env is for a server that is started by command; a url has headers_env")
    if headers_env and command:
        raise ValueError("mcp_tools: headers_env is for a server at a url; a command has env")
    _check_strings("env", env, may_be_none=True)
    _check_strings("headers_env", headers_env)
    if not (is_number(start_timeout_s) and start_timeout_s > 0):
        raise ValueError(f"mcp_tools: start_timeout_s must be a finite number above 0, not {start_timeout_s!r}")
    return McpServer(
        command=tuple(command or ()),
        url=url or "",
        env=tuple(sorted((env or {}).items())),
        headers_env=tuple(sorted((headers_env or {}).items())),
        start_timeout_s=float(start_timeout_s),
    )


def _check_strings(field: str, value: Any, *, may_be_none: bool = False) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"mcp_tools: {field} must be a mapping, not {value!r}")
    for key, text in value.items():
        if not isinstance(key, str) or not (isinstance(text, str) or (may_be_none and text is None)):
            raise ValueError(f"mcp_tools: {field}[{key!r}] must be a string, not {type(text).__name__}")


async def _listed(server: McpServer) -> list[Any]:
    try:
        session = await link_to(server).live(at_once=True)
    except NoServerError as error:
        raise ValueError(f"MCP server {server}: {error}") from None
    return session.tools


def _chosen(
    server: McpServer, listed: Sequence[Any], include: Collection[str] | None, exclude: Collection[str] | None
) -> list[Any]:
    """The tools to take, in the server's order."""
    known = [tool.name for tool in listed]
    for field, names in (("include", include), ("exclude", exclude)):
        if isinstance(names, str):
            raise ValueError(f"mcp_tools: {field} must be a list of names, not {names!r}")
        if unknown := [name for name in names or () if name not in known]:
            raise ValueError(f"mcp_tools: {field}: MCP server {server} has no tool {unknown[0]!r}, it has {known}")
    if twice := [name for name in known if known.count(name) > 1]:
        raise ValueError(f"MCP server {server} has two tools named {twice[0]!r}")
    return [tool for tool in listed if (include is None or tool.name in include) and tool.name not in (exclude or ())]


def _legal_names(server: McpServer, prefix: str, names: Sequence[str]) -> dict[str, str]:
    """From the server's name of a tool to its `Tool`'s: other characters become "_", what is too long is cut."""
    legal: dict[str, str] = {}
    for name in names:
        new = re.sub(r"[^A-Za-z0-9_.-]", "_", prefix + name)[:64]
        if rival := next((other for other, taken in legal.items() if taken == new), None):
            raise ValueError(
                f"MCP server {server}: its tools {rival!r} and {name!r} would both be named {new!r}; "
                "exclude one, or shorten prefix"
            )
        legal[name] = new
    return legal


@functools.cache
def _limiter(server: McpServer, max_concurrency: int) -> Limiter:
    """One for all that ask for the same: the bound is the server's."""
    return Limiter(max_concurrency=max_concurrency)


def _prices(names: Mapping[str, str], price: Price | Mapping[str, Any] | None) -> dict[str, Price]:
    """By the server's names."""
    if not isinstance(price, Mapping) or set(price) <= set(Price.__slots__):
        one = made(Price, price, "mcp_tools: price") or Price()
        return dict.fromkeys(names, one)
    by_name = _by_server_name(names, price, "price")
    return {name: made(Price, by_name.get(name), f"mcp_tools: price[{name!r}]") or Price() for name in names}


def _latencies_s(names: Mapping[str, str], latency_s: float | Mapping[str, float]) -> dict[str, float]:
    """By the server's names."""
    if not isinstance(latency_s, Mapping):
        return dict.fromkeys(names, latency_s)
    by_name = _by_server_name(names, latency_s, "latency_s")
    return {name: by_name.get(name, 0.0) for name in names}


def _by_server_name(names: Mapping[str, str], values: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`values` by the server's names; they may be given by the tools' names too."""
    old_names = {**{new: old for old, new in names.items()}, **{old: old for old in names}}
    if unknown := [name for name in values if name not in old_names]:
        raise ValueError(f"mcp_tools: {field}: there is no tool {unknown[0]!r}, there are {list(names)}")
    return {old_names[name]: value for name, value in values.items()}


def _tool(server: McpServer, listed: Any, *, name: str, timeout_s: float, **fields: Any) -> Tool:
    """A `Tool` of the server's description of one."""
    where = f"MCP server {server}, tool {listed.name!r}"
    try:
        return Tool(
            name=name,
            description=_description(listed),
            parameters=_parameters(listed.input_schema),
            function=functools.partial(_call_tool, server, listed.name, timeout_s),
            timeout_s=timeout_s,
            clock="measured",
            source="live",
            backend=f"{server.identity()}#{listed.name}",
            **fields,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error} (leave it out with exclude=[{listed.name!r}])") from None


def _description(listed: Any) -> str:
    """The server's text, or what else is known of the tool."""
    annotated = listed.annotations.title if listed.annotations else None
    text = next((text for text in (listed.description, listed.title, annotated) if text and text.strip()), None)
    if text is None:
        return f"The tool {listed.name!r} (its server does not say what it does)."
    text = text.strip()
    return text if len(text) <= MAX_DESCRIPTION_CHARS else text[: MAX_DESCRIPTION_CHARS - 1] + "…"


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The server's input schema as draft 2020-12; ValueError if it cannot be used."""
    if UNUSABLE in schema:
        raise ValueError(schema[UNUSABLE])
    mended = _mended(schema)
    mended.pop("$schema", None)
    for reference in _references(mended):
        if not reference.startswith("#"):
            raise ValueError(f"its inputSchema refers to {reference!r}, and only references within it are read")
        if not _resolves(mended, reference):
            raise ValueError(f"its inputSchema refers to {reference!r}, which is not in it")
    return mended


_MAPS: tuple[str, ...] = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: tuple[str, ...] = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SINGLE += ("unevaluatedItems", "unevaluatedProperties")


def _mended(schema: Any) -> Any:
    """A copy without titles (they only cost tokens) and nulls, with the older drafts' spellings replaced, and without
    patterns that Python cannot read (the server checks them)."""
    if not isinstance(schema, Mapping):
        return schema
    mended: dict[str, Any] = {}
    for key, value in schema.items():
        if (key == "title" and isinstance(value, str)) or (value is None and key not in ("const", "default")):
            continue
        if key == "pattern" and not _is_pattern(value):
            continue
        if key == "items" and isinstance(value, list):
            mended["prefixItems"] = [_mended(item) for item in value]
            if "additionalItems" in schema:
                mended["items"] = _mended(schema["additionalItems"])
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = key.removeprefix("exclusive").lower()
            if value and bound in schema:
                mended[key] = schema[bound]
        elif key in _MAPS and isinstance(value, Mapping):
            kept = {k: v for k, v in value.items() if key != "patternProperties" or _is_pattern(k)}
            mended[key] = {name: _mended(part) for name, part in kept.items()}
        elif key in _LISTS and isinstance(value, list):
            mended[key] = [_mended(part) for part in value]
        else:
            mended[key] = _mended(value) if key in _SINGLE else value
    return mended


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return True


def _references(schema: Any) -> list[str]:
    """All `$ref`s of a schema; those within data (enum, const, default, examples) are none."""
    if isinstance(schema, list):
        return [reference for part in schema for reference in _references(part)]
    if not isinstance(schema, Mapping):
        return []
    found = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    for key, part in schema.items():
        if key in _MAPS and isinstance(part, Mapping):
            found += _references(list(part.values()))
        elif key in _LISTS or key in _SINGLE:
            found += _references(part)
    return found


def _resolves(schema: Mapping[str, Any], reference: str) -> bool:
    """Whether a JSON pointer ("#/$defs/x") points into the schema; anchors ("#x") are left to the validator."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    part: Any = schema
    for step in urllib.parse.unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdigit() and int(key) < len(part):
            part = part[int(key)]
        elif isinstance(part, Mapping) and key in part:
            part = part[key]
        else:
            return False
    return True


async def _call_tool(server: McpServer, name: str, timeout_s: float, /, **arguments: Any) -> str:
    """The function of the tools: they hold settings and no connection, so they can be copied and pickled."""
    return await bridge(_call(server, name, timeout_s, arguments))


async def _call(server: McpServer, name: str, timeout_s: float, arguments: dict[str, Any]) -> str:
    """Call the tool over the live connection, once more if the server had forgotten the session."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # would end the connection for all
        raise ToolArgumentError(f"the arguments are no JSON: {error}") from None
    link = link_to(server)
    for is_last in (False, True):
        try:
            session = await link.live()
        except NoServerError as error:
            raise ToolUnavailableError(
                "there is no connection to its server", transient=True, retry_after_s=error.retry_after_s
            ) from error
        http_fault.set(fault := HttpFault())
        try:
            result = await session.client.call_tool(name, arguments)
        except asyncio.CancelledError:
            session.doubt(min(max(timeout_s / 4, 1.0), 5.0))
            raise
        except Exception as error:
            if not session.lost and _is_forgotten(session, fault):
                session.stop()
                if not is_last:
                    continue
            raise _fault_of(error, session, fault) from error
        link.answered()
        text = _text_of(result)
        if result.is_error:
            session.tell_error(name, text)
            raise McpToolError(text or "the tool reported an error and did not say which")
        return text
    raise AssertionError("the loop returns or raises")


def _is_forgotten(session: Session, fault: HttpFault) -> bool:
    """Whether an HTTP server of the older protocol does not know the session (it was restarted), so that it has not
    done the call."""
    return fault.status == 404 and session.client.session.discover_result is None


def _fault_of(error: Exception, session: Session, fault: HttpFault) -> Exception:
    """What the SDK raised, in our terms."""
    import mcp_types
    import pydantic
    from mcp.shared.exceptions import MCPError

    if fault.network:
        return ToolUnavailableError("its server cannot be reached", transient=True)
    if fault.status in _HTTP_REFUSED or fault.status in _HTTP_TRANSIENT or fault.status >= 500:
        return ToolUnavailableError(
            f"its server answered with HTTP status {fault.status}",
            transient=fault.status not in _HTTP_REFUSED,
            retry_after_s=fault.retry_after_s,
        )
    closed = isinstance(error, MCPError) and error.code == mcp_types.CONNECTION_CLOSED
    if closed or session.lost:
        session.doubt(2.0)
        return ToolUnavailableError("the connection to its server was lost", transient=True)
    if isinstance(error, MCPError):
        session.link.answered()
        if error.code == mcp_types.INVALID_PARAMS:
            return ToolArgumentError(_message_of(error))
        return McpToolError(_message_of(error))
    if isinstance(error, pydantic.ValidationError):
        return McpToolError("its server's answer does not follow the protocol")
    return McpToolError(str(error))


def _message_of(error: Any) -> str:
    """What an `MCPError` says, with the data that the server sent along."""
    if error.data in (None, "", {}, []):
        return error.message
    data = error.data if isinstance(error.data, str) else json.dumps(error.data, ensure_ascii=False, default=str)
    return error.message if data in error.message else f"{error.message}: {data}"


def _text_of(result: Any) -> str:
    """What the policy reads of a result: its texts, what else is in it by kind and size, and its structured part if
    the texts do not hold that already."""
    parts = [_part_text(part) for part in result.content]
    if result.structured_content is not None:
        texts = [part.text for part in result.content if part.type == "text"]
        if not _says(texts, result.structured_content):
            parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _part_text(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type in ("image", "audio"):
        return f"[{part.type}, {part.mime_type}, {_num_bytes(part.data)} bytes]"
    if part.type == "resource_link":
        return f"[link to {part.name}: {part.uri}]"
    resource = part.resource
    if hasattr(resource, "text"):
        return resource.text
    return f"[resource {resource.uri}, {resource.mime_type or 'unknown type'}, {_num_bytes(resource.blob)} bytes]"


def _num_bytes(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")


def _says(texts: Sequence[str], structured: Any) -> bool:
    """Whether the texts are the structured content, as servers send both: whole, or as what stands under "result"."""
    if not texts:
        return False
    wanted = [structured]
    if isinstance(structured, Mapping) and set(structured) == {"result"}:
        wanted.append(structured["result"])
    values = [_value(text) for text in texts]
    said = [values, list(texts)] if len(texts) > 1 else [values, list(texts), values[0], texts[0]]
    return not {json.dumps(value, sort_keys=True) for value in wanted}.isdisjoint(
        json.dumps(value, sort_keys=True) for value in said
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
