"""An episode in words: rows of a label and a text, the same for a terminal and for a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from orchestra_envs.calls import cap_text
from orchestra_envs.parse import CALL_OPEN, ParsedTurn, ToolCall, parse_turn

from orchestra_jax.report.policies import format_significant
from orchestra_jax.rollout.episode import Episode, Turn

MAX_RESULT_CHARS = 400
"""What is shown of a result, of which the policy reads more."""

MAX_CALL_CHARS = 2000
"""What is shown of a call's arguments."""

INTERRUPTED = "interrupted"

_ENDINGS = {
    "answered": "answered",
    "terminated": "ended by the environment",
    "truncated": "cut by the environment",
    "user_ended": "ended by the user",
    "length": "no answer: a turn reached its most tokens",
    "context": "no answer: the conversation has no room left (--max-tokens)",
    "max_turns": "no answer: all turns are used up (--max-turns)",
    "budget": "no answer: the budget is spent (--budget-usd)",
    "format_errors": "no answer: too many turns in a row that cannot be read",
    "tool_errors": "no answer: too many calls failed",
    "env_error": "no answer: the environment failed",
    "sampler_error": "no answer: the sampler failed at a turn",
    "infra_error": "the environment failed",
    INTERRUPTED: "interrupted",
}

# Control characters could move the cursor or recolour what was printed before; a tool's text may hold any.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Row(NamedTuple):
    """A piece of the transcript."""

    label: str
    text: str
    style: str = ""
    """Of the text, on a terminal."""


def task_rows(observation: str, tool_names: Sequence[str], *, label: str) -> list[Row]:
    """What is asked, and the tools for it."""
    return [Row(label, _clean(observation), "bold"), Row("tools", ", ".join(tool_names) or "none", "dim")]


def policy_rows(text: str, *, final: bool) -> list[Row]:
    """A turn of the policy as the environment reads it; `final` if its text is the answer."""
    turn = parse_turn(text)
    return [*_turn_rows(turn, final=final), *(Row("mistake", _clean(error.message), "red") for error in turn.errors)]


def cut_rows(text: str) -> list[Row]:
    """A turn that a limit cut: nothing in it was read or run."""
    return [Row("cut off", _clean(text), "dim")]


def growing_rows(text: str) -> list[Row]:
    """A turn under way, as far as its text has come."""
    turn = parse_turn(text, truncated=True)
    rows = _turn_rows(turn, final=False)
    if any(error.kind == "truncated_call" for error in turn.errors):
        rows.append(Row("call", _clean(text.rpartition(CALL_OPEN)[2]).strip(), "cyan"))
    return rows


def result_rows(turn: Turn) -> list[Row]:
    """What tools, the environment or the user answered."""
    if not turn.calls:
        return [Row("result" if turn.role == "tool" else turn.role, _short(turn.text))] if turn.text else []
    rows = []
    for call in turn.calls:
        state = "ok" if call["status"] == "ok" else f"failed ({call['error_type']})"
        spent = f"{money(call['cost_usd'], known=call['cost_known'])}, {seconds(call['latency_s'])}"
        style = "" if call["status"] == "ok" else "red"
        rows.append(Row("result", f"{call['tool']} {state}, {spent}: {_short(call['text'])}", style))
    return rows


def call_text(call: ToolCall) -> str:
    """A call: its name and arguments; texts of several lines (programs) stand below, as they are."""
    long = {name: text for name, text in call.arguments.items() if isinstance(text, str) and "\n" in text.strip()}
    short = {name: value for name, value in call.arguments.items() if name not in long}
    inline = f" {json.dumps(short, ensure_ascii=False)}" if short or not long else ""
    whole = f"{call.name}{inline}" + "".join(f"\n{name}:\n{text.strip()}" for name, text in long.items())
    return cap_text(whole, MAX_CALL_CHARS)[0]


def spent(episode: Episode) -> str:
    """What the tools of an episode took so far."""
    num_calls = sum(episode.tool_counts.values())
    dollars = money(episode.cost_usd, known=episode.cost_known)
    return f"{count(num_calls, 'call')}, {dollars}, {seconds(episode.latency_s)} of tools"


def end_row(episode: Episode, wall_s: float) -> Row:
    """How the episode ended, and what it took; `wall_s` seconds passed, tools and sampling together."""
    ending = _ENDINGS.get(episode.end_reason, episode.end_reason)
    if episode.outcome is not None and episode.answered:
        ending += f", outcome {episode.outcome:g}"
    turns = count(sum(turn.role == "assistant" for turn in episode.turns), "turn")
    tokens = count(episode.trajectory.num_sampled, "token")
    text = f"{ending}; {turns}, {spent(episode)}; {tokens} written, {seconds(wall_s)} in all"
    if pending := pending_calls(episode):
        text += f"; under way, and not counted: {', '.join(call.name for call in pending)}"
    return Row("end", text, "bold" if episode.end_reason == "answered" else "bold yellow")


def pending_calls(episode: Episode) -> Sequence[ToolCall]:
    """The calls of the last turn, if they have no results yet."""
    cut = episode.end_reason not in ("", INTERRUPTED)
    if cut or not episode.turns or episode.turns[-1].role != "assistant":
        return ()
    return parse_turn(episode.turns[-1].text).calls


def answer_of(episode: Episode) -> str | None:
    """The final answer, without reasoning; None where the policy gave none."""
    if episode.end_reason != "answered":
        return None
    return parse_turn(next(turn.text for turn in reversed(episode.turns) if turn.role == "assistant")).content


def money(usd: float, *, known: bool = True) -> str:
    """Dollars; "about" where they are an estimate."""
    return f"{'' if known else 'about '}${format_significant(usd)}"


def seconds(amount: float) -> str:
    """Seconds."""
    return f"{format_significant(amount)} s"


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 call, 2 calls."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _turn_rows(turn: ParsedTurn, *, final: bool) -> list[Row]:
    rows = []
    if turn.reasoning:
        rows.append(Row("think", _clean(turn.reasoning), "dim"))
    if turn.content:
        rows.append(Row("answer" if final else "say", _clean(turn.content), "bold green" if final else ""))
    return rows + [Row("call", _clean(call_text(call)), "cyan") for call in turn.calls]


def _short(text: str) -> str:
    return cap_text(_clean(text).strip(), MAX_RESULT_CHARS)[0]


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
