"""Rendered manifests and scripts: valid by their schemas, right in their numbers, refused where they cannot work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from orchestra_jax.config import ConfigError, RunConfig, load_config, parse_config
from orchestra_jax.launch import Launch, LaunchOptions, parse_topology, render
from orchestra_jax.launch.options import TARGETS
from tests.launch.schemas import BY_KIND

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
IMAGE = "us-docker.pkg.dev/p/orchestra/orchestra:1"
MOUNT = {
    "gke": "claim:/mnt/shared",
    "xpk": "store:/mnt/shared",
    "tpu-vm": "10.0.0.2:/x:/mnt/shared",
    "slurm": "/mnt/shared",
}
TOPOLOGY = {"gke": "v5p:4x4x4", "xpk": "v5p:4x4x4", "tpu-vm": "v6e:8x8", "slurm": "h100:8"}

TOOLS: list[dict[str, Any]] = [
    {"kind": "expert", "name": "big", "model": "gpt-5", "api_key_env": "BIG_KEY"},
    {"kind": "local_search", "index": "/mnt/shared/wiki.index", "top_k": 2, "price": {"per_call_usd": 0.001}},
    {"kind": "web_search"},
    {"kind": "mcp", "command": ["uvx", "mcp-server-time"], "env": {"CLOCK_TOKEN": None}, "include": ["now"]},
    {"kind": "mcp", "url": "https://host/mcp", "headers_env": {"X-Api-Key": "HOST_KEY"}},
]


def tool_config(tools: list[dict[str, Any]] = TOOLS, **kwargs: Any) -> RunConfig:
    return parse_config(
        {
            "output_dir": "/mnt/shared/run",
            "env": {"id": "orchestra/QA-v0", "kwargs": {"path": "/mnt/shared/q.jsonl", "tools": tools, **kwargs}},
            "model": {"path": "/mnt/shared/qwen3-8b"},
        }
    )


def options(target: Any, **changes: Any) -> LaunchOptions:
    given = {"image": IMAGE, "name": "run", "mount": MOUNT[target], "topology": TOPOLOGY[target], **changes}
    return LaunchOptions(target=target, **given)


def documents(launch: Launch) -> list[dict[str, Any]]:
    return [
        part
        for name, text in launch.files.items()
        if name in ("jobset.yaml", "tools.yaml")
        for part in yaml.safe_load_all(text)
    ]


def jobset(launch: Launch) -> dict[str, Any]:
    return next(part for part in documents(launch) if part["kind"] == "JobSet")


def pod_of(launch: Launch) -> dict[str, Any]:
    return jobset(launch)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def check(launch: Launch) -> None:
    """Manifests against their schemas, scripts by bash, the config by ourselves."""
    for part in documents(launch):
        jsonschema.Draft202012Validator(BY_KIND[part["kind"]]).validate(part)
    for name, text in launch.files.items():
        assert "{{" not in text.replace("{{.State.Running}}", ""), name
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), name
        if name.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    parse_config(yaml.safe_load(launch.files["config.yaml"]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_existing_configs_render_for_every_target(file, target):
    launch = render(load_config(file, ["output_dir=/mnt/shared/run"]), options(target))
    check(launch)
    assert "tools.yaml" not in launch.files


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize(
    ("target", "topology", "num_slices"),
    [
        ("gke", "v4:2x2x1", 1),
        ("gke", "v5e:16x16", 1),
        ("gke", "v5p:4x4x4", 4),
        ("gke", "v6e:2x4", 1),
        ("gke", "tpu7x:4x4x8", 2),
        ("xpk", "v6e:8x8", 1),
        ("xpk", "tpu7x:2x2x2", 2),
        ("tpu-vm", "v5e:4x4", 1),
        ("tpu-vm", "v5p:4x4x4", 2),
        ("slurm", "h200:8", 1),
        ("slurm", "h100:4", 16),
    ],
)
def test_every_target_renders_its_topologies(target, topology, num_slices, spot):
    tools = TOOLS[1:2] if target == "xpk" else TOOLS
    launch = render(tool_config(tools), options(target, topology=topology, num_slices=num_slices, spot=spot))
    check(launch)
    if target == "gke":
        slice_, spec = parse_topology(topology), jobset(launch)["spec"]["replicatedJobs"][0]
        job = spec["template"]["spec"]
        assert spec["replicas"] == num_slices
        assert job["parallelism"] == job["completions"] == slice_.num_hosts
        (train,) = pod_of(launch)["containers"]
        assert (
            train["resources"]["limits"] == train["resources"]["requests"] == {"google.com/tpu": slice_.chips_per_host}
        )
        assert pod_of(launch)["nodeSelector"].get("cloud.google.com/gke-spot") == ("true" if spot else None)
        assert pod_of(launch).get("hostNetwork", False) == (num_slices > 1)


def test_the_strict_schemas_find_a_misspelt_field_and_a_wrong_type():
    launch = render(tool_config(), options("gke"))
    for change in ({"terminationGracePeriodSecond": 1}, {"restartPolicy": "never"}, {"hostNetwork": "yes"}):
        manifest = jobset(launch)
        manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].update(change)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(BY_KIND["JobSet"]).validate(manifest)


def test_nodes_are_selected_by_accelerator_and_topology():
    selector = pod_of(render(tool_config(), options("gke", topology="v5e:16x16")))["nodeSelector"]
    assert selector == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
    }


def test_preemption_restarts_for_nothing_a_mistake_ends_and_a_crash_counts():
    spec = jobset(render(tool_config(), options("gke")))["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 300

    def action(reason: str, message: str) -> str:
        # As JobSet's controller does it: the first rule whose reason and pattern both fit.
        for rule in spec["failurePolicy"]["rules"]:
            if reason in rule["onJobFailureReasons"] and any(
                re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]
            ):
                return rule["action"]
        return "RestartJobSet"

    # Messages as Kubernetes' Job controller writes them (JobSet KEP 262, story 5).
    preempted = "Pod default/run-slice-0-3 has condition DisruptionTarget matching FailJob rule at index 0"
    mistake = "Container train for pod default/run-slice-0-3 failed with exit code 2 matching FailJob rule at index 1"
    assert action("PodFailurePolicy", preempted) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action("PodFailurePolicy", mistake) == "FailJobSet"
    assert action("PodFailurePolicy", mistake.replace("code 2 ", "code 23 ")) == "RestartJobSet"
    assert action("BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"
    assert spec["failurePolicy"]["maxRestarts"] > 0


def test_the_machines_get_the_config_that_was_given_with_its_overrides(tmp_path):
    config = load_config(CONFIGS[0], ["output_dir=/mnt/shared/run", "train.steps=7"])
    launch = render(config, options("gke", mount="claim:/mnt/shared"))
    in_manifest = next(part for part in documents(launch) if part["kind"] == "ConfigMap")["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(in_manifest)
    assert load_config(tmp_path / "config.yaml") == config
    assert yaml.safe_load(launch.files["config.yaml"]) == yaml.safe_load(in_manifest)


# ----------------------------------------------------------------------------------------------------------
# environment hosts and keys
# ----------------------------------------------------------------------------------------------------------


def test_tools_with_files_or_programs_move_to_environment_hosts():
    launch = render(tool_config(), options("gke"))
    tools = yaml.safe_load(launch.files["config.yaml"])["env"]["kwargs"]["tools"]
    assert tools == [
        TOOLS[0],
        {"kind": "mcp", "url": "http://run-tools:8000/0/mcp", "price": {"per_call_usd": 0.001}, "latency_s": 0.05},
        TOOLS[2],
        {"kind": "mcp", "url": "http://run-tools:8000/1/mcp"},
        TOOLS[4],
    ]
    kinds = {part["kind"]: part for part in yaml.safe_load_all(launch.files["tools.yaml"])}
    assert yaml.safe_load(kinds["ConfigMap"]["data"]["tools.yaml"]) == [TOOLS[1], TOOLS[3]]
    service, deployment = kinds["Service"], kinds["Deployment"]
    assert service["metadata"]["name"] == "run-tools"
    assert service["spec"]["ports"][0]["port"] == 8000
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "orchestra_jax.launch.tool_server" in container["command"]
    assert "google.com/tpu" not in str(deployment)
    assert pod_of(launch)["initContainers"][0]["name"] == "wait-for-tools"
    assert any("run-tools" in note for note in launch.notes)


def test_a_tool_of_training_and_evaluation_is_hosted_once():
    config = tool_config([TOOLS[1]])
    evaluated = config.env.model_copy(update={"eval_kwargs": {"split": "test", "tools": [TOOLS[1], TOOLS[3]]}})
    launch = render(config.model_copy(update={"env": evaluated}), options("gke"))
    env = yaml.safe_load(launch.files["config.yaml"])["env"]
    urls = [tool["url"] for tool in env["kwargs"]["tools"] + env["eval_kwargs"]["tools"]]
    assert urls == [f"http://run-tools:8000/{index}/mcp" for index in (0, 0, 1)]


def test_keys_come_by_reference_and_each_only_where_it_is_used():
    config = tool_config(
        [*TOOLS, {"kind": "expert", "name": "own", "model": "m", "api_key_env": None}], judge={"model": "j"}
    )
    launch = render(config, options("gke"))

    def references(container: dict[str, Any]) -> set[str]:
        return {entry["name"] for entry in container.get("env", ()) if "valueFrom" in entry}

    deployment = next(part for part in documents(launch) if part["kind"] == "Deployment")
    (tools,) = deployment["spec"]["template"]["spec"]["containers"]
    assert references(pod_of(launch)["containers"][0]) == {"BIG_KEY", "HOST_KEY", "OPENAI_API_KEY", "TAVILY_API_KEY"}
    assert references(tools) == {"CLOCK_TOKEN"}
    secret = pod_of(launch)["containers"][0]["env"][-1]["valueFrom"]["secretKeyRef"]
    assert secret["name"] == "run-keys"
    assert "kubectl create secret generic run-keys --from-env-file=keys.env" in launch.files["commands.sh"]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"kind": "mcp", "command": ["x"], "env": {"CLOCK_TOKEN": "s3cret"}}, "CLOCK_TOKEN: no keys"),
        ({"kind": "expert", "name": "a", "model": "m", "api_key": "s3cret"}, "api_key: no keys"),
        ({"kind": "expert", "name": "a", "model": "m", "api_key_env": "sk-s3cret"}, "name no environment variable"),
    ],
)
def test_a_key_in_the_config_is_refused_and_not_shown(tool, message):
    with pytest.raises(ConfigError, match=message) as caught:
        render(tool_config([tool]), options("gke"))
    assert "s3cret" not in str(caught.value)


def test_a_market_needs_no_keys_and_no_environment_hosts():
    launch = render(load_config(CONFIGS[0], ["output_dir=/mnt/shared/r"]), options("gke", mount="claim:/mnt/shared"))
    assert "secret" not in launch.files["commands.sh"]
    assert [entry["name"] for entry in pod_of(launch)["containers"][0]["env"]] == ["JAX_COMPILATION_CACHE_DIR"]
    assert "initContainers" not in pod_of(launch)


def test_tpu_vms_fetch_keys_from_the_secret_manager_and_slurm_from_the_environment():
    vm = render(tool_config(), options("tpu-vm")).files["worker.sh"]
    assert 'BIG_KEY="$(gcloud secrets versions access latest --secret=BIG_KEY)"' in vm
    assert re.search(r"^  -e BIG_KEY \\$", vm, re.MULTILINE)
    assert ': "${BIG_KEY:?' in render(tool_config(), options("slurm")).files["slurm.sh"]


# ----------------------------------------------------------------------------------------------------------
# commands of the other targets
# ----------------------------------------------------------------------------------------------------------


def test_node_pools_have_the_machines_of_the_slice():
    commands = render(tool_config(), options("gke", num_slices=2, spot=True)).files["commands.sh"]
    (create,) = [line for line in commands.splitlines() if "node-pools create" in line]
    assert create.startswith("for i in 0 1; do")
    for flag in ("--machine-type=ct5p-hightpu-4t", "--tpu-topology=4x4x4", "--num-nodes=16", "--spot"):
        assert flag in create
    single = render(tool_config(), options("gke", topology="v6e:2x4")).files["commands.sh"]
    assert "--tpu-topology" not in single
    assert "--machine-type=ct6e-standard-8t --num-nodes=1" in single
    ironwood = render(tool_config(), options("gke", topology="tpu7x:4x4x4")).files["commands.sh"]
    assert "--accelerator-topology=4x4x4" in ironwood
    assert "--placement-policy=run" in ironwood
    assert "--tpu-topology" not in ironwood


@pytest.mark.parametrize(
    ("topology", "num_slices", "flags"),
    [
        ("v5p:4x4x4", 1, ["--type=v5p --topology=4x4x4", "--runtime-version=v2-alpha-tpuv5 ", '--node-id="$NAME"']),
        ("v5e:16x16", 1, ["--accelerator-type=v5litepod-256", "--runtime-version=v2-alpha-tpuv5-lite "]),
        ("v6e:8x8", 4, ["--accelerator-type=v6e-64", '--node-count=4 --node-prefix="$NAME"', "--spot"]),
    ],
)
def test_queued_resources_name_the_slice_as_the_tpu_api_does(topology, num_slices, flags):
    script = render(tool_config(), options("tpu-vm", topology=topology, num_slices=num_slices, spot=num_slices > 1))
    for flag in flags:
        assert flag in script.files["tpu-vm.sh"]


def test_xpk_names_the_type_by_shape():
    script = render(tool_config([TOOLS[1]]), options("xpk", topology="v5e:8x8", num_slices=2)).files["xpk.sh"]
    assert "--tpu-type=v5litepod-8x8 --num-slices=2" in script
    assert "--storage=store" in script
    assert "--restart-on-exit-codes=1 " in script
    assert "parallel-containers" not in script
    # Two processes a host would not be the ones that jax.distributed counts.
    ironwood = render(tool_config([]), options("xpk", topology="tpu7x:2x2x2")).files["xpk.sh"]
    assert "--no-use-parallel-containers" in ironwood


def test_the_image_has_the_accelerators_jax():
    assert "jax[tpu]==" in render(tool_config(), options("gke")).files["Dockerfile"]
    assert "jax[cuda12]==" in render(tool_config(), options("slurm")).files["Dockerfile"]
    assert "Dockerfile" not in render(tool_config(), options("slurm", image=None)).files


# ----------------------------------------------------------------------------------------------------------
# what cannot work
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("gke", {"image": None}, "name its image with --image"),
        ("gke", {"image": "my image"}, "no image name"),
        ("gke", {"name": "Run_1"}, "small letters"),
        ("gke", {"name": "r" * 41}, "1 to 40"),
        ("gke", {"num_slices": 0}, "at least 1"),
        ("gke", {"topology": "h100:8"}, "use --target slurm"),
        ("slurm", {"topology": "v5p:4x4x4"}, "use --target gke, xpk or tpu-vm"),
        ("tpu-vm", {"topology": "tpu7x:2x2x1"}, "through GKE only"),
        ("gke", {"topology": "v6e:2x4", "num_slices": 2}, "slices of several hosts only"),
        ("xpk", {"topology": "v5e:2x2"}, "xpk knows no v5e:2x2"),
        ("gke", {"mount": "/mnt/shared"}, "wants CLAIM:/path"),
        ("gke", {"mount": "claim:shared"}, "wants CLAIM:/path"),
        ("slurm", {"mount": "claim:/mnt/shared"}, "wants /path"),
        ("gke", {"mount": "claim:/mnt/$(x)"}, "wants CLAIM:/path"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_words(target, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        render(tool_config([]), options(target, **changes))


@pytest.mark.parametrize(
    ("target", "output_dir", "mount", "num_slices", "fits"),
    [
        ("gke", "runs/x", None, 1, False),
        ("gke", "/mnt/sharedish/x", "claim:/mnt/shared", 1, False),
        ("gke", "/mnt/shared/x", "claim:/mnt/shared", 1, True),
        ("tpu-vm", "runs/x", None, 1, False),
        ("slurm", "runs/x", None, 1, True),
        ("slurm", "runs/x", None, 2, False),
        ("slurm", "/mnt/shared/x", "/mnt/shared", 2, True),
    ],
)
def test_the_run_folder_must_be_one_that_all_hosts_share(target, output_dir, mount, num_slices, fits):
    config = tool_config([]).model_copy(update={"output_dir": output_dir})
    given = options(target, mount=mount, num_slices=num_slices)
    if fits:
        render(config, given)
    else:
        with pytest.raises(ConfigError, match=r"output_dir .* is a local path.*--mount"):
            render(config, given)


@pytest.mark.parametrize("output_dir", ["gs://bucket/x", "s3://bucket/x"])
def test_an_object_store_is_no_run_folder(output_dir):
    config = tool_config([]).model_copy(update={"output_dir": output_dir})
    with pytest.raises(ConfigError, match=r"output_dir '..?://bucket/x': .*file system.*--mount CLAIM:/path"):
        render(config, options("gke"))


def test_xpk_does_not_get_keys_in_plain_text():
    with pytest.raises(ConfigError, match=r"BIG_KEY.*--target gke"):
        render(tool_config(), options("xpk"))


def test_notes_name_files_and_urls_that_may_be_missing_on_the_machines():
    config = tool_config([{"kind": "expert", "name": "own", "model": "m", "base_url": "http://127.0.0.1:8000/v1"}])
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "models/x"})})
    notes = "\n".join(render(config, options("gke", spot=True)).notes)
    assert "model.path is 'models/x'" in notes
    assert "env.kwargs.path" not in notes
    assert "http://127.0.0.1:8000/v1 will be the training host itself" in notes
    assert "train.checkpoint_every (25 steps)" in notes
