"""A policy behind an OpenAI-compatible HTTP endpoint (`orchestra serve`)."""
