"""Plans: a config's train step compiled for a topology, and what it would need and take there.

Nothing is allocated: the state and the batch are shapes with shardings. What the compiler says is told apart from what
is estimated: memory is the compiler's, FLOPs are counted in the traced program, the time is a roofline.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestra_jax.config import ConfigError, RunConfig
from orchestra_jax.plan.chips import CHIPS, GIB, Chip

PRODUCT_SHARE = 0.75
"""Share of the peak that matrix products are taken to reach: an assumption of ours, not a measurement."""


@dataclass(frozen=True)
class Plan:
    """What `orchestra plan` found; the fields are the JSON's."""

    model: str
    """Whose shapes these are."""
    topology: str
    num_devices: int
    mesh: dict[str, int]
    fits: bool
    problem: str | None
    """The compiler's words, where it does not fit."""
    hbm_gib_per_chip: dict[str, float]
    """By part. Without a compiled program `peak` is what is known of it, the parts' sum."""
    flops_per_chip: float | None
    model_flops_per_chip: float | None
    """Without what rematerialisation computes again."""
    collectives: dict[str, float]
    """Bytes a device receives in a micro-batch, by kind."""
    compile_s: float
    micro_batches: int
    tokens_per_step: int
    estimate: dict[str, float]
    """Seconds, MFU and dollars; `step_s` is the train step's alone, without rollouts."""


def plan(config: RunConfig, topology: str, *, num_slices: int = 1, usd_per_chip_hour: float | None = None) -> Plan:
    """Compiles the train step of `config` for `topology` and says what it needs.

    Args:
      config: the run; the model's weights are not needed.
      topology: `v5p:4x4x4` and the like, or `cpu:8` for so many virtual devices of this machine.
      num_slices: of such a slice.
      usd_per_chip_hour: for the estimate of costs.

    Raises:
      ConfigError: the topology is unknown, libtpu is not installed, or the model cannot be split in this way.
    """
    import jax

    from orchestra_jax.parallel.mesh import in_mesh, make_mesh
    from orchestra_jax.train.run import check_mesh

    model, source = plan_model(config)
    devices = topology_devices(topology, num_slices)
    chip = CHIPS[topology.partition(":")[0]]
    try:
        mesh = make_mesh(config.mesh.model_dump(), devices)
        check_mesh(config, model, mesh)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(str(error)) from None
    if mesh is None:
        raise ConfigError(f"--topology {topology}: a plan is for several devices")
    settings, optimizer, state, batch = step_arguments(config, model, mesh)
    from orchestra_jax.train.step import _train_step

    micro_batches = batch.tokens.shape[0]
    with in_mesh(mesh):
        traced = _train_step.trace(settings, optimizer, state, batch, jax.ShapeDtypeStruct((), "int32"), None)
        started = time.perf_counter()
        compiled, collectives, problem = _compile(traced.lower())
    parts = memory_parts(state, batch)
    if compiled is not None:
        parts |= _compiled_memory(compiled, parts)
    parts["limit"] = chip.hbm_gib
    fits = problem is None and parts["peak"] <= chip.hbm_gib
    counted = _flops(traced.jaxpr, model, batch)
    flops = micro_batches * counted["program"] / len(devices)
    useful = micro_batches * counted["model"] / len(devices)
    return Plan(
        model=source,
        topology=topology,
        num_devices=len(devices),
        mesh=dict(mesh.shape),
        fits=fits,
        problem=problem,
        hbm_gib_per_chip={name: round(value, 6) for name, value in parts.items()},
        flops_per_chip=flops,
        model_flops_per_chip=useful,
        collectives=collectives,
        compile_s=round(time.perf_counter() - started, 1),
        micro_batches=micro_batches,
        tokens_per_step=math.prod(batch.tokens.shape),
        estimate=estimate(
            chip, flops, useful, micro_batches * sum(collectives.values()), len(devices), usd_per_chip_hour
        ),
    )


def plan_model(config: RunConfig) -> tuple[Any, str]:
    """The model's shapes, its preset's or those of the folder's config.json, and in words whose they are.

    A folder that is not here yet means the preset of the same name: models/Qwen3-8B is qwen3-8b.

    Raises:
      ConfigError: there is neither.
    """
    from orchestra_jax.models.config import PRESETS, preset
    from orchestra_jax.models.hf import read_config

    try:
        if config.model.preset is not None:
            return preset(config.model.preset, **config.model.overrides), f"preset {config.model.preset}"
        assert config.model.path is not None
        name = Path(config.model.path).name.lower()
        if not Path(config.model.path).exists() and name in PRESETS:
            return preset(name), f"preset {name} ({config.model.path} is not here)"
        return read_config(config.model.path), config.model.path
    except (ValueError, OSError) as error:
        raise ConfigError(f"model: {error}") from None


def topology_devices(topology: str, num_slices: int) -> list[Any]:
    """The devices of a topology that need not exist.

    Raises:
      ConfigError: it is unknown, or libtpu is not installed.
    """
    kind, _, shape = topology.partition(":")
    if kind not in CHIPS or not shape:
        raise ConfigError(f"--topology {topology}: give KIND:SHAPE, such as v5p:4x4x4; kinds: {', '.join(CHIPS)}")
    import jax

    if kind == "cpu":
        if len(jax.devices()) != int(shape):
            raise ConfigError(f"--topology {topology}: there are {len(jax.devices())} virtual devices")
        return jax.devices()
    if kind in ("h100", "h200"):
        raise ConfigError(f"--topology {topology}: plans for GPUs are not built yet")
    from jax.experimental import topologies

    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
    except Exception as error:  # libtpu raises what it likes
        message = " ".join(str(error).split())
        if "libtpu" in message.lower() or isinstance(error, ImportError):
            raise ConfigError(
                f"plans for TPUs need libtpu: pip install 'orchestra-jax[plan]' ({message[:200]})"
            ) from None
        raise ConfigError(f"--topology {topology}: {message[:300]}") from None


def step_arguments(config: RunConfig, model: Any, mesh: Any) -> tuple[Any, Any, Any, Any]:
    """Settings, optimizer, and the shapes of state and batch of the config's train step on a mesh."""
    import jax
    import jax.numpy as jnp

    from orchestra_jax.models.decoder import param_specs
    from orchestra_jax.parallel.mesh import shardings
    from orchestra_jax.rollout.pack import PackedBatch
    from orchestra_jax.train.learn import max_rows
    from orchestra_jax.train.run import loss_settings
    from orchestra_jax.train.step import TrainState, batch_partitions, make_optimizer, state_partitions

    optimizer = make_optimizer(
        learning_rate=config.optimizer.learning_rate,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
        moment_dtype=config.optimizer.moment_dtype,
    )

    def initial() -> TrainState:
        params = {name: jnp.zeros(spec.shape, jnp.float32) for name, spec in param_specs(model).items()}
        return TrainState(params, optimizer.init(params), jnp.int32(0))

    abstract = jax.eval_shape(initial)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract,
        shardings(mesh, state_partitions(model, abstract)),
    )
    rows = config.train.micro_batch_rows
    number = -(-max_rows(config) // rows)
    floats = {"behavior_logprobs", "advantages", "weights"}
    per_token = {"tokens", "positions", "segments", "prefixes"}
    places = shardings(mesh, batch_partitions())
    batch = PackedBatch(
        **{
            name: jax.ShapeDtypeStruct(
                (number, rows, config.row_tokens if name in per_token else config.row_targets),
                jnp.float32 if name in floats else jnp.int32,
                sharding=getattr(places, name),
            )
            for name in PackedBatch._fields
        }
    )
    return loss_settings(config, model), optimizer, state, batch


def _compile(lowered: Any) -> tuple[Any, dict[str, float], str | None]:
    """The compiled program, its collectives, and what was wrong if the compiler says that it does not fit."""
    from orchestra_jax.plan.collectives import collective_bytes

    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd.*", "xla_dump_hlo_as_text": True}
        problem = compiled = None
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:  # XlaRuntimeError has no public name
            if "memory" not in str(error).lower() and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            problem = " ".join(str(error).split())[:300]
        dumped = [path for path in Path(folder).iterdir() if re.search(r"after_[^.]*spmd-partitioning", path.name)]
        hlo = max(dumped, key=lambda path: path.stat().st_size, default=None)
        return compiled, collective_bytes(hlo.read_text("utf-8")) if hlo else {}, problem


def memory_parts(state: Any, batch: Any) -> dict[str, float]:
    """GiB a device: weights, optimizer state, gradients (float32), batch; `peak` is their sum until it is compiled."""
    import jax

    def gib(tree: Any) -> float:
        sizes = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        return sum(sizes) / GIB

    parts = {"parameters": gib(state.params), "optimizer": gib(state.opt_state), "batch": gib(batch)}
    parts["gradients"] = parts["parameters"]
    return parts | {"peak": sum(parts.values())}


def _compiled_memory(compiled: Any, parts: dict[str, float]) -> dict[str, float]:
    """The compiler's peak, and what of it are temporaries: activations, gathered weights, buffers of collectives.

    Arguments and temporaries do not add up to the peak: buffers are reused. The peak is what must fit.
    """
    analysis = compiled.memory_analysis()
    peak = getattr(analysis, "peak_memory_in_bytes", 0) or (
        analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    )
    known = parts["parameters"] + parts["optimizer"] + parts["batch"] + parts["gradients"]
    return {"temporaries": max(0.0, peak / GIB - known), "peak": peak / GIB}


def _flops(jaxpr: Any, model: Any, batch: Any) -> dict[str, float]:
    """FLOPs of a micro-batch on all devices: what the program does, and what the model needs."""
    from orchestra_jax.models.decoder import param_specs
    from orchestra_jax.plan.flops import count_flops, model_flops

    _, rows, row_tokens = batch.tokens.shape
    targets = batch.targets.shape[2]
    specs = param_specs(model)
    head = model.vocab_size * model.hidden_size
    layers = sum(math.prod(s.shape) for name, s in specs.items() if name.startswith("layers.") and len(s.shape) > 2)
    # Q K' and P V of a causal row, forward once and backward twice.
    attention = 3 * 2 * 2 * rows * row_tokens**2 / 2 * model.num_heads * model.head_dim * model.num_layers
    useful = model_flops(layers, rows * row_tokens, attention) + 6.0 * head * rows * targets
    return {"program": count_flops(jaxpr, while_trips=1), "model": useful}


def estimate(
    chip: Chip, flops: float, useful_flops: float, link_bytes: float, num_devices: int, usd_per_chip_hour: float | None
) -> dict[str, float]:
    """A roofline: products at `PRODUCT_SHARE` of the peak, half of the traffic hidden behind them."""
    compute_s = flops / (chip.flops_per_s * PRODUCT_SHARE)
    link_s = link_bytes / chip.link_bytes_per_s
    step_s = max(compute_s, link_s) + 0.5 * min(compute_s, link_s)
    result = {
        "compute_s": compute_s,
        "interconnect_s": link_s,
        "step_s": step_s,
        "mfu": useful_flops / chip.flops_per_s / step_s,
    }
    if usd_per_chip_hour is not None:
        result["usd_per_1000_steps"] = 1000 * step_s / 3600 * num_devices * usd_per_chip_hour
    return result


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    return asdict(plan)
