"""Live tools: what is behind their names is a real backend."""
