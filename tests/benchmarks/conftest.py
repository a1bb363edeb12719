"""Benchmarks are run from the repository, not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a benchmark's `main` with arguments; its JSON."""

    def run(module, *arguments):
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments), "--json", str(out)])
        module.main()
        return json.loads(out.read_text("utf-8"))

    return run
