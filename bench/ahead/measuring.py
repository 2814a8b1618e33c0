"""Owns what is said of one case and target: a row, made by compiling; many rows by many processes.

Processes, since Python's parser, by which Triton reads kernels, fails when two threads use it at
once (Python 3.11). What they make lies in Triton's cache on disk, so a second look is quick.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels import ahead
from ...kernels.ahead import compile as aot
from .machines import MULTIPROCESSORS, Prediction, amd_occupancy, gpus_of, occupancy, predict

KIND, SCHEMA_VERSION = "inspect", 1
"""Of the document of rows; the version goes up when `Row` changes."""
# Below this a process costs more, for its imports, than it saves.
MIN_CASES_A_PROCESS = 4

Task = tuple[str, str, str]
"""Op, case and target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the compiler made of one case for one target; `None` is what cannot be said.

    `*_bits`: the widths of accesses, widest first. `*_limit`: of the case's gate, on sm_90 alone.
    instructions, moved_bytes: of an element. occupancy: from 0 to 1.
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
    moved_bytes: float
    predictions: tuple[Prediction, ...]

    @property
    def key(self) -> Task:
        """What tells the row from all others."""
        return self.op, self.case, self.target

    @property
    def is_over_its_gate(self) -> bool:
        """Whether it spills, or exceeds a limit."""
        return (
            self.spill_bytes > 0
            or _exceeds(self.registers, self.register_limit)
            or _exceeds(self.instructions, self.instruction_limit)
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


def compile_case(case: ahead.Case, target: str) -> aot.CompiledKernel:
    """The case for `target`; an error is told with their names."""
    try:
        return case.configuration.compile(target)
    except Exception as error:
        error.add_note(f"while compiling the case {case.name!r} of {case.op} for {target}")
        raise


def measure(task: Task) -> Row:
    """Compile and look."""
    op, name, target = task
    case = ahead.case_of(op, name)
    compiled = compile_case(case, target)
    instructions = _instructions(case, compiled)
    gate = case.gate if target == "sm_90" else None
    return Row(
        op=op,
        case=name,
        target=target,
        registers=compiled.registers,
        register_limit=None if gate is None else gate.registers,
        spill_bytes=compiled.spill_bytes,
        shared_bytes=compiled.shared_bytes,
        occupancy=_occupancy(case, compiled),
        load_bits=_widths(case, compiled, is_load=True),
        store_bits=_widths(case, compiled, is_load=False),
        instructions=instructions,
        instruction_limit=None if gate is None else gate.instructions,
        moved_bytes=case.moved_bytes,
        predictions=()
        if instructions is None
        else tuple(predict(gpu, case.moved_bytes, instructions) for gpu in gpus_of(target)),
    )


def measure_all(
    tasks: Sequence[Task], num_processes: int, on_row: Callable[[Row], None]
) -> tuple[Row, ...]:
    """The rows in the order of the tasks; `on_row` is told of each as it is made."""
    num_processes = min(num_processes, len(tasks) // MIN_CASES_A_PROCESS)
    if num_processes <= 1:
        rows = []
        for task in tasks:
            rows.append(measure(task))
            on_row(rows[-1])
        return tuple(rows)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        futures = [pool.submit(measure, task) for task in tasks]
        try:
            for future in concurrent.futures.as_completed(futures):
                on_row(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(future.result() for future in futures)


def _exceeds(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _instructions(case: ahead.Case, compiled: aot.CompiledKernel) -> float | None:
    if compiled.target not in MULTIPROCESSORS:
        return None  # the counts read NVIDIA's machine code
    try:
        return case.instructions(compiled)
    except ahead.CountError:
        return None


def _occupancy(case: ahead.Case, compiled: aot.CompiledKernel) -> float | None:
    if compiled.target not in MULTIPROCESSORS:
        return amd_occupancy(compiled.assembly)
    num_warps = case.configuration.num_warps
    return occupancy(compiled.target, compiled.registers, compiled.shared_bytes, num_warps)


def _widths(case: ahead.Case, compiled: aot.CompiledKernel, *, is_load: bool) -> tuple[int, ...]:
    found = {access.bits for access in case.accesses(compiled) if access.is_load == is_load}
    return tuple(sorted(found, reverse=True))
