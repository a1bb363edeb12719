"""The environments of the domains "desk" and "branch"."""

import inspect
import itertools
import json
from collections.abc import Callable
from typing import Any

from tau2.data_model.message import ToolCall, ToolMessage, UserMessage

_JSON_TYPES = {str: "string", int: "integer"}
_draws = itertools.count()


class Tool:
    """A tool as tau2-bench describes it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        parameters = inspect.signature(function).parameters.values()
        self.openai_schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function),
                "parameters": {
                    "properties": {each.name: {"type": _JSON_TYPES[each.annotation]} for each in parameters},
                    "required": [each.name for each in parameters],
                    "title": "parameters",
                    "type": "object",
                },
            },
        }


class _ToolKit:
    tools: tuple[str, ...] = ()
    writing: tuple[str, ...] = ()

    def __init__(self, db: dict[str, Any]) -> None:
        self.db = db

    def get_tools(self, include: list[str] | None = None) -> dict[str, Tool]:
        return {name: Tool(getattr(self, name)) for name in self.tools if include is None or name in include}


class DeskTools(_ToolKit):
    tools = ("find_book", "lend_book", "list_shelves", "transfer_to_human_agents")
    writing = ("lend_book",)

    def find_book(self, title: str) -> dict[str, Any]:
        """Find a book by its title."""
        for book_id, book in self.db["books"].items():
            if book["title"].lower() == title.lower():
                return {"book_id": book_id, **book}
        raise ValueError(f"There is no book {title}")

    def lend_book(self, book_id: str, reader: str) -> dict[str, Any]:
        """Lend a book to a reader."""
        if self.db["cards"][reader] == "locked":
            raise ValueError("The card is locked")
        self.db["books"][book_id]["holder"] = reader
        return self.db["books"][book_id]

    def list_shelves(self) -> str:
        """List the shelves."""
        return "A, B"

    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfer the user to a human agent."""
        return "Transfer successful"

    def assert_holder(self, book_id: str, reader: str) -> bool:
        if self.db["books"][book_id]["holder"] is None:
            raise ValueError("Nobody holds the book")
        return self.db["books"][book_id]["holder"] == reader


class BranchTools(DeskTools):
    tools = (*DeskTools.tools, "draw_number")
    writing = (*DeskTools.writing, "draw_number")

    def draw_number(self) -> str:
        """Draw a number for the queue; another one every time."""
        return f"number {next(_draws)}"


class ReaderTools(_ToolKit):
    tools = ("look_at_card", "unlock_card")
    writing = ("unlock_card",)

    def look_at_card(self, reader: str) -> str:
        """Look at your card."""
        return f"The card is {self.db['cards'][reader]}"

    def unlock_card(self, reader: str) -> str:
        """Unlock your card."""
        self.db["cards"][reader] = "open"
        return "The card is open now"

    def lock_card(self, reader: str) -> None:
        self.db["cards"][reader] = "locked"


class Environment:
    """The desk; both sides see one database."""

    toolkit = DeskTools

    def __init__(self, *, solo_mode: bool = False) -> None:
        self.solo_mode = solo_mode
        db = {
            "books": {
                "b1": {"title": "Emma", "holder": None},
                "b2": {"title": "Dracula", "holder": None},
            },
            "cards": {"ann": "open", "bob": "open"},
        }
        self.tools = self.toolkit(db)
        self.user_tools = ReaderTools(db)

    def get_policy(self) -> str:
        return "Lend no book to a reader with a locked card."

    def get_tools(self) -> list[Tool]:
        return list(self.tools.get_tools().values())

    def get_user_tools(self, include: list[str] | None = None) -> list[Tool]:
        return list(self.user_tools.get_tools(include).values())

    def set_state(self, initialization_data: Any, initialization_actions: Any, message_history: list[Any]) -> None:
        if self.solo_mode and any(isinstance(message, UserMessage) for message in message_history):
            raise AssertionError("User messages are not allowed in solo mode")
        if initialization_data is not None:
            for name, rows in (initialization_data.agent_data or {}).items():
                self.tools.db[name].update(rows)
        for action in initialization_actions or ():
            self.run(action)
        messages = iter(message_history)
        for message in messages:
            for tool_call in getattr(message, "tool_calls", None) or ():
                recorded = next(messages)
                if tool_call.id != recorded.id:
                    raise ValueError("Tool call id mismatch")
                if tool_call.name in (*self.tools.writing, *self.user_tools.writing):
                    again = self.get_response(tool_call)
                    if again.content != recorded.content:
                        raise ValueError(f"Returned: {again}, expected: {recorded}")

    def run(self, action: Any) -> Any:
        kit = self.user_tools if action.env_type == "user" else self.tools
        return getattr(kit, action.func_name)(**action.arguments)

    def call(self, name: str, requestor: str, arguments: dict[str, Any]) -> Any:
        kit: _ToolKit = self.user_tools if requestor == "user" else self.tools
        if self.solo_mode and name in self.user_tools.tools:
            kit = self.user_tools
        if name not in kit.tools:
            raise ValueError(f"Tool '{name}' not found.")
        return getattr(kit, name)(**arguments)

    def get_response(self, message: ToolCall) -> ToolMessage:
        error = False
        try:
            content = self.call(message.name, message.requestor, message.arguments)
        except Exception as raised:
            content, error = f"Error: {raised}", True
        text = content if isinstance(content, str) else json.dumps(content)
        return ToolMessage(id=message.id, role="tool", content=text, requestor=message.requestor, error=error)


class BranchEnvironment(Environment):
    """A desk with a tool that answers otherwise every time."""

    toolkit = BranchTools
