"""Peers that benchmarks run beside ours, each in an environment of its own."""
