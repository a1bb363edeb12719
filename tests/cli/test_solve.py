"""`orchestra solve`: a warm-started tiny policy asks a local endpoint, and plays a task; mistakes cost nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from orchestra_jax.cli.main import main
from orchestra_jax.cli.solve import solve
from orchestra_jax.config import ConfigError, load_config
from orchestra_jax.models.decoder import init_params
from orchestra_jax.rollout.policy import load_policy, save_policy

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
from servers.openai_server import Answer, OpenAIServer
from tiny import CONFIG, write_config

EXPERT = "gpt-5-mini"
TASKS = {"types": ["arithmetic"], "tools": [EXPERT], "max_turns": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder. Its policy has seen one tool: it asks the expert, reads a number and answers."""
    folder = tmp_path_factory.mktemp("solve")
    sft = {**CONFIG["sft"], "router": f"always:{EXPERT}", "num_tasks": 512}
    config = write_config(folder, env={"kwargs": TASKS}, sft=sft, eval={"baselines": []})
    assert main(["sft", str(config)]) == 0
    shutil.copytree(folder / "run" / "warm_start", folder / "run" / "model")
    return folder / "run"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    """A Hugging Face folder of fresh weights."""
    folder = tmp_path_factory.mktemp("solve_untrained")
    config = load_config(write_config(folder))
    policy = load_policy(config.model, config.text, seed=0)
    save_policy(folder / "policy", policy, init_params(policy.config, jax.random.key(0)))
    return folder / "policy"


def tools_file(folder: Path, base_url: str, **more) -> str:
    """Tools of a question: the expert, behind a server."""
    entry = {"kind": "expert", "name": EXPERT, "model": "m", "base_url": base_url, "api_key_env": None}
    price = {"input_usd_per_million": 1000.0, "output_usd_per_million": 10_000.0}
    file = folder / "tools.yaml"
    file.write_text(json.dumps([{**entry, "price": price, **more}]))
    return str(file)


def test_a_question_is_answered_with_a_live_tool(run, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    with OpenAIServer(["Answer: 7"]) as server:
        tools = tools_file(tmp_path, server.base_url)
        record = solve(str(run), "Compute 3 + 4.", tools=tools, preference="Be quick.", json_file=str(out))
    lines = capsys.readouterr().out.splitlines()
    assert "Compute 3 + 4." in json.dumps(server.requests[0]["messages"])
    assert lines[:3] == ["question  Compute 3 + 4.", " " * 10, "          Be quick."]
    assert lines[3] == f"tools     {EXPERT}"
    labels = [line[:9].strip() for line in lines[4:]]
    assert labels[:4] == ["turn 1", "call", "result", "so far"]
    assert lines[5] == f"call      {EXPERT} {{}}"
    assert lines[6].startswith(f"result    {EXPERT} ok, $0.0")
    assert lines[6].endswith(" s: Answer: 7")
    assert (labels[-2], labels[-1]) == ("answer", "end")
    assert lines[-1].startswith(f"end       answered; {labels.count('call') + 1} turns, {labels.count('call')} call")
    (line,) = out.read_text().splitlines()
    assert json.loads(line) == json.loads(json.dumps(record))
    assert (record["phase"], record["end_reason"], record["outcome"]) == ("solve", "answered", None)
    assert record["answer"] == lines[-2].removeprefix("answer    ")
    (call,) = record["turns"][1]["calls"]
    assert (call["tool"], call["source"], call["status"], call["text"]) == (EXPERT, "live", "ok", "Answer: 7")
    assert call["input_tokens"] > 0
    assert record["cost_usd"] == pytest.approx(0.001 * call["input_tokens"] + 0.01 * call["output_tokens"])
    assert record["prompt"].endswith("<|im_start|>assistant\n")
    for turn in record["turns"]:
        assert (turn["role"] == "assistant") == ("logprobs" in turn)


def test_the_same_command_gives_the_same_turns_and_temperature_makes_a_difference(run, tmp_path):
    with OpenAIServer(["Answer: 7"]) as server:
        tools = tools_file(tmp_path, server.base_url)

        def turns(**options):
            record = solve(str(run / "model"), "Compute 3 + 4.", tools=tools, **options)
            return [turn["text"] for turn in record["turns"] if turn["role"] == "assistant"]

        assert turns() == turns(seed=1)
        samples = [turns(temperature=3.0, seed=seed) for seed in range(4)]
        assert turns(temperature=3.0, seed=0) == samples[0]
        assert len({str(sample) for sample in samples}) > 1


def test_a_task_of_the_runs_environment(run, capsys):
    record = solve(str(run), None, task=5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("task      Compute ")
    assert record["task_id"].startswith("train/arithmetic/")
    assert record["turns"][1]["calls"][0]["source"] == "simulated"
    assert record["outcome"] in (0.0, 1.0)
    assert f"outcome {record['outcome']:g}" in lines[-1]
    assert solve(str(run), None, task=5)["turns"] == record["turns"]
    assert solve(str(run), None, task=6)["prompt"] != record["prompt"]


def test_limits_end_it(run, tmp_path, capsys):
    record = solve(str(run), None, task=5, max_turns=1)
    assert (record["end_reason"], record["answer"]) == ("max_turns", None)
    assert "no answer: all turns are used up (--max-turns); 1 turn, 1 call" in capsys.readouterr().out
    with OpenAIServer(["Answer: 7"]) as server:
        tools = tools_file(tmp_path, server.base_url)
        record = solve(str(run), "Compute 3 + 4.", tools=tools, budget_usd=0.0)
    assert (record["end_reason"], record["cost_usd"], server.requests) == ("budget", 0.0, [])


def test_a_tool_that_fails_is_an_observation(run, tmp_path, capsys):
    with OpenAIServer([Answer("no such model", status=404)]) as server:
        record = solve(str(run), "Compute 3 + 4.", tools=tools_file(tmp_path, server.base_url), max_turns=2)
    assert record["turns"][1]["calls"][0]["error_type"] == "unavailable"
    assert f"result    {EXPERT} failed (unavailable), $0, " in capsys.readouterr().out


def test_a_folder_that_is_no_run(untrained, tmp_path):
    with OpenAIServer(["Answer: 7"]) as server:
        record = solve(str(untrained), "Compute 3 + 4.", tools=tools_file(tmp_path, server.base_url), max_turns=2)
    assert "Solve the user's task" in record["prompt"]
    assert record["end_reason"]


INTERRUPTED = """
import signal
import sys
from orchestra_jax.cli.solve import solve

# Where the tests run as a background job of a shell, its children ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    solve(sys.argv[1], "Compute 3 + 4.", tools=sys.argv[2], json_file=sys.argv[3])
except KeyboardInterrupt as interrupt:
    print(interrupt, file=sys.stderr)
    sys.exit(130)
"""


def test_an_interrupt_ends_it_with_what_was_spent(run, tmp_path):
    out = tmp_path / "out.jsonl"
    with OpenAIServer(lambda body: Answer("Answer: 7", delay_s=30.0)) as server:
        command = [sys.executable, "-c", INTERRUPTED, str(run), tools_file(tmp_path, server.base_url), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while not server.requests and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            interrupted = time.monotonic()
            printed, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert time.monotonic() - interrupted < 15
    assert errors.splitlines()[-1] == "interrupted after 0 calls, $0, 0 s of tools"
    last = printed.splitlines()[-1]
    assert last.startswith("end       interrupted; 1 turn, 0 calls, $0, ")
    assert last.endswith(f"; under way, and not counted: {EXPERT}")
    record = json.loads(out.read_text())
    assert (record["end_reason"], record["answer"], len(record["turns"])) == ("interrupted", None, 1)


def test_the_command(run, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    arguments = ["--task", "5", "--temperature", "0.5", "--seed", "2", "--max-turns", "2", "--budget-usd", "1"]
    assert main(["solve", str(run), *arguments, "--json", str(out)]) == 0
    record = solve(str(run), None, task=5, temperature=0.5, seed=2, max_turns=2, budget_usd=1.0)
    assert json.loads(out.read_text()) == json.loads(json.dumps(record))
    capsys.readouterr()
    for wrong in (["Why?"], ["Why?", "--tools", str(tmp_path / "none.yaml")], [], ["Why?", "--max-tokens", "1"]):
        assert main(["solve", str(run), *wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("orchestra: ")


@pytest.fixture
def mistake(run, capsys):
    """What `solve` says of arguments that cannot be; nothing may have been shown by then."""

    def mistake(policy: Path | str, question: str | None = "Compute 3 + 4.", **options) -> str:
        with pytest.raises(ConfigError) as caught:
            solve(str(policy), question, **options)
        assert capsys.readouterr().out == ""
        return str(caught.value)

    return mistake


def test_folders_that_hold_no_policy(mistake, run, tmp_path, untrained):
    assert "no such folder" in mistake(tmp_path / "none")
    assert "neither config.yaml (a run) nor config.json" in mistake(tmp_path)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    assert "its training has not finished" in mistake(tmp_path)
    shutil.copytree(untrained, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    (tmp_path / "tools.yaml").write_text("[]")
    assert "safetensors" in mistake(tmp_path / "broken", tools=str(tmp_path / "tools.yaml"))


def test_flags_that_do_not_fit(mistake, run, untrained, tmp_path):
    assert "ask one thing" in mistake(run, None)
    assert "ask one thing" in mistake(run, task=5)
    assert "a task brings its own" in mistake(run, None, task=5, tools="x.yaml")
    assert "a task brings its own" in mistake(run, None, task=5, preference="Be quick.")
    assert "is no run" in mistake(untrained, None, task=5)
    assert "--task -1" in mistake(run, None, task=-1)
    assert "--temperature -1" in mistake(run, temperature=-1.0)
    assert "--tools FILE" in mistake(untrained)
    assert "--task SEED" in mistake(run)  # the market's tools know its own tasks only
    assert "max_turns" in mistake(run, None, task=5, max_turns=0)
    assert "budget_usd" in mistake(run, None, task=5, budget_usd=-1.0)
    assert "--json" in mistake(run, None, task=5, json_file=str(tmp_path))


def test_tools_that_cannot_be_made(mistake, run, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    keyed = tools_file(tmp_path, "http://127.0.0.1:9/v1", api_key_env="NO_SUCH_KEY")
    assert "the environment variable NO_SUCH_KEY is not set" in mistake(run, tools=keyed)
    other = tools_file(tmp_path, "http://127.0.0.1:9/v1", kind="exprt")
    assert "tools.yaml[0].kind: no kind 'exprt'" in mistake(run, tools=other)
    assert "No such file" in mistake(run, tools=str(tmp_path / "none.yaml"))


def test_prompts_that_leave_no_room(mistake, run, tmp_path):
    tools = tools_file(tmp_path, "http://127.0.0.1:9/v1")
    text = mistake(run, "Why? " * 80, tools=tools)
    assert "raise --max-tokens (the model holds 1024)" in text
    text = mistake(run, "Why? " * 800, tools=tools, max_tokens=1024)
    assert "raise" not in text
    assert "fewer tools" in text
    assert "--max-tokens 2000: the model holds at most 1024" in mistake(run, tools=tools, max_tokens=2000)
    assert "--max-tokens 10: must be more than the 10" in mistake(run, tools=tools, max_tokens=10)
    with OpenAIServer(["Answer: 7"]) as server:
        tools = tools_file(tmp_path, server.base_url)
        assert solve(str(run), "Why? " * 80, tools=tools, max_tokens=1024)["turns"]
