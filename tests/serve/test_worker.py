"""The engine's thread: nobody waits for ever, whatever breaks; conversations keep their slots while there is room."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from serving import ENDLESS, ScriptedEngine, chat_format

from orchestra_jax.sampler.engine import Request
from orchestra_jax.serve.errors import ApiError
from orchestra_jax.serve.worker import EngineThread, Failed, Progress


class Recording(ScriptedEngine):
    """Remembers what was released."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.released = []

    def release(self, key):
        self.released.append(key)


def run(scenario, say="yes", start=True, **options):
    """Runs `scenario(worker, engines)` in an event loop, with a worker that is closed afterwards."""
    engines = []

    def make():
        engines.append(Recording(chat_format(), lambda request: say, **options))
        return engines[-1]

    worker = EngineThread(make, max_waiting=8)
    if start:
        worker.start()
    try:
        return asyncio.run(asyncio.wait_for(scenario(worker, engines), 20))
    finally:
        worker.close()


def request(key="a", limit=100):
    return Request(key, [1, 2, 3], limit, 0)


async def last_event(events):
    while isinstance((found := await events.get())[1], Progress):
        pass
    return found[1]


def test_tokens_come_in_order_and_once():
    async def scenario(worker, engines):
        events = asyncio.Queue()
        worker.submit(request(), events)
        tokens, event = [], None
        while event is None or isinstance(event, Progress):
            _, event = await events.get()
            tokens += event.tokens
        return tokens, event.turn

    tokens, turn = run(scenario, "one two three", steps=1)
    assert tokens == turn.tokens == chat_format().turn_ids("one two three")


def test_a_conversation_has_one_turn_at_a_time():
    async def scenario(worker, engines):
        events = asyncio.Queue()
        turn = worker.submit(request(), events)
        with pytest.raises(ValueError, match="has a turn under way"):
            worker.submit(request(), events)
        assert worker.is_open("a")
        worker.cancel(turn)
        worker.cancel(turn)  # no error
        again = worker.submit(request(), events)  # at once
        found = await events.get()
        assert found[0] is again
        worker.cancel(again)

    run(scenario, ENDLESS, round_s=0.01, capacity=10**9)


def test_the_oldest_conversations_give_their_slots_back():
    async def scenario(worker, engines):
        for key in ("a", "b", "c", "b", "d"):
            events = asyncio.Queue()
            worker.submit(request(key), events)
            await last_event(events)
        return engines[0].released

    assert run(scenario, slots=2) == ["a", "c"]


def test_turns_that_nobody_read_fail_when_the_thread_ends():
    async def scenario(worker, engines):
        events = asyncio.Queue()
        worker.submit(request("a"), events)
        await events.get()
        worker.submit(request("b"), events)
        await asyncio.to_thread(worker.close)
        failed = set()
        while len(failed) < 2:
            turn, event = await events.get()
            if isinstance(event, Failed):
                failed.add(turn.request.key)
        assert failed == {"a", "b"}
        with pytest.raises(ApiError, match="shutting down") as caught:
            worker.submit(request("c"), events)
        assert caught.value.status == 503

    run(scenario, ENDLESS, round_s=0.2, capacity=10**9)


def test_an_engine_that_refuses_a_turn():
    async def scenario(worker, engines):
        events = asyncio.Queue()
        engines[0].submit = None  # calling it raises
        worker.submit(request("a"), events)
        return await last_event(events)

    failed = run(scenario)
    assert isinstance(failed, Failed)
    assert failed.error.status == 500


def test_an_engine_that_breaks_while_it_cancels():
    async def scenario(worker, engines):
        events, others = asyncio.Queue(), asyncio.Queue()
        turn = worker.submit(request("a"), events)
        worker.submit(request("b"), others)
        await events.get()
        engines[0].cancel = None
        worker.cancel(turn)
        assert (await last_event(others)).error.code == "sampler_error"
        third = asyncio.Queue()
        worker.submit(request("c", limit=3), third)
        await last_event(third)
        return len(engines)

    assert run(scenario, ENDLESS, round_s=0.01, capacity=10**9) == 2
