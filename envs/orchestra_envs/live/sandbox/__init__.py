"""A Python sandbox that model-written code does not leave: a tool, and the parts it is made of.

    from orchestra_envs.live.sandbox import achieved_isolation, python_tool

    print(achieved_isolation().summary())        # e.g. isolation 'full'
    tool = python_tool(isolation="full", packages=["numpy"], timeout_s=20, memory_mb=512)
    env = gymnasium.make("orchestra/QA-v0", path="questions.jsonl", tools=[tool])

It needs no peer and no root: every call starts a process of its own (about 35 ms), which locks itself up, runs the
code and is gone afterwards with all its children and files. Nothing is shared between calls.

Tiers, each tried at the first use and refused with a ValueError if it is less than what was asked for:

- "full": namespaces of its own (user or, as root, an unused user id; processes, mounts, network, IPC, host name), a
  root directory with the interpreter and the packages read-only and an empty file system of bounded size, and all of
  "kernel". Needs unprivileged user namespaces, or root with CAP_SYS_ADMIN.
- "kernel": Landlock (files, signals), a seccomp filter (no sockets but connected pairs within the call, no io_uring,
  ptrace, mounts, namespaces, keys, BPF, ...; calls newer than the filter do not exist), no_new_privs, and all of
  "limits". Needs Linux 5.13 on x86_64 or aarch64; containers and Kubernetes pods usually permit it. This is the least
  that `python_tool` takes by default.
- "limits": a process of its own with limits; no wall. For code that is trusted and merely clumsy.

Limits at every tier: processor time, memory, files, processes and threads, output and the clock. The kernel enforces
them per process; totals over processes are looked at every 50 ms and may be overshot for that long. A call started by
root runs as a user id that nobody has. The program sees PATH, LANG, HOME and OPENBLAS_NUM_THREADS, an empty standard
input, and no open file but its output.

What is guaranteed (at "kernel" and "full", by tests/envs/live/sandbox): no network, no file of the user read or
changed, no environment variable, no signal to, trace or memory of a process outside, no process or file left behind,
and an exit status and limits that the program cannot forge, since they do not come through its output.

What is not:

- Faults of the kernel: a hole in the system calls that remain is a hole in the sandbox. For hostile code of people,
  as against clumsy code of models, put a virtual machine around it.
- Side channels: time, caches, load. The processor, the disk's and the memory's bandwidth are shared with everybody.
- System libraries (/lib, /usr/lib, time zones), the standard library and the packages allowed can be read.
- At "kernel", without a mount namespace: whether a file of a guessed name exists, its size and times can be told,
  not its content; links can be read; the host name and the kernel's version are visible; the work directory lies in
  the temporary folder, and its bound is looked at every 50 ms. As an ordinary user, the number of processes is
  bounded in the same way (the kernel's own bound counts all processes of the user), and changes of mode, owner and
  times of files pass without effect.
- At "kernel" on Linux before 6.12 as an ordinary user: signals are bounded by the filter alone, so a program can
  signal itself only, not its children.
- As root, with an interpreter where only root can read (a home of root): at "kernel" the program keeps the capability
  to read past permissions, and Landlock alone bounds it. `achieved_isolation().mechanisms` says so.
- Memory: the total can reach the limit of a process times their number for 50 ms; the files of "full" lie in memory
  and come on top. No cgroup is used.
- Locks of `multiprocessing` and shared memory do not exist (there is no /dev/shm); threads, `asyncio`, `subprocess`
  with Python itself do. Compiled code that a program brings along is not run by exec, but can be loaded.
- Other systems than Linux: refused.
"""

from orchestra_envs.live.sandbox.isolation import Isolation, achieved_isolation
from orchestra_envs.live.sandbox.packages import package_links
from orchestra_envs.live.sandbox.run import Limits, Plan, RunResult, run_python
from orchestra_envs.live.sandbox.tool import python_tool

__all__ = [
    "Isolation",
    "Limits",
    "Plan",
    "RunResult",
    "achieved_isolation",
    "package_links",
    "python_tool",
    "run_python",
]
