"""A peer that takes a hundredth of a second for everything, and cannot do bfloat16."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))
from serve import serve


def handle(request):
    if request.get("dtype") == "bfloat16":
        raise ValueError("no bfloat16\nhere")
    if request.get("kind") == "die":
        raise SystemExit("last words")
    print("libraries print what they like")
    tokens = request.get("new_tokens") or [n for row in request["plan"]["lengths"] for n in row]
    return {"seconds": 0.01, "tokens": sum(tokens)}


serve(["pytest"], handle)
