"""Policies to serve in tests: one that says what a script tells it, and a tiny real one."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from functools import cache
from pathlib import Path

import jax
import openai

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import init_params
from orchestra_jax.sampler.engine import Engine, EngineStats, SampledTurn
from orchestra_jax.serve.app import Service
from orchestra_jax.serve.server import running_server
from orchestra_jax.serve.worker import EngineThread
from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.tokenizer import load_tokenizer

CONFIG = preset("market-tiny", hidden_size=32, intermediate_size=64, num_layers=1, head_dim=8)
CAPACITY = 600
ENDLESS = "ENDLESS"


@cache
def chat_format(name: str = "market") -> ChatFormat:
    """The market's, or one of the templates of tests/text, which are like those of real models."""
    if name == "market":
        return ChatFormat(load_tokenizer("market"))
    file = Path(__file__).parents[1] / "text" / "conftest.py"
    spec = importlib.util.spec_from_file_location("text_formats", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return ChatFormat(module.make_tokenizer(name), variables=module.VARIABLES.get(name))


class ScriptedEngine:
    """In place of an engine: conversations get turns that `say(request)` tells, a few tokens a round.

    A turn is a text, which a stop token ends, a list of ids (a limit ends it), or ENDLESS.
    """

    def __init__(self, chat, say, slots=4, steps=3, capacity=CAPACITY, round_s=0.0):
        self.chat, self.say, self.slots, self.steps, self.capacity = chat, say, slots, steps, capacity
        self.round_s = round_s
        self.stats = EngineStats()
        self.requests, self.cancelled, self.faults, self.turn_faults = [], [], [], []
        self._queue, self._under_way, self._said = [], {}, {}

    @property
    def busy(self):
        return bool(self._queue or self._under_way)

    def submit(self, request):
        assert request.key not in self._under_way
        self.requests.append(request)
        self._queue.append(request)

    def partial(self, key):
        return list(self._said.get(key, []))

    def release(self, key):
        pass

    def cancel(self, key):
        self.cancelled.append(key)
        self._queue = [request for request in self._queue if request.key != key]
        self._under_way.pop(key, None)
        self._said.pop(key, None)

    def run(self):
        time.sleep(self.round_s)
        if self.faults:
            raise self.faults.pop()
        while self._queue and len(self._under_way) < self.slots:
            request = self._queue.pop(0)
            said = self.say(request)
            ids = self.chat.turn_ids(said) if isinstance(said, str) and said != ENDLESS else said
            self._under_way[request.key] = request, ids
            self._said[request.key] = []
        return [turn for key in list(self._under_way) if (turn := self._step(key))]

    def _step(self, key):
        request, ids = self._under_way[key]
        said = self._said[key]
        if ids == ENDLESS:
            said += self.chat.tokenizer.encode_text("abc ")[: self.steps]
        else:
            said += ids[len(said) : len(said) + self.steps]
        del said[request.limit :]
        if ids != ENDLESS and len(said) < min(len(ids), request.limit):
            return None
        if ids == ENDLESS and len(said) < request.limit:
            return None
        del self._under_way[key], self._said[key]
        stopped = said[-1] == self.chat.end_id
        error = self.turn_faults.pop() if self.turn_faults else None
        return SampledTurn(key, said, [-0.5] * len(said), [0] * len(said), stopped, error=error)


@contextlib.contextmanager
def scripted(say, *, chat=None, max_waiting=16, api_key=None, constrain=False, **engine_options):
    """A server whose policy says `say(request)`, or the same text always: its base URL and its engine."""
    chat = chat or chat_format()
    engines = []

    def make():
        engines.append(
            ScriptedEngine(chat, say if callable(say) else lambda request: say, **engine_options),
        )
        return engines[-1]

    worker = EngineThread(make, max_waiting=max_waiting)
    service = Service("tiny", chat, worker, engines[0].capacity, api_key, constrain)
    with running_server(service, grace_s=5) as url:
        yield url, engines


@cache
def tiny_params():
    # Larger weights than the initial ones, so that greedy turns do not repeat one token.
    return jax.tree.map(lambda x: 2 * x, init_params(CONFIG, jax.random.key(0)))


@contextlib.contextmanager
def tiny(slots=4, max_waiting=64, capacity=CAPACITY, params=None):
    """A server over a real engine with random weights: its base URL and its worker."""
    chat = chat_format()

    def make():
        engine = Engine(
            CONFIG,
            slots=slots,
            capacity=capacity,
            stop_ids=chat.stop_ids,
            seed=0,
            steps=4,
            chunk=128,
            token_bytes=chat.tokenizer.token_bytes,
        )
        engine.use(tiny_params() if params is None else params, 0)
        return engine

    worker = EngineThread(make, max_waiting=max_waiting)
    with running_server(Service("tiny", chat, worker, capacity), grace_s=5) as url:
        yield url, worker


def client(url, key="none", **options):
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, **options)


def ask(url, content="Hi", **options):
    """A chat completion of one user message."""
    options.setdefault("messages", [{"role": "user", "content": content}])
    with client(url) as asker:
        return asker.chat.completions.create(model="tiny", **options)


def ask_stream(url, content="Hi", **options):
    """The chunks of the same, as a list."""
    options.setdefault("messages", [{"role": "user", "content": content}])
    with client(url) as asker:
        return list(asker.chat.completions.create(model="tiny", stream=True, **options))


def assembled(chunks, index=0):
    """The message that the chunks of a choice add up to, with finish reason, and the usage."""
    message = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.index != index:
                continue
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                message["calls"].append((call.index, call.id, call.function.name, call.function.arguments))
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
    return message, usage


def wait_until(condition, timeout_s=10.0):
    """Waits for something that happens in another thread."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
