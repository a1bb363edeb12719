"""The results page, in Markdown, from what the experiments' folders hold. What was not run is said, not guessed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from orchestra_envs.env import PREFERENCE_OBJECTIVES
from orchestra_envs.market.experts import EXPERTS
from orchestra_envs.market.published import ALONE, WITH_EXPERTS
from orchestra_envs.prices import TOOLORCHESTRA_PRICES

from orchestra_jax.eval.store import read_episodes
from orchestra_jax.experiments.conduct import evaluation_folder, seed_folder
from orchestra_jax.experiments.plan import Claim, Experiment
from orchestra_jax.experiments.runs import TrainingRun
from orchestra_jax.report.policies import format_significant

CENTS_PER_USD = 100.0
SECONDS_PER_MINUTE = 60.0
SIGNIFICANT = 0.05

_INTRODUCTION = """# The paper's experiments, in simulation

Written by `{command}`; every number comes
from the files of the runs, none by hand. Evaluated on {date} (UTC).

**These are simulations.** The market's experts are biased coins with a price list and a clock
(`envs/orchestra_envs/market/experts.py`): prices and latencies are the paper's table, the skills are this project's
choice. Policies are tiny (0.7M parameters, trained from scratch) and read a name, a price and a latency per tool.

- What they can tell: whether the reward, the advantage and the update do what they should; which way each part of the
  reward pushes; what a wrong sign does; whether a policy reads words and prices that were changed; how sure a
  difference is.
- What they cannot tell: what a real 8B model would score on HLE, FRAMES or tau2, or pay. No figure here stands beside
  one of the paper's. No prompted model was run: that takes its weights or an endpoint; stand-ins are named as such.
- Each run has {steps} steps of 16 tasks in groups of 16; there {seeds}. Intervals and tests are over tasks: how much
  another seed differs, the columns of the seeds tell.

Claims were written into the configs before any evaluation. A claim *holds* where the difference has its sign and the
paired permutation test gives p < 0.05 after Holm's correction over all pairs of the suite; it is *refuted* where the
opposite is so, else *open*.
"""


def write_page(
    file: Path,
    experiments: Sequence[Experiment],
    runs: Mapping[int, Mapping[str, TrainingRun]],
    out: Path,
    command: str,
) -> None:
    """Writes the page.

    Args:
      file: the Markdown file.
      experiments: in the order of the page.
      runs: the training runs by seed. Details are those of the first seed.
      out: the folder of runs and evaluations.
      command: what the page says it was written by.
    """
    seeds = list(runs)
    first = seeds[0]
    found = {(e.name, seed): _summary(evaluation_folder(out, seed, e.name)) for e in experiments for seed in seeds}
    steps = max((run.config.train.steps for run in runs[first].values() if run.start), default=0)
    counted = "is one seed" if len(seeds) == 1 else f"are {len(seeds)} seeds"
    dates = [file.stat().st_mtime for seed in seeds for file in seed_folder(out, seed).glob("eval/*/summary.json")]
    date = datetime.fromtimestamp(max(dates), UTC).date().isoformat() if dates else "no day yet"
    lines = [_INTRODUCTION.format(command=command, steps=steps, seeds=counted, date=date)]
    lines += [*_claims_overview(experiments, found, seeds), ""]
    lines += [*_calibration(found.get(("routing", first))), "", *_training(runs)]
    for experiment in experiments:
        summaries = {seed: found[experiment.name, seed] for seed in seeds}
        lines += ["", *_experiment(experiment, summaries, evaluation_folder(out, first, experiment.name))]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _summary(folder: Path) -> dict[str, Any] | None:
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


# ----------------------------------------------------------------------------------------------------------
# claims
# ----------------------------------------------------------------------------------------------------------


def verdict(claim: Claim, comparisons: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How a claim came out ("holds", "refuted" or "open"), and the difference a - b with its interval."""
    for row in comparisons:
        if {row["a"], row["b"]} == {claim.a, claim.b} and row[claim.metric] is not None:
            entry = row[claim.metric]
            forth = row["a"] == claim.a
            difference = entry["difference"] if forth else -entry["difference"]
            low, high = entry["ci95"] if forth else (-entry["ci95"][1], -entry["ci95"][0])
            text = _amount(difference, claim.metric, low, high)
            if entry["p_holm"] >= SIGNIFICANT:
                return "open", text
            return ("holds" if (difference > 0) == (claim.relation == ">") else "refuted"), text
    return "open", "not compared"


def _claims_overview(
    experiments: Sequence[Experiment], found: Mapping[tuple[str, int], Any], seeds: Sequence[int]
) -> Iterator[str]:
    yield "## What was claimed, and what came out"
    yield ""
    yield f"| experiment | suite | claim | {' | '.join(f'seed {seed}' for seed in seeds)} |"
    yield f"|---|---|---|{'---|' * len(seeds)}"
    for experiment in experiments:
        for claim in experiment.claims:
            said = f"{_METRIC_WORDS[claim.metric]} of `{claim.a}` {claim.relation} `{claim.b}`"
            cells = []
            for seed in seeds:
                summary = found[experiment.name, seed]
                part = summary["suites"].get(claim.suite) if summary else None
                result, difference = verdict(claim, part["comparisons"]) if part else ("not run", "")
                cells.append(f"**{result}** {difference}".strip())
            yield f"| {experiment.title.split()[0]} | {claim.suite} | {said} | {' | '.join(cells)} |"


_METRIC_WORDS = {"accuracy": "accuracy", "cost_usd": "cost", "latency_s": "latency", "preference": "preference"}


def _amount(value: float, metric: str, low: float, high: float) -> str:
    scale, unit, decimals = {
        "accuracy": (100.0, " points", 1),
        "cost_usd": (CENTS_PER_USD, " ¢", 2),
        "latency_s": (1.0, " s", 1),
        "preference": (1.0, "", 3),
    }[metric]
    shown, ends = f"{scale * value:+.{decimals}f}{unit}", [f"{scale * end:+.{decimals}f}" for end in (low, high)]
    return f"{shown} ({ends[0]} to {ends[1]})"


# ----------------------------------------------------------------------------------------------------------
# calibration and training
# ----------------------------------------------------------------------------------------------------------


def _calibration(routing: Mapping[str, Any] | None) -> Iterator[str]:
    published = {_key(name): row for name, row in TOOLORCHESTRA_PRICES.items()}
    yield "## How the market compares with published numbers"
    yield ""
    yield "Prices and latencies of the experts (dollars per million tokens, seconds as the tools advertise them):"
    yield ""
    yield "| expert | price in the market | published | latency, s | ¢ per answer in the market | published, alone |"
    yield "|---|---|---|---|---|---|"
    for expert in EXPERTS.values():
        row: Any = published.get(_key(expert.name))
        price = f"{row['input_usd_per_million']:g} / {row['output_usd_per_million']:g}" if row else "none"
        tokens = float(np.mean([expert.output_tokens[kind] for kind in _TYPES]))
        cents = CENTS_PER_USD * tokens * expert.output_usd_per_million / 1e6
        alone = ALONE.get(expert.name)
        shown = f"{alone[0]:g} ¢, {alone[1]:g} min" if alone else "not published"
        own = f"{expert.input_usd_per_million:g} / {expert.output_usd_per_million:g}"
        yield f"| {expert.name} | {own} | {price} | {expert.latency_s:g} | {cents:.2f} | {shown} |"
    yield ""
    yield (
        "An answer of the strongest expert costs about two thirds of the 6.2 ¢ that the paper's table 1 gives GPT-5"
        " alone on HLE and FRAMES; its advertised 96 s is 40% of the 4.1 minutes there. The published numbers do "
        "not agree with each other on latency (15 s advertised for Llama-3.3-70B, 84 s in table 1), so the "
        "advertised ones, which the orchestrator is told, are the market's. Skills cannot be calibrated: the "
        "market's tasks are its own. The paper's cost column cannot be computed by its released code, and should be"
        " read with care."
    )
    if routing is None:
        return
    policies = routing["suites"]["market"]["policies"]
    ours = policies["published:orchestrator-8b"]["cost_usd"]
    yield ""
    yield (
        "Whom prompted models ask (table 15), put into the market as stand-ins: their costs relative to the "
        "stand-in of Orchestrator-8B, beside the paper's ratios (table 1, with expert tools). Agreement says that "
        "shares of calls and prices carry over; it says nothing of accuracy. The paper's orchestrators made 8 to 16"
        " calls a task, a stand-in makes one, so only the ratios can be compared."
    )
    yield ""
    yield "| model | paper, ¢ | paper, ratio | stand-in, ¢ | stand-in, ratio |"
    yield "|---|---|---|---|---|"
    for model, (_, cents, _) in WITH_EXPERTS.items():
        entry = policies.get(f"published:{model}")
        if entry is not None:
            ratio = cents / WITH_EXPERTS["orchestrator-8b"][1]
            cost = entry["cost_usd"]
            yield f"| {model} | {cents:g} | {ratio:.1f} | {CENTS_PER_USD * cost:.2f} | {cost / ours:.1f} |"


_TYPES = ("arithmetic", "lookup", "word_problem", "reasoning")


def _key(name: str) -> str:
    return name.lower().removesuffix("-instruct")


def _training(runs: Mapping[int, Mapping[str, TrainingRun]]) -> Iterator[str]:
    seeds = list(runs)
    yield "## The training runs"
    yield ""
    heads = " | ".join(f"seed {seed}: accuracy, ¢, minutes" for seed in seeds)
    yield f"| run | what it is | begins at | {heads} |"
    yield f"|---|---|---|{'---|' * len(seeds)}"
    for name, run in runs[seeds[0]].items():
        cells = " | ".join(_training_cell(runs[seed][name]) for seed in seeds)
        yield f"| `{name}` | {run.title} | {run.start or 'fresh weights'} | {cells} |"
    yield ""
    yield (
        "Accuracy (%) and cost are those of the training rollouts, the first eight steps to the last eight; minutes on "
        "two shared CPU cores, without compiling."
    )


_ENDS = 8  # steps at either end of a run whose mean is shown


def _training_cell(run: TrainingRun) -> str:
    if not run.is_finished:
        return "**not run**"
    rows = _metrics(run.folder / "metrics.jsonl")
    minutes = sum(v for row in rows for key, v in row.items() if key.startswith("time/")) / SECONDS_PER_MINUTE
    trained = [row for row in rows if row.get("phase") == "train"]
    if not trained:
        return f"{minutes:.1f} min"

    def ends(key: str, scale: float, decimals: int) -> str:
        means = (scale * float(np.mean([row[key] for row in part])) for part in (trained[:_ENDS], trained[-_ENDS:]))
        return " to ".join(f"{mean:.{decimals}f}" for mean in means)

    return f"{ends('outcome/accuracy', 100.0, 0)}, {ends('cost/mean_usd', CENTS_PER_USD, 2)}, {minutes:.1f}"


def _metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


# ----------------------------------------------------------------------------------------------------------
# one experiment
# ----------------------------------------------------------------------------------------------------------


def _experiment(experiment: Experiment, summaries: Mapping[int, Any], folder: Path) -> Iterator[str]:
    seeds = list(summaries)
    summary = summaries[seeds[0]]
    yield f"## {experiment.title}"
    yield ""
    yield experiment.question
    yield ""
    yield f"    orchestra experiments {experiment.name}"
    yield ""
    yield experiment.reading
    if summary is None:
        yield ""
        yield "**Not run.**"
        return
    many = len(experiment.suites) >= _MANY_SUITES
    if many:
        yield ""
        yield from _suites_overview(experiment, summary)
        yield ""
        yield "<details><summary>Every suite with intervals, latency, preference and calls</summary>"
    for suite in experiment.suites:
        part = summary["suites"].get(suite.name)
        yield ""
        if part is None:
            yield f"**Suite `{suite.name}`: not run.**"
            continue
        yield f"Suite `{suite.name}` ({_described(suite.spec()['env']['kwargs'])}; {_num_tasks(part)} tasks):"
        yield ""
        yield from _policies_table(part)
        more = {seed: summaries[seed]["suites"].get(suite.name) for seed in seeds[1:] if summaries[seed]}
        if more := {seed: other for seed, other in more.items() if other}:
            yield ""
            yield from _other_seeds(experiment, {seeds[0]: part, **more})
    if many:
        yield ""
        yield "</details>"
    for kind in experiment.breakdowns:
        for suite in experiment.suites:
            if suite.name in summary["suites"]:
                yield ""
                yield from _breakdown(kind, suite.name, list(summary["suites"][suite.name]["policies"]), folder)


_MANY_SUITES = 3  # from so many on, a table of all suites comes first and the details are folded


def _suites_overview(experiment: Experiment, summary: Mapping[str, Any]) -> Iterator[str]:
    """Accuracy and cost of every policy in every suite."""
    parts = {s.name: summary["suites"][s.name]["policies"] for s in experiment.suites if s.name in summary["suites"]}
    yield "Accuracy in %, and cost in cents, by suite:"
    yield ""
    yield f"| policy | {' | '.join(f'`{name}`' for name in parts)} |"
    yield f"|---|{'---|' * len(parts)}"
    for policy in next(iter(parts.values())):
        entries = [part[policy] for part in parts.values()]
        cells = [f"{100 * e['accuracy']:.1f}, {format_significant(CENTS_PER_USD * e['cost_usd'])}" for e in entries]
        yield f"| `{policy}` | {' | '.join(cells)} |"


def _other_seeds(experiment: Experiment, parts: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """The trained policies of every seed, side by side."""
    yield f"The runs of seeds {', '.join(map(str, parts))}:"
    yield ""
    yield "| policy | accuracy, % | cost, ¢ | latency, min | preference |"
    yield "|---|---|---|---|---|"
    for name in (f"{run}{mode}" for run in experiment.runs for mode in ("", ":greedy")):
        entries = [part["policies"].get(name) for part in parts.values()]
        columns = (("accuracy", 100.0), ("cost_usd", CENTS_PER_USD), ("latency_s", 1 / 60), ("preference", 1.0))
        cells = [" / ".join(_of_seed(entry, key, scale) for entry in entries) for key, scale in columns]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _of_seed(entry: Mapping[str, Any] | None, key: str, scale: float) -> str:
    return "–" if entry is None or entry[key] is None else format_significant(scale * entry[key])


def _described(kwargs: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{name} {shown(inner)}" for name, inner in value.items())
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return "; ".join(f"{name}: {shown(value)}" for name, value in kwargs.items() if name != "types")


def _num_tasks(part: Mapping[str, Any]) -> int:
    return max(entry["num_tasks"] for entry in part["policies"].values())


def _policies_table(part: Mapping[str, Any]) -> Iterator[str]:
    yield "| policy | accuracy, % | cost, ¢ | latency, min | preference | calls per task, and whose |"
    yield "|---|---|---|---|---|---|"
    for name, entry in part["policies"].items():
        cells = [
            _cell(entry, "accuracy", 100.0),
            _cell(entry, "cost_usd", CENTS_PER_USD),
            _cell(entry, "latency_s", 1 / SECONDS_PER_MINUTE),
            _cell(entry, "preference", 1.0),
            _tools(entry),
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _cell(entry: Mapping[str, Any], key: str, scale: float) -> str:
    value, interval = entry.get(key), entry["ci95"].get(key)
    if value is None:
        return "–"
    low, high = (format_significant(end * scale) for end in interval)
    return f"{format_significant(value * scale)} ({low}–{high})"


def _tools(entry: Mapping[str, Any]) -> str:
    shares = sorted(entry["tool_shares"].items(), key=lambda item: -item[1])
    listed = ", ".join(f"{tool} {100 * share:.0f}%" for tool, share in shares if share >= 0.01)
    return f"{sum(entry['tools'].values()):.2f}: {listed}" if listed else "0"


def _breakdown(kind: str, suite: str, policies: Sequence[str], folder: Path) -> Iterator[str]:
    """Accuracy, cost and tools of the greedy policies and the oracle by type of task, or by kind of wish."""
    names = [name for name in policies if name.endswith(":greedy") or name == "oracle"]
    per_policy = {name: _by_kind(read_episodes(folder, suite, name), kind) for name in names}
    kinds = sorted({group for groups in per_policy.values() for group in groups})
    by_wish = kind == "wish"
    asked = "what is wished for" if by_wish else "the type of task"
    met = "; in how many episodes a wished-for tool was called" if by_wish else ""
    yield f"Suite `{suite}` by {asked} (accuracy in %, cents, minutes; the tools called most{met}):"
    yield ""
    yield f"| {'wish' if by_wish else 'type'} | {' | '.join(f'`{name}`' for name in names)} |"
    yield f"|---|{'---|' * len(names)}"
    for group in kinds:
        cells = [_group_cell(per_policy[name].get(group, []), by_wish=by_wish) for name in names]
        yield f"| {group} | {' | '.join(cells)} |"


def _by_kind(records: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[wish(record["weights"]) if kind == "wish" else record["task_id"].split("/")[1]].append(record)
    return groups


def wish(weights: Mapping[str, float]) -> str:
    """What a preference asks for, in words, from its weights."""
    num_tools = len(_wished_tools(weights))
    parts = [word for word, name in (("cheap", "cost"), ("fast", "latency")) if weights.get(name, 0.0) >= 0.5]
    if num_tools:
        parts.append("a tool" if num_tools == 1 else f"{num_tools} tools")
    return " and ".join(parts) or "only right"


def _wished_tools(weights: Mapping[str, float]) -> list[str]:
    return [name for name, weight in weights.items() if weight > 0 and name not in PREFERENCE_OBJECTIVES]


def _group_cell(records: Sequence[Mapping[str, Any]], *, by_wish: bool) -> str:
    if not records:
        return "–"
    accuracy = 100 * float(np.mean([record["outcome"] for record in records]))
    cents = CENTS_PER_USD * float(np.mean([record["cost_usd"] for record in records]))
    minutes = float(np.mean([record["latency_s"] for record in records])) / SECONDS_PER_MINUTE
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["tool_counts"])
    most = ", ".join(tool for tool, _ in counts.most_common(2)) or "none"
    text = f"{accuracy:.0f}, {format_significant(cents, 2)}, {format_significant(minutes, 2)}; {most}"
    wished = [(record, _wished_tools(record["weights"])) for record in records]
    met = [any(record["tool_counts"].get(tool) for tool in tools) for record, tools in wished if tools]
    return f"{text}; {100 * float(np.mean(met)):.0f}%" if by_wish and met else text
