"""The tool that a policy calls, and the words in which it reads what became of its program."""

import codecs
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from orchestra_envs.limits import Limiter
from orchestra_envs.live.options import made
from orchestra_envs.live.sandbox.isolation import require_isolation
from orchestra_envs.live.sandbox.packages import package_links
from orchestra_envs.live.sandbox.run import Limits, RunResult, run_python
from orchestra_envs.tools import Price, Tool, ToolArgumentError

PRICE = Price(per_second_usd=0.0000083)
MAX_CODE_CHARS = 1_000_000
MAX_FILES = 4096
_BYTES_PER_SHOWN_CHAR = 64
_MARGIN_S = 30.0

# One for all tools of the process that are given none: they share its processors.
_shared_limiter = Limiter(max_concurrency=2 * (os.cpu_count() or 1))


def python_tool(
    *,
    name: str = "python",
    isolation: str = "kernel",
    timeout_s: float = 30.0,
    cpu_s: float = 10.0,
    memory_mb: int = 512,
    max_file_mb: int = 64,
    max_processes: int = 16,
    max_output_chars: int = 3000,
    packages: Sequence[str] = ("numpy",),
    price: Price | Mapping[str, Any] | None = None,
    latency_s: float = 0.1,
    limiter: Limiter | Mapping[str, Any] | None = None,
    description: str | None = None,
) -> Tool:
    """A tool with one argument `code` that runs it as a Python program in a sandbox of its own.

    The result is what the program printed (standard output and error, in order), the value of its last expression,
    and, in brackets, how it ended if not well: an exit status or the limit it ran into. A program that fails is no
    fault of the tool: its traceback is the result.

    Args:
        name: of the tool.
        isolation: the least that will do: "full", "kernel" or "limits". The strongest there is gets used.
        timeout_s: seconds a program may run by the clock.
        cpu_s: processor seconds of all its processes together.
        memory_mb: address space of each process (NumPy takes about 200 MB), and private memory of all together.
        max_file_mb: all its files together.
        max_processes: its processes and threads together.
        max_output_chars: of a longer output, the first two thirds and the last third of this many are shown; a
            program that prints 64 times as many bytes is killed.
        packages: installed distributions that it may import, with all they require.
        price: the paper's $0.0000083 per second if None.
        latency_s: what the policy is told to expect; records carry measured seconds.
        limiter: bounds the programs that run at once; by default twice the number of processors, over all Python
            tools of the process.
        description: in place of the built-in one.

    Raises:
        ValueError: the machine gives less isolation than asked, a package is not installed, or a limit is out of range.
    """
    if isinstance(max_output_chars, bool) or not isinstance(max_output_chars, int) or max_output_chars < 100:
        raise ValueError(f"max_output_chars must be a whole number of at least 100, not {max_output_chars!r}")
    if isinstance(packages, str):
        raise ValueError(f"packages must be a list of names, not the string {packages!r}")
    limits = Limits(
        wall_s=timeout_s,
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        max_file_mb=max_file_mb,
        max_processes=max_processes,
        max_output_bytes=max(1 << 16, _BYTES_PER_SHOWN_CHAR * max_output_chars),
    )
    links = package_links(packages)
    achieved = require_isolation(isolation)

    async def run(code: str) -> str:
        if len(code) > MAX_CODE_CHARS:
            raise ToolArgumentError(f"code: at most {MAX_CODE_CHARS} characters, not {len(code)}")
        return describe(await run_python(code, limits, achieved.plan, links), limits, max_output_chars)

    importable = "the standard library" + "".join(f", {package}" for package in packages)
    return Tool(
        name,
        description or _DESCRIPTION.format(importable=importable, timeout_s=timeout_s),
        _PARAMETERS,
        run,
        price=made(Price, price, "price") or PRICE,
        latency_s=latency_s,
        timeout_s=timeout_s + _MARGIN_S,
        clock="measured",
        limiter=made(Limiter, limiter, "limiter") or _shared_limiter,
        source="live",
        backend=f"python-sandbox:{achieved.tier}",
    )


_DESCRIPTION = (
    "Runs a Python program and returns what it prints and the value of its last expression. Every call is a new "
    "program without memory of earlier ones, without network, for at most {timeout_s:g} s. It can import {importable}."
)
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The program."}},
    "required": ["code"],
    "additionalProperties": False,
}


def describe(result: RunResult, limits: Limits, max_chars: int) -> str:
    """What the policy reads: at most `max_chars` characters of output, and notes in brackets."""
    is_cut = result.num_output_bytes > len(result.output)
    text, num_replaced = _decode(result.output, is_cut=is_cut)
    notes = [f"{num_replaced} invalid UTF-8 sequences replaced"] if num_replaced else []
    if is_cut:
        notes.append(f"at least {result.num_output_bytes - len(result.output)} bytes of output cut")
    if result.limit:
        notes.append(f"killed: {_limit_in_words(result.limit, limits)}")
    elif result.exit_code and result.exit_code > 0:
        notes.append(f"exit status {result.exit_code}")
    elif result.exit_code:
        notes.append(f"killed by {_signal_name(-result.exit_code)}")
    parts = [_middle_cut(text.rstrip("\n"), max_chars), *(f"[{note}]" for note in notes)]
    return "\n".join(part for part in parts if part) or "[no output]"


def _decode(data: bytes, *, is_cut: bool) -> tuple[str, int]:
    """`data` as text, and how many sequences were not UTF-8. Of cut data, a last unfinished character is left out."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not is_cut)
    return text, text.count("\ufffd") - data.count("\ufffd".encode())


def _middle_cut(text: str, max_chars: int) -> str:
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text
    num_last = max_chars // 3
    head, tail = text[: max_chars - num_last], text[len(text) - num_last :]
    return f"{head}\n[{num_cut} characters cut]\n{tail}"


def _limit_in_words(limit: str, limits: Limits) -> str:
    return {
        "cpu": f"cpu limit of {limits.cpu_s:g} s",
        "wall": f"wall clock limit of {limits.wall_s:g} s",
        "memory": f"memory limit of {limits.memory_mb} MB",
        "processes": f"processes limit of {limits.max_processes}",
        "files": f"files limit of {limits.max_file_mb} MB and {MAX_FILES} files",
        "output": f"output limit of {limits.max_output_bytes} bytes",
    }[limit]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
