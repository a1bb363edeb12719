"""Prices of language models in US dollars: from genai-prices' offline table, a table of one's own, or the paper's.

    model_price("gpt-5-mini")                                           # the table that genai-prices ships, no network
    model_price("qwen3", overrides={"qwen3": {"input_usd_per_million": 0.2, "output_usd_per_million": 0.2}})
    model_price("Qwen3-32B", overrides="prices.yaml")                   # the same mapping in a YAML or JSON file
    model_price("gpt-5", overrides=TOOLORCHESTRA_PRICES)                # as the ToolOrchestra paper charges

What is taken where a provider's list has more than one price: the tier of the shortest prompts, all input as not
cached, no discount for batches, and the hour of noon UTC (some providers are cheaper at night). So long or cached
prompts cost other than they are billed; state a price of your own where that matters.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from orchestra_envs.live.options import install_hint
from orchestra_envs.tools import MAX_USD_PER_TOKEN, Price

TOKENS_PER_LISTED_PRICE = 1_000_000

PRICE_KEYS = ("input_usd_per_million", "output_usd_per_million", "per_call_usd", "per_second_usd")
"""The keys of a table's row; the first two are needed."""

PriceTable = Mapping[str, "Mapping[str, float] | Price"]

TOOLORCHESTRA_PRICES: PriceTable = {
    model: {"input_usd_per_million": input_usd, "output_usd_per_million": output_usd}
    for model, input_usd, output_usd in (
        ("gpt-5", 1.25, 10.0),
        ("gpt-5-mini", 0.25, 2.0),
        ("Qwen3-32B", 0.8, 0.8),
        ("Qwen2.5-Coder-32B-Instruct", 0.8, 0.8),
        ("Llama-3.3-70B-Instruct", 0.9, 0.9),
        ("Qwen2.5-Math-72B-Instruct", 0.9, 0.9),
        ("Qwen2.5-Math-7B-Instruct", 0.2, 0.2),
        ("Qwen3-8B", 0.2, 0.2),
        ("claude-opus-4.1", 15.0, 75.0),
        ("claude-sonnet", 3.0, 15.0),
        ("nemotron-ultra-253b", 0.9, 0.9),
        ("nemotron-super-49b", 0.9, 0.9),
        ("Qwen3-235B", 0.9, 0.9),
    )
}
"""Dollars per million tokens of the models in ToolOrchestra (arXiv 2511.21689): those in the tool descriptions of its
released code for the experts, those of its evaluation for the orchestrator (Qwen3-8B) and the baselines."""


@dataclass(frozen=True, slots=True)
class ExpertAlias:
    """One of ToolOrchestra's names for an expert: the model behind it and the seconds that the policy is told."""

    model: str
    latency_s: float


TOOLORCHESTRA_EXPERTS: Mapping[str, ExpertAlias] = {
    "search-1": ExpertAlias("gpt-5", 22.0),
    "search-2": ExpertAlias("gpt-5-mini", 16.0),
    "search-3": ExpertAlias("Qwen3-32B", 8.0),
    "reasoner-1": ExpertAlias("gpt-5", 31.0),
    "reasoner-2": ExpertAlias("gpt-5-mini", 25.0),
    "reasoner-3": ExpertAlias("Qwen2.5-Coder-32B-Instruct", 9.0),
    "answer-1": ExpertAlias("gpt-5", 96.0),
    "answer-2": ExpertAlias("gpt-5-mini", 27.0),
    "answer-3": ExpertAlias("Llama-3.3-70B-Instruct", 15.0),
    "answer-4": ExpertAlias("Qwen3-32B", 11.0),
    "answer-math-1": ExpertAlias("Qwen2.5-Math-72B-Instruct", 13.0),
    "answer-math-2": ExpertAlias("Qwen2.5-Math-7B-Instruct", 9.0),
    "expert-1": ExpertAlias("gpt-5", 96.0),
    "expert-2": ExpertAlias("gpt-5-mini", 27.0),
    "expert-3": ExpertAlias("Qwen3-32B", 11.0),
}
"""The pool of ToolOrchestra's evaluation as its tool descriptions advertise it (arXiv 2511.21689 and released code)."""


def model_price(
    model: str, *, provider: str | None = None, overrides: PriceTable | str | PathLike[str] | None = None
) -> Price:
    """The price of a model's tokens. No network is used.

    Args:
        model: its name, as in the API.
        provider: genai-prices' name of who serves it ("openai", "together", ...), or the URL of the API; None takes
            the provider that the model's name suggests.
        overrides: a table asked first: a mapping from models to rows with the keys `PRICE_KEYS` (or to a `Price`),
            or the path of such a table as a YAML (.yaml, .yml) or JSON file.

    Raises:
        ValueError: the model is in no table (the message shows how to give its price by hand), or a table is not
            usable.
        ImportError: the model is not in `overrides` and genai-prices is not installed.
    """
    table = _read_table(overrides)
    if model in table:
        return as_price(table[model], f"the price of {model!r}")
    return _listed_price(model, provider, list(table))


def as_price(value: Any, what: str = "price") -> Price:
    """A `Price` from itself or from a mapping: `Price`'s own fields, or dollars per million tokens (`PRICE_KEYS`).

    Args:
        what: begins the error message.

    Raises:
        ValueError: a key is unknown, half of a pair is missing, or a number is not usable.
    """
    if isinstance(value, Price):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a mapping such as {_EXAMPLE}, not {value!r}")
    fields = ("per_call_usd", "per_input_token_usd", "per_output_token_usd", "per_second_usd")
    known = tuple(dict.fromkeys((*PRICE_KEYS, *fields)))
    if unknown := [key for key in value if key not in known]:
        raise ValueError(f"{what} has an unknown key {unknown[0]!r}; it may have {', '.join(known)}")
    amounts = dict(value)
    for direction in ("input", "output"):
        listed, plain = f"{direction}_usd_per_million", f"per_{direction}_token_usd"
        if listed in value and plain in value:
            raise ValueError(f"{what} states {direction} tokens twice: {listed} and {plain}")
        if listed in value:
            amounts[plain] = _per_token(amounts.pop(listed), f"{what}: {listed}")
        elif plain not in value and any(key in value for key in PRICE_KEYS[:2]):
            raise ValueError(f"{what} has no {listed}; say 0 if {direction} is free")
    try:
        return Price(**amounts)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


_EXAMPLE = '{"input_usd_per_million": 0.8, "output_usd_per_million": 0.8}'


def _per_token(listed: Any, what: str) -> float:
    if isinstance(listed, bool) or not isinstance(listed, int | float) or not 0 <= listed < float("inf"):
        raise ValueError(f"{what} must be a finite number of dollars of at least 0, not {listed!r}")
    if listed > MAX_USD_PER_TOKEN * TOKENS_PER_LISTED_PRICE:
        raise ValueError(f"{what} is {listed!r}: more than ${MAX_USD_PER_TOKEN:g} for a single token")
    return listed / TOKENS_PER_LISTED_PRICE


def _read_table(overrides: PriceTable | str | PathLike[str] | None) -> PriceTable:
    if overrides is None:
        return {}
    if isinstance(overrides, str | PathLike):
        overrides = _read_file(Path(overrides))
    if not isinstance(overrides, Mapping):
        raise ValueError(f"a price table maps models to rows such as {_EXAMPLE}; this is {overrides!r}")
    return overrides


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the price table {str(path)!r}: {error}") from error
    try:
        if path.suffix == ".json":
            return json.loads(text)
        return _load_yaml(text)
    except ValueError as error:
        raise ValueError(f"the price table {str(path)!r} cannot be read: {error}") from error


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("a price table in YAML needs PyYAML: pip install pyyaml, or write it as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _listed_price(model: str, provider: str | None, known: list[str]) -> Price:
    """The price by genai-prices' offline table."""
    try:
        from genai_prices import Usage, calc_price
    except ImportError as error:
        raise ImportError(
            f"the price of {model!r} is not given and the price table is missing: {install_hint('live')}"
        ) from error

    noon = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    where: Any = {"provider_id": provider}
    if provider is not None and "://" in provider:
        where = {"provider_api_url": provider}
    try:
        found = calc_price(Usage(input_tokens=1, output_tokens=1), model, genai_request_timestamp=noon, **where)
    except LookupError:
        raise ValueError(_unknown(model, provider, known)) from None
    listed = found.model_price
    if listed.input_mtok is None and listed.output_mtok is None:
        raise ValueError(f"{found.provider.id} does not sell {model!r} by the token; {_by_hand(model)}")
    per_thousand_calls: Any = listed.requests_kcount
    return Price(
        per_call_usd=float(per_thousand_calls) / 1000 if per_thousand_calls is not None else 0.0,
        per_input_token_usd=float(found.input_price),
        per_output_token_usd=float(found.output_price),
    )


def _unknown(model: str, provider: str | None, known: list[str]) -> str:
    from genai_prices.data_snapshot import get_snapshot

    names = {listed.id for one in get_snapshot().providers for listed in one.models}
    near = difflib.get_close_matches(model, known, 3, 0.5)
    near += difflib.get_close_matches(model.rpartition("/")[2].lower(), sorted(names), 3, 0.6)
    hint = f" (near names: {', '.join(dict.fromkeys(near))})" if near else ""
    at = f" at {provider!r}" if provider else ""
    return f"no price of {model!r}{at} is known{hint}; {_by_hand(model)}"


def _by_hand(model: str) -> str:
    return f"give it by hand: price={_EXAMPLE}, or a price table with {json.dumps(model)}: {_EXAMPLE}"
