"""Accelerators that can be rented, and how many chips and hosts a topology has.

Facts: the configuration tables of Google's pages "TPU v4", "v5e", "v5p", "v6e", "TPU7x" (cloud.google.com/tpu/docs) and
"Plan TPUs in GKE", read in 2026; the labels and machine types also stand in XPK's `system_characteristics.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from orchestra_jax.config import ConfigError


@dataclass(frozen=True)
class Tpu:
    """One TPU generation.

    `shapes_2d` lists all shapes of a two-dimensional kind; None: three dimensions, the small shapes of `SMALL_3D`, and
    above them multiples of 4 up to `max_chips`.
    """

    gke_label: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    machine: str
    """GKE machine type up to the number of chips: `ct5p-hightpu` of `ct5p-hightpu-4t`."""
    cloud_name: str
    """What XPK and the TPU API call it."""
    runtime: str | None
    """Software version of a TPU VM; None: rented through GKE only."""
    max_chips: int
    """Of one slice."""
    shapes_2d: tuple[str, ...] | None = None


SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")

TPUS = {
    "v4": Tpu("tpu-v4-podslice", "ct4p-hightpu", "v4", "tpu-ubuntu2204-base", 12 * 16 * 16),
    "v5e": Tpu("tpu-v5-lite-podslice", "ct5lp-hightpu", "v5litepod", "v2-alpha-tpuv5-lite", 256, SHAPES_2D),
    "v5p": Tpu("tpu-v5p-slice", "ct5p-hightpu", "v5p", "v2-alpha-tpuv5", 16 * 16 * 24),
    "v6e": Tpu("tpu-v6e-slice", "ct6e-standard", "v6e", "v2-alpha-tpuv6e", 256, SHAPES_2D),
    "tpu7x": Tpu("tpu7x", "tpu7x-standard", "tpu7x", None, 9216),
}

GPUS = ("a100", "h100", "h200", "b200")
MAX_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Slice:
    """Chips that are rented and fail together: a TPU slice, or one node with GPUs."""

    kind: str
    """A key of `TPUS`, or one of `GPUS`."""
    shape: str
    """Chips by dimension, as "4x4x4"; of GPUs their number."""
    num_chips: int
    num_hosts: int
    """Virtual machines, each with `chips_per_host` chips and one process of ours."""

    @property
    def chips_per_host(self) -> int:
        return self.num_chips // self.num_hosts

    @property
    def tpu(self) -> Tpu | None:
        """Its generation, None for GPUs."""
        return TPUS.get(self.kind)

    @property
    def machine_type(self) -> str:
        """GKE's machine type of each host of a TPU slice."""
        return f"{TPUS[self.kind].machine}-{self.chips_per_host}t"


def parse_topology(text: str) -> Slice:
    """The slice that `v5p:4x4x4` or `h100:8` means (kind, then chips by dimension; of GPUs those of one node).

    Raises:
      ConfigError: there is no such kind, or it does not come in that shape; the message says which do.
    """
    kind, colon, shape = text.partition(":")
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ConfigError(f"--topology {text!r} must look like v5p:4x4x4 (chips by dimension, not cores) or h100:8")
    if kind in GPUS:
        if "x" in shape or int(shape) > MAX_GPUS_PER_NODE:
            raise ConfigError(
                f"--topology {text!r}: write the GPUs of one node, 1 to {MAX_GPUS_PER_NODE} ({kind}:8); "
                "--num-slices is the number of nodes"
            )
        return Slice(kind, shape, int(shape), 1)
    if kind not in TPUS:
        raise ConfigError(f"--topology {text!r}: no accelerator {kind!r}; there are: {', '.join((*TPUS, *GPUS))}")
    if problem := _shape_problem(TPUS[kind], shape):
        raise ConfigError(f"--topology {text!r}: {kind} {problem}")
    chips = math.prod(map(int, shape.split("x")))
    return Slice(kind, shape, chips, chips // _chips_per_host(shape, chips))


def _shape_problem(tpu: Tpu, shape: str) -> str:
    """Why a kind does not come in that shape, "" if it does."""
    if tpu.shapes_2d is not None:
        return "" if shape in tpu.shapes_2d else f"comes as {', '.join(tpu.shapes_2d)}"
    if shape in SMALL_3D:
        return ""
    sides = [int(side) for side in shape.split("x")]
    if len(sides) != 3 or any(side % 4 for side in sides) or sides != sorted(sides):
        return f"comes as {', '.join(SMALL_3D)}, or as AxBxC in multiples of 4 with A <= B <= C"
    if math.prod(sides) > tpu.max_chips:
        return f"has at most {tpu.max_chips} chips in a slice, this is {math.prod(sides)}"
    return ""


def _chips_per_host(shape: str, num_chips: int) -> int:
    """Slices of up to 8 chips in two dimensions are one machine (types -1t, -4t and -8t); all others have 4 a machine.

    2x4 can also be had as two machines of 4 chips on GKE; we take the one with 8, which needs no second process.
    """
    is_one_host = shape.count("x") == 1 and num_chips <= 8
    return num_chips if is_one_host else 4
