"""What a run shows in the terminal."""

import io

import pytest
from rich.console import Console

from orchestra_jax.report import make_progress, policies_table
from orchestra_jax.report.console import format_duration
from orchestra_jax.report.policies import (
    METRICS,
    Estimate,
    best_names,
    format_interval,
    format_significant,
    policy_rows,
)


def entry(accuracy, cost_usd, *, preference=None, ci95=None):
    return {
        "accuracy": accuracy,
        "cost_usd": cost_usd,
        "latency_s": 3.0,
        "preference": preference,
        "num_episodes": 100,
        "ci95": ci95 or {},
    }


def summary(**policies):
    return {"policies": {name.replace("__", ":"): value for name, value in policies.items()}}


def printed(renderable, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0"),
        (5.5, "5.50"),
        (0.4231, "0.423"),
        (0.04231, "0.042"),
        (0.00042, "0.00042"),
        (1234.5, "1234"),
        (-1.5, "-1.50"),
    ],
)
def test_significant_digits(x, text):
    assert format_significant(x) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (42.4, "42 s"), (187, "3:07"), (3753, "1:02:33")])
def test_duration(seconds, text):
    assert format_duration(seconds) == text


def test_rows_are_ordered_and_labelled():
    rows = policy_rows(
        summary(
            oracle=entry(1.0, 0.01),
            random=entry(0.4, 0.02),
            always__gpt=entry(0.9, 0.05),
            warm_start=entry(0.7, 0.03),
            trained__greedy=entry(0.8, 0.01),
            trained=entry(0.8, 0.01),
        )
    )
    assert [row.name for row in rows] == ["trained", "trained:greedy", "warm_start", "always:gpt", "random", "oracle"]
    assert [row.label for row in rows][1::2] == ["Trained, greedy", "Always gpt", "Oracle"]


def test_cost_per_solved_is_derived_where_the_summary_has_none():
    [row] = policy_rows(summary(trained=entry(0.5, 0.02)))
    assert row.estimates["cost_per_solved_usd"] == Estimate(0.04)
    [row] = policy_rows(summary(trained=entry(0.0, 0.02)))
    assert row.estimates["cost_per_solved_usd"] == Estimate(None)


def test_best_takes_ties_and_leaves_out_the_oracle():
    rows = policy_rows(summary(a=entry(0.9, 0.01), b=entry(0.9, 0.02), oracle=entry(1.0, 0.001)))
    accuracy, cost = METRICS[0], METRICS[1]
    assert best_names(rows, accuracy) == {"a", "b"}
    assert best_names(rows, cost) == {"a"}
    assert best_names(rows[:1], cost) == frozenset()


def test_open_and_missing_intervals():
    cost = METRICS[2]
    assert format_interval(Estimate(0.02, 0.01, 0.04), cost) == "1.0–4.0"
    assert format_interval(Estimate(0.02, 0.01, None), cost) == "1.0–∞"
    assert format_interval(Estimate(0.02), cost) == ""


def test_table_shows_percent_cents_and_intervals():
    ci95 = {"accuracy": [0.85, 0.912], "cost_usd": [0.004, 0.0046]}
    text = printed(
        policies_table(summary(trained=entry(0.883, 0.0042, ci95=ci95), always__x=entry(0.2, 0.0)), title="Held-out")
    )
    [trained] = [line for line in text.splitlines() if "trained" in line]
    assert trained.split() == ["▸", "trained", "88.3", "85.0–91.2", "0.420", "0.40–0.46", "0.476", "3.00"]
    assert "always:x" in text
    assert "Held-out" in text
    assert "preference" not in text  # no policy has one


def test_table_keeps_every_digit_when_narrow():
    ci95 = {"accuracy": [0.85, 0.912], "cost_usd": [0.004, 0.0046], "latency_s": [2.5, 3.5]}
    text = printed(policies_table(summary(trained=entry(0.883, 0.0042, preference=0.5, ci95=ci95))), width=72)
    assert "85.0–91.2" in text
    assert "0.40–0.46" in text
    assert "…" not in text


def test_table_shows_names_with_markup_as_they_are():
    name = "always:[bold]x[/bold]"
    assert name in printed(policies_table({"policies": {name: entry(0.5, 0.01)}}))


def test_table_of_nothing_is_no_error():
    assert "policy" in printed(policies_table({}))


def test_plain_progress_writes_a_line_now_and_then():
    clock, console = Clock(), Console(file=io.StringIO(), width=200)
    with make_progress(console, plain_interval_s=10, clock=clock) as update:
        for step in range(1, 101):
            clock.now_s += 1.0
            update(step, 100, reward=0.5, accuracy=0.75, cost_usd=0.0123)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 11  # the first, one every ten seconds, the last
    assert lines[0] == "training 1/100  reward 0.50  accuracy 75%  cost 1.2¢  1:39 left"
    assert lines[1].startswith("training 11/100")
    assert lines[-1].endswith("1:40 in all")


def test_plain_progress_is_one_line_each_however_narrow_and_takes_given_times():
    console = Console(file=io.StringIO(), width=20)
    with make_progress(console, description="[sft]", clock=Clock()) as update:
        update(1, 2, reward=0.1, accuracy=0.2, cost_usd=0.3, eta_s=65)
    assert console.file.getvalue() == "[sft] 1/2  reward 0.10  accuracy 20%  cost 30¢  1:05 left\n"


def test_resumed_run_estimates_the_time_left_from_its_own_steps():
    clock, console = Clock(), Console(file=io.StringIO(), width=200)
    with make_progress(console, plain_interval_s=0, clock=clock) as update:
        for step in (51, 52):
            clock.now_s += 2.0
            update(step, 100)
    assert console.file.getvalue().splitlines() == ["training 51/100  1:38 left", "training 52/100  1:36 left"]


def test_progress_bar_on_a_terminal():
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=True, width=100)
    with make_progress(console, clock=clock) as update:
        clock.now_s = 10.0
        update(1, 10, reward=1.25, accuracy=0.5, cost_usd=0.002)
    text = console.file.getvalue()
    for part in ("1/10", "reward 1.25", "accuracy 50%", "cost 0.20¢", "1:30 left"):
        assert part in text


def test_the_table_says_how_many_episodes_count():
    lucky = {**entry(1.0, 0.01), "num_episodes": 100, "num_infra_errors": 28}
    lost = {**entry(None, None), "num_episodes": 0, "num_infra_errors": 128}
    text = printed(policies_table(summary(a=lucky, b=lost, c=entry(0.5, 0.01)))).replace("\N{NO-BREAK SPACE}", " ")
    assert "100 (100 of 128)" in text
    assert "– (0 of 128)" in text
    assert "the others were dropped as infra_error" in " ".join(text.split())
    assert "dropped" not in printed(policies_table(summary(c=entry(0.5, 0.01))))
    assert "(0 of 128)" in printed(policies_table(summary(b=lost))).replace("\N{NO-BREAK SPACE}", " ")
