"""`orchestra plan`: what a config's train step needs on accelerators that are not here."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from orchestra_jax.config import ConfigError, load_config

TPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # else JAX looks for a TPU on this machine
    "TPU_SKIP_MDS_QUERY": "1",  # nobody is asked what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Libtpu looks for its machine and prints a page where there is none; these are of no consequence for a topology.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """The flags beside CONFIG and its overrides."""
    parser.add_argument(
        "--topology", required=True, metavar="KIND:SHAPE", help="v5e:16x16, v5p:4x4x4, v6e:8x8; cpu:8 to try it"
    )
    parser.add_argument("--num-slices", type=int, default=1, metavar="N", help="of such a slice; default: 1")
    parser.add_argument("--usd-per-chip-hour", type=float, metavar="USD", help="for the estimate of costs")
    parser.add_argument("--json", metavar="FILE", help="write the plan there")


def run_plan(options: argparse.Namespace) -> None:
    """Compiles, prints the plan, and writes it where asked.

    Raises:
      ConfigError: a flag or the config is wrong; one line.
    """
    config = load_config(options.config, options.overrides)
    kind, _, shape = options.topology.partition(":")
    if options.num_slices < 1:
        raise ConfigError("--num-slices must be at least 1")
    output = Path(options.json) if options.json else None
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--json {output}: there is no folder {output.parent}")
    # Before JAX is imported.
    os.environ.update(TPU_ENVIRONMENT)
    if kind == "cpu":
        if not shape.isdigit() or int(shape) < 2:
            raise ConfigError(f"--topology {options.topology}: give the number of devices, cpu:8")
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={shape}".strip()
    from orchestra_jax.plan.plan import as_json, plan
    from orchestra_jax.plan.table import print_plan

    found = plan(
        config,
        options.topology,
        num_slices=options.num_slices,
        usd_per_chip_hour=options.usd_per_chip_hour,
    )
    if output is not None:
        output.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    print_plan(found)
