"""Hugging Face folders: logits against transformers, the round trip, and every kind of damaged folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orchestra_jax.models.config import ModelConfig
from orchestra_jax.models.decoder import forward, param_specs
from orchestra_jax.models.hf import load_hf, save_hf

REFERENCES = Path(__file__).parent / "references"
NAMES = sorted(folder.name for folder in REFERENCES.iterdir())

TINY = ModelConfig(
    model_type="llama",
    vocab_size=12,
    hidden_size=8,
    intermediate_size=6,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    tie_word_embeddings=True,
)
UNTIED = ModelConfig(**{**vars(TINY), "tie_word_embeddings": False})


def random_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    specs = param_specs(config).items()
    return {name: jnp.asarray(rng.normal(size=spec.shape).astype(jnp.dtype(dtype))) for name, spec in specs}


def save_raw(file: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, file)


def edit(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces (or, with None, removes) tensors of a single-file folder."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_raw(file, {name: value for name, value in tensors.items() if value is not None})


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A single-file export of TINY."""
    save_hf(tmp_path / "model", TINY, random_params(TINY))
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sharded export of TINY."""
    save_hf(tmp_path / "sharded", TINY, random_params(TINY), max_shard_bytes=1500)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    return tmp_path / "sharded"


def assert_same(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(
            np.asarray(a[name]).view(np.uint8), np.asarray(b[name]).view(np.uint8), err_msg=name
        )


# logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["config.json", "config_v4.json"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name: str, layout: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(REFERENCES / name, folder)
    shutil.copyfile(REFERENCES / name / layout, folder / "config.json")
    reference = np.load(folder / "reference.npz")
    config, params = load_hf(folder)
    logits = forward(config, params, jnp.asarray(reference["input_ids"], jnp.int32))
    assert np.abs(reference["logits"]).max() > 3  # the comparison means something
    np.testing.assert_allclose(logits, reference["logits"], atol=1e-4, rtol=0)


def test_shapes_with_an_explicit_head_dim(tmp_path: Path) -> None:
    config = ModelConfig(
        model_type="qwen3",
        vocab_size=10,
        hidden_size=64,
        intermediate_size=48,
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        qk_norm=True,
        tie_word_embeddings=True,
    )
    save_hf(tmp_path, config, random_params(config))
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {
        name: list(tensors[f"model.layers.0.self_attn.{name}.weight"].shape)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    assert shapes == {
        "q_proj": [128, 64],
        "k_proj": [32, 64],
        "v_proj": [32, 64],
        "o_proj": [64, 128],
        "q_norm": [16],
        "k_norm": [16],
    }
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 16


# round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 20_000])
@pytest.mark.parametrize("name", NAMES)
def test_export_gives_back_the_file_bit_by_bit(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    config, params = load_hf(REFERENCES / name, dtype=None)
    save_hf(tmp_path, config, params, max_shard_bytes=max_shard_bytes)
    original, exported = (
        {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        for folder in (REFERENCES / name, tmp_path)
    )
    assert original.keys() == exported.keys()  # so a tied model got no lm_head
    for key, value in original.items():
        assert value.dtype == exported[key].dtype
        np.testing.assert_array_equal(value.view(np.uint8), exported[key].view(np.uint8), err_msg=key)
    again_config, again = load_hf(tmp_path, dtype=None)
    assert again_config == config
    assert_same(params, again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_round_trips_and_converts(dtype: str, tmp_path: Path) -> None:
    params = random_params(UNTIED, dtype=jnp.dtype(dtype))
    save_hf(tmp_path, UNTIED, params)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    config, loaded = load_hf(tmp_path, dtype=None)
    assert config == UNTIED
    assert_same(params, loaded)
    assert_same({k: p.astype(jnp.float32) for k, p in params.items()}, load_hf(tmp_path)[1])
    rounded = {k: jnp.asarray(np.asarray(p).astype(ml_dtypes.bfloat16)) for k, p in params.items()}
    assert_same(rounded, load_hf(tmp_path, dtype="bfloat16")[1])


def test_a_file_of_mixed_dtypes_is_widened(tmp_path: Path) -> None:
    params = random_params(TINY, dtype=jnp.bfloat16)
    params["norm"] = params["norm"].astype(jnp.float16)
    save_hf(tmp_path, TINY, params)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"
    assert_same({k: p.astype(jnp.float32) for k, p in params.items()}, load_hf(tmp_path, dtype=None)[1])


def test_numpy_parameters_can_be_saved(tmp_path: Path) -> None:
    params = random_params(TINY)
    save_hf(tmp_path, TINY, {name: np.asarray(p) for name, p in params.items()})
    assert_same(params, load_hf(tmp_path)[1])


def test_layers_are_ordered_as_numbers(tmp_path: Path) -> None:
    """As strings, layer 10 would come before layer 2."""
    config = ModelConfig(**{**vars(TINY), "num_layers": 12})
    params = random_params(config)
    params["layers.input_layernorm"] = jnp.arange(12.0)[:, None] * jnp.ones((12, 8))
    save_hf(tmp_path, config, params, max_shard_bytes=2000)
    _, loaded = load_hf(tmp_path)
    np.testing.assert_array_equal(loaded["layers.input_layernorm"][:, 0], np.arange(12.0))


def test_parts_of_a_parameter_are_read_alone(tmp_path: Path) -> None:
    """What a host reads of a sharded model: each part equals that part of the whole."""
    from orchestra_jax.models.hf import _read_parameter, open_tensors

    params = random_params(UNTIED)
    save_hf(tmp_path, UNTIED, params)
    tensors = open_tensors(tmp_path)
    for name, spec in param_specs(UNTIED).items():
        for part in (
            tuple(slice(0, n // 2 or 1) for n in spec.shape),
            tuple(slice(n // 2, n) for n in spec.shape),
            (slice(None), *(slice(1, 2) for _ in spec.shape[1:])),
        ):
            bounds = tuple(p.indices(n)[:2] for p, n in zip(part, spec.shape))
            read = _read_parameter(tensors, name, np.dtype("float32"), bounds)
            np.testing.assert_array_equal(read, np.asarray(params[name])[part], err_msg=name)


def test_parameters_land_on_their_shardings(folder: Path) -> None:
    mesh = jax.make_mesh((1,), ("fsdp",))
    spec = jax.sharding.PartitionSpec("fsdp")
    shardings = dict.fromkeys(param_specs(TINY), jax.sharding.NamedSharding(mesh, spec))
    _, params = load_hf(folder, shardings=shardings)
    assert_same(params, random_params(TINY))
    assert all(p.sharding == shardings[name] for name, p in params.items())


ON_A_MESH = """
import sys
import jax, numpy as np
from orchestra_jax.models.decoder import param_specs
from orchestra_jax.models.hf import load_hf, save_hf
from orchestra_jax.parallel.mesh import make_mesh, shardings
from orchestra_jax.parallel.rules import param_partition
from orchestra_jax.rollout.policy import draw_params

source, target = sys.argv[1:]
config, whole = load_hf(source)
mesh = make_mesh({"data": 1, "fsdp": 4, "tensor": 2, "sequence": 1})
placed = shardings(mesh, {name: param_partition(spec.axes) for name, spec in param_specs(config).items()})
_, params = load_hf(source, shardings=placed)
for name, value in params.items():
    assert value.sharding == placed[name], name
    np.testing.assert_array_equal(np.asarray(value), np.asarray(whole[name]), err_msg=name)
shard = params["layers.gate_proj"].addressable_shards[0].data
assert shard.size * 8 == params["layers.gate_proj"].size
_, again = load_hf(source, shardings=placed)  # np.asarray above has put a copy of each beside the first ones
save_hf(target, config, again, max_shard_bytes=20_000)
fresh, sharded = (draw_params(config, 3, np.dtype("float32"), where) for where in (None, placed))
for name, value in sharded.items():
    assert value.sharding == placed[name], name
    np.testing.assert_allclose(np.asarray(value), np.asarray(fresh[name]), rtol=1e-6, atol=0, err_msg=name)
print("same")
"""


def test_eight_devices_load_save_and_draw_as_one_does(tmp_path: Path) -> None:
    source = REFERENCES / "qwen3-untied"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", ON_A_MESH, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "same", done.stderr
    assert_same(load_hf(tmp_path / "out", dtype=None)[1], load_hf(source, dtype=None)[1])


# tied heads ------------------------------------------------------------------------------------------------------


def test_a_tied_model_has_no_head_of_its_own(folder: Path) -> None:
    config, params = load_hf(folder)
    assert config.tie_word_embeddings
    assert "lm_head" not in params
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_a_tied_file_may_repeat_the_embedding(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, **{"lm_head.weight": embedding})
    assert_same(load_hf(folder)[1], random_params(TINY))


@pytest.mark.parametrize("change", ["last value", "shape"])
def test_a_tied_file_with_another_head_is_refused(folder: Path, change: str) -> None:
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].copy()
    if change == "shape":
        head = head[:-1]
    else:
        head[-1, -1] += 1
    edit(folder, **{"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"model\.safetensors: .*tie_word_embeddings=true, but lm_head"):
        load_hf(folder)


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    params = random_params(UNTIED)
    save_hf(tmp_path, UNTIED, params)
    config, loaded = load_hf(tmp_path)
    assert not config.tie_word_embeddings
    assert_same(loaded, params)
    edit(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings=true"):
        load_hf(tmp_path)


# padded vocabulary -----------------------------------------------------------------------------------------------


def test_more_rows_than_the_vocabulary_are_an_explicit_choice(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", vocab_size=10)
    with pytest.raises(ValueError, match=r"has 12 rows, but config\.json has vocab_size 10.*extra_vocab_rows"):
        load_hf(folder)

    kept, params = load_hf(folder, extra_vocab_rows="keep")
    assert (kept.vocab_size, kept.valid_vocab_size) == (12, 10)
    logits = forward(kept, params, jnp.zeros((1, 1), jnp.int32))[0, 0]
    assert np.isneginf(logits[10:]).all()
    assert np.isfinite(logits[:10]).all()
    save_hf(tmp_path / "again", kept, params)
    assert load_file(tmp_path / "again" / "model.safetensors")["model.embed_tokens.weight"].shape == (12, 8)
    assert load_hf(tmp_path / "again")[0] == kept

    cut, params = load_hf(folder, extra_vocab_rows="cut")
    assert (cut.vocab_size, cut.valid_vocab_size) == (10, None)
    np.testing.assert_array_equal(params["embed_tokens"], random_params(TINY)["embed_tokens"][:10])


def test_an_untied_head_is_cut_too(tmp_path: Path) -> None:
    save_hf(tmp_path, UNTIED, random_params(UNTIED))
    edit_json(tmp_path / "config.json", vocab_size=10)
    _, params = load_hf(tmp_path, extra_vocab_rows="cut")
    assert params["lm_head"].shape == (8, 10)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    edit(tmp_path, **{"lm_head.weight": head[:9]})
    for choice in ("keep", "cut"):
        with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[9, 8\]"):
            load_hf(tmp_path, extra_vocab_rows=choice)


def test_fewer_rows_than_the_vocabulary_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=14)
    for choice in ("error", "keep", "cut"):
        with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape \[12, 8\].*asks for \[14, 8\]"):
            load_hf(folder, extra_vocab_rows=choice)


# damaged folders -------------------------------------------------------------------------------------------------

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, **{Q_PROJ: None})
    with pytest.raises(ValueError, match=f"{folder}.* lack {Q_PROJ}"):
        load_hf(folder)


def test_absurd_sizes_in_the_config_cost_nothing(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=10**12)
    with pytest.raises(ValueError, match="num_hidden_layers 1000000000000, but the weight files hold only"):
        load_hf(folder)
    edit_json(folder / "config.json", num_hidden_layers=3, hidden_size=10**12)
    with pytest.raises(ValueError, match=r"has shape .* asks for \[12, 1000000000000\]"):
        load_hf(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.input_layernorm.weight",
        "score.weight",
    ],
)
def test_an_extra_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, **{name: np.zeros(8, np.float32)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: holds {name}"):
        load_hf(folder)


def test_stored_rope_frequencies_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, **{name: np.zeros(2, np.float64)})
    assert_same(load_hf(folder, dtype=None)[1], random_params(TINY))


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, **{Q_PROJ: np.zeros((8, 7), np.float32)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: {Q_PROJ} has shape \[8, 7\].*\[8, 8\]"):
        load_hf(folder)


def test_a_quantised_tensor_is_named(folder: Path) -> None:
    edit(folder, **{Q_PROJ: np.zeros((8, 8), np.int8)})
    with pytest.raises(ValueError, match=f"{Q_PROJ} is stored as I8"):
        load_hf(folder)


def test_a_shard_that_is_not_there_is_named_with_its_tensors(sharded: Path) -> None:
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    shard = sorted(set(weight_map.values()))[1]
    (sharded / shard).unlink()
    with pytest.raises(ValueError, match=shard) as caught:
        load_hf(sharded)
    assert next(name for name, file in sorted(weight_map.items()) if file == shard) in str(caught.value)


def test_files_that_the_index_does_not_name_are_ignored(sharded: Path) -> None:
    save_raw(sharded / "extra.safetensors", {Q_PROJ: np.full((8, 8), 7.0, np.float32)})
    assert_same(load_hf(sharded)[1], random_params(TINY))


def test_an_index_that_points_to_the_wrong_shard_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    wrong = next(file for file in sorted(set(weight_map.values())) if file != weight_map[Q_PROJ])
    edit_json(index, weight_map={**weight_map, Q_PROJ: wrong})
    with pytest.raises(ValueError, match=f"{wrong}: does not hold {Q_PROJ}|holds {Q_PROJ}, which"):
        load_hf(sharded)


def test_an_index_may_not_leave_the_folder(sharded: Path) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map={Q_PROJ: "../other/model.safetensors"})
    with pytest.raises(ValueError, match="must be the name of a file beside the index"):
        load_hf(sharded)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_malformed_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_hf(sharded)


def with_header(header: Any, data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (2**63).to_bytes(8, "little") + b"{}",
        (1000).to_bytes(8, "little") + b"{}",
        with_header({"a": F32}, bytes(8)),
        with_header({"a": F32}, bytes(32)),
        with_header({"a": F32, "b": F32}, bytes(16)),
        with_header({"a": {**F32, "shape": [2**40, 2**40]}}, bytes(16)),
        with_header({"a": {**F32, "data_offsets": [0, 2**62]}}, bytes(16)),
        with_header({"a": {**F32, "data_offsets": [16, 0]}}, bytes(16)),
        with_header({"a": {**F32, "data_offsets": [-8, 8]}}, bytes(16)),
        with_header({"a": {**F32, "dtype": "Q4"}}, bytes(16)),
        with_header(["a"], bytes(16)),
    ],
    ids=[
        *("empty", "noise", "huge header", "header beyond the end", "too short", "too long", "overlap"),
        *("overflowing shape", "huge offset", "reversed", "negative", "unknown dtype", "not an object"),
    ],
)
def test_a_damaged_or_malicious_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        load_hf(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for length in (4, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
            load_hf(folder)


def test_folders_without_a_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        load_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load_hf(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*found pytorch_model\.bin"):
        load_hf(folder)
    (folder / "config.json").write_text("{'vocab_size': 12}")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_hf(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        load_hf(folder)


def test_a_single_file_beside_an_index_is_ambiguous(sharded: Path, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", sharded)
    with pytest.raises(ValueError, match="remove the stale one"):
        load_hf(sharded)


def test_bad_arguments(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        load_hf(folder, dtype="int8")
    with pytest.raises(ValueError, match="extra_vocab_rows must be"):
        load_hf(folder, extra_vocab_rows="maybe")  # type: ignore[arg-type]


# writing ---------------------------------------------------------------------------------------------------------


def test_shards_keep_to_their_size_and_the_index_is_complete(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    sizes = {
        file.name: {name: value.nbytes for name, value in load_file(file).items()}
        for file in sharded.glob("*.safetensors")
    }
    assert all(sum(tensors.values()) <= 1500 for tensors in sizes.values())
    assert index["weight_map"] == {name: file for file, tensors in sizes.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(sum(tensors.values()) for tensors in sizes.values())


def test_a_new_export_replaces_the_old_one_and_nothing_else(sharded: Path) -> None:
    (sharded / "README.md").write_text("mine")
    (sharded / "extra.safetensors").write_bytes(b"mine too")
    new = random_params(UNTIED, seed=1)
    for max_shard_bytes in (5_000_000_000, 1000, 3000, 5_000_000_000):
        save_hf(sharded, UNTIED, new, max_shard_bytes=max_shard_bytes, files={"tokenizer.json": b"{}"})
        assert_same(load_hf(sharded)[1], new)
    assert sorted(path.name for path in sharded.iterdir()) == [
        "README.md",
        "config.json",
        "extra.safetensors",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 1500])
def test_a_crash_while_exporting_never_leaves_a_mixture(
    folder: Path, max_shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops the export at each of its renames in turn; the folder then has the old model, the new one, or refuses."""
    old, new = random_params(TINY), random_params(TINY, seed=1)
    replace, outcomes = os.replace, []
    for stop_at in range(50):
        save_hf(folder, TINY, old, max_shard_bytes=max_shard_bytes)
        renames = iter(range(stop_at))

        def dying(source: Path, target: Path, renames=renames) -> None:
            if next(renames, None) is None:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", dying)
        try:
            save_hf(folder, TINY, new, max_shard_bytes=max_shard_bytes)
            outcomes.append("finished")
        except KeyboardInterrupt:
            with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
                load_hf(folder)
            outcomes.append("refused")
        monkeypatch.undo()
        assert not list(folder.glob(".export-*"))
        if outcomes[-1] == "finished":
            break
    assert_same(load_hf(folder)[1], new)
    assert outcomes.count("refused") >= 2
    assert outcomes[-1] == "finished"


def test_a_failed_write_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("orchestra_jax.models.hf.write_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_hf(folder, TINY, random_params(TINY, seed=1))
    assert_same(load_hf(folder)[1], random_params(TINY))


def test_wrong_parameters_are_not_written(tmp_path: Path) -> None:
    params = random_params(TINY)
    for bad, message in (
        ({**params, "lm_head": params["embed_tokens"].T}, "lm_head"),
        ({name: p for name, p in params.items() if name != "norm"}, "norm"),
        ({**params, "norm": jnp.ones(7)}, r"norm.*\(7,\)"),
        ({**params, "norm": jnp.ones(8, jnp.int32)}, "parameter norm is int32"),
    ):
        with pytest.raises(ValueError, match=message):
            save_hf(tmp_path / "out", TINY, bad)
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save_hf(tmp_path / "out", TINY, params, max_shard_bytes=0)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_hf(tmp_path / "file", TINY, params)
