"""`orchestra demo`: a trained policy orchestrates tools, side by side with always the strongest expert."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from orchestra_jax.config import ConfigError
from orchestra_jax.demo.episodes import RIVAL, TASK_SEED, Stage, held_out_results, open_stage, question_of, task_seeds
from orchestra_jax.demo.timeline import length_s, moment_at, spans_of
from orchestra_jax.demo.view import Lane, cents, frame, solved, totals_table
from orchestra_jax.report.console import format_duration, policies_table
from orchestra_jax.rollout.episode import Episode

SPEED = 12.0
"""Seconds of the market in a second of the show: twelve tasks then take about two minutes."""

FRAME_S = 1 / 12

HOLD_S = 1.0
"""How long the end of a task stays in sight."""

MOST_TASKS = 512

NOTE = (
    "A simulated market: prices and latencies are published ones, the experts' skills are our choice, no model is "
    "called. The policy's turns are sampled here and now."
)


def demo(
    *,
    num_tasks: int = 12,
    fast: bool = False,
    seed: int = TASK_SEED,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Lane]:
    """Plays held-out tasks of the market by the shipped policy and by its rival, and shows both.

    Args:
      num_tasks: how many, the first of those that `seed` draws.
      fast: waits for nothing; each task is one line.
      seed: of the tasks.
      console: where to; standard output by default. No terminal: lines, without waiting.
      clock: seconds, monotonic.
      sleep: waits so many seconds.

    Returns:
      What each of the two did in all.

    Raises:
      ConfigError: a flag makes no sense.
    """
    if not 1 <= num_tasks <= MOST_TASKS:
        raise ConfigError(f"--tasks {num_tasks}: must be 1 to {MOST_TASKS}")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"--seed {seed}: must be at least 0 and less than 2^31")
    console = console or Console()
    live = console.is_terminal and not fast
    seeds = task_seeds(num_tasks, seed)
    with console.status("loading the policy and compiling its sampler"), open_stage() as stage:
        stage.trained(seeds[0])  # compiles
        lanes = [Lane(f"trained, {stage.num_parameters / 1e6:.1f}M", "bold cyan"), Lane(RIVAL, "yellow")]
        console.print(NOTE, style="dim")
        if live:
            _play_live(stage, seeds, lanes, console, clock, sleep)
        else:
            _play_lines(stage, seeds, lanes, console)
    console.print()
    console.print(totals_table(lanes, console.width))
    console.print(f"\n{_verdict(lanes)}", highlight=False)
    console.print(_held_out())
    return lanes


def _play_live(
    stage: Stage,
    seeds: list[int],
    lanes: list[Lane],
    console: Console,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    spinner = Spinner("dots")
    note = f"Simulated. The clock runs {SPEED:g} times faster than the market's."

    with Live(console=console, auto_refresh=False, transient=True) as display:
        for number, seed in enumerate(seeds, start=1):
            episodes = [stage.trained(seed), stage.rival(seed)]
            spans = [spans_of(episode, SPEED) for episode in episodes]
            picture = partial(
                frame,
                number,
                len(seeds),
                question_of(episodes[0]),
                lanes,
                outcomes=[solved(episode) for episode in episodes],
                spinner=spinner,
                note=note,
                width=console.width,
            )
            begun, whole_s = clock(), max(map(length_s, spans)) + HOLD_S
            while (passed_s := clock() - begun) < whole_s:
                display.update(picture([moment_at(each, passed_s) for each in spans]), refresh=True)
                sleep(FRAME_S)
            for lane, episode in zip(lanes, episodes):
                lane.add(episode)


def _play_lines(stage: Stage, seeds: list[int], lanes: list[Lane], console: Console) -> None:
    for number, seed in enumerate(seeds, start=1):
        episodes = [stage.trained(seed), stage.rival(seed)]
        console.print(
            f"\n{number}/{len(seeds)} {question_of(episodes[0])}", markup=False, highlight=False, soft_wrap=True
        )
        for lane, episode in zip(lanes, episodes):
            lane.add(episode)
            console.print(f"  {_line(lane, episode)}", markup=False, highlight=False, soft_wrap=True)


def _line(lane: Lane, episode: Episode) -> str:
    """An episode in a line: its calls, its answer, what it took."""
    calls = [call["tool"] for turn in episode.turns for call in turn.calls]
    answer = episode.turns[-1].text.strip() if episode.end_reason == "answered" else f"no answer ({episode.end_reason})"
    way = " > ".join([*calls, answer])
    mark = "right" if solved(episode) else "wrong"
    return f"{lane.name:<14} {way}  [{mark}, {cents(episode.cost_usd)}, {format_duration(episode.latency_s)}]"


def _verdict(lanes: list[Lane]) -> str:
    ours, theirs = lanes
    text = (
        f"On these {len(ours.outcomes)} tasks the trained policy solved {sum(ours.outcomes)}, "
        f"{RIVAL} {sum(theirs.outcomes)}"
    )
    if ours.cost_usd > 0 and ours.latency_s > 0:
        money, took = theirs.cost_usd / ours.cost_usd, theirs.latency_s / ours.latency_s
        text += f", which spent {money:.1f} times as much money and took {took:.1f} times as long"
    return text + "."


def _held_out() -> Table:
    results = held_out_results()
    total = min(entry["num_episodes"] for entry in results["policies"].values())
    return policies_table(results, title=f"\nboth on {total} held-out tasks, measured when the policy was made")
