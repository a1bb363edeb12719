"""Arguments that fit a JSON schema, for policies that only show how a call looks."""

from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8


def example_arguments(parameters: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The least arguments that a tool's schema asks for: none if none is required, `text` where a text is wanted.

    Defaults, constants, enumerations and examples of the schema come first. A schema with particular wishes
    (patterns, several conditions at once) may refuse the result: ask `Tool.argument_error`.
    """
    properties = parameters.get("properties", {})
    definitions = parameters.get("$defs", {})
    required = parameters.get("required", [])
    return {name: _value(properties.get(name), definitions, text, depth=0) for name in required}


def _value(schema: Any, definitions: Mapping[str, Any], text: str, *, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return text
    if isinstance(reference := schema.get("$ref"), str):
        return _value(definitions.get(reference.rpartition("/")[2]), definitions, text, depth=depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _value(schema[key][0], definitions, text, depth=depth + 1)
    kind = schema.get("type", "string")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "integer" | "number":
            return schema.get("minimum", schema.get("maximum", 1))
        case "boolean":
            return False
        case "null":
            return None
        case "array":
            count = schema.get("minItems", 0)
            return [_value(schema.get("items"), definitions, text, depth=depth + 1) for _ in range(count)]
        case "object":
            parts = schema.get("properties", {})
            wanted = schema.get("required", [])
            return {name: _value(parts.get(name), definitions, text, depth=depth + 1) for name in wanted}
    return text[: schema.get("maxLength", len(text))]
