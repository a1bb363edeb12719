"""Environments by name: plug-ins, errors that say what to do, our checker, and a plug-in from the public API alone."""

import subprocess
import sys
import textwrap

import gymnasium as gym
import numpy as np
import orchestra_envs
import pytest
from orchestra_envs import EnvironmentNotFoundError, Task, ToolEnv, check, list_envs, load_plugins, make, tool

PLUGIN = '''
import gymnasium as gym
from orchestra_envs import Price, Task, ToolEnv, tool


@tool(price=Price(per_call_usd=0.01), latency_s=0.2)
async def lookup(city: str = "Oslo") -> str:
    """Population of a city."""
    return {"Oslo": "709000"}.get(city, "unknown")


class Cities(ToolEnv):
    tools = [lookup]

    def sample_task(self, rng, options):
        return Task("How many people live in Oslo?", answer="709000")

    def score(self, task, answer):
        return float(task.answer in answer)


gym.register("plugin_test/Cities-v0", Cities)
'''


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Installs packages with an entry point each into a folder on the path; forgets them afterwards."""

    def install(**modules):
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[orchestra.envs]\n{name} = {name}\n")

    monkeypatch.syspath_prepend(tmp_path)
    known = dict(gym.registry)
    load_plugins.cache_clear()
    yield install
    load_plugins.cache_clear()
    for env_id in set(gym.registry) - set(known):
        gym.registry.pop(env_id)
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))]:
        del sys.modules[name]


def test_a_plugin_is_found_by_its_entry_point(plugins):
    assert len([line for line in PLUGIN.splitlines() if line]) <= 20
    plugins(cities_plugin=PLUGIN)
    with pytest.raises(gym.error.Error):
        gym.make("plugin_test/Cities-v0")
    assert "plugin_test/Cities-v0" in list_envs()
    env = make("plugin_test/Cities-v0", max_turns=3)
    assert env.unwrapped.max_turns == 3
    observation, info = env.reset(seed=0)
    assert observation == "How many people live in Oslo?"
    assert "lookup" in info["tools_json"]
    observation, *_ = env.step('<tool_call>{"name": "lookup", "arguments": {"city": "Oslo"}}</tool_call>')
    assert env.step(f"There are {observation}.")[1:4] == (1.0, True, False)
    assert check("plugin_test/Cities-v0") == []


def test_a_module_can_be_named(plugins, tmp_path):
    (tmp_path / "cities_module.py").write_text(PLUGIN)
    assert make("cities_module:plugin_test/Cities-v0").reset(seed=0)[0]
    with pytest.raises(EnvironmentNotFoundError, match="no_such_module"):
        make("no_such_module:a/B-v0")
    (tmp_path / "broken_module.py").write_text("1/0")
    with pytest.raises(EnvironmentNotFoundError, match=r"broken_module.*ZeroDivisionError"):
        make("broken_module:a/B-v0")


def test_a_broken_plugin_is_named_and_hides_no_other(plugins):
    plugins(good_plugin=PLUGIN, broken_plugin="raise RuntimeError('half installed')")
    assert make("plugin_test/Cities-v0")
    with pytest.raises(EnvironmentNotFoundError, match=r"broken_plugin.*RuntimeError: half installed"):
        make("nobody/Nothing-v0")
    assert list(load_plugins()) == ["broken_plugin (broken_plugin)"]


def test_unknown_names_get_near_matches():
    with pytest.raises(EnvironmentNotFoundError, match="did you mean orchestra/Market-v0"):
        make("orchestra/Markt-v0")
    with pytest.raises(EnvironmentNotFoundError, match=r"there are: .*orchestra/Market-v0"):
        make("zzz")
    for wrong in ("", None, 3):
        with pytest.raises(ValueError, match="named by a string"):
            make(wrong)
    with pytest.raises(EnvironmentNotFoundError, match="orchestra/Market-v0"):
        make("orchestra/Market-v7")


def test_list_envs_leaves_out_gymnasiums_own():
    names = list_envs()
    assert "orchestra/Market-v0" in names
    assert names == sorted(names)
    assert not [name for name in names if name.startswith(("CartPole", "phys2d/", "tabular/"))]


class Plain(ToolEnv):
    def sample_task(self, rng, options):
        return Task(f"What is {rng.integers(1000)}?")

    def score(self, task, answer):
        return 0.0


@pytest.fixture
def register():
    """Registers a class and forgets it after the test."""
    names = []

    def add(env_class, **kwargs):
        names.append(f"registry_test/{env_class.__name__}-v0")
        gym.register(names[-1], entry_point=env_class, **kwargs)
        return names[-1]

    yield add
    for name in names:
        gym.registry.pop(name, None)


def test_arguments_an_environment_does_not_take(register):
    name = register(Plain)
    with pytest.raises(ValueError, match=r"registry_test/Plain-v0: .*max_turn'"):
        make(name, max_turn=3)
    with pytest.raises(ValueError, match="max_turns"):
        make(name, max_turns=0)


def test_an_entry_point_that_cannot_be_loaded(register):
    gym.register("registry_test/Gone-v0", entry_point="no_such_module.envs:Gone")
    try:
        with pytest.raises(EnvironmentNotFoundError, match=r"registry_test/Gone-v0: .*no_such_module"):
            make("registry_test/Gone-v0")
    finally:
        gym.registry.pop("registry_test/Gone-v0")


def test_the_checker_accepts_a_good_environment(register):
    assert check(register(Plain)) == []


class Unseeded(Plain):
    """BR-54: without a seed it takes one from nowhere; Gymnasium's checker does not see it."""

    def reset(self, *, seed=None, options=None):
        seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        return super().reset(seed=seed, options=options)


class ReplicaTask(Plain):
    def sample_task(self, rng, options):
        return Task(f"What is {rng.integers(1000)}? {options.get('replica', 0)}")


class ExtraTypes(Plain):
    def step(self, action):
        *rest, info = super().step(action)
        info["cost_usd"] = 0
        del info["turn"]
        return *rest, info


class Raises(Plain):
    def step(self, action):
        if not action:
            raise RuntimeError("empty action")
        return super().step(action)


class GlobalState(Plain):
    calls = 0

    @staticmethod
    @tool
    def count() -> int:
        """Counts calls of all environments."""
        GlobalState.calls += 1
        return GlobalState.calls

    def episode_tools(self, task, rng):
        return [self.count]


@pytest.mark.parametrize(
    ("env_class", "says"),
    [
        (Unseeded, "reset() after reset(seed): they differ"),
        (ReplicaTask, "replicas of one seed begin differently"),
        (ExtraTypes, "info['cost_usd'] of step is int, not float"),
        (ExtraTypes, "info of step has no 'turn'"),
        (Raises, "faults: RuntimeError: empty action"),
        (GlobalState, "differ after a call of count"),
    ],
)
def test_the_checker_names_what_is_wrong(register, env_class, says):
    problems = check(register(env_class))
    assert [problem for problem in problems if says in problem], problems


def test_the_checker_reports_what_gymnasium_says(register):
    class WrongReward(Plain):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float("nan"), *rest

    assert any("check_env" in problem for problem in check(register(WrongReward)))


def test_importing_the_package_is_cheap():
    program = """
        import sys
        import orchestra_envs
        heavy = {"jax", "flax", "torch", "transformers", "bm25s", "orchestra_jax", "orchestra_envs.market.env"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        import gymnasium
        assert "orchestra/Market-v0" in gymnasium.registry
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def test_public_names_exist():
    assert all(hasattr(orchestra_envs, name) for name in orchestra_envs.__all__)
    assert sorted(orchestra_envs.__all__) == orchestra_envs.__all__
