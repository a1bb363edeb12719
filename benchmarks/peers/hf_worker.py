"""Hugging Face `generate` on torch, run by the Python of an environment with torch and transformers.

A request is `{"prompts": [[ids]], "new_tokens": [n], "dtype": "float32", "shape": {...}}`. Prompts are padded on the
left to one length and all rows generate the most that any row wants, as static batches do.
"""

import time
from typing import Any

import torch
import transformers
from serve import serve

models: dict[str, Any] = {}


def model_of(shape: dict[str, Any], dtype: str) -> Any:
    """A Llama of these sizes with random weights."""
    key = f"{shape} {dtype}"
    if key not in models:
        config = transformers.LlamaConfig(
            vocab_size=shape["vocab_size"],
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            num_hidden_layers=shape["num_layers"],
            num_attention_heads=shape["num_heads"],
            num_key_value_heads=shape["num_kv_heads"],
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=100_000.0,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        models[key] = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    return models[key]


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Generates one static batch."""
    model = model_of(request["shape"], request["dtype"])
    prompts, wanted = request["prompts"], max(request["new_tokens"])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=wanted, max_new_tokens=wanted
        )
    seconds = time.perf_counter() - start
    if out.shape[1] - width != wanted:
        raise RuntimeError(f"generate gave {out.shape[1] - width} tokens, not {wanted}")
    return {"seconds": seconds, "tokens": sum(request["new_tokens"])}


if __name__ == "__main__":
    torch.manual_seed(0)
    serve(["torch", "transformers"], handle)
