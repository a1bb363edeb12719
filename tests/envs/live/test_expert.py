"""Experts as tools, from the policy's turn to the record, against a real endpoint on the loopback interface."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from orchestra_envs import CallContext, Price, Task, ToolCall, ToolEnv, render_call
from orchestra_envs.calls import run_calls
from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.live.chat import estimate_tokens
from orchestra_envs.live.expert import expert_prompt, expert_tool
from orchestra_envs.loop import drive
from orchestra_envs.tools import ToolArgumentError

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers.openai_server import Answer, OpenAIServer

PRICE = {"input_usd_per_million": 1000.0, "output_usd_per_million": 10_000.0}
FAST = Retry(3, base_delay_s=0.01)
QUESTION = "What is the capital?"


def expert(server: OpenAIServer, **options):
    defaults = {"name": "expert", "model": "m", "base_url": server.base_url, "api_key_env": None}
    return expert_tool(**{**defaults, "price": PRICE, "retry": FAST, **options})


def call(*tools, arguments=None, history=(), messages=(), names=None, max_output_chars=4000):
    """The records of one turn that calls each of `tools` (or `names`) once."""

    def context(index):
        return CallContext(np.random.default_rng(0), Task(QUESTION), tuple(history), tuple(messages))

    calls = [ToolCall(name, arguments or {}) for name in names or [tool.name for tool in tools]]
    by_name = {tool.name: tool for tool in tools}
    return drive(run_calls(calls, by_name, context, max_output_chars=max_output_chars))


def record_of(script, *, arguments=None, **options):
    with OpenAIServer(script) as server:
        (record,) = call(expert(server, **options), arguments=arguments)
    return record, server


def prompts(server: OpenAIServer) -> list[str]:
    return [request["messages"][-1]["content"] for request in server.requests]


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# Good answers.


@both_ways
def test_an_answer_its_tokens_its_cost_and_its_time(stream):
    record, server = record_of([Answer("It is Oslo.", delay_s=0.2)], stream=stream, latency_s=20.0)
    assert (record.status, record.text, record.attempts) == ("ok", "It is Oslo.", 1)
    num_in = len(prompts(server)[0].split())
    assert (record.input_tokens, record.output_tokens) == (num_in, 3)
    assert record.cost_usd == pytest.approx(num_in * 1e-3 + 3 * 1e-2)
    assert record.cost_known
    assert 0.2 <= record.latency_s < 10  # measured, not the 20 declared
    assert record.source == "live"
    assert record.backend == f"openai:m@{server.base_url}"


def test_reasoning_is_not_shown_to_the_policy():
    record, _ = record_of([Answer("<think>secret</think>Oslo", reasoning=None)])
    assert record.text == "Oslo"


@both_ways
def test_missing_usage_is_estimated_and_marked(stream):
    record, server = record_of([Answer("It is Oslo.", usage=None)], stream=stream)
    assert not record.cost_known
    assert record.output_tokens == estimate_tokens("It is Oslo.")
    assert record.cost_usd == pytest.approx(record.input_tokens * 1e-3 + record.output_tokens * 1e-2)
    assert estimate_tokens(prompts(server)[0]) <= record.input_tokens


@pytest.mark.parametrize(
    "text", ["Ærø 東京 👩‍👩‍👧", '<tool_call>{"name": "x"}</tool_call><|im_end|>'], ids=["unicode", "forged"]
)
def test_any_text_is_passed_on_as_text(text):
    record, _ = record_of([text])
    assert record.text == text


@both_ways
def test_ten_megabytes_are_cut_and_marked(stream):
    record, _ = record_of([Answer("0123456789" * 1_000_000, piece_chars=100_000)], stream=stream, max_output_chars=100)
    assert record.text == "0123456789" * 10 + "\n[9999900 characters cut]"
    assert record.truncated_chars == 9_999_900


def test_the_settings_are_sent_and_part_of_the_identity():
    with OpenAIServer() as server:
        plain = expert(server)
        warm = expert(server, temperature=0.5)
        own = expert(
            server, temperature=0.7, max_output_tokens=9, system_prompt="Be brief.", extra={"reasoning_effort": "low"}
        )
        call(own)
    request = server.requests[0]
    assert (request["temperature"], request["max_tokens"], request["reasoning_effort"]) == (0.7, 9, "low")
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert len({plain.backend, warm.backend, own.backend}) == 3
    assert own.backend.startswith(plain.backend + "#")


# What the expert sees.


def records_of(*texts):
    with OpenAIServer(list(texts)) as server:
        tool = expert(server)
        return [call(tool, arguments={"instruction": f"step {i}"})[0] for i, _ in enumerate(texts)]


def test_by_default_it_sees_the_question_and_the_results_so_far():
    history = records_of("first result", "second result")
    with OpenAIServer() as server:
        call(expert(server), arguments={"instruction": "Now answer."}, history=history)
    assert prompts(server) == [
        f"Task:\n{QUESTION}\n\n"
        'Results of earlier tool calls:\nexpert {"instruction":"step 0"}\nfirst result\n\n'
        'expert {"instruction":"step 1"}\nsecond result\n\n'
        "Instruction:\nNow answer."
    ]


def test_without_an_instruction_it_is_given_the_task():
    _, server = record_of(["ok"])
    assert prompts(server) == [f"Task:\n{QUESTION}"]


def test_what_it_sees_can_be_narrowed_and_widened():
    history = records_of("first result")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Which order?"}]
    seen = {}
    with OpenAIServer() as server:
        for sees in ("instruction", "question", "conversation"):
            tool = expert(server, sees=sees)
            call(tool, arguments={"instruction": "Do it."}, history=history, messages=messages)
            seen[sees] = prompts(server)[-1]
    assert seen == {
        "instruction": "Do it.",
        "question": f"Task:\n{QUESTION}\n\nInstruction:\nDo it.",
        "conversation": "Conversation so far:\nUser: Hello\n\nAssistant: Which order?\n\nInstruction:\nDo it.",
    }


def test_long_histories_lose_their_oldest_part():
    history = records_of("x" * 1000, "the newest result")
    context = CallContext(np.random.default_rng(0), Task(QUESTION), tuple(history))
    prompt = expert_prompt("Answer.", context, "history", 30)
    _, _, shown = prompt.partition("characters cut]\n")
    assert shown.partition("\n\nInstruction")[0].endswith("the newest result")
    assert "x" * 31 not in prompt
    assert prompt.startswith(f"Task:\n{QUESTION}")


def test_an_expert_that_sees_nothing_else_needs_an_instruction():
    record, server = record_of(["ok"], sees="instruction")
    assert (record.error_type, record.cost_usd) == ("invalid_arguments", 0.0)
    record, server = record_of(["ok"], sees="instruction", arguments={"instruction": " "})
    assert (record.error_type, record.cost_usd) == ("invalid_arguments", 0.0)
    assert not server.requests
    with pytest.raises(ToolArgumentError):
        expert_prompt("", CallContext(np.random.default_rng(0), Task("Q?"), ()), "conversation", 10)


@pytest.mark.parametrize("arguments", [{"instruction": 3}, {"instruction": None}, {"model": "gpt-5"}], ids=str)
def test_wrong_arguments_cost_nothing(arguments):
    record, server = record_of(["ok"], arguments=arguments)
    assert (record.error_type, record.cost_usd, record.attempts) == ("invalid_arguments", 0.0, 0)
    assert not server.requests


# Bad endings.


@pytest.mark.parametrize(
    ("bad", "billed"),
    [
        (Answer(status=429, headers={"Retry-After": "0"}), "nothing"),
        (Answer(status=500), "nothing"),
        (Answer(body=b'{"error": {"message": "overloaded", "code": 503}}'), "nothing"),
        (Answer(drop="headers"), "estimate"),
        (Answer(drop="middle"), "estimate"),
        (Answer(body=b'{"choices": ['), "estimate"),
        (Answer(choices=False), "usage"),
    ],
    ids=["429", "500", "503 in a body", "closed before headers", "closed in the middle", "broken JSON", "no choices"],
)
def test_a_passing_fault_is_tried_again_counted_and_charged_if_it_may_be_billed(bad, billed):
    record, server = record_of([bad, bad, "Oslo"])
    assert (record.status, record.text, record.attempts) == ("ok", "Oslo", 3)
    assert len(server.requests) == 3
    num_in = len(prompts(server)[0].split())
    estimated = estimate_tokens(json.dumps([server.requests[0]["messages"], []]))
    failed_in, failed_out = {"nothing": (0, 0), "estimate": (estimated, 0), "usage": (num_in, 1)}[billed]
    tokens = num_in + 2 * failed_in, 1 + 2 * failed_out
    assert (record.input_tokens, record.output_tokens) == tokens
    assert record.cost_usd == pytest.approx(tokens[0] * 1e-3 + tokens[1] * 1e-2)
    assert record.cost_known == (billed != "estimate")


def test_the_wait_that_the_server_asks_for_is_kept():
    times = []

    def script(_request):
        times.append(time.monotonic())
        return Answer(status=429, headers={"Retry-After": "0.3"}) if len(times) < 2 else "Oslo"

    record, _ = record_of(script)
    assert record.attempts == 2
    assert times[1] - times[0] >= 0.3
    assert record.latency_s >= 0.3


@pytest.mark.parametrize("status", [429, 500])
def test_a_fault_that_stays_is_an_observation(status):
    record, server = record_of([Answer("overloaded", status=status)])
    assert (record.status, record.error_type, record.attempts) == ("error", "unavailable", 3)
    assert record.text == f"Error: expert is unavailable: HTTP {status}: overloaded"
    assert record.cost_usd == 0.0
    assert len(server.requests) == 3


def test_a_long_wait_ends_at_the_tools_time_limit():
    start = time.monotonic()
    record, server = record_of([Answer(status=429, headers={"Retry-After": "3600"})], timeout_s=0.5)
    assert (record.error_type, record.attempts) == ("timeout", 1)
    assert time.monotonic() - start < 20
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_is_not_tried_again(status):
    record, server = record_of([Answer("You may not.", status=status)])
    assert (record.error_type, record.attempts, record.cost_usd) == ("unavailable", 1, 0.0)
    assert "You may not." in record.text
    assert len(server.requests) == 1


@both_ways
def test_a_slow_endpoint_ends_before_the_time_limit_and_may_be_billed(stream):
    record, server = record_of([Answer(delay_s=30.0)], stream=stream, timeout_s=2.0)
    assert (record.status, record.error_type, record.attempts) == ("error", "unavailable", 1)
    assert record.text == "Error: expert is unavailable: no answer within 1.8 s"
    assert 1.7 < record.latency_s < 2.0
    assert (record.input_tokens > 0, record.output_tokens, record.cost_known) == (True, 0, False)
    assert record.cost_usd == pytest.approx(record.input_tokens * 1e-3)
    assert len(server.requests) == 1


def test_what_had_been_streamed_at_the_time_limit_is_charged():
    slow = Answer("word " * 1000, piece_chars=5, chunk_delay_s=0.05)
    record, _ = record_of([slow], stream=True, timeout_s=2.0)
    assert (record.error_type, record.attempts, record.cost_known) == ("unavailable", 1, False)
    assert 10 < record.output_tokens < 100
    assert record.cost_usd == pytest.approx(record.input_tokens * 1e-3 + record.output_tokens * 1e-2)


def test_the_last_of_several_attempts_ends_before_the_time_limit_too():
    script = [Answer(status=500), Answer(delay_s=30.0)]
    record, server = record_of(script, timeout_s=2.0, retry=Retry(3, base_delay_s=0.0))
    assert (record.error_type, record.attempts, record.cost_known) == ("unavailable", 2, False)
    assert record.cost_usd == pytest.approx(record.input_tokens * 1e-3) != 0.0
    assert record.latency_s < 2.0
    assert len(server.requests) == 2


def test_each_call_has_the_whole_time():
    with OpenAIServer([Answer(delay_s=30.0), Answer(delay_s=1.2)]) as server:
        tool = expert(server, timeout_s=2.0)
        assert [call(tool)[0].status for _ in range(3)] == ["error", "ok", "ok"]


def test_what_the_tool_itself_cuts_off_is_charged_nothing():
    with OpenAIServer([Answer(delay_s=30.0)]) as server:
        (record,) = call(dataclasses.replace(expert(server), timeout_s=0.4))
    assert (record.error_type, record.latency_s, record.cost_usd) == ("timeout", 0.4, 0.0)


def test_a_slow_attempt_is_followed_by_another():
    record, _ = record_of([Answer(delay_s=30.0), "Oslo"], timeout_s=30.0, attempt_timeout_s=0.3)
    assert (record.text, record.attempts, record.cost_known) == ("Oslo", 2, False)


def test_attempts_that_had_begun_to_answer_are_charged():
    bad = Answer("word " * 100, piece_chars=5, drop="middle")
    record, server = record_of([bad, "Oslo"], stream=True)
    assert (record.text, record.attempts) == ("Oslo", 2)
    only_good = len(prompts(server)[0].split()) * 1e-3 + 1e-2
    assert record.cost_usd > only_good + 10 * 1e-2
    assert not record.cost_known
    record, _ = record_of([bad], stream=True)
    assert (record.error_type, record.attempts) == ("unavailable", 3)
    assert record.cost_usd > 3 * 10 * 1e-2


@both_ways
@pytest.mark.parametrize(
    "text", ["", None, "  \n", "<think>only thoughts</think>"], ids=["empty", "null", "blank", "thoughts"]
)
def test_an_empty_answer_is_an_error_that_is_charged(text, stream):
    record, server = record_of([Answer(text, usage={"prompt_tokens": 5, "completion_tokens": 7})], stream=stream)
    assert (record.status, record.error_type, record.attempts) == ("error", "unavailable", 1)
    assert "no answer" in record.text
    assert record.cost_usd == pytest.approx(5e-3 + 7e-2)
    assert (record.input_tokens, record.output_tokens, record.cost_known) == (5, 7, True)
    assert len(server.requests) == 1


def test_why_an_answer_is_empty_is_told():
    record, _ = record_of([Answer("", reasoning="Let me", finish_reason="length")])
    assert "ran out of output tokens" in record.text
    asked = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    record, _ = record_of([Answer(None, tool_calls=asked, finish_reason="tool_calls")])
    assert "asked for tools" in record.text


def test_what_is_behind_an_alias_is_not_told_to_the_policy(caplog):
    message = "The model `big-model-7` does not exist"
    with OpenAIServer([Answer(message, status=404)]) as server, caplog.at_level(logging.WARNING):
        (record,) = call(expert(server, model="big-model-7"))
    assert "big-model-7" not in record.text
    assert "The model `[model]` does not exist" in record.text
    assert message in caplog.text  # but to its developer


def test_an_address_that_does_not_answer_is_not_told_either():
    tool = expert_tool(name="e", model="m", base_url="http://localhost:1/v1", api_key_env=None, price=PRICE, retry=None)
    (record,) = call(tool)
    assert record.error_type == "unavailable"
    assert "localhost" not in record.text
    assert (record.cost_usd, record.cost_known) == (0.0, True)


def test_a_missing_key_is_told_when_made_and_when_called(monkeypatch, caplog):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with OpenAIServer() as server, caplog.at_level(logging.WARNING):
        tool = expert(server, api_key_env="SOME_KEY")
        assert "SOME_KEY is not set" in caplog.text
        (record,) = call(tool)
        assert (record.error_type, record.attempts) == ("unavailable", 1)
        assert "SOME_KEY" in record.text
        monkeypatch.setenv("SOME_KEY", "sk-1")
        assert call(tool)[0].text == "ok"


def test_the_key_is_in_no_record(monkeypatch):
    key = "sk-secret-0123456789"
    monkeypatch.setenv("SOME_KEY", key)
    record, _ = record_of([Answer(f"bad key {key}", status=401)], api_key_env="SOME_KEY")
    assert key not in json.dumps(record.as_dict())
    assert "bad key [API key]" in record.text


# Prices and limits.


def test_the_price_is_looked_up_overridden_or_given(tmp_path):
    listed = expert_tool(name="e", model="gpt-5-mini", provider="openai", api_key_env=None)
    assert listed.price == Price(per_input_token_usd=0.25e-6, per_output_token_usd=2e-6)
    table = tmp_path / "prices.json"
    table.write_text(json.dumps({"gpt-5-mini": PRICE}))
    own = Price(per_input_token_usd=1e-3, per_output_token_usd=1e-2)
    assert expert_tool(name="e", model="gpt-5-mini", prices=str(table), api_key_env=None).price == own
    assert expert_tool(name="e", model="gpt-5-mini", price=own, api_key_env=None).price == own
    assert expert_tool(name="e", model="gpt-5-mini", price={"per_call_usd": 0}, api_key_env=None).price == Price()


def test_an_alias_is_charged_by_its_own_price():
    with OpenAIServer([Answer(usage={"prompt_tokens": 2, "completion_tokens": 3})]) as server:
        alias = dataclasses.replace(expert(server), name="other", price=Price(per_call_usd=1.0))
        (record,) = call(alias)
    assert (record.tool, record.cost_usd) == ("other", 1.0)


def test_concurrency_is_limited_and_the_wait_is_not_latency():
    with OpenAIServer([Answer(delay_s=0.1)]) as server:
        tool = expert(server, max_concurrency=2)
        records = call(tool, names=["expert"] * 8)
    assert {record.text for record in records} == {"ok"}
    assert server.max_under_way == 2
    assert max(record.latency_s for record in records) < 0.4  # the last one waited that long for its slot
    assert max(record.queue_s for record in records) >= 0.25


def test_without_a_limit_calls_are_under_way_together():
    with OpenAIServer(hold_until=64) as server:
        records = call(expert(server), names=["expert"] * 64)
    assert [record.text for record in records] == ["ok"] * 64
    assert server.max_under_way == 64


def test_calls_per_second_are_limited():
    times = []

    def script(_request):
        times.append(time.monotonic())
        return "ok"

    with OpenAIServer(script) as server:
        call(expert(server, max_calls_per_s=10), names=["expert"] * 15)
    assert times[-1] - times[0] > 0.3  # ten at once, five more at a tenth of a second each


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sees": "everything"}, "sees"),
        ({"max_context_chars": 0}, "max_context_chars"),
        ({"price": {"input_usd_per_million": 1}}, "output_usd_per_million"),
        ({"price": {"input_usd_per_million": 2e6, "output_usd_per_million": 2e6}}, "single token"),
        ({"price": None}, "no price of 'm'"),
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"api_key_env": "sk-123"}, "api_key_env"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_concurrency": 1, "limiter": Limiter(max_concurrency=1)}, "not both"),
        ({"retry": {"max_attempts": 0}}, "max_attempts"),
        ({"name": "two words"}, "two words"),
        ({"model": ""}, "model"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_by_name(options, named):
    defaults = {"name": "e", "model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_env": None, "price": PRICE}
    with pytest.raises(ValueError, match=named):
        expert_tool(**{**defaults, **options})


# Whole episodes.


class Capital(ToolEnv):
    def __init__(self, tool, **limits):
        super().__init__(**limits)
        self.tools = (tool,)

    def sample_task(self, rng, options):
        return Task(QUESTION, answer="Oslo")

    def score(self, task, answer):
        return float(task.answer in answer)


def episode(env: ToolEnv, seed: int) -> tuple[list, list[dict]]:
    env.reset(seed=seed)
    ask = render_call(ToolCall("expert", {"instruction": "Which city?"}))
    steps = [env.step(action) for action in (ask, ask, "Oslo")]
    return [step[0] for step in steps], [step[4] for step in steps]


def test_an_episode_with_an_expert():
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    with OpenAIServer([Answer("It is Oslo.", usage=usage), Answer("Sure.", usage=None)]) as server:
        observations, infos = episode(Capital(expert(server)), 0)
    assert "It is Oslo." in observations[0]
    assert infos[0]["cost_usd"] == pytest.approx(0.1 + 0.1)
    assert [info["cost_known"] for info in infos] == [True, False, False]  # of the episode
    assert "It is Oslo." in prompts(server)[1]
    assert (infos[2]["outcome"], infos[2]["episode_calls"], infos[2]["episode_errors"]) == (1.0, 2, 0)


def test_an_endpoint_that_fails_ends_no_episode():
    with OpenAIServer([Answer(status=500)]) as server:
        observations, infos = episode(Capital(expert(server)), 0)
    assert "unavailable" in observations[0]
    assert [info["error_type"] for info in infos] == ["unavailable", "unavailable", ""]
    assert (infos[2]["outcome"], infos[2]["episode_errors"]) == (1.0, 2)


def test_many_episodes_share_an_expert():
    with OpenAIServer(["It is Oslo."], hold_until=48) as server:
        tool = expert(server)
        outcomes = []

        def work(seed):
            outcomes.append(episode(Capital(tool), seed)[1][-1]["outcome"])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(48)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert outcomes == [1.0] * 48
    assert len(server.requests) == 96
    assert server.max_under_way == 48
