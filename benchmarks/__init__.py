"""Speed and learning, measured: `python -m benchmarks.NAME --json FILE`, one command each."""
