"""A model behind an OpenAI-compatible endpoint as the orchestrator.

    endpoint:gpt-5-mini                                   OpenAI's own, OPENAI_API_KEY from the environment
    endpoint:qwen3@http://127.0.0.1:8000/v1               a server that needs no key
    endpoint:orchestrator.yaml                            everything else; the fields of `EndpointSettings`

Tools are offered natively (`calls: native`: the request's `tools`, with price and latency in the descriptions) or in
our text form (`calls: text`: in the system prompt, calls as `<tool_call>` in the text). Both are read in either case.
Tokens are charged by the price table, seconds are measured per request that was answered; pauses and requests that
failed for a moment are not part of them, but counted.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import yaml
from orchestra_envs.limits import Limiter, Retry
from orchestra_envs.live.chat import MAX_CONNECTIONS, OPENAI_URL, ChatError, ChatReply, ChatToolCall, Endpoint, chat
from orchestra_envs.parse import CALL_CLOSE, CALL_OPEN, ToolCall, render_call
from orchestra_envs.prices import as_price, model_price
from orchestra_envs.tools import Price
from pydantic import Field, ValidationError

from orchestra_jax.config import ConfigError, Section
from orchestra_jax.eval.play import INFRA_ERROR, PolicyTurn
from orchestra_jax.text.prompt import system_prompt, tools_section

PREFIX = "endpoint:"

FATAL_STATUSES = frozenset({401, 403, 404})
"""A wrong key, address or model: every request will fail, so nothing more is asked."""

_WIRE_NAME_CHARS = 64
_NOT_IN_WIRE_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_CONTEXT_WORDS = re.compile(r"context.{0,3}length|maximum context|too many tokens|prompt is too long", re.IGNORECASE)


class EndpointSettings(Section):
    """An orchestrator behind an endpoint, as a YAML file describes it."""

    model: str = Field(min_length=1)
    """As the endpoint names it."""
    base_url: str = OPENAI_URL
    """Up to and including the version."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; null sends none."""
    calls: Literal["native", "text"] = "native"
    """How tools are offered."""
    price: dict[str, float] | None = None
    """Such as {input_usd_per_million: 0.25, output_usd_per_million: 2}; left out: by the price table."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Left out: the endpoint's own."""
    seed: int | None = None
    """Sent where given, plus a number that follows from task and trial."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Of one turn, reasoning included; a turn that reaches it ends the episode, as with policies of our own."""
    timeout_s: float = Field(300.0, gt=0)
    """Of one request."""
    retry: dict[str, int | float] = Field({"max_attempts": 5})
    """{max_attempts, base_delay_s, max_delay_s}, of what failed for a moment (429, 5xx, broken connections)."""
    max_concurrency: int | None = Field(None, ge=1)
    """Requests under way at once; left out: as many as episodes."""
    max_calls_per_s: float | None = Field(None, gt=0)
    """Requests started in a second."""
    extra: dict[str, Any] = Field({})
    """More fields of the request, such as {reasoning_effort: low}."""


@dataclass(frozen=True)
class Orchestrator:
    """An endpoint ready to be asked; shared by the episodes of an evaluation.

    `problems` counts failed requests by kind, over all attempts. `price` None: not known, its tokens cost nothing and
    every cost is marked as an estimate.
    """

    settings: EndpointSettings
    endpoint: Endpoint
    price: Price | None
    retry: Retry
    limiter: Limiter
    problems: Counter[str] = field(default_factory=Counter)

    def identity(self) -> dict[str, Any]:
        """What decides its answers and their cost, as plain JSON; no key."""
        known = {"model", "base_url", "calls", "price", "temperature", "seed", "max_output_tokens", "extra"}
        return {"endpoint": self.settings.model_dump(mode="json", include=known)}


def read_orchestrator(text: str) -> tuple[str, Orchestrator]:
    """What `endpoint:...` (without the prefix) describes, and a name for it.

    Raises:
      ConfigError: the file or a field is wrong, the key's variable is not set, or the client is not installed.
    """
    if text.endswith((".yaml", ".yml")):
        settings, name = _read_file(Path(text)), Path(text).stem
    else:
        settings = _short_form(text)
        name = settings.model.rpartition("/")[2]
    where = f"--policy {PREFIX}{text}"
    if settings.api_key_env is not None and not os.environ.get(settings.api_key_env, "").strip():
        raise ConfigError(f"{where}: the environment variable {settings.api_key_env} is not set; it holds the API key")
    try:
        import openai  # noqa: F401  (only to find out now)
    except ImportError:
        raise ConfigError(f"{where}: needs the OpenAI client: pip install 'orchestra-jax[live]'") from None
    try:
        endpoint = Endpoint(
            settings.model, settings.base_url, settings.api_key_env, settings.timeout_s, dict(settings.extra)
        )
        retry = _retry(settings.retry)
        most = settings.max_concurrency or MAX_CONNECTIONS
        limiter = Limiter(max_concurrency=most, max_calls_per_s=settings.max_calls_per_s)
        return name, Orchestrator(settings, endpoint, _price(settings), retry, limiter)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _short_form(text: str) -> EndpointSettings:
    """MODEL or MODEL@BASE_URL."""
    model, at, url = text.rpartition("@")
    if not at or "://" not in url:
        model, url = text, os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    if not model or "://" in model:
        raise ConfigError(
            f"--policy {PREFIX}{text}: expected {PREFIX}MODEL, {PREFIX}MODEL@BASE_URL or {PREFIX}FILE.yaml"
        )
    # A key goes to the host that it is for, and to no other that a command line names.
    official = urlsplit(url).hostname == urlsplit(OPENAI_URL).hostname
    return EndpointSettings(model=model, base_url=url, api_key_env="OPENAI_API_KEY" if official else None)


def _read_file(file: Path) -> EndpointSettings:
    where = f"--policy {PREFIX}{file}"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        return EndpointSettings.model_validate(content)
    except ValidationError as error:
        # The values are not shown: one may be a key, written here by mistake.
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{where}: {problems}; it may have {', '.join(EndpointSettings.model_fields)}") from None


def _retry(fields: Mapping[str, Any]) -> Retry:
    return Retry(**{"max_attempts": 5, **fields})


def _price(settings: EndpointSettings) -> Price | None:
    if settings.price is not None:
        return as_price(settings.price, "price")
    try:
        return model_price(settings.model, provider=settings.base_url)
    except (ValueError, ImportError):
        return None


class EndpointPolicy:
    """One episode of an orchestrator behind an endpoint."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._messages: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] | None = None
        self._real_names: dict[str, str] = {}
        self._asked: list[str] = []
        """Ids of the native calls of the latest turn, which its results answer."""
        self._seed: int | None = None

    def reset(self, env: gym.Env, observation: str, info: dict[str, Any], rng: np.random.Generator) -> None:
        """Begin: the system prompt and the tools of the episode."""
        settings = self._orchestrator.settings
        system, tools = system_prompt(info, "qwen")
        if tools and settings.calls == "native":
            self._tools, self._real_names = _wire_tools(tools)
        elif tools:
            system = f"{system}\n\n{tools_section(tools)}"
        self._messages = [{"role": "system", "content": system}] if system else []
        self._messages.append({"role": "user", "content": observation})
        if settings.seed is not None:
            self._seed = settings.seed + int(rng.integers(2**16))

    async def act(self, observation: str, info: dict[str, Any]) -> PolicyTurn:
        """Asks for the next turn; a fault of the endpoint ends the episode as "infra_error"."""
        if self._messages[-1]["role"] == "assistant":
            self._messages += _results(observation, info, self._asked)
        attempts = _Attempts(self._orchestrator)
        try:
            reply = await self._orchestrator.retry.run(partial(attempts.ask, self._messages, self._tools, self._seed))
        except ChatError as error:
            return self._failed(error, attempts)
        calls = [_real_call(call, self._real_names) for call in reply.tool_calls]
        self._asked = self._remember(reply)
        shown = {
            "num_tokens": reply.output_tokens,
            "num_input_tokens": reply.input_tokens,
            "num_attempts": attempts.num_attempts,
            **({"reasoning": reply.reasoning} if reply.reasoning else {}),
        }
        return PolicyTurn(
            "\n".join(filter(None, [reply.text, *calls])),
            cost_usd=attempts.cost_usd + _cost_usd(self._orchestrator.price, reply),
            cost_known=attempts.cost_known and reply.usage_known and self._orchestrator.price is not None,
            latency_s=attempts.latency_s,
            end_reason="length" if reply.finish_reason == "length" else "",
            shown=shown,
        )

    def _remember(self, reply: ChatReply) -> list[str]:
        """Enters the turn into the conversation; the ids of its native calls."""
        ids: list[str] = []
        entries = []
        for index, call in enumerate(reply.tool_calls):
            fresh = call.id and call.id not in ids
            ids.append(call.id if fresh else f"call_{len(self._messages)}_{index}")
            # Servers refuse a conversation with arguments that are no JSON; the result says what was wrong.
            arguments = "{}" if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
            entries.append({"id": ids[-1], "type": "function", "function": {"name": call.name, "arguments": arguments}})
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        self._messages.append({**message, "tool_calls": entries} if entries else message)
        return ids

    def _failed(self, error: ChatError, attempts: _Attempts) -> PolicyTurn:
        message = str(error)
        if error.status in FATAL_STATUSES or "no API key" in message:
            raise ConfigError(f"endpoint {self._orchestrator.settings.model}: {message}")
        too_long = error.status in (400, 413) and _CONTEXT_WORDS.search(message)
        return PolicyTurn(
            "",
            cost_usd=attempts.cost_usd,
            cost_known=attempts.cost_known,
            latency_s=0.0,
            end_reason="context" if too_long else INFRA_ERROR,
            shown={"num_tokens": 0, "num_attempts": attempts.num_attempts, "error": message},
        )


class _Attempts:
    """The requests of one turn: how many, what the failed ones were billed, how long the answered one took."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self.num_attempts = 0
        self.cost_usd = 0.0
        self.cost_known = True
        self.latency_s = 0.0

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, seed: int | None
    ) -> ChatReply:
        settings = self._orchestrator.settings
        self.num_attempts += 1
        async with self._orchestrator.limiter.slot():
            start_s = time.perf_counter()
            try:
                reply = await chat(
                    self._orchestrator.endpoint,
                    messages,
                    tools=tools,
                    max_output_tokens=settings.max_output_tokens,
                    temperature=settings.temperature,
                    seed=seed,
                )
            except ChatError as error:
                kind = f"HTTP status {error.status}" if error.status else "no usable answer"
                self._orchestrator.problems[kind] += 1
                self.cost_usd += _cost_usd(self._orchestrator.price, error)
                self.cost_known = self.cost_known and error.cost_known
                raise
            self.latency_s = time.perf_counter() - start_s
            return reply


def make_policies(orchestrator: Orchestrator) -> Callable[[], EndpointPolicy]:
    """What makes the policy of one episode."""
    return partial(EndpointPolicy, orchestrator)


def _cost_usd(price: Price | None, tokens: ChatReply | ChatError) -> float:
    if price is None or not (tokens.input_tokens or tokens.output_tokens):
        return 0.0
    return price.cost_usd(input_tokens=tokens.input_tokens, output_tokens=tokens.output_tokens)


def _wire_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Tools with names that the API takes (letters, digits, _ and -), and the real name of each."""
    real: dict[str, str] = {}
    wire = []
    for tool in tools:
        function = tool["function"]
        name = _NOT_IN_WIRE_NAMES.sub("_", function["name"])[:_WIRE_NAME_CHARS]
        while name in real:
            name = f"{name[: _WIRE_NAME_CHARS - 4]}_{len(real)}"
        real[name] = function["name"]
        wire.append({"type": "function", "function": {**function, "name": name}})
    return wire, real


def _real_call(call: ChatToolCall, real_names: Mapping[str, str]) -> str:
    """A native call in our text form; arguments that are no JSON object stay as they are."""
    name = real_names.get(call.name, call.name)
    if call.arguments is not None:
        try:
            return render_call(ToolCall(name, call.arguments))
        except ValueError:
            pass  # nested too deeply; shown as it came
    return f'{CALL_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {call.arguments_text}}}\n{CALL_CLOSE}'


def _results(observation: str, info: Mapping[str, Any], ids: Sequence[str]) -> list[dict[str, Any]]:
    """What the environment said, as messages: one per native call, else one of the user."""
    if not ids:
        by_tool = info["num_calls"] or info["num_errors"]
        text = f"<tool_response>\n{observation}\n</tool_response>" if by_tool else observation
        return [{"role": "user", "content": text}]
    texts = [call.get("text", "") for call in json.loads(info["calls_json"])]
    if len(texts) != len(ids) or info["num_errors"] > len(texts):
        texts = [observation, *["(see the first result)"] * (len(ids) - 1)]
    return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in zip(ids, texts)]
