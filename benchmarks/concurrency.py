"""How many episodes with slow tools can run at once?

    python -m benchmarks.concurrency --json concurrency.json

Episodes of some turns, each turn one call of an async tool of 200 ms: run by `orchestra_envs.runner` in one thread, and
by `gymnasium.vector` (one environment after the other, and one process per environment), all in one run. The limit is
the longest chain: turns x tool time, when nothing waits for anything else. `gymnasium.vector` steps in lock-step and
runs fewer episodes here where it would take minutes; its row says how many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from orchestra_envs import Task, ToolCall, ToolEnv, render_call, tool
from orchestra_envs.runner import run_episodes

ACTION = render_call(ToolCall("wait", {}))
TOOL_S = 0.2


@tool(latency_s=TOOL_S)
async def wait() -> str:
    """Takes 200 ms."""
    await asyncio.sleep(TOOL_S)
    return "done"


@tool(latency_s=TOOL_S)
def wait_plain() -> str:
    """Takes 200 ms and blocks its thread."""
    time.sleep(TOOL_S)
    return "done"


class Waiting(ToolEnv):
    """Every turn calls a slow tool."""

    tools = (wait, wait_plain)

    def sample_task(self, rng, options):
        """The only task."""
        return Task("Wait.")

    def score(self, task, answer):
        """Every answer is right."""
        return 1.0


class Caller:
    """Calls one tool `turns` times, then answers."""

    def __init__(self, turns: int, name: str = "wait") -> None:
        self.left = turns
        self.action = render_call(ToolCall(name, {}))

    def reset(self, env, observation, info, rng):
        """Nothing to prepare."""

    def act(self, observation, info):
        """The next call, or the answer."""
        self.left -= 1
        return self.action if self.left >= 0 else "done"


def ours(episodes: int, turns: int, name: str) -> float:
    """Seconds for all episodes with the runner."""
    start = time.perf_counter()
    done = run_episodes(
        lambda: Waiting(max_turns=turns + 1), lambda: Caller(turns, name), range(episodes), concurrency=episodes
    )
    seconds = time.perf_counter() - start
    assert all(episode.outcome == 1.0 for episode in done)
    return seconds


def vector(kind: Callable[..., gym.vector.VectorEnv], episodes: int, turns: int) -> float:
    """Seconds for all episodes with a vector environment of Gymnasium, its start not counted."""
    extra: dict[str, Any] = {"shared_memory": False} if kind is AsyncVectorEnv else {}
    envs = kind([lambda: Waiting(max_turns=turns + 1)] * episodes, **extra)
    envs.reset(seed=0)
    start = time.perf_counter()
    for _ in range(turns):
        envs.step([ACTION] * episodes)
    envs.step(["done"] * episodes)
    seconds = time.perf_counter() - start
    envs.close()
    return seconds


def memory_mib() -> float:
    """Peak resident memory of this process and of its largest child, in MiB."""
    return sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def measure(episodes: int, turns: int) -> dict[str, Any]:
    """All rows of the table."""
    chain_s = turns * TOOL_S
    plan: list[tuple[str, int, Callable[[int], float]]] = [
        ("orchestra_envs.runner, async tool", episodes, lambda n: ours(n, turns, "wait")),
        ("orchestra_envs.runner, plain tool", episodes, lambda n: ours(n, turns, "wait_plain")),
        ("orchestra_envs.runner, 8 times as many", 8 * episodes, lambda n: ours(n, turns, "wait")),
        ("gymnasium SyncVectorEnv", min(episodes, 16), lambda n: vector(SyncVectorEnv, n, turns)),
        ("gymnasium AsyncVectorEnv", min(episodes, 64), lambda n: vector(AsyncVectorEnv, n, turns)),
    ]
    rows = []
    for name, count, run in plan:
        seconds = run(count)
        rows.append(
            {
                "name": name,
                "episodes": count,
                "wall_s": round(seconds, 3),
                "times_the_longest_chain": round(seconds / chain_s, 2),
                "episodes_per_s": round(count / seconds, 1),
                "peak_memory_mib": round(memory_mib()),
            }
        )
    ours_rate = rows[0]["episodes_per_s"]
    ratios = {row["name"]: round(ours_rate / row["episodes_per_s"], 1) for row in rows[3:]}
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, gymnasium {gym.__version__}",
        "turns": turns,
        "tool_s": TOOL_S,
        "rows": rows,
        "ratios": ratios,
        "limit_share": round(chain_s / rows[0]["wall_s"], 3),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = measure(options.episodes, options.turns)
    for row in result["rows"]:
        print(
            f"{row['name']:40} {row['episodes']:5} episodes {row['wall_s']:7.2f} s = "
            f"{row['times_the_longest_chain']:5.2f} x the longest chain, {row['episodes_per_s']:7.1f} episodes/s"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
