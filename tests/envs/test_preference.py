"""The preference score against hand-made vectors, and random preferences in words."""

import json

import numpy as np
import pytest
from orchestra_envs.live.chat import Endpoint
from orchestra_envs.preference import (
    PREFERENCE_KINDS,
    draw_preference,
    preference_score,
    preference_vector,
    read_written_preferences,
    sample_preference,
    wordings,
    write_preferences,
)
from orchestra_envs.tools import Price, Tool

from .servers.openai_server import OpenAIServer

TOOLS = ("calculator", "search", "gpt-5")

# (measured, reference, weights, correct, expected), worked out from appendix L of arXiv 2511.21689.
CASES = {
    "cents and minutes": (
        {"t1": 2, "t2": 0, "outcome": 1, "cost": 5.0, "latency": 2.0},
        {"t1": 1, "t2": 3, "outcome": 0, "cost": 20.0, "latency": 5.0},
        {"t1": 1, "t2": 0, "outcome": 1, "cost": 1, "latency": 0.5},
        True,
        8.25,
    ),
    "below the floor of one": (
        {"t1": 2, "t2": 0, "outcome": 1, "cost": 0.05, "latency": 2.0},
        {"t1": 1, "t2": 3, "outcome": 0, "cost": 0.2, "latency": 5.0},
        {"t1": 1, "t2": 0, "outcome": 1, "cost": 1, "latency": 0.0},
        True,
        3.2,
    ),
    "wrong answer": (
        {"t1": 2, "t2": 0, "outcome": 0, "cost": 5.0, "latency": 2.0},
        {"t1": 1, "t2": 3, "outcome": 1, "cost": 20.0, "latency": 5.0},
        {"t1": 1, "t2": 1, "outcome": 1, "cost": 1, "latency": 1},
        False,
        0.0,
    ),
}
PRINTED = (
    {"t1": 2, "t2": 0, "outcome": 1, "cost": -0.05, "latency": -120},
    {"t1": 1, "t2": 3, "outcome": 0, "cost": -0.2, "latency": -300},
    {"t1": 1, "t2": 0, "outcome": 1, "cost": 1, "latency": 0},
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_score_of_worked_cases(case):
    measured, reference, weights, correct, expected = case
    assert preference_score(measured, reference, weights, correct=correct) == pytest.approx(expected)


def test_printed_signs_only_on_request():
    assert preference_score(*PRINTED, correct=True, signs="printed") == pytest.approx(2.8)
    with pytest.raises(ValueError, match=r"measured\['cost'\]: expected a positive"):
        preference_score(*PRINTED, correct=True)
    with pytest.raises(ValueError, match="as printed"):
        preference_score(*CASES["cents and minutes"][:3], correct=True, signs="printed")


def test_cheaper_and_quicker_scores_higher():
    weights = {"cost": 1.0, "latency": 1.0}
    reference = preference_vector({"gpt-5": 1}, 1.0, cost_usd=0.05, latency_s=120.0)
    dear = preference_vector({"gpt-5": 1}, 1.0, cost_usd=0.04, latency_s=100.0)
    cheap = preference_vector({"search": 1}, 1.0, cost_usd=0.02, latency_s=70.0)
    assert preference_score(cheap, reference, weights, correct=True) > preference_score(
        dear, reference, weights, correct=True
    )


def test_vector_is_in_cents_and_minutes():
    assert preference_vector({"search": 2}, 1, cost_usd=0.05, latency_s=90.0) == {
        "search": 2.0,
        "outcome": 1.0,
        "cost": pytest.approx(5.0),
        "latency": 1.5,
    }


def test_words_determine_the_weights_and_held_out_words_are_new():
    seen: dict[bool, dict[str, dict]] = {False: {}, True: {}}
    for held_out, meanings in seen.items():
        for seed in range(400):
            preference = draw_preference(np.random.default_rng(seed), TOOLS, held_out=held_out)
            assert meanings.setdefault(preference.text, preference.weights) == preference.weights
            assert set(preference.weights) == {*TOOLS, "outcome", "cost", "latency"}
            assert all(0 <= weight <= 1 for weight in preference.weights.values())
            favoured = {name for name in TOOLS if preference.weights[name] > 0}
            assert favoured == {name for name in TOOLS if name in preference.text}
    assert len(seen[False]) > 20
    assert not set(seen[False]) & set(seen[True])


@pytest.mark.parametrize("kind", PREFERENCE_KINDS)
def test_every_kind_says_its_weights_and_names_its_tools(kind):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        preference = sample_preference(rng, ("shop", *TOOLS), candidates=TOOLS, on_premise=["search"], kinds=[kind])
        weights = {name: preference.weights[name] for name in TOOLS}
        named = {name for name in TOOLS if name in preference.text}
        favoured = {name for name, weight in weights.items() if weight > 0}
        if "avoid" in kind:
            assert len(named) == 1
            assert favoured == set(TOOLS) - named
            assert sum(weights.values()) == pytest.approx(1.0)
        else:
            assert favoured == named
            assert len(named) == {"prefer_two": 2}.get(kind, int("tool" in kind or "premise" in kind))
        assert preference.weights["shop"] == 0.0
        assert preference.weights["outcome"] == 1.0
        assert "{" not in preference.text


def test_words_cheap_and_fast_mean_cost_and_latency():
    for kind in PREFERENCE_KINDS:
        weights = sample_preference(np.random.default_rng(0), TOOLS, on_premise=["search"], kinds=[kind]).weights
        assert (weights["cost"] >= 0.5) == any(word in kind for word in ("cost", "cheap", "thrift"))
        assert (weights["latency"] >= 0.5) == any(word in kind for word in ("latency", "fast", "thrift"))


def test_every_wording_means_one_kind_and_the_splits_share_none():
    every = [text for kind in PREFERENCE_KINDS for split in ("train", "test") for text in wordings(kind, split)]
    assert len(set(every)) == len(every)
    for kind in PREFERENCE_KINDS:
        assert wordings(kind, "test")
        assert len({text.count("{}") for split in ("train", "test") for text in wordings(kind, split)}) == 1


def test_kinds_that_cannot_be_said_are_passed_over():
    rng = np.random.default_rng(0)
    for kinds in (["avoid_tool"], ["prefer_two"], ["on_premise"]):
        assert sample_preference(rng, ["one"], kinds=kinds, on_premise=["one"]).text == ""
    assert "one" in sample_preference(rng, ["one"], kinds=["avoid_tool", "prefer_tool"]).text


MENU = [Tool(name, f"Does {name}.", {"type": "object"}, lambda: "", Price(), 1.0) for name in TOOLS]


def pair(text, **weights):
    return {"text": text, "weights": {"outcome": 1, "cost": 0, "latency": 0, **weights}}


def test_pairs_written_by_a_model_are_verified_by_a_second_call():
    proposals = [
        pair("Use {gpt-5}.", **{"gpt-5": 1}),
        pair("Be cheap.", cost=1),
        pair("Nonsense.", latency=1),  # the verifier says no
        pair("Use {nobody}.", nobody=1),
        pair("Too much.", cost=3),
        "no pair",
    ]

    def answer(request):
        content = request["messages"][0]["content"]
        if "A user says" in content:
            return "no, not at all" if "Nonsense" in content else "Yes."
        later = len(server.requests) > 4
        return f"Here they are: ```json\n{json.dumps([pair('Be right.')] if later else proposals)}\n```"

    with OpenAIServer(answer) as server:
        endpoint = Endpoint("writer", server.base_url, api_key_env=None)
        pairs = write_preferences(MENU, endpoint, num_pairs=3, pairs_per_call=6, test_share=0.34)
        requests = [request["messages"][0]["content"] for request in server.requests]
    assert pairs == {"train": [proposals[1], pair("Be right.")], "test": [proposals[0]]}
    assert "in braces, as in {name};" in requests[0]
    assert "Use {gpt-5}.\nBe cheap." in requests[4]  # the second request for pairs tells which there are
    assert sum("A user says: Use gpt-5." in content for content in requests) == 1
    train, test = read_written_preferences(pairs).values()
    told = test[0].told({"gpt-5": "expert-2", "search": "search"})
    assert (told.text, told.weights["expert-2"], told.weights["search"]) == ("Use expert-2.", 1.0, 0.0)
    assert test[0].told({"search": "search"}) is None
    assert len(train) == 2


def test_a_writer_without_usable_pairs_is_asked_only_so_often():
    with OpenAIServer(["I cannot do that."]) as server:
        endpoint = Endpoint("writer", server.base_url, api_key_env=None)
        assert write_preferences(MENU, endpoint, num_pairs=8, pairs_per_call=4) == {"train": [], "test": []}
        assert len(server.requests) == 8
