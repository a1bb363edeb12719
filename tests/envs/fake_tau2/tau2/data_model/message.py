"""Messages of a trajectory."""

from typing import Any, Literal

from pydantic import BaseModel


class ToolCall(BaseModel):
    id: str = ""
    name: str
    arguments: dict[str, Any]
    requestor: Literal["user", "assistant"] = "assistant"


class _Spoken(BaseModel):
    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    def is_tool_call(self) -> bool:
        return self.tool_calls is not None


class AssistantMessage(_Spoken):
    role: Literal["assistant"]


class UserMessage(_Spoken):
    role: Literal["user"]


class ToolMessage(BaseModel):
    id: str
    role: Literal["tool"]
    content: str | None = None
    requestor: Literal["user", "assistant"] = "assistant"
    error: bool = False


Message = AssistantMessage | UserMessage | ToolMessage
