"""Does the quickstart hold for seeds that it was not tuned on?

    python -m benchmarks.quickstart_seeds --seeds 101 102 103 --json seeds.json

Runs `configs/quickstart.yaml` once per seed, in a process of its own, and states for each of the issue's claims whether
it held on the held-out tasks, which are the same for all seeds. A run that fails a claim, or crashes, is in the table
like any other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STRONGEST = "always:gpt-5"


def claims(policies: dict[str, Any]) -> dict[str, bool]:
    """What the quickstart promises, per claim.

    Args:
      policies: the "policies" of a run's summary.json.
    """
    strongest = policies[STRONGEST]
    held = {}
    for mode in ("", ":greedy"):
        trained, start = policies[f"trained{mode}"], policies[f"warm_start{mode}"]
        name = mode.lstrip(":") or "sampled"
        more_accurate = trained["accuracy"] > start["accuracy"]
        cheaper = trained["cost_usd"] < start["cost_usd"]
        no_worse = trained["accuracy"] >= start["accuracy"] and trained["cost_usd"] <= start["cost_usd"]
        held[f"{name}: beats its warm start and is in nothing worse"] = no_worse and (more_accurate or cheaper)
        held[f"{name}: accuracy of {STRONGEST} within its 95% interval, or above"] = (
            trained["accuracy"] >= strongest["ci95"]["accuracy"][0]
        )
        held[f"{name}: at most half the cost of {STRONGEST}"] = trained["cost_usd"] <= strongest["cost_usd"] / 2
    trained, start = policies["trained:greedy"], policies["warm_start:greedy"]
    held["greedy: warm start pays at least 1.5 times as much per solved task"] = (
        start["cost_per_solved_usd"] >= 1.5 * trained["cost_per_solved_usd"]
    )
    return held


def run_seed(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One quickstart; returns its row."""
    command = [sys.executable, "-m", "orchestra_jax.cli.main", "train", "--overwrite", "configs/quickstart.yaml"]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, f"seed={seed}", f"output_dir={folder}", *overrides], stderr=subprocess.PIPE, text=True, check=False
    )
    row: dict[str, Any] = {"seed": seed, "wall_s": round(time.perf_counter() - started, 1)}
    if done.returncode:
        return row | {"failed": f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"}
    policies = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["policies"]
    return row | {"claims": claims(policies), "policies": policies}


def main() -> None:
    """Runs the seeds and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart_seeds"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_args()

    rows = []
    print("| seed | policy | accuracy, % | cost per task, cents | cost per solved, cents | latency, s |")
    print("|---|---|---|---|---|---|")
    for seed in options.seeds:
        row = run_seed(seed, options.runs / f"seed-{seed}", options.overrides)
        rows.append(row)
        for name, p in row.get("policies", {}).items():
            low, high = p["ci95"]["accuracy"]
            print(
                f"| {seed} | {name} | {100 * p['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f}) "
                f"| {100 * p['cost_usd']:.2f} | {100 * p['cost_per_solved_usd']:.2f} | {p['latency_s']:.1f} |"
            )
        failed = [name for name, held in row.get("claims", {}).items() if not held] or row.get("failed")
        print(f"| {seed} | {row['wall_s']} s; failed: {failed or 'nothing'} | | | | |", flush=True)
    if options.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}
        result = {"machine": machine, "rows": rows, "ratios": {}, "limit_share": None}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.exit(any("failed" in row or not all(row["claims"].values()) for row in rows))


if __name__ == "__main__":
    main()
