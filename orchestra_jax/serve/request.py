"""What a client asks for: the JSON of `POST /v1/chat/completions`, checked field by field.

Nothing is silently ignored that would change the answer: a field that this server does not have is an error which names
it, unless its value asks for nothing (`"presence_penalty": 0`). Fields that are null count as left out, as at OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestra_envs.parse import decode_arguments

from orchestra_jax.serve.errors import ApiError, bad_request

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256

ToolChoice = Literal["none", "auto", "required"]
Message = dict[str, Any]

_INERT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields that never change an answer."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Fields that this server does not have, and the values of them that ask for nothing."""

_FIELDS = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "stop", "seed", "n", "logprobs", "stream", "stream_options"),
    }
)

_MESSAGE_FIELDS: dict[str, frozenset[str]] = {
    "system": frozenset({"content", "name"}),
    "user": frozenset({"content", "name"}),
    "assistant": frozenset({"content", "name", "tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"content", "name", "tool_call_id"}),
}
"""What a message of each role may have; names and ids of tool results stand in no prompt."""

# What servers put into the message of an answer, and clients send back.
_ECHOED = frozenset({"refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_errors"})


@dataclass(frozen=True)
class ChatRequest:
    """A checked request.

    Attributes:
        messages: as `read_messages` gives them.
        tools: in OpenAI's form, without fields that the policy is not to read.
        tool_choice: "auto" where nothing was said.
        named_tool: the one that must be called, with tool_choice "required".
        strict_tools: a tool asks for arguments that surely fit its schema.
        parallel_tool_calls: False ends the turn with its first call.
        max_tokens: the most tokens of a choice, None as many as there is room for.
        top_k: 0 for all.
        stop: the strings that end a choice.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    tool_choice: ToolChoice
    named_tool: str | None
    strict_tools: bool
    parallel_tool_calls: bool
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    seed: int | None
    n: int
    logprobs: bool
    stream: bool
    include_usage: bool


def read_chat_request(body: Any) -> ChatRequest:
    """Checks the JSON of a request.

    Raises:
        ApiError: 400, naming the field that is unknown, unsupported or not as it should be.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body of the request must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_known(name, value)
    fields = _Fields(given)
    stream = fields.boolean("stream", False)
    parallel = fields.boolean("parallel_tool_calls", True)
    logprobs = fields.boolean("logprobs", False)
    if logprobs and not parallel:
        raise bad_request("logprobs", "cannot be had together with parallel_tool_calls: false")
    tools, strict = _tools(given.get("tools", []))
    choice, named_tool = _tool_choice(given.get("tool_choice"), tools)
    return ChatRequest(
        model=_text(given.get("model"), "model"),
        messages=read_messages(given.get("messages")),
        tools=tools,
        tool_choice=choice,
        named_tool=named_tool,
        strict_tools=strict,
        parallel_tool_calls=parallel,
        max_tokens=_max_tokens(fields),
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=_top_p(fields),
        top_k=max(0, fields.integer("top_k", -1) or 0),
        stop=_stops(given.get("stop", [])),
        seed=fields.integer("seed"),
        n=fields.integer("n", 1, MAX_CHOICES, 1) or 1,
        logprobs=logprobs,
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
    )


def read_messages(messages: Any) -> list[Message]:
    """Messages in one plain form.

    They have `role` ("developer" becomes "system"), `content` (a string), and for assistants, where there are any,
    `tool_calls` (`id`, `name`, `arguments` as an object) and `reasoning`.

    Raises:
        ApiError: 400, naming the message and its field.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "must be a list of at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


class _Fields:
    """Reads simple fields with their bounds."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def boolean(self, name: str, default: bool) -> bool:
        value = self.given.get(name, default)
        if not isinstance(value, bool):
            raise bad_request(name, f"must be true or false, not {_shown(value)}")
        return value

    def integer(
        self, name: str, low: int | None = None, high: int | None = None, default: int | None = None
    ) -> int | None:
        value = self.given.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(name, f"must be a whole number, not {_shown(value)}")
        if (low is not None and value < low) or (high is not None and value > high):
            most = "" if high is None else f" and at most {high}"
            raise bad_request(name, f"must be at least {low}{most}, not {_shown(value)}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise bad_request(name, f"must be a number from {low} to {high}, not {_shown(value)}")
        return float(value)


def _check_known(name: str, value: Any) -> None:
    if name in _FIELDS or name in _INERT:
        return
    if name not in _NEUTRAL:
        raise ApiError(
            400, f"{_shown(name)} is not supported by this server", param=name[:64], code="unsupported_parameter"
        )
    if value not in _NEUTRAL[name]:
        raise bad_request(name, f"{_shown(value)} is not supported by this server", "unsupported_parameter")


def _max_tokens(fields: _Fields) -> int | None:
    old, new = fields.integer("max_tokens", 1), fields.integer("max_completion_tokens", 1)
    if None not in (old, new) and old != new:
        raise bad_request("max_tokens", f"is {old}, but max_completion_tokens is {new}: give one of them")
    return old if new is None else new


def _top_p(fields: _Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0, 1)
    if top_p == 0:
        raise bad_request("top_p", "must be above 0 (temperature 0 is greedy)")
    return top_p


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise bad_request("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise bad_request("stop", f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise bad_request("stream_options", "goes with stream: true")
    if not isinstance(options, dict):
        raise bad_request("stream_options", f"must be an object, not {_shown(options)}")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise bad_request(f"stream_options.{name[:64]}", "is not supported by this server", "unsupported_parameter")
    return _Fields({name: value for name, value in options.items() if value is not None}).boolean(
        "include_usage", False
    )


# Tools.


def _tools(tools: Any) -> tuple[list[dict[str, Any]], bool]:
    if not isinstance(tools, list):
        raise bad_request("tools", "must be a list")
    read = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool, _ in read]
    if len(set(names)) < len(names):
        raise bad_request("tools", f"two tools are called {next(_shown(n) for n in names if names.count(n) > 1)}")
    return [tool for tool, _ in read], any(strict for _, strict in read)


def _tool(tool: Any, where: str) -> tuple[dict[str, Any], bool]:
    """A tool as the policy reads it, and whether it is strict."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise bad_request(where, 'must be an object of type "function"')
    _refuse_others(tool, {"type", "function"}, where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function", "must be an object")
    where = f"{where}.function"
    _refuse_others(function, {"name", "description", "parameters", "strict"}, where)
    given = {name: value for name, value in function.items() if value is not None}
    strict = _Fields(given).boolean("strict", False)
    read: dict[str, Any] = {"name": _text(given.get("name"), f"{where}.name")}
    for name, kind, kind_name in (("description", str, "a string"), ("parameters", dict, "a JSON schema")):
        if name in given and not isinstance(given[name], kind):
            raise bad_request(f"{where}.{name}", f"must be {kind_name}, not {_shown(given[name])}")
    # Always in this order and never left out: what the policy reads does not depend on how a client writes JSON.
    read["description"] = given.get("description", "")
    read["parameters"] = given.get("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": read}, strict


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[ToolChoice, str | None]:
    """The choice, and the tool that it names."""
    if choice is None:
        return "auto", None
    if choice in ("none", "auto"):
        return choice, None
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice", "is 'required', but there are no tools")
        return "required", None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("tool_choice", "must be 'none', 'auto', 'required' or a function with its name")
    if all(tool["function"]["name"] != function["name"] for tool in tools):
        raise bad_request("tool_choice", f"there is no tool {_shown(function['name'])}")
    return "required", function["name"]


# Messages.


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise bad_request(where, "must be an object")
    given = {name: value for name, value in message.items() if value is not None}
    role = "system" if given.get("role") == "developer" else given.get("role")
    if not isinstance(role, str) or role not in _MESSAGE_FIELDS:
        raise bad_request(f"{where}.role", f"must be system, developer, user, assistant or tool, not {_shown(role)}")
    for name, value in given.items():
        empty = role == "assistant" and name in _ECHOED and value in ([], {}, "")
        told = role == "assistant" and name == "tool_call_errors"
        if name != "role" and name not in _MESSAGE_FIELDS[role] and not empty and not told:
            raise bad_request(f"{where}.{name[:64]}", f"is not supported in messages of {role!r}")
    read: Message = {"role": role, "content": _content(given.get("content"), where, role)}
    if role == "tool":
        _text(given.get("tool_call_id"), f"{where}.tool_call_id")
    if role != "assistant":
        return read
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls", "must be a list")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    reasoning = given.get("reasoning_content", given.get("reasoning", ""))
    if not isinstance(reasoning, str):
        raise bad_request(f"{where}.reasoning_content", "must be a string")
    if reasoning:
        read["reasoning"] = reasoning
    return read


def _content(content: Any, where: str, role: str) -> str:
    where = f"{where}.content"
    if content is None:
        if role == "assistant":
            return ""
        raise bad_request(where, f"is missing, in a message of {role!r}")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(where, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad_request(f"{where}[{index}]", f"must be a part of type 'text'; {_shown(kind)} is not supported")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request(where, "must be an object with a function")
    try:
        arguments = decode_arguments(function.get("arguments"))
    except ValueError as error:
        raise bad_request(f"{where}.function.arguments", str(error)) from None
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise bad_request(f"{where}.id", "must be a string")
    return {
        "id": call_id or "",
        "name": _text(function.get("name"), f"{where}.function.name"),
        "arguments": arguments,
    }


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(where, f"must be a string that is not empty, not {_shown(value)}")
    return value


def _refuse_others(value: Mapping[str, Any], known: set[str], where: str) -> None:
    if others := value.keys() - known:
        raise bad_request(f"{where}.{min(others)[:64]}", "is not supported by this server", "unsupported_parameter")


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
