"""What the evaluator reads and returns."""

from enum import Enum

from pydantic import BaseModel

from tau2.data_model.message import Message


class TerminationReason(str, Enum):  # noqa: UP042, as in tau2-bench
    USER_STOP = "user_stop"
    AGENT_STOP = "agent_stop"
    MAX_STEPS = "max_steps"


class SimulationRun(BaseModel):
    id: str
    task_id: str
    start_time: str
    end_time: str
    duration: float
    termination_reason: TerminationReason
    messages: list[Message]


class RewardInfo(BaseModel):
    reward: float
