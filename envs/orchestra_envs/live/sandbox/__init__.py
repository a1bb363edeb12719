"""A Python sandbox."""

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
