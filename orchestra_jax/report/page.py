"""The report of a run: one HTML file that needs no network and no server.

Everything that comes out of a run (questions, tool output, what the policy wrote) is text that anybody may have put
there. It reaches the page in two ways only: through Jinja with autoescape, or inside a JSON data block with every
``<``, ``>`` and ``&`` escaped, from which the script builds elements by ``textContent``. A content security policy
with the hashes of our own style and script makes the browser refuse anything else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from orchestra_jax.report.load import Curves, Run, load_run
from orchestra_jax.report.policies import (
    METRICS,
    Estimate,
    Metric,
    PolicyRow,
    best_names,
    format_interval,
    format_mean,
    policy_rows,
)

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("dom.js", "charts.js", "scatter.js", "explorer.js", "main.js")
_METRIC = {metric.key: metric for metric in METRICS}


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of the run in ``run_dir`` and return its path.

    Args:
        run_dir: a run folder, finished or not; missing and broken parts are said on the page.
        out: where to write; ``report.html`` in ``run_dir`` by default. An older report is replaced at once.

    Raises:
        ValueError: ``run_dir`` is no run folder.
    """
    run_dir = Path(run_dir)
    out = run_dir / "report.html" if out is None else Path(out)
    page = render_report(load_run(run_dir))
    out.parent.mkdir(parents=True, exist_ok=True)
    _replace_file(out, page.encode("utf-8"))
    return out


def render_report(run: Run) -> str:
    """The whole page as a string."""
    rows = policy_rows(run.summary)
    style = (_ASSETS / "page.css").read_text(encoding="utf-8")
    script = _script()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        run=run,
        facts=_facts(run, rows),
        headline=headline(run, rows),
        tiles=_tiles(rows),
        table=_table(rows),
        metrics=METRICS,
        style=Markup(style),
        script=Markup(script),
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
        data=_json_for_script(_payload(run, rows)),
    )


def headline(run: Run, rows: Sequence[PolicyRow]) -> str:
    """The result in one sentence: the trained policy against the most accurate single tool, or what there is."""
    by_name = {row.name: row for row in rows}
    trained = by_name.get("trained") or by_name.get("trained:greedy")
    if trained and _known(trained):
        experts = [row for row in rows if row.name.startswith("always:") and _known(row)]
        if experts:
            rival = max(experts, key=lambda row: row.estimates["accuracy"].value or 0.0)
            return f"{_solves(trained)}, {_price_against(trained, rival)}."
        return f"{_solves(trained)}."
    known = [row for row in rows if _known(row)]
    if known:
        best = max(known, key=lambda row: row.estimates["accuracy"].value or 0.0)
        return f"{len(rows)} policies were compared; the most accurate is {best.label} ({_result(best)})."
    return _headline_from_curves(run.curves.get("train"), run.curves.get("sft"))


def _headline_from_curves(train: Curves | None, sft: Curves | None) -> str:
    curves = train or sft
    if curves is None or not curves.steps:
        return "Nothing has been measured yet."
    step = f"{curves.steps[-1]:g}"
    if train is None:
        return f"The supervised warm start has come to step {step}; nothing has been evaluated yet."
    accuracy, cost = (_last(train.series.get(name)) for name in ("outcome/accuracy", "cost/mean_usd"))
    if accuracy is None or cost is None:
        return f"Training has come to step {step}; nothing has been evaluated yet."
    return (
        f"Nothing has been evaluated yet: at step {step} the policy solves "
        f"{_mean_with_unit(accuracy, 'accuracy')} of its training tasks at {_mean_with_unit(cost, 'cost_usd')} each."
    )


def _solves(row: PolicyRow) -> str:
    accuracy, cost = row.estimates["accuracy"].value, row.estimates["cost_usd"].value
    assert accuracy is not None
    assert cost is not None
    subject = "The trained policy" + (", decoding greedily," if row.name.endswith(":greedy") else "")
    return (
        f"{subject} solves {_mean_with_unit(accuracy, 'accuracy')} of the held-out tasks "
        f"at {_mean_with_unit(cost, 'cost_usd')} each"
    )


def _price_against(row: PolicyRow, rival: PolicyRow) -> str:
    cost, rival_cost = row.estimates["cost_usd"].value or 0.0, rival.estimates["cost_usd"].value or 0.0
    label = rival.label.replace("-", "\N{NON-BREAKING HYPHEN}")
    name = f"“{label}”, the most accurate single tool ({_result(rival)})"
    if cost == rival_cost or (rival_cost > 0 and 0.95 < cost / rival_cost < 1.05):
        return f"at the price of {name}"
    if cost == 0 or rival_cost == 0:
        return f"against {name}"
    if cost < rival_cost:
        return f"{_ratio(rival_cost / cost, 'cheaper', 1 - cost / rival_cost)} than {name}"
    return f"{_ratio(cost / rival_cost, 'dearer', cost / rival_cost - 1)} than {name}"


def _ratio(times: float, word: str, share: float) -> str:
    return f"{100 * share:.0f}% {word}" if times < 2 else f"{times:.{0 if times >= 10 else 1}f} times {word}"


def _known(row: PolicyRow) -> bool:
    return row.estimates["accuracy"].value is not None and row.estimates["cost_usd"].value is not None


def _result(row: PolicyRow) -> str:
    accuracy, cost = row.estimates["accuracy"].value or 0.0, row.estimates["cost_usd"].value or 0.0
    return f"{_mean_with_unit(accuracy, 'accuracy')} at {_mean_with_unit(cost, 'cost_usd')}"


def _mean_with_unit(value: float, key: str) -> str:
    metric = _METRIC[key]
    space = "\N{NO-BREAK SPACE}" if metric.unit == "s" else ""
    return f"{format_mean(value, metric)}{space}{metric.unit}"


def _facts(run: Run, rows: Sequence[PolicyRow]) -> list[tuple[str, str]]:
    """What was trained, on what and how long: label and value."""
    facts = []
    for key, label in (("env_id", "environment"), ("seed", "seed")):
        value = run.summary.get(key)
        if isinstance(value, str | int):
            facts.append((label, str(value)))
    for phase, label in (("sft", "warm start"), ("train", "training")):
        curves = run.curves.get(phase)
        if curves and curves.steps:
            facts.append((label, f"{curves.steps[-1]:g} steps"))
    sizes = {row.num_episodes for row in rows if row.num_episodes is not None}
    if sizes:
        span = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
        facts.append(("evaluation", f"{span} episodes a policy"))
    return facts


def _tiles(rows: Sequence[PolicyRow]) -> list[dict[str, Any]]:
    """The four numbers of the trained policy with those of its warm start, sampled and greedy."""
    by_name = {row.name: row for row in rows}
    trained = by_name.get("trained")
    if trained is None:
        return []
    tiles = []
    for key in ("accuracy", "cost_usd", "cost_per_solved_usd", "latency_s"):
        value = trained.estimates[key].value
        if value is None:
            continue
        before = _value(by_name.get("warm_start"), key)
        greedy, greedy_before = (_value(by_name.get(f"{name}:greedy"), key) for name in ("trained", "warm_start"))
        tiles.append(
            {
                "title": _METRIC[key].title,
                "value": _mean_with_unit(value, key),
                "before": None if before is None else _mean_with_unit(before, key),
                "verdict": _verdict(value, before, _METRIC[key]),
                "greedy": None if greedy is None else _mean_with_unit(greedy, key),
                "greedy_before": None if greedy_before is None else _mean_with_unit(greedy_before, key),
            }
        )
    return tiles


def _value(row: PolicyRow | None, key: str) -> float | None:
    return None if row is None else row.estimates[key].value


def _verdict(value: float, before: float | None, metric: Metric) -> str:
    """``better``, ``worse`` or ``same`` (as the numbers are written)."""
    if before is None or format_mean(value, metric) == format_mean(before, metric):
        return "same"
    return "better" if (value > before) == metric.higher_is_better else "worse"


def _table(rows: Sequence[PolicyRow]) -> list[dict[str, Any]]:
    """Rows of the table of policies: texts, and where the small interval bars lie (in percent of their width)."""
    best = {metric.key: best_names(rows, metric) for metric in METRICS}
    scale = {metric.key: _scale([row.estimates[metric.key] for row in rows]) for metric in METRICS}
    return [
        {
            "row": row,
            "cells": [
                {
                    "metric": metric,
                    "sort": row.estimates[metric.key].value,
                    "mean": _table_mean(row.estimates[metric.key], metric),
                    "interval": format_interval(row.estimates[metric.key], metric),
                    "counted": row.counted if metric.key == "accuracy" else "",
                    "best": row.name in best[metric.key],
                    "bar": _bar(row.estimates[metric.key], scale[metric.key]),
                }
                for metric in METRICS
            ],
        }
        for row in rows
    ]


def _table_mean(estimate: Estimate, metric: Metric) -> str:
    return "" if estimate.value is None else _mean_with_unit(estimate.value, metric.key)


def _scale(estimates: Sequence[Estimate]) -> float:
    ends = [end for e in estimates for end in (e.value, e.high) if end is not None]
    return max(ends, default=0.0)


def _bar(estimate: Estimate, scale: float) -> dict[str, float] | None:
    if estimate.value is None or scale <= 0:
        return None
    share = [0.0 if x is None else round(100 * min(max(x, 0.0) / scale, 1.0), 2) for x in asdict(estimate).values()]
    value, low, high = share
    if estimate.low is None:
        low = high = value
    elif estimate.high is None:
        high = 100.0
    return {"value": value, "low": low, "high": high}


def _payload(run: Run, rows: Sequence[PolicyRow]) -> dict[str, Any]:
    """What the script draws from."""
    return {
        "policies": [
            {
                "name": row.name,
                "label": row.label,
                "kind": row.kind,
                "num_episodes": row.num_episodes,
                "estimates": {key: asdict(estimate) for key, estimate in row.estimates.items()},
            }
            for row in rows
        ],
        "curves": {phase: _short_curves(curves) for phase, curves in run.curves.items()},
        "trajectories": run.trajectories,
    }


def _short_curves(curves: Curves) -> dict[str, Any]:
    """Six significant digits are more than a curve shows; they halve the page."""
    series = {
        name: [None if value is None else float(f"{value:.6g}") for value in values]
        for name, values in curves.series.items()
    }
    return {"steps": curves.steps, "series": series}


def _last(values: Sequence[float | None] | None) -> float | None:
    return next((value for value in reversed(values or []) if value is not None), None)


def _script() -> str:
    parts = [(_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _json_for_script(payload: Any) -> Markup:
    """JSON that can stand in a script element: no character in it can end the element or begin a comment."""
    text = json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _replace_file(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader (or a crash) never meets half a page."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
