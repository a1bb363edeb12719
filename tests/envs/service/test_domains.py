"""The tools of the four domains: typed, bound to their episode's database, with errors that can be acted upon."""

import json
import random
import threading

import pytest
from orchestra_envs import ToolArgumentError, ToolCall, render_call
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.env import ServiceEnv
from orchestra_envs.service.generate import run_call
from orchestra_envs.service.world import cents_of, day_of, new_id, usd

READS, WRITES = ("verify_", "get_", "list_", "find_", "check_"), 5


@pytest.fixture(params=DOMAINS)
def domain(request):
    return DOMAINS[request.param]


def sample_arguments(tool, goals):
    """Golden arguments of a tool, from goals that use it."""
    for goal in goals:
        for call in (*goal.reads, *goal.writes):
            if call.name == tool.name:
                return call.arguments
    return None


def all_goals(domain, world, person):
    return [goal for make in domain.goals.values() for goal in make(world, person, random.Random(0))]


def test_domains_are_complete(domain):
    assert 8 <= len(domain.tools) <= 12
    assert sum(not tool.name.startswith(READS) for tool in domain.tools) >= WRITES
    assert domain.instructions(domain.make_world(random.Random(0))[0].today).count("\n- ") >= 7
    assert "{" not in domain.instructions(domain.make_world(random.Random(0))[0].today)
    for tool in domain.tools:
        assert 0 < tool.price.per_call_usd < 0.001
        assert 0 < tool.latency_s < 1
        assert (tool.source, tool.inline, tool.clock) == ("simulated", True, "declared")
        assert all("description" in schema for schema in tool.parameters["properties"].values()), tool.name


def test_tool_names_differ_between_domains():
    names = [tool.name for domain in DOMAINS.values() for tool in domain.tools]
    assert len(set(names)) == len(names)


def test_worlds_are_pure_functions_of_the_generator(domain):
    world, person = domain.make_world(random.Random(7))
    again, same = domain.make_world(random.Random(7))
    assert world.digest() == again.digest()
    assert world.same_state(again)
    assert person == same
    assert domain.make_world(random.Random(8))[0].digest() != world.digest()
    json.dumps(world.state())


def test_private_things_need_verification(domain):
    world, person = domain.make_world(random.Random(1))
    verified = world.copy()
    run_call(domain, verified, person.verification)
    public = ("verify_", "find_", "check_", "list_doctors", "list_free_slots", "list_room_types")
    public += ("get_product", "get_title")
    goals = all_goals(domain, world, person)
    for tool in domain.tools:
        arguments = sample_arguments(tool, goals)
        if tool.name.startswith(public) or arguments is None:
            continue
        with pytest.raises(ToolArgumentError, match="not verified"):
            run_call(domain, world, ToolCall(tool.name, arguments))
        run_call(domain, verified.copy(), ToolCall(tool.name, arguments))
    assert world.same_state(domain.make_world(random.Random(1))[0])


def test_wrong_ids_change_nothing(domain):
    world, person = domain.make_world(random.Random(1))
    run_call(domain, world, person.verification)
    before = world.copy()
    for tool in domain.tools:
        arguments = sample_arguments(tool, all_goals(domain, world, person))
        if arguments is None or tool.name.startswith(("find_", "list_doctors", "list_room")):
            continue
        for name, value in arguments.items():
            if isinstance(value, str) and (name.endswith("_id") or name == "card_number"):
                with pytest.raises(ToolArgumentError, match=r"there is no|has no line"):
                    run_call(domain, world, ToolCall(tool.name, arguments | {name: "X-0"}))
            if name.endswith("_usd"):
                with pytest.raises(ToolArgumentError):
                    run_call(domain, world, ToolCall(tool.name, arguments | {name: 0.005}))
            if name in ("arrival", "due", "pickup_day", "from_day"):
                with pytest.raises(ToolArgumentError, match="YYYY-MM-DD"):
                    run_call(domain, world, ToolCall(tool.name, arguments | {name: "tomorrow"}))
    assert world.same_state(before)


def test_other_people_cannot_be_verified_with_ones_own_particulars(domain):
    world, person = domain.make_world(random.Random(2))
    call = person.verification
    for name, value in call.arguments.items():
        with pytest.raises(ToolArgumentError):
            run_call(domain, world, ToolCall(call.name, call.arguments | {name: value[:-1] + "x"}))
    assert not world.verified


def test_writes_cannot_be_repeated_where_that_makes_no_sense(domain):
    world, person = domain.make_world(random.Random(3))
    once = ("cancel_", "report_lost", "add_store_credit", "refill_", "create_", "book_", "return_item", "pay_fine")
    once += ("add_breakfast",)
    seen = set()
    for goal in all_goals(domain, world, person):
        for call in goal.writes:
            if call.name.startswith(once) and call.name not in seen:
                seen.add(call.name)
                copy = world.copy()
                run_call(domain, copy, person.verification)
                run_call(domain, copy, call)
                with pytest.raises(ToolArgumentError):
                    run_call(domain, copy, call)
    assert len(seen) >= 3


def test_errors_reach_the_policy_as_observations():
    env = ServiceEnv()
    env.reset(seed=0, options={"task_id": "train/shop/cancel_order/0"})
    for arguments in ({"order_id": "O-1"}, {"order_id": 5}, {}, {"order_id": "O-1", "more": 1}):
        observation, _, terminated, truncated, info = env.step(render_call(ToolCall("get_order", arguments)))
        assert observation.startswith("Error: get_order")
        assert (info["num_errors"], info["error_type"], terminated, truncated) == (1, "invalid_arguments", False, False)
        assert info["cost_usd"] == 0.0
    observation, *_ = env.step(
        render_call(ToolCall("cancel_order", {"order_id": "O-1", "reason": "x", "refund_usd": 1}))
    )
    assert "no_longer_needed" in observation


def test_a_result_fits_into_an_observation(domain):
    """Nothing that a golden look-up shows is cut off at the default limit."""
    for number in range(20):
        world, person = domain.make_world(random.Random(number))
        run_call(domain, world, person.verification)
        for goal in all_goals(domain, world, person)[:60]:
            for call in goal.reads:
                assert len(json.dumps(run_call(domain, world, call))) < 4000, call


def test_amounts_days_and_ids():
    assert [cents_of(amount) for amount in (0, 12.5, 0.1 + 0.2, 999_999.99)] == [0, 1250, 30, 99_999_999]
    for amount in (-1, 0.001, float("nan"), float("inf"), 1e308):
        with pytest.raises(ToolArgumentError):
            cents_of(amount)
    assert usd(123_450) == "$1,234.50"
    assert day_of("2026-03-01").day == 1
    for text in ("2026-02-30", "1.3.2026", "", "2026-03-01T00:00"):
        with pytest.raises(ToolArgumentError):
            day_of(text)
    assert new_id("B", 1, "x") == new_id("B", 1, "x") != new_id("B", 1, "y")


def test_episodes_in_threads_have_databases_of_their_own():
    task_id = "train/shop/cancel_order/0"
    digests = []

    def run():
        env = ServiceEnv()
        env.reset(seed=0, options={"task_id": task_id})
        for call in env.task.metadata["service_task"].actions:
            env.step(render_call(call))
        digests.append(env.task.metadata["world"].digest())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    env = ServiceEnv()
    env.reset(seed=0, options={"task_id": task_id})
    task = env.task.metadata["service_task"]
    assert digests == [task.golden.digest()] * 8
    assert env.task.metadata["world"].digest() == task.start.digest() != digests[0]
