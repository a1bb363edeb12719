"""`convert` between Hugging Face folders and checkpoints."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from orchestra_jax.config import load_config
from orchestra_jax.models.convert import convert
from orchestra_jax.models.hf import load_hf
from orchestra_jax.models.safetensors_io import write_file
from orchestra_jax.rollout.policy import load_policy
from orchestra_jax.train.checkpoint import CheckpointStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_config

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


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        np.testing.assert_array_equal(value.view(np.uint8), second[name].view(np.uint8), err_msg=name)


def test_to_a_checkpoint_and_back_is_bit_equal(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "store", to="checkpoint")
    assert "bfloat16" in convert(tmp_path / "store", tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [2, 3]
    convert(tmp_path / "store" / "0", tmp_path / "wide", dtype="float32")
    np.testing.assert_array_equal(
        np.asarray(load_hf(tmp_path / "wide", dtype=None)[1]["norm"]), np.asarray(load_hf(source)[1]["norm"])
    )


def test_a_checkpoint_of_a_run_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, "config")
    config = load_config(run / "config.yaml")
    policy = load_policy(config.model, config.text, seed=5)
    with CheckpointStore(run / "checkpoints" / "rl") as store:
        for step in (1, 2):
            params = {name: value * step for name, value in policy.params.items()}
            store.save(step, {"params": params, "opt_state": {"mu": params}}, {}, wait=True)
    assert "with tokenizer" in convert(run, tmp_path / "newest")
    exported, params = load_hf(tmp_path / "newest")
    assert exported == policy.config
    convert(run / "checkpoints" / "rl" / "1", tmp_path / "first")
    _, first = load_hf(tmp_path / "first")
    for name, value in policy.params.items():
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(value))
        np.testing.assert_array_equal(np.asarray(params[name]), 2 * np.asarray(value))
    (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"config\.yaml of a run says what model this is"):
        convert(run / "checkpoints" / "rl", tmp_path / "none")


def test_a_conversion_cut_off_goes_on_and_is_never_taken_for_a_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, destination, partial = (tmp_path / name for name in ("whole", "out", "out.partial"))
    convert(source, whole, max_shard_bytes=8_000)
    written: list[str] = []

    def dying(file: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(file.name)
        write_file(file, *rest)

    monkeypatch.setattr("orchestra_jax.models.hf.write_file", dying)
    with pytest.raises(KeyboardInterrupt):
        convert(source, destination, max_shard_bytes=8_000)
    assert not destination.exists()
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load_hf(partial)
    stamps = {name: (partial / name).stat().st_mtime_ns for name in written}
    monkeypatch.undo()

    convert(source, destination, max_shard_bytes=8_000)
    assert {name: (destination / name).stat().st_mtime_ns for name in written} == stamps
    assert not partial.exists()
    assert sorted(path.name for path in destination.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert_same_weights(destination, whole)


def test_a_changed_source_starts_a_conversion_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestra_jax.models.convert.write_folder", dying)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", max_shard_bytes=20_000)
    monkeypatch.undo()
    stale = tmp_path / "out.partial" / "model-00001-of-00001.safetensors"
    stale.write_bytes(b"stale")
    convert(source, tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out" / stale.name).exists()
    assert load_hf(tmp_path / "out", dtype=None)[1]["norm"].dtype == np.float32


def test_two_conversions_at_once_are_told(source: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.partial.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="out: another conversion is writing it"):
            convert(source, tmp_path / "out")
    convert(source, tmp_path / "out")
    assert not (tmp_path / "out.partial.lock").exists()
