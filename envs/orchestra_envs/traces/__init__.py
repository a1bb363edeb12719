"""Recorded episodes: writing, reading, importing, replaying."""
