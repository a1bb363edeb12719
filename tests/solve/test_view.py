"""What is shown of an episode: exact lines in a file, the turn under way on a terminal."""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import pytest
from orchestra_envs import CallContext, Price, Reply, ToolResult, ToolUnavailableError, tool
from rich.console import Console

from orchestra_jax.rollout.episode import Episode
from orchestra_jax.rollout.rollout import Job, Rollout, RolloutLimits
from orchestra_jax.sampler.engine import Request
from orchestra_jax.solve.play import CONVERSATION, growing_text, play
from orchestra_jax.solve.question import QuestionEnv
from orchestra_jax.solve.transcript import growing_rows, policy_rows
from orchestra_jax.solve.view import View

sys.path.insert(0, str(Path(__file__).parent))
from scripted_engine import CHAT, ScriptedEngine, written

LIMITS = RolloutLimits(max_turn_tokens=200, max_observation_tokens=200)


@tool(price=Price(per_call_usd=0.01), latency_s=0.25)
def lookup(city: str) -> str:
    """Population of a city in thousands."""
    return {"Oslo": "709\nthousand \x1b[31mpeople"}[city]


@tool(price=Price(per_call_usd=0.5), latency_s=3.0)
def big(context: CallContext) -> ToolResult:
    """A guess of the price, too."""
    return ToolResult("x" * 1000, cost_known=False)


@tool
def broken(code: str = "") -> str:
    """Never there."""
    raise ToolUnavailableError("it is away", transient=False)


def shown(turns, *, tools=(lookup, big, broken), console=None, **limits):
    """The lines that an episode with these turns of the policy gives in a file, the episode, and the engine."""
    engine = ScriptedEngine(turns)
    env = QuestionEnv("How many?", tools, **limits)
    rollout = Rollout(lambda: env, engine, CHAT, tool_style="compact", limits=LIMITS)
    console = console or Console(file=io.StringIO(), width=20)
    clock = itertools.count().__next__
    episode = play(
        rollout, {}, Job(0, 0, 0), View(console, lambda: growing_text(rollout), lambda: 2.0 * clock()), scored=False
    )
    return console.file.getvalue().splitlines(), episode, engine


def test_the_lines_of_an_episode():
    call = written('{"name": "lookup", "arguments": {"city": "Oslo"}}')
    lines, episode, _ = shown(
        [f"<think>I must\nlook it up.</think>{call}", "<think>Good.</think>Answer: 709\nthousand"]
    )
    tokens = [turn.num_tokens for turn in episode.turns if turn.role == "assistant"]
    seconds = [line.partition(" in ")[2] for line in lines if line.startswith("turn")]
    assert lines == [
        f"turn 1    {tokens[0]} tokens in {seconds[0]}",
        "think     I must",
        "          look it up.",
        'call      lookup {"city": "Oslo"}',
        "result    lookup ok, $0.010, 0.250 s: 709",
        "          thousand \N{REPLACEMENT CHARACTER}[31mpeople",
        "so far    1 call, $0.010, 0.250 s of tools",
        f"turn 2    {tokens[1]} tokens in {seconds[1]}",
        "think     Good.",
        "answer    Answer: 709",
        "          thousand",
        f"end       answered; 2 turns, 1 call, $0.010, 0.250 s of tools; {sum(tokens)} tokens written, "
        f"{lines[-1].rpartition(', ')[2]}",
    ]
    assert all(line.endswith(" s in all") for line in lines[-1:])


def test_several_calls_a_failure_a_program_and_an_estimate():
    turn = "".join(
        [
            "Let me see.",
            written('{"name": "big", "arguments": {}}'),
            written('{"name": "broken", "arguments": {"code": "a = 1\\nprint(a)"}}'),
            written('{"name": "nobody"'),
        ]
    )
    lines, *_ = shown([turn, "Done."])
    text = "\n".join(lines)
    assert "say       Let me see.\ncall      big {}\ncall      broken\n          code:\n          a = 1\n" in text
    assert "mistake   the tool call is not valid JSON" in text
    assert f"result    big ok, about $0.500, 3.00 s: {'x' * 400}\n          [600 characters cut]\n" in text
    assert "result    broken failed (unavailable), $0, 0 s: Error: broken is unavailable: it is away" in text
    assert "so far    2 calls, about $0.500, 3.00 s of tools" in text


@pytest.mark.parametrize(
    ("turns", "limits", "ending"),
    [
        (["a b ..."], {}, "no answer: a turn reached its most tokens; 1 turn, 0 calls"),
        (
            [written('{"name": "broken"}')],
            {"max_turns": 1},
            "no answer: all turns are used up (--max-turns); 1 turn, 1",
        ),
        ([written('{"name": "big"}')] * 2, {"budget_usd": 0.1}, "no answer: the budget is spent (--budget-usd)"),
        (["</tool_call>"], {"max_format_errors": 1}, "no answer: too many turns in a row that cannot be read"),
    ],
)
def test_endings_without_an_answer(turns, limits, ending):
    lines, episode, _ = shown(turns, **limits)
    assert lines[-1].startswith(f"end       {ending}")
    assert not episode.answered
    assert not any(line.startswith("answer") for line in lines)


def test_the_calls_of_a_cut_turn_are_not_shown_as_calls():
    lines, *_ = shown([written('{"name": "big", "arguments": {}}') + "..."])
    assert not any(line.startswith(("call", "result")) for line in lines)
    assert any(line.startswith("cut off   <tool_call>") for line in lines)


class Desk(QuestionEnv):
    """A user who wants one more thing, and then is content."""

    def reply(self, message):
        return Reply("And Bergen?") if "Oslo" in message else Reply("Thanks.", end=True)


def test_a_conversation_with_a_user():
    env = Desk("Where?", [lookup])
    rollout = Rollout(
        lambda: env, ScriptedEngine(["In Oslo.", "In Bergen."]), CHAT, tool_style="compact", limits=LIMITS
    )
    stream = io.StringIO()
    play(rollout, {}, Job(0, 0, 0), View(Console(file=stream), lambda: growing_text(rollout)), scored=True)
    rows = [line for line in stream.getvalue().splitlines() if not line.startswith(("turn", "so far"))]
    assert rows[:4] == [
        "say       In Oslo.",
        "user      And Bergen?",
        "say       In Bergen.",
        "user      Thanks.",
    ]
    assert rows[4].startswith("end       ended by the user, outcome 0; 2 turns, 0 calls, ")


def test_calls_are_shown_before_they_run():
    stream = io.StringIO()
    before = []

    @tool
    def slow() -> str:
        """Sees what was printed when it runs."""
        before.append(stream.getvalue().splitlines()[-1])
        return "1"

    shown([written('{"name": "slow", "arguments": {}}'), "1"], tools=[slow], console=Console(file=stream))
    assert before == ["call      slow {}"]


def test_the_text_of_a_turn_under_way_is_a_beginning_of_the_turn():
    answer = "<think>Zürich, 日本 or elsewhere?</think>It is Zürich."
    engine = ScriptedEngine([answer])
    rollout = Rollout(lambda: QuestionEnv("Q", []), engine, CHAT, tool_style="compact", limits=LIMITS)
    engine.submit(Request(CONVERSATION, [1], limit=100, trajectory=0))
    texts = []
    while engine.busy:
        texts.append(growing_text(rollout))
        engine.run()
    assert texts[0] == ""
    assert all(answer.startswith(text) for text in texts)
    assert len(set(texts)) == len(texts) > 4


def test_the_turn_under_way():
    assert growing_rows("") == []
    assert [(row.label, row.text) for row in growing_rows("<think>so f")] == [("think", "so f")]
    rows = growing_rows('<think>I know <tool_call></think>Well. <tool_call>\n{"name": "se')
    assert [(row.label, row.text) for row in rows] == [
        ("think", "I know <tool_call>"),
        ("say", "Well."),
        ("call", '{"name": "se'),
    ]
    whole = "Well." + written('{"name": "search", "arguments": {"q": 1}}')
    assert growing_rows(whole) == policy_rows(whole, final=False)


def test_a_terminal_gets_the_same_transcript_and_nothing_is_left_of_the_status():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=12, color_system=None)
    lines, *_ = shown([written('{"name": "lookup", "arguments": {"city": "Oslo"}}'), "709 " * 30], console=console)
    text = "\n".join(line.rstrip() for line in lines)
    assert 'call      lookup {"city": "Oslo"}' in text
    assert "\x1b[31m" not in text  # what the tool wrote
    assert "answer    709 709" in text
    assert text.index("result") < text.index("answer") < text.rindex("end       answered")


def test_a_long_turn_under_way_shows_its_end_within_the_screen():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=12, color_system=None)
    view = View(console, lambda: " ".join(f"word{i}" for i in range(500)))
    view.watch(0, Episode(0, 0))
    with console.capture() as capture:
        console.print(view)
    lines = capture.get().rstrip("\n").splitlines()
    assert len(lines) <= 10
    assert "word499" in lines[-2]
    assert "writing" in lines[-1]
