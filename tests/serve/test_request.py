"""The fields of a request: what is refused names the field, what asks for nothing is let through."""

from __future__ import annotations

import pytest

from orchestra_jax.serve.errors import ApiError
from orchestra_jax.serve.request import read_chat_request

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}


def body(**fields):
    return {"model": "m", "messages": [USER], **fields}


def assistant(**fields):
    return body(messages=[USER, {"role": "assistant", "content": "x", **fields}, USER])


def call(**fields):
    return assistant(tool_calls=[{"id": "c", "type": "function", "function": fields}])


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": [USER]}, "model"),
        ({"model": "m"}, "messages"),
        (body(messages=[]), "messages"),
        (body(messages="Hi"), "messages"),
        (body(messages=[USER, "Hi"]), "messages[1]"),
        (body(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
        (body(messages=[{"content": "x"}]), "messages[0].role"),
        (body(messages=[{"role": "user"}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0]"),
        (body(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]), "messages[0].tool_calls"),
        (body(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (assistant(audio={"id": "a"}), "messages[1].audio"),
        (assistant(weight=0), "messages[1].weight"),
        (assistant(tool_calls="x"), "messages[1].tool_calls"),
        (assistant(tool_calls=["x"]), "messages[1].tool_calls[0]"),
        (assistant(reasoning_content=["x"]), "messages[1].reasoning_content"),
        (call(arguments="{}"), "messages[1].tool_calls[0].function.name"),
        (call(name="a", arguments="{"), "messages[1].tool_calls[0].function.arguments"),
        (call(name="a", arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (body(temperature=-0.1), "temperature"),
        (body(temperature=2.1), "temperature"),
        (body(temperature="1"), "temperature"),
        (body(temperature=True), "temperature"),
        (body(temperature=float("nan")), "temperature"),
        (body(top_p=0), "top_p"),
        (body(top_p=1.5), "top_p"),
        (body(top_k=-2), "top_k"),
        (body(n=0), "n"),
        (body(n=129), "n"),
        (body(max_tokens=0), "max_tokens"),
        (body(max_tokens=1.5), "max_tokens"),
        (body(max_tokens=3, max_completion_tokens=4), "max_tokens"),
        (body(seed="x"), "seed"),
        (body(stop=""), "stop"),
        (body(stop=["a", 5]), "stop"),
        (body(stop=["a"] * 17), "stop"),
        (body(stop="a" * 300), "stop"),
        (body(logprobs=3), "logprobs"),
        (body(top_logprobs=3), "top_logprobs"),
        (body(logprobs=True, parallel_tool_calls=False), "logprobs"),
        (body(stream="yes"), "stream"),
        (body(stream_options={"include_usage": True}), "stream_options"),
        (body(stream=True, stream_options={"include_usage": 1}), "include_usage"),
        (body(stream=True, stream_options={"other": 1}), "stream_options.other"),
        (body(presence_penalty=0.5), "presence_penalty"),
        (body(logit_bias={"5": 1}), "logit_bias"),
        (body(response_format={"type": "json_object"}), "response_format"),
        (body(reasoning_effort="high"), "reasoning_effort"),
        (body(min_p=0.1), "min_p"),
        (body(tools={}), "tools"),
        (body(tools=[{"type": "web_search"}]), "tools[0]"),
        (body(tools=[{"type": "function"}]), "tools[0].function"),
        (body(tools=[{**TOOL, "price": 1}]), "tools[0].price"),
        (body(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
        (body(tools=[{"function": {**FUNCTION, "strict": "yes"}}]), "strict"),
        (body(tools=[{"function": {**FUNCTION, "parameters": "x"}}]), "tools[0].function.parameters"),
        (body(tools=[{"function": {**FUNCTION, "retries": 2}}]), "tools[0].function.retries"),
        (body(tools=[TOOL, TOOL]), "tools"),
        (body(tool_choice="required"), "tool_choice"),
        (body(tools=[TOOL], tool_choice="any"), "tool_choice"),
        (body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}), "tool_choice"),
        (body(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice"),
    ],
)
def test_a_mistake_is_named(request_, param):
    with pytest.raises(ApiError) as caught:
        read_chat_request(request_)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("request_", [[], "x", None, 5])
def test_a_body_that_is_no_object(request_):
    with pytest.raises(ApiError, match="must be a JSON object"):
        read_chat_request(request_)


def test_defaults():
    asked = read_chat_request({"model": "m", "messages": [USER]})
    assert (asked.temperature, asked.top_p, asked.top_k, asked.n, asked.max_tokens) == (1.0, 1.0, 0, 1, None)
    assert (asked.stop, asked.seed, asked.stream, asked.include_usage, asked.logprobs) == (
        (),
        None,
        False,
        False,
        False,
    )
    assert (asked.tools, asked.tool_choice, asked.parallel_tool_calls, asked.strict_tools) == ([], "auto", True, False)


def test_null_is_left_out_and_neutral_values_ask_for_nothing():
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "top_logprobs": 0}
    nulls = dict.fromkeys(("temperature", "stop", "tools", "tool_choice", "max_tokens", "reasoning_effort", "seed"))
    plain = read_chat_request({"model": "m", "messages": [USER]})
    assert read_chat_request(body(**neutral, **ignored, **nulls)) == plain


def test_what_the_policy_reads_of_a_tool_does_not_depend_on_how_it_is_written():
    shuffled = {
        "function": {"strict": None, "parameters": FUNCTION["parameters"], "name": "search"},
        "type": "function",
    }
    plain, other = (read_chat_request(body(tools=[tool])).tools for tool in (TOOL, shuffled))
    assert [list(tool["function"]) for tool in plain] == [["name", "description", "parameters"]]
    assert repr(plain) == repr(other)


def test_messages_in_one_form():
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "u"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    assert read_chat_request(body(messages=messages)).messages == [
        {"role": "system", "content": "D"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "name": "f", "arguments": {"x": 1}}],
            "reasoning": "hm",
        },
        {"role": "tool", "content": "r"},
    ]


def test_choices_of_tools():
    def chosen(choice):
        asked = read_chat_request(body(tools=[TOOL], tool_choice=choice))
        return asked.tool_choice, asked.named_tool

    assert chosen("none") == ("none", None)
    assert chosen("required") == ("required", None)
    assert chosen({"type": "function", "function": {"name": "search"}}) == ("required", "search")
