"""Mistakes of the user: exit code 2 and exactly one line on standard error that names what to mend."""

from __future__ import annotations

import os
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
        (["rollout.max_tokens=40", "rollout.max_turn_tokens=10"], "rollout.max_tokens"),
        (["rollout.max_tokens=2000", "train.row_tokens=2000"], "max_position_embeddings"),
        (["train.row_targets=29"], "train.row_targets (29) is less than what an episode can sample (30)"),
        (["text.tools=qwen"], "text.tools: compact"),
        (["env.eval_kwargs.split=foo"], "'foo'"),
        (["env={id: 'CartPole-v1'}"], "Discrete(2)"),
        (["env.id=no_such_module:x/Y-v0"], "env.id no_such_module:x/Y-v0: cannot import no_such_module"),
        (["model.preset=market-huge"], "market-tiny"),
        (["model.overrides={num_layers: '2'}"], "model.overrides.num_layers must be of type int, got '2'"),
        (["model.overrides={depth: 2}"], "'depth'"),
        (["model.overrides={vocab_size: 100}"], "2048 tokens"),
        (["model.overrides={qk_norm: false}"], "qk_norm"),
        (["loss.dual_clip=1.1"], "loss.dual_clip"),
        (["eval.baselines=[typo]"], "typo"),
        (["sft.router=demonstration"], "demonstrat"),
        (["output_dir=/dev/null/run"], "/dev/null/run"),
    ],
)
def test_one_line_names_the_mistake(tmp_path, capsys, overrides, named):
    assert main(["train", str(write_config(tmp_path)), *overrides]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("orchestra: ")
    assert named in errors[0]
    assert not (tmp_path / "run").exists()  # so that the mended config does not meet another run there


def one_line(capsys, *arguments: str) -> str:
    """Runs a command that must fail; its one line on standard error."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("orchestra: ")
    return line


def test_files_that_are_not_there(tmp_path, capsys):
    assert "none.yaml does not exist" in one_line(capsys, "train", str(tmp_path / "none.yaml"))
    assert "none.gguf" in one_line(capsys, "convert", str(tmp_path / "none.gguf"), str(tmp_path / "out"))
    assert "config.json" in one_line(capsys, "convert", str(tmp_path), str(tmp_path / "out"))
    assert "is no run folder" in one_line(capsys, "report", str(tmp_path))
    assert "does not exist" in one_line(capsys, "report", str(tmp_path / "none"))
    assert not list(tmp_path.iterdir())


def test_convert_without_the_gguf_package_says_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = one_line(capsys, "convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"))
    assert "orchestra-jax[gguf]" in line


def test_convert_does_not_write_into_a_folder_in_use(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "exists already" in one_line(capsys, "convert", str(tmp_path / "model.gguf"), str(tmp_path))


def test_a_model_without_tokenizer(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = write_config(tmp_path)
    overrides = [f"model={{path: {tmp_path / 'model'}}}", "text.tokenizer=null"]
    assert "tokenizer.json: missing" in one_line(capsys, "train", str(config), *overrides)


def test_sft_without_its_section(tmp_path, capsys):
    assert "no sft section" in one_line(capsys, "sft", str(write_config(tmp_path)), "sft=null")


@pytest.mark.parametrize("arguments", [[], ["tarin"], ["train"], ["train", "x.yaml", "--fast"], ["convert", "x"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "orchestra" in capsys.readouterr().err


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


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    config = write_config(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in one_line(capsys, "train", str(config))
    finally:
        tmp_path.chmod(0o700)


def test_a_fault_of_ours_is_no_mistake_of_the_user(tmp_path, monkeypatch):
    """Exit code 1 and a traceback, as for any Python program."""
    monkeypatch.setattr("orchestra_jax.train.run.load_policy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(write_config(tmp_path))])


def test_verbose_tells_where_a_mistake_was_found(tmp_path):
    command = [sys.executable, "-m", "orchestra_jax.cli.main", "-v", "train", str(tmp_path / "none.yaml")]
    result = subprocess.run(command, env=_env(), check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("orchestra: ")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "none.yaml"], ["envs"]])
def test_help_and_mistakes_do_not_wait_for_jax(arguments):
    code = f"""
import sys
from orchestra_jax.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
sys.exit(9 if "jax" in sys.modules else 0)
"""
    result = subprocess.run([sys.executable, "-c", code], env=_env(), check=False, capture_output=True)
    assert result.returncode == 0


def test_whoever_reads_the_output_may_stop(tmp_path):
    """As `orchestra envs | head -0` does."""
    command = f"{sys.executable} -m orchestra_jax.cli.main envs | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=_env(), capture_output=True, text=True)
    assert result.stderr == ""


def _env() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "envs")])}
