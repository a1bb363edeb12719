"""A live server over the real engine and a tiny policy: exact answers, reuse of what is in the cache, concurrency."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orchestra_envs import CallContext, Task, ToolCall
from orchestra_envs.calls import run_calls
from orchestra_envs.live.expert import expert_tool
from orchestra_envs.loop import drive

sys.path.insert(0, str(Path(__file__).parent))
from serving import CONFIG, ask, ask_stream, assembled, chat_format, client, tiny, tiny_params, wait_until

from orchestra_jax.models.decoder import forward

TOOL = {
    "name": "search",
    "description": "Finds.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "enum": ["a", "b"]}},
        "required": ["query"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": TOOL}]


@pytest.fixture(scope="module")
def server():
    with tiny() as (url, worker):
        yield url, worker


@pytest.fixture
def url(server):
    return server[0]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 11}, {"seed": 11, "top_p": 0.8, "temperature": 0.7}])
def test_streams_and_whole_answers_are_the_same(url, options):
    whole = ask(url, max_tokens=40, **options)
    streamed, usage = assembled(ask_stream(url, max_tokens=40, stream_options={"include_usage": True}, **options))
    assert streamed["content"] == whole.choices[0].message.content
    assert streamed["finish_reason"] == whole.choices[0].finish_reason
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_seeds_differ(url):
    answers = {ask(url, max_tokens=20, seed=seed).choices[0].message.content for seed in range(4)}
    assert len(answers) == 4


def test_greedy_answers_and_logprobs_are_the_models(url):
    answer = ask(url, max_tokens=12, temperature=0, logprobs=True)
    chat = chat_format()
    prompt = chat.conversation_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids, expected = list(prompt), []
    logits = jax.jit(lambda tokens: forward(CONFIG, tiny_params(), tokens[None])[0])
    for _ in range(answer.usage.completion_tokens):
        padded = (
            jnp.zeros(64, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
        )  # one shape; what follows changes nothing
        row = np.asarray(logits(padded)[len(ids) - 1], np.float64)
        ids.append(int(row.argmax()))
        expected.append(-np.log(np.exp(row - row.max()).sum()))
    entries = answer.choices[0].logprobs.content
    sampled = [list(chat.tokenizer.token_bytes(token)) for token in ids[len(prompt) :]]
    assert [entry.bytes for entry in entries] == sampled
    np.testing.assert_allclose([entry.logprob for entry in entries], expected, atol=1e-3)


def test_a_second_turn_computes_its_new_tokens_only(server):
    url, worker = server
    stats = worker.engine.stats
    messages = [{"role": "system", "content": "Be brief, and always be kind."}, {"role": "user", "content": "Go on."}]
    known = 0
    for number in range(4):
        before = stats.prefilled_tokens
        answer = ask(url, messages=messages, tools=TOOLS, max_tokens=30, seed=number)
        if number:
            new = answer.usage.prompt_tokens - known
            assert stats.prefilled_tokens - before == new
            assert answer.usage.prompt_tokens_details.cached_tokens == known
        known = answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"And {number}?"}]


def test_conversations_keep_their_slots_though_they_begin_alike():
    """Three conversations with one long beginning take turns; nothing of them is computed a second time."""
    system = {"role": "system", "content": "You are careful. " * 12}
    with tiny(slots=4) as (url, worker):
        talks = {name: [system, {"role": "user", "content": f"I am {name}."}] for name in ("Ann", "Bob", "Cid")}
        known = {}
        for _ in range(3):
            for name, messages in talks.items():
                answer = ask(url, messages=messages, max_tokens=10)
                if name in known:
                    assert answer.usage.prompt_tokens_details.cached_tokens == known[name]
                elif known:
                    assert answer.usage.prompt_tokens_details.cached_tokens > 50  # the beginning, of another one's slot
                known[name] = answer.usage.prompt_tokens + answer.usage.completion_tokens
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"{name} again."}]
        assert worker.engine.stats.evictions == worker.engine.stats.reprefilled_tokens == 0


def test_sixteen_at_once(server):
    url, worker = server
    prompts = [f"Tell me of {'more ' * (number % 5)}{number}" for number in range(16)]
    alone = [ask(url, prompt, max_tokens=24, temperature=0).choices[0].message.content for prompt in prompts]
    steps = worker.engine.stats.decode_steps
    slot_steps = worker.engine.stats.slot_steps
    with ThreadPoolExecutor(16) as pool:
        together = pool.map(lambda prompt: ask(url, prompt, max_tokens=24, temperature=0), prompts)
        assert [answer.choices[0].message.content for answer in together] == alone
    stats = worker.engine.stats
    # Four slots: at least two sampled at a time, on average.
    assert (stats.slot_steps - slot_steps) / (stats.decode_steps - steps) > 2
    assert worker.num_open == 0


def test_a_stop_string_across_tokens(url):
    text = ask(url, max_tokens=40, temperature=0).choices[0].message.content
    stop = text[10:14]
    answer = ask(url, max_tokens=40, temperature=0, stop=[stop], logprobs=True)
    assert answer.choices[0].message.content == text[: text.index(stop)].strip()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 40
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    streamed, _ = assembled(ask_stream(url, max_tokens=40, temperature=0, stop=stop))
    assert streamed["content"] == answer.choices[0].message.content


def test_choices_share_their_prompt(server):
    url, worker = server
    before = worker.engine.stats.prefilled_tokens
    answer = ask(url, "A question that nobody has asked before, of some length", max_tokens=10, n=4)
    assert worker.engine.stats.prefilled_tokens - before <= answer.usage.prompt_tokens
    assert len({choice.message.content for choice in answer.choices}) == 4


def test_a_client_that_goes_away_frees_its_slot(monkeypatch):
    with tiny(slots=1, capacity=4000) as (url, worker), client(url) as asker:
        cancelled = []
        cancel = worker.engine.cancel
        monkeypatch.setattr(worker.engine, "cancel", lambda key: (cancelled.append(key), cancel(key)))
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        stream = asker.chat.completions.create(**asked, stream=True, max_tokens=3900, temperature=0)
        next(iter(stream))
        stream.close()
        wait_until(lambda: worker.num_open == 0)
        before = worker.engine.stats.sampled_tokens
        assert ask(url, max_tokens=4, temperature=0).usage.completion_tokens == 4  # in the only slot
        assert len(cancelled) == 1
        assert worker.engine.stats.sampled_tokens - before < 50


def test_a_policy_of_random_weights_calls_a_tool_if_it_must():
    pytest.importorskip("llguidance")
    other = {"type": "function", "function": {**TOOL, "name": "other"}}
    # Random, but with a liking for the token that begins a call.
    params = dict(tiny_params())
    begin = chat_format().tokenizer.added_tokens["<tool_call>"]
    params["embed_tokens"] = params["embed_tokens"].at[begin].multiply(8.0)
    named = {"type": "function", "function": {"name": "other"}}
    with tiny(params=params) as (url, _):
        names = []
        for choice, seed in (("required", 1), ("required", 2), ("required", 3), (named, 1), (named, 2)):
            tools = [*TOOLS, other]
            answer = ask(url, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed).choices[0]
            (call,) = answer.message.tool_calls
            assert json.loads(call.function.arguments) in ({"query": "a"}, {"query": "b"})
            assert answer.finish_reason == "tool_calls"
            names.append(call.function.name)
        assert names[3:] == ["other"] * 2
        # Where no call is allowed, the liking is of no use.
        answer = ask(url, tools=TOOLS, tool_choice="none", max_tokens=40, seed=1).choices[0]
        assert answer.message.tool_calls is None
        assert not hasattr(answer.message, "tool_call_errors")


def test_a_schema_that_no_grammar_can_enforce(url):
    pytest.importorskip("llguidance")
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}}
    with client(url) as asker, pytest.raises(Exception, match="odd") as caught:
        asker.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"type": "function", "function": odd}],
            tool_choice="required",
        )
    assert caught.value.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_expert_tool_can_ask_it(url, stream):
    tool = expert_tool(
        name="expert",
        model="tiny",
        base_url=url,
        api_key_env=None,
        price={"input_usd_per_million": 1.0, "output_usd_per_million": 10.0},
        max_output_tokens=16,
        temperature=0.0,
        stream=stream,
        retry=None,
    )

    def context(index):
        return CallContext(np.random.default_rng(0), Task("What is the capital?"), ())

    (record,) = drive(run_calls([ToolCall("expert", {})], {"expert": tool}, context, max_output_chars=4000))
    assert record.status == "ok", record.text
    expected = ask(url, "Task:\nWhat is the capital?", max_tokens=16, temperature=0)
    assert record.text == expected.choices[0].message.content
    assert (record.input_tokens, record.output_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert record.cost_known
