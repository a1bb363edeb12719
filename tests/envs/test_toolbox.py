"""Tools from plain configuration: every kind, keys and their faults, one cache a process, tools of other packages."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from orchestra_envs import Price, Task, Tool, ToolEnv, tool
from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.live.local_search import build_index
from orchestra_envs.parse import ToolCall, render_call
from orchestra_envs.toolbox import COMMON_KEYS, KINDS, clear_cache, list_installed_tools, tools_from_config

sys.path.insert(0, str(Path(__file__).parent))
from servers.openai_server import OpenAIServer

MCP_SERVER = str(Path(__file__).parent / "servers" / "mcp_server.py")
LIVE_EXPERT = {"kind": "expert", "name": "big", "model": "m", "base_url": "http://127.0.0.1:9/v1", "price": {}}

MODULE = '''
import threading

from orchestra_envs import Price, Tool, tool

made = []


@tool(price=Price(per_call_usd=0.01), latency_s=0.2)
async def lookup(city: str = "Oslo") -> str:
    """Population of a city."""
    return {"Oslo": "709000"}.get(city, "unknown")


def shout(text: str) -> str:
    """Says it louder.

    Args:
        text: what to say.
    """
    return text.upper()


def untyped(text):
    """No type hint."""


both = [lookup, shout]
nothing = []
number = 3


class Box:
    inner = lookup


def slow_factory(*, greeting: str = "hello", price: dict | None = None) -> Tool:
    """Makes a tool."""
    made.append(threading.get_ident())

    @tool
    def greet() -> str:
        """Greets."""
        return greeting

    return greet


def needy_factory(*, greeting: str) -> list[Tool]:
    return [slow_factory(greeting=greeting)]


def broken_factory(**anything):
    raise ValueError("the factory is closed")
'''


@pytest.fixture(autouse=True)
def _fresh_cache():
    clear_cache()
    yield
    clear_cache()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs modules on the path; with `announce`, as packages whose entry points announce tools."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, source: str, announce: dict[str, str] | None = None) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in (announce or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[orchestra.tools]", *lines, ""]))

    yield install
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))]:
        del sys.modules[name]


def call(tool: Tool, **arguments) -> tuple[str, dict]:
    """What the policy reads of one call, and its record."""

    class Env(ToolEnv):
        tools = (tool,)

        def sample_task(self, rng, options):
            return Task("Who wrote it?")

        def score(self, task, answer):
            return 1.0

    env = Env()
    env.reset(seed=0)
    observation, _, _, _, info = env.step(render_call(ToolCall(tool.name, arguments)))
    return observation, json.loads(info["calls_json"])[0]


# --- Kinds ---


def test_an_expert():
    with OpenAIServer(["Ada Lovelace."]) as server:
        config = {"kind": "expert", "name": "big", "model": "m", "base_url": server.base_url, "api_key_env": None}
        (big,) = tools_from_config([config | {"price": {"per_call_usd": 0.5}, "max_concurrency": 2}])
        text, record = call(big, **{next(iter(big.parameters["properties"])): "Who?"})
    assert (text, record["cost_usd"], record["source"]) == ("Ada Lovelace.", 0.5, "live")
    assert big.limiter.max_concurrency == 2


def test_web_search_takes_its_providers_options():
    (search,) = tools_from_config([{"kind": "web_search", "name": "web", "max_results": 3, "api_key_env": "MY_KEY"}])
    assert search.name == "web"
    with pytest.raises(ValueError, match=r"tools\[0\].*depht"):
        tools_from_config([{"kind": "web_search", "depht": 3}])


def test_local_search(tmp_path):
    build_index(["Velmora Tower is 312 metres high.", "Oslo is a city."], tmp_path / "index")
    config = {"kind": "local_search", "index": str(tmp_path / "index"), "name": "docs", "latency_s": 0.5}
    (search,) = tools_from_config([config | {"price": {"per_call_usd": 0.001}, "max_output_chars": 200}])
    text, record = call(search, query="How high is Velmora Tower?")
    assert "312 metres" in text
    assert (search.name, record["cost_usd"], record["latency_s"], search.max_output_chars) == ("docs", 0.001, 0.5, 200)


def test_python():
    (python,) = tools_from_config([{"kind": "python", "name": "py", "latency_s": 0.3}])
    assert (python.name, python.latency_s) == ("py", 0.3)
    text, _ = call(python, code="print(6 * 7)")
    assert "42" in text


def test_a_server_of_several_tools():
    pytest.importorskip("mcp")
    from orchestra_envs.live.mcp import close_mcp

    config = {"kind": "mcp", "command": [sys.executable, MCP_SERVER], "prefix": "x_", "price": {"per_call_usd": 0.1}}
    config |= {"max_calls_per_s": 100}
    try:
        tools = tools_from_config([config])
        assert len(tools) > 1
        assert all(one.name.startswith("x_") and one.price.per_call_usd == 0.1 for one in tools)
        assert {id(one.limiter) for one in tools} == {id(tools[0].limiter)}, "one bound for the server"
        assert tools_from_config([config]) == tools
        with pytest.raises(ValueError, match=r"tools\[0\].name: it stands for \d+ tools"):
            tools_from_config([config | {"name": "one"}])
    finally:
        close_mcp()


def test_functions_of_the_user(install):
    install("user_tools", MODULE)
    lookup, shout = tools_from_config(
        [
            {"kind": "function", "function": "user_tools:lookup", "latency_s": 0.7},
            {"kind": "function", "function": "user_tools:shout", "name": "loud"},
        ]
    )
    assert (lookup.name, lookup.latency_s, lookup.price.per_call_usd) == ("lookup", 0.7, 0.01)
    assert call(shout, text="hi")[0] == "HI"
    assert shout.parameters["properties"]["text"]["description"] == "what to say."
    assert [one.name for one in tools_from_config([{"kind": "function", "function": "user_tools:both"}])] == [
        "lookup",
        "shout",
    ]
    assert tools_from_config([{"kind": "function", "function": "user_tools:Box.inner"}])[0].name == "lookup"


def test_tool_objects_pass_through():
    @tool
    def here() -> str:
        """Here."""
        return "here"

    assert tools_from_config([here]) == (here,)
    assert tools_from_config([]) == ()


# --- Common keys ---


def test_common_keys_replace_what_a_tool_came_with(install):
    install("user_tools", MODULE)
    config = {
        "kind": "function",
        "function": "user_tools:lookup",
        "name": "alias",
        "description": "Looks it up.",
        "price": {"per_call_usd": 0.5},
        "latency_s": 3,
        "timeout_s": 7,
        "max_output_chars": 10,
        "retry": {"max_attempts": 5},
        "max_concurrency": 2,
        "max_calls_per_s": 9,
    }
    assert set(config) - {"kind", "function"} == set(COMMON_KEYS)
    (alias,) = tools_from_config([config])
    assert (alias.name, alias.description) == ("alias", "Looks it up.")
    assert alias.price == Price(per_call_usd=0.5)
    assert (alias.latency_s, alias.timeout_s, alias.max_output_chars) == (3.0, 7, 10)
    assert alias.retry == Retry(max_attempts=5)
    assert (alias.limiter.max_concurrency, alias.limiter.max_calls_per_s) == (2, 9)


def test_prices_may_be_per_million_tokens(install):
    install("user_tools", MODULE)
    price = {"input_usd_per_million": 2.0, "output_usd_per_million": 8.0}
    config = {"kind": "function", "function": "user_tools:lookup"}
    (priced,) = tools_from_config([config | {"price": price}])
    assert priced.price == Price(per_input_token_usd=2e-6, per_output_token_usd=8e-6)
    assert tools_from_config([config | {"price": Price(per_call_usd=1.0)}])[0].price.per_call_usd == 1.0


def test_a_new_bound_keeps_the_old_ones(install):
    source = MODULE + "\nfrom orchestra_envs.limits import Limiter\nimport dataclasses\n"
    source += "bounded = dataclasses.replace(lookup, limiter=Limiter(max_concurrency=3))\n"
    install("user_tools", source)
    (bounded,) = tools_from_config([{"kind": "function", "function": "user_tools:bounded", "max_calls_per_s": 5}])
    assert isinstance(bounded.limiter, Limiter)
    assert (bounded.limiter.max_concurrency, bounded.limiter.max_calls_per_s) == (3, 5)


# --- Faults of a config ---


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ("python", "tools must be a list"),
        ({"kind": "python"}, "tools must be a list"),
        (None, "tools must be a list"),
        (["python"], r"tools\[0\] must be a Tool or a mapping"),
        ([{}], r"tools\[0\].kind: missing; there are: expert, web_search"),
        ([{"name": "x"}], r"tools\[0\].kind: missing"),
        ([{"kind": "pyhton"}], r"tools\[0\].kind: no kind 'pyhton'; did you mean 'python'"),
        ([{"kind": 3}], r"tools\[0\].kind: no kind 3"),
        ([LIVE_EXPERT, {"kind": "expert", "modle": "x"}], r"tools\[1\].modle: .*did you mean 'model'"),
        ([{"kind": "expert", "name": "x"}], r"tools\[0\]: kind 'expert' needs 'model'"),
        ([{"kind": "expert"}], r"tools\[0\]: kind 'expert' needs 'name' and 'model'"),
        ([LIVE_EXPERT | {"api_key": "sk-secret"}], r"tools\[0\].api_key: .*api_key_env"),
        ([LIVE_EXPERT | {"API-Key": "sk-secret"}], r"tools\[0\].API-Key: .*api_key_env"),
        ([LIVE_EXPERT | {"extra": {"headers": [{"Authorization": "sk-secret"}]}}], r"extra.headers\[0\].Authorization"),
        ([{"kind": "mcp", "command": ["x"], "env": {"HF_TOKEN": "sk-secret"}}], r"tools\[0\].env.HF_TOKEN: .*null"),
        ([LIVE_EXPERT | {"api_key_env": "sk-secret"}], r"tools\[0\]: .*api_key_env"),
        ([LIVE_EXPERT | {"price": {"per_cal_usd": 1}}], r"tools\[0\].*per_cal_usd"),
        ([LIVE_EXPERT | {"price": {"per_call_usd": -1}}], r"tools\[0\].*per_call_usd"),
        ([LIVE_EXPERT | {"price": 3}], r"tools\[0\].*price"),
        ([LIVE_EXPERT | {"retry": {"attempts": 3}}], r"tools\[0\].*attempts"),
        ([LIVE_EXPERT | {"timeout_s": -1}], r"tools\[0\].*timeout_s"),
        ([LIVE_EXPERT | {"latency_s": float("nan")}], r"tools\[0\]: its values must be plain JSON"),
        ([LIVE_EXPERT | {"extra": {1, 2}}], r"tools\[0\]: its values must be plain JSON"),
        ([LIVE_EXPERT | {"max_concurrency": 0}], r"tools\[0\].*max_concurrency"),
        ([LIVE_EXPERT | {"name": "no blanks"}], r"tools\[0\].*no blanks"),
        ([LIVE_EXPERT, LIVE_EXPERT], r"tools\[0\] and tools\[1\]: two tools are named 'big'"),
        ([{"kind": "local_search", "index": "/no/such/index"}], r"tools\[0\]: .*/no/such/index"),
        ([{"kind": "local_search"}], r"tools\[0\]: kind 'local_search' needs 'index'"),
        ([{"kind": "mcp", "command": ["/no/such/server"]}], r"tools\[0\]: .*/no/such/server"),
        ([{"kind": "function"}], r'tools\[0\].function must be "module:object", not None'),
        ([{"kind": "function", "function": "user_tools"}], r'must be "module:object"'),
        ([{"kind": "function", "function": "no_such_module:x"}], "cannot import no_such_module: ModuleNotFoundError"),
        ([{"kind": "function", "function": "user_tools:nobody"}], "there is no 'nobody' in user_tools"),
        ([{"kind": "function", "function": "user_tools:number"}], r"tools\[0\]: expected a Tool.*3"),
        ([{"kind": "function", "function": "user_tools:nothing"}], r"tools\[0\]: expected a Tool"),
        ([{"kind": "function", "function": "user_tools:untyped"}], r"tools\[0\]: .*'text' needs a type hint"),
        ([{"kind": "function", "function": "user_tools:both", "name": "x"}], r"tools\[0\].name: it stands for 2 tools"),
        ([{"kind": "function", "function": "user_tools:lookup", "funktion": 1}], r"tools\[0\].funktion: .*'function'"),
        ([{"kind": "function", "function": "user_tools:lookup", "price": {"x": 1}}], r"tools\[0\].price"),
        ([{"kind": "function", "function": "user_tools:lookup", "retry": 3}], r"tools\[0\].retry must be a mapping"),
        ([{"kind": "function", "function": "user_tools:lookup", "retry": {"x": 3}}], r"tools\[0\].retry.x"),
        (
            [{"kind": "function", "function": "user_tools:lookup", "max_output_chars": 0}],
            r"tools\[0\].*max_output_chars",
        ),
        ([{"kind": "installed"}], r"tools\[0\].name must be the name"),
        ([{"kind": "installed", "name": "no such tool"}], r"tools\[0\].name: no installed package announces"),
    ],
)
def test_faults_are_named_by_their_path(install, configs, message):
    install("user_tools", MODULE)
    with pytest.raises(ValueError, match=message) as caught:
        tools_from_config(configs)
    assert "sk-secret" not in str(caught.value)


def test_names_of_variables_are_no_secrets(monkeypatch):
    config = LIVE_EXPERT | {"api_key_env": "OPENAI_API_KEY", "max_output_tokens": 5}
    assert tools_from_config([config])[0].name == "big"
    with pytest.raises(ValueError) as caught:
        tools_from_config(
            [{"kind": "mcp", "url": "http://127.0.0.1:9/mcp", "headers_env": {"Authorization": "MY_VARIABLE"}}]
        )
    assert "no keys or passwords" not in str(caught.value), "it fails for want of a server alone"


def test_a_missing_extra_is_named():
    script = """
        import sys
        sys.modules["mcp"] = None
        from orchestra_envs.toolbox import tools_from_config
        tools_from_config([{"kind": "mcp", "command": ["true"]}])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert "orchestra-jax[mcp]" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError: tools[0]: ")


def test_nothing_is_imported_before_it_is_asked_for():
    script = """
        import sys
        import orchestra_envs.toolbox
        orchestra_envs.toolbox.tools_from_config([])
        heavy = {"openai", "mcp", "aiohttp", "jax", "orchestra_envs.live.expert"} & set(sys.modules)
        sys.exit(str(heavy) if heavy else 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- One cache a process ---


def test_equal_entries_are_one_tool():
    first, second = tools_from_config([LIVE_EXPERT]), tools_from_config([dict(reversed(LIVE_EXPERT.items()))])
    assert first[0] is second[0]
    other = tools_from_config([LIVE_EXPERT | {"timeout_s": 5}])
    assert other[0] is not first[0]
    clear_cache()
    assert tools_from_config([LIVE_EXPERT])[0] is not first[0]


def test_relative_paths_are_told_apart_by_the_folder(tmp_path, monkeypatch):
    texts = {"one": "The sun is bright.", "two": "The moon is pale."}
    for folder, text in texts.items():
        build_index([text], tmp_path / folder / "index")
    found = []
    for folder in texts:
        monkeypatch.chdir(tmp_path / folder)
        (search,) = tools_from_config([{"kind": "local_search", "index": "index"}])
        found.append(call(search, query="sun moon")[0])
    assert "sun" in found[0]
    assert "moon" in found[1]


def test_many_threads_make_a_tool_once(install):
    slow = MODULE.replace("    made.append", "    import time\n    time.sleep(0.2)\n    made.append")
    install("slow_tools", slow, {"slow": "slow_tools:slow_factory"})
    results: list[Tool] = []
    config = [{"kind": "installed", "name": "slow"}]
    threads = [threading.Thread(target=lambda: results.extend(tools_from_config(config))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(results) == 32
    assert len({id(one) for one in results}) == 1
    assert len(sys.modules["slow_tools"].made) == 1


def test_a_slow_entry_holds_up_nobody_else(install):
    install("slow_tools", MODULE.replace("    made.append", "    import time\n    time.sleep(1.5)\n    made.append"))
    install("announcer", "", {"slow": "slow_tools:slow_factory"})
    thread = threading.Thread(target=tools_from_config, args=([{"kind": "installed", "name": "slow"}],))
    thread.start()
    time.sleep(0.3)
    tools_from_config([{"kind": "function", "function": "slow_tools:lookup"}])
    assert thread.is_alive(), "the quick tool was there before the slow one"
    thread.join(10)


def test_a_failed_entry_can_be_mended(install, tmp_path):
    config = [{"kind": "function", "function": "late_tools:lookup"}]
    with pytest.raises(ValueError, match="cannot import late_tools"):
        tools_from_config(config)
    install("late_tools", MODULE)
    assert tools_from_config(config)[0].name == "lookup"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own():
    (mine,) = tools_from_config([LIVE_EXPERT])
    child = os.fork()
    if child == 0:
        os._exit(0 if tools_from_config([LIVE_EXPERT])[0] is not mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tools_from_config([LIVE_EXPERT])[0] is mine


# --- Tools of other packages ---


ANNOUNCED = {
    "city_lookup": "plugin_tools:lookup",
    "both": "plugin_tools:both",
    "greeter": "plugin_tools:slow_factory",
    "needy": "plugin_tools:needy_factory",
    "broken": "plugin_tools:broken_factory",
}


def test_a_tool_of_a_package(install):
    install("plugin_tools", MODULE, ANNOUNCED)
    (lookup,) = tools_from_config([{"kind": "installed", "name": "city_lookup", "price": {"per_call_usd": 0.25}}])
    text, record = call(lookup, city="Oslo")
    assert (lookup.name, text, record["cost_usd"]) == ("lookup", "709000", 0.25)
    twice = [{"kind": "installed", "name": "city_lookup"}] * 2
    with pytest.raises(ValueError, match=r"two tools are named 'lookup'; give one another name by `alias`"):
        tools_from_config(twice)
    (alias,) = tools_from_config([{"kind": "installed", "name": "city_lookup", "alias": "atlas"}])
    assert alias.name == "atlas"
    assert len(tools_from_config([{"kind": "installed", "name": "both"}])) == 2


def test_a_packages_function_makes_tools_of_the_entrys_keys(install):
    install("plugin_tools", MODULE, ANNOUNCED)
    greeter = {"kind": "installed", "name": "greeter"}
    assert call(tools_from_config([greeter])[0])[0] == "hello"
    (polite,) = tools_from_config([greeter | {"greeting": "good evening", "latency_s": 2}])
    assert (call(polite)[0], polite.latency_s) == ("good evening", 2.0)
    with pytest.raises(ValueError, match=r"tools\[0\].greting: the installed tool 'greeter'.*did you mean 'greeting'"):
        tools_from_config([greeter | {"greting": "x"}])
    with pytest.raises(ValueError, match=r"tools\[0\]: the installed tool 'needy' needs 'greeting'"):
        tools_from_config([{"kind": "installed", "name": "needy"}])
    with pytest.raises(ValueError, match=r"tools\[0\]: the factory is closed"):
        tools_from_config([{"kind": "installed", "name": "broken"}])
    with pytest.raises(ValueError, match=r"tools\[0\].greeting"):
        tools_from_config([{"kind": "installed", "name": "city_lookup", "greeting": "x"}])
    with pytest.raises(ValueError, match=r"tools\[0\].alias: it stands for 2 tools"):
        tools_from_config([{"kind": "installed", "name": "both", "alias": "x"}])


def test_a_broken_package_spoils_its_own_tools_alone(install):
    install("plugin_tools", MODULE, ANNOUNCED)
    install("bad_tools", "raise RuntimeError('no luck')", {"bad": "bad_tools:x"})
    install("old_tools", "x = 1", {"old": "old_tools:gone"})
    by_name = {one.name: one for one in list_installed_tools()}
    assert "RuntimeError: no luck" in by_name["bad"].error
    assert "gone" in by_name["old"].error
    assert (by_name["city_lookup"].error, by_name["city_lookup"].package) == ("", "plugin_tools")
    assert tools_from_config([{"kind": "installed", "name": "city_lookup"}])[0].name == "lookup"
    with pytest.raises(ValueError, match=r"tools\[0\].name: tool 'bad' \(bad_tools:x of bad_tools\).*no luck"):
        tools_from_config([{"kind": "installed", "name": "bad"}])


def test_near_misses_and_two_packages_of_one_name(install):
    install("plugin_tools", MODULE, ANNOUNCED)
    with pytest.raises(ValueError, match="did you mean 'city_lookup'"):
        tools_from_config([{"kind": "installed", "name": "city_lokup"}])
    install("rival_tools", MODULE, {"city_lookup": "rival_tools:lookup"})
    with pytest.raises(ValueError, match="both announce a tool 'city_lookup'"):
        tools_from_config([{"kind": "installed", "name": "city_lookup"}])


def test_all_kinds_are_tried_here():
    assert set(KINDS) == {"expert", "web_search", "local_search", "python", "mcp", "function", "installed"}
