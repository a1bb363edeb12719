"""What continuous batching and the kept cache are worth when tools take time.

    python -m benchmarks.multi_turn --json multi_turn.json

Trajectories of several turns: sample a turn, wait for a tool, append its observation. SmolLM2-135M's shapes with random
weights; lengths of turns and observations and the tools' seconds are drawn once and are the same for all rows:

* continuous: `sampler.engine`, every trajectory goes on as soon as its tool is done;
* lock-step: `sampler.sampler`, all turns of a round are sampled, then all tools waited for, at once;
* full re-prefill: the engine, forgetting a trajectory's cache at each turn, as endpoints without a prefix cache do.

The limit is the wall time of the same tokens without any waiting: the continuous row's sampling alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import init_params
from orchestra_jax.sampler.engine import Engine, Request
from orchestra_jax.sampler.sampler import Sampler

NO_STOP = 0  # random weights never sample it on purpose; turns end at their drawn lengths


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


def measure(trajectories: int, turns: int, slots: int, slowest_s: float) -> dict[str, Any]:
    """Each variant once to compile, then in turn, twice; the better of the two."""
    config = preset("smollm2-135m")
    params = init_params(config, jax.random.key(0))
    plan = draw_plan(trajectories, turns, config.vocab_size, slowest_s)
    engine = Engine(config, slots=slots, capacity=plan.capacity, stop_ids=[NO_STOP], seed=0)
    engine.use(params, 0)
    sampler = Sampler(config, rows=trajectories, capacity=plan.capacity, max_new_tokens=48, stop_ids=[NO_STOP], seed=0)
    variants = {
        "continuous": lambda: continuous(engine, plan),
        "lock-step": lambda: lock_step(sampler, params, plan),
        "full re-prefill": lambda: continuous(engine, plan, forget=True),
        "no tools (limit)": lambda: continuous(engine, plan, no_tools=True),
    }
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    rows = {}
    for _ in range(2):
        for name, run in variants.items():
            times[name].append(run())
            if name != "lock-step":
                stats = engine.stats
                rows[name] = {
                    "sampled_tokens": stats.sampled_tokens,
                    "prefilled_tokens": stats.prefilled_tokens,
                    "slot_occupancy": round(stats.occupancy(slots), 3),
                }
    best = {name: min(values) for name, values in times.items()}
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}",
        "trajectories": trajectories,
        "turns": turns,
        "slots": slots,
        "slowest_tool_s": slowest_s,
        "rows": [{"name": name, "wall_s": round(best[name], 2), **rows.get(name, {})} for name in variants],
        "ratios": {name: round(best[name] / best["continuous"], 2) for name in ("lock-step", "full re-prefill")},
        "limit_share": round(best["no tools (limit)"] / best["continuous"], 3),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--slots", type=int, help="default: as many as trajectories")
    parser.add_argument("--slowest-s", type=float, default=2.0, help="of the tools")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = measure(options.trajectories, options.turns, options.slots or options.trajectories, options.slowest_s)
    for row in result["rows"]:
        print(f"{row['name']:18} {row['wall_s']:8.2f} s", {k: v for k, v in row.items() if k not in ("name", "wall_s")})
    print("times as long as continuous:", result["ratios"], "share of the limit:", result["limit_share"])
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
