"""How a dialogue begins."""

from tau2.data_model.message import AssistantMessage

DEFAULT_FIRST_AGENT_MESSAGE = AssistantMessage(role="assistant", content="Hi! How can I help you today?")
