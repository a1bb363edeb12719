"""Many episodes at once: overlap, order, limits, faults; the script that plays with a plain OpenAI client."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import orchestra_envs
import pytest
from orchestra_envs import Task, ToolCall, ToolEnv, render_call, tool
from orchestra_envs.baselines import make_policy, run_episode
from orchestra_envs.runner import arun_episodes, run_episodes

from tests.envs.servers.openai_server import Answer, OpenAIServer

CALL = render_call(ToolCall("meet", {}))
ROOT = Path(__file__).parents[2]


class Meeting:
    """A tool that answers only when `size` calls are under way at once."""

    def __init__(self, size):
        self.size = size
        self.waiting = 0
        self.most = 0
        self.event = asyncio.Event()

    async def meet(self):
        """Meets the others."""
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        if self.waiting == self.size:
            self.event.set()
        await asyncio.wait_for(self.event.wait(), 20)
        self.waiting -= 1
        return "met"


def env_of(meeting, **limits):
    class Env(ToolEnv):
        tools = (tool(meeting.meet),)

        def sample_task(self, rng, options):
            return Task("Meet.", answer=int(rng.integers(10**9)), id="meet")

        def score(self, task, answer):
            return 1.0

    return Env(**limits)


class Caller:
    def __init__(self, calls=1):
        self.calls = calls

    def reset(self, env, observation, info, rng):
        self.rng = rng

    async def act(self, observation, info):
        self.calls -= 1
        await asyncio.sleep(0)
        return CALL if self.calls >= 0 else f"done {self.rng.integers(10**9)}"


def test_slow_tools_of_hundreds_of_episodes_overlap_in_one_thread():
    meeting = Meeting(300)
    threads = threading.active_count()
    episodes = run_episodes(lambda: env_of(meeting), Caller, range(300), concurrency=300)
    assert meeting.most == 300
    assert [episode.seed for episode in episodes] == list(range(300))
    assert all(episode.outcome == 1.0 and episode.tool_counts == {"meet": 1} for episode in episodes)
    assert threading.active_count() <= threads + 1


def test_no_more_at_once_than_asked_for_and_replicas_in_order():
    meeting = Meeting(4)
    ended = []
    episodes = run_episodes(
        lambda: env_of(meeting), Caller, range(4), replicas=3, concurrency=4, on_episode=ended.append
    )
    assert meeting.most == 4
    assert [(e.seed, e.replica) for e in episodes] == [(s, r) for s in range(4) for r in range(3)]
    assert sorted(ended, key=lambda e: (e.seed, e.replica)) == episodes
    assert len({episode.messages[-1]["content"] for episode in episodes}) == 12  # each policy has its own luck


def test_the_same_episodes_as_one_by_one():
    make = lambda: orchestra_envs.make("orchestra/Market-v0", preference="random")  # noqa: E731
    together = run_episodes(make, lambda: make_policy("habit"), range(20), replicas=2, concurrency=7)
    env = make()
    alone = [run_episode(env, make_policy("habit"), seed, replica) for seed in range(20) for replica in range(2)]
    assert together == alone


def test_from_inside_another_event_loop():
    assert asyncio.run(arun_episodes(lambda: env_of(Meeting(1)), Caller, [3]))[0].seed == 3


def test_what_a_policy_raises_comes_out_and_the_others_stop():
    stopped = []

    class Failing(Caller):
        async def act(self, observation, info):
            if self.rng.integers(10) == 0:
                raise KeyError("policy")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.append(1)
                raise

    with pytest.raises(KeyError, match="policy"):
        run_episodes(lambda: env_of(Meeting(1)), Failing, range(50), concurrency=50)
    for _ in range(100):
        if len(stopped) > 10:
            break
        threading.Event().wait(0.05)
    assert len(stopped) > 10


def test_mistakes():
    with pytest.raises(ValueError, match="concurrency must be a whole number of at least 1"):
        run_episodes(lambda: env_of(Meeting(1)), Caller, [0], concurrency=0)
    with pytest.raises(ValueError, match="only a ToolEnv without wrappers of other packages"):
        run_episodes(lambda: gym.make("CartPole-v1"), Caller, [0])
    with pytest.raises(ValueError, match="only a ToolEnv without wrappers of other packages"):
        run_episodes(lambda: gym.wrappers.RecordEpisodeStatistics(env_of(Meeting(1))), Caller, [0])


def play(script, *more):
    """`benchmarks/openai_client.py` on eight tasks of the market."""
    kwargs = json.dumps({"types": ["arithmetic"]})
    with OpenAIServer(script) as server:
        flags = ["--model=m", "--api-key-env=", "--episodes=8", f"--base-url={server.base_url}", f"--kwargs={kwargs}"]
        return server, subprocess.run(
            [sys.executable, "benchmarks/openai_client.py", *flags, *more],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", "PATH": ""},
            timeout=120,
        )


def test_the_script_plays_with_a_plain_openai_client():
    """A model that calls the calculator by the API's own tool calls, then answers."""

    def script(request):
        last = request["messages"][-1]
        tools = [t["function"]["name"] for t in request["tools"]]
        assert "calculator" in tools
        if last["role"] == "user":
            function = {"name": "calculator", "arguments": "{}"}
            return Answer(None, tool_calls=[{"id": "c1", "type": "function", "function": function}])
        return Answer("Answer: " + last["content"].split()[-1])

    server, done = play(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "accuracy   100.0% of 8" in done.stdout
    assert "calls      1.00 a task" in done.stdout
    assert len(server.requests) == 16


def test_the_script_counts_episodes_without_a_usable_answer():
    bad = [
        Answer(choices=False),
        Answer(body=b"<html>", content_type="text/html"),
        Answer(body=b"{"),
        Answer("Answer: x"),
    ]
    server, done = play([*bad, *bad])
    assert done.returncode == 0, done.stderr
    assert "failed     6 of 8: the endpoint gave no usable answer" in done.stdout
    assert "Traceback" not in done.stderr
    assert all(f"{server.base_url}/ failed" in line for line in done.stderr.splitlines())


def test_the_script_ends_at_once_where_its_key_is_refused():
    server, done = play([Answer("Incorrect API key", status=401)])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {server.base_url}/ refuses the requests: AuthenticationError: ")
    assert "Incorrect API key" in line
    assert not done.stdout


def test_the_script_does_not_wait_for_ever():
    _, done = play([Answer(delay_s=60.0)], "--timeout-s=0.2")
    assert done.returncode == 1
    assert "failed     8 of 8" in done.stdout
    assert "failed 8 times: APITimeoutError: Request timed out." in done.stderr
