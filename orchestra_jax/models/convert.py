"""`orchestra convert`: a GGUF file or a Hugging Face folder becomes a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from orchestra_jax.models.gguf import load_gguf
from orchestra_jax.models.hf import CONFIG_FILE, load_hf, save_hf

# Everything of a folder that is neither weights nor config.json and that a tokenizer, a template or `generate` reads.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> str:
    """Writes `source` as a Hugging Face folder with single or sharded safetensors, config and tokenizer files.

    Args:
      source: a .gguf file (Llama architecture, dequantised) or a Hugging Face folder.
      destination: a folder that does not exist yet or is empty.
      dtype: of the weights: float32, bfloat16 or float16. None: as in the folder, float32 from GGUF.
      max_shard_bytes: see `save_hf`.

    Returns:
      One line that says what was written.

    Raises:
      ValueError: the source cannot be read or the destination is taken; the message names it.
      ImportError: a GGUF file, and the extra `gguf` is not installed.
    """
    source, destination = Path(source), Path(destination)
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    if source.is_file() and source.suffix != ".gguf":
        raise ValueError(f"{source}: is neither a .gguf file nor a Hugging Face folder")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{destination}: exists already; remove it or choose another destination")

    if source.is_file():
        config, params, files = load_gguf(source, dtype=dtype or "float32")
        token_ids = json.loads(files["generation_config.json"])
    else:
        config, params = load_hf(source, dtype=dtype)
        files = companion_files(source)
        raw = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
        token_ids = {key: raw[key] for key in _TOKEN_IDS if key in raw}
    save_hf(destination, config, params, max_shard_bytes=max_shard_bytes, files=files, token_ids=token_ids)
    tokenizer = "with tokenizer" if "tokenizer.json" in files else "WITHOUT a tokenizer.json (none in the source)"
    weights = f"{config.num_parameters / 1e6:.1f}M parameters in {params['embed_tokens'].dtype.name}"
    return f"{destination}: {config.model_type}, {weights}, {tokenizer}"


def companion_files(folder: str | Path) -> dict[str, bytes]:
    """The tokenizer, template and generation files of a Hugging Face folder, by name, for `save_hf(files=...)`."""
    return {name: (Path(folder) / name).read_bytes() for name in COMPANION_FILES if (Path(folder) / name).is_file()}
