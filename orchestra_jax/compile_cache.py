"""The persistent compilation cache: what one run compiled, the next one reads."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def enable_compile_cache() -> Path | None:
    """Turns JAX's persistent compilation cache on, in the user's cache folder; returns it. Before JAX is imported.

    `JAX_COMPILATION_CACHE_DIR` names another folder, and an empty value leaves the cache off. Programs for CPU are
    bound to the processor's instructions, so each kind of processor has a folder of its own.
    """
    if (chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR")) is not None:
        return Path(chosen) if chosen else None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "orchestra-jax" / f"xla-{_processor()}"
    # By the environment, which JAX reads when it is imported: a mistyped config should not wait for that.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    return folder


def _processor() -> str:
    """A short name for this processor's architecture and instructions."""
    features = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text("utf-8", errors="replace").splitlines()
        features += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]
