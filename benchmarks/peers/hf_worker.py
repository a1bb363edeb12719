"""Hugging Face `generate` on torch, as a process that is told by JSON lines what to run.

Run by the Python of an environment with torch and transformers; started by the benchmarks. A request is
`{"prompts": [[ids]], "new_tokens": [n], "dtype": "float32"}`; the answer `{"seconds": s, "tokens": n}`. Prompts are
padded on the left to one length and all rows generate the most that any row wants, as static batches do.
"""

import json
import sys
import time

import torch
import transformers

SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Answers requests until the input ends."""
    torch.manual_seed(0)
    models = {}
    for line in sys.stdin:
        request = json.loads(line)
        dtype = request["dtype"]
        if dtype not in models:
            config = transformers.LlamaConfig(**SMOLLM2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
            models[dtype] = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        prompts, wanted = request["prompts"], max(request["new_tokens"])
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        with torch.inference_mode():
            out = models[dtype].generate(
                ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=wanted, max_new_tokens=wanted
            )
        seconds = time.perf_counter() - start
        if out.shape[1] - width != wanted:
            raise SystemExit(f"generate gave {out.shape[1] - width} tokens, not {wanted}")
        print(json.dumps({"seconds": seconds, "tokens": sum(request["new_tokens"])}), flush=True)


main()
