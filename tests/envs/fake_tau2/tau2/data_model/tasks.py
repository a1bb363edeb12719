"""Tasks."""

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, Field

from tau2.data_model.message import Message


class RewardType(str, Enum):  # noqa: UP042, as in tau2-bench
    DB = "DB"
    ENV_ASSERTION = "ENV_ASSERTION"
    NL_ASSERTION = "NL_ASSERTION"
    ACTION = "ACTION"
    COMMUNICATE = "COMMUNICATE"


class Action(BaseModel):
    action_id: str
    requestor: Literal["user", "assistant"] = "assistant"
    name: str
    arguments: dict[str, Any]

    def get_func_format(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.arguments.items())})"


class EnvFunctionCall(BaseModel):
    env_type: Literal["user", "assistant"]
    func_name: str
    arguments: dict[str, Any]
    assert_value: bool = True


class EvaluationCriteria(BaseModel):
    actions: list[Action] | None = None
    env_assertions: list[EnvFunctionCall] | None = None
    communicate_info: list[str] | None = None
    nl_assertions: list[str] | None = None
    reward_basis: list[RewardType] = Field(default_factory=lambda: [RewardType.DB, RewardType.COMMUNICATE])


class InitializationData(BaseModel):
    agent_data: dict[str, Any] | None = None
    user_data: dict[str, Any] | None = None


class InitialState(BaseModel):
    initialization_data: InitializationData | None = None
    initialization_actions: list[EnvFunctionCall] | None = None
    message_history: list[Message] | None = None


class UserScenario(BaseModel):
    persona: str | None = None
    instructions: str

    def __str__(self) -> str:
        return f"Instructions: {self.instructions}"


class Task(BaseModel):
    id: str
    user_scenario: UserScenario
    ticket: str | None = None
    initial_state: InitialState | None = None
    evaluation_criteria: EvaluationCriteria | None = None
    user_tools: list[str] | None = None
