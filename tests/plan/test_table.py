"""What a plan says to people."""

import io
from dataclasses import replace

from rich.console import Console

from orchestra_jax.plan.plan import Plan
from orchestra_jax.plan.table import print_plan

FITS = Plan(
    model="preset qwen3-8b",
    topology="v5e:2x4",
    num_devices=8,
    mesh={"data": 1, "fsdp": 2, "tensor": 4, "sequence": 1},
    fits=True,
    problem=None,
    hbm_gib_per_chip={"parameters": 2.0, "optimizer": 4.0, "gradients": 2.0, "peak": 12.0, "limit": 15.75},
    flops_per_chip=3e12,
    model_flops_per_chip=2e12,
    collectives={"all-gather": 5e9},
    compile_s=3.0,
    micro_batches=2,
    tokens_per_step=4096,
    estimate={"compute_s": 1.0, "interconnect_s": 0.5, "step_s": 1.25, "mfu": 0.4},
)


def shown(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_plan(plan, console)
    return console.file.getvalue()


def test_a_plan_that_fits_says_by_how_much():
    text = shown(FITS)
    assert "preset qwen3-8b on v5e:2x4: 8 devices, mesh fsdp 2 x tensor 4" in text
    assert "fits: the compiler's peak is 76% of the memory" in text
    assert "does not fit" not in text


def test_a_peak_above_the_memory_says_how_much_is_too_much_and_what_helps():
    text = shown(replace(FITS, fits=False, hbm_gib_per_chip=FITS.hbm_gib_per_chip | {"peak": 18.0}))
    assert "does not fit: 2.25 GiB too much" in text
    assert "train.micro_batch_rows" in text


def test_a_program_that_the_compiler_refuses_says_so_in_its_words():
    text = shown(replace(FITS, fits=False, problem="RESOURCE_EXHAUSTED: 25.08G exceeds 15.75G"))
    assert "does not fit: the compiler says: RESOURCE_EXHAUSTED: 25.08G exceeds 15.75G" in text
    assert "peak, at least" in text
