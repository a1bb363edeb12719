"""Environments for orchestrators: Gymnasium environments whose actions call tools that have prices and latencies.

No part of it imports JAX; it can be used with any trainer. `make("orchestra/Market-v0")` gives the embedded market.
"""

import gymnasium as gym

from orchestra_envs.env import Preference, Reply, Task, ToolEnv
from orchestra_envs.limits import Limiter, Retry, ToolUnavailableError
from orchestra_envs.parse import (
    ParsedTurn,
    ParseError,
    ToolCall,
    decode_arguments,
    parse_turn,
    render_call,
)
from orchestra_envs.registry import EnvironmentNotFoundError, check, list_envs, load_plugins, make
from orchestra_envs.spaces import UnicodeText
from orchestra_envs.tools import CallContext, CallRecord, Price, Tool, ToolArgumentError, ToolResult, tool

__all__ = [
    "CallContext",
    "CallRecord",
    "EnvironmentNotFoundError",
    "Limiter",
    "ParseError",
    "ParsedTurn",
    "Preference",
    "Price",
    "Reply",
    "Retry",
    "Task",
    "Tool",
    "ToolArgumentError",
    "ToolCall",
    "ToolEnv",
    "ToolResult",
    "ToolUnavailableError",
    "UnicodeText",
    "check",
    "decode_arguments",
    "list_envs",
    "load_plugins",
    "make",
    "parse_turn",
    "render_call",
    "tool",
]

gym.register("orchestra/Market-v0", entry_point="orchestra_envs.market.env:MarketEnv")
gym.register("orchestra/QA-v0", entry_point="orchestra_envs.qa:QAEnv", nondeterministic=True)
gym.register("orchestra/Service-v0", entry_point="orchestra_envs.service.env:ServiceEnv")
gym.register("orchestra/Tau2-v0", entry_point="orchestra_envs.tau2:Tau2Env", nondeterministic=True)
