"""The workers' side: a loop over requests. Standard library only, each worker's environment is its own."""

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def serve(packages: list[str], handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Says the versions of packages, then answers requests until the input ends; what fails is answered too."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"versions": {package: version(package) for package in packages}})
    for line in sys.stdin:
        try:
            say(handle(json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
