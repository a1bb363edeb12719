"""The bm25s library, imported so that it starts no accelerator."""

import importlib
import logging
import sys
from types import ModuleType
from typing import Any


def import_bm25s() -> ModuleType:
    """Import bm25s without its optional JAX part.

    Where JAX is installed, bm25s runs a JAX operation when it is imported. That would start a JAX backend, and so
    claim the accelerator, in every process that only runs environments, and it would come too early for
    `jax.distributed.initialize`. A None entry in `sys.modules` makes `import jax.lax` fail as if it were absent.
    """
    missing = object()
    previous: Any = sys.modules.get("jax.lax", missing)
    sys.modules["jax.lax"] = None  # type: ignore[assignment]
    try:
        module = importlib.import_module("bm25s")
    finally:
        if previous is missing:
            del sys.modules["jax.lax"]
        else:
            sys.modules["jax.lax"] = previous
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG and talks on every index
    return module
