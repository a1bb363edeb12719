"""Randomised tool configurations: which tools an episode offers, under which names, at which prices, in which words.

As in ToolOrchestra (arXiv 2511.21689, section 3): a policy that meets other tools, names, prices, descriptions and
wishes in every episode learns to read them instead of remembering them. Works on any `ToolEnv`::

    env = make("orchestra/Market-v0", randomize={
        "subset": {"min_tools": 3, "one_of": [["search", "gpt-*"]]},    # some of the tools, one of these at least
        "aliases": True,                                                # expert-1, expert-2, ... hide the models
        "price_schedules": "published", "price_spread": 2.0, "latency_spread": 2.0,
        "descriptions": True,                                           # several wordings of strengths and weaknesses
        "preferences": True,                                            # a wish in words and its weights
        "split": "train",                                               # "test": only what training never shows
    })

Everything depends on the seed of `reset` alone, so that all replicas of a group meet the same. Every part may be left
out. Prices, latencies and preferences are told as always (`tools_json`, `preference_json`); the descriptions here name
none. `read_randomization` says what may be set; `write_descriptions` and `preference.write_preferences` let a language
model write texts beforehand, which are read from JSON files. No model is asked while an environment runs.

Splits. Each pool (price schedules, styles of aliases, templates of descriptions, kinds of preferences) is divided: what
`unseen` lists appears in the split "test" only, the rest in "train" only. The wordings of preferences differ always.
Tools are divided where `unseen.tools` names any: those appear in "test" only; kept and shared tools in both, all others
in "train" only.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pydantic

from orchestra_envs.disguise import SOME_MODEL, identities, model_names, replacer, scrub_schema
from orchestra_envs.env import PREFERENCE_OBJECTIVES, Preference
from orchestra_envs.preference import (
    PREFERENCE_KINDS,
    Split,
    WrittenPreference,
    read_written_preferences,
    sample_preference,
)
from orchestra_envs.price_schedules import PUBLISHED_SCHEDULES
from orchestra_envs.tools import MAX_USD_PER_TOKEN, CallContext, Price, Tool, ToolResult

if TYPE_CHECKING:
    from orchestra_envs.live.chat import Endpoint

TOOL_KINDS = ("expert", "search", "code", "function")
MAX_SPREAD = 1000.0
DEFAULT_MIN_TOOLS = 2

_ABSENT = "another tool"
_OPEN_FAMILIES = (
    *("codellama", "codestral", "deepseek", "gemma", "gpt-oss", "llama", "mistral", "mixtral"),
    *("nemotron", "openmath", "phi", "qwen", "starcoder"),
)

ALIAS_STYLES = ("expert-{n}", "tool_{n}", "model-{letter}", "adviser_{n}", "helper-{letter}")
UNSEEN_ALIAS_STYLES = ("adviser_{n}", "helper-{letter}")

# Descriptions: {base} is the tool's own, the others come from its profile.
DESCRIPTION_STYLES = {
    "pros_and_cons": "{base} Strengths: {strengths}. Weaknesses: {weaknesses}.",
    "when_to_call": "Call it for {strengths}; do not count on it for {weaknesses}. {base}",
    "review": "Past users praise it for {strengths} and were let down by it at {weaknesses}.",
    "datasheet": "Good at: {strengths}. Poor at: {weaknesses}.",
    "advice": "{base} Best kept for {strengths}; look elsewhere when it comes to {weaknesses}.",
}
UNSEEN_DESCRIPTION_STYLES = ("datasheet", "advice")
UNSEEN_PRICE_SCHEDULES = ("deepinfra",)

# Strengths and weaknesses by kind of tool and, more closely, by model. Generalities, no measurements.
_KIND_PROFILES = {
    "expert": ("questions that take thought", "facts that it was never taught"),
    "search": ("facts that models do not know by heart", "reasoning, for it returns passages and no conclusions"),
    "code": ("exact calculation and handling of data", "facts of the world"),
}
_MODEL_PROFILES = {
    "gpt-5": ("hard problems of every kind", "simple questions, over which it thinks too long"),
    "gpt-5-mini": ("stories with numbers and puzzles", "rare facts"),
    "o3-mini": ("mathematics and code", "rare facts"),
    "gpt-4o": ("knowledge of the world and fluent text", "long chains of reasoning"),
    "qwen3-32b": ("everyday reasoning", "rare facts and hard mathematics"),
    "qwen2.5-coder-32b": ("writing and reading code", "general knowledge"),
    "qwen2.5-math-72b": ("mathematics, above all stories with numbers", "everything that is no mathematics"),
    "qwen2.5-math-7b": ("simple mathematics", "hard mathematics and everything that is none"),
    "llama-3.3-70b": ("general knowledge", "mathematics"),
    "llama-3.1-8b": ("short and easy questions", "mathematics and long reasoning"),
    "gemma-3-27b": ("general questions in many languages", "hard mathematics"),
    "deepseek-r1": ("mathematics and logic", "simple questions, over which it thinks too long"),
}

# The configuration as written.


def _names_of(value: Any) -> Any:
    """Tools among names stand for their names."""
    if isinstance(value, list | tuple):
        return tuple(item.name if isinstance(item, Tool) else item for item in value)
    return value


def _section(value: Any) -> Any:
    """True switches a part on as it is, False off."""
    if not isinstance(value, bool | Mapping | None):
        raise ValueError("must be true, false or a mapping")
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """A name alone stands for a list of it."""
    return (value,) if isinstance(value, str) else value


_Names = Annotated[tuple[str, ...], pydantic.BeforeValidator(_names_of)]
_Factor = Annotated[float, pydantic.Field(ge=1, le=MAX_SPREAD, allow_inf_nan=False, strict=True)]
_Count = Annotated[int, pydantic.Field(ge=1, strict=True)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class _Subset(_Strict):
    min_tools: _Count | None = None
    max_tools: _Count | None = None
    one_of: tuple[_Names, ...] = ()


class _Aliases(_Strict):
    tools: _Names | None = None
    styles: tuple[str, ...] = ALIAS_STYLES
    hide: tuple[str, ...] = ()


class _Profile(_Strict):
    strengths: str
    weaknesses: str


class _Descriptions(_Strict):
    styles: tuple[str, ...] = tuple(DESCRIPTION_STYLES)
    profiles: dict[str, _Profile] = {}
    file: str | None = None


class _Preferences(_Strict):
    kinds: tuple[str, ...] = PREFERENCE_KINDS
    on_premise: _Names | None = None
    file: str | None = None


class _Unseen(_Strict):
    tools: _Names = ()
    aliases: tuple[str, ...] = UNSEEN_ALIAS_STYLES
    prices: tuple[str, ...] = UNSEEN_PRICE_SCHEDULES
    descriptions: tuple[str, ...] = UNSEEN_DESCRIPTION_STYLES
    preferences: tuple[str, ...] = ()


class _Config(_Strict):
    split: Split = "train"
    keep: _Names | None = None
    shared_tools: _Names | None = None
    kinds: dict[str, str] = {}
    subset: Annotated[_Subset | None, pydantic.BeforeValidator(_section)] = None
    aliases: Annotated[_Aliases | None, pydantic.BeforeValidator(_section)] = None
    price_schedules: Annotated[tuple[str, ...], pydantic.BeforeValidator(_listed)] = ()
    price_tables: dict[str, dict[str, dict[str, float]]] = {}
    price_spread: _Factor = 1.0
    latency_spread: _Factor = 1.0
    descriptions: Annotated[_Descriptions | None, pydantic.BeforeValidator(_section)] = None
    preferences: Annotated[_Preferences | None, pydantic.BeforeValidator(_section)] = None
    unseen: _Unseen = _Unseen()


_SECTIONS: dict[tuple[str | int, ...], type[_Strict]] = {
    (): _Config,
    ("subset",): _Subset,
    ("aliases",): _Aliases,
    ("descriptions",): _Descriptions,
    ("preferences",): _Preferences,
    ("unseen",): _Unseen,
}


def read_randomization(mapping: Mapping[str, Any]) -> Randomization:
    """The randomisation that a mapping of plain values describes. Every key is optional.

    Tools are named by their names or by patterns (`get_*`), or given themselves. A name or pattern that fits none of
    the tools that the environment ever offers is an error of the first `reset`.

    Keys:
        split: "train" or "test".
        keep: tools that an environment cannot do without. They are always there, in both splits, and their names,
            descriptions and prices stay. Left out: the free ones that are neither experts, search nor code (a domain's
            own functions); an empty list keeps none.
        shared_tools: tools of both splits that may yet be left out of an episode. Left out: all but experts.
        kinds: {tool: "expert" | "search" | "code" | "function"} where `tool_kind` guesses wrong.
        subset: true or {min_tools, max_tools, one_of}: a random number of the tools that are not kept, at least
            `min_tools` (2, or all if there are fewer); of every list in `one_of` at least one tool is there. A split
            that shows fewer than `min_tools` shows all of them.
        aliases: true or {tools, styles, hide}: other names for `tools` (all experts), shuffled in every episode. A
            style is a template with {n}, a number, or {letter}, and perhaps {kind}; each episode has one style. In
            descriptions the hidden names, names of model families and the words in `hide` are replaced. What a tool
            answers is not: an expert may say who it is.
        price_schedules: "published" or names out of `PUBLISHED_SCHEDULES` and `price_tables`; each episode has one.
        price_tables: {schedule: {tool or model: {per_call_usd, per_input_token_usd, per_output_token_usd,
            per_second_usd}}}. A tool that a schedule does not list keeps its own price.
        price_spread, latency_spread: each tool's price and latency times a factor drawn log-uniformly from
            [1 / spread, spread]; latencies of the measured clock are left alone.
        descriptions: true or {styles, profiles, file}: descriptions by the templates of `DESCRIPTION_STYLES` from
            strengths and weaknesses, {tool or model: {strengths, weaknesses}} in `profiles`; or from a JSON file that
            `write_descriptions` returned, for the tools in it.
        preferences: true or {kinds, on_premise, file}: a preference for each episode, out of `PREFERENCE_KINDS`, or
            from a JSON file that `write_preferences` returned. `on_premise`: the tools that run in house; left out:
            models with open weights, and what is neither an expert nor a live search. An environment's own
            preference is replaced.
        unseen: {tools, aliases, prices, descriptions, preferences}: what only the split "test" shows: tools, styles,
            names of schedules, names of templates, kinds of preferences.

    Prices are changed for calls that are charged by the tool's `Price`; a tool whose results state their own cost
    keeps it.

    Raises:
        ValueError: a field is not usable; the message names it ("randomize.price_spread: ...").
    """
    if not isinstance(mapping, Mapping):
        raise ValueError(f"randomize: must be a mapping, not {mapping!r}")
    try:
        config = _Config.model_validate(dict(mapping))
    except pydantic.ValidationError as error:
        raise ValueError(_explained(error)) from None
    return Randomization(
        split=config.split,
        keep=config.keep,
        unseen_tools=config.unseen.tools,
        shared_tools=config.shared_tools,
        kinds=_read_kinds(config.kinds),
        subset=_read_subset(config.subset),
        alias_tools=config.aliases.tools if config.aliases else None,
        alias_styles=_read_styles(config),
        hidden_words=config.aliases.hide if config.aliases else (),
        schedules=_read_schedules(config),
        price_spread=config.price_spread,
        latency_spread=config.latency_spread,
        description_styles=_read_description_styles(config),
        profiles={key: (p.strengths, p.weaknesses) for key, p in _profiles(config).items()},
        written_descriptions=_read_descriptions_file(config),
        preference_kinds=_read_preference_kinds(config),
        on_premise=config.preferences.on_premise if config.preferences else None,
        written_preferences=_read_preferences_file(config),
    )


def _explained(error: pydantic.ValidationError) -> str:
    """All that is wrong in one line, each with its field."""
    lines = []
    for problem in error.errors():
        where = "randomize" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        if problem["type"] == "missing":
            lines.append(f"{where}: is missing")
        elif problem["type"] == "extra_forbidden":
            section = _SECTIONS.get(problem["loc"][:-1])
            there_are = f"; there are {', '.join(section.model_fields)}" if section else ""
            lines.append(f"{where}: no such field{there_are}")
        else:
            lines.append(f"{where}: {_requirement(problem)}, not {problem['input']!r}")
    return "; ".join(lines)


_REQUIREMENTS = {
    "tuple_type": "must be a list of names",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
}


def _requirement(problem: Mapping[str, Any]) -> str:
    """What a value must be, in words of YAML."""
    if problem["type"] == "tuple_type" and problem["loc"] == ("subset", "one_of"):
        return "must be a list of lists of names"
    plain = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return _REQUIREMENTS.get(problem["type"], plain)


def _read_kinds(kinds: Mapping[str, str]) -> Mapping[str, str]:
    for name, kind in kinds.items():
        if kind not in TOOL_KINDS:
            raise ValueError(f"randomize.kinds.{name}: must be one of {', '.join(TOOL_KINDS)}, not {kind!r}")
    return kinds


def _read_subset(subset: _Subset | None) -> Subset | None:
    if subset is None:
        return None
    min_tools = DEFAULT_MIN_TOOLS if subset.min_tools is None else subset.min_tools
    if subset.max_tools is not None and subset.max_tools < max(min_tools, len(subset.one_of)):
        raise ValueError(
            f"randomize.subset.max_tools: {subset.max_tools} is less than min_tools ({min_tools}) "
            f"or the lists in one_of ({len(subset.one_of)})"
        )
    return Subset(subset.min_tools, subset.max_tools, subset.one_of)


def _of_split(field_name: str, pool: Sequence[str], unseen: Sequence[str], split: Split) -> tuple[str, ...]:
    """What of a pool the split shows; ValueError if that is nothing."""
    shown = tuple(item for item in pool if (item in unseen) == (split == "test"))
    if not shown:
        raise ValueError(
            f"randomize.unseen.{field_name}: leaves nothing for the split {split!r}; "
            f"the pool is {', '.join(pool)}, unseen are {', '.join(unseen) or 'none'}"
        )
    return shown


def _read_styles(config: _Config) -> tuple[str, ...]:
    if config.aliases is None:
        return ()
    names: dict[str, set[str]] = {}
    for style in config.aliases.styles:
        try:
            names[style] = {_alias(style, kind, number) for kind in TOOL_KINDS for number in range(1, 100)}
        except (KeyError, IndexError, ValueError):
            names[style] = set()
        if len(names[style]) < 99 or not all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in names[style]):
            raise ValueError(
                f"randomize.aliases.styles: {style!r} must be letters, digits, '_', '-' or '.' "
                "with {n} or {letter} in it, and perhaps {kind}"
            )
    styles = _of_split("aliases", config.aliases.styles, config.unseen.aliases, config.split)
    for style in styles:
        for other in set(names) - set(styles):
            if names[style] & names[other]:
                raise ValueError(
                    f"randomize.unseen.aliases: {style!r} and {other!r} give the same names in both splits"
                )
    return styles


def _read_schedules(config: _Config) -> tuple[Mapping[str, Price | tuple[float, float]], ...]:
    tables: dict[str, Mapping[str, Price | tuple[float, float]]] = dict(PUBLISHED_SCHEDULES)
    for schedule, table in config.price_tables.items():
        tables[schedule] = {name: _price(f"{schedule}.{name}", parts) for name, parts in table.items()}
    names = tuple(PUBLISHED_SCHEDULES) if config.price_schedules == ("published",) else config.price_schedules
    for name in names:
        if name not in tables:
            raise ValueError(
                f"randomize.price_schedules: no schedule {name!r}; there are published, {', '.join(tables)}"
            )
    if not names:
        return ()
    return tuple(tables[name] for name in _of_split("prices", names, config.unseen.prices, config.split))


def _price(where: str, parts: Mapping[str, float]) -> Price:
    try:
        return Price(**parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"randomize.price_tables.{where}: {str(error).removeprefix('Price.__init__() ')}") from None


def _profiles(config: _Config) -> Mapping[str, _Profile]:
    return config.descriptions.profiles if config.descriptions else {}


def _read_description_styles(config: _Config) -> tuple[str, ...]:
    if config.descriptions is None:
        return ()
    for style in config.descriptions.styles:
        if style not in DESCRIPTION_STYLES:
            known = ", ".join(DESCRIPTION_STYLES)
            raise ValueError(f"randomize.descriptions.styles: no style {style!r}; there are {known}")
    return _of_split("descriptions", config.descriptions.styles, config.unseen.descriptions, config.split)


def _read_preference_kinds(config: _Config) -> tuple[str, ...]:
    if config.preferences is None:
        return ()
    for where, kinds in (
        ("preferences.kinds", config.preferences.kinds),
        ("unseen.preferences", config.unseen.preferences),
    ):
        for kind in kinds:
            if kind not in PREFERENCE_KINDS:
                raise ValueError(f"randomize.{where}: no kind {kind!r}; there are {', '.join(PREFERENCE_KINDS)}")
    if not config.unseen.preferences:  # the wordings differ anyway
        return config.preferences.kinds
    return _of_split("preferences", config.preferences.kinds, config.unseen.preferences, config.split)


def _read_descriptions_file(config: _Config) -> Mapping[str, tuple[str, ...]]:
    if config.descriptions is None or config.descriptions.file is None:
        return {}
    where = "randomize.descriptions.file"
    data = _read_json(where, config.descriptions.file)
    texts: dict[str, tuple[str, ...]] = {}
    for name, splits in data.items() if isinstance(data, dict) else [("", None)]:
        if (
            not isinstance(splits, dict)
            or not set(splits) <= {"train", "test"}
            or not all(isinstance(text, str) and text.strip() for variants in splits.values() for text in variants)
        ):
            raise ValueError(f'{where}: must be {{tool: {{"train": [texts], "test": [texts]}}}}; wrong at {name!r}')
        if both := set(splits.get("train", ())) & set(splits.get("test", ())):
            raise ValueError(f"{where}: a text of {name!r} is in both splits: {min(both)[:60]!r}")
        texts[name] = tuple(splits.get(config.split, ()))
    return texts


def _read_preferences_file(config: _Config) -> tuple[WrittenPreference, ...]:
    if config.preferences is None or config.preferences.file is None:
        return ()
    where = "randomize.preferences.file"
    try:
        pairs = read_written_preferences(_read_json(where, config.preferences.file))[config.split]
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    if not pairs:
        raise ValueError(f"{where}: has no pairs for the split {config.split!r}")
    return pairs


def _read_json(where: str, file: str) -> Any:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: cannot read {file}: {error}") from None


# What it does to an episode.


@dataclass(frozen=True, slots=True)
class Subset:
    """How many of the tools that are not kept an episode offers; see `read_randomization`.

    `min_tools` of None: DEFAULT_MIN_TOOLS, or all if there are fewer.
    """

    min_tools: int | None = None
    max_tools: int | None = None
    one_of: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Randomization:
    """A checked configuration, its pools reduced to what the split shows; `read_randomization` makes it and says more.

    Empty tuples, None and factors of 1 switch a part off.
    """

    split: Split = "train"
    keep: tuple[str, ...] | None = None
    unseen_tools: tuple[str, ...] = ()
    shared_tools: tuple[str, ...] | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    subset: Subset | None = None
    alias_tools: tuple[str, ...] | None = None
    alias_styles: tuple[str, ...] = ()
    hidden_words: tuple[str, ...] = ()
    schedules: tuple[Mapping[str, Price | tuple[float, float]], ...] = ()
    price_spread: float = 1.0
    latency_spread: float = 1.0
    description_styles: tuple[str, ...] = ()
    profiles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    written_descriptions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    preference_kinds: tuple[str, ...] = ()
    on_premise: tuple[str, ...] | None = None
    written_preferences: tuple[WrittenPreference, ...] = ()

    def apply(
        self,
        tools: Sequence[Tool],
        preference: Preference | None,
        rng: np.random.Generator,
        *,
        other_tools: Sequence[Tool] | None = None,
    ) -> tuple[tuple[Tool, ...], Preference | None]:
        """The tools and the preference of one episode.

        Args:
            tools: what the environment offers, by its own names.
            preference: the environment's own. It is told with the names of the episode; the tools that it favours are
                not left out. Replaced if preferences are randomised.
            rng: of the seed of the episode alone. Each part has a stream of its own, so that switching one on leaves
                the others as they were.
            other_tools: what the environment offers in other episodes (some of `tools` may be among them): every name
                and pattern of the configuration must fit one of both. None if that is not known: nothing is checked
                that another episode might make right.

        Returns:
            The tools in the order to show them (aliased ones in the order of their aliases, which tells nothing), and
            the preference. `backend` of an aliased tool is its own, or else its name.

        Raises:
            ValueError: the configuration does not fit these tools: a name or pattern in it fits none, say.
        """
        if other_tools is not None:
            self._check_fit({tool.name: tool for tool in (*other_tools, *tools)})
        streams = [np.random.default_rng(int(seed)) for seed in rng.integers(2**63, size=6)]
        subset_rng, alias_rng, price_rng, latency_rng, description_rng, preference_rng = streams
        offered = self._of_split(tools)
        wanted = {} if self.preference_kinds or preference is None else preference.weights
        offered = self._draw_subset(offered, wanted, subset_rng)
        aliases = self._draw_aliases(offered, tools, alias_rng)
        scrub = self._scrubber(tools, aliases)
        factors = _spread(len(tools), self.price_spread, price_rng)
        paces = _spread(len(tools), self.latency_spread, latency_rng)
        schedule = self.schedules[int(price_rng.integers(len(self.schedules)))] if self.schedules else {}
        texts = dict(zip((tool.name for tool in tools), description_rng.random(len(tools))))
        positions = {tool.name: position for position, tool in enumerate(tools)}
        shown = []
        for tool in offered:
            changes: dict[str, Any] = {}
            if not self._is_kept(tool):
                position = positions[tool.name]
                changes["price"] = _scaled(_scheduled(tool, schedule), float(factors[position]))
                changes |= _paced(tool, float(paces[position]))
                changes["description"] = self._description(tool, float(texts[tool.name]))
            changes["description"] = scrub(changes.get("description", tool.description))
            if self.alias_styles:
                changes["parameters"] = scrub_schema(tool.parameters, scrub)
            if tool.name in aliases:
                changes |= {"name": aliases[tool.name], "backend": tool.backend or tool.name}
            shown.append(_changed(tool, changes))
        names = {tool.name: new.name for tool, new in zip(offered, shown)}
        preference = self._preference(offered, names, preference, scrub, preference_rng)
        return _in_alias_order(shown, list(aliases.values())), preference

    def kind(self, tool: Tool) -> str:
        """The kind of a tool: as configured, or by `tool_kind`."""
        return next((kind for pattern, kind in self.kinds.items() if fnmatchcase(tool.name, pattern)), tool_kind(tool))

    def _check_fit(self, tools: Mapping[str, Tool]) -> None:
        """Raises a ValueError for what would do nothing with any of these tools, by name."""
        named = {
            "unseen.tools": self.unseen_tools,
            "keep": self.keep or (),
            "shared_tools": self.shared_tools or (),
            "kinds": tuple(self.kinds),
            "aliases.tools": self.alias_tools or (),
            "preferences.on_premise": self.on_premise or (),
        }
        for key, patterns in named.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in tools):
                    raise ValueError(
                        f"randomize.{key}: {pattern!r} fits no tool; there are {', '.join(tools) or 'none'}"
                    )
        if self.subset is not None and self.subset.min_tools is not None:
            optional = [name for name, tool in tools.items() if not self._is_kept(tool)]
            if self.subset.min_tools > len(optional):
                raise ValueError(
                    f"randomize.subset.min_tools: {self.subset.min_tools} is more than there are tools that may be "
                    f"left out ({len(optional)}: {', '.join(optional) or 'none'})"
                )

    def _is_kept(self, tool: Tool) -> bool:
        if self.keep is None:
            return self.kind(tool) == "function" and tool.price == Price()
        return _matches(tool.name, self.keep)

    def _of_split(self, tools: Sequence[Tool]) -> list[Tool]:
        if not self.unseen_tools:
            return list(tools)
        shown = [tool for tool in tools if self._is_kept(tool) or self._split_of(tool) in ("both", self.split)]
        if not shown and tools:
            raise ValueError(f"randomize.unseen.tools: leaves no tool for the split {self.split!r}")
        return shown

    def _split_of(self, tool: Tool) -> str:
        if _matches(tool.name, self.unseen_tools):
            return "test"
        is_shared = self.kind(tool) != "expert" if self.shared_tools is None else _matches(tool.name, self.shared_tools)
        return "both" if is_shared else "train"

    def _draw_subset(self, tools: list[Tool], weights: Mapping[str, float], rng: np.random.Generator) -> list[Tool]:
        if self.subset is None:
            return tools
        chosen = {tool.name for tool in tools if self._is_kept(tool)}
        optional = [tool.name for tool in tools if tool.name not in chosen]
        for group in self.subset.one_of:
            members = [tool.name for tool in tools if _matches(tool.name, group)]
            if not members:
                raise ValueError(
                    f"randomize.subset.one_of: none of {', '.join(group)} is among the tools of this episode; "
                    f"there are {', '.join(tool.name for tool in tools) or 'none'}"
                )
            if not chosen & set(members):
                chosen.add(members[int(rng.integers(len(members)))])
        chosen |= {name for name in optional if weights.get(name, 0.0) > 0}
        most = min(len(optional), self.subset.max_tools or len(optional))
        least = DEFAULT_MIN_TOOLS if self.subset.min_tools is None else self.subset.min_tools
        size = int(rng.integers(min(least, most), most + 1))
        for index in rng.permutation(len(optional)):
            if len(chosen & set(optional)) >= size:
                break
            chosen.add(optional[index])
        return [tool for tool in tools if tool.name in chosen]

    def _is_aliased(self, tool: Tool) -> bool:
        if not self.alias_styles or self._is_kept(tool):
            return False
        return self.kind(tool) == "expert" if self.alias_tools is None else _matches(tool.name, self.alias_tools)

    def _draw_aliases(self, offered: list[Tool], tools: Sequence[Tool], rng: np.random.Generator) -> dict[str, str]:
        """The aliases by real name, in the order in which to show them."""
        hidden = [tool for tool in offered if self._is_aliased(tool)]
        if not hidden:
            return {}
        style = self.alias_styles[int(rng.integers(len(self.alias_styles)))]
        taken = {tool.name for tool in tools}
        numbers = dict.fromkeys(TOOL_KINDS, 0)
        aliases = {}
        for index in rng.permutation(len(hidden)):
            tool = hidden[index]
            kind = self.kind(tool) if "{kind}" in style else TOOL_KINDS[0]
            while True:
                numbers[kind] += 1
                alias = _alias(style, kind, numbers[kind])
                if alias not in taken:
                    break
            aliases[tool.name] = alias
        return aliases

    def _scrubber(self, tools: Sequence[Tool], aliases: Mapping[str, str]) -> Callable[[str], str]:
        """A function that replaces in a text what would tell which model is behind an alias."""
        if not self.alias_styles:
            return str
        names: dict[str, str] = {}
        for tool in tools:
            if self._is_aliased(tool):
                for name in identities(tool):
                    names.setdefault(name, aliases.get(tool.name, _ABSENT))
        for word in self.hidden_words:
            names.setdefault(word, SOME_MODEL)
        return replacer(names)

    def _description(self, tool: Tool, luck: float) -> str:
        """One of the texts for a tool; `luck` in [0, 1) picks it."""
        written = self.written_descriptions.get(tool.name)
        if written:
            return written[int(luck * len(written))]
        profile = self._profile(tool)
        if not self.description_styles or profile is None:
            return tool.description
        style = DESCRIPTION_STYLES[self.description_styles[int(luck * len(self.description_styles))]]
        base = tool.description.strip()
        base = base if base[-1] in ".!?" else f"{base}."
        return style.format(base=base, strengths=profile[0], weaknesses=profile[1])

    def _profile(self, tool: Tool) -> tuple[str, str] | None:
        models = model_names(tool)
        for pattern, profile in self.profiles.items():
            if any(fnmatchcase(name, pattern) for name in (tool.name, *models)):
                return profile
        kind = _KIND_PROFILES.get(self.kind(tool))
        return next((_MODEL_PROFILES[model] for model in models if model in _MODEL_PROFILES), kind)

    def _is_on_premise(self, tool: Tool) -> bool:
        if self.on_premise is not None:
            return _matches(tool.name, self.on_premise)
        if self.kind(tool) == "expert":
            return any(family in model for model in model_names(tool) for family in _OPEN_FAMILIES)
        return not (self.kind(tool) == "search" and tool.source == "live" and "local" not in tool.name)

    def _preference(
        self,
        tools: Sequence[Tool],
        names: Mapping[str, str],
        own: Preference | None,
        scrub: Callable[[str], str],
        rng: np.random.Generator,
    ) -> Preference | None:
        """`names` maps the real names of the episode's `tools` to those that the policy sees."""
        if not self.preference_kinds:
            return None if own is None else _renamed(own, names, scrub)
        usable = [told for pair in self.written_preferences if (told := pair.told(names)) is not None]
        if usable:
            told = usable[int(rng.integers(len(usable)))]
            return replace(told, text=scrub(told.text))
        optional = [tool for tool in tools if not self._is_kept(tool)]
        return sample_preference(
            rng,
            [names[tool.name] for tool in tools],
            candidates=[names[tool.name] for tool in optional],
            on_premise=[names[tool.name] for tool in optional if self._is_on_premise(tool)],
            split=self.split,
            kinds=self.preference_kinds,
        )


def tool_kind(tool: Tool) -> str:
    """What sort of tool it seems to be: "expert" (a language model), "search", "code" or "function" (the rest).

    Experts charge by the token, have an endpoint as backend or bear the name of a known model; the others are told by
    the words in their names.
    """
    by_token = tool.price.per_input_token_usd > 0 or tool.price.per_output_token_usd > 0
    if by_token or tool.backend.startswith("openai:") or any(model in _MODEL_PROFILES for model in model_names(tool)):
        return "expert"
    words = re.split(r"[-_.]", tool.name.lower())
    if "search" in words:
        return "search"
    return "code" if {"python", "code", "calculator"} & set(words) else "function"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _alias(style: str, kind: str, number: int) -> str:
    letters, rest = "", number
    while rest:
        rest, digit = divmod(rest - 1, 26)
        letters = string.ascii_uppercase[digit] + letters
    return style.format(kind=kind, n=number, letter=letters)


def _spread(size: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """float[size], log-uniform in [1 / spread, spread]."""
    limit = math.log(spread)
    return np.exp(rng.uniform(-limit, limit, size=size))


def _scheduled(tool: Tool, schedule: Mapping[str, Price | tuple[float, float]]) -> Price:
    """The tool's price in a schedule, its own if it is not listed there."""
    for name in (tool.name, *model_names(tool)):
        listed = schedule.get(name) or next((p for pattern, p in schedule.items() if fnmatchcase(name, pattern)), None)
        if isinstance(listed, Price):
            return listed
        if listed is not None:
            per_token = {"per_input_token_usd": listed[0] / 1e6, "per_output_token_usd": listed[1] / 1e6}
            return replace(tool.price, **per_token)
    return tool.price


def _scaled(price: Price, factor: float) -> Price:
    if factor == 1.0:
        return price
    parts = {name: getattr(price, name) * factor for name in Price.__slots__}
    return Price(**{name: min(part, MAX_USD_PER_TOKEN) if "token" in name else part for name, part in parts.items()})


def _paced(tool: Tool, factor: float) -> dict[str, Any]:
    """The fields of `tool` that make it slower by `factor`, latencies that its results state included."""
    if factor == 1.0 or tool.clock == "measured":
        return {}

    def pace(result: Any) -> Any:
        if isinstance(result, ToolResult) and isinstance(result.latency_s, int | float):
            return replace(result, latency_s=result.latency_s * factor)
        return result

    if tool.is_async:

        async def paced_async(**arguments: Any) -> Any:
            return pace(await tool.function(**arguments))

        paced: Callable[..., Any] = paced_async
    else:

        def paced_plain(**arguments: Any) -> Any:
            return pace(tool.function(**arguments))

        paced = paced_plain
    context = tool._context_argument
    paced.__annotations__ = {} if context is None else {context: CallContext}
    return {"function": paced, "latency_s": tool.latency_s * factor}


def _changed(tool: Tool, changes: Mapping[str, Any]) -> Tool:
    """`tool` itself where nothing changes: making one costs time."""
    changes = {name: value for name, value in changes.items() if value != getattr(tool, name)}
    return replace(tool, **changes) if changes else tool


def _in_alias_order(tools: Sequence[Tool], aliases: Sequence[str]) -> tuple[Tool, ...]:
    """Aliased tools in the order of `aliases`, in the places that aliased ones had; the others where they were."""
    by_name = {tool.name: tool for tool in tools}
    order = iter(aliases)
    aliased = set(aliases)
    return tuple(by_name[next(order)] if tool.name in aliased else tool for tool in tools)


def _renamed(preference: Preference, names: Mapping[str, str], scrub: Callable[[str], str]) -> Preference:
    """A preference by the names of the episode. Its words are dropped if they favour a tool that is missing."""
    names = {**names, **{objective: objective for objective in PREFERENCE_OBJECTIVES}}
    weights = {names[name]: weight for name, weight in preference.weights.items() if name in names}
    missing = [name for name, weight in preference.weights.items() if weight > 0 and name not in names]
    return Preference(weights, "" if missing else scrub(preference.text))


# Descriptions that a language model writes beforehand.


def write_descriptions(
    tools: Sequence[Tool],
    endpoint: Endpoint,
    examples: Sequence[Mapping[str, Any]] = (),
    *,
    variants: int = 4,
    num_test: int = 1,
    max_concurrency: int = 8,
    temperature: float | None = 1.0,
) -> dict[str, dict[str, list[str]]]:
    """Let a language model describe tools from what they did, as in ToolOrchestra (section 3.1); to be stored as JSON::

        texts = write_descriptions(tools, Endpoint("gpt-5-mini"), examples)
        Path("descriptions.json").write_text(json.dumps(texts, indent=1))
        # then: env.kwargs.randomize.descriptions: {file: descriptions.json}

    Args:
        tools: the tools by their real names; the texts do not name them.
        examples: what tools did on tasks: mappings with "tool", "task", "output" and "success".
        variants: texts of each tool; the last `num_test` of them are for the split "test".
        max_concurrency: requests at once.

    Returns:
        {tool: {"train": [texts], "test": [texts]}}; equal texts are kept once.

    Raises:
        ToolUnavailableError: the endpoint does not answer.
        ValueError: fewer than one text would be left for training.
    """
    from orchestra_envs.loop import run_on_loop

    if not 0 <= num_test < variants:
        raise ValueError(f"num_test must be at least 0 and less than variants ({variants}), not {num_test}")
    requests = [(tool, number) for tool in tools for number in range(variants)]
    prompts = [_description_request(tool, number, examples) for tool, number in requests]
    texts = run_on_loop(_ask_all(endpoint, prompts, max_concurrency, temperature))
    result: dict[str, dict[str, list[str]]] = {}
    for index, tool in enumerate(tools):
        scrub = replacer(dict.fromkeys(identities(tool), "it"))
        own = [scrub(" ".join(text.split())) for text in texts[index * variants : (index + 1) * variants]]
        own = [text for text in dict.fromkeys(own) if text]
        num_train = max(1, len(own) - num_test)
        result[tool.name] = {"train": own[:num_train], "test": own[num_train:]}
    return result


async def _ask_all(
    endpoint: Endpoint, prompts: Sequence[str], max_concurrency: int, temperature: float | None
) -> list[str]:
    from orchestra_envs.live.chat import chat

    slots = asyncio.Semaphore(max_concurrency)

    async def ask(prompt: str) -> str:
        async with slots:
            return (await chat(endpoint, [{"role": "user", "content": prompt}], temperature=temperature)).text

    return list(await asyncio.gather(*map(ask, prompts)))


def _description_request(tool: Tool, number: int, examples: Sequence[Mapping[str, Any]]) -> str:
    own = [example for example in examples if example.get("tool") == tool.name]
    seen = "\n\n".join(
        f"Task: {str(example.get('task', ''))[:1000]}\nOutput: {str(example.get('output', ''))[:1000]}\n"
        f"Success: {'yes' if example.get('success') else 'no'}"
        for example in own
    )
    return (
        f"A tool that an assistant can call describes itself so: {tool.description}\n\n"
        + (f"What it did on some tasks:\n\n{seen}\n\n" if seen else "")
        + f"Describe for the assistant in about a hundred words what this tool is good at and where it fails, going by "
        f"{'these tasks' if seen else 'its own description'}. Do not name it, nor its maker or model; say nothing of "
        f"prices and speed. This is wording {number + 1}: choose words of your own. Reply with the description alone."
    )
