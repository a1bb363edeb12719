"""Calculator, library search, judge and the simulated experts against the numbers they promise."""

import subprocess
import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from orchestra_envs.market import corpus
from orchestra_envs.market.experts import EXPERTS, ask, success_probability, wrong_answer
from orchestra_envs.market.judge import is_correct
from orchestra_envs.market.plans import best_plan, expected_cost_usd, keeps_all_solvable, plans, success
from orchestra_envs.market.tasks import DIFFICULTIES, TASK_TYPES, make_task
from orchestra_envs.market.tools import TOOL_NAMES, calculate, expert_price, market_tools
from orchestra_envs.tools import CallContext, CallRecord

TOOLS = {tool.name: tool for tool in market_tools()}


def context(task, history=(), seed=0):
    return CallContext(np.random.default_rng(seed), task, tuple(history))


def search_record(text):
    return CallRecord("search", {}, "ok", "", text, 0.0, 0.0, 1, 0, 0, 0, "simulated")


def test_calculator_solves_all_arithmetic_questions():
    for split in ("train", "test"):
        for index in range(1000):
            task = make_task(split, "arithmetic", index)
            assert TOOLS["calculator"].function(context=context(task)) == str(task.answer)


@pytest.mark.parametrize("task_type", sorted(set(TASK_TYPES) - {"arithmetic"}))
def test_calculator_finds_no_expression_in_other_questions(task_type):
    for index in range(300):
        with pytest.raises(ValueError, match="no arithmetic expression"):
            TOOLS["calculator"].function(context=context(make_task("test", task_type, index)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2+3)*-4", "-20"),
        ("7 / 2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.3333333333"),
        ("17 // 5", "3"),
        ("-17 % 5", "3"),
        ("84 ÷ 7 × 2", "24"),
        ("Please work out 6 * 7, thanks.", "42"),
    ],
)
def test_calculator_is_exact(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("What is love?", "no arithmetic expression"),
        ("42", "no arithmetic expression"),
        ("1 + 1 or 2 + 2", "more than one"),
        ("1 / 0", "divides by zero"),
        ("(1 + 2", "cannot read"),
        ("2 ** 99", "only"),
        ("9" * 20 + " * 9", "too large"),
        ("1" + " + 1" * 100, "longer than 200"),
        ("(" * 90 + "1 + 1" + ")" * 90, None),
    ],
)
def test_calculator_refuses(text, message):
    if message is None:  # deep but legal: whatever Python's parser can take, never a crash
        assert calculate(text) == "2"
        return
    with pytest.raises(ValueError, match=message):
        calculate(text)


def test_library_is_what_it_says():
    assert len(corpus.passages()) == len(set(corpus.passages())) == 2000
    for entity in corpus.entities():
        for attribute, value in entity.values.items():
            assert corpus.passage(entity, attribute).split()[-1] == f"{value}."


@pytest.mark.parametrize("task_type", ["lookup", "two_hop"])
def test_default_search_finds_the_gold_passages(task_type):
    """One search for each needed fact, without arguments, as in an episode."""
    num_found = 0
    for index in range(600):
        task = make_task("test", task_type, index)
        history = []
        for _ in task.metadata["gold"]:
            history.append(search_record(TOOLS["search"].function(context=context(task, history))))
        num_found += {record.text for record in history} == set(task.metadata["gold"])
    assert num_found / 600 >= 0.98


def test_search_ranks_like_the_library_it_uses():
    """Against a plain BM25 (Lucene's form, k1 1.5, b 0.75) written out over all passages."""
    documents = [corpus._words(text) for text in corpus.passages()]
    document_frequency = Counter(word for words in documents for word in set(words))
    mean_length = sum(map(len, documents)) / len(documents)

    def score(query, words):
        total = 0.0
        for word in query:
            frequency = words.count(word)
            idf = np.log(1 + (len(documents) - document_frequency[word] + 0.5) / (document_frequency[word] + 0.5))
            total += idf * frequency / (frequency + 1.5 * (0.25 + 0.75 * len(words) / mean_length))
        return total

    for index in range(5):
        query = make_task("test", "lookup", index).question
        words = [word for word in corpus._words(query) if word in document_frequency]
        scores = np.array([score(words, document) for document in documents])
        found = corpus.rank(query)
        np.testing.assert_allclose(scores[list(found)], np.sort(scores)[::-1][: len(found)], rtol=1e-5)


def test_search_with_arguments():
    task = make_task("test", "word_problem", 0)
    query = "height in metres of Velmora"
    found = TOOLS["search"].function(context=context(task), query=query, top_k=3).split("\n")
    assert len(found) == 3
    assert found[0].startswith("The height in metres of Velmora")
    again = TOOLS["search"].function(context=context(task, [search_record("\n".join(found))]), query=query, top_k=2)
    assert not set(again.split("\n")) & set(found)
    with pytest.raises(ValueError, match="nothing found"):
        TOOLS["search"].function(context=context(task), query="zzz")


def test_importing_the_market_does_not_start_jax():
    """bm25s would run a JAX operation when it is imported."""
    program = (
        "import sys; from orchestra_envs.market.corpus import rank; assert rank('velmora'); "
        "assert 'bm25s' in sys.modules; sys.exit('jax' in sys.modules or 'jax.lax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("Answer: 412", 412, True),
        ("The answer: is unclear. Answer: 412.", 412, True),
        ("412.0", 412, True),
        ("**412**", 412, True),
        ("answer:  Velmora! ", "velmora", True),
        ("Answer: 413", 412, False),
        ("Answer: 412 metres", 412, False),
        ("Answer: 411 or 412", 412, False),
        ("Answer: 412 Answer: 7", 412, False),
        ("Answer:", 412, False),
        ("Answer: nan", 412, False),
        ("Answer: -412", 412, False),
        ("Answer: 1e2", 100, False),
        ("", "red", False),
        ("...", "red", False),
    ],
)
def test_judge(answer, truth, right):
    assert is_correct(answer, truth) is right


PUBLISHED = {  # dollars per million tokens in and out, seconds: ToolOrchestra's table of answering experts
    "gpt-5": (1.25, 10.0, 96),
    "gpt-5-mini": (0.25, 2.0, 27),
    "llama-3.3-70b": (0.9, 0.9, 15),
    "qwen3-32b": (0.8, 0.8, 11),
    "qwen2.5-math-72b": (0.9, 0.9, 13),
    "qwen2.5-math-7b": (0.2, 0.2, 9),
}


def test_prices_and_latencies_are_the_published_ones():
    assert {e.name: (e.input_usd_per_million, e.output_usd_per_million, e.latency_s) for e in EXPERTS.values()} == (
        PUBLISHED
    )
    for name, (usd_in, usd_out, latency_s) in PUBLISHED.items():
        price = TOOLS[name].price
        assert price.cost_usd(input_tokens=10**6) == pytest.approx(usd_in)
        assert price.cost_usd(output_tokens=10**6) == pytest.approx(usd_out)
        assert TOOLS[name].latency_s == latency_s


@pytest.mark.parametrize("expert", EXPERTS.values(), ids=EXPERTS)
def test_experts_keep_to_their_tables(expert):
    """Skill, answer length and latency over many draws, per type; six standard errors of room."""
    rng = np.random.default_rng(7)
    num_draws = 900
    for task_type in TASK_TYPES:
        tasks = [make_task("train", task_type, index) for index in range(num_draws)]
        answers = [ask(expert, task, (), rng) for task in tasks]
        for difficulty, skill in zip(range(3), expert.skill[task_type]):
            right = [
                answer.text == f"Answer: {task.answer}"
                for task, answer in zip(tasks, answers)
                if DIFFICULTIES.index(task.metadata["difficulty"]) == difficulty
            ]
            margin = 6 * (skill * (1 - skill) / len(right)) ** 0.5
            assert abs(np.mean(right) - skill) <= margin, (task_type, difficulty)
        # The spread of a log-normal factor of mean 1 and sigma 0.35 is 0.36.
        room = 6 * 0.36 / num_draws**0.5
        assert np.mean([a.latency_s for a in answers]) == pytest.approx(expert.latency_s, rel=room)
        assert np.mean([a.output_tokens for a in answers]) == pytest.approx(expert.output_tokens[task_type], rel=room)


def test_the_strongest_reasons_for_cents_and_open_models_for_less_than_a_fifth_of_one():
    for task_type in TASK_TYPES:
        task = make_task("test", task_type, 1)
        cost = {name: expected_cost_usd((name,), task, {name: TOOLS[name].spec()["price"]}) for name in TOOL_NAMES}
        assert 0.03 <= cost["gpt-5"] <= 0.06
        assert 0.005 <= cost["gpt-5-mini"] <= 0.01
        assert all(cost[name] <= 0.002 for name in ("qwen3-32b", "llama-3.3-70b", "qwen2.5-math-72b"))
        assert cost["qwen2.5-math-7b"] <= 0.0005


@pytest.mark.parametrize("task_type", ["lookup", "two_hop"])
def test_passages_make_experts_right(task_type):
    expert = EXPERTS["qwen3-32b"]
    tasks = [make_task("test", task_type, index) for index in range(600)]

    def accuracy(passages_of):
        rng = np.random.default_rng(1)
        return np.mean([ask(expert, t, passages_of(t), rng).text == f"Answer: {t.answer}" for t in tasks])

    assert accuracy(lambda task: task.metadata["gold"]) == pytest.approx(expert.skill_with_passages, abs=0.04)
    incomplete = accuracy(lambda task: (*task.metadata["gold"][1:], "The colour of Nowhere Gate is red."))
    assert incomplete == pytest.approx(accuracy(lambda task: ()), abs=0.08)


def test_wrong_answers_are_wrong_and_of_the_same_kind():
    rng = np.random.default_rng(3)
    for task_type in TASK_TYPES:
        for index in range(200):
            task = make_task("train", task_type, index)
            wrong = wrong_answer(task, rng)
            assert type(wrong) is type(task.answer)
            assert not is_correct(f"Answer: {wrong}", task.answer)
            assert not isinstance(wrong, int) or 0 <= wrong <= 999


def test_no_expert_is_worse_than_guessing_between_two():
    """Else a policy could learn to answer the opposite of what a weak expert says."""
    for expert in EXPERTS.values():
        assert expert.skill["two_hop"][0] >= 0.5


def test_no_tool_suits_all_types():
    best_alone = {
        task_type: max(TOOL_NAMES, key=lambda name: success((name,), make_task("test", task_type, 1)))
        for task_type in TASK_TYPES
    }
    assert best_alone["arithmetic"] == "calculator"
    assert best_alone["lookup"] == "search"
    task = make_task("test", "two_hop", 1)
    assert max(success((name,), task) for name in TOOL_NAMES) < 0.5 < success(("search", "search", "gpt-5"), task)


def test_best_plans():
    specs = [tool.spec() for tool in market_tools()]
    chosen = {task_type: best_plan(make_task("test", task_type, 1), specs) for task_type in TASK_TYPES}
    assert chosen["arithmetic"] == ("calculator",)
    assert chosen["lookup"] == ("search",)
    assert chosen["word_problem"] == ("qwen2.5-math-72b",)
    assert chosen["reasoning"] == ("gpt-5",)
    assert chosen["two_hop"][:2] == ("search", "search")

    # A specialist whose price rises a thousandfold gives way to the cheapest other plan that is nearly as good.
    task = make_task("test", "word_problem", 0)
    dearer = [
        spec | {"price": {part: 1000 * usd for part, usd in spec["price"].items()}}
        if spec["function"]["name"] == "qwen2.5-math-72b"
        else spec
        for spec in specs
    ]
    assert best_plan(task, specs) == ("qwen2.5-math-72b",)
    assert best_plan(task, dearer) == ("gpt-5-mini",)
    assert best_plan(task, dearer, tolerance=0.01) == ("gpt-5",)


def test_plans_and_solvability():
    assert plans(make_task("test", "arithmetic", 0), ["calculator", "gpt-5"]) == [("calculator",), ("gpt-5",)]
    two_hop = make_task("test", "two_hop", 0)
    assert ("search", "search", "gpt-5") in plans(two_hop, TOOL_NAMES)
    assert plans(two_hop, ["gpt-5"]) == [("gpt-5",)]
    assert success(("search", "gpt-5"), two_hop) == success_probability(EXPERTS["gpt-5"], two_hop)
    assert keeps_all_solvable(frozenset({"search", "gpt-5"}))
    assert not keeps_all_solvable(frozenset({"search", "qwen2.5-math-72b"}))  # no reasoner
    assert not keeps_all_solvable(frozenset({"calculator", "gpt-5"}))  # no facts


def test_expert_price_is_per_token():
    assert expert_price(EXPERTS["gpt-5"]).per_output_token_usd == pytest.approx(float(Fraction(10, 10**6)))
