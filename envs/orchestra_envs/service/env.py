"""`orchestra/Service-v0`: customer service in four invented companies, with a policy to keep and a user to talk to.

The agent reads a policy (`info["instructions"]`), talks with a user in plain turns and works on a small database with
typed tools. A user wants one to four things; some of them the policy forbids, some are questions, and now and then a
user changes their mind. Worlds, tasks and their golden actions are generated (`generate`), the user is scripted
(`user`), and what counts is the final database, what was told, and what was looked at (`judge`)::

    env = orchestra_envs.make("orchestra/Service-v0", domains=("shop", "hotel"), max_subgoals=2)
    observation, info = env.reset(seed=0)                  # the user's opening; the policy is info["instructions"]
    observation, *_ = env.step("May I have your e-mail address and postcode, please?")
    observation, *_ = env.step('<tool_call>{"name": "verify_customer", "arguments": {"email": ...}}</tool_call>')

Needs no network and no other process. With `user={"model": ...}` a language model behind an OpenAI-compatible endpoint
plays the user (`pip install 'orchestra-jax[live]'`; a local peer: `vllm serve Qwen/Qwen3-8B`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np

from orchestra_envs.env import Preference, Reply, Task, ToolEnv
from orchestra_envs.parse import parse_turn, render_call
from orchestra_envs.preference import Split, fixed_weights, sample_preference
from orchestra_envs.service.demonstrate import demonstration
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.generate import (
    MAX_SUBGOALS,
    SPLITS,
    make_service_task,
    service_task_from_id,
)
from orchestra_envs.service.goals import ServiceTask
from orchestra_envs.service.judge import Judgement, judge
from orchestra_envs.service.model_user import ModelUser
from orchestra_envs.service.user import ScriptedUser
from orchestra_envs.tools import Tool

_NUM_TASKS = 2**29  # groups of MAX_SUBGOALS task numbers that reset draws from, per kind and split


class ServiceEnv(ToolEnv):
    """The customer-service world as a Gymnasium environment.

    Args:
        domains: the companies to draw tasks from, each equally often: shop, clinic, hotel, library.
        split: "train" or "test"; no solution is in both.
        max_subgoals: most things that a user wants, 1 to 4.
        user: "scripted", or a mapping of `Endpoint`'s fields ({"model": ..., "base_url": ..., "api_key_env": ...}) for
            a language model that plays the user. What it costs is not charged to the episode (it is no decision of the
            policy); the environment is then not deterministic.
        expert: tools on offer beside the domain's, such as a `call_expert`.
        preference: "balanced" (outcome 1, cost 0.5, latency 0.25, not told in words), "random" (drawn per episode and
            told in words; wishes about tools name the experts), or a mapping of weights in [0, 1] for "outcome",
            "cost", "latency" and tool names.
        **limits: `max_turns` (here 30) and the other limits of `ToolEnv`. `randomize` keeps the domain's tools as they
            are, since tasks need them, unless it says otherwise (`{"keep": []}`).

    `reset(options={"task_id": "test/shop/return_item/17"})` poses that task. Raises ValueError for an unknown domain,
    split or user, or `max_subgoals` out of range.
    """

    def __init__(
        self,
        *,
        domains: Sequence[str] = tuple(DOMAINS),
        split: str = "train",
        max_subgoals: int = MAX_SUBGOALS,
        user: str | Mapping[str, Any] = "scripted",
        expert: Tool | Sequence[Tool] | None = None,
        preference: str | Mapping[str, float] = "balanced",
        **limits: Any,
    ) -> None:
        if isinstance(domains, str) or not domains or any(name not in DOMAINS for name in domains):
            raise ValueError(f"domains: expected a list of names out of {', '.join(DOMAINS)}, got {domains!r}")
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        if isinstance(max_subgoals, bool) or max_subgoals not in range(1, MAX_SUBGOALS + 1):
            raise ValueError(f"max_subgoals: expected 1 to {MAX_SUBGOALS}, got {max_subgoals!r}")
        self._domains = tuple(domains)
        self._split: Split = "test" if split == "test" else "train"
        self._max_subgoals = max_subgoals
        self._experts = () if expert is None else (expert,) if isinstance(expert, Tool) else tuple(expert)
        self._model_user = _model_user(user)
        domain_tools = tuple(tool for name in self._domains for tool in DOMAINS[name].tools)
        self.tools = (*domain_tools, *self._experts)
        self._preference = fixed_weights(preference, [tool.name for tool in self.tools])
        randomize = limits.pop("randomize", None)
        if randomize is not None:
            randomize = {"keep": [tool.name for tool in domain_tools], **randomize}
        super().__init__(**{"max_turns": 30, **limits}, randomize=randomize)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A random task of the split, or the one that `options["task_id"]` names, with a fresh database and user.

        `metadata` has "service_task", "world" (the database of this episode) and "user".
        """
        if "task_id" in options:
            service_task = service_task_from_id(options["task_id"])
        else:
            domain = self._domains[int(rng.integers(len(self._domains)))]
            kinds = list(DOMAINS[domain].goals)
            kind = kinds[int(rng.integers(len(kinds)))]
            index = int(rng.integers(_NUM_TASKS)) * MAX_SUBGOALS + int(rng.integers(self._max_subgoals))
            service_task = make_service_task(self._split, domain, kind, index)
        world = service_task.start.copy()
        make_user = ScriptedUser if self._model_user is None else self._model_user.tracker
        return Task(
            service_task.opening,
            id=service_task.id,
            preference=self._draw_preference(service_task, rng),
            metadata={"service_task": service_task, "world": world, "user": make_user(service_task, world)},
            instructions=DOMAINS[service_task.domain].instructions(world.today),
        )

    def episode_tools(self, task: Task, rng: np.random.Generator) -> Sequence[Tool]:
        """The tools of the task's domain, and the experts."""
        return (*DOMAINS[task.metadata["service_task"].domain].tools, *self._experts)

    def reply(self, message: str) -> Reply | Awaitable[Reply]:
        """What the user says."""
        user: ScriptedUser = self.task.metadata["user"]
        if self._model_user is None:
            return user.reply(message, self.episode_rng)
        return self._model_user.reply(user, self.task.metadata["service_task"], message)

    def score(self, task: Task, answer: str) -> float:
        """1.0 if all three criteria are met in full, else 0.0."""
        return self.judgement().outcome

    def state_hash(self, tool: str) -> str | None:
        """Of the database, for the domain's tools; None for experts."""
        if any(expert.name == tool for expert in self._experts):
            return None
        return self.task.metadata["world"].digest()

    def judgement(self) -> Judgement:
        """How the episode, as far as it has come, meets the three criteria."""
        metadata = self.task.metadata
        return judge(metadata["service_task"], metadata["world"], metadata["user"].messages)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[str]:
        """Turns that solve the task with the scripted user; tools go by the names that the episode gives them."""
        names = {tool.backend: name for name, tool in self._begun.tools.items() if tool.backend}
        return [_renamed(turn, names) for turn in demonstration(task.metadata["service_task"], rng)]

    def _draw_preference(self, task: ServiceTask, rng: np.random.Generator) -> Preference:
        experts = [tool.name for tool in self._experts]
        names = [tool.name for tool in DOMAINS[task.domain].tools] + experts
        if self._preference is not None:
            return Preference(dict.fromkeys(names, 0.0) | dict(self._preference), "")
        return sample_preference(rng, names, candidates=experts, split=self._split)


def _renamed(turn: str, names: Mapping[str, str]) -> str:
    """A turn with its tools under other names."""
    parsed = parse_turn(turn)
    if not any(call.name in names for call in parsed.calls):
        return turn
    calls = [type(call)(names.get(call.name, call.name), call.arguments) for call in parsed.calls]
    return "\n".join(filter(None, [parsed.content, *map(render_call, calls)]))


def _model_user(user: str | Mapping[str, Any]) -> ModelUser | None:
    if user == "scripted":
        return None
    if not isinstance(user, Mapping):
        raise ValueError(f"user: expected 'scripted' or a mapping such as {{'model': ...}}, got {user!r}")
    return ModelUser.of(user)
