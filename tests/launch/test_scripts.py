"""The rendered scripts do what they say, against stand-ins for gcloud, docker and SLURM."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestra_jax.launch import LaunchOptions, render
from tests.launch.test_render import options, tool_config

GCLOUD = r"""#!/usr/bin/env bash
# Queued resources in a file: `state` holds one. `plan` has what happens at each `docker wait`, a line each.
echo "$@" >> calls
verb=$4
case "$verb" in
  describe) cat state 2>/dev/null || exit 1 ;;
  create) echo ACTIVE > state ;;
  delete) rm -f state ;;
  ssh)
    [[ "$*" == *"docker wait"* ]] || exit 0
    read -r next < plan && sed -i 1d plan
    if [ "$next" = preempt ]; then echo SUSPENDED > state; echo 130; exit 255; fi
    printf '%s\n' $next ;;
esac
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    file = folder / "bin" / name
    file.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(folder), "PROJECT": "p", "ZONE": "z", **variables}
    return subprocess.run(["bash", *command], cwd=folder, env=env, text=True, capture_output=True, timeout=60)


def write(folder: Path, given: LaunchOptions) -> None:
    for name, text in render(tool_config(), given).files.items():
        (folder / name).write_text(text)


def calls(folder: Path, verb: str) -> list[str]:
    file = folder / "calls"
    return [line for line in file.read_text().splitlines() if f" {verb} " in f" {line} "] if file.exists() else []


@pytest.fixture
def vm(tmp_path: Path) -> Path:
    write(tmp_path, options("tpu-vm"))
    stand_in(tmp_path, "gcloud", GCLOUD)
    stand_in(tmp_path, "sleep", "exit 0")
    return tmp_path


@pytest.mark.parametrize(
    ("plan", "code", "created", "kept"),
    [
        (["0 0"], 0, 1, False),
        (["preempt", "0 0"], 0, 2, False),  # taken back: asked for anew
        (["1 0", "130 130", "0 0"], 0, 1, False),  # a crash on one host: started again on the same machines
        (["2 2"], 2, 1, True),  # a mistake in the config: trying again would not mend it
        (["1 1"] * 25, 1, 1, True),  # a program at fault does not burn money for ever
    ],
)
def test_tpu_vms_are_rented_again_after_preemption_and_given_back_at_the_end(vm, plan, code, created, kept):
    (vm / "plan").write_text("\n".join(plan) + "\n")
    done = run(vm, "tpu-vm.sh", "run")
    assert done.returncode == code, done.stderr
    assert len(calls(vm, "create")) == created
    assert (vm / "state").exists() == kept


def test_stopping_tpu_vms_lets_the_run_save_and_gives_them_back(vm):
    (vm / "state").write_text("ACTIVE\n")
    assert run(vm, "tpu-vm.sh", "stop").returncode == 0
    order = (vm / "calls").read_text()
    assert "docker stop --time=600 run" in order
    assert order.index("docker stop") < order.index("delete")
    assert not (vm / "state").exists()


def test_a_tpu_vm_starts_its_container_with_keys_by_name_and_only_once(tmp_path):
    write(tmp_path, options("tpu-vm"))
    stand_in(tmp_path, "gcloud", 'case "$*" in secrets*) echo s3cret ;; esac')
    stand_in(tmp_path, "sudo", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
    stand_in(tmp_path, "mountpoint", "exit 0")
    stand_in(tmp_path, "docker", 'echo "docker $*" >> calls; [ "$1" = run ] && echo "$BIG_KEY" >> keys; exit 0')
    assert run(tmp_path, "worker.sh").returncode == 0
    (started,) = calls(tmp_path, "run --detach")
    assert "-e BIG_KEY" in started
    assert "s3cret" not in started
    assert (tmp_path / "keys").read_text() == "s3cret\n"
    assert "--privileged --net=host" in started
    assert started.endswith("orchestra train /etc/orchestra/config.yaml")
    stand_in(tmp_path, "docker", '[ "$1" = inspect ] && echo true; echo "docker $*" >> again; exit 0')
    assert run(tmp_path, "worker.sh").returncode == 0
    assert "docker run" not in (tmp_path / "again").read_text()


KEYS = dict.fromkeys(("BIG_KEY", "OPENAI_API_KEY", "TAVILY_API_KEY", "CLOCK_TOKEN", "HOST_KEY"), "x")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (130, True), (143, True)])
def test_slurm_requeues_a_run_that_was_told_to_save_and_no_other(tmp_path, code, requeued):
    write(tmp_path, options("slurm", num_slices=4, folder="."))
    stand_in(tmp_path, "srun", f'echo "srun $*" >> calls; exit {code}')
    stand_in(tmp_path, "scontrol", 'echo "scontrol $*" >> calls')
    done = run(tmp_path, "slurm.sh", SLURM_JOB_ID="17", **KEYS)
    assert done.returncode == code
    (started,) = calls(tmp_path, "srun")
    assert started.endswith("orchestra train ./config.yaml")
    assert "--container-image=us-docker.pkg.dev#p/orchestra/orchestra:1" in started
    assert calls(tmp_path, "scontrol") == (["scontrol requeue 17"] if requeued else [])


def test_slurm_passes_sigterm_on_and_waits_for_the_run_to_save(tmp_path):
    write(tmp_path, options("slurm", folder="."))
    # The step saves for a while after SIGTERM, as srun passes it on; the shell that gets it too must not die before.
    stand_in(tmp_path, "srun", "kill -TERM $PPID; sleep 0.3; echo saved > saved; exit 130")
    stand_in(tmp_path, "scontrol", 'echo "scontrol $*" >> calls')
    assert run(tmp_path, "slurm.sh", SLURM_JOB_ID="17", **KEYS).returncode == 130
    assert (tmp_path / "saved").exists()
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 17"]


def test_slurm_says_which_key_is_missing(tmp_path):
    write(tmp_path, options("slurm", folder="."))
    done = run(tmp_path, "slurm.sh", SLURM_JOB_ID="17", **{**KEYS, "BIG_KEY": ""})
    assert done.returncode != 0
    assert "BIG_KEY" in done.stderr


def test_all_gpus_of_a_node_belong_to_its_one_process(tmp_path):
    """JAX, started by SLURM, would take the one of SLURM_LOCALID; the script's variable names them all."""
    script = render(tool_config([]), options("slurm", topology="h100:8")).files["slurm.sh"]
    (line,) = [line for line in script.splitlines() if line.startswith("export JAX_LOCAL_DEVICE_IDS=")]
    code = "import logging, jax; logging.basicConfig(level=logging.INFO); jax.distributed.initialize()"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {
        "JAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "JAX_PLATFORMS": "cpu",
    }
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "JAX_"))}
    env = {**clean, **slurm, "JAX_LOCAL_DEVICE_IDS": line.partition("=")[2]}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert re.search(r"visible devices: 0,1,2,3,4,5,6,7$", done.stderr, re.MULTILINE), done.stderr
