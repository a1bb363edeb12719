"""Reads GGUF files of the Llama architecture with a SmolLM2 tokenizer (llama.cpp's format), dequantised.

Two things differ from the Hugging Face layout. The rows of the query and key projections are permuted, because
llama.cpp rotates neighbouring pairs where Hugging Face rotates the two halves of a head; `unpermute_rotary_rows` undoes
that. And the tokenizer is stored as lists of pieces and merges, from which `tokenizer.json` is built again.

Needs the extra `orchestra-jax[gguf]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import Params, param_specs

_TOP_TENSORS = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}

# Values of llama.cpp's token types; see gguf.TokenType.
_CONTROL, _USER_DEFINED = 3, 4


def load_gguf(file: str | Path, *, dtype: str = "float32") -> tuple[ModelConfig, Params, dict[str, bytes]]:
    """Loads a GGUF file and dequantises it.

    Args:
      file: of the llama architecture, with a byte-level BPE vocabulary of the kind `smollm`.
      dtype: of the parameters: float32, bfloat16 or float16.

    Returns:
      The config, the parameters as `decoder.param_specs(config)` says, and the files that make a Hugging Face folder
      complete: tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.

    Raises:
      ValueError: the file is damaged or holds another kind of model; the message names the file and the field.
      ImportError: the extra `gguf` is not installed.
    """
    file = Path(file)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    fields, tensors = _open(file)
    config = _config(fields, tensors, file)
    params = {}
    for name, spec in param_specs(config).items():
        out = np.empty(spec.shape, np.dtype(dtype))
        if name.startswith("layers."):
            for layer in range(config.num_layers):
                out[layer] = _weight(config, tensors, name, layer, file)
        else:
            out[...] = _weight(config, tensors, name, None, file)
        params[name] = jnp.asarray(out)
    return config, params, _tokenizer_files(fields, config, file)


def unpermute_rotary_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order that llama.cpp gives to query and key projections.

    Within each head, llama.cpp puts the two members of a rotated pair next to each other: its rows 2i and 2i+1 are
    rows i and i + head_dim/2 of the Hugging Face layout.

    Args:
      weight: [num_heads * head_dim, in], in llama.cpp's order.
      num_heads: query heads for the query projection, key-value heads for the key projection.

    Returns:
      The same rows in the order of Hugging Face.
    """
    rows = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [head, pair, member, in]
    return rows.swapaxes(1, 2).reshape(weight.shape)


# ---------------------------------------------------------------------------------------------------------------------
# reading
# ---------------------------------------------------------------------------------------------------------------------


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError("reading GGUF files needs: pip install 'orchestra-jax[gguf]'") from None
    return gguf


def _open(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata fields by key, and gguf's tensor records (memory-mapped) by name."""
    gguf = _import_gguf()
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader indexes into untrusted bytes and fails in many ways
        raise ValueError(f"{file}: not a readable GGUF file: {type(error).__name__}: {error}") from None
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _field(fields: Mapping[str, Any], key: str, file: Path) -> Any:
    if key not in fields:
        raise ValueError(f"{file}: the field {key} is missing")
    return fields[key]


def _config(fields: Mapping[str, Any], tensors: Mapping[str, Any], file: Path) -> ModelConfig:
    architecture = _field(fields, "general.architecture", file)
    if architecture != "llama":
        raise ValueError(f"{file}: general.architecture is {architecture!r}; only 'llama' is supported")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ValueError(f"{file}: scaled RoPE (llama.rope.scaling.type {scaling!r}) is not supported in GGUF")
    if fields.get("llama.expert_count", 0):
        raise ValueError(f"{file}: llama.expert_count is not 0; mixtures of experts are not supported")

    hidden_size = _field(fields, "llama.embedding_length", file)
    num_heads = _field(fields, "llama.attention.head_count", file)
    head_dim = fields.get("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise ValueError(f"{file}: {key} is {fields[key]}, but a head has {head_dim} dimensions")
    try:
        config = ModelConfig(
            model_type="llama",
            vocab_size=len(_field(fields, "tokenizer.ggml.tokens", file)),
            hidden_size=hidden_size,
            intermediate_size=_field(fields, "llama.feed_forward_length", file),
            num_layers=_field(fields, "llama.block_count", file),
            num_heads=num_heads,
            num_kv_heads=fields.get("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=float(fields.get("llama.rope.freq_base", 10_000.0)),
            # Stored as float32; its shortest decimal is what was meant (1e-05, not 9.999999747378752e-06).
            rms_norm_eps=float(str(np.float32(_field(fields, "llama.attention.layer_norm_rms_epsilon", file)))),
            tie_word_embeddings=_TOP_TENSORS["lm_head"] not in tensors,
            max_position_embeddings=_field(fields, "llama.context_length", file),
        )
    except (ValueError, TypeError) as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(file)) else f"{file}: {message}") from None
    _check_tensors(config, tensors, file)
    return config


def _check_tensors(config: ModelConfig, tensors: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError unless the file holds exactly the tensors of `config`, in the right shapes."""
    if config.num_layers > len(tensors):  # before anything is built per layer
        raise ValueError(f"{file}: llama.block_count is {config.num_layers}, but there are only {len(tensors)} tensors")
    expected = {
        _tensor_name(param, layer): spec.shape if layer is None else spec.shape[1:]
        for param, spec in param_specs(config).items()
        for layer in (range(config.num_layers) if param.startswith("layers.") else [None])
    }
    for kind, names in (
        ("lacks", expected.keys() - tensors.keys()),
        ("has unexpected", tensors.keys() - expected.keys()),
    ):
        if names:
            raise ValueError(f"{file}: {kind} tensors, first {min(names)} ({len(names)} in all)")
    for name, shape in expected.items():
        # GGUF lists dimensions from the innermost: [in, out], which is our order for projections.
        found = [int(n) for n in tensors[name].shape]
        wanted = list(shape[::-1] if name == _TOP_TENSORS["embed_tokens"] else shape)
        if found != wanted:
            raise ValueError(f"{file}: {name} has dimensions {found}, its metadata asks for {wanted}")


def _tensor_name(param: str, layer: int | None) -> str:
    if layer is None:
        return _TOP_TENSORS[param]
    return f"blk.{layer}.{_LAYER_TENSORS[param.removeprefix('layers.')]}.weight"


def _weight(
    config: ModelConfig,
    tensors: Mapping[str, Any],
    param: str,
    layer: int | None,
    file: Path,
) -> np.ndarray:
    """One parameter, or its slice of one layer, dequantised to float32 and in our layout."""
    name = _tensor_name(param, layer)
    tensor = tensors[name]
    try:
        value = _import_gguf().dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"{file}: cannot dequantise {name} ({tensor.tensor_type.name}): {error}") from None
    if param == "layers.q_proj":
        value = unpermute_rotary_rows(value, config.num_heads)
    elif param == "layers.k_proj":
        value = unpermute_rotary_rows(value, config.num_kv_heads)
    return value.T if param.endswith("_proj") or param == "lm_head" else value


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def _tokenizer_files(fields: Mapping[str, Any], config: ModelConfig, file: Path) -> dict[str, bytes]:
    tokens = _field(fields, "tokenizer.ggml.tokens", file)
    tokenizer = _tokenizer(fields, tokens, file)
    ids = {
        role: fields[f"tokenizer.ggml.{name}_token_id"]
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    for role, token_id in ids.items():
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"{file}: the {role} token id {token_id} is outside the vocabulary")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokens[token_id] for role, token_id in ids.items()},
    }
    if "tokenizer.chat_template" in fields:
        tokenizer_config["chat_template"] = fields["tokenizer.chat_template"]
    generation_config = {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad") if role in ids}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json_bytes(tokenizer_config),
        "generation_config.json": _json_bytes(generation_config),
    }


def _tokenizer(fields: Mapping[str, Any], tokens: list[str], file: Path) -> Tokenizer:
    """Byte-level BPE; `smollm` splits digits one by one before GPT-2's pattern (llama.cpp's llama-vocab.cpp)."""
    for key, known in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if _field(fields, key, file) != known:
            raise ValueError(f"{file}: {key} is {fields[key]!r}; only {known!r} is supported")
    if _field(fields, "tokenizer.ggml.add_bos_token", file):
        raise ValueError(f"{file}: tokenizer.ggml.add_bos_token is true; only false is supported")
    types = _field(fields, "tokenizer.ggml.token_type", file)
    if len(types) != len(tokens):
        raise ValueError(f"{file}: {len(tokens)} tokens but {len(types)} token types")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{file}: tokenizer.ggml.tokens holds a token twice")
    merges = [tuple(merge.split(" ")) for merge in _field(fields, "tokenizer.ggml.merges", file)]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file}: tokenizer.ggml.merges: {error}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            tokenizer.add_special_tokens([added]) if kind == _CONTROL else tokenizer.add_tokens([added])
    return tokenizer


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
