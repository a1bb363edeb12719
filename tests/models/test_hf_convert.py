"""`convert` between Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from orchestra_jax.models.convert import convert
from orchestra_jax.models.hf import load_hf

REFERENCES = Path(__file__).parent / "references"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A bfloat16 checkpoint with a tokenizer and token ids."""
    folder = tmp_path / "source"
    shutil.copytree(REFERENCES / "qwen3-tied-bf16", folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "eos_token_id": [2, 3], "pad_token_id": 0}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("not of the model")
    return folder


def test_a_folder_is_resharded_with_its_tokenizer(source: Path, tmp_path: Path) -> None:
    summary = convert(source, tmp_path / "out", max_shard_bytes=20_000)
    assert "qwen3" in summary
    assert "bfloat16" in summary
    assert "with tokenizer" in summary
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "out" / "notes.txt").exists()
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["pad_token_id"]) == ([2, 3], 0)

    config, params = load_hf(source, dtype=None)
    again_config, again = load_hf(tmp_path / "out", dtype=None)
    assert again_config == config
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(again[name]).view(np.uint8), np.asarray(value).view(np.uint8))


def test_a_missing_tokenizer_is_said(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").unlink()
    assert "WITHOUT a tokenizer.json" in convert(source, tmp_path / "out")


def test_bad_sources_and_destinations_are_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match=r"notes\.txt: is neither a \.gguf file"):
        convert(source / "notes.txt", tmp_path / "out")
    with pytest.raises(ValueError, match="source: exists already"):
        convert(source, source)
    (source / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model_type None is not supported"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
