"""What continuous batching and the kept cache are worth when tools take time.

    python -m benchmarks.multi_turn --tunix-python PYTHON --json multi_turn.json

Trajectories of several turns: sample a turn, wait for a tool, append its observation. SmolLM2-135M's shapes
(`--preset`) with random weights; lengths of turns and observations and the tools' seconds are drawn once and are the
same for all rows:

* continuous: `sampler.engine`, every trajectory goes on as soon as its tool is done;
* lock-step: `sampler.sampler`, all turns of a round are sampled, then all tools waited for, at once;
* full re-prefill: the engine, forgetting a trajectory's cache at each turn, as endpoints without a prefix cache do;
* tunix: its agentic rollout, every turn a call of its sampler for one row with the whole history
  (`peers/tunix_worker.py`).

All take turns, after one run of each that compiles; the median of `--repeats` counts. The limit is the wall time of the
same tokens without any waiting: the continuous row's sampling alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peers.peer import Peer, PeerError, start_peers
from benchmarks.record import machine, shape_of
from orchestra_jax.models.config import PRESETS, ModelConfig, preset
from orchestra_jax.models.decoder import init_params
from orchestra_jax.sampler.engine import Engine, Request
from orchestra_jax.sampler.sampler import Sampler


@dataclass(frozen=True)
class Plan:
    """What every variant does: [trajectory] prompts, and [trajectory][turn] lengths, observations, tool seconds."""

    prompts: list[list[int]]
    lengths: np.ndarray
    observations: list[list[list[int]]]
    tool_s: np.ndarray

    @property
    def capacity(self) -> int:
        """Tokens of the longest trajectory, and room."""
        totals = [
            len(prompt) + int(lengths.sum()) + sum(map(len, observations))
            for prompt, lengths, observations in zip(self.prompts, self.lengths, self.observations)
        ]
        return max(totals) + 8


def draw_plan(trajectories: int, turns: int, vocab_size: int, slowest_s: float) -> Plan:
    """Prompts of 64 to 128 tokens, turns of 8 to 48, observations of 16 to 64, tools of 0.1 to `slowest_s` seconds."""
    rng = np.random.default_rng(0)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(1, vocab_size, rng.integers(low, high + 1)).tolist()

    return Plan(
        [ids(64, 128) for _ in range(trajectories)],
        rng.integers(8, 49, (trajectories, turns)),
        [[ids(16, 64) for _ in range(turns)] for _ in range(trajectories)],
        np.exp(rng.uniform(np.log(0.1), np.log(slowest_s), (trajectories, turns))),
    )


def continuous(engine: Engine, plan: Plan, *, forget: bool = False, no_tools: bool = False) -> float:
    """Seconds of the engine; `forget` drops a trajectory's cache at each turn, `no_tools` lets tools take no time."""
    engine.reset()
    start = time.perf_counter()
    turn_of = dict.fromkeys(range(len(plan.prompts)), 0)
    tokens = {key: list(prompt) for key, prompt in enumerate(plan.prompts)}
    waiting: list[tuple[float, int]] = [(0.0, key) for key in turn_of]
    while waiting or engine.busy:
        while waiting and waiting[0][0] <= time.perf_counter() - start:
            _, key = heapq.heappop(waiting)
            if forget:
                _forget(engine, key)
            engine.submit(Request(key, list(tokens[key]), int(plan.lengths[key, turn_of[key]]), key))
        if not engine.busy:
            time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - start)))
            continue
        for turn in engine.run():
            number = turn_of[turn.key]
            tokens[turn.key] += turn.tokens + plan.observations[turn.key][number]
            turn_of[turn.key] += 1
            if turn_of[turn.key] == plan.lengths.shape[1]:
                engine.release(turn.key)
            else:
                tool_s = 0.0 if no_tools else float(plan.tool_s[turn.key, number])
                heapq.heappush(waiting, (time.perf_counter() - start + tool_s, turn.key))
    return time.perf_counter() - start


def _forget(engine: Engine, key: int) -> None:
    for slot in engine._slots:
        if slot.key == key or slot.key is None:
            slot.forget()


def lock_step(sampler: Sampler, params: Any, plan: Plan) -> float:
    """Seconds of the lock-step sampler: each round's slowest tool is waited for by all."""
    rows = len(plan.prompts)
    start = time.perf_counter()
    state = sampler.start(params, plan.prompts)
    turns = plan.lengths.shape[1]
    for turn in range(turns):
        limits, ones = plan.lengths[:, turn], np.ones(rows)
        _, state = sampler.generate(params, state, limits, ones, np.arange(rows))
        if turn + 1 < turns:
            time.sleep(float(plan.tool_s[:, turn].max()))
            state = sampler.append(params, state, [observations[turn] for observations in plan.observations])
    return time.perf_counter() - start


def tunix(peer: Peer, config: ModelConfig, plan: Plan) -> float:
    """Seconds of Tunix's agentic rollout."""
    most = int(plan.lengths.max())
    cache = most + (1 << (plan.capacity - 1).bit_length())  # its prompts are padded to powers of two
    told = {
        "prompts": plan.prompts,
        "lengths": plan.lengths.tolist(),
        "observations": plan.observations,
        "tool_s": plan.tool_s.tolist(),
    }
    request = {"kind": "agentic", "plan": told, "most": most, "cache": cache, "no_tools": False}
    return peer.ask(request | {"shape": shape_of(config)})["seconds"]


def measure(options: argparse.Namespace, peers: dict[str, Peer]) -> dict[str, Any]:
    """All variants in turn, `options.repeats` times after one run of each."""
    config = preset(options.preset)
    params = init_params(config, jax.random.key(0))
    trajectories = options.trajectories
    slots = options.slots or trajectories
    plan = draw_plan(trajectories, options.turns, config.vocab_size, options.slowest_s)
    no_stop = [config.vocab_size]  # never sampled: turns end at their drawn lengths
    engine = Engine(config, slots=slots, capacity=plan.capacity, stop_ids=no_stop, seed=0)
    engine.use(params, 0)
    sampler = Sampler(config, rows=trajectories, capacity=plan.capacity, max_new_tokens=48, stop_ids=no_stop, seed=0)
    variants: dict[str, Callable[[], float]] = {
        "continuous": lambda: continuous(engine, plan),
        "lock-step": lambda: lock_step(sampler, params, plan),
        "full re-prefill": lambda: continuous(engine, plan, forget=True),
        "no tools (limit)": lambda: continuous(engine, plan, no_tools=True),
    }
    if "tunix" in peers:
        variants["tunix"] = lambda: tunix(peers["tunix"], config, plan)
    times: dict[str, list[float]] = {name: [] for name in variants}
    counted: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for turn in range(options.repeats + 1):
        for name, run in variants.items():
            if name in errors:
                continue
            try:
                seconds = run()
            except PeerError as error:
                errors[name] = str(error)
                continue
            print(f"{name:18} {seconds:8.2f} s{'' if turn else ' (first run, compiles)'}", flush=True)
            if turn:
                times[name].append(seconds)
            if name not in ("lock-step", "tunix"):
                counted[name] = {
                    "sampled_tokens": engine.stats.sampled_tokens,
                    "prefilled_tokens": engine.stats.prefilled_tokens,
                    "slot_occupancy": round(engine.stats.occupancy(slots), 3),
                    "device_idle_share": round(engine.metrics()["sampler/device_idle_share"], 3),
                }
    wall = {name: statistics.median(values) for name, values in times.items() if values}
    own = wall["continuous"]
    result = {
        "preset": options.preset,
        "trajectories": trajectories,
        "turns": options.turns,
        "slots": slots,
        "slowest_tool_s": options.slowest_s,
        "longest_chain_of_tools_s": round(float(plan.tool_s[:, :-1].sum(axis=1).max()), 2),
        "rows": [{"name": name, "wall_s": round(s, 2), **counted.get(name, {})} for name, s in wall.items()],
        "ratios": {
            name: round(s / own, 2) for name, s in wall.items() if name not in ("continuous", "no tools (limit)")
        },
        "limit_share": round(wall["no tools (limit)"] / own, 3),
    }
    return result | ({"errors": errors} if errors else {})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix-python", metavar="PYTHON", help="of an environment with google-tunix")
    parser.add_argument("--preset", default="smollm2-135m", choices=list(PRESETS), metavar="NAME", help="whose shapes")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--slots", type=int, help="default: as many as trajectories")
    parser.add_argument("--slowest-s", type=float, default=2.0, help="of the tools; the fastest take 0.1 s")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    peers, about = start_peers({"tunix": (options.tunix_python, "tunix_worker.py", "--tunix-python")})
    print(json.dumps(about), flush=True)
    try:
        result = {"machine": machine(), "peers": about} | measure(options, peers)
    finally:
        for peer in peers.values():
            peer.close()
    for row in result["rows"]:
        print(f"{row['name']:18} {row['wall_s']:8.2f} s", {k: v for k, v in row.items() if k not in ("name", "wall_s")})
    print("times as long as continuous:", result["ratios"], "share of the limit:", result["limit_share"])
    if "errors" in result:
        print("could not be run:", result["errors"])
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
