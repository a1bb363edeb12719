"""Tokens per second of the sampler beside Hugging Face `generate`, in one run on one machine.

    python -m benchmarks.sampler_throughput --hf-python /path/to/venv/bin/python --json sampler.json

SmolLM2-135M's shapes with random weights, temperature 1.

* equal: rows of prompt 32 and 64 new tokens, for each of `--rows`;
* ragged (`--ragged N`): N prompts of 16 to 512 tokens with answers of 8 to 256; ours by 32 slots, theirs in static
  batches of 32 sorted by the answers' lengths, which no real user knows beforehand.

Ours is the engine as rollouts use it, prefill included, and so is theirs. The two take turns, best of `--repeats`,
after one run that compiles. The limits are measured in the same run: a step can be no faster than the weights and the
cache can be read, nor than a large matmul's rate allows.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orchestra_jax.models.config import ModelConfig, preset
from orchestra_jax.models.decoder import init_params
from orchestra_jax.sampler.engine import Engine, Request

Work = tuple[list[list[int]], list[int]]
"""Prompts, and new tokens of each."""

PROMPT, NEW = 32, 64


class Peer:
    """A worker process that generates what it is told."""

    def __init__(self, python: str) -> None:
        worker = Path(__file__).with_name("peers") / "hf_worker.py"
        self.process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def seconds(self, batches: list[Work], dtype: str) -> float:
        """Seconds of all batches, one after the other."""
        assert self.process.stdin
        assert self.process.stdout
        total = 0.0
        for prompts, new_tokens in batches:
            request = {"prompts": prompts, "new_tokens": new_tokens, "dtype": dtype}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            if not answer:
                raise SystemExit("the Hugging Face worker ended; run it by hand to see why")
            total += json.loads(answer)["seconds"]
        return total


def ours(engine: Engine, work: Work) -> float:
    """Seconds of the engine for all of it."""
    engine.reset()
    start = time.perf_counter()
    for index, (prompt, limit) in enumerate(zip(*work)):
        engine.submit(Request(index, prompt, limit, index))
    tokens = 0
    while engine.busy:
        for turn in engine.run():
            tokens += len(turn.tokens)
            engine.release(turn.key)
    seconds = time.perf_counter() - start
    if tokens != sum(work[1]):
        raise SystemExit(f"the engine gave {tokens} tokens, not {sum(work[1])}")
    return seconds


def limits() -> dict[str, float]:
    """What the machine can do: bytes per second of reading, float32 operations per second of a matmul."""
    big, square = jnp.ones(1 << 26, jnp.float32), jnp.ones((2048, 2048), jnp.float32)
    read, matmul = jax.jit(jnp.sum), jax.jit(jnp.matmul)

    def best(run: Callable[[], jax.Array]) -> float:
        run()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        return min(times)

    return {
        "read_bytes_per_s": big.nbytes / best(lambda: read(big)),
        "matmul_flops_per_s": 2 * 2048**3 / best(lambda: matmul(square, square)),
    }


def limit_tokens_per_s(config: ModelConfig, rows: int, machine: dict[str, float]) -> float:
    """Tokens per second if every step took what reading or multiplying needs at the least, the prompt's prefill too."""
    weights = config.num_parameters
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (PROMPT + NEW / 2)
    reading = 4 * (weights + rows * cached) / machine["read_bytes_per_s"]
    multiplying = 2 * weights * rows / machine["matmul_flops_per_s"]
    prefill = max(
        2 * weights * rows * PROMPT / machine["matmul_flops_per_s"], 4 * weights / machine["read_bytes_per_s"]
    )
    return rows * NEW / (prefill + NEW * max(reading, multiplying))


def compare(engine: Engine, work: Work, batches: list[Work], peer: Peer | None, repeats: int) -> dict[str, float]:
    """Best seconds of each, run in turn."""
    runs: dict[str, Callable[[], float]] = {"ours float32": lambda: ours(engine, work)}
    if peer is not None:
        runs["hf float32"] = lambda: peer.seconds(batches, "float32")
        runs["hf bfloat16"] = lambda: peer.seconds(batches, "bfloat16")
    first = runs["ours float32"]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run())
    return {name: min(values) for name, values in times.items()} | {"ours first": first}


def equal_work(rows: int, vocab_size: int) -> Work:
    """Rows of one length."""
    rng = np.random.default_rng(rows)
    return rng.integers(1, vocab_size, (rows, PROMPT)).tolist(), [NEW] * rows


def ragged_work(number: int, vocab_size: int) -> Work:
    """Prompts of 16 to 512 tokens, answers of 8 to 256, evenly by the logarithm."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(16), np.log(512), number)).astype(int)
    answers = np.exp(rng.uniform(np.log(8), np.log(256), number)).astype(int)
    return [rng.integers(1, vocab_size, n).tolist() for n in lengths], answers.tolist()


def static_batches(work: Work, size: int) -> list[Work]:
    """Batches of rows with answers of like lengths."""
    order = np.argsort(work[1], kind="stable")
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return [([work[0][i] for i in part], [work[1][i] for i in part]) for part in parts]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-python", metavar="PYTHON", help="of an environment with torch and transformers")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--ragged", type=int, metavar="N", help="measure ragged work of N prompts too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    config = preset("smollm2-135m")
    params = init_params(config, jax.random.key(0))
    peer = Peer(options.hf_python) if options.hf_python else None
    machine = limits()
    print({name: f"{value / 1e9:.0f}e9" for name, value in machine.items()}, flush=True)
    results: list[dict[str, Any]] = []

    def measure(name: str, slots: int, capacity: int, work: Work, batches: list[Work], limit: float | None) -> None:
        engine = Engine(config, slots=slots, capacity=capacity, stop_ids=[config.vocab_size], seed=0)
        engine.use(params, 0)
        seconds = compare(engine, work, batches, peer, options.repeats)
        tokens = sum(work[1])
        row: dict[str, Any] = {"work": name, "tokens_per_s": {k: round(tokens / s, 1) for k, s in seconds.items()}}
        row["ratios"] = {k: round(s / seconds["ours float32"], 2) for k, s in seconds.items() if k.startswith("hf")}
        if limit is not None:
            row["share_of_limit"] = round(tokens / seconds["ours float32"] / limit, 2)
        row["sampler"] = {k: round(v, 3) for k, v in engine.metrics().items()}
        results.append(row)
        print(json.dumps(row), flush=True)

    for rows in options.rows:
        work = equal_work(rows, config.vocab_size)
        measure(f"{rows} equal rows", rows, 128, work, [work], limit_tokens_per_s(config, rows, machine))
    if options.ragged:
        work = ragged_work(options.ragged, config.vocab_size)
        measure(f"{options.ragged} ragged", 32, 768, work, static_batches(work, 32), None)
    if options.json:
        about = {"machine": f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}"}
        Path(options.json).write_text(
            json.dumps(about | {"limits": machine, "rows": results}, indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
