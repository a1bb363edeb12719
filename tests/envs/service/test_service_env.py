"""`orchestra/Service-v0` as an environment: checker, groups, options, prices, preferences, judgements."""

import json
import os
import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import orchestra_envs
import pytest
from gymnasium.utils.env_checker import check_env
from orchestra_envs import Price, ToolCall, render_call, tool
from orchestra_envs.baselines import make_policy, run_episode
from orchestra_envs.preference import BALANCED
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.env import ServiceEnv
from orchestra_envs.service.generate import make_service_task, num_goals, solution

TASK = "train/shop/cancel_order/0"


@tool(price=Price(per_output_token_usd=1e-5), latency_s=8.0)
def call_expert(question: str) -> str:
    """A model that knows the policy well."""
    return "Verify the customer first."


def offered(info):
    return {spec["function"]["name"]: spec for spec in json.loads(info["tools_json"])}


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"split": "test", "domains": ["hotel"], "max_subgoals": 1, "preference": "random"}],
    ids=["default", "one"],
)
def test_checkers_have_no_complaint(kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("orchestra/Service-v0", **kwargs).unwrapped)
    assert orchestra_envs.check("orchestra/Service-v0", **kwargs) == []


def test_replicas_of_a_seed_pose_the_same_task():
    env = ServiceEnv(preference="random", expert=[call_expert])
    for seed in range(20):
        first = env.reset(seed=seed)
        assert all(env.reset(seed=seed, options={"replica": replica}) == first for replica in range(1, 5))
    assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(100)}) == 100


def test_eight_interleaved_environments_go_through_equal_episodes():
    envs = [ServiceEnv() for _ in range(8)]
    for seed in (5, 6):
        starts = [env.reset(seed=seed) for env in envs]
        assert all(start == starts[0] for start in starts)
        turns = envs[0].demonstrate(envs[0].task, np.random.default_rng(0))
        for turn in turns:
            steps = [env.step(turn) for env in envs]
            assert all(step == steps[0] for step in steps)
        assert steps[0][4]["outcome"] == 1.0


SCENARIOS = """
import hashlib, json
from orchestra_envs.service.domains import DOMAINS
from orchestra_envs.service.generate import make_service_task
kinds = [(domain, kind) for domain in DOMAINS for kind in DOMAINS[domain].goals]
tasks = [make_service_task("train", domain, kind, index) for domain, kind in kinds for index in range(4)]
texts = [(task.scenario(), task.start.digest()) for task in tasks]
print(hashlib.sha256(json.dumps(texts).encode()).hexdigest())
"""


def test_tasks_are_the_same_in_every_process():
    paths = os.pathsep.join(sys.path)
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCENARIOS],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


@pytest.mark.parametrize("domain", DOMAINS)
def test_splits_share_no_solution(domain):
    kinds = DOMAINS[domain].goals
    solutions = {
        split: {solution(make_service_task(split, domain, kind, index).goals) for kind in kinds for index in range(25)}
        for split in ("train", "test")
    }
    assert not solutions["train"] & solutions["test"]
    assert len(solutions["train"]) == 25 * len(DOMAINS[domain].goals)


def test_domains_and_subgoals_are_drawn_from_those_asked_for():
    env = ServiceEnv(domains=("clinic", "library"), max_subgoals=2, split="test")
    ids = [env.reset(seed=seed)[1]["task_id"].split("/") for seed in range(60)]
    assert {task_id[0] for task_id in ids} == {"test"}
    assert {task_id[1] for task_id in ids} == {"clinic", "library"}
    assert {num_goals(int(task_id[3])) for task_id in ids} == {1, 2}


def test_a_task_can_be_asked_for():
    observation, info = ServiceEnv(domains=("hotel",)).reset(seed=0, options={"task_id": TASK})
    assert info["task_id"] == TASK
    assert observation == make_service_task("train", "shop", "cancel_order", 0).opening
    assert "online shop" in info["instructions"]
    assert set(offered(info)) == {tool.name for tool in DOMAINS["shop"].tools}


@pytest.mark.parametrize(
    "task_id",
    ["shop/cancel_order/0", "train/shop/cancel_order/-1", "train/shop/cancel_order/x", "train/x/cancel_order/1", 7, "",
     "train/shop/renew_loan/0", "dev/shop/cancel_order/0", "train/shop/cancel_order/²"],
)  # fmt: skip
def test_wrong_task_ids(task_id):
    with pytest.raises(ValueError, match="expected"):
        ServiceEnv().reset(seed=0, options={"task_id": task_id})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"domains": "shop"}, "domains: expected a list"),
        ({"domains": []}, "domains: expected a list"),
        ({"domains": ["shop", "zoo"]}, "zoo"),
        ({"split": "dev"}, "split: expected one of train, test"),
        ({"max_subgoals": 0}, "max_subgoals: expected 1 to 4"),
        ({"max_subgoals": 5}, "max_subgoals: expected 1 to 4"),
        ({"max_subgoals": True}, "max_subgoals: expected 1 to 4"),
        ({"user": "human"}, "user: expected 'scripted'"),
        ({"user": {"modell": "x"}}, "user: "),
        ({"preference": "cheap"}, "preference: expected"),
        ({"preference": {"speed": 1.0}}, "preference: expected one of"),
        ({"preference": {"cost": 2.0}}, "Preference.weights"),
        ({"max_turns": 0}, "max_turns"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ServiceEnv(**kwargs)


def test_a_whole_episode_by_hand():
    env = ServiceEnv()
    env.reset(seed=0, options={"task_id": TASK})
    task = env.task.metadata["service_task"]
    (goal,) = task.goals
    assert env.judgement().outcome == 0.0
    env.step("May I have your e-mail address and postcode?")
    total = 0.0
    for call in task.actions:
        observation, reward, *_, info = env.step(render_call(call))
        assert not observation.startswith("Error")
        assert info["cost_usd"] == pytest.approx(0.0005 if call in goal.writes else 0.0002)
        assert info["latency_s"] == pytest.approx(0.4 if call in goal.writes else 0.2)
        assert reward < 0
        total += info["cost_usd"]
    judgement = env.judgement()
    assert judgement.execution
    assert judgement.completeness == 1.0
    assert judgement.fidelity == (0.0 if goal.tells else 1.0)
    for _ in range(3):
        _, reward, terminated, _, info = env.step(goal.reports[0])
        if terminated:
            break
    assert (info["end_reason"], info["outcome"]) == ("user_ended", 1.0)
    assert info["episode_cost_usd"] == pytest.approx(total)
    assert reward == 1.0


def test_a_record_that_was_never_looked_at_is_missing():
    """The right answer to a question, guessed."""
    env = ServiceEnv()
    env.reset(seed=0, options={"task_id": "train/shop/product_price/0"})
    (goal,) = env.task.metadata["service_task"].goals
    *_, info = env.step(goal.reports[0])
    assert env.judgement().told == (True,) * len(goal.tells)
    assert env.judgement().completeness == 0.0
    assert info["outcome"] == 0.0


def test_endless_talk_is_truncated():
    env = ServiceEnv(max_turns=4)
    env.reset(seed=0)
    for _ in range(4):
        *_, terminated, truncated, info = env.step("What is your name?")
    assert (terminated, truncated, info["end_reason"], info["outcome"]) == (False, True, "max_turns", 0.0)
    assert ServiceEnv().max_turns == 30


def test_experts_are_offered_beside_the_tools():
    env = ServiceEnv(expert=call_expert)
    _, info = env.reset(seed=0, options={"task_id": TASK})
    assert "call_expert" in offered(info)
    observation, *_, info = env.step(render_call(ToolCall("call_expert", {"question": "What now?"})))
    assert observation == "Verify the customer first."
    assert info["latency_s"] == 8.0
    assert env.tools[-1] is call_expert


def test_preferences():
    _, info = ServiceEnv().reset(seed=0, options={"task_id": TASK})
    preference = json.loads(info["preference_json"])
    assert preference["text"] == ""
    assert {key: preference["weights"][key] for key in BALANCED} == BALANCED
    assert preference["weights"].keys() == BALANCED.keys() | {tool.name for tool in DOMAINS["shop"].tools}
    _, info = ServiceEnv(preference={"cost": 1.0, "cancel_order": 0.5}).reset(seed=0, options={"task_id": TASK})
    assert json.loads(info["preference_json"])["weights"]["cancel_order"] == 0.5
    texts = {}
    for split in ("train", "test"):
        env = ServiceEnv(preference="random", split=split, expert=call_expert)
        infos = [env.reset(seed=seed)[1] for seed in range(60)]
        told = [json.loads(info["preference_json"])["text"] for info in infos]
        texts[split] = {text for text in told if text}
        assert not any(tool.name in text for text in told for tool in env.tools[:-1])
    assert texts["train"]
    assert not texts["train"] & texts["test"]


def test_randomised_tools_leave_every_task_solvable():
    config = {"aliases": {"tools": ["*"]}, "keep": [], "price_spread": 2.0, "preferences": True}
    env = ServiceEnv(expert=call_expert, randomize=config)
    for seed in range(30):
        _, info = env.reset(seed=seed)
        assert not set(offered(info)) & {tool.name for domain in DOMAINS.values() for tool in domain.tools}
        for turn in env.demonstrate(env.task, np.random.default_rng(seed)):
            *_, info = env.step(turn)
        assert info["outcome"] == 1.0


def test_the_demonstration_policy_solves_episodes():
    env = gym.make("orchestra/Service-v0")
    for seed in range(20):
        episode = run_episode(env, make_policy("demonstration"), seed=seed, replica=seed)
        assert episode.outcome == 1.0
        assert episode.messages[0]["role"] == "user"
        assert {message["role"] for message in episode.messages} == {"user", "assistant", "tool"}


def test_demonstrations_vary_and_some_have_a_mistake():
    env = ServiceEnv()
    env.reset(seed=0, options={"task_id": TASK})
    turns = [tuple(env.demonstrate(env.task, np.random.default_rng(seed))) for seed in range(60)]
    assert len(set(turns)) > 20
    assert sum(len(set(t)) > len(set(min(turns, key=len))) for t in turns) >= 2
    mistaken = 0
    for seed in range(60):
        env.reset(seed=seed)
        for turn in env.demonstrate(env.task, np.random.default_rng(seed)):
            *_, info = env.step(turn)
        mistaken += info["episode_errors"] > 0
    assert 3 <= mistaken <= 25
