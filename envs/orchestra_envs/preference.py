"""User preferences: drawing them, telling them in words, and scoring how well an episode met them.

A preference is a weight in [0, 1] for every tool (how gladly the user sees it used) and for "outcome", "cost" and
"latency", as in ToolOrchestra (arXiv 2511.21689, section 3 and appendix F), where a language model wrote the pairs of
words and weights. Here they come from templates, so that the words determine the weights exactly, or from a file that
a language model wrote beforehand (`write_preferences`) and a second call checked::

    pairs = write_preferences(tools, Endpoint("gpt-5-mini"), num_pairs=40)
    Path("preferences.json").write_text(json.dumps(pairs, indent=1))
    # then: env.kwargs.randomize.preferences: {file: preferences.json}

No model is asked while an environment runs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from orchestra_envs.env import PREFERENCE_OBJECTIVES, Preference
from orchestra_envs.tools import Tool

if TYPE_CHECKING:
    from orchestra_envs.live.chat import Endpoint

Split = Literal["train", "test"]

USD_PER_CENT = 0.01
SECONDS_PER_MINUTE = 60.0

# The weights of "balanced": the outcome first, then money, then time.
BALANCED = {"outcome": 1.0, "cost": 0.5, "latency": 0.25}

# profile -> (weights of outcome, cost, latency; weight of each favoured tool; how many tools are favoured)
_PROFILES: dict[str, tuple[dict[str, float], float, int]] = {
    "accuracy": ({"outcome": 1.0, "cost": 0.0, "latency": 0.0}, 0.0, 0),
    "cost": ({"outcome": 1.0, "cost": 1.0, "latency": 0.0}, 0.0, 0),
    "latency": ({"outcome": 1.0, "cost": 0.0, "latency": 1.0}, 0.0, 0),
    "thrift": ({"outcome": 1.0, "cost": 0.5, "latency": 0.5}, 0.0, 0),
    "tool": ({"outcome": 1.0, "cost": 0.25, "latency": 0.0}, 1.0, 1),
    "two_tools": ({"outcome": 1.0, "cost": 0.0, "latency": 0.0}, 1.0, 2),
}
# profile -> wordings met in training, wordings kept for the held-out split
_WORDINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "accuracy": (
        ("Only the right answer matters.", "Be right, whatever it costs."),
        ("Spare no expense to be right.",),
    ),
    "cost": (
        ("Keep the cost low.", "Be right but spend little money."),
        ("Money is tight, so be cheap.",),
    ),
    "latency": (
        ("Be quick.", "Be right but take little time."),
        ("Time is tight, so be quick.",),
    ),
    "thrift": (
        ("Save money and time.", "Keep both cost and time low."),
        ("Spend little money and little time.",),
    ),
    "tool": (
        ("I like to see {} used.", "Use {} if you can."),
        ("If you can, use {}.",),
    ),
    "two_tools": (
        ("I like to see {} and {} used.", "Use {} and {} if you can."),
        ("If you can, use {} and {}.",),
    ),
}


def fixed_weights(preference: str | Mapping[str, float], tools: Sequence[str]) -> Mapping[str, float] | None:
    """The weights that an environment's `preference` argument stands for; None for one drawn per episode.

    Args:
        preference: "balanced" (`BALANCED`), "random" (None), or weights in [0, 1] for "outcome", "cost", "latency" and
            any of the tools; those left out are 0.
        tools: the names of the environment's tools.

    Raises:
        ValueError: another word, an unknown name, or a weight out of range.
    """
    if preference == "random":
        return None
    if preference == "balanced":
        return BALANCED
    if not isinstance(preference, Mapping):
        raise ValueError(f"preference: expected 'balanced', 'random' or a mapping of weights, got {preference!r}")
    for name in preference:
        if name not in (*BALANCED, *tools):
            raise ValueError(f"preference: expected one of {', '.join((*BALANCED, *tools))}, got {name!r}")
    return Preference({"outcome": 0.0, "cost": 0.0, "latency": 0.0, **preference}, "").weights


def draw_preference(rng: np.random.Generator, tools: Sequence[str], *, held_out: bool = False) -> Preference:
    """A random preference over `tools` (two names at least) with weights and the words that say them.

    With `held_out` the words come from templates that are never used without it; the weights are drawn alike.
    """
    profile = list(_PROFILES)[int(rng.integers(len(_PROFILES)))]
    weights, tool_weight, num_favoured = _PROFILES[profile]
    favoured = [str(name) for name in rng.choice(tools, size=num_favoured, replace=False)]
    wordings = _WORDINGS[profile][int(held_out)]
    text = wordings[int(rng.integers(len(wordings)))].format(*favoured)
    tool_weights = {name: tool_weight if name in favoured else 0.0 for name in tools}
    return Preference({**tool_weights, **weights}, text)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of preference: the weights of outcome, cost and latency, and which tools get a weight.

    `aim` "favour" names `num_tools` tools that weigh 1 each. "avoid" names one that weighs 0 and "on_premise" names
    those that run in house; the tools that may be used then share a weight of 1, so that a large set of tools does not
    outweigh the answer. `train` and `test` are the wordings of the two splits, `{}` stands for the named tools.
    """

    weights: tuple[float, float, float]
    train: tuple[str, ...]
    test: tuple[str, ...]
    aim: Literal["", "favour", "avoid", "on_premise"] = ""
    num_tools: int = 0


_KINDS: dict[str, _Kind] = {
    "accuracy": _Kind(
        (1.0, 0.0, 0.0),
        (
            "The answer must be right; money and time do not matter.",
            "I care about a correct answer and about nothing else.",
            "Take whatever it takes, as long as the result is correct.",
            "Quality is everything here, ignore the bill and the clock.",
        ),
        ("Correctness alone counts for me.", "Do not economise: all I want is that it is right."),
    ),
    "cost": _Kind(
        (1.0, 1.0, 0.0),
        (
            "Please keep the bill as small as you can; I can wait.",
            "My budget is tiny, so choose what is cheap. There is no hurry.",
            "Spend as little money as possible, however long it takes.",
            "Cheap comes first for me, speed does not matter.",
        ),
        ("Every cent hurts, minutes do not.", "Go for the least expensive way; I have plenty of time."),
    ),
    "latency": _Kind(
        (1.0, 0.0, 1.0),
        (
            "I need this fast; what it costs is not important.",
            "Answer as soon as you can, money is no object.",
            "I am in a hurry. Pay what you must.",
            "Speed first, never mind the price.",
        ),
        ("Every second counts, cents do not.", "I cannot wait; spend freely if that saves time."),
    ),
    "thrift": _Kind(
        (1.0, 0.5, 0.5),
        (
            "Mind both the bill and the clock.",
            "Neither waste my money nor my time.",
            "Money and time are equally dear to me, go easy on both.",
            "Be economical with dollars as well as with minutes.",
        ),
        ("Cheap and fast alike, please.", "I would like to save on the price and on the wait in equal measure."),
    ),
    "cost_then_latency": _Kind(
        (1.0, 1.0, 0.5),
        (
            "Above all it should be cheap, and fast where that costs nothing.",
            "Save money first, time second.",
            "The price matters most to me, the waiting time comes after it.",
        ),
        ("Thrift before speed, but do not dawdle.",),
    ),
    "latency_then_cost": _Kind(
        (1.0, 0.5, 1.0),
        (
            "Above all it should be fast, and cheap where that costs no time.",
            "Save time first, money second.",
            "The waiting time matters most to me, the price comes after it.",
        ),
        ("Speed before thrift, but do not squander.",),
    ),
    "prefer_tool": _Kind(
        (1.0, 0.25, 0.0),
        (
            "I trust {} most, work with it where you can.",
            "Please make use of {}.",
            "My favourite is {}; give it the work.",
            "I would rather have {} do this than anything else.",
            "Where it makes sense, call {}.",
        ),
        ("Let {} handle it if at all possible.", "I was always well served by {}."),
        "favour",
        1,
    ),
    "prefer_two": _Kind(
        (1.0, 0.0, 0.0),
        (
            "I trust {} most, work with these where you can.",
            "Please make use of both {}.",
            "My favourites are {}; give them the work.",
            "Where it makes sense, call both {}.",
        ),
        ("Let {} handle it together if at all possible.",),
        "favour",
        2,
    ),
    "prefer_tool_cheaply": _Kind(
        (1.0, 1.0, 0.0),
        (
            "Work with {}, but keep the bill small.",
            "I like {} best, and I do not want to spend much.",
            "Call {} where you can and save money otherwise.",
        ),
        ("Give {} the work and watch every cent.",),
        "favour",
        1,
    ),
    "prefer_tool_fast": _Kind(
        (1.0, 0.0, 1.0),
        (
            "Work with {}, but do not keep me waiting.",
            "I like {} best, and I am in a hurry.",
            "Call {} where you can and save time otherwise.",
        ),
        ("Give {} the work and watch the clock.",),
        "favour",
        1,
    ),
    "avoid_tool": _Kind(
        (1.0, 0.0, 0.0),
        (
            "Please do not use {}.",
            "I do not trust {}, so keep away from it.",
            "Anything but {}, please.",
            "Get by without {}.",
        ),
        ("Leave {} out of this.", "I would not like to see {} involved."),
        "avoid",
        1,
    ),
    "avoid_tool_cheaply": _Kind(
        (1.0, 1.0, 0.0),
        (
            "Do not use {}, and keep the bill small.",
            "Get by without {} and spend little.",
        ),
        ("Leave {} out of this and watch every cent.",),
        "avoid",
        1,
    ),
    "on_premise": _Kind(
        (1.0, 0.0, 0.0),
        (
            "My data must stay in house: only {} may see it.",
            "For reasons of privacy use nothing that runs elsewhere, that leaves {}.",
            "Only what runs on our own machines, please, which is {}.",
        ),
        ("This is confidential and must not leave the building. Only {} can be trusted with it.",),
        "on_premise",
    ),
    "on_premise_cheaply": _Kind(
        (1.0, 0.5, 0.0),
        (
            "My data must stay in house, only {} may see it, and do not spend much.",
            "Only what runs on our own machines, which is {}, and keep the bill low.",
        ),
        ("This is confidential, so nothing but {}. Money is short, too.",),
        "on_premise",
    ),
}

PREFERENCE_KINDS = tuple(_KINDS)
"""The kinds of preference that `sample_preference` can draw."""


def wordings(kind: str, split: Split) -> tuple[str, ...]:
    """The templates of a kind in a split, `{}` for the named tools; those of the two splits differ."""
    return _KINDS[kind].train if split == "train" else _KINDS[kind].test


def sample_preference(
    rng: np.random.Generator,
    tools: Sequence[str],
    *,
    candidates: Sequence[str] | None = None,
    on_premise: Iterable[str] = (),
    split: Split = "train",
    kinds: Sequence[str] = PREFERENCE_KINDS,
) -> Preference:
    """A random preference of one of the `kinds` over `tools`, with the words that say it.

    Args:
        rng: all randomness comes from it.
        tools: the names on offer, as the policy sees them; each gets a weight.
        candidates: the tools that words may name; all if None.
        on_premise: the tools that run in house.
        split: decides the wordings; none is in both.
        kinds: kinds that cannot be said here (avoiding the only tool, say) are passed over. If none can, the result is
            the balanced preference, without words.
    """
    candidates = list(tools if candidates is None else candidates)
    local = [name for name in candidates if name in set(on_premise)]
    possible = [kind for kind in kinds if _is_possible(_KINDS[kind], candidates, local)]
    if not possible:
        return Preference(dict.fromkeys(tools, 0.0) | BALANCED, "")
    kind = _KINDS[possible[int(rng.integers(len(possible)))]]
    named = local
    if kind.aim in ("favour", "avoid"):
        named = [candidates[i] for i in rng.choice(len(candidates), size=kind.num_tools, replace=False)]
    allowed = [name for name in candidates if name not in named] if kind.aim == "avoid" else named
    share = 1.0 if kind.aim == "favour" else 1.0 / max(1, len(allowed))
    texts = kind.train if split == "train" else kind.test
    text = texts[int(rng.integers(len(texts)))].replace("{}", listed(named))
    weights = {name: share if kind.aim and name in allowed else 0.0 for name in tools}
    return Preference(weights | dict(zip(PREFERENCE_OBJECTIVES, kind.weights)), text)


def _is_possible(kind: _Kind, candidates: Sequence[str], local: Sequence[str]) -> bool:
    match kind.aim:
        case "favour":
            return len(candidates) >= kind.num_tools
        case "avoid":
            return len(candidates) > 1
        case "on_premise":
            return 0 < len(local) < len(candidates)
    return True


def listed(names: Sequence[str]) -> str:
    """Names as words: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def preference_vector(
    tool_counts: Mapping[str, int], outcome: float, cost_usd: float, latency_s: float
) -> dict[str, float]:
    """The measured vector of one episode for `preference_score`: calls by tool, outcome, cents and minutes."""
    return {
        **{name: float(count) for name, count in tool_counts.items()},
        "outcome": float(outcome),
        "cost": cost_usd / USD_PER_CENT,
        "latency": latency_s / SECONDS_PER_MINUTE,
    }


def preference_score(
    measured: Mapping[str, float],
    reference: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    correct: bool,
    signs: Literal["mended", "printed"] = "mended",
) -> float:
    """How well one episode met a preference, relative to a reference policy on the same task.

    ToolOrchestra, appendix L, equations 5 and 6: with M the measured and M0 the reference vector, a tool or the
    outcome scores M / max(1, M0), cost and latency score M0 / max(1, M); the result is their sum weighted by the
    preference if the answer was right, else 0. A set of tasks scores the sum over its tasks.

    The paper defines the cost and latency entries as negative dollars and seconds, with which max(1, M) is always 1
    and dearer references score lower. The mended form takes positive magnitudes, in cents and minutes so that typical
    values exceed the floor of 1 (`preference_vector` builds such a vector). `signs="printed"` computes the paper's
    literal form from non-positive entries, for comparison only.

    Args:
        measured, reference: tool names, "outcome", "cost" and "latency" -> value; a missing entry counts as 0.
        weights: the preference, the same keys -> weight in [0, 1].
        correct: whether the final answer was right.

    Raises ValueError where cost or latency has the wrong sign for `signs`.
    """
    direction = -1.0 if signs == "printed" else 1.0
    for name, vector in (("measured", measured), ("reference", reference)):
        for key in ("cost", "latency"):
            if direction * vector.get(key, 0.0) < 0:
                wanted = "negative (as printed)" if signs == "printed" else "positive (cents, minutes)"
                raise ValueError(f"{name}[{key!r}]: expected a {wanted} value, got {vector[key]}")
    if not correct:
        return 0.0
    return sum(weight * _ratio(key, measured, reference) for key, weight in weights.items())


def _ratio(key: str, measured: Mapping[str, float], reference: Mapping[str, float]) -> float:
    numerator, denominator = (reference, measured) if key in ("cost", "latency") else (measured, reference)
    return numerator.get(key, 0.0) / max(1.0, denominator.get(key, 0.0))


# Pairs of words and weights that a language model writes beforehand.

_PLACEHOLDER = re.compile(r"\{([A-Za-z0-9_.-]{1,64})\}")


@dataclass(frozen=True, slots=True)
class WrittenPreference:
    """A pair from a file: `text` names tools as `{real name}`, `weights` are by real name and objective."""

    text: str
    weights: Mapping[str, float]

    @property
    def named(self) -> tuple[str, ...]:
        """The real names of the tools that the words name."""
        return tuple(dict.fromkeys(_PLACEHOLDER.findall(self.text)))

    def told(self, aliases: Mapping[str, str]) -> Preference | None:
        """The pair among the tools of an episode (real name -> name there); None if it names one that is missing."""
        if not set(self.named) <= set(aliases):
            return None
        text = _PLACEHOLDER.sub(lambda match: aliases[match[1]], self.text)
        objectives = {name: float(self.weights.get(name, 0.0)) for name in PREFERENCE_OBJECTIVES}
        return Preference(
            {alias: float(self.weights.get(name, 0.0)) for name, alias in aliases.items()} | objectives, text
        )


def read_written_preferences(data: Any) -> dict[Split, tuple[WrittenPreference, ...]]:
    """What `write_preferences` returned, checked.

    Raises:
        ValueError: it is not {"train": [{"text", "weights"}], "test": [...]}, a weight is outside [0, 1], or the two
            splits share a text.
    """
    if not isinstance(data, Mapping) or not set(data) <= {"train", "test"}:
        raise ValueError('preferences must be {"train": [...], "test": [...]}')
    pairs: dict[Split, tuple[WrittenPreference, ...]] = {}
    split: Split
    for split in ("train", "test"):
        entries = data.get(split, [])
        if not isinstance(entries, list):
            raise ValueError(f"{split} must be a list of pairs, not {type(entries).__name__}")
        pairs[split] = tuple(_written(entry, f"{split}[{i}]") for i, entry in enumerate(entries))
    if both := {pair.text for pair in pairs["train"]} & {pair.text for pair in pairs["test"]}:
        raise ValueError(f"in both splits: {min(both)!r}")
    return pairs


def _written(entry: Any, where: str) -> WrittenPreference:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("text"), str) or not entry["text"].strip():
        raise ValueError(f'{where} must be {{"text": words, "weights": {{name: number}}}}, not {entry!r}')
    weights = entry.get("weights")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where}.weights must be a mapping of names to numbers, not {weights!r}")
    try:
        Preference(dict.fromkeys(PREFERENCE_OBJECTIVES, 0.0) | dict(weights), entry["text"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return WrittenPreference(entry["text"].strip(), dict(weights))


def write_preferences(
    tools: Sequence[Tool],
    endpoint: Endpoint,
    *,
    num_pairs: int = 40,
    verifier: Endpoint | None = None,
    test_share: float = 0.25,
    pairs_per_call: int = 8,
    temperature: float | None = 1.0,
) -> dict[str, list[dict[str, Any]]]:
    """Let a language model write preference pairs and another call verify each; to be stored as a JSON file.

    The writer sees the tools and proposes pairs of an instruction and weights. The verifier (the same endpoint unless
    given) is shown one pair and the tools and says whether the words mean these weights; pairs that it does not
    confirm, that name no real tool or whose weights are no numbers in [0, 1] are dropped. Asks for new ones until
    there are enough, at most four times as many as wanted.

    Args:
        tools: the tools by their real names; the file's words name them as `{real name}`, so that they can be told
            under an alias.
        num_pairs: pairs wanted, both splits together; fewer come back if the models do not agree.
        test_share: the share of pairs kept for the split "test".
        pairs_per_call: pairs the writer is asked for at a time.
        temperature: of the writer; the verifier answers at the endpoint's own.

    Returns:
        {"train": [{"text", "weights"}], "test": [...]} for `randomize.preferences.file`.

    Raises:
        ToolUnavailableError: an endpoint does not answer.
    """
    from orchestra_envs.loop import run_on_loop

    return run_on_loop(
        _write_preferences(tools, endpoint, verifier or endpoint, num_pairs, test_share, pairs_per_call, temperature)
    )


async def _write_preferences(
    tools: Sequence[Tool],
    writer: Endpoint,
    verifier: Endpoint,
    num_pairs: int,
    test_share: float,
    pairs_per_call: int,
    temperature: float | None,
) -> dict[str, list[dict[str, Any]]]:
    from orchestra_envs.live.chat import chat

    names = [tool.name for tool in tools]
    menu = "\n".join(f"- {tool.name}: {tool.description} (price {tool.price}, {tool.latency_s:g} s)" for tool in tools)
    found: dict[str, WrittenPreference] = {}
    for _ in range(4 * -(-num_pairs // pairs_per_call)):
        if len(found) >= num_pairs:
            break
        request = _WRITER.format(num=pairs_per_call, menu=menu, keys=", ".join([*names, *PREFERENCE_OBJECTIVES]))
        if found:
            request += "\nThere are these already, write others:\n" + "\n".join(list(found)[-20:])
        reply = await chat(writer, [{"role": "user", "content": request}], temperature=temperature)
        proposed = [pair for pair in _proposals(reply.text, names) if pair.text not in found]
        verdicts = await asyncio.gather(
            *(chat(verifier, [{"role": "user", "content": _verification(menu, pair)}]) for pair in proposed)
        )
        agreed = [pair for pair, verdict in zip(proposed, verdicts) if _says_yes(verdict.text)]
        found |= {pair.text: pair for pair in agreed[: num_pairs - len(found)]}
    pairs = [{"text": pair.text, "weights": dict(pair.weights)} for pair in found.values()]
    num_test = round(len(pairs) * test_share)
    return {"train": pairs[num_test:], "test": pairs[:num_test]}


_WRITER = """An assistant solves tasks with these tools:
{menu}

Users differ in what they want: some insist on a tool or refuse one, some want only tools that run in house, some look \
at money, some at time, some at nothing but the right answer, and many want a mixture. Write {num} different users. \
For each give the instruction in the user's own words, one or two sentences, and the weights from 0 to 1 that it \
implies for {keys}: how gladly the user sees each tool used, and how much a right answer, low cost and low latency \
count. Write the name of a tool in braces, as in {{name}}; name no price.
Reply with a JSON list and nothing else: [{{"text": "...", "weights": {{"name": number}}}}]"""

_VERIFIER = """An assistant has these tools:
{menu}

A user says: {text}
Somebody took this to mean these weights from 0 (does not matter, or is not wanted) to 1 (matters most): {weights}
Do the weights follow from the words? Begin your reply with yes or no."""


def _verification(menu: str, pair: WrittenPreference) -> str:
    text = _PLACEHOLDER.sub(lambda match: match[1], pair.text)
    return _VERIFIER.format(menu=menu, text=text, weights=json.dumps(dict(pair.weights)))


def _says_yes(text: str) -> bool:
    return re.match(r"\W*yes\b", text, re.IGNORECASE) is not None


def _proposals(text: str, names: Sequence[str]) -> list[WrittenPreference]:
    """The usable pairs in a writer's reply; what is not usable is left out."""
    start, end = text.find("["), text.rfind("]")
    try:
        entries = json.loads(text[start : end + 1]) if start >= 0 else []
    except json.JSONDecodeError:
        return []
    pairs = []
    for entry in entries:
        try:
            pair = _written(entry, "")
        except ValueError:
            continue
        if set(pair.named) <= set(names) and set(pair.weights) <= {*names, *PREFERENCE_OBJECTIVES}:
            pairs.append(pair)
    return pairs
