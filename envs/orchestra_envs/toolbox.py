"""Tools from plain configuration, so that a run's YAML says which tools an environment offers.

    env:
      id: orchestra/QA-v0
      kwargs:
        path: questions.jsonl
        tools:
          - {kind: expert, name: big, model: gpt-5, api_key_env: OPENAI_API_KEY, max_concurrency: 8}
          - {kind: expert, name: small, model: qwen3-8b, base_url: "http://127.0.0.1:8000/v1", price: {per_call_usd: 0}}
          - {kind: web_search}
          - {kind: local_search, index: wiki.index, price: {per_call_usd: 0.0001}}
          - {kind: python}
          - {kind: mcp, command: [python, -m, my_server]}
          - {kind: function, function: "my_package.tools:lookup", latency_s: 0.2}
          - {kind: installed, name: my_plugin_tool}

or in Python `tools_from_config([{"kind": "python"}, my_tool])`. The keys of an entry are the keyword arguments of what
makes the tool (in `orchestra_envs.live`: `expert.expert_tool`, `web_search.web_search_tool`,
`local_search.local_search_tool`, `sandbox.python_tool`, `mcp.mcp_tools`), and for every kind those of `COMMON_KEYS`.

`function` names an object of yours by "module:object": a `Tool`, a function with type hints and a docstring, or a list
of these. `installed` names a tool that a package announces::

    [project.entry-points."orchestra.tools"]
    my_plugin_tool = "my_package.tools:lookup"

which is a `Tool`, a list of them, or a function that makes them of the entry's other keys. Nothing is imported before
it is asked for, and a broken package only spoils its own tools. As `name` picks the package's tool, `alias` renames it.

Equal entries give the same tools within a process, so that hundreds of environments share clients and limits. API keys
do not belong into a config: `api_key_env` names the environment variable that holds one.
"""

import dataclasses
import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.prices import as_price
from orchestra_envs.tools import Price, Tool, canonical_json, tool

PLUGIN_GROUP = "orchestra.tools"

COMMON_KEYS = (
    "name",
    "description",
    "price",
    "latency_s",
    "timeout_s",
    "max_output_chars",
    "retry",
    "max_concurrency",
    "max_calls_per_s",
)
"""Keys of every kind: fields of `Tool` that replace what the tool came with, and the bounds of its `Limiter`."""

_BUILDERS = {
    "expert": ("orchestra_envs.live.expert", "expert_tool"),
    "web_search": ("orchestra_envs.live.web_search", "web_search_tool"),
    "local_search": ("orchestra_envs.live.local_search", "local_search_tool"),
    "python": ("orchestra_envs.live.sandbox", "python_tool"),
    "mcp": ("orchestra_envs.live.mcp", "mcp_tools"),
}
KINDS = (*_BUILDERS, "function", "installed")

_LIMITS = ("max_concurrency", "max_calls_per_s")
_SECRET_KEY = re.compile(
    r"\w*apikeys?|(access|auth|bearer|secret|api)?tokens?|(client|api)?secrets?(key)?|password|passwd|authorization"
)

_T = TypeVar("_T")


def tools_from_config(configs: Sequence[Mapping[str, Any] | Tool], *, where: str = "tools") -> tuple[Tool, ...]:
    """The tools that a list of entries describes, in order; an entry may also be a `Tool` or give several.

    Args:
        where: what the messages call the list.

    Raises:
        ValueError: an entry cannot be understood, or two tools share a name; the message names the key, as in
            "tools[2].modle".
        ImportError: a kind needs an extra that is not installed; the message says which.
    """
    if isinstance(configs, str | Mapping | Tool) or not isinstance(configs, Sequence):
        raise ValueError(f"{where} must be a list of tools, not {_short(configs)}")
    tools: list[Tool] = []
    origin: dict[str, str] = {}
    for index, config in enumerate(configs):
        path = f"{where}[{index}]"
        for made in [config] if isinstance(config, Tool) else _cached(config, path):
            if made.name in origin:
                both = " and ".join(dict.fromkeys((origin[made.name], path)))
                is_installed = isinstance(config, Mapping) and config.get("kind") == "installed"
                way = "give one another name by `alias`" if is_installed else "give one another name"
                raise ValueError(f"{both}: two tools are named {made.name!r}; {way}")
            origin[made.name] = path
            tools.append(made)
    return tuple(tools)


@dataclass(frozen=True, slots=True)
class InstalledTool:
    """A tool that an installed package announces; `error` says why it cannot be loaded, "" if it can."""

    name: str
    target: str
    package: str
    error: str


def list_installed_tools() -> tuple[InstalledTool, ...]:
    """What the packages in the entry-point group "orchestra.tools" announce, by name; loads (imports) all of it."""
    return tuple(
        InstalledTool(entry.name, entry.value, _package(entry), _load_error(entry))
        for entry in sorted(_entry_points(), key=lambda entry: (entry.name, _package(entry)))
    )


def check_keys(given: Mapping[Any, Any], known: Sequence[str], where: str, *, title: str = "unknown key") -> None:
    """Raises a ValueError that names the path of a key that is not `known`, and what may be meant."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            more = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(dict.fromkeys(known)) or 'none'}"
            raise ValueError(f"{where}.{name}: {title}; {more}")


def object_from_config(kind: type[_T], value: Any, where: str) -> _T:
    """`value`, or the `kind` (Retry, say) whose fields the mapping `value` gives; ValueError naming the path."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping of the fields of {kind.__name__}, not {_short(value)}")
    check_keys(value, tuple(inspect.signature(kind).parameters), where)
    try:
        return kind(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def refuse_secrets(config: Any, where: str) -> None:
    """Raises a ValueError if a key of `config`, at any depth, is one that holds a secret; the value is not shown.

    None is no secret, and what stands under a key that ends in "_env" are names of variables.
    """
    if isinstance(config, Mapping):
        for key, value in config.items():
            if value is None or str(key).endswith("_env"):
                continue
            if _names_secret(str(key)):
                raise ValueError(
                    f"{where}.{key}: no keys or passwords in a config; put it into an environment variable and give "
                    "that variable's name (in api_key_env or headers_env; among an MCP server's `env`, null takes it)"
                )
            refuse_secrets(value, f"{where}.{key}")
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            refuse_secrets(value, f"{where}[{index}]")


def _names_secret(key: str) -> bool:
    if key.isupper() and key.endswith(("TOKEN", "SECRET", "PASSWORD", "KEY")):  # a variable, as GITHUB_TOKEN
        return True
    return _SECRET_KEY.fullmatch(re.sub(r"[^a-z0-9]", "", key.casefold())) is not None


# --- One cache a process ---------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """The tools of one entry. A lock for each, so that a slow server holds up nobody else."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    tools: tuple[Tool, ...] | None = None


_slots: dict[str, _Slot] = {}
_slots_lock = threading.Lock()


def clear_cache() -> None:
    """Forgets the tools made so far; the next `tools_from_config` makes new ones, with clients of their own."""
    global _slots, _slots_lock
    _slots, _slots_lock = {}, threading.Lock()


if hasattr(os, "register_at_fork"):  # connections and processes stay with the parent
    os.register_at_fork(after_in_child=clear_cache)


def _cached(config: Any, where: str) -> tuple[Tool, ...]:
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a Tool or a mapping with 'kind', not {_short(config)}")
    refuse_secrets(config, where)
    plain = {
        key: dataclasses.asdict(value) if isinstance(value, Price | Retry) else value for key, value in config.items()
    }
    try:
        key = canonical_json([os.getcwd(), plain])  # paths may be relative
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: its values must be plain JSON (text, numbers, lists, mappings): {error}") from None
    with _slots_lock:
        slot = _slots.setdefault(key, _Slot())
    with slot.lock:
        if slot.tools is None:
            slot.tools = _made(dict(config), where)
    return slot.tools


# --- Making the tools of an entry --------------------------------------------------------------------------------


def _made(config: dict[str, Any], where: str) -> tuple[Tool, ...]:
    kind = config.pop("kind", None)
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
        more = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(KINDS)}"
        raise ValueError(f"{where}.kind: {'missing' if kind is None else f'no kind {kind!r}'}; {more}")
    if kind == "function":
        return _function_tools(config, where)
    if kind == "installed":
        return _installed_tools(config, where)
    module, name = _BUILDERS[kind]
    builder = getattr(importlib.import_module(module), name)
    return _by_builder(builder, config, where, f"kind {kind!r}")


def _by_builder(builder: Callable[..., Any], config: dict[str, Any], where: str, title: str) -> tuple[Tool, ...]:
    """What `builder` makes of the keys that it knows, with the other common keys laid over it."""
    parameters = inspect.signature(builder).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    overrides = {key: config.pop(key) for key in COMMON_KEYS if key in config and key not in known}
    if not takes_any:
        check_keys(config, (*known, *COMMON_KEYS), where, title=f"{title} has no such key")
    required = [p.name for p in parameters if p.name in known and p.default is p.empty]
    if missing := [name for name in required if name not in config]:
        raise ValueError(f"{where}: {title} needs {' and '.join(map(repr, missing))}")
    with _located(where):
        made = builder(**config)
    return _overridden(_tools_of(made, where), overrides, where)


def _function_tools(config: dict[str, Any], where: str) -> tuple[Tool, ...]:
    check_keys(config, ("function", *COMMON_KEYS), where, title="kind 'function' has no such key")
    target = config.pop("function", None)
    module, colon, path = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (module and colon and path):
        raise ValueError(f'{where}.function must be "module:object", not {_short(target)}')
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{where}.function: cannot import {module}: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{where}.function: {target!r}: there is no {part!r} in {module}")
        found = getattr(found, part)
    with _located(where):
        return _overridden(_tools_of(found, where), config, where)


def _installed_tools(config: dict[str, Any], where: str) -> tuple[Tool, ...]:
    name, alias = config.pop("name", None), config.pop("alias", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name must be the name of an installed tool, not {_short(name)}")
    entry = _entry_point(name, where)
    if error := _load_error(entry):
        raise ValueError(f"{where}.name: tool {name!r} ({entry.value} of {_package(entry)}) cannot be loaded: {error}")
    found = entry.load()
    title = f"the installed tool {name!r}"
    if callable(found) and not isinstance(found, Tool):
        made = _by_builder(found, config, where, title)
    else:
        check_keys(config, (*COMMON_KEYS, "alias"), where, title=f"{title} has no such key")
        made = _overridden(_tools_of(found, where), config, where)
    return made if alias is None else _overridden(made, {"name": alias}, where, name_key="alias")


def _tools_of(made: Any, where: str) -> tuple[Tool, ...]:
    """A tool, a function that becomes one, or several of these."""
    if isinstance(made, Tool):
        return (made,)
    if inspect.isroutine(made):
        return (tool(made),)
    if isinstance(made, list | tuple) and made:
        return tuple(one for part in made for one in _tools_of(part, where))
    raise ValueError(f"{where}: expected a Tool, a function or a list of them, got {_short(made)}")


def _overridden(
    tools: tuple[Tool, ...], overrides: Mapping[str, Any], where: str, *, name_key: str = "name"
) -> tuple[Tool, ...]:
    """`tools` with fields replaced; bounds make one limiter that all of them share."""
    fields = {key: value for key, value in overrides.items() if key not in _LIMITS}
    if "price" in fields:
        fields["price"] = as_price(fields["price"], f"{where}.price")
    if fields.get("retry") is not None:
        fields["retry"] = object_from_config(Retry, fields["retry"], f"{where}.retry")
    bounds = {key: overrides[key] for key in _LIMITS if overrides.get(key) is not None}
    for key in ("name", "description"):
        if key in fields and len(tools) > 1:
            path = f"{where}.{name_key if key == 'name' else key}"
            raise ValueError(f"{path}: it stands for {len(tools)} tools: {', '.join(one.name for one in tools)}")
    with _located(where):
        if bounds:
            old = next((one.limiter for one in tools if one.limiter is not None), None)
            kept = {key: getattr(old, key, None) for key in _LIMITS}
            fields["limiter"] = Limiter(**{**kept, **bounds})
        return tuple(replace(one, **fields) if fields else one for one in tools)


class _located:
    """Puts the path of the entry in front of what is raised within."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ImportError):
            raise ImportError(f"{self.where}: {error}") from error
        if isinstance(error, ValueError | TypeError):
            text = str(error)
            raise ValueError(text if text.startswith(self.where) else f"{self.where}: {text}") from error
        if error is not None and hasattr(error, "add_note"):
            error.add_note(f"while making {self.where}")


# --- What packages announce --------------------------------------------------------------------------------------


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    yield from importlib.metadata.entry_points(group=PLUGIN_GROUP)


def _package(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"


def _entry_point(name: str, where: str) -> importlib.metadata.EntryPoint:
    entries = list(_entry_points())
    found = {(entry.value, _package(entry)): entry for entry in entries if entry.name == name}
    if len(found) > 1:
        packages = " and ".join(package for _, package in found)
        raise ValueError(f"{where}.name: {packages} both announce a tool {name!r}; uninstall one of them")
    if not found:
        names = sorted({entry.name for entry in entries})
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        more = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise ValueError(f"{where}.name: no installed package announces a tool {name!r}; {more}")
    return next(iter(found.values()))


def _load_error(entry: importlib.metadata.EntryPoint) -> str:
    try:
        entry.load()
    except Exception as error:  # whatever somebody else's package raises must not hide the others
        return f"{type(error).__name__}: {error}"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
