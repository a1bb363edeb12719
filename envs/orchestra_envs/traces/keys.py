"""Keys of recorded calls: canonical JSON (RFC 8785) of what a call was, and its hash.

    arguments = canonical_arguments(tool.spec(), {"query": "Oslo"})       # defaults of the schema filled in
    key = call_key(tool="search", schema_hash=schema_hash(tool.spec()), backend=tool.backend, arguments=arguments)

Two calls have equal keys where a recorded result of one may stand for the other: the same tool with the same schema and
the same backend, equal arguments, the same state of the world (for tools that read or change one), and the same place
among equal calls of their episode.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import rfc8785

from orchestra_envs.parse import MAX_DEPTH, replace_surrogates

MAX_SAFE_INTEGER = 2**53 - 1
"""The largest whole number that RFC 8785 has a form for; larger ones stay as their digits."""

_WORDING = frozenset({"title", "description", "examples", "$comment"})
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
_DATA = frozenset({"default", "const", "enum"})
_DIGITS_MARK = "\ue000digits:"
_DIGITS = re.compile(f'"{_DIGITS_MARK}(-?[0-9]+)"')


def canonical(value: Any) -> str:
    """`value` as canonical JSON of RFC 8785: equal values give equal texts (1.0 is 1, keys sorted by UTF-16).

    Lone surrogates become U+FFFD, as everywhere in what a policy writes. Whole numbers beyond `MAX_SAFE_INTEGER`, for
    which the RFC has no form, stay as their digits.

    Raises:
        ValueError: NaN, infinity, a key that is no string, nesting beyond `MAX_DEPTH`, or no JSON value.
    """
    prepared, has_digits = _prepared(value, 0)
    try:
        text = rfc8785.dumps(prepared).decode()
    except rfc8785.CanonicalizationError as error:
        raise ValueError(f"no JSON by RFC 8785: {error}") from error
    return _DIGITS.sub(r"\1", text) if has_digits else text


def canonical_arguments(tool_spec: Mapping[str, Any] | None, arguments: Any) -> str:
    """The arguments of a call as canonical JSON, with the defaults of the tool's schema filled in.

    Args:
        tool_spec: the tool as in `tools_json` (`Tool.spec()`, or an OpenAI function); None: no defaults are known.
        arguments: JSON values.

    Raises:
        ValueError: as `canonical`.
    """
    if tool_spec is None:
        return canonical(arguments)
    schema = _function(tool_spec).get("parameters")
    return canonical(_with_defaults(arguments, schema, schema, 0))


def schema_hash(tool_spec: Mapping[str, Any] | None) -> str:
    """SHA-256 of the schema of a tool's arguments without its wording; "" where the schema is not known.

    Names of arguments, types, defaults and bounds count; titles, descriptions and examples, which environments may
    word otherwise in every episode, do not; nor does the price.
    """
    schema = None if tool_spec is None else _function(tool_spec).get("parameters")
    if not isinstance(schema, Mapping):
        return ""
    return hashlib.sha256(canonical(_without_wording(schema)).encode()).hexdigest()


def call_key(
    *,
    tool: str,
    arguments: str,
    schema_hash: str = "",
    backend: str = "",
    state_hash: str | None = None,
    ordinal: int = 0,
) -> str:
    """SHA-256 of a call's identity.

    Args:
        tool: its name.
        arguments: as `canonical_arguments` gives them, defaults filled in.
        schema_hash: of the tool's schema.
        backend: who answers: model, endpoint, version.
        state_hash: of the world before the call; None for tools without one.
        ordinal: how many calls equal in all of this the episode had before.
    """
    parts = [tool, schema_hash, backend, arguments, state_hash, ordinal]
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


def _function(tool_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool_spec.get("function")
    return function if isinstance(function, Mapping) else tool_spec


def _prepared(value: Any, depth: int) -> tuple[Any, bool]:
    """`value` as rfc8785 takes it, and whether a number in it stands as a text of its digits."""
    if isinstance(value, str):
        return replace_surrogates(value), False
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value, False
    if isinstance(value, int):
        return (value, False) if abs(value) <= MAX_SAFE_INTEGER else (f"{_DIGITS_MARK}{value}", True)
    if depth >= MAX_DEPTH:
        raise ValueError(f"no JSON by RFC 8785: nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"no JSON by RFC 8785: the key {wrong[0]!r} is no string")
        pairs = {replace_surrogates(key): _prepared(part, depth + 1) for key, part in value.items()}
        return {key: part for key, (part, _) in pairs.items()}, any(digits for _, digits in pairs.values())
    if isinstance(value, list | tuple):
        parts = [_prepared(part, depth + 1) for part in value]
        return [part for part, _ in parts], any(digits for _, digits in parts)
    raise ValueError(f"no JSON by RFC 8785: {type(value).__name__}")


def _with_defaults(value: Any, schema: Any, root: Any, depth: int) -> Any:
    """`value` with what it leaves out and the schema has a default for; other schemas than plain objects are left."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return value
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_with_defaults(item, schema["items"], root, depth + 1) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, Mapping) or not isinstance(properties, Mapping):
        return value
    filled = {name: _with_defaults(part, properties.get(name), root, depth + 1) for name, part in value.items()}
    for name, part in properties.items():
        part = _resolved(part, root)
        if name not in filled and isinstance(part, Mapping) and "default" in part:
            filled[name] = part["default"]
    return filled


def _resolved(schema: Any, root: Any) -> Any:
    """What a local `$ref` of one step stands for ("#/$defs/Name"); keywords beside it (a default) stay."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not isinstance(root, Mapping):
        return schema
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference)
    found = root.get(match[1], {}).get(match[2]) if match else None
    return {**found, **{key: part for key, part in schema.items() if key != "$ref"}} if found else schema


def _without_wording(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_wording(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, part in schema.items():
        if key in _NAMED and isinstance(part, Mapping):
            kept[key] = {name: _without_wording(inner) for name, inner in part.items()}
        elif key in _DATA:
            kept[key] = part
        elif key not in _WORDING:
            kept[key] = _without_wording(part)
    return kept
