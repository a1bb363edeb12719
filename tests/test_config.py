"""The run config: strict, documented, the same after writing and reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from orchestra_jax.config import ConfigError, RunConfig, dump_config, load_config, parse_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
MINIMAL = "model: {preset: market-tiny}\ntext: {tokenizer: market}\n"


@pytest.fixture
def load(tmp_path):
    def load(text: str, *overrides: str) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(file, list(overrides))

    return load


def fails(load, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every section below `model` by its path."""
    found = {"": model}
    for name, field in model.model_fields.items():
        for choice in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                found |= {f"{name}.{path}".strip("."): section for path, section in sections(choice).items()}
    return found


def test_every_section_and_every_field_says_what_it_is():
    silent = [
        f"{path}.{name}"
        for path, section in sections(RunConfig).items()
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not silent
    assert all(section.__doc__ for section in sections(RunConfig).values())
    assert "sft.optimizer" in sections(RunConfig)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configs_are_the_same_after_writing_and_reading(file, load):
    config = load_config(file)
    assert load(dump_config(config)) == config


def test_all_values_are_the_same_after_writing_and_reading(load):
    changed = load(
        MINIMAL,
        "seed=7",
        "env.kwargs={types: [lookup], preference: {cost: 0.1, outcome: 1}, words: 'größer: #1'}",
        "optimizer.learning_rate=1e-7",
        "loss.dual_clip=null",
        "reward.cost_budget_usd=0.25",
        "sft={router: 'always:gpt-5', optimizer: {learning_rate: 3e-5}}",
        "eval=null",
        "model.overrides={rope_theta: 1e6}",
    )
    assert load(dump_config(changed)) == changed
    assert changed.loss.dual_clip is None
    assert changed.eval is None
    assert changed.sft is not None
    assert changed.sft.optimizer.learning_rate == 3e-5
    assert changed.env.kwargs["words"] == "größer: #1"


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "+1e-6", "1.e-6"])
def test_every_spelling_of_a_float_is_a_number(load, text):
    """PyYAML follows YAML 1.1, where 1e-6 is a string."""
    assert load(MINIMAL + f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate == 1e-6
    assert load(MINIMAL, f"optimizer.learning_rate={text}").optimizer.learning_rate == 1e-6


def test_whole_numbers_are_floats_where_floats_are_asked_for_and_nothing_else_is_converted(load):
    assert load(MINIMAL, "rollout.temperature=1").rollout.temperature == 1.0
    for override in (
        "train.steps=3.0",
        "train.steps='3'",
        "train.steps=true",
        "train.steps=",
        "rollout.temperature='1'",
        "model.remat=1",
        "eval.baselines=random",
        "eval.modes=[]",
        "env=orchestra/Market-v0",
    ):
        assert override.partition("=")[0] in fails(load, MINIMAL, override)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "-1e-6", "0"])
def test_numbers_out_of_range_name_the_key_and_the_value(load, value):
    message = fails(load, MINIMAL, f"optimizer.learning_rate={value}")
    assert "optimizer.learning_rate: " in message
    assert ", got " in message


def test_every_mistake_is_told_at_once(load):
    message = fails(load, MINIMAL, "train.stepz=3", "loss.clip_low=2", "rollout.group_size=1")
    assert "train.stepz (did you mean steps?)" in message
    assert "loss.clip_low: " in message
    assert "rollout.group_size: " in message


def test_unknown_keys_name_their_neighbours_at_every_depth(load):
    assert "unknown key optimiser (did you mean optimizer?)" in fails(load, MINIMAL + "optimiser: {}")
    assert "sft.optimizer.learning_rat (did you mean learning_rate?)" in fails(
        load, MINIMAL, "sft.optimizer.learning_rat=1"
    )
    assert "known keys: id, kwargs, eval_kwargs" in fails(load, MINIMAL, "env.zzz=1")


def test_a_long_wrong_value_does_not_fill_the_terminal(load):
    message = fails(load, MINIMAL, f"train.steps={list(range(1000))}")
    assert len(message) < 300
    assert message.endswith("...")


def test_overrides_reach_in_and_make_missing_sections(load):
    config = load("model: {preset: market-tiny}", "text.tokenizer=market", "env.kwargs.tools=[search]", "seed=5")
    assert config.env.kwargs == {"tools": ["search"]}
    assert config.seed == 5
    assert load(MINIMAL + "env:\n", "env.kwargs.split=test").env.kwargs == {"split": "test"}
    assert load(MINIMAL, "seed=1", "seed=2").seed == 2
    assert load(MINIMAL, "output_dir=a=b").output_dir == "a=b"


def test_overrides_that_are_none(load):
    assert "key.path=value" in fails(load, MINIMAL, "seed")
    assert "key.path=value" in fails(load, MINIMAL, "=3")
    assert "seed is not a section" in fails(load, MINIMAL + "seed: 3", "seed.x=1")
    assert "not valid YAML" in fails(load, MINIMAL, "seed=[1")
    assert "not valid YAML" in fails(load, MINIMAL, "sft={router: habit, router: random}")


def test_a_key_that_stands_twice_is_an_error(load):
    assert "key 'seed' stands twice" in fails(load, MINIMAL + "seed: 1\nseed: 2\n")
    assert "key 'steps' stands twice" in fails(load, MINIMAL + "train: {steps: 1, steps: 1}")


def test_anchors_and_merged_sections_work(load):
    text = MINIMAL + "optimizer: &adam {learning_rate: 1e-4, beta2: 0.95}\nsft: {optimizer: {<<: *adam, beta2: 0.99}}\n"
    config = load(text)
    assert config.sft is not None
    assert (config.sft.optimizer.learning_rate, config.sft.optimizer.beta2) == (1e-4, 0.99)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n",
        "just words",
        "seed: [1",
        "a: b: c",
        "? [1]\n: 2\n",
        "\x00",
        "model: *nowhere",
        "!!python/object:x {}",
    ],
)
def test_files_that_hold_no_mapping_are_one_line(load, text):
    assert "run.yaml" in fails(load, text)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin1.yaml").write_bytes(b"output_dir: gr\xfc\xdfe\n")
    for name, part in (("none.yaml", "does not exist"), (".", "directory"), ("latin1.yaml", "not valid YAML")):
        with pytest.raises(ConfigError, match=part):
            load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {}}, "exactly one of model.path and model.preset"),
        ({"model": {"preset": "market-tiny", "path": "x"}}, "exactly one of model.path and model.preset"),
        ({"model": {"path": "x", "overrides": {"num_layers": 2}}}, "model.overrides goes with model.preset"),
        ({"text": {}}, "text.tokenizer is needed with model.preset"),
        ({"rollout": {"max_tokens": 64, "max_turn_tokens": 64}}, "rollout.max_turn_tokens must be less"),
        ({"train": {"row_tokens": 100}}, "train.row_tokens (100) is less than rollout.max_tokens"),
        ({"train": {"minibatches": 17}}, "train.minibatches must not exceed rollout.tasks_per_step"),
        ({"loss": {"dual_clip": 1.28}}, "loss.dual_clip (1.28) must be more than"),
        ({"seed": 2**31}, "seed: "),
    ],
)
def test_values_that_do_not_go_together(change: dict[str, Any], named: str):
    data: dict[str, Any] = {"model": {"preset": "market-tiny"}, "text": {"tokenizer": "market"}}
    with pytest.raises(ConfigError) as caught:
        parse_config(data | change)
    assert named in str(caught.value)
    assert parse_config(data)


def test_the_defaults_are_those_of_the_paper(load):
    """ToolOrchestra (arXiv 2511.21689), section 4.1."""
    config = load(MINIMAL)
    assert config.optimizer.learning_rate == 1e-6
    assert (config.rollout.tasks_per_step, config.rollout.group_size) == (16, 8)
    assert config.rollout.max_tokens == 24_000 + 8_000
    assert config.rollout.max_turn_tokens == 8_000
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert config.reward.form == "paper"


def test_derived_sizes(load):
    config = load(MINIMAL)
    assert config.row_tokens == config.row_targets == config.rollout.max_tokens
    config = load(MINIMAL, "train.row_tokens=40000", "rollout.tasks_per_step=3", "rollout.group_size=5")
    assert config.row_targets == 40_000
    assert config.trajectories_per_step == 15


def test_a_config_cannot_be_changed(load):
    with pytest.raises(ValueError, match="frozen"):
        load(MINIMAL).seed = 3
