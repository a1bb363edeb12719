"""Tokens to deltas: nothing is sent too early, and the pieces are what the environments' parser makes of the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestra_envs.parse import ToolCall, parse_turn

from orchestra_jax.serve.reader import TurnReader

CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "a"}}\n</tool_call>'

# Pieces of turns, good and bad.
TAGS = ["<think>", "<tool_call>", "</tool_call>", CALL, "<think>r</think>", "<", "</", "<tool", "_call>", "think>"]
TEXTS = ["\n", " ", "  a ", "Ærø 東京", "\ufffd", "plain", "}", '{"name": ', '"', "\\", "[1]", "```json\n"]
CALLS = ['{"name": "x"}', '{"name": "x", "arguments": {"q": "</tool_call>"}}', '{"arguments": {}}']
PIECES = [*TAGS, *TEXTS, *CALLS, '{"name": "y", "parameters": {"q": "<tool_call>"}}']


def bytes_of(token: int) -> bytes:
    return bytes([token])


def read(text: str, cuts=(), *, truncated=False, **options):
    """The turn read in chunks that end at `cuts`, a byte a token; all deltas."""
    data, reader = text.encode(), TurnReader(bytes_of, **options)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    deltas = [reader.feed(data[start:end]) for start, end in pairwise(edges)]
    return [*deltas, reader.feed((), end=True, truncated=truncated)], reader


def joined(deltas):
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple(call for delta in deltas for call in delta.calls),
        tuple(error for delta in deltas for error in delta.errors),
    )


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    closes=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_pieces_are_what_the_environment_reads(pieces, closes, cuts):
    text = "".join(pieces)
    if closes:  # the prompt opened the reasoning, and the turn closes it
        text = f"thought {text.replace('</think>', '')}</think>{text}"
    parsed = parse_turn(text, reasoning_open=closes)
    deltas, _ = read(text, cuts, reasoning_open=closes)
    if _has_stray_close(text, closes):
        return
    *same, errors = joined(deltas)
    assert same == [parsed.reasoning, parsed.content, parsed.calls]
    assert [error.kind for error in errors] == [error.kind for error in parsed.errors]


def _has_stray_close(text: str, opened: bool) -> bool:
    """Whether a </think> closes nothing: the one case in which streams differ, see below."""
    reader_view = text
    while True:
        index = reader_view.find("</think>") if opened else reader_view.find("<think>")
        if index < 0:
            return "</think>" in reader_view
        if not opened and "</think>" in reader_view[:index]:
            return True
        reader_view = reader_view[index + (8 if opened else 7) :]
        opened = not opened


def test_a_close_that_nothing_opened_is_left_out():
    deltas, _ = read("a </think>b")
    assert joined(deltas) == ("", "a b", (), ())


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc<>/tool_call \n東", max_size=60),
    stops=st.lists(st.text("abc<東", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=8),
)
def test_stop_texts_do_not_depend_on_how_tokens_come(text, stops, cuts):
    whole, reader = read(text, stop_texts=stops)
    pieces, other = read(text, cuts, stop_texts=stops)
    assert joined(whole) == joined(pieces)
    assert reader.stop_text == other.stop_text
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert reader.finished == bool(ends)
    if ends:
        assert reader.num_read == len(text[: min(ends)].encode())
        before = text[: min(ends) - len(reader.stop_text)]
        assert joined(whole)[1] == parse_turn(before).content
    else:
        assert joined(whole)[1] == parse_turn(text).content


def test_nothing_is_sent_too_early():
    """After each byte, what was sent is a beginning of the final text, without half characters or markup."""
    text = f"<think>Hm, 東京.</think>\n\nÆrø <b> < tool\n{CALL}\nSTO STOP more"
    reader, sent = TurnReader(bytes_of, stop_texts=("STOP",)), ""
    for byte in text.encode():
        sent += reader.feed([byte]).content
        assert "Ærø <b> < tool\n\nSTO".startswith(sent)
    assert sent == "Ærø <b> < tool\n\nSTO"
    assert (reader.finished, reader.stop_text) == (True, "STOP")


def test_text_is_sent_as_soon_as_it_is_certain():
    reader = TurnReader(bytes_of, stop_texts=("END",))
    assert reader.feed(b"Hello E").content == "Hello"
    assert reader.feed(b"N").content == ""
    assert reader.feed(b"d <tool").content == " ENd"
    assert reader.feed(b" ").content == " <tool"


def test_of_two_stop_texts_the_one_that_is_complete_first_counts():
    for cuts in ((), (1,), (2,), (1, 2, 3)):
        deltas, reader = read("xabcd", cuts, stop_texts=("abcd", "bc", "c"))
        assert (joined(deltas)[1], reader.stop_text) == ("xa", "bc")


def test_a_stop_text_ends_a_call_that_is_complete():
    deltas, _ = read(f"{CALL} more", stop_texts=("\n</tool_call>",))
    assert joined(deltas)[2] == (ToolCall("search", {"q": "a"}),)


def test_a_call_that_was_cut_off_does_not_count():
    deltas, _ = read(CALL.removesuffix("</tool_call>"), truncated=True)
    _, content, calls, errors = joined(deltas)
    assert (content, calls) == ("", ())
    assert [error.kind for error in errors] == ["truncated_call"]


def test_one_call_is_enough():
    text = f"Look.\n{CALL}\n{CALL}"
    deltas, reader = read(text, one_call=True)
    assert joined(deltas)[1:3] == ("Look.", (ToolCall("search", {"q": "a"}),))
    assert reader.num_read == len(f"Look.\n{CALL}")


@pytest.mark.parametrize("reasoning_open", [True, False])
def test_reasoning_that_never_ends(reasoning_open):
    deltas, _ = read("think on " if reasoning_open else "<think>think on ", (3, 9), reasoning_open=reasoning_open)
    assert joined(deltas) == ("think on", "", (), ())
