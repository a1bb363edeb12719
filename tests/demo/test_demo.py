"""The demonstration: what is shown when, and that the shipped policy is worth showing."""

import io
import json

import pytest
from rich.console import Console
from rich.spinner import Spinner

from orchestra_jax.cli.demo import demo
from orchestra_jax.cli.main import main
from orchestra_jax.config import ConfigError
from orchestra_jax.demo.episodes import POLICY_FOLDER, RIVAL, held_out_results, stage_config, task_seeds
from orchestra_jax.demo.timeline import WRITE_S, length_s, moment_at, spans_of
from orchestra_jax.demo.view import Lane, frame, totals_table
from orchestra_jax.rollout.episode import Episode, Turn


def call(tool="gpt-5", cost_usd=0.04, latency_s=60.0):
    return {
        "tool": tool,
        "arguments": {},
        "status": "ok",
        "error_type": "",
        "text": "Answer: 7",
        "cost_usd": cost_usd,
        "cost_known": True,
        "latency_s": latency_s,
    }


def an_episode(*calls, outcome=1.0, end_reason="answered"):
    turns = [
        Turn("assistant", '<tool_call>\n{"name": "gpt-5", "arguments": {}}\n</tool_call>', 5, 0),
        Turn("tool", "Answer: 7", 4, 5, list(calls or [call()])),
        Turn("assistant", "Answer: 7", 2, 9),
    ]
    cost, latency = (sum(c[key] for c in turns[1].calls) for key in ("cost_usd", "latency_s"))
    return Episode(1, 0, "What?", turns=turns, outcome=outcome, cost_usd=cost, latency_s=latency, end_reason=end_reason)


def text_of(renderable, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


# --- what is there at which moment ---


def test_money_and_time_grow_while_a_tool_works_and_stand_still_while_the_policy_writes():
    spans = spans_of(an_episode(), speed=10.0)
    assert [span.kind for span in spans] == ["write", "wait", "write"]
    assert length_s(spans) == pytest.approx(2 * WRITE_S + 6.0)
    assert moment_at(spans, 0.0).cost_usd == 0.0
    assert moment_at(spans, WRITE_S / 2).latency_s == 0.0
    half = moment_at(spans, WRITE_S + 3.0)
    assert (half.cost_usd, half.latency_s) == (pytest.approx(0.02), pytest.approx(30.0))
    assert half.during == "gpt-5 at work"
    end = moment_at(spans, 1e9)
    assert (end.cost_usd, end.latency_s, end.during) == (pytest.approx(0.04), pytest.approx(60.0), "")


def test_turns_come_one_after_the_other():
    spans = spans_of(an_episode(), speed=10.0)
    seen = [[row.label for row in moment_at(spans, t).rows] for t in (0.0, WRITE_S + 0.1, WRITE_S + 6.1, 99.0)]
    assert seen == [[], ["call"], ["call", "result"], ["call", "result", "answer"]]


def test_calls_of_one_turn_take_the_time_of_the_slowest_and_the_money_of_all():
    episode = an_episode(call(cost_usd=0.01, latency_s=20.0), call("search", cost_usd=0.02, latency_s=50.0))
    wait = spans_of(episode, speed=10.0)[1]
    assert (wait.duration_s, wait.cost_usd, wait.latency_s) == (5.0, pytest.approx(0.03), 50.0)


def test_an_episode_without_turns_has_ended():
    assert moment_at((), 0.0).during == ""


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_picture_fits_and_shows_verdicts_only_when_an_episode_has_ended(width):
    spans = spans_of(an_episode(), speed=10.0)
    lanes = [Lane("trained", "cyan", [True], 0.01, 5.0), Lane(RIVAL, "yellow", [False], 0.05, 99.0)]
    moments = [moment_at(spans, 99.0), moment_at(spans, 1.0)]
    text = text_of(
        frame(2, 9, "[bold]What?", lanes, moments, [True, False], Spinner("dots"), "simulated", width), width
    )
    assert max(map(len, text.splitlines())) <= width
    assert "[bold]What?" in text  # as it is, not as markup
    assert "task 2 of 9" in text
    assert "2 of 2" in text  # the first lane's verdict counts
    assert "0 of 1" in text  # the second's not yet
    assert "wrong" not in text


def test_totals_add_up():
    lane = Lane("trained", "cyan")
    for outcome in (1.0, 0.0, None):
        lane.add(an_episode(outcome=outcome))
    text = text_of(totals_table([lane], 100))
    assert "1 of 3" in text
    assert "12.0¢" in text
    assert "3:00" in text


# --- the shipped policy ---


def test_the_shipped_policy_is_small_and_says_how_it_was_made():
    assert sum(file.stat().st_size for file in POLICY_FOLDER.iterdir()) < 10e6
    told = (POLICY_FOLDER / "run.yaml").read_text()
    assert "orchestra train configs/quickstart.yaml" in told
    assert stage_config().env.kwargs["split"] == "test"
    trained, rival = (held_out_results()["policies"][name] for name in ("trained:greedy", RIVAL))
    assert trained["num_episodes"] == rival["num_episodes"] == 512


def test_tasks_are_held_out_and_the_same_each_time():
    assert task_seeds(4) == task_seeds(8)[:4]
    assert min(task_seeds(50)) >= 2**30


def test_the_policy_solves_as_much_as_its_rival_for_less(capsys):
    console = Console(file=io.StringIO(), width=100)
    ours, theirs = demo(num_tasks=12, console=console)
    assert len(ours.outcomes) == len(theirs.outcomes) == 12
    assert sum(ours.outcomes) >= 9
    assert ours.cost_usd < 0.75 * theirs.cost_usd
    assert ours.latency_s < 0.75 * theirs.latency_s
    text = console.file.getvalue()
    assert "simulated market" in text
    assert "12/12 " in text
    assert "held-out tasks" in text


def test_live_on_a_terminal_takes_its_time():
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    lanes = demo(num_tasks=1, console=console, clock=lambda: now, sleep=sleep)
    assert now == pytest.approx(lanes[1].latency_s / 12 + 2 * WRITE_S + 1.0, abs=0.2)
    assert "task 1 of 1" in console.file.getvalue()


def test_mistakes_in_flags_are_told():
    with pytest.raises(ConfigError, match="--tasks 0"):
        demo(num_tasks=0)
    with pytest.raises(ConfigError, match="--seed -1"):
        demo(seed=-1)


def test_the_command(capsys):
    assert main(["demo", "--tasks", "0"]) == 2
    assert "--tasks 0: must be 1 to 512" in capsys.readouterr().err


def test_held_out_results_have_the_shape_of_a_summary():
    assert json.dumps(held_out_results())
    for entry in held_out_results()["policies"].values():
        low, high = entry["ci95"]["accuracy"]
        assert low <= entry["accuracy"] <= high
