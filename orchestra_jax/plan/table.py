"""A plan for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from orchestra_jax.plan.plan import PRODUCT_SHARE, Plan

REMEDIES = (
    "what makes a step smaller: model.remat=layer, more of mesh.fsdp or mesh.tensor, fewer train.micro_batch_rows, "
    "mesh.sequence=2 for long rows, optimizer.moment_dtype=bfloat16"
)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Whether it fits, by which parts, and what a step would take."""
    console = console or Console()
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
    console.print(f"{plan.model} on {plan.topology}: {plan.num_devices} devices, mesh {mesh}", highlight=False)
    memory = plan.hbm_gib_per_chip
    table = Table("memory", "GiB a device")
    for name in ("parameters", "optimizer", "gradients", "batch", "temporaries", "peak", "limit"):
        if name in memory:
            # Without a compiled program the peak is only what is known of it.
            table.add_row(f"{name}, at least" if name == "peak" and plan.problem else name, f"{memory[name]:.2f}")
    console.print(table)
    if plan.fits:
        share = memory["peak"] / memory["limit"]
        console.print(f"fits: the compiler's peak is {share:.0%} of the memory", highlight=False)
    else:
        over = memory["peak"] - memory["limit"]
        why = f"the compiler says: {plan.problem}" if plan.problem else f"{over:.2f} GiB too much"
        console.print(f"does not fit: {why}\n{REMEDIES}", style="bold red", highlight=False, soft_wrap=True)
    rows = {
        "micro-batches a step": f"{plan.micro_batches}",
        "tokens a step (full rows)": f"{plan.tokens_per_step:,}",
        "TFLOP a device and step": f"{(plan.flops_per_chip or 0) / 1e12:,.1f}",
        "of them the model's": f"{(plan.model_flops_per_chip or 0) / 1e12:,.1f}",
        **{f"{kind}, GB a micro-batch": f"{size / 1e9:.2f}" for kind, size in plan.collectives.items()},
        "compiled in, s": f"{plan.compile_s:.0f}",
        "estimate: products, s": f"{plan.estimate['compute_s']:.1f}",
        "estimate: traffic, s": f"{plan.estimate['interconnect_s']:.1f}",
        "estimate: step, s": f"{plan.estimate['step_s']:.1f}",
        "estimate: MFU": f"{plan.estimate['mfu']:.0%}",
    }
    if "usd_per_1000_steps" in plan.estimate:
        rows["estimate: dollars for 1,000 train steps"] = f"{plan.estimate['usd_per_1000_steps']:,.0f}"
    table = Table("train step", "")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print(
        f"Memory is the compiler's; FLOPs are counted in the program; times are a roofline with products at "
        f"{PRODUCT_SHARE:.0%} of the peak and half of the shorter of the two hidden. Rollouts are not in it.",
        highlight=False,
        soft_wrap=True,
    )
