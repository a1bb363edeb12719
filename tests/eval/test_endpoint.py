"""Endpoints as orchestrators against a real HTTP server: forms of calls, accounts, faults, a stop and its resume."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from orchestra_envs import judge as judge_module

from orchestra_jax.cli.main import main
from orchestra_jax.eval.endpoint import read_orchestrator

sys.path.insert(0, str(Path(__file__).parents[1]))
from envs.servers.openai_server import Answer, OpenAIServer

pytest.importorskip("openai")

NUM_TASKS = 12
PRICE = {"input_usd_per_million": 1000.0, "output_usd_per_million": 2000.0}
SUITES = {
    "suites": {
        "sums": {
            "env": {
                "id": "orchestra/Market-v0",
                "kwargs": {"split": "test", "types": ["arithmetic"], "tools": ["calculator", "qwen2.5-math-7b"]},
            },
            "num_tasks": NUM_TASKS,
        }
    }
}


def native_call(name, arguments="{}", call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def last(body):
    return body["messages"][-1]


def solves(body):
    """An orchestrator that calls the calculator natively and copies its result."""
    if last(body)["role"] == "tool":
        return f"Answer: {last(body)['content'].split()[-1]}"
    return Answer(None, tool_calls=[native_call("calculator")], finish_reason="tool_calls")


@pytest.fixture
def evaluate(tmp_path, capsys):
    """Runs `orchestra eval` with one endpoint; exit code, summary (None if there is none), and standard error."""
    (tmp_path / "suites.yaml").write_text(json.dumps(SUITES))

    def evaluate(server, *arguments, out=None, **settings):
        settings = {"model": "boss", "base_url": server.base_url, "price": PRICE, **settings}
        settings = {"retry": {"max_attempts": 3, "base_delay_s": 0.0}, **settings}
        (tmp_path / "boss.yaml").write_text(json.dumps(settings))
        result = tmp_path / "result.json"
        result.unlink(missing_ok=True)
        words = ["eval", "--suite", str(tmp_path / "suites.yaml"), "--policy", f"endpoint:{tmp_path / 'boss.yaml'}"]
        words += ["--reference", "none", "--json", str(result), *(["--out", str(out)] if out else []), *arguments]
        code = main(words)
        return code, json.loads(result.read_text()) if result.exists() else None, capsys.readouterr().err

    return evaluate


def test_native_calls_results_and_accounts(evaluate, tmp_path):
    with OpenAIServer(solves) as server:
        code, summary, _ = evaluate(server, out=tmp_path / "out", temperature=0.5, max_output_tokens=99)
    assert code == 0
    entry = summary["policies"]["boss"]
    assert (entry["accuracy"], entry["num_episodes"], entry["tools"]) == (1.0, NUM_TASKS, {"calculator": 1.0})
    asked, answered = server.requests[0], next(b for b in server.requests if last(b)["role"] == "tool")
    assert (asked["temperature"], asked["max_tokens"], asked["model"]) == (0.5, 99, "boss")
    # Names that the API would refuse are sent in a form that it takes.
    assert [t["function"]["name"] for t in asked["tools"]] == ["calculator", "qwen2_5-math-7b"]
    assert "$0.2 per million" in asked["tools"][1]["function"]["description"]
    call = answered["messages"][-2]["tool_calls"][0]
    assert (call["id"], call["function"]["name"]) == ("c1", "calculator")
    assert last(answered)["tool_call_id"] == "c1"
    # The calculator is free: all of the cost is the orchestrator's own, by the usage that the server counted.
    records = [json.loads(line) for line in (tmp_path / "out/episodes/sums/boss.jsonl").read_text().splitlines()]
    for record in records:
        turns = [turn for turn in record["turns"] if turn["role"] == "assistant"]
        own = sum(t["num_input_tokens"] * 1e-3 + t["num_tokens"] * 2e-3 for t in turns)
        assert record["cost_usd"] == record["policy_cost_usd"] == pytest.approx(own)
        assert record["cost_known"]
        assert 0 < record["policy_latency_s"] <= record["latency_s"]
        assert turns[0]["text"] == '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    assert entry["policy_cost_usd"] == pytest.approx(entry["cost_usd"])


def test_names_are_mapped_back_and_experts_are_charged(evaluate):
    def asks_expert(body):
        if last(body)["role"] == "tool":
            return "Answer: 1"
        return Answer("Let me ask.", tool_calls=[native_call("qwen2_5-math-7b")])

    with OpenAIServer(asks_expert) as server:
        _, summary, _ = evaluate(server)
    entry = summary["policies"]["boss"]
    assert entry["tools"] == {"qwen2.5-math-7b": 1.0}
    assert entry["cost_usd"] > entry["policy_cost_usd"] > 0


def test_text_form(evaluate):
    def writes(body):
        if last(body)["content"].startswith("<tool_response>"):
            return f"Answer: {re.findall('[0-9-]+', last(body)['content'])[-1]}"
        return '<think>a sum</think><tool_call>{"name": "calculator", "arguments": {}}</tool_call>'

    with OpenAIServer(writes) as server:
        _, summary, _ = evaluate(server, calls="text")
    assert summary["policies"]["boss"]["accuracy"] == 1.0
    assert "tools" not in server.requests[0]
    assert '"name": "calculator"' in server.requests[0]["messages"][0]["content"]


def test_broken_arguments_and_unknown_tools_are_told_to_the_model(evaluate):
    def stumbles(body):
        say = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        if not say:
            return Answer(None, tool_calls=[native_call("calculator", "{oops"), native_call("nothing", call_id="c2")])
        assert "not valid JSON" in say[0]
        return "Answer: 0"

    with OpenAIServer(stumbles) as server:
        code, summary, _ = evaluate(server)
    assert code == 0
    assert summary["policies"]["boss"]["end_reasons"] == {"answered": NUM_TASKS}
    second = next(b for b in server.requests if last(b)["role"] == "tool")
    assert [m["tool_call_id"] for m in second["messages"] if m["role"] == "tool"] == ["c1", "c2"]
    assert json.loads(second["messages"][-3]["tool_calls"][0]["function"]["arguments"]) == {}


def test_faults_that_pass_are_retried_and_counted(evaluate):
    faults = iter(
        [
            Answer("slow down", status=429, headers={"Retry-After": "0"}),
            Answer("oops", status=500),
            Answer(body=b"<html>garbage</html>"),
            Answer(drop="headers"),
        ]
    )
    with OpenAIServer(lambda body: next(faults, None) or solves(body)) as server:
        code, summary, _ = evaluate(server, "--concurrency", "1", retry={"max_attempts": 5, "base_delay_s": 0.0})
    assert code == 0
    assert summary["policies"]["boss"]["accuracy"] == 1.0
    problems = summary["failed_requests"]["boss"]
    assert problems == {"HTTP status 429": 1, "HTTP status 500": 1, "no usable answer": 2}


def test_an_episode_lost_to_the_endpoint_is_no_wrong_answer_and_is_tried_again(evaluate, tmp_path):
    broken = [True]

    def sometimes(body):
        if broken[0] and "- " in body["messages"][1]["content"]:
            return Answer("oops", status=503)
        return solves(body)

    out = tmp_path / "out"
    with OpenAIServer(sometimes) as server:
        _, summary, err = evaluate(server, out=out)
        entry = summary["policies"]["boss"]
        assert 0 < entry["num_infra_errors"] < NUM_TASKS
        assert entry["accuracy"] in (None, 1.0)
        assert "WARNING: boss: accuracy" in err
        broken[0], before = False, len(server.requests)
        _, summary, _ = evaluate(server, out=out)
        assert len(server.requests) == before + 2 * entry["num_infra_errors"]
    assert summary["policies"]["boss"]["num_episodes"] == NUM_TASKS


def test_slow_answers_end_by_the_time_limit(evaluate):
    with OpenAIServer([Answer("x", delay_s=5.0)]) as server:
        code, summary, err = evaluate(server, timeout_s=0.2, retry={"max_attempts": 1})
    assert (code, summary) == (2, None)
    assert "failed in each of its first 8 episodes" in err


def test_turns_cut_by_the_length_limit_end_the_episode(evaluate):
    with OpenAIServer([Answer("Answer: 12", finish_reason="length")]) as server:
        _, summary, _ = evaluate(server)
    entry = summary["policies"]["boss"]
    assert (entry["accuracy"], entry["end_reasons"]) == (0.0, {"length": NUM_TASKS})


def test_a_conversation_too_long_for_the_model_is_its_failure(evaluate):
    answer = Answer("This model's maximum context length is 8 tokens", status=400)
    with OpenAIServer([answer]) as server:
        _, summary, _ = evaluate(server)
    assert summary["policies"]["boss"]["end_reasons"] == {"context": NUM_TASKS}


def test_a_refused_key_stops_at_once_and_is_not_shown(evaluate, monkeypatch):
    monkeypatch.setenv("BOSS_KEY", "sk-secret-123")
    with OpenAIServer([Answer("bad key sk-secret-123", status=401)]) as server:
        code, _, err = evaluate(server, "--concurrency", "1", api_key_env="BOSS_KEY")
        assert server.headers[0]["authorization"] == "Bearer sk-secret-123"
    assert code == 2
    assert len(server.requests) == 1
    assert "sk-secret" not in err


def test_concurrency(evaluate):
    with OpenAIServer(solves, hold_until=6) as server:
        evaluate(server, "--concurrency", "6")
        assert server.max_under_way == 6
    with OpenAIServer(solves) as server:
        evaluate(server, "--concurrency", "6", max_concurrency=2)
        assert server.max_under_way <= 2


def test_an_interrupt_keeps_what_was_finished_and_the_same_command_goes_on(evaluate, tmp_path):
    out, limit = tmp_path / "out", [9]

    def interrupted(body):
        if len(server.requests) == limit[0]:
            os.kill(os.getpid(), signal.SIGTERM)
        return solves(body)

    with OpenAIServer(interrupted) as server:
        code, summary, err = evaluate(server, "--concurrency", "1", out=out)
        assert (code, summary) == (130, None)
        assert f"kept in {out}, the same command goes on" in err
        kept = len((out / "episodes/sums/boss.jsonl").read_text().splitlines())
        assert 0 < kept < NUM_TASKS
        limit[0], before = -1, len(server.requests)
        code, resumed, _ = evaluate(server, "--concurrency", "1", out=out)
        assert code == 0
        assert len(server.requests) - before == 2 * (NUM_TASKS - kept)
        _, whole, _ = evaluate(server, "--concurrency", "4")
    for key in ("accuracy", "cost_usd", "tools", "num_episodes"):
        assert resumed["policies"]["boss"][key] == pytest.approx(whole["policies"]["boss"][key])
    code, _, err = evaluate(server, out=out, temperature=1.0)
    assert code == 2
    assert "policies.boss.endpoint.temperature was null, is 1.0" in err


def test_trials_differ_and_give_pass_hat_k(evaluate):
    """Right in the first trial of a task, wrong in its second: pass^1 is a half, pass^2 nothing."""
    met = set()

    def forgets(body):
        question = body["messages"][1]["content"]
        if last(body)["role"] == "tool" and question in met:
            return "Answer: never"
        if last(body)["role"] == "tool":
            met.add(question)
        return solves(body)

    with OpenAIServer(forgets) as server:
        _, summary, _ = evaluate(server, "--trials", "2", "--concurrency", "1")
    entry = summary["policies"]["boss"]
    assert entry["pass_hat_k"] == [0.5, 0.0]
    assert (entry["accuracy"], entry["num_episodes"], entry["num_tasks"]) == (0.5, 2 * NUM_TASKS, NUM_TASKS)


def test_the_verdicts_of_a_judge_are_kept_in_the_folder(tmp_path, capsys):
    """Two policies give the same doubtful answers; the second, evaluated later, costs no verdict."""
    (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "Who is {n}?", "answer": "Ada"}}\n' for n in range(6)))

    def judges(body):
        code = re.search(r"verdict (\w{12})", str(body["messages"]), re.IGNORECASE)[1]
        return f"VERDICT {code}: correct"

    with OpenAIServer(judges) as judge, OpenAIServer(["Answer: the Countess"]) as boss:
        spec = {"model": "j", "base_url": judge.base_url, "api_key_env": None, "price": PRICE}
        kwargs = {"path": str(tmp_path / "q.jsonl"), "judge": spec}
        suite = {"env": {"id": "orchestra/QA-v0", "kwargs": kwargs}, "num_tasks": "all"}
        (tmp_path / "s.yaml").write_text(json.dumps({"suites": {"who": suite}}))
        words = ["eval", "--suite", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out"), "--reference", "none"]
        for name in ("one", "two"):
            judge_module._judges.clear()  # as in another process
            words += ["--policy", f"{name}=endpoint:m@{boss.base_url}"]
            assert main(words) == 0, capsys.readouterr().err
            assert len(judge.requests) == 6
        assert len(boss.requests) == 12
    policies = json.loads((tmp_path / "out/summary.json").read_text())["policies"]
    assert [policies[name]["accuracy"] for name in ("one", "two")] == [1.0, 1.0]


def test_short_forms(monkeypatch):
    name, local = read_orchestrator("org/qwen3@http://127.0.0.1:8000/v1")
    assert (name, local.settings.model, local.settings.api_key_env) == ("qwen3", "org/qwen3", None)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    _, official = read_orchestrator("gpt-5-mini")
    assert official.settings.api_key_env == "OPENAI_API_KEY"
    assert official.price is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{model: m, api_key: sk-1}", "api_key: Extra inputs"),
        ("{base_url: 'http://x/v1'}", "model: Field required"),
        ("{model: m, price: {input_usd_per_million: 1}}", "no output_usd_per_million"),
        ("{model: m, retry: {attempts: 1}}", "attempts"),
        ("{model: m, api_key_env: NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE is not set"),
        ("{model: m, base_url: 'ftp://x'}", "must be a URL"),
        ("- 1", "valid dictionary"),
    ],
)
def test_mistakes_in_an_endpoint_file(tmp_path, capsys, content, message):
    (tmp_path / "e.yaml").write_text(content)
    assert main(["eval", "--suite", "market", "--policy", f"endpoint:{tmp_path / 'e.yaml'}"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "sk-1" not in err
    assert len(err.splitlines()) == 1
