"""Accelerators in numbers, per device as JAX counts them.

Sources: the pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x" of cloud.google.com/tpu/docs (peak compute, HBM capacity
and bandwidth, inter-chip interconnect bandwidth per chip); NVIDIA's data sheets of H100 SXM and H200 (dense bfloat16,
NVLink in one direction). v5e's usable HBM is what its compiler says (15.75 GiB); the others'
is their capacity less what we guess that the system keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """What bounds a program on one device."""

    hbm_gib: float
    """That a program may use."""
    flops_per_s: float
    """Peak of bfloat16 matrix products."""
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """To the other devices of the slice, all links of the device together."""


CHIPS = {
    "v4": Chip(16.0, 137.5e12, 614e9, 150e9),  # half a chip: JAX sees its two cores
    "v5e": Chip(15.75, 197e12, 819e9, 200e9),
    "v5p": Chip(95.0, 459e12, 2765e9, 600e9),
    "v6e": Chip(31.25, 918e12, 1640e9, 448e9),
    "tpu7x": Chip(96.0, 1153.5e12, 3690e9, 600e9),  # half a chip
    "h100": Chip(79.0, 989e12, 3350e9, 450e9),
    "h200": Chip(140.0, 989e12, 4800e9, 450e9),
    "cpu": Chip(8.0, 1e11, 2e10, 1e10),  # round numbers, to try the command with
}
