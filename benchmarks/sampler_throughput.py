"""Tokens per second of the sampler beside Hugging Face `generate` and Tunix's sampler, in one run on one machine.

    python -m benchmarks.sampler_throughput --hf-python PYTHON --tunix-python PYTHON --json sampler.json

SmolLM2-135M's shapes (`--preset`) with random weights, temperature 1.

* equal: rows of prompt 32 and 64 new tokens, for each of `--rows`;
* ragged (`--ragged N`): N prompts of 16 to 512 tokens with answers of 8 to 256; ours by 32 slots, theirs in static
  batches of 32 sorted by the answers' lengths, which no real user knows beforehand.

Ours is the engine as rollouts use it, prefill included, and so is theirs. All take turns, the median of `--repeats`
counts, after one run that compiles. The limits are measured in the same turns: a step can be no faster than the weights
and the cache can be read, nor than a large matmul's rate allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.peer import Peer, PeerError, start_peers
from benchmarks.record import machine, shape_of
from orchestra_jax.models.config import PRESETS, ModelConfig, preset
from orchestra_jax.models.decoder import init_params
from orchestra_jax.sampler.engine import Engine, Request

Work = tuple[list[list[int]], list[int]]
"""Prompts, and new tokens of each."""

PROMPT, NEW = 32, 64
MOST_NEW = 256
"""Of a ragged answer; Tunix's buffers are made for so many."""


def theirs(peer: Peer, batches: list[Work], **settings: Any) -> float:
    """Seconds of a peer for all batches, one after the other."""
    answers = (peer.ask({"prompts": prompts, "new_tokens": new, **settings}) for prompts, new in batches)
    return sum(answer["seconds"] for answer in answers)


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
    """What the machine can do now: bytes per second of reading, float32 operations per second of a matmul."""
    big, square = jnp.ones(1 << 26, jnp.float32), jnp.ones((2048, 2048), jnp.float32)

    def best(run: Callable[[], jax.Array]) -> float:
        run()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        return min(times)

    return {
        "read_bytes_per_s": big.nbytes / best(lambda: _read(big)),
        "matmul_flops_per_s": 2 * 2048**3 / best(lambda: _matmul(square, square)),
    }


_read, _matmul = jax.jit(jnp.sum), jax.jit(jnp.matmul)


def limit_tokens_per_s(config: ModelConfig, work: Work, limits: dict[str, float]) -> float:
    """Tokens per second if all that must be read is read once a step, and multiplied, at the machine's rates.

    The steps are those of the longest answer at the least; prefill multiplies and reads the weights once. Of the two,
    reading and multiplying, a decode step takes the longer.
    """
    prompts, new = np.asarray([len(p) for p in work[0]]), np.asarray(work[1])
    weights = config.num_parameters
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    seconds = 2 * weights * int(prompts.sum()) / limits["matmul_flops_per_s"]
    seconds = max(seconds, 4 * weights / limits["read_bytes_per_s"])
    rows = np.asarray([int((new > step).sum()) for step in range(new.max())])
    filled = np.asarray([int((prompts + step)[new > step].sum()) for step in range(new.max())])
    reading = 4 * (weights + filled * cached) / limits["read_bytes_per_s"]
    multiplying = 2 * weights * rows / limits["matmul_flops_per_s"]
    return int(new.sum()) / float(seconds + np.maximum(reading, multiplying).sum())


def compare(runs: dict[str, Callable[[], float]], repeats: int) -> tuple[dict[str, list[float]], dict[str, str], Any]:
    """Runs each once to compile, then all in turn.

    Returns:
        The seconds of each, those of the first run under "NAME first"; what a peer said that could not; and the limits
        of the machine, the median over the turns.
    """
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    seen: list[dict[str, float]] = []
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if name in errors:
                continue
            try:
                seconds = run()
            except PeerError as error:
                errors[name] = str(error)
                continue
            times.setdefault(name if turn else f"{name} first", []).append(seconds)
        seen.append(limits())
    return times, errors, {key: statistics.median(found[key] for found in seen) for key in seen[0]}


def row_of(name: str, tokens: int, times: dict[str, list[float]], errors: dict[str, str]) -> dict[str, Any]:
    """The row of a table: medians, and how many times as long the peers took."""
    seconds = {key: statistics.median(values) for key, values in times.items()}
    own = seconds["ours float32"]
    row: dict[str, Any] = {
        "work": name,
        "tokens": tokens,
        "tokens_per_s": {key: round(tokens / s, 1) for key, s in seconds.items()},
        "ratios": {k: round(s / own, 2) for k, s in seconds.items() if k != "ours float32" and "first" not in k},
        "spread": {key: round(max(v) / min(v), 2) for key, v in times.items() if len(v) > 1},
    }
    return row | ({"errors": errors} if errors else {})


def equal_work(rows: int, vocab_size: int) -> Work:
    """Rows of one length."""
    rng = np.random.default_rng(rows)
    return rng.integers(1, vocab_size, (rows, PROMPT)).tolist(), [NEW] * rows


def ragged_work(number: int, vocab_size: int) -> Work:
    """Prompts of 16 to 512 tokens, answers of 8 to 256, evenly by the logarithm."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(16), np.log(512), number)).astype(int)
    answers = np.exp(rng.uniform(np.log(8), np.log(MOST_NEW), number)).astype(int)
    return [rng.integers(1, vocab_size, n).tolist() for n in lengths], answers.tolist()


def static_batches(work: Work, size: int) -> list[Work]:
    """Batches of rows with answers of like lengths."""
    order = np.argsort(work[1], kind="stable")
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return [([work[0][i] for i in part], [work[1][i] for i in part]) for part in parts]


def runs_of(
    engines: dict[str, Engine], work: Work, batches: list[Work], peers: dict[str, Peer]
) -> dict[str, Callable[[], float]]:
    """What takes turns: our engines, by the dtype of their weights, and the peers."""
    engine = engines["float32"]
    shape = shape_of(engine.config)
    runs: dict[str, Callable[[], float]] = {f"ours {name}": partial(ours, one, work) for name, one in engines.items()}
    if "hf" in peers:
        for dtype in ("float32", "bfloat16"):
            runs[f"hf {dtype}"] = partial(theirs, peers["hf"], batches, dtype=dtype, shape=shape)
    if "tunix" in peers:
        settings = {"kind": "generate", "most": max(work[1]), "cache": engine.capacity, "shape": shape}
        runs["tunix float32"] = partial(theirs, peers["tunix"], batches, **settings)
    return runs


def measure(options: argparse.Namespace, peers: dict[str, Peer]) -> list[dict[str, Any]]:
    """All rows, printed as they come."""
    config = preset(options.preset)
    params = init_params(config, jax.random.key(0))
    results = []

    def add(name: str, slots: int, capacity: int, work: Work, batches: list[Work]) -> None:
        engines = {}
        for dtype in options.dtypes:
            no_stop = [config.vocab_size]  # never sampled
            engines[dtype] = Engine(
                config, slots=slots, capacity=capacity, stop_ids=no_stop, seed=0, dtype=dtype, weights_dtype=dtype
            )
            engines[dtype].use(params, 0)
        times, errors, found = compare(runs_of(engines, work, batches, peers), options.repeats)
        row = row_of(name, sum(work[1]), times, errors) | {"limits": found}
        limit = limit_tokens_per_s(config, work, found)
        row["limit_share"] = round(row["tokens_per_s"]["ours float32"] / limit, 2)
        row["sampler"] = {key: round(value, 3) for key, value in engines["float32"].metrics().items()}
        results.append(row)
        print(json.dumps(row), flush=True)

    for rows in options.rows:
        work = equal_work(rows, config.vocab_size)
        add(f"{rows} equal rows", rows, 128, work, [work])
    if options.ragged:
        work = ragged_work(options.ragged, config.vocab_size)
        add(f"{options.ragged} ragged", 32, 768, work, static_batches(work, 32))
    return results


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-python", metavar="PYTHON", help="of an environment with torch and transformers")
    parser.add_argument("--tunix-python", metavar="PYTHON", help="of an environment with google-tunix")
    parser.add_argument(
        "--preset",
        default="smollm2-135m",
        choices=list(PRESETS),
        metavar="NAME",
        help="whose shapes (tied Llama shapes where peers run)",
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--ragged", type=int, metavar="N", help="measure ragged work of N prompts too")
    parser.add_argument("--bfloat16", action="store_true", help="measure ours in bfloat16 too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    options.dtypes = ["float32", "bfloat16"] if options.bfloat16 else ["float32"]
    peers, about = start_peers(
        {
            "hf": (options.hf_python, "hf_worker.py", "--hf-python"),
            "tunix": (options.tunix_python, "tunix_worker.py", "--tunix-python"),
        }
    )
    print(json.dumps(about), flush=True)
    try:
        rows = measure(options, peers)
    finally:
        for peer in peers.values():
            peer.close()
    if options.json:
        result = {"machine": machine(), "preset": options.preset, "peers": about, "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
