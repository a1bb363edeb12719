"""The parser: one table of turns, the reported faults of other parsers (BR-..), properties on any text."""

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestra_envs.parse import (
    MAX_CALLS,
    MAX_DEPTH,
    ToolCall,
    decode_arguments,
    parse_turn,
    render_call,
    replace_surrogates,
)

A = '{"name":"a","arguments":{"i":1}}'
B = '{"name":"b","arguments":{"i":2}}'
CALL_A, CALL_B = ToolCall("a", {"i": 1}), ToolCall("b", {"i": 2})


def wrap(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def with_arguments(arguments: str) -> str:
    return wrap(f'{{"name":"a","arguments":{arguments}}}')


WELL_FORMED = {
    "one call": (wrap(A), [CALL_A], ""),
    "no line breaks": (f"<tool_call>{A}</tool_call>", [CALL_A], ""),
    "several calls keep their order": (wrap(A, B, A), [CALL_A, CALL_B, CALL_A], ""),
    "text before and after": (f"First.\n{wrap(A)}\nThen.", [CALL_A], "First.\n\nThen."),
    "BR-01 closing tag in a string": (
        '<tool_call>\n{"name":"save_note","arguments":{"text":"docs say </tool_call> ends it"}}\n</tool_call>',
        [ToolCall("save_note", {"text": "docs say </tool_call> ends it"})],
        "",
    ),
    "opening tag in a string": (with_arguments('{"t":"<tool_call>{}"}'), [ToolCall("a", {"t": "<tool_call>{}"})], ""),
    "reasoning tags in a string": (
        with_arguments('{"t":"<think>x</think>"}') + wrap(B),
        [ToolCall("a", {"t": "<think>x</think>"}), CALL_B],
        "",
    ),
    "closing tag in the name of an argument": (
        with_arguments('{"</tool_call>":1}'),
        [ToolCall("a", {"</tool_call>": 1})],
        "",
    ),
    "BR-03 two objects in one tag": (wrap(f"{A}\n{B}"), [CALL_A, CALL_B], ""),
    "two objects without a space": (wrap(A + B), [CALL_A, CALL_B], ""),
    "a list of calls": (wrap(f"[{A}, {B}]"), [CALL_A, CALL_B], ""),
    "closing tag missing at the end": (f"<tool_call>\n{A}", [CALL_A], ""),
    "closing tag missing, spaces at the end": (f"<tool_call>{A} \n\n", [CALL_A], ""),
    "closing tag missing before the next call": (f"<tool_call>{A}\n{wrap(B)}", [CALL_A, CALL_B], ""),
    "fence inside the tags": (f"<tool_call>\n```json\n{A}\n```\n</tool_call>", [CALL_A], ""),
    "fence around the tags": (f"```\n{wrap(A)}\n```", [CALL_A], "```\n\n```"),
    "a second closing tag": (wrap(A) + "</tool_call>", [CALL_A], ""),
    "BR-05 arguments absent": (wrap('{"name":"lookup"}'), [ToolCall("lookup", {})], ""),
    "null arguments": (with_arguments("null"), [ToolCall("a", {})], ""),
    "empty arguments": (with_arguments("{}"), [ToolCall("a", {})], ""),
    "empty string for arguments": (with_arguments('""'), [ToolCall("a", {})], ""),
    "arguments as a JSON string": (with_arguments(json.dumps('{"i": 1}')), [CALL_A], ""),
    "arguments encoded twice": (with_arguments(json.dumps(json.dumps('{"i": 1}'))), [CALL_A], ""),
    "null in a string": (with_arguments('"null"'), [ToolCall("a", {})], ""),
    "string value that looks like JSON stays a string": (
        with_arguments('{"body":"{\\"k\\": 1}"}'),
        [ToolCall("a", {"body": '{"k": 1}'})],
        "",
    ),
    "parameters for arguments": (wrap('{"name":"a","parameters":{"i":1}}'), [CALL_A], ""),
    "OpenAI's form": (
        wrap('{"id":"x","type":"function","function":{"name":"a","arguments":"{\\"i\\":1}"}}'),
        [CALL_A],
        "",
    ),
    "id, type and index are ignored": (wrap('{"id":"1","type":"f","index":0,' + A[1:]), [CALL_A], ""),
    "keys in another order": (wrap('{"arguments":{"i":1},"name":"a"}'), [CALL_A], ""),
    "nested values": (
        with_arguments('{"x":{"y":[1,{"z":[null,true,1.5,-2e3]}]}}'),
        [ToolCall("a", {"x": {"y": [1, {"z": [None, True, 1.5, -2000.0]}]}})],
        "",
    ),
    "numbers in strings stay strings": (with_arguments('{"i":"3"}'), [ToolCall("a", {"i": "3"})], ""),
    "a big integer is exact": (
        with_arguments('{"i":123456789012345678901234567890}'),
        [ToolCall("a", {"i": 123456789012345678901234567890})],
        "",
    ),
    "BR-10 unicode": (with_arguments('{"city":"Zürich 東京 🚲"}'), [ToolCall("a", {"city": "Zürich 東京 🚲"})], ""),
    "escaped unicode": (
        with_arguments('{"t":"Z\\u00fcrich \\ud83d\\udeb2"}'),
        [ToolCall("a", {"t": "Zürich 🚲"})],
        "",
    ),
    "lone surrogate": (with_arguments('{"t\\udc00":"x\\ud800"}'), [ToolCall("a", {"t\ufffd": "x\ufffd"})], ""),
    "escaped line breaks": (
        with_arguments('{"code":"a = 1\\nprint(\\"a\\")\\t\\\\n"}'),
        [ToolCall("a", {"code": 'a = 1\nprint("a")\t\\n'})],
        "",
    ),
    "a code fence in a string": (
        with_arguments('{"md":"```json\\n{}\\n```"}'),
        [ToolCall("a", {"md": "```json\n{}\n```"})],
        "",
    ),
    "windows line ends": (f"<tool_call>\r\n{A}\r\n</tool_call>\r\n", [CALL_A], ""),
    "JSON without tags is an answer": (A, [], A),
    "fenced JSON without tags is an answer": (f"```json\n{A}\n```", [], f"```json\n{A}\n```"),
    "other tags are text": ("<answer>4</answer> <tool_calls>", [], "<answer>4</answer> <tool_calls>"),
    "plain text": ("  42\n", [], "42"),
    "empty": ("", [], ""),
}


@pytest.mark.parametrize(("text", "calls", "content"), WELL_FORMED.values(), ids=WELL_FORMED)
def test_well_formed_turns(text, calls, content):
    turn = parse_turn(text)
    assert list(turn.calls) == calls
    assert turn.content == content
    assert turn.errors == ()
    assert turn.reasoning == ""


MALFORMED = {
    "BR-04 cut inside a string": ('<tool_call>\n{"name":"write_file","arguments":{"body":"hel', "truncated_call"),
    "cut after the tag": ("<tool_call>", "truncated_call"),
    "cut inside the name": ('<tool_call>{"na', "truncated_call"),
    "text after a call that is not closed": (f"<tool_call>{A}\nand so on", "truncated_call"),
    "BR-05 empty object": ("<tool_call>{}</tool_call>", "missing_name"),
    "empty tags": ("<tool_call></tool_call>", "malformed_json"),
    "blank tags": ("<tool_call> \n </tool_call>", "malformed_json"),
    "empty list": (wrap("[]"), "malformed_json"),
    "empty name": (wrap('{"name":" ","arguments":{}}'), "missing_name"),
    "name null": (wrap('{"name":null,"arguments":{}}'), "missing_name"),
    "name is a number": (wrap('{"name":3,"arguments":{}}'), "missing_name"),
    "name is an object": (wrap('{"name":{"a":1}}'), "missing_name"),
    "function is a string": (wrap('{"function":"a","arguments":{}}'), "missing_name"),
    "trailing comma": (with_arguments('{"i":1,}'), "malformed_json"),
    "single quotes": (wrap("{'name':'a','arguments':{'i':1}}"), "malformed_json"),
    "single quotes around a drafted call": (
        f"<tool_call>{{'name':'a','arguments':{{'t':'<tool_call>{B}</tool_call>'}}}}</tool_call>",
        "malformed_json",
    ),
    "no quotes": (wrap("{name: a, arguments: {}}"), "malformed_json"),
    "missing comma": (wrap('{"name":"a" "arguments":{}}'), "malformed_json"),
    "missing brace": (wrap('{"name":"a","arguments":{"i":1}'), "malformed_json"),
    "one brace too many": (wrap(A + "}"), "malformed_json"),
    "text before the object": (wrap("call: " + A), "malformed_json"),
    "text after the object": (wrap(A + " please"), "malformed_json"),
    "objects with a comma between": (wrap(f"{A},{B}"), "malformed_json"),
    "second object of a tag cut": (wrap(f'{A}{{"name":'), "malformed_json"),
    "raw line break in a string": (with_arguments('{"t":"a\nb"}'), "malformed_json"),
    "bad escape": (with_arguments('{"t":"\\d"}'), "malformed_json"),
    "Python literals": (with_arguments('{"t":True}'), "malformed_json"),
    "comment": (with_arguments('{"t":1 /* one */}'), "malformed_json"),
    "NaN": (with_arguments('{"x":NaN}'), "malformed_json"),
    "Infinity": (with_arguments('{"x":-Infinity}'), "malformed_json"),
    "a float out of range": (with_arguments('{"x":1e999}'), "malformed_json"),
    "an integer of 5000 digits": (with_arguments('{"x":%s}' % ("9" * 5000)), "malformed_json"),
    "a key twice": (with_arguments('{"i":1,"i":2}'), "malformed_json"),
    "name twice": (wrap('{"name":"a","name":"b","arguments":{}}'), "malformed_json"),
    "a string": (wrap('"a"'), "malformed_json"),
    "a number": (wrap("7"), "malformed_json"),
    "a function in Python": (wrap("a(i=1)"), "malformed_json"),
    "a function in XML": (wrap("<function=a><parameter=i>1</parameter></function>"), "malformed_json"),
    "too deep": (with_arguments('{"x":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH), "malformed_json"),
    "very deep": (with_arguments("[" * 200_000 + "]" * 200_000), "malformed_json"),
    "very deep, in a string": (with_arguments('"%s"' % ("[" * 200_000)), "bad_arguments"),
    "list arguments": (with_arguments("[1]"), "bad_arguments"),
    "number arguments": (with_arguments("3"), "bad_arguments"),
    "boolean arguments": (with_arguments("false"), "bad_arguments"),
    "string arguments that are no JSON": (with_arguments('"Oslo"'), "bad_arguments"),
    "string arguments that are a list": (with_arguments('"[1]"'), "bad_arguments"),
    "string arguments with text after": (with_arguments('"{} x"'), "bad_arguments"),
    "arguments encoded three times": (with_arguments(json.dumps(json.dumps(json.dumps("{}")))), "bad_arguments"),
    "both arguments and parameters": (wrap('{"name":"a","arguments":{},"parameters":{}}'), "bad_arguments"),
    "arguments beside the name": (wrap('{"name":"a","i":1}'), "bad_arguments"),
    "opening tag missing": (f"{A}\n</tool_call>", "unopened_call"),
}


@pytest.mark.parametrize(("text", "kind"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_run_nothing_and_say_why(text, kind):
    turn = parse_turn(text)
    assert turn.calls == ()
    assert turn.errors[0].kind == kind
    assert 5 < len(turn.errors[0].message) < 300


def test_a_malformed_pair_does_not_take_the_next_one_along():
    turn = parse_turn(wrap("{bad", B))
    assert turn.calls == (CALL_B,)
    assert [error.kind for error in turn.errors] == ["malformed_json"]


def test_errors_of_fields_concern_one_object_only():
    turn = parse_turn(wrap(f'{A}{{"arguments":{{}}}}{B}'))
    assert turn.calls == (CALL_A, CALL_B)
    assert [error.kind for error in turn.errors] == ["missing_name"]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{A}",
        f"<tool_call>{A}{B}",
        f'<tool_call>{A}{{"name":',
        '<tool_call>{"name":"write_file","arguments":{"path":"x.txt","body":"hel',
        '<tool_call>{"name":"a","arguments":{"t":"</tool_call>',
    ],
)
def test_br04_a_call_that_was_cut_off_never_runs(text):
    turn = parse_turn(text, truncated=True)
    assert turn.calls == ()
    assert turn.truncated
    assert turn.errors


def test_a_call_closed_before_the_cut_is_whole():
    turn = parse_turn(wrap(A) + "\nand th", truncated=True)
    assert (turn.calls, turn.errors, turn.content) == ((CALL_A,), (), "and th")


def test_br06_calls_in_reasoning_are_drafts():
    pay = '<tool_call>{"name":"pay","arguments":{"n":%d}}</tool_call>'
    turn = parse_turn(f"<think>maybe {pay % 1} hmm</think>\n{pay % 2}")
    assert turn.calls == (ToolCall("pay", {"n": 2}),)
    assert turn.reasoning == f"maybe {pay % 1} hmm"
    assert turn.content == ""
    assert parse_turn(f"maybe {pay % 1} hmm</think>\n{pay % 2}", reasoning_open=True) == turn


def test_broken_calls_in_reasoning_are_no_errors():
    turn = parse_turn("<think><tool_call>{bad</tool_call> <tool_call></think>42")
    assert (turn.calls, turn.errors, turn.content) == ((), (), "42")


def test_br08_reasoning_that_never_ends_has_no_content():
    text = "First compute 6*7, so 42 and then"
    turn = parse_turn(text, truncated=True, reasoning_open=True)
    assert (turn.reasoning, turn.content, turn.calls, turn.truncated) == (text, "", (), True)
    assert parse_turn(f"<think>{text}").reasoning == text
    assert parse_turn(f"<think>{text}").content == ""
    assert parse_turn(f"<think>{wrap(A)}").calls == ()


def test_a_closing_tag_without_an_opening_one_ends_reasoning():
    turn = parse_turn(f"so {wrap(A, '{bad')} </tool_call> no</think>{wrap(B)} 4")
    assert turn.calls == (CALL_B,)
    assert turn.errors == ()
    assert turn.content == "4"
    assert turn.reasoning.startswith("so <tool_call>")


def test_several_reasoning_blocks():
    turn = parse_turn(f"<think>one</think>1<think>two {wrap(A)}</think>{wrap(B)}2<think></think>")
    assert turn.reasoning == f"one\ntwo {wrap(A)}"
    assert turn.calls == (CALL_B,)
    assert turn.content == "12"


@pytest.mark.parametrize("prefix", ["", "<think>", "<think>\n"])
def test_an_opened_block_may_be_opened_again(prefix):
    turn = parse_turn(f"{prefix}hm</think>\n\n4", reasoning_open=True)
    assert (turn.reasoning, turn.content) == ("hm", "4")


def test_surrogates_in_the_text_are_replaced_or_joined():
    turn = parse_turn("a\ud800b \ud83d\udeb2")
    assert turn.content == "a\ufffdb 🚲"
    assert replace_surrogates("Zürich") == "Zürich"


def test_calls_beyond_the_limit_are_an_error():
    turn = parse_turn(wrap(*[A] * (MAX_CALLS + 5)))
    assert len(turn.calls) == MAX_CALLS
    assert [error.kind for error in turn.errors] == ["too_many_calls"]
    assert parse_turn(wrap(A * (MAX_CALLS + 1))).calls == ()
    assert len(parse_turn(wrap("{bad") * 1000).errors) == MAX_CALLS + 1


def test_br09_arguments_in_the_form_of_the_wire():
    assert decode_arguments('{"city": "Oslo"}') == decode_arguments({"city": "Oslo"}) == {"city": "Oslo"}
    assert decode_arguments(None) == decode_arguments("") == decode_arguments("null") == {}
    for wrong in ("Oslo", "[1]", "3", [1], 3, True):
        with pytest.raises(ValueError, match=r"object|Expecting"):
            decode_arguments(wrong)


def test_a_call_is_written_as_qwen_writes_it():
    text = render_call(ToolCall("lookup", {"city": "Zürich 東京 🚲", "n": [1, None]}))
    expected = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Zürich 東京 🚲", "n": [1, null]}}\n</tool_call>'
    assert text == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, {"x": object()}, b"x"])
def test_what_is_not_json_cannot_be_written(value):
    with pytest.raises(ValueError, match="arguments of 'a'"):
        render_call(ToolCall("a", {"x": value}))


def test_a_call_too_deep_to_be_read_cannot_be_written():
    nested: dict = {}
    for _ in range(MAX_DEPTH):
        nested = {"x": nested}
    with pytest.raises(ValueError, match="nested"):
        render_call(ToolCall("a", nested))


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["</tool_call>", "<tool_call>{", "<think>", "</think>", '"}}', "\\", "```"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
tool_calls = st.builds(ToolCall, texts.filter(str.strip), st.dictionaries(texts, values, max_size=5))


@given(st.lists(tool_calls, max_size=4), st.sampled_from(["", "<think>x</think>", "Text. "]))
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_back(calls, before):
    turn = parse_turn(before + "\n".join(map(render_call, calls)))
    assert turn.calls == tuple(calls)
    assert turn.errors == ()


pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        A,
        B,
        '{"name":',
        '"',
        "{",
        "}",
        "[",
        "]",
        "\\",
        "```",
        "\ud800",
    ]
) | st.text(max_size=5)


@given(st.lists(pieces, max_size=25).map("".join), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_text_can_be_parsed(text, truncated, reasoning_open):
    turn = parse_turn(text, truncated=truncated, reasoning_open=reasoning_open)
    (turn.reasoning + turn.content).encode()
    json.dumps([call.arguments for call in turn.calls], allow_nan=False)
    if "<tool_call>" in text and "think>" not in text and not reasoning_open:
        assert turn.calls or turn.errors


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"</tool_call>',
        '<tool_call>["",",</tool_call>',
        f"<tool_call>{A}",
        "<think>",
        "</think>",
        "<think></think>",
        "<think></think></think>",
        "<",
        '{"a":',
        " ",
        "\ud800",
    ],
)
def test_time_is_linear_in_the_length(unit):
    for prefix in ("", "<tool_call>", "<tool_call>{", '<tool_call>{"name":"a","arguments":'):
        start = time.perf_counter()
        parse_turn(prefix + unit * 100_000)
        assert time.perf_counter() - start < 3.0  # a quadratic parser takes minutes
