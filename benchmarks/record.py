"""What every benchmark's JSON says of where it ran."""

from __future__ import annotations

import os
import platform

import jax

from orchestra_jax.models.config import ModelConfig


def machine() -> str:
    """Processor, cores, device, Python and JAX in one line."""
    device = jax.devices()[0]
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {device.platform} {device.device_kind}, "
        f"Python {platform.python_version()}, jax {jax.__version__}"
    )


def shape_of(config: ModelConfig) -> dict[str, int]:
    """A model's sizes, for a peer to make one of its own."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(config, name) for name in names}
