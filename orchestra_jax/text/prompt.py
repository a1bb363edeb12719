"""System prompts: the tools of an episode, their prices and latencies, and the environment's instructions."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_TASK = (
    "Solve the user's task with the tools you have. Every call costs money and time: weigh the price and the latency "
    "in a tool's description against how likely it is to help."
)
_ANSWER = 'When you know the answer, reply without a tool call and end with "Answer: " and the answer.'
_CALL_FORMAT = (
    "To call a tool, write one JSON object with its name and arguments:\n"
    '<tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "The result comes back within <tool_response> lines."
)


def system_prompt(info: Mapping[str, Any], style: str) -> tuple[str, list[dict[str, Any]] | None]:
    """The system text of an episode, and the tools to hand to the chat template.

    Args:
        info: what the environment's ``reset`` gave; ``tools_json`` and ``instructions`` are read. (The preference's
            words are part of the first observation.)
        style: "qwen" for instruction-tuned models: instructions, and full schemas for the template's tools section,
            price and latency within each description. "compact" for tiny policies: one line a tool, such as
            ``gpt-5 $1.2/10M 12s`` (dollars per million input and output tokens), ``search $.0005 .3s`` (dollars a
            call); no schemas, so arguments should be optional.

    Returns:
        (system text, tools or None).

    Raises:
        ValueError: for an unknown style or malformed JSON in ``info``.
    """
    tools = _read(info, "tools_json", list)
    instructions = str(info.get("instructions") or "")
    if style == "compact":
        return "".join([*map(_compact_line, tools), instructions]), None
    if style == "qwen":
        text = f"{_TASK}\n\n{instructions}" if instructions else f"{_TASK} {_ANSWER}"
        return text, [_priced_schema(tool) for tool in tools]
    raise ValueError(f"prompt style must be 'qwen' or 'compact', not {style!r}")


def tools_section(tools: list[dict[str, Any]]) -> str:
    """Tools as system text, for chat templates without a section of their own: one JSON schema a line."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"Tools:\n{schemas}\n\n{_CALL_FORMAT}"


def format_number(value: float) -> str:
    """Two significant digits, never an exponent: 1.25 -> "1.2", 1234 -> "1200", 0.00005 -> "0.00005"."""
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


def _compact_line(tool: Mapping[str, Any]) -> str:
    """Numbers lose a zero before the point: a tiny policy reads and pays for every token."""
    price = tool["price"]
    parts = []
    if price["per_call_usd"]:
        parts.append(_short(price["per_call_usd"]))
    if price["per_input_token_usd"] or price["per_output_token_usd"]:
        per_million = (_short(price[f"per_{side}_token_usd"] * 1e6) for side in ("input", "output"))
        parts.append("/".join(per_million) + "M")
    if price["per_second_usd"]:
        parts.append(_short(price["per_second_usd"]) + "/s")
    return f"{tool['function']['name']} ${'+'.join(parts) or '0'} {_short(tool['latency_s'])}s\n"


def _short(value: float) -> str:
    return format_number(value).removeprefix("0") or "0"


def _priced_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    latency = f"Takes about {format_number(tool['latency_s'])} s."
    description = " ".join(filter(None, [function["description"].strip(), _price_sentence(tool["price"]), latency]))
    return {"type": "function", "function": {**function, "description": description}}


def _price_sentence(price: Mapping[str, float]) -> str:
    per_million = {side: price[f"per_{side}_token_usd"] * 1e6 for side in ("input", "output")}
    parts = [
        (price["per_call_usd"], "per call"),
        (per_million["input"], "per million input tokens"),
        (per_million["output"], "per million output tokens"),
        (price["per_second_usd"], "per second"),
    ]
    charged = [f"${format_number(amount)} {unit}" for amount, unit in parts if amount]
    return f"Costs {', '.join(charged)}." if charged else "Free."


def _read(info: Mapping[str, Any], key: str, kind: type) -> Any:
    """The JSON under a key; an empty string stands for nothing."""
    try:
        value = json.loads(info[key] or ("[]" if kind is list else "{}"))
    except KeyError:
        raise ValueError(f"info has no {key!r}; pass what the environment's reset returned") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"info[{key!r}]: not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"info[{key!r}]: must be a JSON {'array' if kind is list else 'object'}")
    return value
