"""What there is: domains, task sets, users."""

import json
from collections.abc import Callable
from typing import Any

from tau2.data_model.tasks import Task
from tau2.environment import BranchEnvironment, Environment, Tool
from tau2.utils import DATA_DIR

SPLITS = {"train": ["lend", "unlock"], "test": ["told"]}


class UserSimulator:
    """The user's prompt."""

    def __init__(self, llm: str, instructions: str | None = None, tools: list[Tool] | None = None) -> None:
        with_tools = f" Your tools: {', '.join(tool.name for tool in tools)}." if tools else ""
        self.system_prompt = f"You are a reader; say ###STOP### when you are content.{with_tools}\n{instructions}"


def _desk_tasks(task_split_name: str | None = "base") -> list[Task]:
    path = DATA_DIR / "tau2" / "domains" / "desk" / "tasks.json"
    tasks = [Task.model_validate(task) for task in json.loads(path.read_text(encoding="utf-8"))]
    if task_split_name is None:
        return tasks
    if task_split_name == "base":
        return [task for task in tasks if not task.id.startswith("judged")]
    if task_split_name not in SPLITS:
        raise ValueError(f"Invalid task split name: {task_split_name}. Valid splits are: {list(SPLITS)}")
    return [task for task in tasks if task.id in SPLITS[task_split_name]]


def _tasks_of_a_path(task_path: str, save_to: str) -> list[Task]:
    raise AssertionError("as in ToolOrchestra, where the domains have no tasks of their own")


class Registry:
    def __init__(self) -> None:
        self.domains = {"desk": Environment, "branch": BranchEnvironment}
        self.tasks: dict[str, Callable[..., list[Task]]] = {
            "desk": _desk_tasks,
            "desk_small": lambda: _desk_tasks("train")[:1],
            "branch": _tasks_of_a_path,
        }

    def get_domains(self) -> list[str]:
        return list(self.domains)

    def get_task_sets(self) -> list[str]:
        return list(self.tasks)

    def get_env_constructor(self, name: str) -> Any:
        return self.domains[name]

    def get_tasks_loader(self, name: str) -> Callable[..., list[Task]]:
        return self.tasks[name]

    def get_user_constructor(self, name: str) -> Any:
        return {"user_simulator": UserSimulator}[name]


registry = Registry()
