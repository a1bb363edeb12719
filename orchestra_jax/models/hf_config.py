"""Hugging Face config.json <-> ModelConfig.

Every key that changes the mathematics is either read or must have the value at which it changes nothing; anything else
is an error that names the key, because a model that loads and computes something different is worse than one that does
not load. Keys that are merely unknown are logged.

RoPE is read in both layouts: `rope_theta` + `rope_scaling` beside the other keys (transformers 4) and everything inside
`rope_parameters` (transformers 5). Both are written, so that old and new readers agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from orchestra_jax.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig

logger = logging.getLogger(__name__)

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}

# What each family's configuration class in transformers assumes for a key that the file leaves out.
_MAX_POSITIONS = {"qwen3": 32_768, "qwen2": 32_768, "llama": 2048}
_ROPE_THETA = 10_000.0
_MAX_WINDOW_LAYERS = 28

# Keys that would change the result, each with the values at which they do not. None (JSON null) is always harmless,
# except for the activation.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None,),  # the model is defined by code in the repository, not by its model_type
    "partial_rotary_factor": (None, 1.0),
    "rotary_pct": (None, 1.0),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "use_mrope": (None, False),
    "alibi": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "scale_emb": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "add_cross_attention": (None, False),
}

# Keys that are read elsewhere in this file, or that cannot change the logits.
_HARMLESS = {
    *("architectures", "model_type", "vocab_size", "valid_vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("max_position_embeddings", "tie_word_embeddings", "attention_bias", "rope_theta", "rope_scaling"),
    *("rope_parameters", "original_max_position_embeddings", "layer_types", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("torch_dtype", "dtype", "transformers_version", "initializer_range", "attention_dropout"),
    *("pretraining_tp", "is_llama_config", "_name_or_path", "transformers.js_config", "is_decoder"),
    *("_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "is_encoder_decoder"),
}


def config_from_hf(raw: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """The ModelConfig that the parsed config.json `raw` describes.

    Args:
      raw: the parsed file.
      source: how error messages call it.

    Raises:
      ValueError: a key is missing, has a bad value, or asks for something that the decoder does not compute; the
        message names the key.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{source}: must be a JSON object, got {type(raw).__name__}")
    model_type = _model_type(raw, source)
    _check_neutral(raw, model_type, source)
    num_layers = _integer(raw, "num_hidden_layers", source)
    _check_full_attention(raw, model_type, num_layers, source)
    hidden_size = _integer(raw, "hidden_size", source)
    num_heads = _integer(raw, "num_attention_heads", source)
    rope_theta, rope_scaling = _rope(raw, source)
    try:
        return ModelConfig(
            model_type=model_type,
            vocab_size=_integer(raw, "vocab_size", source),
            valid_vocab_size=_integer(raw, "valid_vocab_size", source, None),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size", source),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(raw, model_type, num_heads, source),
            head_dim=_head_dim(raw, model_type, hidden_size, num_heads, source),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=_number(raw, "rms_norm_eps", source, 1e-6),
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings", source),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2",
            max_position_embeddings=_integer(raw, "max_position_embeddings", source, _MAX_POSITIONS[model_type]),
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(source) else f"{source}: {message}") from None


def config_to_hf(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The config.json content of `config`, readable by transformers 4 and 5 alike.

    Args:
      config: the model.
      dtype: of the weights beside it, as Hugging Face names it: float32, bfloat16 or float16.

    Raises:
      ValueError: the family of `config.model_type` does not have these switches (QK norm, bias).
    """
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"model.model_type {config.model_type!r} is none of {', '.join(ARCHITECTURES)}")
    for switch, family in (("qk_norm", "qwen3"), ("qkv_bias", "qwen2")):
        if getattr(config, switch) != (config.model_type == family):
            raise ValueError(
                f"model.{switch}={getattr(config, switch)} cannot be exported as {config.model_type}: "
                f"in Hugging Face's format {switch} is on in {family} and off in the other families"
            )
    scaling = _rope_scaling_to_hf(config)
    raw = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
    }
    if config.model_type != "qwen2":
        raw["attention_bias"] = False
    if config.model_type == "llama":
        raw["mlp_bias"] = False
    else:
        raw["use_sliding_window"] = False
    if config.valid_vocab_size is not None:
        raw["valid_vocab_size"] = config.valid_vocab_size
    return raw


# ---------------------------------------------------------------------------------------------------------------------
# what is read
# ---------------------------------------------------------------------------------------------------------------------

_REQUIRED = object()


def _get(raw: Mapping[str, Any], key: str, source: str, default: Any) -> Any:
    value = raw.get(key)
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"{source}: {key} is missing")
        return default
    return value


def _integer(raw: Mapping[str, Any], key: str, source: str, default: Any = _REQUIRED) -> Any:
    value = _get(raw, key, source, default)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ValueError(f"{source}: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, source: str, default: Any = _REQUIRED) -> float:
    value = _get(raw, key, source, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{source}: {key} must be a positive finite number, got {value!r}")
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str, source: str) -> bool:
    value = _get(raw, key, source, False)
    if not isinstance(value, bool):
        raise ValueError(f"{source}: {key} must be true or false, got {value!r}")
    return value


def _model_type(raw: Mapping[str, Any], source: str) -> str:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(
            f"{source}: model_type {model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURES[model_type]]:
        raise ValueError(
            f"{source}: architectures is {architectures!r}; "
            f"a {model_type} causal language model has [{ARCHITECTURES[model_type]!r}]"
        )
    return model_type


def _num_kv_heads(raw: Mapping[str, Any], model_type: str, num_heads: int, source: str) -> int:
    if "num_key_value_heads" not in raw and model_type != "llama":
        # transformers would assume 32 here, which is right for one size only.
        raise ValueError(f"{source}: num_key_value_heads is missing")
    num_kv_heads = _integer(raw, "num_key_value_heads", source, num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_dim(raw: Mapping[str, Any], model_type: str, hidden_size: int, num_heads: int, source: str) -> int:
    if "head_dim" not in raw and model_type == "qwen3":
        return 128  # Qwen3Config's default; the other families divide
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"{source}: head_dim is missing, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    return _integer(raw, "head_dim", source, hidden_size // num_heads)


def _check_neutral(raw: Mapping[str, Any], model_type: str, source: str) -> None:
    """Raises ValueError where a key asks for something that the decoder does not compute; logs unknown keys."""
    neutral = dict(_NEUTRAL)
    if model_type != "qwen2":  # Qwen2's attention has its bias whatever the file says
        neutral["attention_bias"] = (None, False)
    for key, values in neutral.items():
        if key in raw and raw[key] not in values:
            allowed = " or ".join(repr(value) for value in values if value is not None) or "null"
            raise ValueError(f"{source}: {key}={raw[key]!r} is not supported in {model_type} (only {allowed} is)")
    if unknown := sorted(raw.keys() - neutral.keys() - _HARMLESS):
        logger.warning("%s: unknown keys are ignored: %s", source, ", ".join(unknown))


def _check_full_attention(raw: Mapping[str, Any], model_type: str, num_layers: int, source: str) -> None:
    """Raises ValueError if any layer attends to a sliding window."""
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if other := [kind for kind in layer_types if kind != "full_attention"]:
            raise ValueError(f"{source}: layer_types has {other[0]!r}; only 'full_attention' is supported")
        return
    # Llama itself has no window and no switch for one: a window in its file belongs to a derived architecture.
    window = raw.get("sliding_window")
    in_use = raw.get("use_sliding_window", model_type == "llama") and window is not None
    first_layer = 0 if model_type == "llama" else _get(raw, "max_window_layers", source, _MAX_WINDOW_LAYERS)
    if in_use and first_layer < num_layers:
        raise ValueError(
            f"{source}: sliding_window={window!r} is in use from layer {first_layer} on; "
            "sliding-window attention is not supported"
        )


# ---------------------------------------------------------------------------------------------------------------------
# RoPE
# ---------------------------------------------------------------------------------------------------------------------

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE_KEYS: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_KEYS}


def _rope(raw: Mapping[str, Any], source: str) -> tuple[float, Llama3RopeScaling | LinearRopeScaling | None]:
    """Base frequency and scaling, from either layout or both if they agree."""
    fields = _rope_fields(raw, source)
    rope_type = fields.pop("rope_type", "default")
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"{source}: rope_type {rope_type!r} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    if "rope_theta" not in fields:
        logger.warning("%s: rope_theta is missing, the default of %g is used", source, _ROPE_THETA)
    theta = _number(fields, "rope_theta", f"{source}: rope", _ROPE_THETA)
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{source}: partial_rotary_factor other than 1 is not supported")

    # The original length says where a scaling starts; without one it says nothing.
    known = {"rope_theta", "original_max_position_embeddings", *_ROPE_KEYS[rope_type]}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"{source}: rope key {unknown[0]!r} is not supported with rope_type {rope_type!r}")

    where = f"{source}: rope_type {rope_type!r}"
    if rope_type == "linear":
        return theta, LinearRopeScaling(_number(fields, "factor", where))
    if rope_type == "llama3":
        scaling = Llama3RopeScaling(
            factor=_number(fields, "factor", where),
            low_freq_factor=_number(fields, "low_freq_factor", where),
            high_freq_factor=_number(fields, "high_freq_factor", where),
            original_max_position_embeddings=_integer(fields, "original_max_position_embeddings", where),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(f"{where}: low_freq_factor must be below high_freq_factor, got {fields}")
        return theta, scaling
    return theta, None


def _rope_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The RoPE keys of all places that may hold them, merged; `type` is renamed to `rope_type`, nulls are left out.

    Raises:
      ValueError: two places disagree, or a place holds no plain object.
    """
    merged: dict[str, Any] = {}
    found_in: dict[str, str] = {}
    top_level = {k: raw.get(k) for k in ("rope_theta", "original_max_position_embeddings")}
    for place in ("rope_parameters", "rope_scaling", ""):
        fields = raw.get(place) if place else top_level
        if fields is None:
            continue
        if not isinstance(fields, Mapping):
            raise ValueError(f"{source}: {place} must be an object or null, got {fields!r}")
        for key, value in fields.items():
            if isinstance(value, Mapping):
                raise ValueError(f"{source}: {place}.{key}: RoPE that differs by layer is not supported")
            name = "rope_type" if key == "type" else key
            if value is None:
                continue
            full_name = f"{place}.{key}" if place else key
            if name in merged and merged[name] != value:
                raise ValueError(f"{source}: {found_in[name]}={merged[name]!r} and {full_name}={value!r} disagree")
            merged[name], found_in[name] = value, full_name
    return merged


def _rope_scaling_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    match config.rope_scaling:
        case None:
            return None
        case LinearRopeScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3RopeScaling() as scaling:
            return {"rope_type": "llama3"} | {key: getattr(scaling, key) for key in _LLAMA3_KEYS}
        case other:
            raise ValueError(f"model.rope_scaling {other!r} cannot be exported")
