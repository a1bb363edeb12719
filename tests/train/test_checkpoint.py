"""Checkpoints: exact, atomic, honest about what is missing (BR-42 to BR-45)."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orchestra_jax.train import checkpoint
from orchestra_jax.train.checkpoint import (
    MARK_FILE,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
    CorruptCheckpointError,
)

KILLER = Path(__file__).with_name("checkpoint_killer.py")


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints") as opened:
        yield opened


def example_tree():
    rng = np.random.default_rng(0)
    return {
        "params": {"embed.tokens/x": jnp.asarray(rng.normal(size=(7, 5)), jnp.bfloat16), "norm": jnp.ones(5)},
        "optimizer": optax.adam(1e-3).init({"w": jnp.ones((2, 3))}),
        "rng": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "cursor": np.int64(2**40),
        "mask": np.array([True, False]),
        "empty": (np.zeros((0, 3), np.float16), jnp.zeros((2, 0))),
        "awkward": jnp.array([np.nan, np.inf, -0.0, 1e-40], jnp.float32),
    }


def abstract(tree):
    def describe(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return np.zeros_like(leaf)

    return jax.tree.map(describe, tree)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_identical(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(saved)):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array), name
        assert bits(a) == bits(b), name


def flip_a_byte(folder):
    """Change one byte of the largest file: the array data."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


# --- exactness ----------------------------------------------------------------------------------------------------


def test_round_trip_is_exact(store):
    tree = example_tree()
    host_state = {"step": 3, "text": "é \ud800 </s>", "big": 2**127, "x": 0.1, "pending": [{"ids": [1, 2]}, None, True]}
    store.save(3, tree, host_state)
    arrays, state = store.restore(3, abstract(tree))
    assert_identical(arrays, tree)
    assert state == host_state


def test_typed_keys_continue_the_same_stream(store):
    """BR-44."""
    tree = {"rng": jax.random.key(7), "w": jnp.ones(2)}
    store.save(1, tree, {})
    arrays, _ = store.restore(1, jax.eval_shape(lambda: tree))
    assert arrays["rng"].dtype == tree["rng"].dtype
    np.testing.assert_array_equal(jax.random.normal(arrays["rng"], (4,)), jax.random.normal(tree["rng"], (4,)))


def test_integer_keys_stay_integers(store):
    """BR-45, without a target tree."""
    layers = {10: jnp.full(2, 10.0), 0: jnp.zeros(2), 2: jnp.full(2, 2.0)}
    store.save(1, {"layers": layers, "0": jnp.ones(1), "rng": jax.random.key(3)}, {})
    arrays, _ = store.restore(1)
    assert list(arrays["layers"]) == [0, 2, 10]
    for key, value in layers.items():
        np.testing.assert_array_equal(arrays["layers"][key], value)
    assert bits(arrays["rng"]) == bits(jax.random.key(3))
    store.save(2, jnp.arange(3), {})
    np.testing.assert_array_equal(store.restore(2)[0], [0, 1, 2])


def test_restores_to_the_asked_sharding(store):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tree = {"w": jnp.arange(4.0), "rng": jax.random.split(jax.random.key(0), 4)}
    store.save(1, tree, {})
    target = {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding),
        "rng": jax.ShapeDtypeStruct((4,), tree["rng"].dtype, sharding=sharding),
    }
    arrays, _ = store.restore(1, target)
    assert arrays["w"].sharding == sharding
    assert isinstance(arrays["rng"].sharding, NamedSharding)
    no_sharding = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
    arrays, _ = store.restore(1, no_sharding, allow_extra=True)
    assert arrays["w"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_arrays_may_be_overwritten_as_soon_as_save_returns(store):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    on_device, on_host = jnp.full((500, 1000), 3.0) + 0, np.ones((500, 1000))
    store.save(1, {"device": on_device, "host": on_host}, {})
    for _ in range(3):
        on_device = overwrite(on_device)
    on_host[:] = 7
    arrays, _ = store.restore(1)
    assert (arrays["device"] == 3).all()
    assert (arrays["host"] == 1).all()


@pytest.mark.filterwarnings("error:Some donated buffers were not usable")
def test_restored_arrays_can_be_donated(store):
    """Many arrays, since Orbax's own are reusable by chance: about every other one."""
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    store.save(1, [jnp.full((100, 333), float(i)) for i in range(20)], {})
    arrays, _ = store.restore(1, [jax.ShapeDtypeStruct((100, 333), jnp.float32)] * 20)
    for i, array in enumerate(arrays):
        memory = array.unsafe_buffer_pointer()
        doubled = double(array)
        assert array.is_deleted()
        assert doubled.unsafe_buffer_pointer() == memory, "the buffer was copied instead of reused"
        assert (np.asarray(doubled) == 2 * i).all()
    assert all((array == i).all() for i, array in enumerate(store.restore(1)[0].values()))


def test_no_arrays_at_all(store):
    store.save(0, {}, {"only": "text"})
    assert store.restore(0, {}) == ({}, {"only": "text"})


# --- resuming -----------------------------------------------------------------------------------------------------


def train(store, num_updates, save_at=()):
    """A tiny training loop that resumes from the store; returns its log, one line an update, and the final state."""
    optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 4))
    params = {"w": jnp.ones(3)}
    state = {"params": params, "optimizer": optimizer.init(params), "rng": jax.random.key(0)}
    done = 0
    if (found := store.restore_latest(abstract(state))) is not None:
        done, state, host_state = found
        assert host_state == {"policy_version": done}
    log = []
    for step in range(done + 1, num_updates + 1):
        rng, data_rng = jax.random.split(state["rng"])
        data = jax.random.normal(data_rng, (3,))
        loss, gradient = jax.value_and_grad(lambda p, x=data: jnp.square(p["w"] - x).sum())(state["params"])
        updates, optimizer_state = optimizer.update(gradient, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "optimizer": optimizer_state, "rng": rng}
        log.append((step, data.tolist(), float(loss)))
        if step in save_at:
            store.save(step, state, {"policy_version": step})
    return log, state


def test_step_means_after_the_update(tmp_path):
    """BR-43: 4 updates in one go equal 2, a checkpoint, and 2 more."""
    with CheckpointStore(tmp_path / "unbroken") as store:
        whole_log, whole_state = train(store, 4)
    with CheckpointStore(tmp_path / "broken") as store:
        first_log, _ = train(store, 2, save_at=[2])
    with CheckpointStore(tmp_path / "broken") as store:
        second_log, state = train(store, 4)
    assert [line[0] for line in second_log] == [3, 4]
    assert first_log + second_log == whole_log
    assert_identical(state, whole_state)
    assert int(optax.tree.get(state["optimizer"][0], "count")) == 4


# --- completeness ---------------------------------------------------------------------------------------------------


def test_incomplete_checkpoint_is_reported_and_ignored(store, caplog):
    """BR-42."""
    for step in (9, 10):
        store.save(step, {"w": jnp.full(2, float(step))}, {"step": step})
    store.wait()
    (store.directory / "11").mkdir()
    shutil.copytree(store.directory / "10", store.directory / "12")  # as whole as can be, but of another step
    (store.directory / "notes").mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.latest_step() == 10
    assert {record.args[0].name for record in caplog.records} == {"11", "12"}
    shutil.rmtree(store.directory / "12")
    caplog.clear()
    step, arrays, host_state = store.restore_latest({"w": jnp.zeros(2)})
    assert [record.args[0].name for record in caplog.records] == ["11"]
    assert (step, arrays["w"].tolist(), host_state) == (10, [10.0, 10.0], {"step": 10})
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*11; complete steps: \[9, 10\]"):
        store.restore(11)
    store.save(11, {"w": jnp.full(2, 11.0)}, {}, wait=True)
    assert store.latest_step() == 11


def test_orbax_alone_would_choose_the_incomplete_one(store):
    """The reason for a mark of our own: everything Orbax writes may be there and the rest not."""
    store.save(1, {"w": jnp.ones(2)}, {}, wait=True)
    store.save(2, {"w": jnp.ones(2)}, {}, wait=True)
    (store.directory / "2" / MARK_FILE).unlink()
    assert store.latest_step() == 1


def test_save_returns_before_the_checkpoint_is_complete(store, monkeypatch, caplog):
    go_on = threading.Event()
    original = checkpoint._flush_files

    def slow_disk(folder):
        assert go_on.wait(timeout=30)
        return original(folder)

    monkeypatch.setattr(checkpoint, "_flush_files", slow_disk)
    store.save(1, {"w": jnp.ones(2)}, {})
    assert store.latest_step() is None
    assert not caplog.records, "a save under way is not an incomplete checkpoint"
    go_on.set()
    store.wait()
    assert store.latest_step() == 1


def test_empty_store(store):
    assert store.latest_step() is None
    assert store.restore_latest({"w": jnp.zeros(2)}) is None
    assert not store.directory.exists()


def test_old_checkpoints_go_after_newer_ones_are_complete(tmp_path):
    with CheckpointStore(tmp_path, keep_latest=2) as store:
        for step in range(1, 5):
            store.save(step, {"w": jnp.ones(1)}, {}, wait=True)
        assert store.steps() == [3, 4]
        (store.directory / "2").mkdir()  # left over from a crash
        store.save(5, {"w": jnp.ones(1)}, {}, wait=True)
        assert sorted(os.listdir(store.directory)) == ["4", "5"]
    with pytest.raises(ValueError, match="keep_latest"):
        CheckpointStore(tmp_path, keep_latest=0)


def test_mark_lists_the_contents(store):
    store.save(1, {"w": jnp.ones((2, 3)), "rng": jax.random.key(0)}, {}, wait=True)
    mark = json.loads((store.directory / "1" / MARK_FILE).read_text())
    assert mark["step"] == 1
    leaves = {leaf["name"]: (leaf["dtype"], leaf["shape"]) for leaf in mark["leaves"]}
    assert leaves == {"['rng']": ("key<fry>", []), "['w']": ("float32", [2, 3])}
    on_disk = {
        p.relative_to(store.directory / "1").as_posix() for p in (store.directory / "1").rglob("*") if p.is_file()
    }
    assert set(mark["files"]) == on_disk - {MARK_FILE}


def test_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, str(KILLER), str(tmp_path)], check=True, env=environment, timeout=120)
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) == 10
    for log in logs:
        finished = [int(line) for line in log.read_text().split()]
        with CheckpointStore(tmp_path / log.stem, keep_latest=2) as store:
            step, _, host_state = store.restore_latest()
            # The mark may have been written just before the kill, the log line not yet.
            assert step in (finished[-1], finished[-1] + 1), log.stem
            assert host_state == {"step": step}
            for other in store.steps():
                arrays, _ = store.restore(other)
                np.testing.assert_array_equal(arrays["values"], np.random.default_rng(other).random(50_000))
            store.save(step + 1, {"values": np.zeros(1)}, {}, wait=True)
            assert store.latest_step() == step + 1
    outcomes = {log.stem: [int(line) for line in log.read_text().split()][-1] for log in logs}
    assert outcomes.items() >= {"before-mark": 2, "after-mark": 2, "save-returned": 2, "pruning": 2}.items()


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["byte", "truncated", "missing", "host_state", "mark", "mark_digit"])
def test_corrupt_newest_falls_back_loudly(store, caplog, damage):
    target = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    for step in (1, 2):
        values = jnp.asarray(np.random.default_rng(step).random(1000), jnp.float32)
        store.save(step, {"w": values}, {"step": step}, wait=True)
    folder = store.directory / "2"
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    match damage:
        case "byte":
            flip_a_byte(folder / "arrays")
        case "truncated":
            files[-1].write_bytes(files[-1].read_bytes()[:-1])
        case "missing":
            (folder / "arrays" / "_METADATA").unlink()
        case "host_state":
            (folder / "host_state.json").write_text('{"step": 1}')
        case "mark":
            (folder / MARK_FILE).write_text("")
        case "mark_digit":
            mark = (folder / MARK_FILE).read_text()
            (folder / MARK_FILE).write_text(mark.replace("1000", "1001"))
    with pytest.raises(CorruptCheckpointError, match="checkpoints/2 is corrupt"):
        store.restore(2, target)
    step, arrays, host_state = store.restore_latest(target)
    assert (step, host_state) == (1, {"step": 1})
    np.testing.assert_array_equal(arrays["w"], np.random.default_rng(1).random(1000).astype(np.float32))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert store.latest_step() == 1
    store.save(2, {"w": arrays["w"]}, {}, wait=True)
    assert store.latest_step() == 2
    assert len(list(store.directory.glob("2.corrupt-*"))) == 1, "the damaged files are kept for inspection"


@pytest.mark.parametrize("damaged", ["arrays", "."])
def test_nothing_intact_is_an_error_not_a_fresh_start(store, damaged):
    """Also when it is the mark that is damaged (the largest file of so small a checkpoint)."""
    store.save(1, {"w": jnp.ones(1000)}, {}, wait=True)
    flip_a_byte(store.directory / "1" / damaged)
    with pytest.raises(CorruptCheckpointError, match=r"every checkpoint .* corrupt: steps \[1\]"):
        store.restore_latest()


# --- misuse ---------------------------------------------------------------------------------------------------------


def test_misfit_names_leaf_and_folder_and_does_not_fall_back(store):
    store.save(1, {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(2), "d": jnp.ones(1)}, {})
    target = {"a": jnp.ones(2), "b": jnp.ones(4), "c": jnp.ones(2, jnp.bfloat16), "e": jnp.ones(1)}
    for restore in (lambda: store.restore(1, target), lambda: store.restore_latest(target)):
        with pytest.raises(CheckpointError) as caught:
            restore()
        message = str(caught.value)
        assert str(store.directory / "1") in message
        assert "missing in the checkpoint: ['e']" in message
        assert "only in the checkpoint: ['d']" in message
        assert "['b']: float32[3] in the checkpoint, float32[4] asked for" in message
        assert "['c']: float32[2] in the checkpoint, bfloat16[2] asked for" in message
        assert "['a']" not in message
    assert store.latest_step() == 1


def test_allow_extra_reads_a_part(store):
    tree = example_tree()
    store.save(1, tree, {"step": 1})
    part = {"params": abstract(tree["params"])}
    arrays, _ = store.restore(1, part, allow_extra=True)
    assert_identical(arrays, {"params": tree["params"]})
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        store.restore(1, part)


def test_steps_must_grow(store):
    store.save(2, {"w": jnp.ones(1)}, {})
    for step in (2, 1, -1):
        with pytest.raises(ValueError, match=f"step {step} must be"):
            store.save(step, {"w": jnp.ones(1)}, {})


@pytest.mark.parametrize(
    ("arrays", "host_state", "message"),
    [
        ({"w": [1.0]}, {}, r"\['w'\]\[0\] is a float"),
        ({"w": np.array(["a"])}, {}, r"\['w'\] is a ndarray"),
        ({}, {"counts": {3: 1}}, r"host_state\['counts'\] has the key 3"),
        ({}, {"pair": [0, (1, 2)]}, r"host_state\['pair'\]\[1\] is a tuple"),
        ({}, {"x": np.float32(1)}, r"host_state\['x'\] is a float32"),
    ],
)
def test_what_cannot_be_stored_is_named(store, arrays, host_state, message):
    with pytest.raises(ValueError, match=message):
        store.save(1, arrays, host_state)
    assert not store.directory.exists()


@pytest.mark.parametrize("reveal", ["wait", "save", "close"])
def test_background_failure_surfaces_once(tmp_path, monkeypatch, reveal):
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": jnp.ones(2)}, {}, wait=True)

    def full_disk(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush_files", full_disk)
    store.save(2, {"w": jnp.ones(2)}, {})
    calls = {"wait": store.wait, "save": lambda: store.save(3, {"w": jnp.ones(2)}, {}), "close": store.close}
    with pytest.raises(CheckpointSaveError, match=r"saving step 2 into .* failed .*No space left") as caught:
        calls[reveal]()
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    if reveal != "close":
        assert store.latest_step() == 1
        store.save(2, {"w": jnp.full(2, 2.0)}, {})
        store.close()
    with CheckpointStore(tmp_path) as reopened:
        assert reopened.latest_step() == (1 if reveal == "close" else 2)
