"""Files and commands of a launch, rendered from a config by the templates beside this file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import yaml

from orchestra_jax.config import ConfigError, RunConfig, dump_config
from orchestra_jax.launch.needs import file_paths, host_tools, is_shared, key_names, loopback_urls
from orchestra_jax.launch.options import LaunchOptions, check_output, check_slice, mount_of
from orchestra_jax.launch.topology import Slice

MAX_RESTARTS = 20
"""Restarts after a crash. On GKE preemptions do not count, except where a peer dies before the pod is marked; elsewhere
they do."""

GRACE_S = 600
"""Seconds between SIGTERM and SIGKILL. A run saves after the step under way: minutes of rollouts, then parameters and
two moments in float32, 98 GB for 8B (25 GB a host on four hosts: two minutes at 0.2 GB/s). A spot machine goes within
30 s, whatever stands here."""

JOBSET_VERSION = "v0.10.1"
"""The least that tells a preempted pod from a mistaken config (`onJobFailureMessagePatterns`)."""

TOOLS_PORT = 8000

MAIN_FILE = {"gke": "jobset.yaml", "xpk": "xpk.sh", "tpu-vm": "tpu-vm.sh", "slurm": "slurm.sh"}


@dataclass(frozen=True)
class Launch:
    """What `render` makes."""

    files: dict[str, str]
    """Texts by name. `commands.sh` has what the user runs, from image to tear-down, each line with its reason."""
    notes: tuple[str, ...]
    """What the user has to see to, and what is otherwise than in the config."""


def render(config: RunConfig, options: LaunchOptions) -> Launch:
    """Renders a launch; nothing is written, nobody is called.

    Raises:
      ConfigError: the topology does not exist, or not at this target; an image or storage that all hosts share is
        missing; a key stands in the config.
    """
    slice_ = check_slice(options)
    mount_source, mount_path = mount_of(options)
    check_output(config, options, mount_path)
    hosted: list[dict[str, Any]] = []
    if options.target in ("gke", "xpk"):
        config, hosted = host_tools(config, f"http://{options.name}-tools:{TOOLS_PORT}")
    keys = key_names(config.env.kwargs, config.env.eval_kwargs)
    if options.target == "xpk" and keys:
        raise ConfigError(
            f"the config's tools read {', '.join(keys)}, and xpk can only write keys into the manifest in plain text: "
            "use --target gke, which takes them from a Secret"
        )
    values = {
        "options": options,
        "name": options.name,
        "slice": slice_,
        "tpu": slice_.tpu,
        "tpu_vm_flags": _tpu_vm_flags(slice_),
        "config_yaml": dump_config(config),
        "keys": keys,
        "hosted_yaml": yaml.safe_dump(hosted, sort_keys=False, allow_unicode=True) if hosted else "",
        "hosted_keys": key_names(hosted),
        "mount_source": mount_source,
        "mount_path": mount_path,
        "max_restarts": MAX_RESTARTS,
        "grace_s": GRACE_S,
        "port": TOOLS_PORT,
        "jobset_version": JOBSET_VERSION,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "jax": f"jax[{'tpu' if slice_.tpu else 'cuda12'}]=={version('jax')}",
    }
    names = [f"{options.target}/{MAIN_FILE[options.target]}", f"{options.target}/commands.sh"]
    if options.target == "tpu-vm":
        names.insert(1, "tpu-vm/worker.sh")
    if hosted:
        names.insert(0, "tools.yaml")
    if options.image:
        names[:0] = ["Dockerfile", "Dockerfile.dockerignore"]
    files = {"config.yaml": str(values["config_yaml"])}
    files |= {name.rpartition("/")[2]: _filled(f"{name}.jinja", values) for name in names}
    return Launch(files, tuple(_notes(config, options, hosted, mount_path)))


def _tpu_vm_flags(slice_: Slice) -> str:
    """How `gcloud compute tpus` names the slice; three-dimensional ones by shape, as cores alone are ambiguous."""
    if slice_.tpu is None:
        return ""
    if slice_.tpu.shapes_2d is None:
        return f"--type={slice_.tpu.cloud_name} --topology={slice_.shape}"
    return f"--accelerator-type={slice_.tpu.cloud_name}-{slice_.num_chips}"


def _notes(
    config: RunConfig, options: LaunchOptions, hosted: list[dict[str, Any]], mount_path: str | None
) -> list[str]:
    notes = []
    for key, path in file_paths(config, hosted).items():
        if not is_shared(path, mount_path):
            where = "on every node" if options.target == "slurm" else "in the image (which is built from this folder)"
            notes.append(f"{key} is {path!r}: it must be {where} or on shared storage")
    for url in dict.fromkeys(loopback_urls([config.env.kwargs, config.env.eval_kwargs])):
        notes.append(f"{url} will be the training host itself: nothing listens there unless you start it")
    if hosted:
        kinds = " and ".join(sorted({str(entry["kind"]) for entry in hosted}))
        notes.append(
            f"{kinds} tools move to CPU pods ({options.name}-tools): their latency is measured, network included, and "
            "what an MCP server's command needs must be in the image"
        )
    if options.spot:
        notes.append(
            "spot machines give about 30 s (15 s to pods on GKE): rely on train.checkpoint_every "
            f"({config.train.checkpoint_every} steps), not on the checkpoint at SIGTERM"
        )
    return notes


@cache
def _templates() -> jinja2.Environment:
    """YAML and shell, so nothing is escaped by itself: what goes in is checked (`options`) or goes through a filter."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["quote"] = shlex.quote
    return templates


def _filled(template: str, values: dict[str, Any]) -> str:
    return _templates().get_template(template).render(values)
