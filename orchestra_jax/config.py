"""Run configuration: one YAML file, strict about keys, types and values, with `key.path=value` overrides.

Every section is a frozen model with a sentence per field. What the ToolOrchestra paper states is the default
(arXiv 2511.21689, section 4.1: learning rate 1e-6, 16 tasks a step, groups of 8, 24,000 + 8,000 tokens, 50 turns); the
clip bounds, weight decay and gradient clip, which it does not state, are those of its released code.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


class ConfigError(ValueError):
    """The user's mistake in a config, a flag or a file: one line that says where and how to mend it."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class EnvConfig(Section):
    """Which environment, for training and for evaluation."""

    id: str = "orchestra/Market-v0"
    """A Gymnasium id, `module:namespace/Name-v0` to import a module first, or the id of an installed plug-in."""
    kwargs: dict[str, Any] = {}
    """For `gymnasium.make` when training."""
    eval_kwargs: dict[str, Any] = {}
    """Laid over `kwargs` when evaluating (a held-out split, say)."""


class ModelSection(Section):
    """The policy: a folder in Hugging Face layout, or a preset with fresh weights."""

    path: str | None = None
    """Folder with config.json, safetensors and tokenizer files. Excludes `preset`."""
    preset: str | None = None
    """Name in `orchestra_jax.models.config.PRESETS`, such as market-tiny or qwen3-0.6b. Excludes `path`."""
    overrides: dict[str, Any] = {}
    """Fields of the preset to replace, for example {num_layers: 2}."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation, the KV cache and the saved weights. Training adds its updates up in float32 in any case."""
    remat: Literal["none", "layer", "attention", "offload"] = "none"
    """What the backward pass recomputes to save memory: nothing; each layer from its input; the same but for attention,
    whose result is kept; or as `layer`, with the layers' inputs in the host's memory (not on CPU)."""

    @field_validator("remat", mode="before")
    @classmethod
    def _former_remat(cls, value: Any) -> Any:
        """Configs of runs from before remat had names: true recomputed whole layers."""
        return {True: "layer", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.preset is None):
            raise ValueError("give exactly one of model.path and model.preset")
        if self.path is not None and self.overrides:
            raise ValueError("model.overrides goes with model.preset; a checkpoint's shapes are fixed")
        return self


class MeshConfig(Section):
    """How the devices share the training (`orchestra_jax.parallel`); the four sizes multiply to their number."""

    data: int = Field(1, ge=1)
    """Whole copies of everything, each with its own rows. The slices of a multi-slice system lie along it."""
    fsdp: int = Field(-1, ge=-1)
    """Weights and optimizer state are split so many ways, and rows too; -1: the devices that the others leave."""
    tensor: int = Field(1, ge=1)
    """Heads, MLP and vocabulary are split so many ways; at most the number of KV heads."""
    sequence: int = Field(1, ge=1)
    """The tokens of a row are split so many ways, for rows that one device cannot hold."""

    @model_validator(mode="after")
    def _positive(self) -> MeshConfig:
        if self.fsdp == 0:
            raise ValueError("mesh.fsdp must be at least 1, or -1 for the devices that are left")
        return self


class TextConfig(Section):
    """How tasks and tools become tokens."""

    tokenizer: str | None = None
    """A folder with tokenizer.json, or `market` (the small one of the quickstart). Default: model.path."""
    tools: Literal["qwen", "compact"] = "qwen"
    """Full JSON schemas with prices in the descriptions, or one short line a tool for tiny policies."""


class RolloutConfig(Section):
    """How much is sampled per step, and what bounds an episode."""

    tasks_per_step: int = Field(16, ge=1)
    """Tasks drawn anew for every step."""
    group_size: int = Field(8, ge=2)
    """Trajectories per task."""
    rows: int | None = Field(None, ge=1)
    """Episodes under way at once, each with a place in the cache; default: all of a step."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling, in training and in the `sample` mode of evaluations."""
    max_tokens: int = Field(32_000, ge=16)
    """Of a trajectory: prompt, turns and observations."""
    max_turn_tokens: int = Field(8_000, ge=1)
    """Of one turn of the policy; a turn that reaches it is cut, and ends the episode."""
    max_sampled_tokens: int | None = Field(None, ge=1)
    """Of all turns of an episode together, a budget for reasoning; default: no other limit than those above."""
    stop_after_tool_call: bool = False
    """A turn ends with its first tool call, wherever the closing tag stands, instead of where the policy ends it."""
    kv_cache: Literal["float32", "bfloat16", "int8"] | None = None
    """How keys and values are stored while sampling; int8 halves bfloat16's memory at a small loss of accuracy (the
    logprobs differ more from the trainer's: watch `mismatch/*`). Default: as the weights are, on CPU float32."""
    max_observation_tokens: int = Field(4_000, ge=8)
    """Of one observation; longer ones are cut, with a marker."""
    env_threads: int = Field(1, ge=1)
    """Plain Gymnasium environments stepped at once; raise it where their steps wait. A ToolEnv needs no threads."""


class RewardConfig(Section):
    """What a trajectory is worth (`orchestra_jax.rl.group_rewards`)."""

    form: Literal["paper", "released", "return"] = "paper"
    """The paper's; its released code's, for comparison; or the sum of the environment's own rewards."""
    scale: Literal["group", "correct"] = "group"
    """Cost and latency are scaled over the whole group, or over its correct trajectories only."""
    guard: bool = False
    """A right answer never scores as low as a wrong one."""
    cost_budget_usd: float | None = Field(None, gt=0)
    """Scales cost by this amount a trajectory, instead of by the group's cheapest and dearest."""
    latency_budget_s: float | None = Field(None, gt=0)
    """Scales latency in the same way."""


class AdvantageConfig(Section):
    """From rewards to advantages, and which trajectories are left out (`orchestra_jax.rl.advantage`)."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """What a reward is compared with: mean and deviation of its group, the mean alone, the others' mean, or the mean of
    its group and the deviation of the whole step."""
    homogeneity_threshold: float = Field(0.1, ge=0)
    """Groups whose rewards have a smaller standard deviation are left out."""
    drop_format_errors: bool = True
    """Leave out trajectories that broke the call format, as the paper does."""
    drop_unanswered: bool = True
    """Leave out trajectories without an answer, as the paper does."""


class LossConfig(Section):
    """The policy gradient (`orchestra_jax.rl.policy_loss`)."""

    kind: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """Clipped ratios per token, clipped ratios per sequence, clipped weights, or no correction at all."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(0.28, ge=0)
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: float | None = Field(10.0, gt=1)
    """Bound of the loss where the advantage is negative, in multiples of it; more than 1 + clip_high. null: none."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over tokens, mean over trajectories of their means, or the sum over a constant (Dr. GRPO)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy, which is maximised."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy that RL started from."""
    kl_kind: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of that divergence from the sampled tokens."""

    @model_validator(mode="after")
    def _bounds(self) -> LossConfig:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"loss.dual_clip ({self.dual_clip}) must be more than 1 + loss.clip_high")
        return self


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, gt=0)
    """At its highest."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled, of matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the first moment; the second, which changes by a thousandth a step, stays in float32."""
    warmup_updates: int = Field(0, ge=0)
    """The learning rate rises linearly over so many updates."""
    final_fraction: float = Field(1.0, ge=0, le=1)
    """The learning rate ends at this fraction of itself, by a cosine over the run; 1 keeps it constant."""


class TrainConfig(Section):
    """Reinforcement learning: how long, in which batches, and what is kept."""

    steps: int = Field(100, ge=0)
    """Rollouts of `tasks_per_step` tasks, each followed by its updates."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per step, each on its share of the groups."""
    row_tokens: int | None = Field(None, ge=16)
    """Tokens of a packed row; default: rollout.max_tokens."""
    row_targets: int | None = Field(None, ge=1)
    """Sampled tokens of a packed row; default: row_tokens."""
    micro_batch_rows: int = Field(1, ge=1)
    """Packed rows whose activations are held at once."""
    checkpoint_every: int = Field(25, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """So many of the newest are kept."""
    episodes_every: int = Field(10, ge=1)
    """Write every trajectory of each n-th step to `episodes/`."""


class SftConfig(Section):
    """The supervised warm start on traces of a scripted router (`orchestra sft`)."""

    router: str = "habit"
    """Scripted policy whose traces are cloned: habit, oracle, random, cheapest, always:TOOL, or demonstration (what the
    environment's own `demonstrate` shows)."""
    num_tasks: int = Field(2048, ge=1)
    """Tasks whose traces are cloned."""
    traces_per_task: int = Field(1, ge=1)
    """Traces of one task differ in the router's choices and the tools' luck; packed rows hold their prompt once."""
    copy_drills: int = Field(0, ge=0)
    """Short made-up exercises, a result and the answer that repeats it: half before the traces, half among them.
    A policy with fresh weights learns from them to copy any number, many times sooner than from long traces."""
    epochs: int = Field(1, ge=1)
    """Over the whole traces."""
    rows_per_update: int = Field(8, ge=1)
    """Packed rows of an optimizer update."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """Of the warm start; it has its own moments."""


class EvalConfig(Section):
    """Held-out tasks, fixed by `seed`, the same for every policy."""

    num_tasks: int = Field(256, ge=1)
    """Each is one episode of each policy."""
    seed: int = Field(1_000_003, ge=0)
    """Fixes the tasks; apart from the run's seed, so that runs with other seeds are compared on the same tasks."""
    baselines: list[str] = []
    """Scripted policies to compare with: random, cheapest, oracle, always:TOOL."""
    modes: list[Literal["sample", "greedy"]] = Field(["sample", "greedy"], min_length=1)
    """At `rollout.temperature`, and always the most likely token."""


class RunConfig(Section):
    """A whole run."""

    seed: int = Field(0, ge=0, lt=2**31)
    """Of everything that is random: fresh weights, tasks, traces, sampling."""
    output_dir: str = "runs/default"
    """The run's folder. The same config again resumes what it holds."""
    env: EnvConfig = EnvConfig()
    """Where episodes come from."""
    model: ModelSection
    """The policy."""
    mesh: MeshConfig = MeshConfig()
    """How devices share the training."""
    text: TextConfig = TextConfig()
    """From text to tokens."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling episodes."""
    reward: RewardConfig = RewardConfig()
    """What a trajectory is worth."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Compared with what, and what is left out."""
    loss: LossConfig = LossConfig()
    """Of reinforcement learning."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Of reinforcement learning."""
    train: TrainConfig = TrainConfig()
    """Steps, batches and checkpoints."""
    sft: SftConfig | None = None
    """The warm start. Leave out to start RL from the model as it is."""
    eval: EvalConfig | None = EvalConfig()
    """The evaluation at the end; null for none."""
    trackers: list[Literal["wandb", "trackio"]] = []
    """Who is told of every step besides metrics.jsonl and TensorBoard: Weights & Biases, Trackio (extras of their
    own)."""

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.rollout.max_turn_tokens >= self.rollout.max_tokens:
            raise ValueError("rollout.max_turn_tokens must be less than rollout.max_tokens")
        if self.row_tokens < self.rollout.max_tokens:
            raise ValueError(
                f"train.row_tokens ({self.row_tokens}) is less than rollout.max_tokens ({self.rollout.max_tokens}): "
                "a long trajectory would not fit"
            )
        if self.train.minibatches > self.rollout.tasks_per_step:
            raise ValueError("train.minibatches must not exceed rollout.tasks_per_step: groups are not split")
        if self.text.tokenizer is None and self.model.path is None:
            raise ValueError("text.tokenizer is needed with model.preset (`market`, or a folder with tokenizer.json)")
        return self

    @property
    def row_tokens(self) -> int:
        return self.train.row_tokens or self.rollout.max_tokens

    @property
    def row_targets(self) -> int:
        return self.train.row_targets or self.row_tokens

    @property
    def trajectories_per_step(self) -> int:
        return self.rollout.tasks_per_step * self.rollout.group_size


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Reads a YAML config and applies `key.path=value` overrides (values are YAML too).

    Raises:
      ConfigError: the file is missing or no YAML mapping, a key is unknown, a type or a value is wrong; the message
        names the file, the key and what is allowed.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(data).__name__}")
    for override in overrides or []:
        _apply_override(data, override)
    return parse_config(data, source=str(path))


def parse_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validates a nested dict; see `load_config` for errors."""
    try:
        # Not strict about tuples and the like: YAML has lists only.
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(map(_explain, error.errors()))) from None


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; `load_config` of it gives the config back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error instead of a silent overwrite, and 1e-6 is a number."""


def _unique_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        # A key has no other one of the same text beside it; merged ones (<<) may be overridden, that is their use.
        if key_node.tag != "tag:yaml.org,2002:merge":
            if str(key_node.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} stands twice", key_node.start_mark
                )
            seen.add(str(key_node.value))
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
# PyYAML follows YAML 1.1, where 1e-6 (no dot) is a string.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} must look like key.path=value, for example train.steps=10")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    for parent in parents:
        inner = data.setdefault(parent, {})
        if inner is None:
            inner = data[parent] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
        data = inner
    data[last] = value


def _explain(error: Any) -> str:
    """One pydantic error as a phrase that starts with the key."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {key} ({hint})"
    if error["type"] == "missing":
        return f"{key} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if not key or error["type"] == "value_error":
        return message
    given = repr(error["input"])
    return f"{key}: {message[0].lower()}{message[1:]}, got {given if len(given) <= 60 else given[:57] + '...'}"


def _fields_at(location: list[str]) -> list[str]:
    """Names of the keys that the section at `location` knows."""
    section: Any = RunConfig
    for part in location:
        annotation = section.model_fields[part].annotation
        choices = [annotation, *getattr(annotation, "__args__", ())]
        section = next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if section is None:
            return []
    return list(section.model_fields)
