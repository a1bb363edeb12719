"""Hiding which model is behind an alias: finding its names in a text, however they are spelt, and replacing them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestra_envs.price_schedules import canonical_model
from orchestra_envs.tools import Tool

SOME_MODEL = "a language model"

# Words that betray a model, together with what is attached to them ("Qwen3-32B").
_FAMILIES = (
    *("chatgpt", "claude", "codellama", "codestral", "deepseek", "gemini", "gemma", "gpt", "grok", "haiku", "llama"),
    *("meta-llama", "mistral", "mixtral", "nemotron", "openai", "openmath", "opus", "qwen", "sonnet", "starcoder"),
    "anthropic",
)
_FAMILY = (
    r"(?i:(?<![^\W_])(?:" + "|".join(sorted(_FAMILIES, key=len, reverse=True)) + r")s?(?![a-z])"
    r"(?:[-.\w]*\w)?(?:\s\d+(?:\.\d+)?[a-z]?\b)*)"
)


def backend_model(tool: Tool) -> str:
    """The model in a backend such as "openai:Qwen/Qwen3-32B@https://host/v1", "" if there is none."""
    match = re.fullmatch(r"[a-z0-9_-]+:([^@]+)(@.*)?", tool.backend)
    return match[1] if match else ""


def model_names(tool: Tool) -> list[str]:
    """Canonical names of the models that a tool may be."""
    return [canonical_model(name) for name in (backend_model(tool), tool.name) if name]


def identities(tool: Tool) -> list[str]:
    """Everything by which a text could tell a tool."""
    model = backend_model(tool)
    host = re.search(r"@\w+://([^/:]+)", tool.backend)
    names = [tool.name, tool.backend, model, model.rpartition("/")[2], host[1] if host else "", *model_names(tool)]
    return [name for name in dict.fromkeys(names) if name]


def replacer(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces names in a text, the longest first, however they are spelt, and model families."""
    patterns = {_spelling(name): new for name, new in sorted(names.items(), key=lambda item: -len(item[0]))}
    choices = [f"({pattern})" for pattern in (*patterns, _FAMILY)]
    regex = re.compile("|".join(choices))
    replacements = [*patterns.values(), SOME_MODEL]

    def scrub(text: str) -> str:
        return regex.sub(lambda match: replacements[(match.lastindex or 1) - 1], text)

    return scrub


def _spelling(name: str) -> str:
    """A pattern for a name: "gpt-5" also as "GPT 5" and "gpt5"; a plain word, perhaps a common one, only as it is."""
    parts = re.findall(r"[^\W\d_]+|\d+|[^\w\s.-]", name)
    if not parts or parts == [name]:
        return rf"(?<!\w){re.escape(name)}(?!\w)"
    return r"(?i:(?<![^\W_])" + r"[-_.\s]*".join(map(re.escape, parts)) + r"(?![^\W_]))"


_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_VALUES = ("enum", "const", "default", "required", "type", "pattern", "format", "$ref")


def scrub_schema(schema: Any, scrub: Callable[[str], str]) -> Any:
    """A JSON schema with its texts scrubbed; names of arguments and values are left, for they are what works."""
    if isinstance(schema, list):
        return [scrub_schema(item, scrub) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("title", "description", "$comment") and isinstance(value, str):
            result[key] = scrub(value)
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            result[key] = {name: scrub_schema(item, scrub) for name, item in value.items()}
        else:
            result[key] = value if key in _SCHEMA_VALUES else scrub_schema(value, scrub)
    return result
