"""Environments and tools in packages of their own: installed in a fresh environment, found, checked and trained on.

The packages are installed by pip for real. Their build backend is a small one of their own, so that nothing has to be
downloaded for the test; the packages of a user name hatchling or setuptools there.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

BACKEND = '''
"""PEP 517 in a dozen lines: a wheel of the *.py files beside it."""

import tomllib
import zipfile
from pathlib import Path


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = f"{name}-{version}.dist-info"
    points = "".join(
        f"[{group}]\\n" + "".join(f"{key} = {value}\\n" for key, value in entries.items())
        for group, entries in project.get("entry-points", {}).items()
    )
    files = {path.name: path.read_text() for path in Path(".").glob("*.py") if path.name != "backend.py"}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{info}/entry_points.txt"] = points
    files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
    wheel = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
'''

BUILD = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""

CITIES_PROJECT = """
[project]
name = "orchestra_cities"
version = "1.0"
dependencies = ["orchestra-jax"]

[project.entry-points."orchestra.envs"]
cities = "orchestra_cities"

[project.entry-points."orchestra.tools"]
population = "orchestra_cities:population"
"""

CITIES = '''
import gymnasium as gym
from orchestra_envs import CallContext, Price, Task, ToolCall, ToolEnv, render_call, tool

POPULATION = {"Oslo": 709, "Bergen": 291, "Tromso": 77}


@tool(price=Price(per_call_usd=0.01), latency_s=0.2)
def population(context: CallContext) -> str:
    """Population of the city that the question is about, in thousands."""
    return next(f"Answer: {number}" for city, number in POPULATION.items() if city in context.task.question)


class Cities(ToolEnv):
    tools = (population,)

    def sample_task(self, rng, options):
        city = str(rng.choice(list(POPULATION)))
        return Task(f"How many thousand people live in {city}?", answer=POPULATION[city])

    def score(self, task, answer):
        return float(answer == f"Answer: {task.answer}")

    def demonstrate(self, task, rng):
        call = render_call(ToolCall("population", {}))
        guess = f"Answer: {rng.choice(list(POPULATION.values()))}"
        return [guess] if rng.random() < 0.5 else [call, f"Answer: {task.answer}"]


gym.register("my/Cities-v0", Cities)
'''

# An environment by somebody who has never heard of us: Gymnasium's own space, no prices, no tools, hardly any info.
WORDS_PROJECT = """
[project]
name = "somebodys_words"
version = "1.0"
dependencies = ["gymnasium"]
"""

WORDS = """
import string

import gymnasium as gym


class Words(gym.Env):
    observation_space = gym.spaces.Text(max_length=1000, charset=string.printable)
    action_space = gym.spaces.Text(max_length=1000, charset=string.printable)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.choice(["red", "green", "blue"]))
        self.num_turns = 0
        return f"Say {self.word}.", {}

    def step(self, action):
        self.num_turns += 1
        done = self.word in action
        return "No.", float(done) + 0.01 * len(set(action)), done, self.num_turns >= 2, {"num_turns": self.num_turns}


gym.register("words/Words-v0", Words)
"""

# Two steps, but of a policy whose turns are calls and answers: without them the environments would never be stepped.
QUICK = (
    "train.steps=2",
    "train.episodes_every=1",
    "rollout.tasks_per_step=2",
    "rollout.group_size=8",
    "advantage.drop_unanswered=false",
    "advantage.drop_format_errors=false",
    "eval=null",
)
WARM_START = (
    "model.overrides={hidden_size: 32, intermediate_size: 64, num_layers: 1, head_dim: 8}",
    "sft.traces_per_task=2",
    "sft.copy_drills=16",
    "sft.rows_per_update=1",
    "sft.optimizer.learning_rate=1e-2",
)


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory) -> Path:
    """The interpreter of a new environment that sees the packages of this one, and has the two plug-ins installed."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # What the running environment has (editable installs too) without touching it; a venv of a venv would not see it.
    borrowed = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (Path(purelib) / "borrowed.pth").write_text("\n".join([*borrowed, str(ROOT), str(ROOT / "envs")]))
    for name, project, source in (
        ("orchestra_cities", CITIES_PROJECT, CITIES),
        ("somebodys_words", WORDS_PROJECT, WORDS),
    ):
        package = folder / name
        package.mkdir()
        (package / "pyproject.toml").write_text(BUILD + project)
        (package / "backend.py").write_text(BACKEND)
        (package / f"{name}.py").write_text(source)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(package))
    return python


def run(python: Path, *arguments: str, cwd: Path | None = None) -> str:
    """Standard output of a process in the fresh environment; it fails the test if the process does."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [str(python), *arguments]
    result = subprocess.run(command, env=env, cwd=cwd, check=False, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def orchestra(python: Path, *arguments: str, cwd: Path) -> str:
    return run(python, "-m", "orchestra_jax.cli.main", *arguments, cwd=cwd)


def train(python: Path, folder: Path, *overrides: str) -> tuple[list[dict], list[dict]]:
    """Trains two steps with `configs/small.yaml`; the metrics of the steps and their episodes."""
    orchestra(python, "train", str(ROOT / "configs/small.yaml"), "output_dir=run", *overrides, cwd=folder)
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "run/episodes").glob("*.jsonl"))
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    steps = [line for line in metrics if line["phase"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    assert any(line["optimizer/grad_norm"] > 0 for line in steps)
    return steps, [episode for episode in episodes if episode["phase"] == "train"]


@pytest.fixture(scope="module")
def cities_run(fresh_python, tmp_path_factory) -> tuple[Path, list[dict], list[dict]]:
    """A run on the installed environment by its name: folder, metrics of the steps, episodes."""
    folder = tmp_path_factory.mktemp("cities")
    return folder, *train(fresh_python, folder, *QUICK, *WARM_START, "env.id=my/Cities-v0")


def test_the_running_environment_is_left_alone(fresh_python):
    probe = "import importlib.util; print(importlib.util.find_spec('orchestra_cities') is not None)"
    assert run(fresh_python, "-c", probe) == "True\n"
    assert run(Path(sys.executable), "-c", probe) == "False\n"


def test_what_is_installed_is_listed_and_passes_the_check(fresh_python, tmp_path):
    listed = [line.split() for line in orchestra(fresh_python, "envs", cwd=tmp_path).splitlines()]
    assert ["my/Cities-v0", "orchestra_cities:Cities"] in listed
    assert ["tool", "population", "orchestra_cities:population", "(orchestra_cities)"] in listed
    assert orchestra(fresh_python, "envs", "my/Cities-v0", cwd=tmp_path) == "my/Cities-v0 passes the check\n"


def test_an_installed_environment_is_trained_by_its_name(cities_run):
    _, steps, episodes = cities_run
    check_population_was_called(steps, episodes, cost_usd=0.01)
    assert all("How many thousand people live in" in episode["prompt"] for episode in episodes)


def test_an_installed_tool_is_used_by_the_question_environment(fresh_python, tmp_path):
    cities = ("Oslo", "Bergen", "Tromso")
    rows = [json.dumps({"question": f"How many people live in {city}?", "answer": "709"}) for city in cities]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    tool = "{kind: installed, name: population, price: {per_call_usd: 0.5}}"
    kwargs = f"env.kwargs={{path: questions.jsonl, tools: [{tool}]}}"
    steps, episodes = train(fresh_python, tmp_path, *QUICK, *WARM_START, "env.id=orchestra/QA-v0", kwargs)
    check_population_was_called(steps, episodes, cost_usd=0.5)


def check_population_was_called(steps: list[dict], episodes: list[dict], cost_usd: float) -> None:
    """The installed tool was on offer, was called, answered and was charged at its price."""
    assert sum(line["tools/population/calls"] for line in steps) > 0
    assert all("population $" in episode["prompt"] for episode in episodes)
    calls = [episode["tool_counts"].get("population", 0) for episode in episodes]
    assert max(calls) > 0
    assert [episode["cost_usd"] for episode in episodes] == pytest.approx([cost_usd * count for count in calls])
    results = [turn["text"] for episode in episodes for turn in episode["turns"] if turn["role"] == "tool"]
    assert set(results) & {"Answer: 709", "Answer: 291", "Answer: 77"}


def test_a_plain_text_environment_is_trained_without_prices(fresh_python, cities_run, tmp_path):
    """It has no demonstrations, so the policy is one that has learned elsewhere how to end a turn."""
    policy = f"model={{path: {cities_run[0] / 'run/warm_start'}}}"
    overrides = ("env.id=somebodys_words:words/Words-v0", policy, "reward.form=return", "sft=null")
    steps, episodes = train(fresh_python, tmp_path, *QUICK, *overrides)
    assert not any(name.startswith(("tools/", "outcome/")) for line in steps for name in line)
    assert all(line["cost/mean_usd"] == line["latency/mean_s"] == 0.0 for line in steps)
    assert all(re.search(r"Say (red|green|blue)\.", episode["prompt"]) for episode in episodes)
    for episode in episodes:  # every reward of the environment arrived, of one turn or two
        said = [turn["text"] for turn in episode["turns"] if turn["role"] == "assistant"]
        assert len(said) in (1, 2)
        if episode["end_reason"] in ("terminated", "truncated"):
            word = re.search(r"Say (\w+)\.", episode["prompt"])[1]
            rewards = [float(word in text) + 0.01 * len(set(text)) for text in said]
            assert episode["return"] == pytest.approx(sum(rewards))
    assert sum(episode["end_reason"] in ("terminated", "truncated") for episode in episodes) > len(episodes) / 2
