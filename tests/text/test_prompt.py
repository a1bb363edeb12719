import json

import pytest

from orchestra_jax.text.prompt import format_number, system_prompt, tools_section


def tool(name, latency_s, **price):
    zero = dict.fromkeys(("per_call_usd", "per_input_token_usd", "per_output_token_usd", "per_second_usd"), 0.0)
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    function = {"name": name, "description": f"Is {name} — gut.", "parameters": parameters}
    return {"type": "function", "function": function, "price": zero | price, "latency_s": latency_s}


INFO = {
    "tools_json": json.dumps(
        [
            tool("calculator", 0.05),
            tool("search", 0.3, per_call_usd=0.0005),
            tool("gpt-5", 96.4, per_input_token_usd=1.25e-6, per_output_token_usd=1e-5),
            tool("sandbox", 2, per_call_usd=0.01, per_second_usd=0.0002),
        ]
    ),
    "instructions": "Verify the customer first.",
}


def test_compact():
    text, tools = system_prompt(INFO, "compact")
    assert tools is None
    assert text == (
        "calculator $0 .05s\nsearch $.0005 .3s\ngpt-5 $1.2/10M 96s\nsandbox $.01+.0002/s 2s\nVerify the customer first."
    )


def test_qwen():
    text, tools = system_prompt(INFO, "qwen")
    assert text.endswith("\n\nVerify the customer first.")
    assert "Answer: " not in text  # how to end is up to the instructions
    assert [t["function"]["description"] for t in tools] == [
        "Is calculator — gut. Free. Takes about 0.05 s.",
        "Is search — gut. Costs $0.0005 per call. Takes about 0.3 s.",
        "Is gpt-5 — gut. Costs $1.2 per million input tokens, $10 per million output tokens. Takes about 96 s.",
        "Is sandbox — gut. Costs $0.01 per call, $0.0002 per second. Takes about 2 s.",
    ]
    assert all(set(t) == {"type", "function"} for t in tools)
    assert tools[0]["function"]["parameters"]["properties"] == {"query": {"type": "string"}}


def test_without_instructions():
    info = {"tools_json": INFO["tools_json"]}
    assert system_prompt(info, "qwen")[0].endswith('end with "Answer: " and the answer.')
    assert system_prompt(info, "compact") == system_prompt({**info, "instructions": ""}, "compact")


def test_everything_reaches_the_policy(chat):
    """Names, prices, latencies and instructions are in the prompt's ids, whatever the template."""
    for style, marks in (("compact", ("$1.2/10M", "96s")), ("qwen", ("$1.2 per million input", "about 96 s"))):
        system, tools = system_prompt(INFO, style)
        prompt = chat.tokenizer.decode(chat.prompt_ids(system, "Q?", tools))
        for mark in (*marks, "gpt-5", "Verify the customer", "Q?"):
            assert mark in prompt


def test_tools_section_is_not_escaped():
    assert "Is search — gut." in tools_section([tool("search", 1)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.25, "1.2"),
        (1.26, "1.3"),
        (1234, "1200"),
        (0.00005, "0.00005"),
        (0.3, "0.3"),
        (10.0, "10"),
        (99.9, "100"),
    ],
)
def test_format_number(value, text):
    assert format_number(value) == text


def test_errors():
    with pytest.raises(ValueError, match="prompt style must be 'qwen' or 'compact', not 'long'"):
        system_prompt(INFO, "long")
    with pytest.raises(ValueError, match="info has no 'tools_json'; pass what the environment's reset returned"):
        system_prompt({"instructions": ""}, "compact")
    with pytest.raises(ValueError, match=r"info\['tools_json'\]: not JSON"):
        system_prompt({**INFO, "tools_json": "["}, "compact")
    with pytest.raises(ValueError, match=r"info\['tools_json'\]: must be a JSON array"):
        system_prompt({**INFO, "tools_json": "{}"}, "compact")
