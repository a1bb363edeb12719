"""`orchestra launch`: what is written and printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from orchestra_jax.cli.launch import launch
from orchestra_jax.config import ConfigError
from orchestra_jax.launch import TARGETS

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
GKE = {"target": "gke", "topology": "v5p:2x2x2", "image": "r.dev/p/orchestra:1", "mount": "claim:/mnt/b"}


def test_a_dry_run_prints_files_and_commands_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    launch(QUICKSTART, ["output_dir=/mnt/b/r"], **GKE, dry_run=True)
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("==> ")] == [
        f"==> {name} <=="
        for name in ("config.yaml", "Dockerfile", "Dockerfile.dockerignore", "jobset.yaml", "commands.sh")
    ]
    assert "kubectl apply -f runs/launch/quickstart/jobset.yaml" in printed
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_and_the_commands_printed(tmp_path, capsys):
    folder = tmp_path / "out dir"
    launch(QUICKSTART, ["output_dir=/mnt/b/r"], **GKE, name="night", output=str(folder))
    printed = capsys.readouterr()
    assert printed.out == (folder / "commands.sh").read_text()
    assert f"kubectl apply -f '{folder}'/jobset.yaml" in printed.out
    assert "wrote config.yaml, Dockerfile" in printed.err
    manifest = list(yaml.safe_load_all((folder / "jobset.yaml").read_text()))[1]
    assert manifest["metadata"]["name"] == "night"
    # Again over what is there.
    launch(QUICKSTART, ["output_dir=/mnt/b/r2"], **GKE, name="night", output=str(folder))
    assert "/mnt/b/r2" in (folder / "config.yaml").read_text()


def test_names_come_from_the_config_file(tmp_path, capsys):
    for file, name in (("Qwen3_8B.v2.yaml", "qwen3-8b-v2"), ("8b.yaml", "run-8b"), ("x" * 60 + ".yaml", "x" * 40)):
        config = tmp_path / file
        config.write_text(Path(QUICKSTART).read_text())
        launch(str(config), ["output_dir=/mnt/b/r"], **GKE, dry_run=True)
        assert f"\n  name: {name}\n" in capsys.readouterr().out


def test_a_mistake_writes_nothing(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(ConfigError, match="is a local path"):
        launch(QUICKSTART, [], **GKE, output=str(folder))
    with pytest.raises(ConfigError, match="does not exist"):
        launch("none.yaml", [], **GKE, output=str(folder))
    assert not folder.exists()
    folder.write_text("a file")
    with pytest.raises(ConfigError, match="--output"):
        launch(QUICKSTART, ["output_dir=/mnt/b/r"], **GKE, output=str(folder))


def test_the_commands_of_the_page_render(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "tpu" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in page.splitlines() if line.startswith("orchestra launch ")]
    assert {target for line in lines for target in re.findall(r"--target (\S+)", line)} == set(TARGETS)
    for line in lines:
        words = shlex.split(line.replace("$IMAGE", "r.dev/p/orchestra:1"))[3:]
        overrides = [word for word in words if "=" in word]
        flags = [word for word in words if "=" not in word and word != "--spot"]
        given = {key[2:].replace("-", "_"): value for key, value in zip(flags[::2], flags[1::2], strict=True)}
        given["num_slices"] = int(given.get("num_slices", 1))
        # The page's model is a checkpoint; the quickstart's is made from scratch.
        launch(QUICKSTART, [o for o in overrides if not o.startswith("model.path")], **given, spot="--spot" in words)
        printed = capsys.readouterr().out
        assert "Nothing here was run" in printed
