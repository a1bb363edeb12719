"""Traffic between devices, read from the program as the partitioner left it.

The backend rewrites collectives afterwards (into loops of permutes, fusions, reductions of slices), so the final
program cannot be asked. Bodies of loops count as often as their condition's constant says; a loop whose number of trips
is data counts once.
"""

from __future__ import annotations

import math
import re
from collections import Counter

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def collective_bytes(hlo: str) -> dict[str, float]:
    """Bytes that a device receives, by kind of collective, in one run of the program (HLO text).

    Of an all-gather its result, of a reduce-scatter its operand, of an all-reduce both (as on a ring), of the others
    their result; the factor (n - 1) / n of a ring of n is taken as 1. Where the backend later turns an all-reduce and a
    slice into a reduce-scatter, the traffic is half of what is said here.
    """
    bodies, entry = _computations(hlo)
    return dict(_traffic(entry, bodies, {}))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if line and not line.startswith((" ", "}")) and (match := _COMPUTATION.match(line)):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name and line.startswith(" "):
            bodies[name].append(line)
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is no HLO module")
    return bodies, entry


def _traffic(name: str, bodies: dict[str, list[str]], known: dict[str, Counter[str]]) -> Counter[str]:
    if name not in known:
        total: Counter[str] = Counter()
        for line in bodies.get(name, ()):
            for kind in KINDS:
                if f" {kind}(" in line or f" {kind}-start(" in line:
                    times = {"all-reduce": 2, "reduce-scatter": _group_size(line)}.get(kind, 1)
                    total[kind] += int(_result_bytes(line)) * times
            times = _trips(line, bodies) if " while(" in line else 1
            for callee in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                for kind, count in _traffic(callee, bodies, known).items():
                    total[kind] += count * times
        known[name] = total
    return known[name]


def _group_size(line: str) -> int:
    """Devices of a group: `{{0,1},{2,3}}`, `[groups,size]<=[devices]` or `mesh['x'=2,'y'=4] {'x'}`."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    match = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(match[1].split(",")) if match else 1


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """The constant that a loop's condition compares with; 1 if there is none."""
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    text = "\n".join(bodies.get(condition[1], ())) if condition else ""
    constants = [int(value) for value in re.findall(r"s32\[\] constant\((\d+)\)", text)]
    return max(constants, default=1)


def _result_bytes(line: str) -> float:
    """Size of what an instruction gives; of a tuple the sum of its parts."""
    result = line.split(" = ", 1)[1]
    for kind in KINDS:
        result = result.split(f" {kind}", 1)[0]
    sizes = (
        math.prod(int(n) for n in dims.split(",") if n) * _BYTES.get(kind, 4) for kind, dims in _SHAPE.findall(result)
    )
    return float(sum(sizes))
