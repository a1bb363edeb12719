"""The policy network: one decoder-only transformer for Qwen3, Qwen2.5, Llama and SmolLM2.

`param_specs` describes every weight once (shape, logical axes, initialiser); initialisation, checkpoints, Hugging Face
import and sharding are all derived from it. Parameters are one flat dict, name -> array, with the layers stacked on
axis 0. `hidden_states` is the training pass (layers scanned), `extend` the sampler's pass over a KV cache (layers
unrolled: scanning costs decode 1.3 to 1.7 times as much), and `Decoder` the Flax NNX module around both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from orchestra_jax.models.attention import ATTENTION_RESIDUALS, cached_attention, packed_attention
from orchestra_jax.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from orchestra_jax.models.decode_attention import decode_attention, prefill_attention, quantize_kv, write_kv
from orchestra_jax.parallel.rules import constrain, use_weight

Params = dict[str, Any]
"""Weights by name, the layers' stacked on axis 0 (or, for the sampler on CPU, a tuple of arrays: `unstack_layers`)."""

Remat = Literal["none", "layer", "attention", "offload"]
"""What the backward pass recomputes: nothing; every layer from its input; the same but for attention, whose result is
kept; or as "layer" with the layers' inputs kept in the host's memory instead of the device's."""

_CACHE_ARRAYS = ("keys", "values", "key_scales", "value_scales", "lengths")


@dataclass(frozen=True)
class ParamSpec:
    """One weight: its shape, a logical name per axis, and the standard deviation of its initial values."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float | None
    """Normal with this standard deviation; None: all ones (norms); 0: zeros (biases)."""


def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Every weight of the model, by name. Projections are [in, out], the transpose of Hugging Face's."""
    c = config
    layers, width, inner = c.num_layers, c.hidden_size, c.intermediate_size
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    residual = (2 * layers) ** -0.5  # keeps the residual stream's scale independent of depth

    # Unit-norm rows: with a tied head, copying a token from the context is a confident logit from the first step on.
    specs = {"embed_tokens": ParamSpec((c.vocab_size, width), ("vocab", "embed"), width**-0.5)}

    def layer(name: str, shape: tuple[int, ...], axes: tuple[str, ...], init_std: float | None) -> None:
        specs[f"layers.{name}"] = ParamSpec((layers, *shape), ("layers", *axes), init_std)

    layer("input_layernorm", (width,), ("norm",), None)
    layer("q_proj", (width, q_width), ("embed", "heads"), width**-0.5)
    layer("k_proj", (width, kv_width), ("embed", "kv_heads"), width**-0.5)
    layer("v_proj", (width, kv_width), ("embed", "kv_heads"), width**-0.5)
    layer("o_proj", (q_width, width), ("heads", "embed"), q_width**-0.5 * residual)
    if c.qkv_bias:
        layer("q_bias", (q_width,), ("heads",), 0.0)
        layer("k_bias", (kv_width,), ("kv_heads",), 0.0)
        layer("v_bias", (kv_width,), ("kv_heads",), 0.0)
    if c.qk_norm:
        layer("q_norm", (c.head_dim,), ("norm",), None)
        layer("k_norm", (c.head_dim,), ("norm",), None)
    layer("post_attention_layernorm", (width,), ("norm",), None)
    layer("gate_proj", (width, inner), ("embed", "mlp"), width**-0.5)
    layer("up_proj", (width, inner), ("embed", "mlp"), width**-0.5)
    layer("down_proj", (inner, width), ("mlp", "embed"), inner**-0.5 * residual)
    specs["norm"] = ParamSpec((width,), ("norm",), None)
    if not c.tie_word_embeddings:
        specs["lm_head"] = ParamSpec((width, c.vocab_size), ("embed", "vocab"), width**-0.5)
    return specs


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
    """Random parameters; each weight draws from its own fold of `key`, so adding one leaves the others as they were."""
    return {name: init_param(config, name, key, dtype=dtype) for name in param_specs(config)}


def init_param(config: ModelConfig, name: str, key: jax.Array, *, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """One of the weights that `init_params` makes of the same `key`."""
    specs = param_specs(config)
    spec = specs[name]
    if spec.init_std is None:
        return jnp.ones(spec.shape, dtype)
    noise = jax.random.normal(jax.random.fold_in(key, list(specs).index(name)), spec.shape, jnp.float32)
    return (noise * spec.init_std).astype(dtype)


def check_params(config: ModelConfig, params: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Raises ValueError, naming the weight, where `params` does not have exactly the weights that `config` asks for."""
    specs = param_specs(config)
    if missing := sorted(specs.keys() - params.keys()):
        raise ValueError(f"missing weights: {', '.join(missing)}")
    if extra := sorted(params.keys() - specs.keys()):
        raise ValueError(f"unexpected weights: {', '.join(extra)}")
    for name, spec in specs.items():
        if tuple(params[name].shape) != spec.shape:
            raise ValueError(f"weight {name} has shape {tuple(params[name].shape)}, the config asks for {spec.shape}")


# --------------------------------------------------------------------------------------------------------------
# building blocks
# --------------------------------------------------------------------------------------------------------------


def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight, accumulated in float32 (also the fast path for bfloat16 in XLA on CPU), in x's dtype."""
    return jnp.dot(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Inverse frequencies [head_dim / 2] float32, with the family's scaling.

    Raises:
      ValueError: the scaling is of a kind that the decoder does not know.
    """
    dim = config.head_dim
    inv_freq = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = config.rope_scaling
    match scaling:
        case None:
            pass
        case LinearRopeScaling():
            inv_freq = inv_freq / scaling.factor
        case Llama3RopeScaling():
            # Long wavelengths are stretched by `factor`, short ones kept, those between interpolated
            # (the rule of Llama 3.1, as published with its weights).
            wavelength = 2 * np.pi / inv_freq
            context = scaling.original_max_position_embeddings
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
            inv_freq = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
        case _:
            raise ValueError(f"model.rope_scaling {scaling!r} is not supported")
    return inv_freq.astype(np.float32)


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, each [..., 1, head_dim / 2] float32, for integer positions [...]."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding in the half-split layout of the Hugging Face checkpoints. x: [..., heads, head_dim]."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _qkv(config: ModelConfig, layer: Params, x: jax.Array, angles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B,T,H,D], keys and values [B,T,K,D] of one layer, queries and keys rotated."""
    c = config
    h = rms_norm(x, layer["input_layernorm"], c.rms_norm_eps)
    q, k, v = dense(h, layer["q_proj"]), dense(h, layer["k_proj"]), dense(h, layer["v_proj"])
    if c.qkv_bias:
        q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
    q = constrain(q.reshape(*q.shape[:-1], c.num_heads, c.head_dim), "batch", "time", "heads", None)
    k = constrain(k.reshape(*k.shape[:-1], c.num_kv_heads, c.head_dim), "batch", "time", "kv_heads", None)
    v = constrain(v.reshape(*v.shape[:-1], c.num_kv_heads, c.head_dim), "batch", "time", "kv_heads", None)
    if c.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], c.rms_norm_eps), rms_norm(k, layer["k_norm"], c.rms_norm_eps)
    return rotate(q, angles), rotate(k, angles), v


def _finish_layer(config: ModelConfig, layer: Params, x: jax.Array, attended: jax.Array) -> jax.Array:
    """Output projection, residual and MLP. attended: [B,T,H,D]."""
    x = x + _residual(dense(attended.reshape(*attended.shape[:-2], -1), layer["o_proj"]))
    h = rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
    inner = jax.nn.silu(dense(h, layer["gate_proj"])) * dense(h, layer["up_proj"])
    return x + _residual(dense(constrain(inner, "batch", "time", "mlp"), layer["down_proj"]))


def _residual(x: jax.Array) -> jax.Array:
    """Between layers: [batch, time, hidden_size], split along its tokens."""
    return constrain(x, "batch", "residual_time", None)


def _layer_params(params: Params) -> Params:
    return {name.removeprefix("layers."): p for name, p in params.items() if name.startswith("layers.")}


# --------------------------------------------------------------------------------------------------------------
# the two passes
# --------------------------------------------------------------------------------------------------------------


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    prefixes: jax.Array | None = None,
    *,
    remat: Remat = "none",
    dtype: Any = None,
) -> jax.Array:
    """Final normed hidden states of packed rows, the training pass.

    Args:
      config: the model.
      params: its weights.
      tokens: [batch, time] int32 ids.
      positions, segments, prefixes: [batch, time] int32, see `attention.packed_attention`. Padding has segment 0.
        `prefixes=None` means that no segment continues another.
      remat: what the backward pass recomputes instead of keeping it.
      dtype: to compute in; None: that of the weights. Weights are cast layer by layer.

    Returns:
      [batch, time, hidden_size].
    """
    prefixes = segments if prefixes is None else prefixes
    angles = rope_angles(config, positions)
    axes = {name: spec.axes for name, spec in param_specs(config).items()}

    def body(x: jax.Array, stored: Params) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, "layer_input")
        layer = {name: use_weight(w, axes[f"layers.{name}"][1:], dtype) for name, w in stored.items()}
        q, k, v = _qkv(config, layer, x, angles)
        attended = packed_attention(q, k, v, positions, segments, prefixes)
        return _finish_layer(config, layer, x, attended), None

    # Looked up in the dtype that it is stored in: the gradients of a frequent token are many.
    x = use_weight(params["embed_tokens"], axes["embed_tokens"])[tokens]
    x = _residual(x.astype(dtype or x.dtype))
    x, _ = jax.lax.scan(_rematerialised(body, remat), x, _layer_params(params))
    # The head reads single tokens of a row: it is whole along its tokens from here on.
    return constrain(rms_norm(x, params["norm"], config.rms_norm_eps), "batch", None, None)


def _rematerialised(body: Any, remat: Remat) -> Any:
    policies = jax.checkpoint_policies
    match remat:
        case "none":
            return body
        case "layer":
            return jax.checkpoint(body)
        case "attention":
            return jax.checkpoint(body, policy=policies.save_only_these_names(ATTENTION_RESIDUALS))
        case "offload":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["layer_input"],
                offload_src="device",
                offload_dst="pinned_host",
            )
            return jax.checkpoint(body, policy=policy)
    raise ValueError(f"remat {remat!r} is none of none, layer, attention, offload")


@partial(jax.tree_util.register_dataclass, meta_fields=["transposed"], data_fields=list(_CACHE_ARRAYS))
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every row, and how much of each row is filled.

    One array per layer: separate arrays are updated in place inside a loop.
    """

    keys: tuple[jax.Array, ...]
    """[rows, kv_heads, capacity, head_dim], or [rows, kv_heads, head_dim, capacity] if `transposed`."""
    values: tuple[jax.Array, ...]
    """[rows, kv_heads, capacity, head_dim]."""
    key_scales: tuple[jax.Array, ...] | None
    value_scales: tuple[jax.Array, ...] | None
    """[rows, kv_heads, capacity] float32 of an int8 cache, see `decode_attention.quantize_kv`."""
    lengths: jax.Array
    """[rows] int32, tokens in each row."""
    transposed: bool
    """Whether the keys' positions come last: a row of scores is then one pass over memory (twice as fast on CPU)."""

    @property
    def rows(self) -> int:
        """Sequences that it holds."""
        return self.values[0].shape[0]

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""
        return self.values[0].shape[2]


def init_cache(
    config: ModelConfig,
    rows: int,
    capacity: int,
    dtype: jnp.dtype = jnp.float32,
    *,
    transposed: bool | None = None,
) -> KVCache:
    """An empty cache for `rows` sequences of at most `capacity` tokens; `dtype` int8 makes a quantised one.

    `transposed`: the keys' layout, default: as is fastest on this platform.
    """
    transposed = jax.default_backend() == "cpu" if transposed is None else transposed
    shape = (rows, config.num_kv_heads, capacity, config.head_dim)
    key_shape = (*shape[:2], shape[3], shape[2]) if transposed else shape

    def arrays(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    quantized = jnp.dtype(dtype) == jnp.int8
    return KVCache(
        keys=arrays(key_shape, dtype),
        values=arrays(shape, dtype),
        key_scales=arrays(shape[:3], jnp.float32) if quantized else None,
        value_scales=arrays(shape[:3], jnp.float32) if quantized else None,
        lengths=jnp.zeros((rows,), jnp.int32),
        transposed=transposed,
    )


def unstack_layers(params: Params) -> Params:
    """The same weights with every layer's an array of its own, as `extend` reads them fastest on CPU.

    XLA on CPU copies the slices of a stacked array before it multiplies by them. Other platforms read them in place.
    """
    return {name: tuple(p) if name.startswith("layers.") else p for name, p in params.items()}


def extend(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    counts: jax.Array,
    *,
    filled: int | None = None,
    slots: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends new tokens to rows of the cache: prefill, observation and decode step are all this.

    Args:
      config: the model.
      params: its weights, layers stacked or not (`unstack_layers`).
      cache: its sequences; row r gets its new tokens behind those that its sequence has.
      tokens: [rows, time] int32, row r valid up to counts[r].
      counts: [rows] int32, new tokens per row; 0 leaves a row as it is. The caller sees to it that
        lengths + counts <= capacity.
      filled: no sequence is longer than this afterwards; nothing beyond is read. Default: the capacity.
      slots: [rows] int32, the sequence of each row, out of range for none. Default: row r is sequence r, of all.
        Otherwise the cache is read in place by the platform's kernel.

    Returns:
      hidden [rows, time, hidden_size] (final norm applied; meaningless beyond counts), and the longer cache.
    """
    rows, time = tokens.shape
    filled = cache.capacity if filled is None else filled
    index = jnp.arange(rows) if slots is None else slots
    starts = cache.lengths.at[index].get(mode="fill", fill_value=0)
    offsets = jnp.arange(time)[None, :]
    positions = starts[:, None] + offsets
    # Tokens beyond counts are sent out of bounds, where the scatter drops them.
    targets = jnp.where(offsets < counts[:, None], positions, cache.capacity)
    angles = rope_angles(config, positions)
    stacked = _layer_params(params)

    x = params["embed_tokens"][tokens]
    layers: list[_CacheLayer] = []
    for number in range(config.num_layers):
        layer = {name: p[number] for name, p in stacked.items()}
        q, k, v = _qkv(config, layer, x, angles)
        stored = _cache_layer(cache, number)
        if slots is None:
            stored = _store(stored, k, v, index[:, None], targets, cache.transposed)
            attended = _attend_cache(q, stored, positions, filled, cache.transposed)
        else:
            stored, attended = _attend_in_place(q, k, v, stored, slots, starts, counts)
        x = _finish_layer(config, layer, x, attended)
        layers.append(stored)
    hidden = rms_norm(x, params["norm"], config.rms_norm_eps)
    keys, values, key_scales, value_scales = zip(*layers)
    quantized = cache.key_scales is not None
    return hidden, KVCache(
        keys=keys,
        values=values,
        key_scales=key_scales if quantized else None,
        value_scales=value_scales if quantized else None,
        lengths=cache.lengths.at[index].add(counts, mode="drop"),
        transposed=cache.transposed,
    )


class _CacheLayer(NamedTuple):
    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None
    value_scales: jax.Array | None


def _cache_layer(cache: KVCache, number: int) -> _CacheLayer:
    scales = (cache.key_scales, cache.value_scales)
    return _CacheLayer(cache.keys[number], cache.values[number], *(s[number] if s else None for s in scales))


def _store(
    layer: _CacheLayer, k: jax.Array, v: jax.Array, rows: jax.Array, targets: jax.Array, transposed: bool
) -> _CacheLayer:
    """Enters new keys and values [rows, time, kv_heads, head_dim] at positions `targets` [rows, time]."""

    def put(array: jax.Array, new: jax.Array, last: bool = False) -> jax.Array:
        at = array.at[rows, :, :, targets] if last else array.at[rows, :, targets]
        return at.set(new.astype(array.dtype), mode="drop")

    if layer.key_scales is None or layer.value_scales is None:
        return _CacheLayer(put(layer.keys, k, transposed), put(layer.values, v), None, None)
    (k, key_scales), (v, value_scales) = quantize_kv(k), quantize_kv(v)
    return _CacheLayer(
        put(layer.keys, k, transposed),
        put(layer.values, v),
        put(layer.key_scales, key_scales),
        put(layer.value_scales, value_scales),
    )


def _attend_cache(q: jax.Array, layer: _CacheLayer, positions: jax.Array, filled: int, transposed: bool) -> jax.Array:
    """Attention of q [rows, time, heads, head_dim] to the first `filled` positions of its sequence in the cache."""
    return cached_attention(
        q,
        layer.keys[..., :filled] if transposed else layer.keys[:, :, :filled],
        layer.values[:, :, :filled],
        positions,
        transposed=transposed,
        key_scales=None if layer.key_scales is None else layer.key_scales[:, :, :filled],
        value_scales=None if layer.value_scales is None else layer.value_scales[:, :, :filled],
    )


def _attend_in_place(
    q: jax.Array, k: jax.Array, v: jax.Array, layer: _CacheLayer, slots: jax.Array, starts: jax.Array, counts: jax.Array
) -> tuple[_CacheLayer, jax.Array]:
    """Enters new keys and values [rows, time, kv_heads, head_dim] and attends, by the platform's kernels."""
    layer = _CacheLayer(
        *write_kv(
            layer.keys,
            layer.values,
            k,
            v,
            slots,
            starts,
            counts,
            key_scales=layer.key_scales,
            value_scales=layer.value_scales,
        )
    )
    if q.shape[1] == 1:
        attended = decode_attention(
            q[:, 0],
            layer.keys,
            layer.values,
            slots,
            jnp.where(counts > 0, starts + counts, 0),
            key_scales=layer.key_scales,
            value_scales=layer.value_scales,
        )[:, None]
    else:
        attended = prefill_attention(
            q,
            layer.keys,
            layer.values,
            slots,
            starts,
            counts,
            key_scales=layer.key_scales,
            value_scales=layer.value_scales,
        )
    return layer, attended


def logits(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., vocab_size] of hidden states [..., hidden_size]; padding rows of the vocabulary are -inf."""
    if config.tie_word_embeddings:
        out = jnp.einsum("...d,vd->...v", hidden, params["embed_tokens"], preferred_element_type=jnp.float32)
    else:
        out = jnp.einsum("...d,dv->...v", hidden, params["lm_head"], preferred_element_type=jnp.float32)
    if config.valid_vocab_size is not None and config.valid_vocab_size < config.vocab_size:
        out = jnp.where(jnp.arange(config.vocab_size) < config.valid_vocab_size, out, -jnp.inf)
    return out


def forward(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Float32 logits [batch, time, vocab_size] of full, unpadded rows of token ids [batch, time]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return logits(config, params, hidden_states(config, params, tokens, positions, jnp.ones_like(tokens)))


class Decoder(nnx.Module):
    """The policy as a Flax NNX module: `Decoder(config, rngs=nnx.Rngs(0))(tokens)` gives logits.

    The trainer and the sampler use the pure functions of this file on `decoder.params()`; the module is the same
    weights with NNX's tools around them (`nnx.split`, `nnx.Optimizer`, filters, surgery).
    """

    def __init__(self, config: ModelConfig, params: Params | None = None, *, rngs: nnx.Rngs | None = None) -> None:
        if params is None:
            if rngs is None:
                raise ValueError("Decoder needs params or rngs")
            params = init_params(config, rngs.params())
        check_params(config, params)
        self.config = config
        self.weights = nnx.Dict({name: nnx.Param(p) for name, p in params.items()})

    def params(self) -> Params:
        """The weights as the flat dict that the pure functions take."""
        return {name: weight[...] for name, weight in self.weights.items()}

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits [batch, time, vocab_size] of token ids [batch, time]."""
        return forward(self.config, self.params(), tokens)
