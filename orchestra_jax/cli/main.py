"""The `orchestra` command.

Exit codes: 0 done, 2 the user's mistake (one line on standard error; an environment that fails `orchestra envs ID`
too), 1 a fault of ours, 130 interrupted (while training: after a checkpoint).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

# Only light imports here: `orchestra --help` and a mistyped path should not wait for JAX.
from orchestra_jax.cli.eval import add_eval_flags, run_eval
from orchestra_jax.cli.experiments import add_experiments_flags, run_experiments
from orchestra_jax.cli.plan import add_plan_flags, run_plan
from orchestra_jax.config import ConfigError, load_config

log = logging.getLogger(__name__)

COMPILING = ("train", "sft", "eval", "experiments", "solve", "serve")
"""Commands that compile programs worth keeping for the next time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse gives up on positionals that follow a flag: `train CONFIG --overwrite train.steps=10` must work too.
    if rest and hasattr(options, "overrides") and not any(word.startswith("-") for word in rest):
        options.overrides.extend(rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    # Like Ctrl-C; training has its own handlers, which write a checkpoint first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.compiles:
            from orchestra_jax.compile_cache import enable_compile_cache

            enable_compile_cache()
        options.run(options)
        sys.stdout.flush()
    except ConfigError as error:
        log.info("where it was found:", exc_info=True)
        print("orchestra:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"orchestra: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output (`| head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="orchestra", description="Train small policies to orchestrate tools.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is going on")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run, compiles=name in COMPILING)
        return sub

    def add_config(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("config", help="YAML config, for example configs/quickstart.yaml")
        sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="replace a value of the config")

    def add_processes(sub: argparse.ArgumentParser) -> None:
        # TPU pods, SLURM and Kubernetes tell all this themselves (`distributed.join`).
        sub.add_argument(
            "--coordinator", metavar="HOST:PORT", help="several processes: where the first one can be reached"
        )
        sub.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
        sub.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")

    sub = command("train", _train, "warm start, reinforcement learning, evaluation and report; resumes what was begun")
    add_config(sub)
    sub.add_argument("--overwrite", action="store_true", help="delete the run that output_dir holds and start anew")
    add_processes(sub)

    sub = command("sft", _sft, "the supervised warm start alone")
    add_config(sub)
    sub.add_argument("--overwrite", action="store_true", help="delete the run that output_dir holds and start anew")
    add_processes(sub)

    sub = command("eval", run_eval, "compare policies on the same tasks: accuracy, cost, latency, preference")
    add_eval_flags(sub)

    sub = command("experiments", run_experiments, "the paper's experiments in simulation, and a page of their results")
    add_experiments_flags(sub)

    sub = command("solve", _solve, "a trained policy works on your question with live tools, and shows how")
    sub.add_argument("policy", help="a run folder, or a Hugging Face folder (with --tools)")
    sub.add_argument("question", nargs="?", help="your question, in quotes")
    sub.add_argument("--tools", metavar="FILE", help="YAML list of tools; default: those of the run's environment")
    sub.add_argument("--task", type=int, metavar="SEED", help="instead of a question: a task of the run's environment")
    sub.add_argument("--preference", metavar="WORDS", help='what you care about, such as "Keep the cost low."')
    sub.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of sampling; default 0, the likeliest"
    )
    sub.add_argument("--seed", type=int, default=0, help="of sampling")
    sub.add_argument("--max-turns", type=int, metavar="N", help="default: as in the run")
    sub.add_argument("--max-tokens", type=int, metavar="N", help="of the whole conversation; default: as in the run")
    sub.add_argument("--budget-usd", type=float, metavar="USD", help="no call is made once so much is spent")
    sub.add_argument("--json", metavar="FILE", help="write the trajectory there, a line as in a run's episodes/")

    sub = command("serve", _serve, "a policy behind an OpenAI-compatible HTTP endpoint")
    sub.add_argument("folder", help="a run folder, or a policy in Hugging Face layout")
    sub.add_argument("--host", default="127.0.0.1")
    sub.add_argument("--port", type=int, default=8000, help="0 takes a free one, which is printed")
    sub.add_argument("--slots", type=int, default=8, metavar="N", help="conversations that sample at once")
    sub.add_argument("--max-tokens", type=int, metavar="N", help="of a conversation; default: as in the run, else 4096")
    sub.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="turns that wait; more are refused (429)"
    )
    sub.add_argument("--name", help="of the model, as clients ask for it; default: the folder's")
    sub.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable with the key that clients must send"
    )
    sub.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights; default: as the run was trained")
    sub.add_argument("--grammar", action="store_true", help="tool calls always fit the schemas of the request's tools")
    sub.add_argument("--warm-up", action="store_true", help="compile everything before listening")

    sub = command("launch", _launch, "files and commands to start a run on TPU pods or GPU clusters; calls no cloud")
    add_config(sub)
    sub.add_argument(
        "--target", required=True, choices=["gke", "xpk", "tpu-vm", "slurm"], help="slurm: GPUs, else TPUs"
    )
    sub.add_argument(
        "--topology", required=True, metavar="KIND:SHAPE", help="v5p:4x4x4 (chips) or h100:8 (GPUs a node)"
    )
    sub.add_argument("--num-slices", type=int, default=1, metavar="N", help="slices, or nodes with GPUs; default: 1")
    sub.add_argument("--image", help="container image (slurm does without)")
    sub.add_argument("--name", help="of everything that is made; default: the config file's")
    sub.add_argument(
        "--mount",
        metavar="SOURCE:PATH",
        help="what all hosts share: CLAIM:/path (gke), STORAGE:/path (xpk), HOST:/export:/path (tpu-vm), /path (slurm)",
    )
    sub.add_argument("--spot", action="store_true", help="cheaper machines that may be taken back at any moment")
    sub.add_argument("--output", metavar="DIR", help="folder for the files; default: runs/launch/NAME")
    sub.add_argument("--dry-run", action="store_true", help="print files and commands, write nothing")

    sub = command("plan", run_plan, "what the train step needs on accelerators that are not here: compiled, not run")
    add_config(sub)
    add_plan_flags(sub)

    sub = command("convert", _convert, "GGUF file, Hugging Face folder or checkpoint to either of the latter")
    sub.add_argument("source", help="also a run folder (its newest checkpoint), or RUN/checkpoints/rl/STEP")
    sub.add_argument("destination", help="a new folder; a conversion that was cut off goes on")
    sub.add_argument("--to", choices=["hf", "checkpoint"], default="hf", help="default: a Hugging Face folder")
    sub.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in the source")

    sub = command("envs", _envs, "list the environments and tools, or check one: `orchestra envs orchestra/Market-v0`")
    sub.add_argument("id", nargs="?", help="environment to check against Gymnasium's rules and ours")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="the environment's arguments, as YAML")

    sub = command("index", _index, "an index for local search (BM25, and vectors with --dense) from documents")
    sub.add_argument("documents", help="a folder of text files, or a .jsonl file")
    sub.add_argument("index", help="folder to write")
    sub.add_argument("--dense", metavar="MODEL", help="an embedding model, for dense and hybrid search too")
    sub.add_argument("--base-url", metavar="URL", help="its OpenAI-compatible endpoint; default: OpenAI's")
    sub.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with its key: OPENAI_API_KEY")

    sub = command("demo", _demo, "two minutes in a simulated market: a trained policy beside the strongest expert")
    sub.add_argument("--tasks", type=int, default=12, metavar="N", help="held-out tasks; default 12")
    sub.add_argument("--fast", action="store_true", help="wait for nothing, a line a task")
    sub.add_argument("--seed", type=int, metavar="SEED", help="other tasks")

    sub = command("report", _report, "write report.html of a run folder")
    sub.add_argument("run_folder")
    sub.add_argument("--out", metavar="FILE", help="default: report.html in the run folder")
    return parser


def _join(options: argparse.Namespace) -> None:
    from orchestra_jax.distributed import join

    join(options.coordinator, options.num_processes, options.process_id)


def _train(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    _join(options)
    from orchestra_jax.train.run import train

    train(config, overwrite=options.overwrite)


def _sft(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    _join(options)
    from orchestra_jax.train.run import sft

    print(sft(config, overwrite=options.overwrite))


def _solve(options: argparse.Namespace) -> None:
    from orchestra_jax.cli.solve import solve

    solve(
        options.policy,
        options.question,
        task=options.task,
        tools=options.tools,
        preference=options.preference,
        temperature=options.temperature,
        seed=options.seed,
        max_turns=options.max_turns,
        max_tokens=options.max_tokens,
        budget_usd=options.budget_usd,
        json_file=options.json,
    )


def _serve(options: argparse.Namespace) -> None:
    from orchestra_jax.cli.serve import serve

    serve(
        options.folder,
        host=options.host,
        port=options.port,
        slots=options.slots,
        max_tokens=options.max_tokens,
        max_waiting=options.max_waiting,
        name=options.name,
        api_key_env=options.api_key_env,
        dtype=options.dtype,
        grammar=options.grammar,
        warm_up=options.warm_up,
    )


def _launch(options: argparse.Namespace) -> None:
    from orchestra_jax.cli.launch import launch

    launch(
        options.config,
        options.overrides,
        target=options.target,
        topology=options.topology,
        num_slices=options.num_slices,
        image=options.image,
        name=options.name,
        mount=options.mount,
        spot=options.spot,
        output=options.output,
        dry_run=options.dry_run,
    )


def _convert(options: argparse.Namespace) -> None:
    from orchestra_jax.models.convert import convert

    with _as_user_error():
        print(convert(options.source, options.destination, dtype=options.dtype, to=options.to))


def _envs(options: argparse.Namespace) -> None:
    from orchestra_jax.cli.envs import check_environment, list_environments

    if options.id:
        check_environment(options.id, options.overrides)
    else:
        list_environments()


def _index(options: argparse.Namespace) -> None:
    from orchestra_jax.cli.index import index_documents

    index_documents(
        options.documents,
        options.index,
        dense=options.dense,
        base_url=options.base_url,
        api_key_env=options.api_key_env,
    )


def _demo(options: argparse.Namespace) -> None:
    from orchestra_jax.cli.demo import demo
    from orchestra_jax.demo.episodes import TASK_SEED

    demo(num_tasks=options.tasks, fast=options.fast, seed=TASK_SEED if options.seed is None else options.seed)


def _report(options: argparse.Namespace) -> None:
    from pathlib import Path

    from orchestra_jax.report import write_report

    with _as_user_error():
        print(write_report(Path(options.run_folder), Path(options.out) if options.out else None))


class _as_user_error:
    """Turns the ValueError and ImportError of a library call on the user's input into a one-line error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | ImportError | OSError) and not isinstance(error, ConfigError):
            raise ConfigError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
