"""Model configurations: one frozen dataclass that covers the Qwen3, Qwen2.5, Llama and SmolLM2 families."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder.

    The families differ only in the switches: `qk_norm` (Qwen3), `qkv_bias` (Qwen2.5), `rope_scaling` (Llama 3)
    and `tie_word_embeddings` (small models of every family).
    """

    model_type: str
    """The Hugging Face `model_type` that this exports as: qwen3, qwen2 or llama."""
    vocab_size: int
    """Rows of the embedding, padding rows included."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Stated, never derived: in Qwen3 it is not hidden_size / num_heads."""
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    max_position_embeddings: int = 32_768
    valid_vocab_size: int | None = None
    """Ids from here on are padding rows: their logits are -inf, so they are never sampled. None: all are valid."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even (rotary embedding works on pairs), got {self.head_dim}")
        if self.valid_vocab_size is not None and not 0 < self.valid_vocab_size <= self.vocab_size:
            raise ValueError(
                f"model.valid_vocab_size must be between 1 and vocab_size ({self.vocab_size}), "
                f"got {self.valid_vocab_size}"
            )

    @property
    def num_parameters(self) -> int:
        """Number of parameters, a tied head counted once."""
        from orchestra_jax.models.decoder import (
            param_specs,  # here, because the specs are derived from this class
        )

        total = 0
        for spec in param_specs(self).values():
            size = 1
            for n in spec.shape:
                size *= n
            total += size
        return total


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        qk_norm=True,
        max_position_embeddings=40_960,
    )


# Sizes as published in the models' config.json files.
PRESETS: dict[str, ModelConfig] = {
    "market-tiny": ModelConfig(
        model_type="qwen3",
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        qk_norm=True,
        max_position_embeddings=1024,
    ),
    "smollm2-135m": ModelConfig(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "qwen2.5-0.5b": ModelConfig(
        model_type="qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        tie_word_embeddings=True,
        qkv_bias=True,
    ),
    "llama3.2-1b": ModelConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=500_000.0,
        rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=131_072,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
}


_PLAIN_TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The named preset with some fields replaced.

    Raises:
      ValueError: no preset has that name, or an override names no field.
    """
    if name not in PRESETS:
        raise ValueError(f"model.preset {name!r} is unknown; there are {', '.join(PRESETS)}")
    known = {f.name: f.type for f in fields(ModelConfig)}
    for key, value in overrides.items():
        if key not in known:
            raise ValueError(f"model.overrides: unknown field {key!r}; there are {', '.join(known)}")
        kind = _PLAIN_TYPES.get(str(known[key]))
        if kind is None and isinstance(value, dict | list | str):
            raise ValueError(f"model.overrides.{key} cannot be set from a config file")
        if kind is not None and type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"model.overrides.{key} must be of type {kind.__name__}, got {value!r}")
    return replace(PRESETS[name], **overrides)
