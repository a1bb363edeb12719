"""The command: what it prints, how it ends, and mistakes in its flags."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from serving import CONFIG, chat_format, client
from tiny import write_config

from orchestra_jax.cli.serve import serve
from orchestra_jax.config import ConfigError
from orchestra_jax.models.decoder import init_params
from orchestra_jax.rollout.policy import Policy, save_policy

RUN = (
    "import sys; from orchestra_jax.cli.main import main; "
    "sys.exit(main(['serve', sys.argv[1], '--port', '0', '--slots', '2', '--api-key-env', 'MY_KEY']))"
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run whose model has fresh weights."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(folder, "run")
    (folder / "run").mkdir()
    config.rename(folder / "run" / "config.yaml")
    policy = Policy(CONFIG, init_params(CONFIG, jax.random.key(0)), chat_format())
    save_policy(folder / "run" / "model", policy, policy.params)
    return folder / "run"


def test_it_serves_a_run_until_it_is_told_to_stop(run_folder):
    environment = {**os.environ, "MY_KEY": "sk-1"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(run_folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        line = process.stdout.readline()
        url = re.match(r"run at (http://127\.0\.0\.1:\d+/v1) \(2 slots of 176 tokens\); Ctrl-C ends it\n", line)[1]
        with client(url, "sk-1") as asker:
            answer = asker.chat.completions.create(
                model="run", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
            )
            assert answer.usage.completion_tokens <= 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_the_models_own_folder_and_other_flags(run_folder, monkeypatch):
    import orchestra_jax.serve.server as server

    served = []
    monkeypatch.setattr(server, "run_server", lambda service, sock: served.append(service))
    serve(str(run_folder / "model"), port=0, slots=1, max_tokens=99, name="mine", max_waiting=0, dtype="bfloat16")
    (service,) = served
    assert (service.name, service.capacity, service.worker.slots, service.worker.most) == ("mine", 99, 1, 1)
    assert service.api_key is None


def test_the_warm_up_is_listed(run_folder, monkeypatch, capsys):
    import orchestra_jax.serve.server as server

    monkeypatch.setattr(server, "run_server", lambda service, sock: None)
    serve(str(run_folder), port=0, slots=1, max_tokens=32, warm_up=True)
    assert re.search(r"^  decode 1 of 32: \d+\.\d\d s$", capsys.readouterr().err, re.MULTILINE)


def test_mistakes(run_folder, tmp_path, monkeypatch):
    folder = str(run_folder)
    monkeypatch.delenv("MY_KEY", raising=False)
    for options, message in (
        ({"slots": 0}, "--slots must be at least 1, not 0"),
        ({"max_tokens": 1}, "--max-tokens must be at least 2"),
        ({"max_waiting": -1}, "--max-waiting"),
        ({"max_tokens": 10**6}, "--max-tokens 1000000: the model holds at most"),
        ({"api_key_env": "MY_KEY"}, "--api-key-env MY_KEY: the environment variable is not set"),
        ({"api_key_env": "sk-123"}, "must be the name of an environment variable, not the key$"),
        ({"host": "203.0.113.1"}, "--host 203.0.113.1"),
        ({"port": 70_000}, "--port 70000"),
    ):
        with pytest.raises(ConfigError, match=message):
            serve(folder, **{"port": 0, **options})
    with pytest.raises(ConfigError, match="nowhere"):
        serve(str(tmp_path / "nowhere"), port=0)
    with pytest.raises(ConfigError, match="holds no policy"):
        serve(str(tmp_path), port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        serve(folder, port=taken.getsockname()[1])


@pytest.mark.parametrize(("module", "extra"), [("starlette", "serve"), ("llguidance", "grammar")])
def test_a_missing_package_is_named(run_folder, monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"orchestra-jax\[{extra}\]"):
        serve(str(run_folder), port=0, grammar=True)


def test_everyone_may_come_in_only_with_a_warning(run_folder, monkeypatch, capsys):
    import orchestra_jax.serve.server as server

    monkeypatch.setattr(server, "run_server", lambda service, sock: None)
    serve(str(run_folder), host="0.0.0.0", port=0, slots=1, max_tokens=32)
    assert "--api-key-env" in capsys.readouterr().err
