"""FLOPs of a traced program, counted where the compiler's own analysis fails: in loops and in kernels.

XLA's `cost_analysis` counts the body of a loop once and a Pallas kernel as nothing. Here every matrix product of the
jaxpr counts as 2 x m x n x k, bodies of `scan` times their length, and the kernels of attention by their formula.
Element-wise work is left out: it is a few percent, and bound by memory.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

ATTENTION_PRODUCTS = {"fwd": 2, "dkv": 5, "dq": 3}
"""Matrix products of a flash attention kernel: Q K' and P V forward; backward five, of which a separate kernel for dq
repeats three (Dao 2023, arXiv 2307.08691)."""


def count_flops(jaxpr: Any, *, while_trips: int = 1) -> float:
    """FLOPs of all devices together.

    Args:
      jaxpr: closed or not, of `jax.make_jaxpr` or `jit(f).trace(...).jaxpr`.
      while_trips: how often the body of every `while` runs whose number of trips is data.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_count(equation, while_trips) for equation in inner.eqns)


def _count(equation: Any, while_trips: int) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot(equation)
    if name == "pallas_call":
        return _attention(equation)
    if name == "cond":
        return max(count_flops(branch, while_trips=while_trips) for branch in params["branches"])
    times = {"scan": params.get("length", 1), "while": while_trips}.get(name, 1)
    if name == "shard_map":
        times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return times * sum(count_flops(sub, while_trips=while_trips) for sub in _bodies(params))


def _bodies(params: dict[str, Any]) -> list[Any]:
    """The jaxprs in an equation's parameters; a `while`'s condition has no products."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                found.append(item)
    return found


def _dot(equation: Any) -> float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)


def _attention(equation: Any) -> float:
    """A causal attention kernel by its name and its first two operands [..., heads, time, head_dim]."""
    name = str(equation.params.get("name") or equation.params.get("name_and_src_info") or "")
    products = next((count for part, count in ATTENTION_PRODUCTS.items() if part in name), None)
    if products is None:
        raise ValueError(f"the FLOPs of the kernel {name!r} are not known")
    shapes = [v.aval.shape for v in equation.invars if v.aval.ndim >= 3 and v.aval.dtype.kind in "fV"]
    queries, keys = shapes[0], shapes[1]
    return products * 2.0 * math.prod(queries) * keys[-2] / 2


def model_flops(num_matrix_params: int, tokens: int, attention_flops: float) -> float:
    """FLOPs that training on `tokens` needs, without recomputation.

    6 per parameter and token (Kaplan et al. 2020, arXiv 2001.08361), and attention's forward and backward products.
    """
    return 6.0 * num_matrix_params * tokens + attention_flops
