from collections import Counter

import pytest
from orchestra_envs.market.env import MarketEnv
from orchestra_envs.market.tools import TOOL_NAMES
from orchestra_envs.parse import ToolCall, parse_turn, render_call

from orchestra_jax.text.make_market_tokenizer import ADDED_TOKENS, learn_merges, make_files, market_texts
from orchestra_jax.text.prompt import system_prompt
from orchestra_jax.text.tokenizer import BUILTIN


@pytest.fixture(scope="module")
def market(formats):
    return formats["market"]


def pieces(chat, text):
    return [chat.tokenizer.decode([i]) for i in chat.tokenizer.encode_text(text)]


def test_the_stored_files_are_what_the_recipe_makes():
    for name, content in make_files(market_texts(), TOOL_NAMES).items():
        stored = (BUILTIN["market"] / name).read_text("utf-8")
        assert stored == content, f"{name}: run python -m orchestra_jax.text.make_market_tokenizer again"


def test_vocabulary(market):
    assert market.tokenizer.vocab_size == 2048
    assert tuple(market.tokenizer.added_tokens) == ADDED_TOKENS
    assert all(market.tokenizer.token_bytes(i) for i in range(2048))


def test_numbers_are_one_token_and_the_same_everywhere(market):
    encode = market.tokenizer.encode_text
    for number in [*map(str, range(1000)), "007", "05", "000"]:
        (token,) = encode(number)
        for text in (
            f"What is {number} * 5?",
            f"The age is {number}.",
            f"Answer: {number}",
            f"(-{number})",
            f"x{number}m",
        ):
            assert encode(text).count(token) == 1 + (number == "5" and "*" in text)
            assert str(number) in pieces(market, text)


def test_turns_are_short(market):
    for name in TOOL_NAMES:
        call = market.turn_ids(render_call(ToolCall(name, {})))
        assert len(call) == 6
        assert parse_turn(market.turn_text(call)).calls == (ToolCall(name, {}),)
    assert len(market.turn_ids("Answer: 412")) == 3
    assert pieces(market, "Answer: 412") == ["Answer: ", "412"]
    assert pieces(market, "Answer: red") == ["Answer:", " red"]
    assert pieces(market, "The colour of Velmora Tower is red.")[-2:] == [" red", "."]  # to be copied as it stands


def test_prompts_are_short(market):
    env = MarketEnv()
    for seed in range(100):
        observation, info = env.reset(seed=seed)
        system, _ = system_prompt(info, "compact")
        assert len(market.tokenizer.encode_text(system)) <= 10 * len(TOOL_NAMES)
        assert 60 <= len(market.prompt_ids(system, observation)) <= 200


def test_test_split_is_as_short_as_the_train_split(market):
    """The vocabulary was made from train tasks alone; their words are all there is to know."""
    tokens = {}
    for split in ("train", "test"):
        env = MarketEnv(split=split)
        questions = [env.reset(seed=seed)[0] for seed in range(300)]
        tokens[split] = sum(len(market.tokenizer.encode_text(q)) for q in questions) / sum(map(len, questions))
    assert tokens["test"] == pytest.approx(tokens["train"], rel=0.1)


def test_learn_merges_by_hand():
    """aab x3, ab x2: "ab" 5 times, then "aab" 3 times ("aa" is gone once "ab" is joined)."""
    vocab = ["a", "b"]
    assert learn_merges(Counter({"aab": 3, "ab": 2}), vocab, 4) == [("a", "b"), ("a", "ab")]
    assert vocab == ["a", "b", "ab", "aab"]
    assert learn_merges({"xy": 1, "ab": 1}, ["a", "b", "x", "y"], 5) == [("a", "b")]  # ties: by alphabet
    assert learn_merges({"aaaa": 1}, ["a"], 3) == [("a", "a"), ("aa", "aa")]
    with pytest.raises(ValueError, match="too little text: 3 tokens where 9 are wanted"):
        learn_merges({"ab": 1}, ["a", "b"], 9)
