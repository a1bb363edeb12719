"""The persistent compilation cache: what one run compiled, the next one reads."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def enable_compile_cache() -> Path | None:
    """Turns JAX's persistent compilation cache on, in the user's cache folder; returns it.

    `JAX_COMPILATION_CACHE_DIR` names another folder, and an empty value leaves the cache off. Programs for CPU are
    bound to the processor's instructions, so each kind of processor has a folder of its own.
    """
    import jax

    if (chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR")) is not None:
        return Path(chosen) if chosen else None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "orchestra-jax" / f"xla-{_processor()}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder


def _processor() -> str:
    """A short name for this processor's architecture and instructions."""
    features = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text("utf-8", errors="replace").splitlines()
        features += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]
