"""Reads a run folder for the report, and whatever is left of one after a crash.

A report must come out of any run: still running, killed while it wrote, or written by an older version. So nothing
in here trusts the files: every value is brought to a known type, and what is missing or broken is left out and said
in ``Run.problems``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra_jax.report.policies import finite_number

RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "episodes")

MAX_POINTS = 1500  # of a curve; longer ones are averaged in bins
MAX_TRAIN_FILES = 12  # training steps whose trajectories are shown
MAX_TRAJECTORIES = 480
MAX_TRAJECTORY_BYTES = 8_000_000  # of all trajectories on the page
MAX_TEXT_CHARS = 40_000  # of one prompt or turn


@dataclass(frozen=True)
class Curves:
    """Metrics of one phase: the steps, and per metric one value a step (``None`` where a step has none)."""

    steps: list[float]
    series: dict[str, list[float | None]]


@dataclass(frozen=True)
class Run:
    """What a run folder holds, in plain data.

    ``curves`` is keyed by phase (``"sft"``, ``"train"``); ``trajectories`` is a sample of the
    ``num_trajectories`` that lie in ``episodes/``; ``problems`` are sentences for the reader.
    """

    name: str
    config_text: str
    summary: dict[str, Any]
    curves: dict[str, Curves]
    trajectories: list[dict[str, Any]]
    num_trajectories: int
    problems: list[str]


def load_run(run_dir: Path) -> Run:
    """Read ``run_dir``.

    Raises:
        ValueError: it does not exist, is no folder, or has none of the files of a run.
    """
    if not run_dir.is_dir():
        what = "is not a folder" if run_dir.exists() else "does not exist"
        raise ValueError(f"{run_dir} {what}; give the folder that `orchestra train` wrote")
    if not any((run_dir / name).exists() for name in RUN_FILES):
        raise ValueError(f"{run_dir} is no run folder: it has none of {', '.join(RUN_FILES)}")
    problems: list[str] = []
    summary = _read_summary(run_dir / "summary.json", problems)
    curves = _read_curves(run_dir / "metrics.jsonl", problems)
    trajectories, num_trajectories = _read_trajectories(run_dir / "episodes", problems)
    config = run_dir / "config.yaml"
    if not config.is_file():
        problems.append("There is no config.yaml: how the run was started is not known.")
    return Run(
        name=run_dir.resolve().name,
        config_text=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        summary=summary,
        curves=curves,
        trajectories=trajectories,
        num_trajectories=num_trajectories,
        problems=problems,
    )


def _read_summary(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        problems.append("There is no summary.json yet: the run has not finished its evaluation, or was stopped before.")
        return {}
    try:
        summary = _parse_json(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        problems.append(f"summary.json is not valid JSON ({error}): the evaluation is not shown.")
        return {}
    policies = summary.get("policies") if isinstance(summary, dict) else None
    if not isinstance(policies, dict):
        problems.append('summary.json has no "policies" object: the evaluation is not shown.')
        return {}
    for name, entry in policies.items():
        fields = entry if isinstance(entry, dict) else {}
        if isinstance(fields.get("warning"), str):
            problems.append(f"Policy {name}: {fields['warning']}.")
            continue
        missing = [key for key in ("accuracy", "cost_usd", "latency_s") if finite_number(fields.get(key)) is None]
        if missing:
            problems.append(f"summary.json: policy {name!r} has no usable {', '.join(missing)}.")
    return dict(summary)


def _read_curves(path: Path, problems: list[str]) -> dict[str, Curves]:
    if not path.is_file():
        problems.append("There is no metrics.jsonl: no curve can be drawn.")
        return {}
    rows = _read_json_lines(path, problems)
    if not rows:
        problems.append("metrics.jsonl holds no step yet.")
    by_phase: dict[str, dict[float, dict[str, float]]] = {}
    num_without_step = num_repeated = 0
    for row in rows:
        step = finite_number(row.get("step"))
        if step is None:
            num_without_step += 1
            continue
        phase_rows = by_phase.setdefault(str(row.get("phase") or "train"), {})
        num_repeated += step in phase_rows
        # A resumed run writes some steps again; the later line is the one that the run went on from.
        phase_rows[step] = dict(_flat_numbers(row))
    if num_without_step:
        problems.append(f'metrics.jsonl: {num_without_step} line(s) without a numeric "step" are left out.')
    if num_repeated:
        problems.append(f"metrics.jsonl: {num_repeated} step(s) were written again after a resume; the later is shown.")
    return {phase: _thin(_columns(phase_rows)) for phase, phase_rows in by_phase.items()}


def _flat_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """The finite numbers of ``row``; nested objects become ``outer/inner``."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat_numbers(value, f"{prefix}{key}/")
        elif prefix or key not in ("step", "phase", "policy_version"):
            number = finite_number(value)
            if number is not None:
                yield f"{prefix}{key}", number


def _columns(rows: Mapping[float, Mapping[str, float]]) -> Curves:
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row})
    return Curves(steps, {name: [rows[step].get(name) for step in steps] for name in names})


def _thin(curves: Curves) -> Curves:
    """At most ``MAX_POINTS`` points: means over bins of neighbouring steps, placed at the bin's last step."""
    if len(curves.steps) <= MAX_POINTS:
        return curves
    size = -(-len(curves.steps) // MAX_POINTS)
    starts = range(0, len(curves.steps), size)
    return Curves(
        [curves.steps[min(i + size, len(curves.steps)) - 1] for i in starts],
        {name: [_mean(values[i : i + size]) for i in starts] for name, values in curves.series.items()},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _read_json_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file. A bad last line is what a crash leaves; others are counted apart."""
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    records, bad_lines = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            bad_lines.append(number)
    if bad_lines and bad_lines[-1] == len(lines):  # no newline at the end: the writer was cut off
        bad_lines.pop()
        problems.append(f"{path.name}: the last line is cut off, as a crash while writing leaves it; it is left out.")
    if bad_lines:
        shown = ", ".join(map(str, bad_lines[:5])) + ("..." if len(bad_lines) > 5 else "")
        problems.append(f"{path.name}: {len(bad_lines)} line(s) are no JSON object and left out (line {shown}).")
    return records


def _parse_json(text: str) -> Any:
    """``json.loads``, but an escaped half of a surrogate pair, which no UTF-8 page can hold, becomes U+FFFD."""
    value = json.loads(text)
    return _well_formed(value) if "\\ud" in text.lower() else value


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return value


def _read_trajectories(folder: Path, problems: list[str]) -> tuple[list[dict[str, Any]], int]:
    """A sample of the trajectories that fits on a page, and how many the folder holds."""
    files = sorted(folder.glob("*.jsonl"), key=_reading_order) if folder.is_dir() else []
    if not files:
        problems.append("There are no trajectories in episodes/ yet.")
        return [], 0
    train = [path for path in files if path.name.startswith("train-")]
    chosen = {path for path in files if path not in train} | set(_spread(train, MAX_TRAIN_FILES))
    groups_per_file, num_found = [], 0
    for path in files:
        if path not in chosen:
            num_found += path.read_bytes().count(b"\n")
            continue
        records = [_trajectory(record, path.stem) for record in _read_json_lines(path, problems)]
        num_found += len(records)
        groups = _groups(records)
        quota = MAX_TRAJECTORIES / len(chosen) / max(1.0, len(records) / max(1, len(groups)))
        groups_per_file.append(_spread(groups, max(1, round(quota))))
    return _within_budget(groups_per_file), num_found


def _reading_order(path: Path) -> tuple[int, str]:
    """What a reader wants to see first: the trained policy, its start, the way there, then the baselines."""
    prefixes = ("eval-trained", "eval-warm_start", "train-")
    rank = next((i for i, prefix in enumerate(prefixes) if path.name.startswith(prefix)), len(prefixes))
    return rank, path.stem


def _groups(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Trajectories of one task (and one group of a training step) together, in order of first appearance."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["source"], record["group"], record["task_id"]), []).append(record)
    return list(groups.values())


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """``count`` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _within_budget(groups_per_file: Sequence[Sequence[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Whole groups, one of each file in turn until the page is full; in the order of the files."""
    kept: list[list[list[dict[str, Any]]]] = [[] for _ in groups_per_file]
    num_bytes = 0
    for rank in range(max((len(groups) for groups in groups_per_file), default=0)):
        for file_number, groups in enumerate(groups_per_file):
            if rank >= len(groups):
                continue
            num_bytes += len(json.dumps(groups[rank]))
            if num_bytes > MAX_TRAJECTORY_BYTES and any(kept):
                return [record for groups in kept for group in groups for record in group]
            kept[file_number].append(groups[rank])
    return [record for groups in kept for group in groups for record in group]


def _trajectory(record: Mapping[str, Any], file_stem: str) -> dict[str, Any]:
    """One trajectory with known types; ``source`` says where it is from, as the page groups it."""
    step, phase = finite_number(record.get("step")), str(record.get("phase") or "")
    policy = _text(record.get("policy")) or file_stem.removeprefix("eval-")
    is_training = file_stem.startswith("train-") or phase == "train"
    counts = record.get("tool_counts")
    return {
        "source": f"step {step:g}" if is_training and step is not None else policy,
        "is_training": is_training,
        "step": step,
        "policy": policy,
        "task_id": _text(record.get("task_id")),
        "group": _text(record.get("group")),
        "member": _text(record.get("member")),
        "prompt": _clip(_text(record.get("prompt"))),
        "turns": [_turn(turn) for turn in _objects(record.get("turns"))],
        "outcome": finite_number(record.get("outcome")),
        "reward": finite_number(record.get("reward")),
        "advantage": finite_number(record.get("advantage")),
        "cost_usd": finite_number(record.get("cost_usd")),
        "latency_s": finite_number(record.get("latency_s")),
        "tool_counts": dict(_flat_numbers(counts)) if isinstance(counts, Mapping) else {},
        "end_reason": _text(record.get("end_reason")),
        "dropped": _text(record.get("dropped") or ""),
    }


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    clean: dict[str, Any] = {
        "role": _text(turn.get("role")) or "?",
        "text": _clip(_text(turn.get("text"))),
        "num_tokens": finite_number(turn.get("num_tokens")),
        "logprob_mean": finite_number(turn.get("logprob_mean")),
        "cost_usd": finite_number(turn.get("cost_usd")),
        "latency_s": finite_number(turn.get("latency_s")),
        "calls": [_call(call) for call in _objects(turn.get("calls"))],
    }
    tokens, logprobs = turn.get("tokens"), turn.get("logprobs")
    if isinstance(tokens, list) and isinstance(logprobs, list) and len(tokens) == len(logprobs) > 0:
        clean["tokens"] = [_text(token) for token in tokens]
        clean["logprobs"] = [None if (x := finite_number(value)) is None else round(x, 4) for value in logprobs]
    return clean


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    return {
        "tool": _text(call.get("tool")),
        "arguments": _clip("" if arguments in (None, {}) else _text(arguments)),
        "text": _clip(_text(call.get("text"))),
        "status": _text(call.get("status")),
        "error_type": _text(call.get("error_type")),
        "source": _text(call.get("source")),
        **{
            key: finite_number(call.get(key))
            for key in ("cost_usd", "latency_s", "attempts", "input_tokens", "output_tokens", "truncated_chars")
        },
    }


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _clip(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}\n[{len(text) - MAX_TEXT_CHARS} more characters are in the file under episodes/]"
