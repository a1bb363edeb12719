"""Keys of recorded calls: RFC 8785's own examples, and what makes two calls the same."""

import json
import struct

import pytest
from orchestra_envs import tool
from orchestra_envs.traces.keys import call_key, canonical, canonical_arguments, schema_hash


@tool
def search(query: str, top_k: int = 3, site: str | None = None) -> str:
    """Search."""
    return query


# RFC 8785, section 3.2.


def test_the_rfcs_example_of_literals_numbers_and_strings():
    source = r"""{
      "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
      "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
      "literals": [null, true, false]
    }"""
    expected = (
        r'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r'"string":"€$\u000f\nA' + r"'" + r'B\"\\\\\"/"}'
    )
    assert canonical(json.loads(source)) == expected


def test_the_rfcs_example_of_sorting():
    source = json.loads(
        r'{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",'
        r'"\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control",'
        r'"\u00f6": "Latin Small Letter O With Diaeresis"}'
    )
    expected = ["Carriage Return", "One", "Control", "Latin Small Letter O With Diaeresis", "Euro Sign"]
    expected += ["Emoji: Grinning Face", "Hebrew Letter Dalet With Dagesh"]
    assert list(json.loads(canonical(source)).values()) == expected


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_the_rfcs_numbers_of_appendix_b(bits, expected):
    assert canonical(struct.unpack(">d", bytes.fromhex(bits))[0]) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": object()}, {"a": {1, 2}}])
def test_what_is_no_json_is_told(value):
    with pytest.raises(ValueError, match="RFC 8785"):
        canonical(value)


def test_deep_nesting_is_told_and_not_a_crash():
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match="nested deeper"):
        canonical(value)


def test_large_whole_numbers_keep_their_digits():
    big = 2**60 + 1
    text = canonical({"id": big, "n": -big, "s": str(big), "ok": 2**53 - 1})
    assert json.loads(text) == {"id": big, "n": -big, "s": str(big), "ok": 2**53 - 1}
    assert canonical(big) != canonical(big - 1)


def test_lone_surrogates_become_the_replacement_character():
    assert canonical({"a\ud800": "\udfff!"}) == '{"a\ufffd":"\ufffd!"}'


# Keys.


def test_defaults_are_filled_in_and_order_and_number_form_do_not_matter():
    spec = search.spec()
    full = canonical_arguments(spec, {"site": None, "top_k": 3.0, "query": "Oslo"})
    assert canonical_arguments(spec, {"query": "Oslo"}) == full
    assert json.loads(full) == {"query": "Oslo", "site": None, "top_k": 3}
    assert canonical_arguments(None, {"query": "Oslo"}) == '{"query":"Oslo"}'
    assert canonical_arguments(spec, {"query": "Oslo", "top_k": 4}) != full


def test_defaults_within_nested_objects_lists_and_references():
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}, "mode": {"$ref": "#/$defs/Mode"}},
        "$defs": {
            "Item": {"type": "object", "properties": {"count": {"type": "integer", "default": 1}}},
            "Mode": {"type": "string", "default": "fast"},
        },
    }
    spec = {"name": "order", "parameters": schema}
    assert json.loads(canonical_arguments(spec, {"items": [{}, {"count": 2}]})) == {
        "items": [{"count": 1}, {"count": 2}],
        "mode": "fast",
    }


def test_the_schema_hash_does_not_hear_the_wording_or_the_price_but_the_types():
    spec = search.spec()
    reworded = json.loads(json.dumps(spec))
    reworded["price"]["per_call_usd"] = 5.0
    reworded["function"]["description"] = "Finds things."
    reworded["function"]["parameters"]["properties"]["query"]["description"] = "What to look for"
    assert schema_hash(reworded) == schema_hash(spec) == schema_hash(spec["function"])
    reworded["function"]["parameters"]["properties"]["top_k"]["default"] = 5
    assert schema_hash(reworded) != schema_hash(spec)
    assert schema_hash(None) == schema_hash({"name": "unknown"}) == ""


def test_an_argument_that_is_named_like_a_word_of_the_schema_counts():
    one = {"parameters": {"type": "object", "properties": {"description": {"type": "string"}}}}
    other = {"parameters": {"type": "object", "properties": {}}}
    assert schema_hash(one) != schema_hash(other)


def test_everything_that_makes_a_call_another_one_is_in_the_key():
    call = {"tool": "search", "arguments": "{}", "schema_hash": "s", "backend": "b", "state_hash": None, "ordinal": 0}
    changes = [
        {"tool": "find"},
        {"arguments": '{"a":1}'},
        {"schema_hash": ""},
        {"backend": "other model"},  # the same arguments to another model: another call
        {"state_hash": "x"},
        {"state_hash": ""},
        {"ordinal": 1},
    ]
    keys = {call_key(**call), *(call_key(**{**call, **change}) for change in changes)}
    assert len(keys) == 1 + len(changes)
    assert call_key(**call) == call_key(**call)
