"""Makes tests/models/references: tiny random models of each family, with the logits that transformers computes.

    pip install 'orchestra-jax[reference]'
    python tests/models/make_references.py make          # writes the folders again
    python tests/models/make_references.py check FOLDER NAME   # transformers on our export of reference NAME

Each folder holds config.json as transformers 5 writes it (`rope_parameters`), config_v4.json with the same content in
the older layout (`rope_theta` + `rope_scaling`), the weights, and reference.npz with input_ids [2, 24] int64 and
logits [2, 24, vocab] float32. Norms and biases are random too: at their usual 1 and 0 a mix-up would not show.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

REFERENCES = Path(__file__).parent / "references"

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
# Wavelengths of a 16-dimensional head run from 6 to 20,000 tokens, so an original length of 32 puts some of them into
# each of the three ranges of Llama 3's scaling.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def theta(value: float) -> dict:
    return {"rope_type": "default", "rope_theta": value}


CONFIGS = {
    "qwen3-untied": Qwen3Config(**SHAPE, **HEADS, head_dim=16, rope_parameters=theta(1e6), tie_word_embeddings=False),
    "qwen3-tied-bf16": Qwen3Config(**SHAPE, **HEADS, head_dim=8, rope_parameters=theta(1e6), tie_word_embeddings=True),
    "qwen2.5": Qwen2Config(**SHAPE, **HEADS, rope_parameters=theta(1e6), tie_word_embeddings=True),
    "llama-llama3-rope": LlamaConfig(
        **SHAPE, **HEADS, head_dim=16, rope_parameters=LLAMA3, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "llama-untied-sharded": LlamaConfig(**SHAPE, **HEADS, rope_parameters=theta(1e4), rms_norm_eps=1e-5),
    "smollm2": LlamaConfig(
        **{**SHAPE, "hidden_size": 36, "num_hidden_layers": 3},
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=64,
        rope_parameters=theta(1e5),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
}


def random_model(config, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.25)
    return model


def logits(model: PreTrainedModel, input_ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(input_ids)).logits.numpy()


def to_v4(raw: dict) -> dict:
    """The same config.json in the layout of transformers 4."""
    old = dict(raw)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    old["torch_dtype"] = old.pop("dtype")
    return old


def make(name: str, seed: int) -> None:
    folder = REFERENCES / name
    shutil.rmtree(folder, ignore_errors=True)
    model = random_model(CONFIGS[name], seed)
    if name.endswith("bf16"):
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB" if name.endswith("sharded") else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config_v4.json").write_text(json.dumps(to_v4(raw), indent=2) + "\n")

    # Read back in float32: casting a bfloat16 model in memory would leave its RoPE frequencies rounded.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    input_ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (2, 24))
    np.savez(folder / "reference.npz", input_ids=input_ids, logits=logits(model, input_ids))


def check(folder: str, name: str) -> None:
    """Prints how far transformers' logits on our export are from those of the model that we imported."""
    reference = np.load(REFERENCES / name / "reference.npz")
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    difference = np.abs(logits(model, reference["input_ids"]) - reference["logits"]).max()
    print(f"{name}: largest difference {difference:.2e}, loading problems: {problems or 'none'}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make"]:
            for seed, name in enumerate(CONFIGS):
                make(name, seed)
        case ["check", folder, name]:
            check(folder, name)
        case _:
            sys.exit(__doc__)
