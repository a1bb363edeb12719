"""Stop strings: found as `str.find` finds them in the whole text, however it is cut into tokens."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra_jax.sampler.stops import StopMatcher, held_back, tool_call_stop
from orchestra_jax.text.tokenizer import load_tokenizer
from tests.text.conftest import make_tokenizer

CHARS = "ab</>é€😀"
texts = st.text(CHARS, max_size=30)
stops = st.lists(st.text(CHARS, min_size=1, max_size=4), min_size=1, max_size=3)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The pieces between the given places; equal places make empty pieces."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(ends)]


def expected(pieces: list[bytes], stop_texts: list[str]) -> tuple[int, str] | None:
    """Token by token: the first after which the text contains a stop."""
    text = b"".join(pieces).decode()
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stop_texts if stop in text]
    if not ends:
        return None
    end, _, stop = min(ends)
    num_bytes = len(text[:end].encode())
    return next(n for n in range(len(pieces) + 1) if sum(map(len, pieces[:n])) >= num_bytes), stop


@given(texts, stops, st.lists(st.integers(0, 1000), max_size=20), st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_stops_are_found_where_the_whole_text_has_them(text, stop_texts, places, feeds):
    pieces = cut(text.encode(), places)
    matcher = StopMatcher(stop_texts, pieces.__getitem__)
    found, fed, rounds = None, 0, 0
    while found is None and fed < len(pieces):
        size = feeds[rounds % len(feeds)]
        found = matcher.feed(range(fed, min(fed + size, len(pieces))))
        if found:
            found = fed + found[0], found[1]
        fed, rounds = fed + size, rounds + 1
    assert found == expected(pieces, stop_texts)


def test_a_stop_over_three_tokens_and_two_feeds():
    tokens = [b"it is ", b"</to", b"ol_c", b"all>", b" more"]
    matcher = StopMatcher(["</tool_call>"], tokens.__getitem__)
    assert matcher.feed([0, 1]) is None
    assert matcher.feed([]) is None
    assert matcher.feed([2, 3, 4]) == (2, "</tool_call>")


def test_a_character_spread_over_tokens_is_matched():
    first, second, third = b"\xe2", b"\x82", b"\xac."
    matcher = StopMatcher(["€"], [first, second, third].__getitem__)
    assert matcher.feed([0, 1]) is None
    assert matcher.feed([2]) == (1, "€")


def test_of_stops_that_end_together_the_longest_counts():
    assert StopMatcher(["b", "ab", "xab"], [b"a", b"b"].__getitem__).feed([0, 1]) == (2, "ab")


def test_the_stop_that_ends_first_counts_even_within_one_token():
    assert StopMatcher(["long stop", "op"], [b"long stop"].__getitem__).feed([0]) == (1, "long stop")
    assert StopMatcher(["long stop", "st"], [b"long stop"].__getitem__).feed([0]) == (1, "st")


def test_without_stops_nothing_is_found():
    assert StopMatcher([], [b"x"].__getitem__).feed([0, 0]) is None


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""], bytes)


@given(texts, stops)
def test_held_back_is_the_longest_end_that_may_go_on_to_be_a_stop(text, stop_texts):
    begun = [n for stop in stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert held_back(text, stop_texts) == max(begun, default=0)


@given(texts, stops)
def test_what_is_shown_while_streaming_never_shows_any_of_a_stop(text, stop_texts):
    """Shown: all but what is held back, until a stop is there; then the text before it."""
    shown = 0
    for n in range(len(text) + 1):
        so_far = text[:n]
        starts = [so_far.find(stop) for stop in stop_texts if stop in so_far]
        if starts:
            assert shown <= min(starts)
            return
        shown = max(shown, n - held_back(so_far, stop_texts))
    assert shown <= len(text)


def test_the_end_of_a_tool_call_is_an_id_where_it_is_one_token():
    market = load_tokenizer("market")
    assert tool_call_stop(market) == ((market.added_tokens["</tool_call>"],), ())


def test_the_end_of_a_tool_call_is_a_text_where_it_is_several_tokens():
    tokenizer = make_tokenizer("smollm2")
    stop_ids, stop_texts = tool_call_stop(tokenizer)
    assert (stop_ids, stop_texts) == ((), ("</tool_call>",))
    turn = tokenizer.encode_text("<tool_call>\n{}\n</tool_call>")
    assert StopMatcher(stop_texts, tokenizer.token_bytes).feed([*turn, *turn]) == (len(turn), "</tool_call>")
