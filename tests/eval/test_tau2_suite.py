"""A suite of tau2 tasks with an endpoint as the orchestrator; a stand-in for the package, real HTTP for both models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from orchestra_envs.tau2 import library

from orchestra_jax.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1]))
from envs.servers.openai_server import Answer, OpenAIServer

pytest.importorskip("openai")

FAKE = Path(__file__).parents[1] / "envs" / "fake_tau2"


def forget_tau2():
    """Takes tau2 out of the loaded modules; returns them."""
    library.load.cache_clear()
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tau2"}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    loaded = forget_tau2()
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    forget_tau2()
    sys.modules.update(loaded)


def user(body):
    return "Thank you. ###STOP###" if "Done" in body["messages"][-1]["content"] else "Please lend b1 to ann."


def agent(body):
    if body["messages"][-1]["role"] == "tool":
        return "Done."
    call = {"name": "lend_book", "arguments": json.dumps({"book_id": "b1", "reader": "ann"})}
    return Answer(None, tool_calls=[{"id": "c1", "type": "function", "function": call}])


def test_each_task_of_the_set_once_with_two_trials(tmp_path, capsys):
    with OpenAIServer(user) as user_server, OpenAIServer(agent) as agent_server:
        kwargs = {
            "domain": "desk",
            "tasks": ["lend", "unlock"],
            "user": {"model": "u", "base_url": user_server.base_url, "api_key_env": None},
        }
        suite = {"env": {"id": "orchestra/Tau2-v0", "kwargs": kwargs}, "num_tasks": "all"}
        (tmp_path / "s.yaml").write_text(json.dumps({"suites": {"desk": suite}}))
        out = tmp_path / "out"
        words = ["eval", "--suite", str(tmp_path / "s.yaml"), "--policy", f"agent=endpoint:m@{agent_server.base_url}"]
        assert main([*words, "--trials", "2", "--reference", "none", "--out", str(out)]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in (out / "episodes/desk/agent.jsonl").read_text().splitlines()]
    assert sorted((r["task_id"], r["trial"]) for r in records) == [(t, n) for t in ("lend", "unlock") for n in (0, 1)]
    assert {r["task_id"]: r["outcome"] for r in records}["lend"] == 1.0
    entry = json.loads((out / "summary.json").read_text())["policies"]["agent"]
    assert entry["pass_hat_k"] == [entry["accuracy"]] * 2
    assert entry["end_reasons"] == {"user_ended": 4}
