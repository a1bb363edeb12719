"""`orchestra envs`: what there is, plug-ins by entry point with those that are broken, and the check of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestra_jax.cli.main import main

ROOT = Path(__file__).parents[2]

GOOD = """
import gymnasium as gym
from orchestra_envs import Task, ToolEnv


class Echo(ToolEnv):
    def sample_task(self, rng, options):
        return Task("Say yes.", answer="yes")

    def score(self, task, answer):
        return float(answer == task.answer)


gym.register("plugin_test/Echo-v0", Echo)
"""

BAD = '''
import itertools

import gymnasium as gym
from orchestra_envs import UnicodeText

count = itertools.count()


class Counter(gym.Env):
    """Breaks the rules: the same seed gives another task each time."""

    observation_space = action_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"task {next(count)}", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Explosive(Counter):
    def __init__(self):
        raise RuntimeError("no key")


gym.register("plugin_test/Counter-v0", Counter)
gym.register("plugin_test/Explosive-v0", Explosive)
'''


@pytest.fixture(scope="module")
def orchestra_envs(tmp_path_factory):
    """Runs `orchestra envs` in a process of its own that sees three plug-ins, one of them broken."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, source in {"good_plugin": GOOD, "bad_plugin": BAD, "broken_plugin": "import no_such_module"}.items():
        (folder / f"{name}.py").write_text(source)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[orchestra.envs]\n{name} = {name}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "envs", folder)))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "orchestra_jax.cli.main", "envs", *arguments]
        return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=120)

    return run


def test_the_list_has_ours_and_plugins_and_names_the_broken_ones(orchestra_envs):
    result = orchestra_envs()
    assert result.returncode == 0
    listed = dict(line.split() for line in result.stdout.splitlines())
    assert listed["orchestra/Market-v0"] == "orchestra_envs.market.env:MarketEnv"
    assert listed["plugin_test/Echo-v0"] == "good_plugin:Echo"
    assert not any("Blackjack" in name for name in listed)
    (line,) = result.stderr.splitlines()
    assert "broken_plugin" in line
    assert "no_such_module" in line


def test_an_environment_that_keeps_the_rules(orchestra_envs):
    result = orchestra_envs("plugin_test/Echo-v0")
    assert (result.returncode, result.stdout, result.stderr) == (0, "plugin_test/Echo-v0 passes the check\n", "")


def test_an_environment_that_breaks_the_rules(orchestra_envs):
    result = orchestra_envs("plugin_test/Counter-v0")
    assert result.returncode == 2
    *problems, note = result.stdout.splitlines()
    assert all(problem.startswith("- ") for problem in problems)
    assert any("deterministic" in problem or "differ" in problem for problem in problems)
    assert not any("tools_json" in problem or "cost_usd" in problem for problem in problems)
    assert note == "(a plain Gymnasium environment: checked by Gymnasium's rules)"
    assert result.stderr == f"orchestra: plugin_test/Counter-v0 fails the check ({len(problems)} problems)\n"


def test_an_environment_that_cannot_be_made(orchestra_envs):
    result = orchestra_envs("plugin_test/Explosive-v0")
    assert result.returncode == 2
    assert result.stderr == "orchestra: plugin_test/Explosive-v0 cannot be made: RuntimeError: no key\n"


def test_an_environment_that_is_not_there(orchestra_envs):
    result = orchestra_envs("plugin_test/Ecko-v0")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "did you mean plugin_test/Echo-v0" in line
    assert "broken_plugin" in line


def test_what_was_not_checked_is_said(capsys):
    assert main(["envs", "orchestra/Service-v0"]) == 0
    *notes, verdict = capsys.readouterr().out.splitlines()
    assert all(note.startswith("(") and note.endswith(")") for note in notes)
    assert verdict == "orchestra/Service-v0 passes the check"


def test_the_market_passes(capsys):
    assert main(["envs", "orchestra/Market-v0"]) == 0
    assert capsys.readouterr().out == "orchestra/Market-v0 passes the check\n"
