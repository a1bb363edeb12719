"""Randomised tool configurations: what may vary, what must not, and what must never show."""

import json
import math
import re

import numpy as np
import orchestra_envs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestra_envs import CallContext, Preference, Price, Task, Tool, ToolEnv, ToolResult
from orchestra_envs.disguise import identities, replacer
from orchestra_envs.live.chat import Endpoint
from orchestra_envs.parse import ToolCall, render_call
from orchestra_envs.price_schedules import PUBLISHED_SCHEDULES, canonical_model
from orchestra_envs.randomize import (
    ALIAS_STYLES,
    UNSEEN_ALIAS_STYLES,
    read_randomization,
    tool_kind,
    write_descriptions,
)

from .servers.openai_server import OpenAIServer

EVERYTHING = {
    "subset": {"min_tools": 2, "one_of": [["web_search", "gpt-*"]]},
    "aliases": True,
    "price_schedules": "published",
    "price_spread": 3.0,
    "latency_spread": 3.0,
    "descriptions": True,
    "preferences": True,
}


def expert(name, usd_per_million=1.0, **fields):
    price = Price(per_input_token_usd=usd_per_million / 1e6, per_output_token_usd=2 * usd_per_million / 1e6)
    fields = {"description": f"Asks {name}, which thinks.", "price": price, "latency_s": 10.0} | fields
    return Tool(name, parameters={"type": "object"}, function=lambda: name, **fields)


def function(name, **fields):
    return Tool(name, f"Reads {name} of the shop.", {"type": "object"}, lambda: name, **fields)


EXPERTS = [
    expert("gpt-5", backend="openai:gpt-5@https://api.openai.com/v1"),
    expert("gpt-5-mini", description="A smaller GPT 5 by OpenAI."),
    expert("qwen3-32b", backend="openai:Qwen/Qwen3-32B@http://10.0.0.7:8000/v1", description="Qwen3-32B, open."),
    expert("my_model", description="Neither gpt5 nor Llama-3.3-70B-Instruct."),
]
SEARCH = Tool(
    "web_search",
    "Searches the web; the gpt-5 of searching.",
    {"type": "object", "properties": {"query": {"type": "string", "description": "as my_model would ask"}}},
    lambda query="": query,
    Price(per_call_usd=0.01),
    1.0,
)
TOOLS = [function("get_order"), *EXPERTS, SEARCH, function("cancel_order")]
KEPT = ("get_order", "cancel_order")


def applied(config, seed=0, tools=TOOLS, preference=None):
    return read_randomization(config).apply(tools, preference, np.random.default_rng(seed))


def real_name(tool):
    """The name a tool had before it was given an alias."""
    known = {tool.backend or tool.name: tool.name for tool in TOOLS}
    return known.get(tool.backend, known.get(tool.name, tool.name))


def texts_of(tool):
    """All texts of a spec that are not names of arguments or numbers, and the tool's name."""
    return json.dumps([tool.name, tool.description, tool.parameters])


# Properties of whole configurations.

NAMES = st.from_regex(r"[a-z]{3,8}-?[0-9]{1,2}(\.[0-9])?(-(mini|nano|large))?", fullmatch=True)


@st.composite
def tool_lists(draw):
    """Two to seven experts with descriptions that name one another, and two functions."""
    names = draw(st.lists(NAMES, min_size=2, max_size=7, unique_by=lambda name: re.sub(r"\W", "", name)))
    tools = []
    for name in names:
        other = draw(st.sampled_from(names))
        spelt = draw(st.sampled_from([other, other.upper(), other.replace("-", " "), other.replace("-", "_")]))
        parameters = {"type": "object", "properties": {"q": {"type": "string", "title": spelt, "description": other}}}
        backend = draw(st.sampled_from(["", f"openai:lab/{name}@http://127.0.0.1:1/v1"]))
        text = f"Better than {spelt}; not {other}."
        price = Price(per_output_token_usd=1e-6)
        tools.append(Tool(name, text, parameters, lambda q="": q, price, 1.0, backend=backend))
    return [function("get_order"), *tools, function("cancel_order")]


configs = st.fixed_dictionaries(
    {"split": st.sampled_from(["train", "test"])},
    optional={
        "subset": st.fixed_dictionaries({"min_tools": st.integers(1, 4)}),
        "aliases": st.just(True),
        "price_schedules": st.just("published"),
        "price_spread": st.floats(1, 1000),
        "latency_spread": st.floats(1, 1000),
        "descriptions": st.just(True),
        "preferences": st.just(True),
    },
)


@settings(deadline=None, max_examples=150)
@given(tool_lists(), configs, st.integers(0, 2**32))
def test_any_configuration_keeps_the_rules(tools, config, seed):
    shown, preference = applied(config, seed, tools)
    again, same_preference = applied(config, seed, tools)
    assert [tool.spec_json for tool in shown] == [tool.spec_json for tool in again]
    assert preference == same_preference

    names = [tool.name for tool in shown]
    assert len(set(names)) == len(names)
    assert {"get_order", "cancel_order"} <= set(names)
    assert len(shown) - 2 >= min(len(tools) - 2, config["subset"]["min_tools"] if "subset" in config else len(tools))
    by_real_name = {tool.name: tool for tool in tools}
    reals = [tool.name if tool.name in by_real_name else _real(tool, tools) for tool in shown]
    assert len(set(reals)) == len(reals)  # every alias stands for one tool
    for tool, real in zip(shown, reals):
        original = by_real_name[real]
        assert tool.function(**{} if original.name in KEPT else {"q": "x"}) == (real if real in KEPT else "x")
        assert tool.backend == (original.backend or ("" if tool.name == real else real))
        ratio = tool.price.per_output_token_usd / original.price.per_output_token_usd if real not in KEPT else 1.0
        spread = config.get("price_spread", 1.0)
        assert 1 / spread <= ratio * (1 + 1e-9)
        assert ratio <= spread * (1 + 1e-9)
        if real in KEPT:
            assert tool == original
    if "aliases" in config:
        written = " ".join(map(texts_of, shown)).lower()
        for original in tools:
            if original.name not in KEPT:
                parts = re.findall(r"[a-z]+|\d+", original.name)
                assert not re.search(r"(?<![a-z0-9])" + r"\W*_?".join(parts) + r"(?![a-z0-9])", written)
                assert original.name not in names
    if "preferences" in config:
        assert set(preference.weights) == {*names, "outcome", "cost", "latency"}
        mentioned = {name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", preference.text)}
        favoured = {name for name in names if preference.weights[name] > 0}
        optional = set(names) - set(KEPT)
        assert favoured in (mentioned, optional - mentioned if mentioned else set())


def _real(tool, tools):
    return next(real.name for real in tools if tool.backend in (real.backend or None, real.name))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_the_splits_share_nothing_of_their_pools(seed, with_unseen_tools):
    unseen = {"tools": ["qwen*", "my_model"]} if with_unseen_tools else {}
    own_tables = {"ours": {"gpt-5": {"per_call_usd": 7.0}}, "theirs": {"gpt-5": {"per_call_usd": 9.0}}}
    config = {
        "aliases": True,
        "price_schedules": ["ours", "theirs"],
        "price_tables": own_tables,
        "descriptions": True,
        "preferences": {"kinds": ["cost", "latency"]},
        "unseen": {**unseen, "prices": ["theirs"], "preferences": ["latency"]},
    }
    shown = {}
    for split in ("train", "test"):
        tools, preference = applied({**config, "split": split}, seed)
        by_real = {real_name(tool): tool for tool in tools}
        shown[split] = by_real
        assert preference.weights["cost"] == float(split == "train")
        if with_unseen_tools:
            experts = {"train": {"gpt-5", "gpt-5-mini"}, "test": {"qwen3-32b", "my_model"}}[split]
            assert set(by_real) == {*experts, *KEPT, "web_search"}
        if "gpt-5" in by_real:
            assert by_real["gpt-5"].price == Price(per_call_usd=7.0 if split == "train" else 9.0)
    names = {split: {t.name for t in tools.values() if t.backend} for split, tools in shown.items()}
    assert not names["train"] & names["test"]
    for real in set(shown["train"]) & set(shown["test"]) - set(KEPT):
        assert shown["train"][real].description != shown["test"][real].description


# The parts one by one.


def test_aliases_are_shuffled_between_episodes_and_shown_in_their_own_order():
    behind_first = set()
    for seed in range(40):
        shown, _ = applied({"aliases": {"styles": ["expert-{n}"]}}, seed)
        assert [t.name for t in shown] == ["get_order", *(f"expert-{n}" for n in (1, 2, 3, 4)), "web_search", KEPT[1]]
        behind_first.add(real_name(shown[1]))
    assert behind_first == {tool.name for tool in EXPERTS}


def test_aliases_by_kind_number_and_letter_never_collide_with_a_tool():
    tools = [*EXPERTS, SEARCH, expert("expert-1"), function("expert-2")]
    config = {
        "aliases": {"tools": ["*"], "styles": ["{kind}-{n}", "h-{letter}"]},
        "unseen": {"aliases": ["h-{letter}"]},
    }
    shown, _ = applied(config, tools=tools)
    aliases = {tool.name for tool in shown if tool.backend}
    assert aliases == {*(f"expert-{n}" for n in (3, 4, 5, 6, 7)), "search-1"}  # 1 and 2 are names already
    shown, _ = applied({**config, "split": "test"}, tools=tools)
    assert {tool.name for tool in shown} == {"h-A", "h-B", "h-C", "h-D", "h-E", "h-F", "expert-2"}


def test_an_alias_keeps_the_limits_of_its_tool():
    limiter = orchestra_envs.tools.Limiter(max_concurrency=1)
    tools = [expert("a-1", limiter=limiter, timeout_s=3.0, max_output_chars=7), expert("a-2", limiter=limiter)]
    shown, _ = applied({"aliases": True, "price_spread": 2.0}, tools=tools)
    assert all(tool.limiter is limiter for tool in shown)
    first = next(tool for tool in shown if tool.backend == "a-1")
    assert (first.timeout_s, first.max_output_chars) == (3.0, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Asks GPT-5.", "Asks expert-1."),
        ("gpt5 or gpt_5, GPT 5", "expert-1 or expert-1, expert-1"),
        ("gpt-5-mini beats gpt-5", "another tool beats expert-1"),
        ("Qwen/Qwen3-32B at 10.0.0.7", "expert-2 at expert-2"),
        (
            "Unlike Claude Opus 4.1 and Llama-3.3-70B-Instruct!",
            "Unlike a language model a language model and a language model!",
        ),
        ("Two GPTs, cryptgpt, opuscule", "Two a language model, cryptgpt, opuscule"),
        ("Costs 5 gpt", "Costs 5 a language model"),
        ("nothing to see", "nothing to see"),
    ],
)
def test_names_are_found_however_they_are_spelt(text, expected):
    names = dict.fromkeys(identities(EXPERTS[0]), "expert-1") | dict.fromkeys(identities(EXPERTS[2]), "expert-2")
    assert replacer(names | {"gpt-5-mini": "another tool"})(text) == expected


def test_a_plain_word_is_replaced_only_as_it_stands():
    assert replacer({"oracle": "tool_1"})("oracle, Oracle, oracles, oracle_2") == "tool_1, Oracle, oracles, oracle_2"
    assert replacer({"--": "tool_1"})("a -- b") == "a tool_1 b"


def test_finding_names_takes_linear_time():
    text = "gpt" + "-a" * 20000 + " " + "qwen3.5 1 2 3 " * 3000 + "-._" * 20000
    assert "gpt" not in replacer({"gpt-5": "x"})(text)


def test_subset_keeps_what_must_be_kept_and_one_of_each_group():
    sizes, config = set(), {"subset": {"min_tools": 1, "max_tools": 3, "one_of": [["web_search"], ["gpt-*", "qwen*"]]}}
    for seed in range(100):
        names = {tool.name for tool in applied(config, seed)[0]}
        assert {*KEPT, "web_search"} <= names
        assert names & {"gpt-5", "gpt-5-mini", "qwen3-32b"}
        sizes.add(len(names) - len(KEPT))
    assert sizes == {2, 3}


def test_keep_names_tools_by_pattern_or_object_and_may_keep_none():
    config = {"subset": {"min_tools": 1, "max_tools": 1}, "keep": ["gpt-*", SEARCH], "aliases": True}
    for seed in range(20):
        names = [tool.name for tool in applied(config, seed)[0]]
        assert {"gpt-5", "gpt-5-mini", "web_search"} <= set(names)
        assert len(names) == 4
    only_one = {"subset": {"min_tools": 1, "max_tools": 1}, "keep": []}
    offered = [[tool.name for tool in applied(only_one, seed)[0]] for seed in range(100)]
    assert all(len(names) == 1 for names in offered)
    assert {name for names in offered for name in names} == {tool.name for tool in TOOLS}


def test_kept_tools_are_in_both_splits():
    for split, other in (("train", "gpt-5-mini"), ("test", "qwen3-32b")):
        config = {"keep": ["gpt-5", "my_model"], "unseen": {"tools": ["qwen*", "my_model"]}, "split": split}
        names = {tool.name for tool in applied(config)[0]}
        assert names == {"gpt-5", "my_model", other, "web_search", *KEPT}


def test_published_schedules_price_the_model_behind_the_name():
    tool = expert("anything", backend="openai:meta-llama/Llama-3.3-70B-Instruct-Turbo@https://x/v1")
    for schedule in ("groq", "deepinfra"):
        config = {"price_schedules": [schedule], "split": "test" if schedule == "deepinfra" else "train"}
        (shown,), _ = applied(config, tools=[tool])
        dollars = PUBLISHED_SCHEDULES[schedule]["llama-3.3-70b"]
        assert (shown.price.per_input_token_usd * 1e6, shown.price.per_output_token_usd * 1e6) == pytest.approx(dollars)
    assert applied({"price_schedules": "groq"}, tools=[SEARCH])[0] == (SEARCH,)  # not listed: its own price


def test_published_schedules_are_sane_and_use_canonical_names():
    for table in PUBLISHED_SCHEDULES.values():
        for model, dollars in table.items():
            assert model == canonical_model(model)
            assert all(0 < part < 20 for part in dollars)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct-Turbo", "llama-3.3-70b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("nvidia/Llama-3_1-Nemotron-Ultra-253B-v1", "nemotron-ultra-253b"),
        ("gpt-5", "gpt-5"),
    ],
)
def test_canonical_names_of_models(name, canonical):
    assert canonical_model(name) == canonical


def test_a_huge_spread_never_makes_an_impossible_price():
    tool = expert("gpt-5", usd_per_million=400_000)
    for seed in range(20):
        (shown,), _ = applied({"price_spread": 1000.0}, seed, [tool])
        assert 0 < shown.price.per_output_token_usd <= 1.0


def test_spreads_are_log_uniform():
    tools = [expert(f"m-{i}") for i in range(400)]
    shown, _ = applied({"price_spread": 4.0, "latency_spread": 4.0}, tools=tools)
    prices = np.log([tool.price.per_input_token_usd * 1e6 for tool in shown]) / math.log(4.0)
    paces = np.log([tool.latency_s / 10 for tool in shown]) / math.log(4.0)
    for values in (prices, paces):
        assert -1 <= values.min() < -0.95
        assert 0.95 < values.max() <= 1
        assert abs(values.mean()) < 0.1
    assert abs(np.corrcoef(prices, paces)[0, 1]) < 0.15


def test_measured_latencies_are_left_alone():
    tool = expert("gpt-5", clock="measured")
    assert applied({"latency_spread": 9.0}, tools=[tool])[0] == (tool,)


def test_streams_are_independent():
    """Switching one part on leaves the draws of the others as they were."""
    both, _ = applied({"price_spread": 2.0, "subset": True, "aliases": True}, seed=5)
    prices = {tool.name: tool.price for tool in applied({"price_spread": 2.0}, seed=5)[0]}
    assert all(tool.price == prices[real_name(tool)] for tool in both)


def test_descriptions_vary_leave_functions_alone_and_take_profiles():
    profile = {"my_*": {"strengths": "riddles {of} any sort", "weaknesses": "rhymes"}}
    seen = {tool.name: set() for tool in TOOLS}
    for seed in range(40):
        for tool in applied({"descriptions": {"profiles": profile}}, seed)[0]:
            seen[tool.name].add(tool.description)
    assert {name: len(texts) for name, texts in seen.items() if name in KEPT} == dict.fromkeys(KEPT, 1)
    assert all(len(texts) == 3 for name, texts in seen.items() if name not in KEPT)
    assert all("riddles {of} any sort" in text and "rhymes" in text for text in seen["my_model"])


def test_written_descriptions_are_taken_from_the_file_and_scrubbed(tmp_path):
    file = tmp_path / "descriptions.json"
    texts = {"gpt-5": {"train": ["Like GPT-5, good.", "Good, that is all."], "test": ["Fine work by gpt-5."]}}
    file.write_text(json.dumps(texts))
    found = {"train": set(), "test": set()}
    for split, descriptions in found.items():
        config = {"descriptions": {"file": str(file)}, "aliases": {"styles": list(ALIAS_STYLES)}, "split": split}
        for seed in range(30):
            tool = next(tool for tool in applied(config, seed)[0] if real_name(tool) == "gpt-5")
            descriptions.add(tool.description.replace(tool.name, "ALIAS"))
    assert found == {"train": {"Like ALIAS, good.", "Good, that is all."}, "test": {"Fine work by ALIAS."}}


def test_the_environments_own_preference_is_told_by_the_new_names():
    own = Preference({"gpt-5": 1.0, "web_search": 0.0, "outcome": 1.0, "cost": 0.5, "latency": 0.0}, "Use gpt-5.")
    for seed in range(30):
        shown, preference = applied({"aliases": True, "subset": {"min_tools": 1}}, seed, preference=own)
        alias = next(tool.name for tool in shown if real_name(tool) == "gpt-5")  # favoured, so never left out
        assert preference.text == f"Use {alias}."
        assert preference.weights[alias] == 1.0
        assert set(preference.weights) <= {*(tool.name for tool in shown), "outcome", "cost", "latency"}


def test_words_about_a_tool_of_the_other_split_are_not_told():
    own = Preference({"gpt-5": 1.0, "outcome": 1.0, "cost": 0.5, "latency": 0.0}, "Use gpt-5.")
    config = {"unseen": {"tools": ["gpt-5"]}}
    _, preference = applied(config, preference=own)
    assert preference == Preference({"outcome": 1.0, "cost": 0.5, "latency": 0.0}, "")
    assert applied({**config, "split": "test"}, preference=own)[1] == own


def test_on_premise_are_open_models_and_local_tools_unless_told():
    config = {"preferences": {"kinds": ["on_premise"]}, "aliases": True}
    shown, preference = applied(config)
    local = {real_name(tool) for tool in shown if preference.weights[tool.name] > 0}
    assert local == {"qwen3-32b", "web_search"}  # the search of these tests is no live one
    config = {"preferences": {"kinds": ["on_premise"], "on_premise": ["my_model"]}}
    assert {name for name, weight in applied(config)[1].weights.items() if weight == 1.0} == {"my_model", "outcome"}


def test_written_preferences_are_told_by_alias_where_their_tools_are_there(tmp_path):
    pairs = {
        "train": [
            {
                "text": "Use {gpt-5}, never gpt-5-mini.",
                "weights": {"gpt-5": 1, "outcome": 1, "cost": 0, "latency": 0.5},
            },
            {"text": "Ask {nobody}.", "weights": {"nobody": 1}},
        ],
        "test": [{"text": "Let {gpt-5} do it.", "weights": {"gpt-5": 1, "outcome": 1}}],
    }
    file = tmp_path / "preferences.json"
    file.write_text(json.dumps(pairs))
    config = {"preferences": {"file": str(file)}, "aliases": True}
    for seed in range(10):
        shown, preference = applied(config, seed)
        alias = {real_name(tool): tool.name for tool in shown}
        assert preference.text == f"Use {alias['gpt-5']}, never {alias['gpt-5-mini']}."
        assert preference.weights[alias["gpt-5"]] == 1.0
        assert preference.weights["latency"] == 0.5
    assert applied({**config, "split": "test"})[1].text.startswith("Let ")


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("expert", EXPERTS[0]),
        ("expert", expert("o", price=Price(), backend="openai:m@http://x/v1")),
        ("search", SEARCH),
        ("code", function("python")),
        ("function", function("research_orders")),
    ],
    ids=["by token", "by endpoint", "search", "code", "function"],
)
def test_kinds_of_tools(kind, tool):
    assert tool_kind(tool) == kind


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"price_spread": 0.5}, r"randomize\.price_spread: must be greater than or equal to 1, not 0\.5"),
        ({"price_spread": float("nan")}, r"randomize\.price_spread: must be a finite number, not nan"),
        ({"latency_spread": True}, r"randomize\.latency_spread: must be a number, not True"),
        ({"price_spred": 2}, r"randomize\.price_spred: no such field; there are split, keep, .*price_spread"),
        ({"subset": {"min": 1}}, r"randomize\.subset\.min: no such field; there are min_tools, max_tools, one_of"),
        (
            {"descriptions": {"profiles": {"a": {"good": 1}}}},
            r"randomize\.descriptions\.profiles\.a\.good: no such field",
        ),
        ({"subset": 3}, r"randomize\.subset: must be true, false or a mapping, not 3"),
        ({"subset": {"min_tools": 0}}, r"randomize\.subset\.min_tools: must be greater"),
        ({"subset": {"min_tools": 3, "max_tools": 2}}, r"randomize\.subset\.max_tools: 2 is less than min_tools \(3\)"),
        ({"split": "val"}, r"randomize\.split: must be 'train' or 'test', not 'val'"),
        ({"keep": "get_order"}, r"randomize\.keep: must be a list of names, not 'get_order'"),
        ({"keep": [3]}, r"randomize\.keep\[0\]: must be text, not 3"),
        ({"price_schedules": True}, r"^randomize\.price_schedules: must be a list of names, not True$"),
        ({"price_schedules": [1]}, r"^randomize\.price_schedules\[0\]: must be text, not 1$"),
        ({"subset": {"one_of": ["search"]}}, r"randomize\.subset\.one_of\[0\]: must be a list of names, not 'search'"),
        ({"subset": {"one_of": "search"}}, r"randomize\.subset\.one_of: must be a list of lists of names, not"),
        ({"subset": {"min_tools": "2"}}, r"randomize\.subset\.min_tools: must be a whole number, not '2'"),
        ({"unseen": True}, r"^randomize\.unseen: must be a mapping, not True$"),
        ({"kinds": ["a"]}, r"^randomize\.kinds: must be a mapping, not \['a'\]$"),
        ({"descriptions": {"profiles": {"a": {"strengths": "x"}}}}, r"profiles\.a\.weaknesses: is missing$"),
        ({"kinds": {"a": "b"}}, r"randomize\.kinds\.a: must be one of expert, search, code, function, not 'b'"),
        ({"aliases": {"styles": ["x"]}}, r"randomize\.aliases\.styles: 'x' must be letters.*\{n\} or \{letter\}"),
        ({"aliases": {"styles": ["a b{n}"]}}, r"randomize\.aliases\.styles: 'a b\{n\}' must be letters"),
        ({"aliases": {"styles": ["a{m}"]}}, r"randomize\.aliases\.styles: 'a\{m\}' must be letters"),
        (
            {"aliases": {"styles": ["expert-{n}", "{kind}-{n}"]}, "unseen": {"aliases": ["expert-{n}"]}},
            r"randomize\.unseen\.aliases: .* give the same names in both splits",
        ),
        (
            {"aliases": {"styles": ["a{n}"]}, "split": "test"},
            r"randomize\.unseen\.aliases: leaves nothing for .*'test'",
        ),
        ({"price_schedules": ["togther"]}, r"randomize\.price_schedules: no schedule 'togther'; there are .*together"),
        (
            {"price_schedules": ["groq"], "split": "test"},
            r"randomize\.unseen\.prices: leaves nothing .* unseen are deepinfra",
        ),
        (
            {"price_tables": {"t": {"a": {"per_call_usd": -1}}}},
            r"randomize\.price_tables\.t\.a: Price\.per_call_usd must be",
        ),
        (
            {"price_tables": {"t": {"a": {"usd": 1}}}},
            r"randomize\.price_tables\.t\.a: got an unexpected keyword .*'usd'",
        ),
        (
            {"descriptions": {"styles": ["x"]}},
            r"randomize\.descriptions\.styles: no style 'x'; there are pros_and_cons",
        ),
        ({"descriptions": {"file": "/no/file"}}, r"randomize\.descriptions\.file: cannot read /no/file"),
        ({"preferences": {"kinds": ["x"]}}, r"randomize\.preferences\.kinds: no kind 'x'; there are accuracy"),
        ({"preferences": {"file": "/no/file"}}, r"randomize\.preferences\.file: cannot read /no/file"),
        ({"unseen": {"preferences": ["x"]}, "preferences": True}, r"randomize\.unseen\.preferences: no kind 'x'"),
        ([], r"randomize: must be a mapping, not \[\]"),
    ],
)
def test_mistakes_are_told_by_field(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_randomization(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "data", "message"),
    [
        ("descriptions", {"a": ["x"]}, "must be .* wrong at 'a'"),
        ("descriptions", {"a": {"train": ["x"], "test": ["x"]}}, "a text of 'a' is in both splits: 'x'"),
        ("preferences", {"train": [{"text": "x", "weights": {"a": 2}}]}, r"train\[0\]: Preference.weights\['a'\]"),
        ("preferences", {"test": [{"text": "x", "weights": {}}]}, "has no pairs for the split 'train'"),
        (
            "preferences",
            {"train": [{"text": "x", "weights": {}}], "test": [{"text": "x", "weights": {}}]},
            "in both splits",
        ),
        ("preferences", [], 'must be {"train"'),
    ],
)
def test_unusable_files_are_told(tmp_path, part, data, message):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"^randomize\.{part}\.file: .*{message}"):
        read_randomization({part: {"file": str(file)}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"subset": {"one_of": [["no_such"]]}}, r"randomize\.subset\.one_of: none of no_such is among the tools"),
        ({"unseen": {"tools": ["*"]}, "keep": []}, r"randomize\.unseen\.tools: leaves no tool for the split 'train'"),
        ({"unseen": {"tools": ["claude-*"]}, "split": "test"}, r"randomize\.unseen\.tools: 'claude-\*' fits no tool; "),
        ({"unseen": {"tools": ["gpt-5", "claude-*"]}}, r"'claude-\*' fits no tool; there are get_order, gpt-5, "),
        ({"keep": ["get_ordr"]}, r"randomize\.keep: 'get_ordr' fits no tool; there are get_order, "),
        ({"shared_tools": ["serch"]}, r"randomize\.shared_tools: 'serch' fits no tool; "),
        ({"kinds": {"serch": "search"}}, r"randomize\.kinds: 'serch' fits no tool; "),
        ({"aliases": {"tools": ["x*"]}}, r"randomize\.aliases\.tools: 'x\*' fits no tool; "),
        ({"preferences": {"on_premise": ["x"]}}, r"randomize\.preferences\.on_premise: 'x' fits no tool; "),
        (
            {"subset": {"min_tools": len(TOOLS) - 1}},
            rf"randomize\.subset\.min_tools: {len(TOOLS) - 1} is more than .* left out \({len(TOOLS) - 2}: gpt-5, ",
        ),
    ],
)
def test_what_does_not_fit_the_tools_is_told(config, message):
    with pytest.raises(ValueError, match=message):
        read_randomization(config).apply(TOOLS, None, np.random.default_rng(0), other_tools=())


def test_tools_of_other_episodes_may_be_named():
    config = {"unseen": {"tools": ["gpt-5"]}, "keep": ["cancel_order"], "subset": {"min_tools": 2}}
    here = [tool for tool in TOOLS if tool.name in ("get_order", SEARCH.name)]
    rng = np.random.default_rng(0)
    shown, _ = read_randomization(config).apply(here, None, rng, other_tools=TOOLS)
    assert [tool.name for tool in shown] == ["get_order", SEARCH.name]
    applied({"keep": ["no_such"]}, tools=here)  # nobody knows what other episodes have


def test_without_min_tools_a_single_tool_is_no_mistake():
    here = [tool for tool in TOOLS if tool.name in ("get_order", SEARCH.name)]
    shown, _ = read_randomization({"subset": True}).apply(here, None, np.random.default_rng(0), other_tools=here)
    assert len(shown) == 2


# In environments.


def test_the_market_keeps_the_contract_and_charges_what_it_tells():
    config = {**EVERYTHING, "subset": {"min_tools": 3, "one_of": [["search", "gpt-*"]]}}
    assert orchestra_envs.check("orchestra/Market-v0", randomize=config) == []
    env = orchestra_envs.make("orchestra/Market-v0", randomize=config, preference="random")
    for seed in range(12):
        _, info = env.reset(seed=seed)
        _, replica_info = env.reset(seed=seed, options={"replica": 3})
        assert info == replica_info
        for spec in json.loads(info["tools_json"]):
            assert not re.search(r"gpt|qwen|llama", json.dumps(spec), re.IGNORECASE)
            env.reset(seed=seed)
            call = json.loads(env.step(render_call(ToolCall(spec["function"]["name"], {})))[4]["calls_json"])[0]
            tokens = {key: call[f"{key}_tokens"] for key in ("input", "output")}
            told = Price(**spec["price"]).cost_usd(
                input_tokens=tokens["input"], output_tokens=tokens["output"], latency_s=call["latency_s"]
            )
            assert call["tool"] == spec["function"]["name"]
            if call["status"] == "ok":
                assert call["cost_usd"] == pytest.approx(told)


def test_the_service_world_keeps_its_functions_and_varies_its_experts():
    config = {**EVERYTHING, "subset": {"min_tools": 1}}
    env = orchestra_envs.make("orchestra/Service-v0", expert=EXPERTS, randomize=config)
    own = orchestra_envs.make("orchestra/Service-v0", expert=EXPERTS)
    real = {tool.name for tool in EXPERTS}
    num_experts = set()
    for seed in range(8):
        _, info = env.reset(seed=seed)
        assert info == env.reset(seed=seed, options={"replica": 2})[1]
        shown = {spec["function"]["name"]: spec for spec in json.loads(info["tools_json"])}
        before = {spec["function"]["name"]: spec for spec in json.loads(own.reset(seed=seed)[1]["tools_json"])}
        functions = set(before) - real
        assert functions
        assert all(shown[name] == before[name] for name in functions)
        assert not real & set(shown)
        num_experts.add(len(shown) - len(functions))
    assert num_experts == {1, 2, 3, 4}


def test_the_question_environment_takes_any_configuration(tmp_path):
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "4"}))
    randomize = {**EVERYTHING, "split": "test"}
    env = orchestra_envs.make(
        "orchestra/QA-v0", path=str(tmp_path / "questions.jsonl"), split=None, tools=TOOLS, randomize=randomize
    )
    observation, info = env.reset(seed=3)
    preference = json.loads(info["preference_json"])
    names = [spec["function"]["name"] for spec in json.loads(info["tools_json"])]
    assert set(preference["weights"]) == {*names, "outcome", "cost", "latency"}
    assert observation.endswith(preference["text"])
    alias = next(name for name in names if name.startswith(("adviser_", "helper-")))
    call = json.loads(env.step(render_call(ToolCall(alias, {})))[4]["calls_json"])[0]
    assert call["text"] in {tool.name for tool in EXPERTS}
    assert call["text"] in call["backend"].lower()


def test_a_changed_latency_is_what_the_records_say():
    """The market's experts state their own latency; it must follow what the policy is told."""
    for seed in range(5):
        records = []
        for spread in (1.0, 50.0):
            randomize = {"latency_spread": spread}
            env = orchestra_envs.make("orchestra/Market-v0", tools=["gpt-5"], randomize=randomize)
            _, info = env.reset(seed=seed)
            told = json.loads(info["tools_json"])[0]["latency_s"]
            call = json.loads(env.step(render_call(ToolCall("gpt-5", {})))[4]["calls_json"])[0]
            records.append((told, call["latency_s"]))
        (plain, measured), (told, scaled) = records
        assert told != plain
        assert scaled / measured == pytest.approx(told / plain)


class Shop(ToolEnv):
    """An environment that knows nothing of randomisation, with an async tool that wants its context."""

    def sample_task(self, rng, options):
        return Task("Who?", answer="me")

    def score(self, task, answer):
        return float(answer == task.answer)

    def episode_tools(self, task, rng):
        async def consult(context: CallContext, question: str = "") -> ToolResult:
            return ToolResult(f"{context.task.question} {question}", latency_s=2.0, output_tokens=1_000_000)

        return [function("get_order"), expert("gpt-5"), Tool("o-1", "O.", {"type": "object"}, consult, Price(), 1.0)]


def test_an_async_tool_with_context_works_under_alias_at_another_pace():
    env = Shop(
        randomize={
            "aliases": {"tools": ["o-1"]},
            "kinds": {"o-1": "expert"},
            "latency_spread": 5.0,
            "price_spread": 2.0,
        }
    )
    _, info = env.reset(seed=1)
    spec = json.loads(info["tools_json"])[-1]
    name = spec["function"]["name"]
    assert name != "o-1"
    observation, _, _, _, info = env.step(render_call(ToolCall(name, {})))
    call = json.loads(info["calls_json"])[0]
    assert observation.strip() == "Who?"
    assert (call["tool"], call["backend"]) == (name, "o-1")
    assert call["latency_s"] == pytest.approx(2.0 * spec["latency_s"])
    env.close()


def test_the_wish_is_in_the_first_observation():
    env = Shop(randomize={"preferences": {"kinds": ["prefer_tool"]}, "aliases": True})
    observation, info = env.reset(seed=0)
    preference = json.loads(info["preference_json"])
    assert observation == f"Who?\n\n{preference['text']}"
    favoured = [name for name, weight in preference["weights"].items() if weight == 1.0 and name != "outcome"]
    assert len(favoured) == 1
    assert favoured[0] in observation


# Texts written by a model beforehand.


def test_descriptions_written_by_a_model_name_nobody_and_feed_the_file(tmp_path):
    def answer(request):
        content = request["messages"][0]["content"]
        number = re.search(r"wording (\d)", content)[1]
        return f"As GPT-5 I am good,\nnumber {number}." if "failed at rhymes" in content else "The same."

    examples = [{"tool": "gpt-5", "task": "Rhyme.", "output": "failed at rhymes", "success": False}]
    with OpenAIServer(answer) as server:
        endpoint = Endpoint("writer", server.base_url, api_key_env=None)
        texts = write_descriptions(EXPERTS[:2], endpoint, examples, variants=3)
        assert len(server.requests) == 6
    assert texts["gpt-5"] == {
        "train": ["As it I am good, number 1.", "As it I am good, number 2."],
        "test": ["As it I am good, number 3."],
    }
    assert texts["gpt-5-mini"] == {"train": ["The same."], "test": []}  # equal texts once, and never in both splits
    file = tmp_path / "descriptions.json"
    file.write_text(json.dumps(texts))
    shown, _ = applied({"descriptions": {"file": str(file)}})
    assert shown[1].description in texts["gpt-5"]["train"]
    with pytest.raises(ValueError, match="num_test must be at least 0 and less than variants"):
        write_descriptions(EXPERTS, endpoint, variants=1, num_test=1)


def test_default_styles_of_aliases_are_split():
    assert set(UNSEEN_ALIAS_STYLES) < set(ALIAS_STYLES)
