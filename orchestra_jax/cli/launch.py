"""`orchestra launch`: from a config to the files and commands that start it on rented machines. It calls no cloud."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestra_jax.config import ConfigError, load_config
from orchestra_jax.launch import LaunchOptions, render
from orchestra_jax.launch.options import MAX_NAME_CHARS, Target


def launch(
    config: str,
    overrides: Sequence[str] = (),
    *,
    target: Target,
    topology: str,
    num_slices: int = 1,
    image: str | None = None,
    name: str | None = None,
    mount: str | None = None,
    spot: bool = False,
    output: str | None = None,
    dry_run: bool = False,
) -> None:
    """Writes the files of a launch and prints the commands to run; with `dry_run` prints the files too, writes nothing.

    Commands (and files, with `dry_run`) go to standard output, what to see to goes to standard error.

    Args:
      config: YAML config of the run; what the machines get is it with the overrides, as `config.yaml`.
      overrides: `key.path=value`, as for training.
      target: "gke", "xpk" or "tpu-vm" (TPUs), or "slurm" (GPUs).
      topology: a slice, "v5p:4x4x4", or the GPUs of a node, "h100:8".
      num_slices: slices, or nodes with GPUs.
      image: container image; slurm does without.
      name: of everything that is made; default: the config file's.
      mount: what all hosts share, SOURCE:PATH; see `orchestra_jax.launch.options.mount_of`.
      spot: cheaper machines that may be taken back at any moment.
      output: folder for the files; default: runs/launch/NAME.
      dry_run: write nothing.

    Raises:
      ConfigError: the user's mistake, in one line; nothing was written then.
    """
    name = name or _name_of(config)
    folder = Path(output or f"runs/launch/{name}")
    options = LaunchOptions(target, topology, num_slices, image, name, mount, spot, str(folder))
    made = render(load_config(config, list(overrides)), options)
    commands = made.files["commands.sh"]
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    if dry_run:
        for file, text in made.files.items():
            print(f"==> {file} <==\n{text}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in made.files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror or error}") from None
    print(f"wrote {', '.join(made.files)} to {folder}", file=sys.stderr)
    print(commands, end="")


def _name_of(config: str) -> str:
    """The config file's name as a host name."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(config).stem.lower())[:MAX_NAME_CHARS].strip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:MAX_NAME_CHARS].strip("-")
