"""tau2-bench itself: found, asked for its tasks and environments, and its evaluator run.

Everything that the wrapper uses of the package is imported here, so that one place knows which names it needs.
"""

import contextlib
import functools
import importlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INSTALL = (
    "with Python 3.12 or 3.13: git clone https://github.com/sierra-research/tau2-bench; pip install ./tau2-bench; "
    "export TAU2_DATA_DIR=$PWD/tau2-bench/data"
)

_NAMES = {
    "tau2.registry": ("registry",),
    "tau2.utils": ("DATA_DIR",),
    "tau2.data_model.message": ("AssistantMessage", "ToolCall", "ToolMessage", "UserMessage"),
    "tau2.data_model.tasks": ("RewardType", "Task"),
    "tau2.data_model.simulation": ("SimulationRun", "TerminationReason"),
    "tau2.agent.llm_agent": ("AGENT_INSTRUCTION", "SYSTEM_PROMPT"),
    "tau2.orchestrator.orchestrator": ("DEFAULT_FIRST_AGENT_MESSAGE",),
    "tau2.evaluator.evaluator": ("EvaluationType", "evaluate_simulation"),
}


@functools.cache
def load() -> SimpleNamespace:
    """The names of tau2-bench that the wrapper uses, imported at the first call.

    Raises:
        ImportError: tau2-bench is not there, is another package of that name, or cannot be imported.
        ValueError: its data folder is not there.
    """
    with contextlib.suppress(ImportError):  # it logs every message to the terminal otherwise
        importlib.import_module("loguru").logger.disable("tau2")
    # Else litellm, which tau2-bench imports and the wrapper never uses, fetches a price list at its import.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    _import("tau2")
    _import("tau2.registry")
    with contextlib.suppress(ModuleNotFoundError):  # tau2-bench of today has it, the older one of ToolOrchestra not
        importlib.import_module("tau2.gym")
    names = {name: getattr(_import(module), name) for module, wanted in _NAMES.items() for name in wanted}
    data = Path(names["DATA_DIR"]) / "tau2" / "domains"
    if not data.is_dir():
        raise ValueError(
            f"tau2-bench finds no data at {data}: set the environment variable TAU2_DATA_DIR to the folder `data` of "
            "its clone before Python starts"
        )
    return SimpleNamespace(**names)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "tau2":
            raise ImportError(
                "orchestra/Tau2-v0 needs tau2-bench, which is not on the package index (the `tau2` there is another "
                f"package); {INSTALL}"
            ) from error
        if error.name == "tau2.registry":
            raise ImportError(
                "the installed `tau2` is not tau2-bench but another package of that name (on the package index it "
                f"computes magnetic relaxation rates): pip uninstall tau2, then, {INSTALL}"
            ) from error
        raise ImportError(f"tau2-bench is there, but importing {module} failed: {error}; {INSTALL}") from error
    except Exception as error:
        raise ImportError(f"importing {module} failed: {type(error).__name__}: {error}; {INSTALL}") from error


def check_domain(domain: str) -> None:
    """Raises ValueError for a domain that the installed tau2-bench does not have."""
    domains = load().registry.get_domains()
    if domain not in domains:
        raise ValueError(
            f"domain: expected one of {', '.join(domains)}, got {domain!r} (the domains of ToolScale are in the "
            "tau2-bench that comes with ToolOrchestra)"
        )


def load_tasks(domain: str, tasks: str | Sequence[str] | None, split: str | None) -> dict[str, Any]:
    """The tasks by their ids.

    Args:
        domain: whose task set is meant if `tasks` names none.
        tasks: None, the name of a task set, the path of a JSON file (a list of tasks in tau2-bench's form, as ToolScale
            has them, too), or ids.
        split: "train", "test" and whatever else the task set has; None for tau2-bench's own choice.

    Raises:
        ValueError: no such task set, split, file or id; no tasks.
    """
    lib = load()
    if isinstance(tasks, str) and tasks not in lib.registry.get_task_sets():
        if split is not None:
            raise ValueError(f"split: {tasks!r} is a file of tasks and no task set, and has no split {split!r}")
        found = _read_tasks(tasks)
    elif isinstance(tasks, str):
        found = _registered_tasks(tasks, split)
    else:
        found = _registered_tasks(domain, split)
    by_id = {str(task.id): task for task in found}
    if tasks is not None and not isinstance(tasks, str):
        by_id = _chosen(by_id, [str(task_id) for task_id in tasks], domain, split)
    if not by_id:
        raise ValueError(f"tasks: {tasks or domain!r} (split {split!r}) has no tasks")
    return by_id


def _chosen(by_id: Mapping[str, Any], ids: Iterable[str], domain: str, split: str | None) -> dict[str, Any]:
    ids = list(ids)
    if split is None and not set(ids) <= by_id.keys():  # tau2-bench's own choice is a part of what there is
        with contextlib.suppress(ValueError):
            by_id = {str(task.id): task for task in _registered_tasks(domain, None, whole=True)}
    if unknown := [task_id for task_id in ids if task_id not in by_id]:
        raise ValueError(f"tasks: {domain} has no task {unknown[0]!r}; it has {', '.join(list(by_id)[:5])}, ...")
    return {task_id: by_id[task_id] for task_id in ids}


def _registered_tasks(name: str, split: str | None, *, whole: bool = False) -> list[Any]:
    lib = load()
    try:
        loader = lib.registry.get_tasks_loader(name)
    except KeyError:
        known = ", ".join(lib.registry.get_task_sets())
        raise ValueError(f"tasks: there is no task set {name!r}; there are {known}") from None
    try:
        return list(loader(None) if whole else loader() if split is None else loader(split))
    except TypeError as error:
        if split is not None:
            raise ValueError(f"split: the task set {name!r} has no splits") from error
        raise ValueError(
            f"tasks: {name!r} has no task set of its own; give the path of a JSON file of tasks"
        ) from error
    except FileNotFoundError as error:
        raise ValueError(f"tasks: {error.filename} is missing; is TAU2_DATA_DIR the `data` of a full clone?") from error
    except ValueError as error:
        raise ValueError(f"split: {error}") from error


def _read_tasks(path: str) -> list[Any]:
    lib = load()
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(lib.registry.get_task_sets())
        raise ValueError(f"tasks: {path!r} is no task set ({known}), and no file: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"tasks: {path} is no JSON: {error}") from error
    if not isinstance(values, list):
        raise ValueError(f"tasks: {path} must hold a list of tasks")
    found = []
    for number, value in enumerate(values):
        try:
            found.append(lib.Task.model_validate(_without_null_arguments(value)))
        except ValueError as error:
            raise ValueError(f"tasks: {path}, task {number}: {error}") from error
    return found


def _without_null_arguments(task: Any) -> Any:
    """A task as read, without null among the arguments of golden actions.

    ToolScale's table has one column for each argument of any tool, null where a tool does not have it.
    """
    criteria = task.get("evaluation_criteria") if isinstance(task, Mapping) else None
    if not isinstance(criteria, Mapping) or not isinstance(criteria.get("actions"), list):
        return task
    actions = []
    for action in criteria["actions"]:
        arguments = action.get("arguments") if isinstance(action, Mapping) else None
        if isinstance(arguments, Mapping):
            given = {name: value for name, value in arguments.items() if value is not None}
            action = {**action, "arguments": given}
        actions.append(action)
    return {**task, "evaluation_criteria": {**criteria, "actions": actions}}


def has_assertions_in_words(task: Any) -> bool:
    """Whether the reward of a task depends on sentences that only a language model can judge."""
    criteria = task.evaluation_criteria
    return bool(criteria and criteria.nl_assertions and load().RewardType.NL_ASSERTION in criteria.reward_basis)


def is_for_solo(task: Any) -> bool:
    """Whether a task can be worked on without a user: it has a ticket, and nobody has spoken yet."""
    history = (task.initial_state and task.initial_state.message_history) or []
    return bool(task.ticket) and all(message.role == "tool" or message.tool_calls for message in history)


@dataclass(frozen=True)
class World:
    """Which environment tasks are posed in: a domain, with a user or `solo`.

    `retrieval` is how banking_knowledge finds its documents ("bm25_grep"); None elsewhere.
    """

    domain: str
    solo: bool = False
    retrieval: str | None = None

    def arguments(self, task: Any) -> dict[str, Any]:
        """What the environment's constructor is given beside solo mode, as tau2-bench's own runner does."""
        if self.retrieval is None:
            return {}
        actions = (task.evaluation_criteria and task.evaluation_criteria.actions) or []
        wanted = {action.arguments.get("agent_tool_name") for action in actions}
        return {"retrieval_variant": self.retrieval, "task": task, "read_log_allowlist": wanted - {None}}


def make_environment(world: World, task: Any) -> Any:
    """A fresh environment: the database and the tools on it.

    Raises:
        ValueError: it cannot be made: files or packages that the domain needs are missing, or it has no solo mode.
    """
    constructor = load().registry.get_env_constructor(world.domain)
    arguments = world.arguments(task) | ({"solo_mode": True} if world.solo else {})
    try:
        return constructor(**arguments)
    except FileNotFoundError as error:
        raise ValueError(
            f"domain {world.domain!r}: {error.filename} is missing; is TAU2_DATA_DIR the `data` of a full clone?"
        ) from error
    except Exception as error:
        how = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name != "task")
        raise ValueError(f"domain {world.domain!r} ({how}): {type(error).__name__}: {error}") from error


def user_prompt(task: Any, environment: Any) -> tuple[str, list[dict[str, Any]]]:
    """tau2-bench's own system prompt for the simulated user, and the user's tools in OpenAI's form."""
    tools = user_tools(task, environment)
    simulator = load().registry.get_user_constructor("user_simulator")
    user = simulator(llm="", instructions=str(task.user_scenario), tools=tools or None)
    return user.system_prompt, [tool.openai_schema for tool in tools]


def user_tools(task: Any, environment: Any) -> list[Any]:
    """The tools on the user's side of a task."""
    if environment.user_tools is None:
        return []
    include = getattr(task, "user_tools", None)
    return environment.get_user_tools() if include is None else environment.get_user_tools(include=include)


def agent_prompt(environment: Any) -> str:
    """tau2-bench's own system prompt for an agent, with the domain's policy."""
    lib = load()
    return lib.SYSTEM_PROMPT.format(agent_instruction=lib.AGENT_INSTRUCTION, domain_policy=environment.get_policy())


def evaluate(world: World, task: Any, messages: Sequence[Any]) -> float:
    """The reward of tau2-bench's evaluator for a dialogue that ended well, assertions in words left out.

    It builds the environment anew, replays the calls in it, and compares with the golden actions.
    """
    lib = load()
    task = task.model_copy(deep=True)
    if task.evaluation_criteria is not None:
        task.evaluation_criteria.nl_assertions = None  # it would ask a model of its own choice
    run = lib.SimulationRun(
        id=str(uuid.uuid4()),
        task_id=task.id,
        start_time="",
        end_time="",
        duration=0.0,
        termination_reason=lib.TerminationReason.AGENT_STOP if world.solo else lib.TerminationReason.USER_STOP,
        messages=list(messages),
    )
    arguments = world.arguments(task)
    try:
        reward = lib.evaluate_simulation(
            simulation=run,
            task=task,
            evaluation_type=lib.EvaluationType.ALL,
            solo_mode=world.solo,
            domain=world.domain,
            **({"env_kwargs": arguments} if arguments else {}),
        ).reward
    except ValueError:
        # Assertions about something that is not there raise, so they do not hold; calls that replay otherwise than
        # they ran, which raise the same error, do so here again.
        restore(make_environment(world, task), task, messages)
        reward = 0.0
    return float(reward)


def restore(environment: Any, task: Any, messages: Sequence[Any]) -> None:
    """Bring a fresh environment into the task's initial state, and replay the calls of `messages` in it."""
    initial = task.initial_state
    environment.set_state(
        initialization_data=initial and initial.initialization_data,
        initialization_actions=initial and initial.initialization_actions,
        message_history=list(messages),
    )
