"""Machines to run the sandbox on: the one that this is, and the same with mechanisms taken away."""

import pytest
from orchestra_envs.live.sandbox import Plan, isolation

# name: (tier to be had, what is taken away)
MACHINES = {
    "full": ("full", frozenset()),
    "kernel": ("kernel", frozenset({"private_root"})),
    "old_kernel": ("kernel", frozenset({"private_root", "landlock_signals"})),
    "limits": ("limits", frozenset({"private_root", "landlock", "seccomp"})),
}


def plan_of(monkeypatch: pytest.MonkeyPatch, machine: str) -> Plan:
    """The plan of a call on `machine`; skips the test where this machine cannot play it."""
    tier, missing = MACHINES[machine]
    monkeypatch.setattr(isolation, "simulated_missing", missing)
    achieved = isolation.achieved_isolation()
    if achieved.tier != tier:
        pytest.skip(f"this machine gives {achieved.summary()}")
    return achieved.plan


_RARE = [pytest.param(name, marks=pytest.mark.slow) for name in ("old_kernel", "limits")]


@pytest.fixture(params=["full", "kernel", _RARE[0]])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans behind which nothing gets out."""
    return plan_of(monkeypatch, request.param)


@pytest.fixture(params=["full", "kernel", *_RARE])
def any_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans of every tier: limits and cleaning up hold behind them all."""
    return plan_of(monkeypatch, request.param)
