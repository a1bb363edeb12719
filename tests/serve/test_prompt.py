"""Prompts of a server are those of a rollout; nothing that a client sends becomes a control token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from serving import chat_format

from orchestra_jax.serve.prompt import TurnMemory, build_prompt, extend_digest, first_ids, following_ids

NAMES = ["qwen3", "qwen2.5", "smollm2", "llama3", "llama3.1", "market"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "search", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "c", "name": "search", "arguments": {"q": "Ærø"}}
TEXTS = ["R", " 7 \n", "", "a <|im_end|> b</think>", "東京"]


@pytest.fixture(params=NAMES)
def chat(request):
    return chat_format(request.param)


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_follows_a_turn_is_what_a_rollout_has(chat, text, role):
    message = {"role": role, "content": text}
    assert following_ids(chat, [message]) == [chat.end_id, *chat.observation_ids(text, role)]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_first_prompt_is_what_a_rollout_has(chat, system, tools):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Hi"})
    assert first_ids(chat, messages, tools) == chat.prompt_ids(system, "Hi", tools)


def test_calls_and_results_of_a_foreign_history(chat):
    """As `orchestra_envs` writes calls, whatever form the template has for them; results within their tags or role."""
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "Look.", "tool_calls": [CALL, CALL], "reasoning": "hm"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    ids = first_ids(chat, messages, [])
    text = chat.tokenizer.decode(ids)
    call = '<tool_call>\n{"name": "search", "arguments": {"q": "Ærø"}}\n</tool_call>'
    assert f"Look.\n{call}\n{call}" in text
    assert text.index("hm\n</think>") < text.index("Look.")
    assert text.index("one") < text.index("two")
    # From the end of the assistant's turn on it is what would follow a sampled one.
    following = following_ids(chat, messages[2:])
    assert ids[len(ids) - len(following) :] == following


def test_several_results_where_the_template_has_no_role_for_them():
    chat = chat_format("smollm2")
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, {"role": "user", "content": "U"}]
    text = chat.tokenizer.decode(following_ids(chat, results))
    assert "user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>" in text
    assert "<|im_start|>user\nU<|im_end|>" in text


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_no_text_becomes_a_control_token(chat, role):
    forged = "x" + "".join(chat.tokenizer.added_tokens) + "y"
    control = {*chat.tokenizer.added_tokens.values()}

    def count(content):
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        messages.insert(0 if role == "system" else 2, {"role": role, "content": content})
        return [token for token in first_ids(chat, messages, []) if token in control]

    assert count(forged) == count("plain")


def test_memory_forgets_the_least_recently_used():
    memory = TurnMemory(max_tokens=10)
    for name in (b"a", b"b"):
        memory.put(name, [1, 2, 3, 4], "", name)
    assert memory.get(b"a", "") == ([1, 2, 3, 4], b"a")
    memory.put(b"c", [5, 6, 7], "", b"c")
    assert memory.get(b"b", "") is None
    assert memory.get(b"a", "") is not None
    memory.put(b"a", [9], "", b"a")  # replaced, not counted twice
    memory.put(b"d", [1] * 6, "", b"d")
    assert [memory.get(name, "") is None for name in (b"a", b"c", b"d")] == [False, False, False]


def test_other_reasoning_is_another_turn():
    chat, memory = chat_format(), TurnMemory()
    messages = [{"role": "user", "content": "Q"}]
    first = build_prompt(chat, messages, [], memory)
    answer = {"role": "assistant", "content": "A"}
    turn = chat.turn_ids("<think>\nhm\n</think>\n\nA")
    memory.put(extend_digest(first.digest, answer), first.ids + turn, "hm", "key")
    after = [{"role": "user", "content": "And?"}]
    for reasoning, key in ((None, "key"), ("hm", "key"), ("oh", None)):
        said = answer if reasoning is None else {**answer, "reasoning": reasoning}
        prompt = build_prompt(chat, [*messages, said, *after], [], memory)
        assert prompt.key == key
        assert (prompt.ids[: len(first.ids) + len(turn)] == first.ids + turn) == (key is not None)


def test_other_tools_are_another_conversation():
    chat, memory = chat_format(), TurnMemory()
    first = build_prompt(chat, [{"role": "user", "content": "Q"}], TOOLS, memory)
    memory.put(extend_digest(first.digest, {"role": "assistant", "content": "A"}), first.ids, "", "key")
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "B"},
    ]
    assert build_prompt(chat, messages, TOOLS, memory).key == "key"
    assert build_prompt(chat, messages, [], memory).key is None
