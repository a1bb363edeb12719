"""Host memory and time of loading and saving a large checkpoint onto a mesh of virtual CPU devices.

    python -m benchmarks.weights [--gib 3] [--devices 8] [--fsdp 8] [--dtype bfloat16] [--json out.json]

Writes a synthetic bfloat16 checkpoint of the qwen3-8b's widths and as many layers as fill the size, loads it in another
process, saves it in a third and converts it in a fourth. On CPU the device arrays lie in host memory too, so what
counts is the peak of the resident memory *over* them: it should be no more than the largest shard, plus what the
process held before. File pages that the kernel maps and may drop at any time are told apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

MIB = 2**20


def memory_mib() -> tuple[float, float]:
    """Resident memory of this process in MiB: its own, and mapped files."""
    own = mapped = 0.0
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            own += int(value.split()[0]) / 1024
        elif name == "RssFile":
            mapped = int(value.split()[0]) / 1024
    return own, mapped


class Peak:
    """The highest resident memory while it is open, sampled every 5 ms."""

    def __enter__(self) -> Peak:
        self.before = memory_mib()
        self.own = self.both = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            own, mapped = memory_mib()
            self.own, self.both = max(self.own, own), max(self.both, own + mapped)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.after = memory_mib()


def model(gib: float) -> Any:
    """A config with the widths of qwen3-8b, a small vocabulary, and layers up to the size."""
    from dataclasses import replace

    from orchestra_jax.models.config import preset

    one = replace(preset("qwen3-8b"), vocab_size=32_768, num_layers=1)
    per_layer = replace(one, num_layers=2).num_parameters - one.num_parameters
    return replace(one, num_layers=max(1, round((gib * 2**30 / 2 - one.num_parameters) / per_layer) + 1))


def write_synthetic(folder: Path, gib: float) -> None:
    """A checkpoint of constant weights, different in every layer."""
    import numpy as np

    from orchestra_jax.models.decoder import param_specs
    from orchestra_jax.models.hf import save_hf

    config = model(gib)

    class Constant:
        def __init__(self, shape: tuple[int, ...]) -> None:
            import jax.numpy as jnp

            self.shape, self.dtype = shape, np.dtype(jnp.bfloat16)

        def read(self, layer: int | None) -> np.ndarray:
            shape = self.shape if layer is None else self.shape[1:]
            return np.broadcast_to(np.float32((layer or 0) / 64), shape)

    save_hf(folder, config, {name: Constant(spec.shape) for name, spec in param_specs(config).items()})


def _load(folder: Path, options: argparse.Namespace) -> tuple[Any, dict[str, Any], Peak, float]:
    import jax

    from orchestra_jax.models.decoder import param_specs
    from orchestra_jax.models.hf import load_hf, read_config
    from orchestra_jax.parallel.mesh import make_mesh, shardings
    from orchestra_jax.parallel.rules import param_partition

    sizes = {"data": 1, "fsdp": options.fsdp, "tensor": options.devices // options.fsdp, "sequence": 1}
    mesh = make_mesh(sizes)
    assert mesh is not None
    specs = param_specs(read_config(folder))
    placed = shardings(mesh, {name: param_partition(spec.axes) for name, spec in specs.items()})
    jax.block_until_ready(jax.numpy.zeros(8))
    started = time.perf_counter()
    with Peak() as peak:
        config, params = load_hf(folder, dtype=options.dtype, shardings=placed)
        jax.block_until_ready(params)
    return config, params, peak, time.perf_counter() - started


def measure_load(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Loading: sizes in MiB."""
    _, params, peak, seconds = _load(folder, options)
    arrays = sum(shard.data.nbytes for p in params.values() for shard in p.addressable_shards) / MIB
    largest = max(shard.data.nbytes for p in params.values() for shard in p.addressable_shards) / MIB
    own = peak.own - peak.before[0]
    result = {"seconds": seconds, "arrays_mib": arrays, "largest_shard_mib": largest, "excess_mib": own - arrays}
    return result | {"mapped_file_mib": peak.both - peak.own, "before_mib": sum(peak.before)}


def measure_save(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Saving what was loaded: sizes in MiB."""
    from orchestra_jax.models.hf import save_hf

    config, params, _, _ = _load(folder, options)
    largest = max(p.nbytes // (p.shape[0] if name.startswith("layers.") else 1) for name, p in params.items()) / MIB
    started = time.perf_counter()
    with Peak() as peak:
        save_hf(folder.with_name("saved"), config, params)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder.with_name("saved"))
    return {"seconds": seconds, "largest_tensor_mib": largest, "excess_mib": peak.own - peak.before[0]}


def measure_convert(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`orchestra convert` to float16: sizes in MiB."""
    from orchestra_jax.models.convert import convert

    started = time.perf_counter()
    with Peak() as peak:
        convert(folder, folder.with_name("converted"), dtype="float16")
    seconds = time.perf_counter() - started
    shutil.rmtree(folder.with_name("converted"))
    return {"seconds": seconds, "excess_mib": peak.own - peak.before[0], "mapped_file_mib": peak.both - peak.own}


def _in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=3.0, help="of the checkpoint, in bfloat16")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--fsdp", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="to load as")
    parser.add_argument("--folder", help="for the files; default: a temporary one")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary) / "checkpoint"
        _in_a_process(write_synthetic, folder, options.gib)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / MIB
        result = {
            "checkpoint_mib": size,
            "devices": options.devices,
            "fsdp": options.fsdp,
            "dtype": options.dtype,
            "load": _in_a_process(measure_load, folder, options),
            "save": _in_a_process(measure_save, folder, options),
            "convert": _in_a_process(measure_convert, folder, options),
        }
    print(json.dumps(result, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
