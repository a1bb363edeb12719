"""The market's simulated experts: what each model costs, how long it takes and how often it is right.

Nothing here calls a model. An expert is a coin with a known bias, a price list and a clock:

* **Published numbers.** `input_usd_per_million`, `output_usd_per_million` and `latency_s` are the price and latency
  table that ToolOrchestra (arXiv 2511.21689) gives its orchestrator for the answering experts.
* **Our choice.** The skills (chance of a right answer by task type and difficulty), the skill once the needed passages
  were found, and the mean numbers of output tokens. They follow the published pattern (the strongest model is good at
  everything, reasons long and costs most; specialists are as good at their trade for a fiftieth of the money) and are
  balanced so that each task type has its own best choice. They measure no real model: do not quote them as such.

The output length and the latency of one answer are scaled by the same log-normal factor of mean 1, because longer
answers take longer. Repeated questions in an episode are independent draws.
The n-th call of an episode draws the same random numbers whichever expert it asks (common random numbers), so that
policies compared on equal seeds differ by their choices and less by luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from orchestra_envs.env import Task
from orchestra_envs.market.tasks import DIFFICULTIES

_LENGTH_SIGMA = 0.35
_PROMPT_TOKENS = 40  # the instructions that a real call would carry besides the question
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Expert:
    """One simulated model.

    `skill[type]` holds the chance of a right answer for easy, medium and hard tasks, `skill_with_passages` that of
    lookup and two_hop tasks once every passage needed has been retrieved in the episode; `output_tokens[type]` is the
    mean length of an answer and `latency_s` the mean time for one.
    """

    name: str
    description: str
    input_usd_per_million: float
    output_usd_per_million: float
    latency_s: float
    skill: dict[str, tuple[float, float, float]]
    skill_with_passages: float
    output_tokens: dict[str, int]


# fmt: off
EXPERTS: dict[str, Expert] = {expert.name: expert for expert in (
    Expert("gpt-5", "The strongest generalist; reasons at length, slow and dear.", 1.25, 10.0, 96.0,
        #                  easy  medium hard
        {"arithmetic":   (0.97, 0.94, 0.88),
         "lookup":       (0.60, 0.45, 0.30),
         "word_problem": (0.98, 0.95, 0.92),
         "reasoning":    (0.93, 0.89, 0.82),
         "two_hop":      (0.60, 0.18, 0.12)}, 0.98,
        {"arithmetic": 3000, "lookup": 3000, "word_problem": 4000, "reasoning": 5500, "two_hop": 4000}),
    Expert("gpt-5-mini", "A small generalist that reasons; fair at stories and puzzles.", 0.25, 2.0, 27.0,
        {"arithmetic":   (0.90, 0.82, 0.68),
         "lookup":       (0.40, 0.28, 0.16),
         "word_problem": (0.94, 0.88, 0.82),
         "reasoning":    (0.75, 0.62, 0.49),
         "two_hop":      (0.52, 0.08, 0.05)}, 0.97,
        {"arithmetic": 2500, "lookup": 2500, "word_problem": 3200, "reasoning": 4500, "two_hop": 3000}),
    Expert("qwen3-32b", "An open generalist; middling at stories and puzzles.", 0.8, 0.8, 11.0,
        {"arithmetic":   (0.86, 0.74, 0.56),
         "lookup":       (0.24, 0.18, 0.12),
         "word_problem": (0.82, 0.70, 0.58),
         "reasoning":    (0.58, 0.45, 0.32),
         "two_hop":      (0.50, 0.04, 0.02)}, 0.96,
        {"arithmetic": 900, "lookup": 700, "word_problem": 1400, "reasoning": 2200, "two_hop": 1000}),
    Expert("llama-3.3-70b", "An open generalist; knows some facts, weak at mathematics.", 0.9, 0.9, 15.0,
        {"arithmetic":   (0.75, 0.55, 0.35),
         "lookup":       (0.42, 0.30, 0.18),
         "word_problem": (0.66, 0.50, 0.37),
         "reasoning":    (0.40, 0.28, 0.20),
         "two_hop":      (0.51, 0.05, 0.03)}, 0.96,
        {"arithmetic": 600, "lookup": 500, "word_problem": 800, "reasoning": 1200, "two_hop": 700}),
    Expert("qwen2.5-math-72b", "A mathematics specialist; excellent at stories with numbers.", 0.9, 0.9, 13.0,
        {"arithmetic":   (0.95, 0.91, 0.84),
         "lookup":       (0.14, 0.12, 0.10),
         "word_problem": (0.97, 0.93, 0.89),
         "reasoning":    (0.38, 0.28, 0.19),
         "two_hop":      (0.50, 0.03, 0.02)}, 0.95,
        {"arithmetic": 700, "lookup": 600, "word_problem": 1200, "reasoning": 1500, "two_hop": 800}),
    Expert("qwen2.5-math-7b", "A small mathematics specialist; good at stories, weak elsewhere.", 0.2, 0.2, 9.0,
        {"arithmetic":   (0.88, 0.76, 0.58),
         "lookup":       (0.12, 0.10, 0.10),
         "word_problem": (0.90, 0.80, 0.70),
         "reasoning":    (0.34, 0.24, 0.16),
         "two_hop":      (0.50, 0.02, 0.02)}, 0.85,
        {"arithmetic": 700, "lookup": 600, "word_problem": 1200, "reasoning": 1500, "two_hop": 800}),
)}
# fmt: on


@dataclass(frozen=True, slots=True)
class Answer:
    """What an expert returned: `text` ("Answer: X"), and the tokens and seconds it took."""

    text: str
    input_tokens: int
    output_tokens: int
    latency_s: float


def success_probability(expert: Expert, task: Task, *, has_passages: bool = False) -> float:
    """The chance that `expert` answers `task` rightly; `has_passages`: all its gold passages were retrieved."""
    closed_book = expert.skill[task.metadata["type"]][DIFFICULTIES.index(task.metadata["difficulty"])]
    return max(closed_book, expert.skill_with_passages) if has_passages else closed_book


def ask(expert: Expert, task: Task, passages: tuple[str, ...], rng: np.random.Generator) -> Answer:
    """Simulate one answer of `expert` to `task`, reading the corpus `passages` retrieved so far in the episode."""
    gold = task.metadata["gold"]
    has_passages = bool(gold) and set(gold) <= set(passages)
    right = rng.random() < success_probability(expert, task, has_passages=has_passages)
    answer = task.answer if right else wrong_answer(task, rng)
    factor = math.exp(_LENGTH_SIGMA * rng.standard_normal() - _LENGTH_SIGMA**2 / 2)
    return Answer(
        text=f"Answer: {answer}",
        input_tokens=input_tokens(task, passages),
        output_tokens=max(1, round(expert.output_tokens[task.metadata["type"]] * factor)),
        latency_s=expert.latency_s * factor,
    )


def input_tokens(task: Task, passages: tuple[str, ...] = ()) -> int:
    """Tokens that a call would send: instructions, question and passages at four characters a token."""
    return _PROMPT_TOKENS + math.ceil(sum(map(len, (task.question, *passages))) / _CHARS_PER_TOKEN)


def wrong_answer(task: Task, rng: np.random.Generator) -> int | str:
    """A plausible wrong answer of the same kind: a near number in 0..999, or another of the task's words."""
    if isinstance(task.answer, int):
        offsets = (-20, -10, -7, -5, -3, -2, -1, 1, 2, 3, 5, 7, 10, 20)
        others: list[int | str] = [n for n in (task.answer + o for o in offsets) if 0 <= n <= 999]
    else:
        others = [word for word in task.metadata["choices"] if word != task.answer]
    return others[int(rng.integers(len(others)))]
