"""config.json <-> ModelConfig: both RoPE layouts, defaults, and every key that is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from orchestra_jax.models.config import PRESETS, LinearRopeScaling, Llama3RopeScaling, ModelConfig
from orchestra_jax.models.decoder import rope_frequencies
from orchestra_jax.models.hf import config_from_hf, config_to_hf

REFERENCES = Path(__file__).parent / "references"

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("folder", sorted(REFERENCES.iterdir()), ids=lambda folder: folder.name)
def test_the_layouts_of_transformers_4_and_5_give_the_same_config(folder: Path) -> None:
    new = json.loads((folder / "config.json").read_text())
    old = json.loads((folder / "config_v4.json").read_text())
    assert ("rope_parameters" in new, "rope_theta" in new) == (True, False)
    assert ("rope_parameters" in old, "rope_theta" in old) == (False, True)
    config = config_from_hf(new)
    assert config == config_from_hf(old)
    assert config.rope_theta == new["rope_parameters"]["rope_theta"]


def test_head_dim_is_read_and_not_divided() -> None:
    assert config_from_hf(QWEN3).head_dim == 16  # 64 / 8 would be 8
    assert config_to_hf(config_from_hf(QWEN3))["head_dim"] == 16
    assert config_from_hf(without(LLAMA, "head_dim")).head_dim == 8
    assert config_from_hf({**LLAMA, "head_dim": None}).head_dim == 8
    assert config_from_hf(without(QWEN3, "head_dim")).head_dim == 128  # Qwen3Config's default


def test_switches_of_the_families() -> None:
    qwen3, qwen2, llama = (config_from_hf(raw) for raw in (QWEN3, QWEN2, LLAMA))
    assert (qwen3.qk_norm, qwen3.qkv_bias) == (True, False)
    assert (qwen2.qk_norm, qwen2.qkv_bias) == (False, True)
    assert (llama.qk_norm, llama.qkv_bias) == (False, False)
    assert not config_from_hf(without(LLAMA, "tie_word_embeddings")).tie_word_embeddings
    assert config_from_hf(without(LLAMA, "num_key_value_heads")).num_kv_heads == 8


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_round_trip(name: str) -> None:
    assert config_from_hf(json.loads(json.dumps(config_to_hf(PRESETS[name])))) == PRESETS[name]


def test_other_fields_survive_the_round_trip() -> None:
    config = config_from_hf(LLAMA)
    for changes in (
        {"rope_scaling": LinearRopeScaling(2.0)},
        {"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 32)},
        {"valid_vocab_size": 90},
    ):
        changed = ModelConfig(**{**vars(config), **changes})
        assert config_from_hf(config_to_hf(changed)) == changed


# RoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1_000_000}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_theta_is_found_in_every_layout(rope: dict) -> None:
    config = config_from_hf({**without(QWEN3, "rope_theta"), **rope})
    assert config.rope_theta == 1e6
    assert config.rope_scaling is None
    expected = 1e6 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-6)


def test_a_missing_theta_is_the_default_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert config_from_hf(without(QWEN3, "rope_theta")).rope_theta == 10_000.0
    assert "rope_theta is missing" in caplog.text


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**without(LLAMA3_ROPE, "rope_type"), "type": "llama3"}},
    ],
)
def test_llama3_scaling_in_every_layout(rope: dict) -> None:
    config = config_from_hf({**without(LLAMA, "rope_theta"), **rope})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be a positive"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor must be a positive"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "'factor' is not supported"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor must be below"),
        ({"rope_scaling": without(LLAMA3_ROPE, "high_freq_factor")}, "high_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta=1000000.0 disagree"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive finite number, got -1.0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive finite number"),
        ({"original_max_position_embeddings": 16, "rope_scaling": LLAMA3_ROPE}, "disagree"),
    ],
)
def test_bad_rope_is_refused_by_name(rope: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        config_from_hf({**without(LLAMA, "rope_theta"), **rope})
    assert message in str(caught.value)


# refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (LLAMA, {"attention_bias": True}),
        (QWEN3, {"attention_bias": True}),
        (LLAMA, {"mlp_bias": True}),
        (QWEN3, {"hidden_act": "gelu"}),
        (QWEN3, {"hidden_act": None}),
        (QWEN3, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        (LLAMA, {"partial_rotary_factor": 0.5}),
        (LLAMA, {"rope_interleaved": True}),
        (QWEN2, {"use_mrope": True}),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}),
        (LLAMA, {"sliding_window": 32}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}),
        (QWEN3, {"model_type": "qwen3_moe"}),
        (QWEN3, {"model_type": None}),
        (QWEN3, {"architectures": ["Qwen3ForSequenceClassification"]}),
        (QWEN3, {"num_experts": 8}),
        (LLAMA, {"final_logit_softcapping": 30.0}),
        (QWEN3, {"vocab_size": 0}),
        (QWEN3, {"hidden_size": "64"}),
        (QWEN3, {"hidden_size": 64.0}),
        (QWEN3, {"num_hidden_layers": True}),
        (QWEN3, {"rms_norm_eps": 0}),
        (QWEN3, {"tie_word_embeddings": "true"}),
        (QWEN3, {"head_dim": 15}),
        (QWEN3, {"num_key_value_heads": 3}),
    ],
    ids=lambda value: json.dumps(value)[:60] if "architectures" not in value or len(value) < 3 else "",
)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(base: dict, change: dict) -> None:
    key = next(iter(change))
    names = {"use_sliding_window": "sliding_window"}  # the window is named, not its switch
    with pytest.raises(ValueError, match=r"somewhere/config\.json") as caught:
        config_from_hf({**base, **change}, source="somewhere/config.json")
    assert names.get(key, key) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [key for key in QWEN3 if key.startswith(("num_", "hidden_size", "vocab", "inter", "model_type"))],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        config_from_hf(without(QWEN3, key))


@pytest.mark.parametrize(
    ("base", "change"),
    [
        # As Qwen2.5 is published: a window is written down but switched off, or starts after the last layer.
        (QWEN2, {"use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 1}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
        (LLAMA, {"sliding_window": None, "attention_bias": False, "rope_interleaved": False}),
        (QWEN3, {"quantization_config": None, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_harmless_values_are_accepted(base: dict, change: dict) -> None:
    assert config_from_hf({**base, **change}) == config_from_hf(base)


def test_unknown_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config_from_hf({**QWEN3, "flux_capacitor": 1.21})
    assert "flux_capacitor" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        config_from_hf(QWEN3)
    assert not caplog.text


def test_a_config_that_no_family_has_cannot_be_exported() -> None:
    config = config_from_hf(LLAMA)
    with pytest.raises(ValueError, match="qkv_bias=True cannot be exported as llama"):
        config_to_hf(ModelConfig(**{**vars(config), "qkv_bias": True}))
    with pytest.raises(ValueError, match="model_type 'gpt2'"):
        config_to_hf(ModelConfig(**{**vars(config), "model_type": "gpt2"}))
