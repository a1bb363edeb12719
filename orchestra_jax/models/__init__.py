"""The policy network and its weights."""
