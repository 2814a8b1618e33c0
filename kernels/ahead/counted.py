"""What the compiler made of cases, by target: `counted.json` beside this file.

    {"sm_100": {"cast_ e2m1 from bf16": [3.47, 1.22, 30]}}: instructions and integers an element, as
    `Measured` has them, null where no path can be told apart; registers

So nobody has to compile to know what a GPU's pipes leave of a target, nor the limits elsewhere than
on the target that a `Gate` is for. `make counts` writes the file anew, and `python -m
sidestream.kernels.ahead.counted sm_100,sm_120` some of it: 3 s a case and target on one core. It
has every case with a gate, and every standard one; another, and AMD's target, has no limits, and
its share of a copy's rate for a target.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..case import GATED_TARGET, Case, Gate
from .machines import Gpu, predict

FILE = Path(__file__).with_suffix(".json")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What the file is of. GPUs of sm_89 issue 45 instructions a byte of a copy: no pipe bounds them.
"""
COUNTED_AS: Mapping[str, str] = MappingProxyType({"sm_103": "sm_100"})
"""Targets whose code is another's, but for a register or two."""
# Each release brings another compiler; registers are allotted eight at a time, and with 64 half of
# all warps are resident.
_MORE_INSTRUCTIONS, _MORE_REGISTERS, _FEW_REGISTERS, _ALL_REGISTERS = 0.5, 8, 64, 255


class Counts(NamedTuple):
    """Of one case on one target."""

    instructions: float | None
    integers: float | None
    registers: int


@functools.cache
def counts() -> Mapping[str, Mapping[str, Counts]]:
    """The file: by target, then by an op and its case's name."""
    found = json.loads(FILE.read_text())
    return MappingProxyType(
        {
            target: {name: Counts(*numbers) for name, numbers in rows.items()}
            for target, rows in found.items()
        }
    )


def counts_of(case: Case, target: str) -> Counts | None:
    """What the file has of the case, on a target or the one it is counted as."""
    return counts().get(COUNTED_AS.get(target, target), {}).get(_key(case.op, case.name))


def is_counted(case: Case) -> bool:
    """Whether the file has the case: it has a gate, or is measured where nobody asks for others."""
    return case.gate is not None or case.standard


def gate_of(case: Case, target: str) -> Gate | None:
    """The limits of the case on the target: its own gate's, elsewhere what was counted and a little
    more; None where it has no gate.
    """
    if target == GATED_TARGET or case.gate is None:
        return case.gate
    found = counts_of(case, target)
    if found is None:
        return None
    instructions = None
    if found.instructions is not None:
        instructions = math.ceil(2 * (found.instructions + _MORE_INSTRUCTIONS)) / 2
    registers = max(found.registers + _MORE_REGISTERS, _FEW_REGISTERS)
    return Gate(instructions, min(registers, _ALL_REGISTERS))


def target_share(case: Case, gpu: Gpu | None) -> float | None:
    """The part of a copy's rate that the case is to reach on `gpu`, None if nothing is asked.

    The smaller of its `copy_share` and `machines.PIPE_SHARE` of what the pipes leave.
    """
    found = None if gpu is None else counts_of(case, gpu.target)
    if gpu is None or found is None or case.copy_share is None:
        return case.copy_share
    if found.instructions is None or found.integers is None:
        return case.copy_share
    prediction = predict(gpu, case.moved_bytes, found.instructions, found.integers)
    return prediction.target(case.copy_share)


def write(targets: Sequence[str]) -> None:
    """Compile the file's cases for the targets, and put what is counted into it."""
    from ..cases import cases
    from .measure import measure_all

    found = [case for case in cases() if is_counted(case)]
    tasks = [(case.op, case.name, target) for target in targets for case in found]
    made: dict[str, dict[str, Counts]] = {target: {} for target in targets}
    measured = measure_all(tasks, len(os.sched_getaffinity(0)), lambda *_: None)
    for (op, name, target), one in zip(tasks, measured, strict=True):
        made[target][_key(op, name)] = Counts(one.instructions, one.integers, one.registers)
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(_as_json(before | made))


def _as_json(found: Mapping[str, Mapping[str, Sequence[float | None]]]) -> str:
    """A case a line."""
    targets = [
        f'  "{target}": {{\n'
        + ",\n".join(
            f"    {json.dumps(name)}: {json.dumps([_short(number) for number in numbers])}"
            for name, numbers in rows.items()
        )
        + "\n  }"
        for target, rows in found.items()
    ]
    return "{\n" + ",\n".join(targets) + "\n}\n"


def _short(number: float | None) -> float | None:
    return number if number is None else round(number, 2)


def _key(op: str, name: str) -> str:
    return f"{op} {name}"


if __name__ == "__main__":
    write(sys.argv[1].split(",") if sys.argv[1:] else TARGETS)
