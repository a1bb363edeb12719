"""The prompt of an agent."""

AGENT_INSTRUCTION = "You serve customers by the policy."

SYSTEM_PROMPT = "<instructions>{agent_instruction}</instructions>\n<policy>{domain_policy}</policy>"
