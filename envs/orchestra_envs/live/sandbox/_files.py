"""Removing what a program left behind; for the launcher, and for its caller when the launcher was killed."""

import os
import time


def remove_tree(top: str) -> None:
    """Remove a directory whose contents an enemy chose: no link is followed, no depth is too great.

    Nothing of the enemy runs any more. Directories inside directories are moved up and taken in turn, so that no
    path gets long.
    """
    serial = 0
    while True:
        with os.scandir(top) as entries:
            found = list(entries)
        if not found:
            break
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            with os.scandir(entry.path) as below:
                inner = list(below)
            for child in inner:
                if child.is_dir(follow_symlinks=False):
                    os.chmod(child.path, 0o700)  # a directory without write permission cannot be moved
                    serial += 1
                    os.rename(child.path, f"{top}/.{os.getpid()}-{serial}-{time.monotonic_ns()}")
                else:
                    os.unlink(child.path)
            os.rmdir(entry.path)
    os.rmdir(top)
