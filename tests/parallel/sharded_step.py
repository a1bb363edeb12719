"""Run as a program on 8 virtual devices: the train step on meshes of every shape, printed as JSON for the test.

python sharded_step.py DATA FSDP TENSOR SEQUENCE ...
"""

import json
import sys

import jax
import numpy as np

from orchestra_jax.models.config import preset
from orchestra_jax.models.decoder import init_params
from orchestra_jax.parallel.mesh import make_mesh, shardings
from orchestra_jax.rollout.ledger import Trajectory
from orchestra_jax.rollout.pack import TrainSequence, pack
from orchestra_jax.train.step import (
    StepSettings,
    _train_step,
    init_train_state,
    make_optimizer,
    state_partitions,
    train_step,
)

CONFIG = preset(
    "market-tiny",
    vocab_size=56,
    valid_vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
)
STEPS = 3


def trajectories(rng: np.random.Generator):
    for _ in range(4):
        prompt = rng.integers(0, 50, rng.integers(3, 9)).tolist()
        for _ in range(4):
            trajectory = Trajectory()
            trajectory.append_context(prompt)
            for turn in range(2):
                if turn:
                    trajectory.append_context(rng.integers(0, 50, 3).tolist())
                count = int(rng.integers(2, 6))
                trajectory.append_sampled(rng.integers(0, 50, count).tolist(), [-3.9] * count, [0] * count)
            yield TrainSequence(trajectory, float(rng.normal()), 0.02)


def run(sizes: dict[str, int], devices: list[jax.Device]) -> dict:
    settings = StepSettings(CONFIG, entropy_coef=0.05, kl_coef=0.1, temperature=0.8, remat="layer")
    optimizer = make_optimizer(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    batch = pack(list(trajectories(np.random.default_rng(0))), 48, 24)
    mesh = make_mesh(sizes, devices)
    state = init_train_state(init_params(CONFIG, jax.random.key(0)), optimizer, CONFIG, mesh)
    reference = init_params(CONFIG, jax.random.key(1))
    if mesh is not None:
        reference = jax.device_put(reference, shardings(mesh, state_partitions(CONFIG, state).params))
    before, losses, first = _train_step._cache_size(), [], None
    for _ in range(STEPS):
        state, metrics, logprobs = train_step(
            settings, optimizer, state, batch, micro_batch_rows=8, max_micro_batches=2, reference=reference, mesh=mesh
        )
        first = logprobs if first is None else first
        losses.append((metrics["loss"], metrics["grad_norm"], metrics["entropy"]))
    moments = state.opt_state[1][0]
    return {
        "losses": losses,
        "logprobs": first[batch.weights > 0].tolist(),
        "params": {name: np.asarray(value).ravel().tolist() for name, value in state.params.items()},
        "shards": {
            name: [list(tree[name].addressable_shards[0].data.shape) for tree in (state.params, moments.mu, moments.nu)]
            for name in state.params
        },
        "shapes": {name: list(value.shape) for name, value in state.params.items()},
        "compiled": _train_step._cache_size() - before,
    }


if __name__ == "__main__":
    results = [run({"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}, jax.devices()[:1])]
    for text in sys.argv[1:]:
        shape = dict(zip(("data", "fsdp", "tensor", "sequence"), map(int, text.split("x"))))
        results.append(run(shape, jax.devices()))
    print(json.dumps(results))
