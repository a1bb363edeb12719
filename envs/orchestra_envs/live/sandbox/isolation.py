"""Which walls this machine can put up, found out by trying, and what to do about missing ones."""

import functools
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.live.sandbox.run import Limits, Plan, probe, remove_stale_boxes, run_python_blocking

TIERS = ("none", "limits", "kernel", "full")
LANDLOCK_SCOPE_VERSION = 6

_log = logging.getLogger(__name__)

# Mechanisms that are taken for missing; tests set it. "landlock_signals" makes Landlock one of version 5.
simulated_missing: frozenset[str] = frozenset()

_NAMESPACES = ("user_namespace", "pid_namespace", "mount_namespace", "net_namespace", "ipc_namespace", "uts_namespace")
_NEEDED = {
    "limits": ("rlimits",),
    "kernel": ("rlimits", "landlock", "seccomp", "drop_root"),
    "full": ("rlimits", "landlock", "seccomp", "drop_root", *_NAMESPACES, "private_root"),
}
_NAMESPACE_REMEDY = (
    "allow user namespaces to unprivileged users (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or in a container take a seccomp profile that permits unshare "
    "and mount"
)
_REMEDIES = {
    **dict.fromkeys((*_NAMESPACES, "private_root"), _NAMESPACE_REMEDY),
    "landlock": (
        "use a kernel of 5.13 or newer with 'landlock' in its boot parameter lsm=, in a container whose "
        "seccomp profile permits the calls 444 to 446"
    ),
    "seccomp": "use a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64",
    "drop_root": "start as an ordinary user, or give root CAP_SETUID and CAP_SETGID",
    "rlimits": "use Linux, and start with hard limits that can be lowered",
    "self_test": "report this as a fault, with the mechanisms listed",
}


@dataclass(frozen=True)
class Isolation:
    """What the sandbox achieves on this machine.

    Args:
        tier: "full", "kernel", "limits" or "none"; the module's text says what each means.
        mechanisms: name to "yes" or "no: why", each tried in a process of its own; "self_test" is what a program
            behind all the walls together found open ("yes": nothing).
        plan: how calls are run.
    """

    tier: str
    mechanisms: Mapping[str, str]
    plan: Plan

    def missing(self, tier: str) -> dict[str, str]:
        """What lacks for `tier`: mechanism to reason."""
        needed = _NEEDED.get(tier, ())
        found = {name: self.mechanisms.get(name, "no: not tried") for name in needed}
        lacking = {name: text.removeprefix("no: ") for name, text in found.items() if not text.startswith("yes")}
        if not lacking and TIERS.index(self.tier) < TIERS.index(tier):
            lacking["self_test"] = self.mechanisms.get("self_test", "not run").removeprefix("no: ")
        return lacking

    def summary(self) -> str:
        """One line for a log."""
        above = TIERS[min(TIERS.index(self.tier) + 1, len(TIERS) - 1)]
        lacking = "; ".join(f"{name} ({reason})" for name, reason in self.missing(above).items())
        return f"isolation {self.tier!r}" + (f"; for {above!r} it lacks {lacking}" if lacking else "")


def achieved_isolation() -> Isolation:
    """The strongest isolation that this machine gives, tried once per process (about 0.3 s) and then remembered."""
    return _achieved(simulated_missing)


def require_isolation(tier: str) -> Isolation:
    """`achieved_isolation()`, if it is at least `tier`.

    Raises:
        ValueError: it is less; the message says what is missing, how to mend it and what to ask for instead.
    """
    if tier not in TIERS[1:]:
        raise ValueError(f"isolation must be one of {', '.join(TIERS[:0:-1])}, not {tier!r}")
    isolation = achieved_isolation()
    if TIERS.index(isolation.tier) >= TIERS.index(tier):
        return isolation
    lacking = isolation.missing(tier)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in lacking.items())
    remedies = "; ".join(dict.fromkeys(_REMEDIES[name] for name in lacking))
    less = f", or ask for less with isolation={isolation.tier!r}" if isolation.tier != "none" else ""
    raise ValueError(
        f"isolation={tier!r} is asked for and this machine gives {isolation.tier!r}. Missing: {reasons}. "
        f"To mend it: {remedies}{less}"
    )


@functools.cache
def _achieved(missing: frozenset[str]) -> Isolation:
    if not sys.platform.startswith("linux"):
        return Isolation("none", MappingProxyType({"rlimits": "no: the sandbox needs Linux"}), Plan())
    remove_stale_boxes()
    try:
        mechanisms = probe(tuple(missing))
    except ToolUnavailableError as error:
        return Isolation("none", MappingProxyType({"rlimits": f"no: {error}"}), Plan())
    tier, plan = "none", Plan()
    for wanted in TIERS[:0:-1]:
        if not all(mechanisms.get(name, "no").startswith("yes") for name in _NEEDED[wanted]):
            continue
        plan = _plan(wanted, mechanisms, missing)
        problem, reads_past_permissions = _self_test(wanted, plan)
        if reads_past_permissions:
            mechanisms["drop_root"] = (
                "yes, but for CAP_DAC_READ_SEARCH, since the interpreter lies where only root can read: "
                "Landlock alone bounds what can be read"
            )
        if not problem:
            mechanisms["self_test"], tier = "yes", wanted
            break
        mechanisms["self_test"] = f"no: behind {wanted!r}, {problem}"
    isolation = Isolation(tier, MappingProxyType(mechanisms), plan)
    _log.log(logging.INFO if tier == "full" else logging.WARNING, "Python sandbox: %s", isolation.summary())
    return isolation


def _plan(tier: str, mechanisms: Mapping[str, str], missing: frozenset[str]) -> Plan:
    """Everything that `tier` needs, and below it whatever else there is of the kernel's filters."""
    has = {name for name, text in mechanisms.items() if text.startswith("yes")}
    version = int(mechanisms["landlock"].split()[1]) if "landlock" in has else 0
    if "landlock_signals" in missing:
        version = min(version, LANDLOCK_SCOPE_VERSION - 1)
    as_root = os.geteuid() == 0
    return Plan(
        namespaces="" if tier != "full" else "direct" if as_root else "user",
        landlock=version,
        seccomp="seccomp" in has,
        drop_root=as_root and "drop_root" in has,
    )


_SELF_TEST = """
import os, socket
def attempt(name, action):
    try:
        action()
    except Exception:
        return
    print("open:", name)
if TIER != "limits":
    attempt("files", lambda: open(CANARY).read())
    attempt("directories", lambda: os.listdir("/home"))
    attempt("processes", lambda: open("/proc/1/stat").read())
    attempt("writing", lambda: open(CANARY + "-new", "w"))
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            attempt(f"sockets of family {family}", lambda: socket.socket(family, kind))
    attempt("signals", lambda: OUTSIDE and os.kill(OUTSIDE, 0) or OUTSIDE or 1 / 0)
if os.environ.keys() - {"PATH", "LANG", "HOME", "OPENBLAS_NUM_THREADS"}:
    print("open: environment", os.environ.keys())
if os.getuid() == 0 and TIER != "limits":
    print("open: root")
open("own file", "w").write("x" * 1000)
print("done")
"""


def _self_test(tier: str, plan: Plan) -> tuple[str, bool]:
    """What a program behind these walls can do that it must not ("": nothing), and whether it reads as root would."""
    with tempfile.NamedTemporaryFile("w", prefix="orchestra-canary-") as file:
        os.chmod(file.name, 0o644)
        outside = 0 if plan.namespaces else os.getpid()
        facts = f"TIER, CANARY, OUTSIDE = {tier!r}, {file.name!r}, {outside!r}\n"
        try:
            result = run_python_blocking(facts + _SELF_TEST, Limits(wall_s=15), plan)
        except ToolUnavailableError as error:
            return str(error), False
    text = result.output.decode(errors="replace").strip()
    if result.exit_code == 0 and text == "done":
        return "", result.reads_past_permissions
    return "; ".join(text.splitlines()[-8:]) or f"the self-test ended with {result.limit or result.exit_code}", False
