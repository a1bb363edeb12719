"""The sampler's weights, from the trainer's: the same arrays where that will do, else a copy made on the device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from orchestra_jax.models.decoder import Params, unstack_layers


def adopt(params: Params, *, dtype: Any = None, shardings: Mapping[str, jax.sharding.Sharding] | None = None) -> Params:
    """The weights to sample with after an update; nothing passes through the host.

    On CPU every layer becomes an array of its own (`decoder.unstack_layers`), which is a copy. Elsewhere the trainer's
    arrays are shared, unless they have another dtype (cast before they travel, so that less does) or other shardings.

    Args:
        params: the trainer's.
        dtype: of the sampler's floating-point weights; None: the trainer's.
        shardings: where each weight goes, of the stacked arrays; None: it stays where it is.
    """
    if dtype is not None and any(value.dtype != jnp.dtype(dtype) for value in params.values()):
        params = _cast(params, dtype=jnp.dtype(dtype).name)
    if shardings is not None:
        params = jax.device_put(params, dict(shardings))
    return _unstack(params) if jax.default_backend() == "cpu" else params


@partial(jax.jit, static_argnames=("dtype",))
def _cast(params: Params, *, dtype: str) -> Params:
    return {name: value.astype(dtype) for name, value in params.items()}


_unstack = jax.jit(unstack_layers)
