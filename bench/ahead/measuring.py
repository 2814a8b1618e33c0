"""What `sidestream inspect` says of one case and target: what was measured, beside what it may be.

What is predicted follows from the bytes of the case and the instructions that are counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.ahead import counted
from ...kernels.ahead import measure as ahead
from ...kernels.ahead.compile import CompiledKernel, compile_launch
from ...kernels.ahead.machines import (
    AMD_WAVES,
    MULTIPROCESSORS,
    Prediction,
    gpus_of,
    occupancy,
    predict,
)
from ...kernels.ahead.measure import Task
from ...kernels.case import Case, Gate
from ...kernels.cases import by_name

KIND, SCHEMA_VERSION = "inspect", 2
"""Of the document of rows; the version goes up when `Row` changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the compiler made of one case for one target; `None` is what cannot be said.

    `*_bits`: the widths of accesses, widest first. `*_limit`: of `counted.gate_of`.
    instructions, integers, moved_bytes: of an element. occupancy: from 0 to 1.
    """

    op: str
    case: str
    target: str
    registers: int
    register_limit: int | None
    spill_bytes: int
    shared_bytes: int
    occupancy: float | None
    load_bits: tuple[int, ...]
    store_bits: tuple[int, ...]
    instructions: float | None
    instruction_limit: float | None
    integers: float | None
    moved_bytes: float
    predictions: tuple[Prediction, ...]

    @property
    def key(self) -> Task:
        """What tells the row from all others."""
        return self.op, self.case, self.target

    @property
    def is_over_its_gate(self) -> bool:
        """Whether it spills, exceeds a limit, or lacks the count that a limit is for."""
        limit = self.register_limit
        gate = None if limit is None else Gate(self.instruction_limit, limit)
        return bool(
            ahead.faults(
                gate,
                instructions=self.instructions,
                registers=self.registers,
                spill_bytes=self.spill_bytes,
            )
        )

    def as_json(self) -> dict[str, Any]:
        """The fields under their names."""
        return dataclasses.asdict(self)


def row_from_json(content: Mapping[str, Any]) -> Row:
    """The row that `Row.as_json` made."""
    values: dict[str, Any] = dict(content)
    for name in ("load_bits", "store_bits"):
        values[name] = tuple(values[name])
    values["predictions"] = tuple(Prediction(**found) for found in values["predictions"])
    return Row(**values)


def compile_case(case: Case, target: str) -> CompiledKernel:
    """The kernel of the case that is counted; an error is told with its name."""
    try:
        return compile_launch(case.launches()[case.counted], target)
    except Exception as error:
        error.add_note(f"while compiling {case.full_name} for {target}")
        raise


def measure_all(
    tasks: Sequence[Task], num_processes: int, on_row: Callable[[Row], None]
) -> tuple[Row, ...]:
    """The rows in the order of the tasks; `on_row` is told of each as it is made."""
    named = by_name()
    found = ahead.measure_all(
        tasks,
        num_processes,
        lambda task, measured: on_row(_row(named[task[:2]], task[2], measured)),
    )
    return tuple(
        _row(named[task[:2]], task[2], measured)
        for task, measured in zip(tasks, found, strict=True)
    )


def _row(case: Case, target: str, measured: ahead.Measured) -> Row:
    gate = counted.gate_of(case, target)
    instructions, integers = measured.instructions, measured.integers
    return Row(
        op=case.op,
        case=case.name,
        target=target,
        registers=measured.registers,
        register_limit=None if gate is None else gate.registers,
        spill_bytes=measured.spill_bytes,
        shared_bytes=measured.shared_bytes,
        occupancy=occupancy_of(measured, target),
        load_bits=measured.load_bits,
        store_bits=measured.store_bits,
        instructions=instructions,
        instruction_limit=None if gate is None else gate.instructions,
        integers=integers,
        moved_bytes=case.moved_bytes,
        predictions=()
        if instructions is None or integers is None
        else tuple(
            predict(gpu, case.moved_bytes, instructions, integers) for gpu in gpus_of(target)
        ),
    )


def occupancy_of(measured: ahead.Measured, target: str) -> float | None:
    """Resident warps by the most there can be; None where the compiler does not say."""
    if target not in MULTIPROCESSORS:
        return None if measured.waves is None else measured.waves / AMD_WAVES
    return occupancy(target, measured.registers, measured.shared_bytes, measured.num_warps)
