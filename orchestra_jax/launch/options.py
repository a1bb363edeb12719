"""What the command line says beside the config, and whether it can be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from orchestra_jax.config import ConfigError, RunConfig
from orchestra_jax.launch.needs import is_shared
from orchestra_jax.launch.topology import Slice, parse_topology

Target = Literal["gke", "xpk", "tpu-vm", "slurm"]
TARGETS: tuple[str, ...] = get_args(Target)

MAX_NAME_CHARS = 40
"""Pods are named NAME-slice-SLICE-HOST-xxxxx, and a host name has at most 63 characters."""

_MOUNT_FORMS = {
    "gke": "CLAIM:/path (a PersistentVolumeClaim)",
    "xpk": "STORAGE:/path (as `xpk storage create` names it)",
    "tpu-vm": "HOST:/export:/path (NFS)",
    "slurm": "/path",
}


@dataclass(frozen=True)
class LaunchOptions:
    """A launch but for its config.

    Raises:
      ConfigError: a name or the image is missing or not usable.
    """

    target: Target
    topology: str
    """A slice, "v5p:4x4x4", or the GPUs of a node, "h100:8"."""
    num_slices: int = 1
    """Slices, or nodes with GPUs."""
    image: str | None = None
    """Container image, with registry and tag. SLURM does without."""
    name: str = "orchestra"
    """Of everything that is made."""
    mount: str | None = None
    """What all hosts share, SOURCE:PATH; see `mount_of`."""
    spot: bool = False
    """Cheaper machines that may be taken back at any moment."""
    folder: str = "."
    """Where the files will lie, for the commands that name them."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"--target must be one of {', '.join(TARGETS)}, not {self.target!r}")
        if self.num_slices < 1:
            raise ConfigError(f"--num-slices must be at least 1, not {self.num_slices}")
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > MAX_NAME_CHARS:
            raise ConfigError(
                f"--name {self.name!r} must be 1 to {MAX_NAME_CHARS} small letters, digits and '-', a letter first"
            )
        if self.image is None and self.target != "slurm":
            raise ConfigError(
                f"--target {self.target} runs a container: name its image with --image, for example "
                "--image us-docker.pkg.dev/MY_PROJECT/orchestra/orchestra:1"
            )
        if self.image is not None and not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._/:@-]*", self.image):
            raise ConfigError(f"--image {self.image!r} is no image name (registry/path:tag)")


def check_slice(options: LaunchOptions) -> Slice:
    """The slice of the options; ConfigError if there is none such, or not at this target."""
    slice_ = parse_topology(options.topology)
    if (slice_.tpu is None) != (options.target == "slurm"):
        better = "slurm" if slice_.tpu is None else "gke, xpk or tpu-vm"
        raise ConfigError(f"--target {options.target} has no {slice_.kind}: use --target {better}")
    if options.target == "tpu-vm" and slice_.tpu and slice_.tpu.runtime is None:
        raise ConfigError(f"{slice_.kind} is rented through GKE only: use --target gke or xpk")
    if options.target == "xpk" and slice_.kind == "v5e" and slice_.num_chips < 8:
        raise ConfigError(f"xpk knows no {options.topology}: use --target gke, or v5e:2x4 and larger")
    if options.target == "gke" and options.num_slices > 1 and slice_.num_hosts == 1:
        raise ConfigError(
            f"GKE joins slices of several hosts only, and {options.topology} is one host: take a larger topology"
        )
    return slice_


def mount_of(options: LaunchOptions) -> tuple[str, str | None]:
    """Source and path of `mount`: a source is wanted, but for slurm, where the path is there already.

    Without a mount: "" and None. ConfigError if it has another form.
    """
    if options.mount is None:
        return "", None
    source, _, path = options.mount.rpartition(":")
    well_formed = re.fullmatch(r"[A-Za-z0-9._:/-]+", options.mount) and re.fullmatch(r"(/[^/]+)+", path)
    if not well_formed or bool(source) != (options.target != "slurm"):
        raise ConfigError(f"--mount {options.mount!r}: --target {options.target} wants {_MOUNT_FORMS[options.target]}")
    return source, path


def check_output(config: RunConfig, options: LaunchOptions, mount_path: str | None) -> None:
    """ConfigError if the run's folder would be lost with a container, or be another one on each host."""
    if "://" in config.output_dir:
        raise ConfigError(
            f"output_dir {config.output_dir!r}: a run's folder must lie in a file system that all hosts share: give a "
            f"folder below a mount (the bucket's, if you like) and --mount {_MOUNT_FORMS[options.target]}"
        )
    is_one_node = options.target == "slurm" and options.num_slices == 1
    if is_one_node or is_shared(config.output_dir, mount_path):
        return
    why = (
        f"{options.num_slices} nodes write to it"
        if options.target == "slurm"
        else "a container's disk is lost with it, and no other host sees it"
    )
    raise ConfigError(
        f"output_dir {config.output_dir!r} is a local path, but {why}: give a folder on what all "
        f"hosts share and --mount {_MOUNT_FORMS[options.target]}"
    )
