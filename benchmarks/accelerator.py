"""One accelerator in eight minutes: decode against memory bandwidth, prefill and training against peak FLOPs.

    PYTHONPATH=.:envs python -m benchmarks.accelerator --json accelerator.json

Needs JAX and this repository, nothing else. Qwen3-8B's shapes (`--preset`) with random bfloat16 weights made on the
device; the programs are the ones that rollouts and the trainer run. Parts, each a process of its own with a time limit,
so that one that fails or hangs takes none of the others with it and gives its memory back:

* peaks: bytes per second of reading a large array, operations per second of a large bfloat16 matmul;
* decode: `sample_round` at 1, 32 and 128 rows of `--context` tokens, against reading weights and cache once a token;
* prefill: `append_tokens` of 512 and 4,096 new tokens; the share of the matmul peak;
* train: the train step of `--train-preset`, and of `--preset` where it fits: step time, MFU, peak memory;
* engine: ragged turns through the whole engine, host included.

Shares are of the measured peaks, and of the data sheet's where the device is known. What could not be measured is in
the JSON's `failed` with what was said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestra_jax.models.config import PRESETS, preset

TIME_LIMITS_S = {"peaks": 60, "decode": 150, "prefill": 90, "train": 90, "train-large": 100, "engine": 200}
"""Of the parts, compilation included; cut further by what is left of `--minutes`."""

DATA_SHEETS = {
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.04e12),
    "TPU v5 lite": (197e12, 8.19e11),
    "TPU v5p": (459e12, 2.765e12),
    "TPU v6 lite": (918e12, 1.64e12),
}
"""Dense bfloat16 operations and bytes per second, as the makers state them, by a part of the device's name."""

ROOT = Path(__file__).parents[1]

Rows = Iterator[dict[str, Any]]


def median_s(run: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of a call that returns arrays, after one that compiles."""
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def median_round_s(run: Callable[[Any], tuple[Any, Any]], state: Any, repeats: int = 3) -> tuple[float, Any]:
    """Seconds of a call that is given a state and returns it with something to wait for, and the last of that."""
    import jax

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        state, seen = run(state)
        jax.block_until_ready(seen)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), seen


def random_params(options: argparse.Namespace):
    """A preset's config and bfloat16 weights."""
    import jax
    import jax.numpy as jnp

    from orchestra_jax.models.decoder import init_params

    config = preset(options.preset)
    return config, jax.block_until_ready(init_params(config, jax.random.key(0), jnp.bfloat16))


def peaks(options: argparse.Namespace) -> Rows:
    """What the device can do, and what its maker says."""
    import jax
    import jax.numpy as jnp

    from benchmarks.record import machine

    device = jax.devices()[0]
    small = device.platform == "cpu"
    side = 1024 if small else 8192
    square = jnp.ones((side, side), jnp.bfloat16)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    big = jnp.ones(1 << (24 if small else 31), jnp.bfloat16)
    read = jax.jit(lambda a: jnp.sum(a.astype(jnp.float32)))
    flops = 2 * side**3 / median_s(lambda: multiply(square))
    row = {
        "machine": machine(),
        "device": device.device_kind,
        "matmul_flops_per_s": flops,
        "read_bytes_per_s": big.nbytes / median_s(lambda: read(big)),
    }
    sheet = next((sheet for name, sheet in DATA_SHEETS.items() if name in device.device_kind), None)
    yield row | ({"sheet_flops_per_s": sheet[0], "sheet_bytes_per_s": sheet[1]} if sheet else {})


def decode(options: argparse.Namespace) -> Rows:
    """Tokens per second of rounds of sampling."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from orchestra_jax.sampler.device import Rows as RoundRows
    from orchestra_jax.sampler.device import init_state, sample_round
    from orchestra_jax.sampler.weights import adopt

    config, params = random_params(options)
    weights = adopt(params)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    direct, steps = jax.default_backend() != "cpu", options.steps
    capacity = options.context + steps
    for number in options.rows:
        state = init_state(config, number, capacity, jnp.bfloat16, False if direct else None)
        rows = RoundRows(
            slots=np.arange(number, dtype=np.int32),
            fresh=np.ones(number, bool),
            lengths=np.full(number, options.context, np.int32),
            limits=np.full(number, steps, np.int32),
            temperatures=np.ones(number, np.float32),
            trajectories=np.arange(number, dtype=np.uint32),
            stop_ids=np.full((number, 1), -1, np.int32),
        )

        arguments = (rows, jax.random.key(0), np.int32(number), None)

        def run(state, arguments=arguments):
            static = {"filled": capacity, "steps": steps, "direct": direct}
            state, sampled = sample_round(config, weights, state, *arguments, **static)
            return state, sampled.counts

        start = time.perf_counter()
        seconds, counts = median_round_s(run, state)
        if (fewest := np.asarray(counts).min()) != steps:
            raise RuntimeError(f"a round gave {fewest} tokens a row, not {steps}")
        read = weight_bytes + number * token_bytes * (options.context + steps / 2)
        yield {
            "rows": number,
            "context": options.context,
            "tokens_per_s": round(number * steps / seconds, 1),
            "step_ms": round(1e3 * seconds / steps, 3),
            "bytes_per_s": read * steps / seconds,
            "compile_and_measure_s": round(time.perf_counter() - start, 1),
        }
        del state  # was donated; its memory is the next one's


def prefill(options: argparse.Namespace) -> Rows:
    """Operations per second of new tokens into empty slots."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from orchestra_jax.sampler.device import append_tokens, init_state
    from orchestra_jax.sampler.weights import adopt

    config, params = random_params(options)
    weights = adopt(params)
    direct = jax.default_backend() != "cpu"
    matrices = config.num_parameters - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    for number, width in options.prefills:
        state = init_state(config, number, width, jnp.bfloat16, False if direct else None)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (number, width)).astype(np.int32)
        slots, zeros = np.arange(number, dtype=np.int32), np.zeros(number, np.int32)

        arguments = (tokens, slots, zeros, np.full(number, width, np.int32))

        def run(state, arguments=arguments, width=width):
            return append_tokens(config, weights, state, *arguments, filled=width, direct=direct)

        start = time.perf_counter()
        seconds, _ = median_round_s(run, state)
        # Causal attention: a query sees half of the chunk on average; 2 products, 2 operations each.
        attention = 2 * number * width**2 * config.num_layers * config.num_heads * config.head_dim
        heads = 2 * number * config.vocab_size * config.hidden_size
        yield {
            "rows": number,
            "new_tokens": width,
            "tokens_per_s": round(number * width / seconds, 1),
            "flops_per_s": (2 * matrices * number * width + attention + heads) / seconds,
            "compile_and_measure_s": round(time.perf_counter() - start, 1),
        }
        del state  # was donated; its memory is the next one's


def engine(options: argparse.Namespace) -> Rows:
    """Ragged turns through the engine as rollouts use it."""
    import jax.numpy as jnp
    import numpy as np

    from orchestra_jax.sampler.engine import Engine, Request

    config, params = random_params(options)
    longest = options.context
    slots, turns = options.rows[1], 2 * options.rows[1]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in rng.integers(longest // 8, longest // 2, turns)]
    limits = rng.integers(8, longest // 2, turns).tolist()
    sampler = Engine(
        config,
        slots=slots,
        capacity=longest,
        stop_ids=[config.vocab_size],  # never sampled
        seed=0,
        dtype=jnp.bfloat16,
        chunk=options.chunk,
    )
    sampler.use(params, 0)
    times = []
    for _ in range(2):  # the first run compiles
        sampler.reset()
        start = time.perf_counter()
        for index, (prompt, limit) in enumerate(zip(prompts, limits)):
            sampler.submit(Request(index, prompt, limit, index))
        while sampler.busy:
            for turn in sampler.run():
                sampler.release(turn.key)
        times.append(time.perf_counter() - start)
    seconds = times[1]
    yield {
        "turns": turns,
        "slots": slots,
        "tokens_per_s": round(sampler.stats.sampled_tokens / seconds, 1),
        "prompt_tokens": sum(map(len, prompts)),
        "first_run_s": round(times[0], 1),
        **{key: round(value, 3) for key, value in sampler.metrics().items()},
    }


def train(options: argparse.Namespace) -> Rows:
    """The train step of the smaller preset."""
    yield from _train(options, options.train_preset, "float32")


def train_large(options: argparse.Namespace) -> Rows:
    """The train step of the large preset; 8B parameters take 14 bytes each before any activation."""
    yield from _train(options, options.preset, "bfloat16")


def _train(options: argparse.Namespace, name: str, moment_dtype: str) -> Rows:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from orchestra_jax.models.decoder import init_params
    from orchestra_jax.rollout.pack import PackedBatch
    from orchestra_jax.train.step import StepSettings, init_train_state, make_optimizer, train_step

    config = preset(name)
    rows, time_ = options.train_rows, options.train_tokens
    optimizer = make_optimizer(learning_rate=1e-6, weight_decay=0.0, max_grad_norm=1.0, moment_dtype=moment_dtype)
    state = init_train_state(init_params(config, jax.random.key(0), jnp.bfloat16), optimizer)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, time_)).astype(np.int32)
    index = np.broadcast_to(np.arange(time_, dtype=np.int32), tokens.shape)
    ones, floats = np.ones_like(tokens), np.ones(tokens.shape, np.float32)
    batch = PackedBatch(
        tokens=tokens,
        positions=index,
        segments=ones,
        prefixes=ones,
        sources=index,
        targets=np.roll(tokens, -1, axis=1),
        target_segments=ones,
        behavior_logprobs=floats * -np.log(config.vocab_size).astype(np.float32),
        advantages=floats,
        weights=floats / tokens.size,
    )
    settings = StepSettings(config, remat="layer", dtype="bfloat16")

    def run():
        nonlocal state
        state, metrics, _ = train_step(settings, optimizer, state, batch, micro_batch_rows=1, max_micro_batches=rows)
        if metrics["skipped"]:
            raise RuntimeError(f"the update was skipped: {metrics}")
        return state.num_updates

    start = time.perf_counter()
    seconds = median_s(run, 3)
    # 6 operations a parameter and token, forward and backward (Kaplan et al. 2020), the embedding's rows apart, and
    # causal attention; what is recomputed does not count.
    matrices = config.num_parameters - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    attention = 6 * rows * time_**2 * config.num_layers * config.num_heads * config.head_dim
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    yield {
        "preset": name,
        "parameters": config.num_parameters,
        "rows": rows,
        "row_tokens": time_,
        "moment_dtype": moment_dtype,
        "step_s": round(seconds, 3),
        "tokens_per_s": round(rows * time_ / seconds, 1),
        "flops_per_s": (6 * matrices * rows * time_ + attention) / seconds,
        "peak_memory_bytes": memory,
        "compile_and_measure_s": round(time.perf_counter() - start, 1),
    }


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "peaks": peaks,
    "decode": decode,
    "prefill": prefill,
    "train": train,
    "train-large": train_large,
    "engine": engine,
}


def write_rows(options: argparse.Namespace) -> int:
    """A part's process: its rows as they come; of a fault, the last line on standard error says what it is."""
    with Path(options.out).open("w", encoding="utf-8") as out:
        try:
            for row in PARTS[options.part](options):
                out.write(json.dumps(row) + "\n")
                out.flush()
        except Exception as error:
            traceback.print_exc()
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
    return 0


def run_part(name: str, arguments: list[str], limit_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """Runs a part in a process of its own.

    Returns:
        The rows that it got to, and why there are no more, if it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.accelerator", *arguments, "--part", name, "--out", str(out)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=limit_s, errors="replace"
            )
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1][:500]
            why = f"exit code {done.returncode}: {said}" if done.returncode else None
        except subprocess.TimeoutExpired:
            why = f"not done within {limit_s:.0f} s"
        lines = out.read_text("utf-8").splitlines() if out.exists() else []
        return [json.loads(line) for line in lines], why


def with_shares(part: str, row: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The row with its rates as shares of what the device can do."""
    shares = {}
    for rate, name in (("bytes_per_s", "bandwidth"), ("flops_per_s", "flops")):
        for source in ("read", "matmul", "sheet"):
            if rate in row and (peak := known.get(f"{source}_{rate}")):
                shares[f"{'sheet' if source == 'sheet' else 'measured'}_{name}_share"] = round(row[rate] / peak, 3)
    if part.startswith("train") and "flops_per_s" in row:
        shares = {key.replace("flops_share", "mfu"): value for key, value in shares.items()}
    return row | shares


def measure(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """All parts, one after the other, printed as they come."""
    end = time.monotonic() + 60 * options.minutes
    known: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for part in options.parts:
        limit_s = min(TIME_LIMITS_S[part], end - time.monotonic())
        if limit_s < 5:
            failed[part] = f"no time left of {options.minutes:g} minutes"
            print(part, "FAILED:", failed[part], flush=True)
            continue
        found, why = run_part(part, arguments, limit_s)
        if part == "peaks" and found:
            known = found[0]
        rows += [{"part": part} | with_shares(part, row, known) for row in found if part != "peaks"]
        for row in found:
            print(part, json.dumps(with_shares(part, row, known)), flush=True)
        if why:
            failed[part] = why
            print(part, "FAILED:", why, flush=True)
    decoded = [row for row in rows if row["part"] == "decode"]
    first = decoded[0]["tokens_per_s"] if decoded else 1.0
    return {
        "machine": known.get("machine", "not known: the part `peaks` failed"),
        "preset": options.preset,
        "peaks": known,
        "rows": rows,
        "ratios": {f"decode, {row['rows']} rows": round(row["tokens_per_s"] / first, 2) for row in decoded},
        "limit_share": max((row["measured_bandwidth_share"] for row in decoded if known), default=None),
        "failed": failed,
    }


def main() -> int:
    """Measures and prints; exit code 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = {"choices": list(PRESETS), "metavar": "NAME"}
    parser.add_argument("--preset", default="qwen3-8b", **presets, help="market-tiny --smoke tries the script on a CPU")
    parser.add_argument("--train-preset", default="llama3.2-1b", **presets)
    parser.add_argument("--rows", type=int, nargs=3, default=[1, 32, 128], metavar="N", help="of decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decoded one")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="smallest sizes: does it run?")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = sys.argv[1:]
    options = parser.parse_args(arguments)
    options.steps, options.prefills, options.chunk = 64, [(1, 512), (8, 512)], 128
    options.train_rows, options.train_tokens = 4, 2048
    if options.smoke:
        options.train_preset, options.rows, options.context = options.preset, [1, 2, 4], 64
        options.steps, options.prefills, options.chunk = 8, [(1, 32)], 16
        options.train_rows, options.train_tokens = 2, 32
    if options.part:
        return write_rows(options)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    with tempfile.TemporaryDirectory() as cache:  # parts share what they compile alike
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        result = measure(options, arguments)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
