"""Grammar-constrained tool calls: whatever is sampled under the mask parses and validates; nothing valid is masked."""

import json
import random
import sys
from functools import cache
from typing import Literal

import gymnasium as gym
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestra_envs import ToolCall, render_call, tool
from orchestra_envs.parse import CALL_CLOSE, CALL_OPEN, MAX_CALLS, THINK_CLOSE, THINK_OPEN, parse_turn
from pydantic import BaseModel

from orchestra_jax.sampler.grammar import tool_call_grammar
from orchestra_jax.text.tokenizer import Tokenizer
from tests.text import conftest as text_conftest

pytest.importorskip("llguidance", reason="needs the extra `grammar`")

# The tags are added tokens in "market" and "qwen3", plain text in "smollm2" and "llama3".
NAMES = ("market", "qwen3", "smollm2", "llama3")
tokenizer_of = cache(text_conftest.make_tokenizer)


def function(name: str, properties: dict, required: tuple[str, ...] = (), **more) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "description": "What it does.", "parameters": schema}}


NODE = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "maxLength": 5},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
    },
    "required": ["label"],
}
TOOLS = [
    function(
        "search",
        {
            "limit": {"type": "integer", "minimum": 1},
            "query": {"type": "string"},
            "kinds": {"type": "array", "items": {"enum": ["web", "né", 3]}, "minItems": 1},
            "weight": {"type": "number"},
            "deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
        },
        required=("query",),
    ),
    function("now", {}),
    function(
        "plant",
        {
            "tree": {"$ref": "#/$defs/Node"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
            "count": {"type": ["integer", "string"]},
            "extra": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"const": "x"}],
                "minItems": 2,
                "items": False,
            },
            "when": {"type": "string", "format": "date"},
            "path": {"type": "string", "format": "path"},
        },
        required=("code", "tree"),
        **{"$defs": {"Node": NODE}},
    ),
]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}


def allowed_ids(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def is_allowed(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def follow(matcher, tokens: list[int]) -> int:
    """How many of the tokens the masks allow, one after the other."""
    for number, token in enumerate(tokens):
        if not is_allowed(matcher.mask(), token):
            return number
        matcher.accept(token)
    return len(tokens)


def fits(text: str, model: str = "qwen3", tools=TOOLS, **options) -> bool:
    """Whether a whole turn is possible, in plain tokens and with its tags as added tokens."""
    tokenizer = tokenizer_of(model)
    start = tool_call_grammar(tokenizer, tools, **options)
    verdicts = set()
    for ids in (tokenizer.encode_text(text), tokenizer.encode_markup(text)):
        verdicts.add(follow(start(), [*ids, tokenizer.eos_ids[0]]) == len(ids) + 1)
    assert len(verdicts) == 1, "the spelling in tokens makes a difference"
    return verdicts.pop()


def call(arguments: dict, name: str = "search") -> str:
    return render_call(ToolCall(name, arguments))


QUERY = call({"query": "x"})
NOW = call({}, "now")


# --- What can be written -----------------------------------------------------------------------------------------

DRAWN = (*[CALL_OPEN] * 5, THINK_OPEN, THINK_CLOSE, CALL_CLOSE, "tool_call", "<", "é", '"', '", "', "}", "]", "1")


def walk(matcher, tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> list[int] | None:
    """A turn by tokens drawn from the mask, with a liking for tags; None if it came to no end."""
    tokens: list[int] = []
    plan: list[int] = []
    while len(tokens) < num_tokens + 1500:
        mask = matcher.mask()
        assert matcher.may_end() == all(is_allowed(mask, stop) for stop in tokenizer.eos_ids)
        ids = allowed_ids(mask)
        assert len(ids), "a dead end"
        ending = len(tokens) > num_tokens
        if not plan and rng.random() < (0.7 if ending else 0.2):
            encode = rng.choice([tokenizer.encode_text, tokenizer.encode_markup])
            plan = encode(rng.choice(DRAWN))
        if ending and matcher.may_end():
            token = rng.choice(tokenizer.eos_ids)
        elif plan and is_allowed(mask, plan[0]):
            token = plan.pop(0)
        else:
            plan, token = [], int(rng.choice(ids))
        matcher.accept(token)
        if token in tokenizer.eos_ids:
            return tokens
        tokens.append(token)
    return None


@pytest.mark.parametrize("options", [{}, {"required": True}, {"parallel": False}, {"reasoning_open": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_sampled_parses_and_validates(name, options):
    tokenizer = tokenizer_of(name)
    start = tool_call_grammar(tokenizer, TOOLS, **options)
    rng = random.Random(f"{name} {options}")
    turns = [walk(start(), tokenizer, rng, rng.choice([20, 100, 200])) for _ in range(50)]
    ended = [tokenizer.decode(turn) for turn in turns if turn is not None]
    assert len(ended) > 40
    num_calls = []
    for text in ended:
        parsed = parse_turn(text, reasoning_open=options.get("reasoning_open", False))
        assert not parsed.errors, text
        for made in parsed.calls:
            jsonschema.Draft202012Validator(SCHEMAS[made.name]).validate(made.arguments)
        num_calls.append(len(parsed.calls))
        if options.get("required"):
            assert parsed.calls, text
            assert text.rstrip().endswith(CALL_CLOSE), text
    assert sum(num_calls) > 5
    if options.get("parallel") is False:
        assert max(num_calls) == 1
    elif not options:
        assert max(num_calls) > 1


def test_control_tokens_are_never_allowed_but_where_the_turn_ends():
    tokenizer = tokenizer_of("qwen3")
    matcher = tool_call_grammar(tokenizer, TOOLS)()
    tags = {CALL_OPEN, THINK_OPEN}
    added = {token for token, i in tokenizer.added_tokens.items() if is_allowed(matcher.mask(), i)}
    assert added == {"<|im_end|>", "<|endoftext|>", *tags}
    follow(matcher, tokenizer.encode_markup(CALL_OPEN + '\n{"name": "search", "arguments": {"query": "'))
    added = {token for token, i in tokenizer.added_tokens.items() if is_allowed(matcher.mask(), i)}
    assert added == {CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE}, "tags in a JSON string are text"


def test_only_the_given_stop_ids_end_a_turn():
    tokenizer = tokenizer_of("qwen3")
    end = tokenizer.added_tokens["<|im_end|>"]
    mask = tool_call_grammar(tokenizer, TOOLS, stop_ids=(end,))().mask()
    assert is_allowed(mask, end)
    assert not is_allowed(mask, tokenizer.added_tokens["<|endoftext|>"])


def test_after_the_end_only_stop_ids_are_left():
    tokenizer = tokenizer_of("qwen3")
    matcher = tool_call_grammar(tokenizer, TOOLS)()
    matcher.accept(tokenizer.eos_ids[0])
    assert set(allowed_ids(matcher.mask())) == set(tokenizer.eos_ids)


# --- What must not be masked -------------------------------------------------------------------------------------

ALL_BYTES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x7f"), max_size=12)
ARGUMENTS = st.fixed_dictionaries(
    {"query": ALL_BYTES | st.sampled_from([CALL_CLOSE, "<think>", "\\", '"', "\u2028\n\t\x00", "😀"])},
    optional={
        "limit": st.integers(1, 10**18),
        "kinds": st.lists(st.sampled_from(["web", 3]), min_size=1, max_size=3),
        "weight": st.integers(-9, 9) | st.floats(-1e16, 1e16, allow_subnormal=False).filter(lambda x: abs(x) > 1e-80),
        "deep": st.sampled_from([True, False, None]),
    },
)
PROSE = st.text(max_size=20).filter(lambda text: not any(tag in text for tag in (CALL_OPEN, CALL_CLOSE, "think>")))
TREE = {"label": "a", "children": [{"label": "é"}, {"children": [], "label": ""}]}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), PROSE, ARGUMENTS, st.randoms(use_true_random=False), st.sampled_from([None, 2]))
def test_a_valid_call_is_never_masked_however_it_is_cut(name, prose, arguments, rng, indent):
    """The tokenizer's own cuts, with and without added tokens, and any other; properties in any order."""
    tokenizer = tokenizer_of(name)
    shuffled = dict(rng.sample(sorted(arguments.items()), len(arguments)))
    body = json.dumps({"name": "search", "arguments": shuffled}, ensure_ascii=rng.random() < 0.5, indent=indent)
    turn = f"<think>{prose}{CALL_OPEN}</think>{prose}{CALL_OPEN}\n{body}\n{CALL_CLOSE}"
    plain = tokenizer.encode_text(turn)
    turn = tokenizer.decode(plain)  # the market's vocabulary lacks some bytes
    start = tool_call_grammar(tokenizer, TOOLS)
    for ids in (plain, tokenizer.encode_markup(turn), cut_at_random(tokenizer, turn.encode(), rng)):
        assert tokenizer.decode(ids) == turn
        matcher = start()
        reached = follow(matcher, ids)
        assert reached == len(ids), tokenizer.decode(ids[: reached + 1])
        assert matcher.may_end()


@cache
def vocabulary(tokenizer: Tokenizer) -> dict[bytes, int]:
    tags = {CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE}
    control = {i for token, i in tokenizer.added_tokens.items() if token not in tags}
    return {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in control}


def cut_at_random(tokenizer: Tokenizer, data: bytes, rng: random.Random) -> list[int]:
    known, ids, begin = vocabulary(tokenizer), [], 0
    while begin < len(data):
        ends = [end for end in range(begin + 1, min(begin + 24, len(data)) + 1) if data[begin:end] in known]
        end = rng.choice(ends)
        ids.append(known[data[begin:end]])
        begin = end
    return ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "turn",
    [
        "",
        "Answer: 3 < 4 > 2, {} and [tool_call] are no calls. ünïcödé 😀",
        "I could use a tool_call, or <tool_cal, or <tool call>, or < tool_call>.",
        f"<think>A {CALL_OPEN} would look like {QUERY} or {CALL_CLOSE}; tool_call it.</think>No call.",
        f"<think></think><think>\n</think>{QUERY}",
        QUERY,
        f"First this: {QUERY} then that.",
        f"{QUERY}\n{NOW}\n<think>more</think>{QUERY}",
        f'{CALL_OPEN}{{"name":"now","arguments":{{}}}}{CALL_CLOSE}',
        call({"code": "AB-12", "tree": TREE, "extra": {"k": True}, "pair": [1, "x"]}, "plant"),
        call({"tree": TREE, "count": "3", "when": "2026-01-31", "path": "/any", "code": "ZZ-0"}, "plant"),
        NOW * MAX_CALLS,
    ],
)
def test_good_turns_fit(name, turn):
    assert not parse_turn(turn).errors
    assert fits(turn, name)


@pytest.mark.parametrize(
    "turn",
    [
        call({"query": "x"}, "sarch"),
        call({}),
        call({"query": 3}),
        call({"query": "x", "limit": 0}),
        call({"query": "x", "limit": 1.5}),
        call({"query": "x", "kinds": []}),
        call({"query": "x", "kinds": ["tv"]}),
        call({"query": "x", "unknown": 1}),
        call({"query": "x", "deep": "yes"}),
        call({"code": "AB-", "tree": TREE}, "plant"),
        call({"code": "AB-1", "tree": {"label": "a", "children": [{}]}}, "plant"),
        call({"code": "AB-1", "tree": {"label": "toolong"}}, "plant"),
        call({"code": "AB-1", "tree": TREE, "extra": {"k": True, "l": True}}, "plant"),
        call({"code": "AB-1", "tree": TREE, "when": "tomorrow"}, "plant"),
        call({"now": 1}, "now"),
        '<tool_call>\n{"name": "search", "arguments": {"query": "x", "query": "y"}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"query": "x",}}\n</tool_call>',
        "<tool_call>\n{'name': 'now', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"name": "now", "arguments": {}} yes\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n',
        "<tool_call>\n</tool_call>",
        "<tool_call>",
        f"{CALL_CLOSE} first",
        f"stray {THINK_CLOSE}",
        "<think>never closed",
        NOW * (MAX_CALLS + 1),
    ],
)
def test_bad_turns_do_not_fit(turn):
    assert not fits(turn)


def test_white_space_does_not_go_on_for_ever():
    tokenizer = tokenizer_of("qwen3")
    matcher = tool_call_grammar(tokenizer, TOOLS)()
    follow(matcher, tokenizer.encode_markup(CALL_OPEN))
    blank = tokenizer.encode_text(" ")[0]
    assert follow(matcher, [blank] * 1000) < 100


def test_a_number_does_not_go_on_for_ever():
    tokenizer = tokenizer_of("qwen3")
    for argument in ("limit", "weight"):
        matcher = tool_call_grammar(tokenizer, TOOLS)()
        head = tokenizer.encode_text(f'{CALL_OPEN}{{"name": "search", "arguments": {{"{argument}": ')
        assert follow(matcher, head) == len(head)
        assert follow(matcher, tokenizer.encode_text("1") * 1000) < 20


# --- Options -----------------------------------------------------------------------------------------------------


def test_required_needs_a_call_and_ends_with_it():
    assert fits(f"Let me see. <think>tool?</think>{QUERY}\n{NOW}\n", required=True)
    assert not fits("", required=True)
    assert not fits("Answer: 3", required=True)
    assert not fits(f"<think>{QUERY}</think>", required=True)
    assert not fits(f"{QUERY} done", required=True)


def test_without_parallel_there_is_one_call():
    assert fits(f"so {QUERY} there", parallel=False)
    assert fits("no call", parallel=False)
    assert not fits(QUERY + NOW, parallel=False)
    assert not fits(QUERY + NOW, parallel=False, required=True)
    assert fits(f"<think>{QUERY}</think>{NOW}", parallel=False, required=True)


def test_a_name_leaves_one_tool():
    assert fits(NOW, name="now", required=True)
    assert not fits(QUERY, name="now", required=True)
    assert fits("no call", name="now")


def test_without_tools_no_call_can_be_written():
    assert fits("a tool_call <think>it</think> is not made", tools=[])
    assert not fits(QUERY, tools=[])
    assert not fits(f"{CALL_OPEN} ", tools=[])


def test_open_reasoning_must_be_closed_first():
    assert fits(f"hm {QUERY}</think>{NOW}", reasoning_open=True)
    assert not fits("the answer", reasoning_open=True)
    assert not fits(f"hm</think>{QUERY}", reasoning_open=True, name="now")


# --- Rows, masks, errors -----------------------------------------------------------------------------------------


def test_rows_share_a_grammar_and_nothing_else():
    tokenizer = tokenizer_of("market")
    start = tool_call_grammar(tokenizer, TOOLS)
    first, second = start(), start()
    ids = tokenizer.encode_markup(QUERY)
    assert follow(first, ids[:5]) == 5
    copy = first.copy()
    assert follow(first, ids[5:]) == len(ids) - 5
    assert follow(copy, ids[5:]) == len(ids) - 5
    assert follow(second, ids) == len(ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_has_a_bit_for_each_token_and_no_more(name):
    tokenizer = tokenizer_of(name)
    matcher = tool_call_grammar(tokenizer, TOOLS)()
    for token in tokenizer.encode_markup(QUERY):
        mask = matcher.mask()
        assert mask.dtype == np.uint32
        assert mask.shape == (-(-tokenizer.vocab_size // 32),)
        assert allowed_ids(mask)[-1] < tokenizer.vocab_size
        matcher.accept(token)


def test_tokens_of_equal_bytes_are_allowed_alike():
    definition = json.loads(json.dumps(text_conftest.CHATML))
    twin = text_conftest.NUM_PLAIN + 20  # ids between are no tokens
    definition["model"]["vocab"][CALL_OPEN] = twin
    tokenizer = Tokenizer(definition, text_conftest.CHATML_CONFIG)
    definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] != CALL_OPEN]
    mask = tool_call_grammar(Tokenizer(definition, text_conftest.CHATML_CONFIG), TOOLS)().mask()
    assert is_allowed(mask, twin)
    assert not any(is_allowed(mask, i) for i in range(text_conftest.NUM_PLAIN + 9, twin))
    assert tokenizer.added_tokens[CALL_OPEN] != twin


def test_a_token_that_is_not_allowed_is_refused():
    tokenizer = tokenizer_of("qwen3")
    matcher = tool_call_grammar(tokenizer, TOOLS)()
    with pytest.raises(ValueError, match="not allowed"):
        matcher.accept(tokenizer.added_tokens["<|im_start|>"])
    with pytest.raises(ValueError, match="grammar: "):
        matcher.mask()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, r"parameters\.a: .*uniqueItems"),
        ({"type": "string", "pattern": "(?=x)y"}, r"parameters\.a: .*look-around"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, r"parameters\.a\.anyOf\[1\]: .*not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, r"parameters\.a: .*oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"parameters\.a: .*greater than maximum"),
        ({"$ref": "#/$defs/Gone"}, r"parameters\.a: \$ref '#/\$defs/Gone' leads nowhere"),
        ({"$ref": "https://example.org/schema"}, r"parameters\.a: \$ref .* only references within"),
        (False, r"parameters\.a: false"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema, message):
    with pytest.raises(ValueError, match=f"^tool 'odd': {message}"):
        tool_call_grammar(tokenizer_of("qwen3"), [*TOOLS, function("odd", {"a": schema})])


def test_what_is_asked_for_must_be_there():
    tokenizer = tokenizer_of("qwen3")
    with pytest.raises(ValueError, match="there is no tool 'gone'; tools: search, now, plant"):
        tool_call_grammar(tokenizer, TOOLS, name="gone")
    with pytest.raises(ValueError, match="required, but there are no tools"):
        tool_call_grammar(tokenizer, [], required=True)
    with pytest.raises(ValueError, match=r"tools\[0\]"):
        tool_call_grammar(tokenizer, [{"type": "function", "function": {}}])
    with pytest.raises(ValueError, match="JSON schema of an object"):
        tool_call_grammar(tokenizer, [{"function": {"name": "x", "parameters": {"type": "string"}}}])


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'orchestra-jax\[grammar\]'"):
        tool_call_grammar(tokenizer_of("qwen3"), TOOLS)


# --- Tools as they come ------------------------------------------------------------------------------------------


class Stop(BaseModel):
    """A place on the way."""

    city: str
    nights: int = 1


@tool
def travel(stops: list[Stop], mode: Literal["train", "bus"], budget_eur: float | None = None, notes: str = "") -> str:
    """Book a journey."""
    return "booked"


def test_tools_of_functions_have_their_properties_in_any_order():
    specs = [json.loads(travel.spec_json)]  # sorted by name
    for order in (("mode", "stops"), ("stops", "mode"), ("notes", "stops", "budget_eur", "mode")):
        values = {"mode": "bus", "stops": [{"nights": 2, "city": "Oslo"}], "budget_eur": None, "notes": "née"}
        arguments = {key: values[key] for key in order}
        assert not travel.argument_error(arguments)
        assert fits(call(arguments, "travel"), tools=specs)
    assert not fits(call({"mode": "bus", "stops": [{"nights": 2}]}, "travel"), tools=specs)


def test_references_mean_what_they_mean_in_their_own_tool():
    def one(name: str, kind: str) -> dict:
        return function(name, {"a": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": {"type": kind}}})

    tools = [one("number", "integer"), one("text", "string")]
    assert fits(call({"a": 1}, "number"), tools=tools)
    assert fits(call({"a": "1"}, "text"), tools=tools)
    assert not fits(call({"a": 1}, "text"), tools=tools)


def test_the_tools_of_a_market_are_callable():
    env = gym.make("orchestra/Market-v0")
    _, info = env.reset(seed=3)
    tools = json.loads(info["tools_json"])
    for spec in tools:
        assert fits(call({}, spec["function"]["name"]), "market", tools)
    env.close()
