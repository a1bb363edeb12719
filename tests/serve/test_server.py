"""The protocol, by the real client against a live server whose policy says what a script tells."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from serving import ENDLESS, ask, ask_stream, assembled, chat_format, client, scripted, wait_until

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ærø"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
TURN = f"<think>Hm, 東京?</think>\n\nLook:\n{CALL}\n{CALL}"


def post(url, body, headers=None):
    """Status, headers and JSON of a raw request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", f"{parts.path}/chat/completions", data, headers or {})
    answer = connection.getresponse()
    return answer.status, answer.headers, json.loads(answer.read())


def get(url, path):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def body(**fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}


def test_a_whole_answer():
    with scripted("Hello Ærø.") as (url, _):
        answer = ask(url)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello Ærø.", "stop")
    assert choice.message.tool_calls is None
    chat = chat_format()
    prompt = chat.conversation_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(chat.turn_ids("Hello Ærø."))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("steps", [1, 4, 1000])
def test_reasoning_text_and_calls_whole_and_streamed(steps):
    with scripted(TURN, steps=steps) as (url, _):
        whole = ask(url, tools=TOOLS)
        chunks = ask_stream(url, tools=TOOLS, stream_options={"include_usage": True})
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, 東京?", "Look:")
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"query": "Ærø"}] * 2
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len({call.id for call in message.tool_calls}) == 2
    streamed, usage = assembled(chunks)
    assert (streamed["reasoning"], streamed["content"]) == (message.reasoning_content, message.content)
    assert [(index, name, arguments) for index, _, name, arguments in streamed["calls"]] == [
        (number, call.function.name, call.function.arguments) for number, call in enumerate(message.tool_calls)
    ]
    assert streamed["finish_reason"] == "tool_calls"
    assert usage == whole.usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_text_comes_before_the_turn_is_over():
    with scripted("one two three four five six", steps=1) as (url, _):
        chunks = ask_stream(url)
        assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 3
    assert assembled(chunks)[0]["content"] == "one two three four five six"
    assert assembled(chunks)[1] is None  # nobody asked for usage


def test_characters_are_never_cut():
    text = "Ærø 東京 👩‍👩‍👧 ✓"
    with scripted(text, steps=1) as (url, _):
        chunks = ask_stream(url)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["wo th", ["xyz", "wo th"]])
def test_stop_strings_across_tokens(stop):
    with scripted("one two three four", steps=1) as (url, engines):
        whole = ask(url, stop=stop)
        chunks = ask_stream(url, stop=stop)
        wait_until(lambda: not engines[0].busy)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("one t", "stop")
    streamed, _ = assembled(chunks)
    assert (streamed["content"], streamed["finish_reason"]) == ("one t", "stop")
    chat = chat_format()
    counts = [len(chat.turn_ids(text)) for text in ("one two thr", "one two three four")]
    assert whole.usage.completion_tokens <= counts[1]


def test_a_limit_ends_a_turn():
    with scripted(ENDLESS) as (url, engines):
        answer = ask(url, max_tokens=5)
        other = ask(url, max_completion_tokens=7)
    assert [request.limit for request in engines[0].requests] == [5, 7]
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
    assert other.usage.completion_tokens == 7


def test_without_a_limit_there_is_what_the_context_has():
    with scripted("yes", capacity=50) as (url, engines):
        answer = ask(url)
    assert engines[0].requests[0].limit == 50 - answer.usage.prompt_tokens


def test_several_choices():
    with scripted(lambda request: f"number {request.key}") as (url, engines):
        whole = ask(url, n=3)
        chunks = ask_stream(url, n=3)
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({request.trajectory for request in engines[0].requests}) == 6
    assert len({assembled(chunks, index)[0]["content"] for index in range(3)}) == 3
    assert whole.usage.completion_tokens == 3 * len(chat_format().turn_ids("number 0"))


def test_the_seed_keys_the_randomness():
    with scripted("yes") as (url, engines):
        for seed in (7, 7, 8, None, None):
            ask(url, seed=seed)
    trajectories = [request.trajectory for request in engines[0].requests]
    assert trajectories[0] == trajectories[1]
    assert len(set(trajectories)) == 4
    assert all(0 <= trajectory < 2**32 for trajectory in trajectories)


def test_logprobs_of_every_token():
    with scripted("one two", steps=2) as (url, _):
        whole = ask(url, logprobs=True)
        chunks = ask_stream(url, logprobs=True)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert "".join(entry.token for entry in entries) == "one two<|im_end|>"
    assert {entry.logprob for entry in entries} == {-0.5}
    assert [e for c in chunks for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])] == entries


def test_a_call_that_cannot_be_read_is_told_and_is_no_content():
    with scripted('Well: <tool_call>\n{"name": \n</tool_call> so') as (url, _):
        message = ask(url, tools=TOOLS).choices[0].message
        chunks = ask_stream(url, tools=TOOLS)
    assert message.content == "Well:  so"
    assert message.tool_calls is None
    assert [error["type"] for error in message.tool_call_errors] == ["malformed_json"]
    assert assembled(chunks)[0]["content"] == "Well:  so"
    assert [e for c in chunks for e in getattr(c.choices[0].delta, "tool_call_errors", [])] == message.tool_call_errors


def test_a_call_that_was_cut_is_not_made():
    ids = chat_format().turn_ids(CALL)[:-3]
    with scripted(ids) as (url, _):
        choice = ask(url, tools=TOOLS, max_tokens=len(ids)).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)


def test_one_call_at_a_time():
    with scripted(TURN, steps=1) as (url, engines):
        answer = ask(url, tools=TOOLS, parallel_tool_calls=False)
        wait_until(lambda: not engines[0].busy)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens < len(chat_format().turn_ids(TURN))


def test_a_call_that_was_not_allowed_is_not_made():
    with scripted(TURN) as (url, _):
        choice = ask(url, tools=TOOLS, tool_choice="none").choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.tool_call_errors[0]["type"] == "call_not_allowed"


# Conversations.


def test_the_next_turn_goes_on_from_the_sampled_ids():
    """Its prompt is what was sampled, token for token, and the observation as a rollout has it."""
    chat = chat_format()
    # No tokenizer would encode the text like this: a byte a token.
    odd = [chat.tokenizer.token_to_id(char) for char in "odd"] + [chat.end_id]
    turns = iter([chat.turn_ids(f"<think>secret</think>{CALL}"), odd, "done"])
    with scripted(lambda request: next(turns)) as (url, engines):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        first = ask(url, messages=messages, tools=TOOLS).choices[0].message
        (call,) = first.tool_calls
        # As harnesses do it: reasoning is not sent back, the call is written anew.
        arguments = json.dumps(json.loads(call.function.arguments), indent=2)
        sent = {"id": call.id, "type": "function", "function": {"name": "search", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [sent]},
            {"role": "tool", "tool_call_id": call.id, "content": "an island <|im_end|>"},
        ]
        second = ask(url, messages=messages, tools=TOOLS).choices[0].message
        assert second.content == "odd"
        messages += [second.model_dump(), {"role": "user", "content": "And?"}]
        ask(url, messages=messages, tools=TOOLS)
    prompts = [list(request.tokens) for request in engines[0].requests]
    turn = chat.turn_ids(f"<think>secret</think>{CALL}")
    assert prompts[1] == prompts[0] + turn + chat.observation_ids("an island <|im_end|>")
    assert prompts[2] == prompts[1] + odd + chat.observation_ids("And?", "user")
    assert len({request.key for request in engines[0].requests}) == 1


def test_a_turn_that_was_cut_is_closed():
    chat = chat_format()
    with scripted(ENDLESS) as (url, engines):
        messages = [{"role": "user", "content": "Hi"}]
        first = ask(url, messages=messages, max_tokens=6)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Go on"}]
        ask(url, messages=messages, max_tokens=6)
    one, two = (list(request.tokens) for request in engines[0].requests)
    sampled = two[len(one) : len(one) + 6]
    assert two == one + sampled + [chat.end_id] + chat.observation_ids("Go on", "user")


def test_edited_histories_are_new_conversations():
    chat = chat_format()
    with scripted("yes") as (url, engines):
        messages = [{"role": "user", "content": "Hi"}]
        ask(url, messages=messages)
        messages += [{"role": "assistant", "content": "no"}, {"role": "user", "content": "And?"}]
        ask(url, messages=messages)
    assert list(engines[0].requests[1].tokens) == chat.conversation_ids(messages, add_generation_prompt=True)
    assert len({request.key for request in engines[0].requests}) == 2


def test_two_requests_may_continue_the_same_conversation_at_once():
    barrier = threading.Barrier(2)

    def say(request):
        return "yes"

    with scripted(say, round_s=0.05) as (url, engines):
        messages = [{"role": "user", "content": "Hi"}]
        first = ask(url, messages=messages)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]

        def again(_):
            barrier.wait()
            return ask(url, messages=messages).choices[0].message.content

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(again, range(2))) == ["yes", "yes"]
    assert len({request.key for request in engines[0].requests[1:]}) == 2


# Who goes away, and who does not get in.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled(stream):
    with scripted(ENDLESS, capacity=10**9, round_s=0.01, slots=1) as (url, engines):
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        connection.request("POST", "/v1/chat/completions", json.dumps(body(stream=stream)))
        wait_until(lambda: engines[0].busy)
        if stream:
            assert connection.getresponse().read(20)
        # One that waits for the slot goes away, too.
        waiting = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        waiting.request("POST", "/v1/chat/completions", json.dumps(body(stream=stream)))
        wait_until(lambda: len(engines[0].requests) == 2)
        waiting.close()
        wait_until(lambda: len(engines[0].cancelled) == 1)
        connection.close()
        wait_until(lambda: not engines[0].busy)
        assert get(url, "/health")[1]["turns"] == 0
    assert len(engines[0].cancelled) == 2


def test_a_full_server_says_when_to_come_back():
    with scripted(ENDLESS, capacity=10**9, round_s=0.01, slots=1, max_waiting=1) as (url, engines):
        with pytest.raises(openai.RateLimitError) as caught:
            ask(url, n=3)
        assert caught.value.code == "queue_full"
        parts = urlsplit(url)
        connections = []
        for number in range(2):
            connections.append(http.client.HTTPConnection(parts.hostname, parts.port, timeout=20))
            connections[-1].request("POST", "/v1/chat/completions", json.dumps(body()))
            wait_until(lambda expected=number + 1: len(engines[0].requests) == expected)
        status, headers, answer = post(url, body())
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(headers["Retry-After"]) <= 60
        for connection in connections:
            connection.close()
        wait_until(lambda: not engines[0].busy)


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_that_raises_is_told_and_the_server_goes_on(stream):
    with scripted("yes", round_s=0.05) as (url, engines):
        engines[0].faults.append(RuntimeError("out of memory"))
        with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
            (ask_stream if stream else ask)(url)
        assert ask(url).choices[0].message.content == "yes"
        assert len(engines) == 2  # made anew: nobody knows what is in the cache of the first


def test_a_stream_that_breaks_says_so():
    with scripted(ENDLESS, capacity=10**9, round_s=0.01) as (url, engines), client(url) as asker:
        stream = asker.chat.completions.create(**body(stream=True))
        next(iter(stream))
        engines[0].faults.append(RuntimeError("out of memory"))
        with pytest.raises(openai.APIError, match="out of memory"):
            list(stream)


def test_an_engine_that_cannot_be_made_anew(monkeypatch):
    with scripted("yes", round_s=0.02) as (url, engines):
        import serving

        monkeypatch.setattr(serving, "ScriptedEngine", None)  # so that making one raises
        engines[0].faults.append(RuntimeError("out of memory"))
        assert post(url, body())[0] == 500
        wait_until(lambda: get(url, "/health")[0] == 503)
        status, _, answer = post(url, body())
        assert (status, answer["error"]["code"]) == (503, "engine_broken")


def test_requests_under_way_finish_when_the_server_stops():
    answers = []
    with scripted("one two three four", steps=1, round_s=0.05) as (url, engines):
        thread = threading.Thread(target=lambda: answers.append(ask(url)))
        thread.start()
        wait_until(lambda: engines[0].busy)
    thread.join()
    assert answers[0].choices[0].message.content == "one two three four"


def test_the_key():
    with scripted("yes", api_key="sk-right") as (url, _):
        for key in ("sk-wrong", "sk-righ", "none"):
            with client(url, key) as asker, pytest.raises(openai.AuthenticationError) as caught:
                asker.chat.completions.create(**body())
            assert caught.value.code == "invalid_api_key"
        with client(url, "sk-right") as asker:
            assert asker.chat.completions.create(**body()).choices[0].message.content == "yes"
            assert [model.id for model in asker.models.list()] == ["tiny"]
        assert get(url, "/v1/models")[0] == 401
        assert get(url, "/health")[0] == 200


def test_models():
    with scripted("yes") as (url, _), client(url) as asker:
        (model,) = asker.models.list()
        assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 600)
        assert asker.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            asker.models.retrieve("other")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            asker.chat.completions.create(**body(model="other"))


def test_health():
    with scripted("yes") as (url, _):
        status, answer = get(url, "/health")
    assert (status, answer["status"], answer["model"], answer["slots"]) == (200, "ok", "tiny", 4)


def test_errors_have_openais_shape():
    with scripted("yes", capacity=30) as (url, engines):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(url, "word " * 100)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError, match="'min_p' is not supported") as caught:
            ask(url, extra_body={"min_p": 0.1})
        assert (caught.value.param, caught.value.type) == ("min_p", "invalid_request_error")
        status, _, answer = post(url, b"{")
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert post(url, b'{"temperature": NaN}')[0] == 400
        assert post(url, b"[" * 100_000)[0] == 400
        assert post(url, b"\xff")[0] == 400
        assert post(url, b" " * (33 * 2**20))[0] == 413
        assert get(url, "/v1/nothing")[0] == 404
        assert get(url, "/v1/chat/completions")[0] == 405
        assert not engines[0].requests


def test_what_cannot_be_written_as_utf8_does_no_harm():
    with scripted("yes") as (url, engines):
        status, _, answer = post(url, body(messages=[{"role": "user", "content": "a\ud800b"}]))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "yes")
        status, _, answer = post(url, body(model="\udfff"))
        assert status == 404
        ids = post(url, body(messages=[{"role": "user", "content": "\ud83d\ude00"}])) and engines[0].requests[-1].tokens
    assert "😀" in chat_format().tokenizer.decode(list(ids))


def test_a_template_that_cannot_take_the_tools_says_so():
    tools = [{"type": "function", "function": {"name": "x", "description": "ends a turn: <|im_end|>"}}]
    with (
        scripted("yes", chat=chat_format("qwen2.5")) as (url, _),
        pytest.raises(openai.BadRequestError, match="reword"),
    ):
        ask(url, tools=tools)


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "smollm2", "llama3", "llama3.1"])
def test_other_templates(name):
    """Calls and results come and go with every kind of template, and the second turn continues the first."""
    chat = chat_format(name)
    turns = iter([f"<think>\nHm\n</think>\n\n{CALL}", "Answer: 7"])
    with scripted(lambda request: next(turns), chat=chat, capacity=4000) as (url, engines):
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
        first = ask(url, messages=messages, tools=TOOLS).choices[0].message
        assert first.reasoning_content == "Hm"
        messages += [first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "R"}]
        second = ask(url, messages=messages, tools=TOOLS).choices[0].message
    assert second.content == "Answer: 7"
    prompts = [list(request.tokens) for request in engines[0].requests]
    turn = chat.turn_ids(f"<think>\nHm\n</think>\n\n{CALL}")
    assert prompts[1] == prompts[0] + turn + chat.observation_ids("R")
    assert "search" in chat.tokenizer.decode(prompts[0])


# Grammars.


def allowed(grammar, token):
    words = grammar.mask()
    return bool(words[token >> 5] >> (token & 31) & 1)


def test_a_required_call_is_a_grammar():
    pytest.importorskip("llguidance")
    chat = chat_format()
    begin = chat.tokenizer.added_tokens["<tool_call>"]
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    with scripted(CALL) as (url, engines):
        for options in (
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": strict},
            {"tools": TOOLS, "tool_choice": "none"},
            {"tools": TOOLS},
        ):
            ask(url, **options)
        ask(url, n=2, tools=TOOLS, tool_choice="required")
    required, free, none, plain, one, two = (request.grammar for request in engines[0].requests)
    assert (allowed(required, chat.end_id), allowed(required, begin)) == (False, True)
    assert (allowed(free, chat.end_id), allowed(free, begin)) == (True, True)
    assert (allowed(none, chat.end_id), allowed(none, begin)) == (True, False)
    assert plain is None
    assert one is not two


def test_a_server_may_constrain_all_calls():
    pytest.importorskip("llguidance")
    with scripted("yes", constrain=True) as (url, engines):
        ask(url, tools=TOOLS)
        ask(url)
    assert [request.grammar is None for request in engines[0].requests] == [False, True]


def test_without_llguidance_a_required_call_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tools = [{"type": "function", "function": {"name": "no_grammar"}}]
    with scripted("yes") as (url, _):
        with pytest.raises(openai.BadRequestError, match="llguidance") as caught:
            ask(url, tools=tools, tool_choice="required")
        assert caught.value.param == "tool_choice"
        assert ask(url, tools=tools, tool_choice="none").choices[0].message.content == "yes"


def test_a_turn_that_fails_fails_its_request_alone():
    """The engine ends a turn whose grammar breaks, and no other."""
    with scripted("yes") as (url, engines):
        engines[0].turn_faults.append("ValueError: grammar: too deep")
        with pytest.raises(openai.InternalServerError, match="the turn failed: ValueError: grammar: too deep"):
            ask(url)
        assert ask(url).choices[0].message.content == "yes"
        assert len(engines) == 1
