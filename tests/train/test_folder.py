"""The folder of a run: nothing of somebody else's is touched, and a kill leaves it usable."""

from __future__ import annotations

import pytest

from orchestra_jax.config import ConfigError, RunConfig, parse_config
from orchestra_jax.train import folder as folder_module
from orchestra_jax.train.folder import CONTENTS, find_run, open_run


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return parse_config(
        {"model": {"preset": "market-tiny"}, "text": {"tokenizer": "market"}, "output_dir": str(tmp_path / "run")}
    )


def fill(path) -> None:
    """Something of everything that a run writes."""
    for name in CONTENTS:
        if "." in name and not name.startswith(("model", "warm_start")):
            (path / name).touch()
        else:
            (path / name).mkdir(exist_ok=True)
            (path / name / "file").touch()


def test_looking_for_a_run_writes_nothing(config, tmp_path):
    find_run(config, overwrite=True)
    assert not list(tmp_path.iterdir())


def test_a_new_run_and_the_same_again(config):
    folder = find_run(config, overwrite=False)
    open_run(folder, config, overwrite=False)
    written = folder.config.read_text()
    (folder.path / "metrics.jsonl").write_text("{}\n")
    open_run(find_run(config, overwrite=False), config, overwrite=False)
    assert folder.config.read_text() == written
    assert (folder.path / "metrics.jsonl").read_text() == "{}\n"


def test_overwrite_deletes_what_a_run_writes_and_nothing_else(config):
    folder = find_run(config, overwrite=False)
    open_run(folder, config, overwrite=False)
    written = folder.config.read_text()
    fill(folder.path)
    folder.config.write_text(written)
    (folder.path / "notes.txt").write_text("mine")
    open_run(folder, config, overwrite=True)
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["config.yaml", "notes.txt"]
    assert folder.config.read_text() == written


def test_killed_while_it_deletes_the_folder_is_still_a_run(config, monkeypatch):
    folder = find_run(config, overwrite=False)
    open_run(folder, config, overwrite=False)
    written = folder.config.read_text()
    fill(folder.path)
    folder.config.write_text(written)
    delete = folder_module.shutil.rmtree
    calls = []

    def die_at_the_third(path):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        delete(path)

    monkeypatch.setattr(folder_module.shutil, "rmtree", die_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        open_run(folder, config, overwrite=True)
    monkeypatch.undo()
    open_run(find_run(config, overwrite=True), config, overwrite=True)
    assert [entry.name for entry in folder.path.iterdir()] == ["config.yaml"]


def test_killed_while_the_config_is_written(config):
    folder = find_run(config, overwrite=False)
    folder.path.mkdir()
    (folder.path / "config.tmp").write_text("see")
    open_run(find_run(config, overwrite=False), config, overwrite=False)
    assert folder.config.is_file()


def test_folders_of_others_are_refused(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").mkdir()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="not empty and holds no run"):
            find_run(config, overwrite=overwrite)
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.parametrize("text", ["", "[", "- a", "\x00", "seed: 0\n"])
def test_a_config_that_is_no_longer_what_was_written(config, text):
    folder = find_run(config, overwrite=False)
    open_run(folder, config, overwrite=False)
    folder.config.write_text(text)
    (folder.path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="another config"):
        find_run(config, overwrite=False)


def test_a_run_in_which_nothing_was_trained_takes_a_mended_config(config):
    folder = find_run(config, overwrite=False)
    open_run(folder, config, overwrite=False)
    (folder.path / "metrics.jsonl").touch()
    mended = config.model_copy(update={"seed": config.seed + 1})
    open_run(find_run(mended, overwrite=False), mended, overwrite=False)
    assert f"seed: {config.seed + 1}" in folder.config.read_text()
    (folder.path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="another config"):
        find_run(config, overwrite=False)
