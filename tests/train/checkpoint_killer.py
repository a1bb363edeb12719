"""Run by test_checkpoint.py: forks children that save steps 1, 2, 3... and die by SIGKILL at a chosen moment.

Usage: checkpoint_killer.py FOLDER. Each scenario NAME saves into FOLDER/NAME and appends to FOLDER/NAME.log every step
whose save was complete before the child died.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from orchestra_jax.train import checkpoint

KEEP_LATEST = 2
NUM_VALUES = 50_000


def values_of(step):
    return np.random.default_rng(step).random(NUM_VALUES)


def save_forever(name, root):
    store = checkpoint.CheckpointStore(root / name, keep_latest=KEEP_LATEST)
    with (root / f"{name}.log").open("w") as log:
        for step in range(1, 1000):
            store.save(step, {"values": values_of(step)}, {"step": step})
            if name == "save-returned" and step == 3:
                die()
            store.wait()
            log.write(f"{step}\n")
            log.flush()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(function_name, *, at_call, before):
    """Make a function of the module kill the process at its n-th call, before or after it has done its work."""
    original = getattr(checkpoint, function_name)
    calls = 0

    def deadly(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at_call and before:
            die()
        result = original(*args, **kwargs)
        if calls == at_call:
            die()
        return result

    setattr(checkpoint, function_name, deadly)


def die_in_prune():
    """In the middle of the first deletion: half of the old checkpoint's files are gone."""

    def delete_half(folder):
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != checkpoint.MARK_FILE)
        for path in files[::2]:
            path.unlink()
        die()

    checkpoint.shutil.rmtree = delete_half


SCENARIOS = {
    "save-returned": lambda: None,
    "orbax-done": lambda: die_in("_flush_files", at_call=3, before=True),
    "before-mark": lambda: die_in("_commit", at_call=3, before=True),
    "after-mark": lambda: die_in("_commit", at_call=3, before=False),
    "mark-half-written": lambda: setattr(checkpoint.json, "dump", write_half),
    "pruning": die_in_prune,
}
TIMED = (0.05, 0.11, 0.23, 0.42)


def write_half(mark, file, **kwargs):
    text = checkpoint.json.dumps(mark, **kwargs)
    if mark["step"] < 3:
        file.write(text)
        return
    file.write(text[: len(text) // 2])
    file.flush()
    die()


def main():
    root = Path(sys.argv[1])
    # JAX warns about forking with threads; it has started none yet: the parent never touches an array.
    warnings.simplefilter("ignore", RuntimeWarning)
    for name, arm in SCENARIOS.items():
        child = os.fork()
        if child == 0:
            arm()
            save_forever(name, root)
        os.waitpid(child, 0)
    for delay_s in TIMED:
        name = f"after-{delay_s}s"
        child = os.fork()
        if child == 0:
            save_forever(name, root)
        log = root / f"{name}.log"
        while not (log.exists() and log.read_text()):
            time.sleep(0.01)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
