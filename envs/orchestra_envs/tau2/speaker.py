"""A model behind an endpoint that takes a part in a dialogue: the user, an expert, a judge."""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.live.chat import ChatReply, Endpoint, chat
from orchestra_envs.live.options import made
from orchestra_envs.prices import as_price
from orchestra_envs.tools import Price, canonical_json

_ENDPOINT_FIELDS = tuple(field.name for field in fields(Endpoint))


@dataclass(frozen=True)
class Speaker:
    """How one model is asked.

    Args:
        endpoint: where it is.
        temperature, max_output_tokens, stream: as `chat` takes them.
        seeded: send a seed with every request, drawn from the episode's randomness.
        price: what a request costs; None where none was given.
        retry, limiter: of the requests.
    """

    endpoint: Endpoint
    temperature: float | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    seeded: bool = True
    price: Price | None = None
    retry: Retry | None = None
    limiter: Limiter | None = None

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> ChatReply:
        """One request, tried once."""
        return await chat(
            self.endpoint,
            messages,
            tools=tools or None,
            stream=self.stream,
            max_output_tokens=self.max_output_tokens,
            temperature=self.temperature,
            seed=int(rng.integers(2**31)) if self.seeded else None,
        )

    async def say(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> ChatReply:
        """A request within the limits, tried again after transient faults."""
        attempt = functools.partial(self.ask, messages, tools, rng)
        async with self.limiter.slot() if self.limiter else contextlib.nullcontext():
            return await (self.retry or Retry()).run(attempt)

    def cost_usd(self, reply: ChatReply) -> float:
        """What `reply` costs by the price; 0 without one."""
        price = self.price or Price()
        return price.cost_usd(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)


def read_speaker(where: str, config: Mapping[str, Any]) -> Speaker:
    """A `Speaker` of a mapping that holds the fields of `Endpoint` and of `Speaker` side by side.

    Equal mappings of plain values give the same object, so that all environments share its limiter.

    Raises:
        ValueError: it is no mapping, a field is unknown, or its value makes no sense; `where` is named.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a mapping such as {{'model': ..., 'base_url': ...}}, not {config!r}")
    try:
        plain = canonical_json(dict(config))
    except (TypeError, ValueError):  # holds objects, such as a Limiter
        return _read(where, config)
    return _shared(where, plain)


@functools.cache
def _shared(where: str, plain: str) -> Speaker:
    return _read(where, json.loads(plain))


def _read(where: str, config: Mapping[str, Any]) -> Speaker:
    given = dict(config)
    endpoint = {name: given.pop(name) for name in _ENDPOINT_FIELDS if name in given}
    known = [field.name for field in fields(Speaker) if field.name != "endpoint"]
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; fields: {', '.join([*_ENDPOINT_FIELDS, *known])}")
    for name, kind in (("retry", Retry), ("limiter", Limiter)):
        if name in given:
            given[name] = made(kind, given[name], f"{where}.{name}")
    if given.get("price") is not None:
        given["price"] = as_price(given["price"], f"{where}.price")
    try:
        return Speaker(Endpoint(**endpoint), **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
