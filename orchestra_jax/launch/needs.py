"""What a config needs of the machines it runs on: keys, files, and tools that are better hosted elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from orchestra_envs.toolbox import refuse_secrets

from orchestra_jax.config import ConfigError, RunConfig

DEFAULT_KEYS = {"expert": "OPENAI_API_KEY", "web_search": "TAVILY_API_KEY"}
"""Environment variables that tools of these kinds read where `api_key_env` is left out."""

HOSTED_KEYS = ("price", "latency_s", "timeout_s", "max_output_chars", "max_concurrency", "max_calls_per_s")
"""Of a hosted tool's entry, what stays with the training hosts: accounts and limits."""


def is_shared(path: str, mount_path: str | None) -> bool:
    """Whether all hosts see the same thing at `path`: it is below the path that they share."""
    return mount_path is not None and PurePosixPath(path).is_relative_to(mount_path)


def key_names(*parts: Any) -> tuple[str, ...]:
    """Environment variables with keys that tools, judges and users in `parts` (environment arguments) name, sorted.

    Raises:
      ConfigError: a part holds a key itself, or something else where the name of a variable belongs.
    """
    names: set[str] = set()
    for part in parts:
        try:
            refuse_secrets(part, "env.kwargs")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        names |= set(_key_names(part))
    if wrong := [name for name in names if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]:
        # The values are not shown: they may be keys, written there by mistake.
        raise ConfigError(
            f"{len(wrong)} of the config's api_key_env, headers_env or env entries name no environment variable "
            "(letters, digits and _); a key itself does not belong there"
        )
    return tuple(sorted(names))


def _key_names(part: Any) -> Iterator[str]:
    if isinstance(part, list | tuple):
        for item in part:
            yield from _key_names(item)
    if not isinstance(part, Mapping):
        return
    if isinstance(part.get("api_key_env"), str):
        yield part["api_key_env"]
    elif "api_key_env" not in part:
        # A model without the name of its key: an expert, a judge, a user (an embedder at a base_url may have none).
        kind = part.get("kind", "expert" if "model" in part else None)
        if kind in DEFAULT_KEYS:
            yield DEFAULT_KEYS[kind]
    if part.get("kind") == "local_search" and part.get("mode", "bm25") != "bm25" and part.get("embedder") is None:
        yield "OPENAI_API_KEY"
    for key, value in part.items():
        if key == "headers_env" and isinstance(value, Mapping):
            yield from (name for name in value.values() if isinstance(name, str))
        elif key == "env" and part.get("kind") == "mcp" and isinstance(value, Mapping):
            yield from (name for name, text in value.items() if text is None)
        elif key == "embedder" and isinstance(value, Mapping) and "base_url" in value:
            # A server of one's own, which may want no key.
            yield from _key_names({"api_key_env": value.get("api_key_env")})
        else:
            yield from _key_names(value)


def host_tools(config: RunConfig, url: str) -> tuple[RunConfig, list[dict[str, Any]]]:
    """Moves tools that want files or programs of their own to environment hosts.

    Those are local search (an index on disk) and MCP servers that are started by a command. `tool_server` serves each
    over MCP's HTTP at `url`/INDEX/mcp, where the returned config finds it; prices and limits stay in the config.

    Returns:
      The config for the training hosts, and the entries that the environment hosts serve, in order.
    """
    hosted: list[dict[str, Any]] = []

    def moved(entry: Any) -> Any:
        if not _is_hosted(entry):
            return entry
        if entry not in hosted:
            hosted.append(dict(entry))
        kept = {key: entry[key] for key in HOSTED_KEYS if key in entry}
        if entry["kind"] == "local_search":
            # What `local_search_tool` tells the policy where nothing is said; MCP's default is 0.
            kept.setdefault("latency_s", 0.05 if entry.get("mode", "bm25") == "bm25" else 0.2)
        return {"kind": "mcp", "url": f"{url}/{hosted.index(entry)}/mcp", **kept}

    def rewritten(kwargs: Mapping[str, Any]) -> dict[str, Any]:
        tools = kwargs.get("tools")
        return {**kwargs, "tools": [moved(entry) for entry in tools]} if isinstance(tools, list) else dict(kwargs)

    env = config.env.model_copy(
        update={"kwargs": rewritten(config.env.kwargs), "eval_kwargs": rewritten(config.env.eval_kwargs)}
    )
    return config.model_copy(update={"env": env}), hosted


def _is_hosted(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    return entry.get("kind") == "local_search" or (entry.get("kind") == "mcp" and "command" in entry)


def file_paths(config: RunConfig, hosted: list[dict[str, Any]]) -> dict[str, str]:
    """Paths that must exist where the run is, by the key that names them."""
    found = {"model.path": config.model.path, "text.tokenizer": config.text.tokenizer}
    for section in ("kwargs", "eval_kwargs"):
        kwargs = getattr(config.env, section)
        found[f"env.{section}.path"] = kwargs.get("path")
        for index, entry in enumerate(kwargs.get("tools") or ()):
            if isinstance(entry, Mapping) and entry.get("kind") == "local_search":
                found[f"env.{section}.tools[{index}].index"] = entry.get("index")
    for index, entry in enumerate(hosted):
        found[f"hosted tool {index}: index"] = entry.get("index")
    return {key: path for key, path in found.items() if isinstance(path, str) and path != "market"}


def loopback_urls(part: Any) -> list[str]:
    """URLs in environment arguments that mean the host itself, which is another one on a pod."""
    if isinstance(part, Mapping):
        return [url for value in part.values() for url in loopback_urls(value)]
    if isinstance(part, list | tuple):
        return [url for value in part for url in loopback_urls(value)]
    if isinstance(part, str) and part.startswith(("http://", "https://")):
        return [part] if urlsplit(part).hostname in ("localhost", "127.0.0.1", "::1") else []
    return []
