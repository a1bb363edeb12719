"""Mistakes of the user: exit code 2 and exactly one line on standard error that names what to mend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestra_jax.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import write_config


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.stepz=3"], "did you mean steps"),
        (["trian.steps=3"], "did you mean train"),
        (["train.steps=many"], "train.steps"),
        (["train.steps=2.5"], "train.steps"),
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate"),
        (["loss.kind=foo"], "'ppo'"),
        (["foo"], "key.path=value"),
        (["rollout.max_turn_tokens=9999"], "rollout.max_turn_tokens"),
        (["env.id=orchestra/Markt-v0"], "orchestra/Market-v0"),
        (["env.kwargs={splitt: train}"], "splitt"),
        (["env.kwargs={types: [poetry]}"], "poetry"),
        (["model={path: /nowhere/at/all}"], "/nowhere/at/all"),
        (["text.tokenizer=/nowhere/at/all"], "/nowhere/at/all"),
        (["eval.baselines=['always:gpt-9']"], "gpt-9"),
        (["sft.router=nobody"], "nobody"),
        (["rollout.max_tokens=60", "rollout.max_turn_tokens=10"], "rollout.max_tokens"),
    ],
)
def test_one_line_names_the_mistake(tmp_path, capsys, overrides, named):
    assert main(["train", str(write_config(tmp_path)), *overrides]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("orchestra: ")
    assert named in errors[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_files_that_are_not_there(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert main(["convert", str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_config_that_is_no_yaml_or_says_a_key_twice(tmp_path, capsys):
    file = tmp_path / "bad.yaml"
    for text in ("seed: [1", "seed: 1\nseed: 2\n", "- a\n"):
        file.write_text(text)
        assert main(["train", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_folder_that_holds_another_run_or_something_else(tmp_path, capsys):
    config = write_config(tmp_path)
    (tmp_path / "run").write_text("a file")
    assert main(["train", str(config)]) == 2
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    assert main(["train", str(config), "--overwrite"]) == 2
    assert (tmp_path / "run" / "thesis.txt").read_text() == "precious"
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_help_does_not_wait_for_jax():
    code = "import sys, orchestra_jax.cli.main as m; m.build_parser().format_help(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=_env(), check=False).returncode == 0


def test_environment_check(capsys):
    assert main(["envs"]) == 0
    assert "orchestra/Market-v0" in capsys.readouterr().out
    assert main(["envs", "orchestra/Nothing-v0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def _env() -> dict[str, str]:
    import os

    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "envs")])}
