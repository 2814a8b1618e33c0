"""The roofline: kernels by how many instructions they take for a byte that they move.

    x      instructions that a thread executes, by bytes moved: of the compiled code
    roofs  the rate of a copy, and the rate at which warps can issue, by x; a kernel is below both
    point  the most there is: the lower roof at its x, or what the pipe of integers leaves, which
           has a roof of its own for each kernel; what was measured is below it
    target the smaller of the case's share of a copy and `PIPE_SHARE` of what the pipes leave

The cases are those that were measured, and of their ops all that have a gate, for comparison. The
roof of the copy is what this run measured on the GPU; where no kernel ran on a GPU, what
`kernels.ahead.machines` takes for one, and nothing is measured. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ...kernels.ahead.machines import Gpu, gpu_of, predict
from ..bandwidth import COPY, TRITON_COPY
from ..reports import CPU_METHOD, Report, Row
from .series import groups_of

if TYPE_CHECKING:
    from ...kernels.case import Case  # needs Triton

PREDICTED = "H100"
"""The GPU that is predicted where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One compiled case, with the instructions of a thread for an element. bound: what limits it,
    "bytes", "instructions" or "integers"; roof_gb_s: the most there is; target: the part of the
    copy's rate that it is to reach, None if nothing is asked; measured: the row of ours at its
    largest size, if there is one.
    """

    case: Case
    instructions: float
    bound: str
    roof_gb_s: float
    target: float | None
    measured: Row | None

    @property
    def per_byte(self) -> float:
        """Instructions of a thread for a byte."""
        return self.instructions / self.case.moved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """gpu: its issue rate counts; copy_gb_s: the other roof. uncounted: cases whose instructions
    cannot be counted. unknown: measured cases that nothing here is called.
    """

    gpu: Gpu
    copy_gb_s: float
    is_prediction: bool
    points: tuple[Point, ...]
    uncounted: tuple[str, ...]
    unknown: tuple[str, ...]

    def issue_gb_s(self, per_byte: float) -> float:
        """The rate that issuing leaves at so many instructions a byte."""
        return _issue_gb_s(self.gpu, per_byte)

    @property
    def ridge(self) -> float:
        """Instructions a byte at which both roofs meet."""
        return self.issue_gb_s(1.0) / self.copy_gb_s

    def families(self) -> dict[str, list[Point]]:
        """The points by the sections of the ops, ascending by instructions a byte."""
        from ...kernels.cases import SECTIONS

        found = {}
        for title, rows in SECTIONS:
            ops = {row.op for row in rows}
            inside = [point for point in self.points if point.case.op in ops]
            if inside:
                found[title] = sorted(inside, key=lambda point: point.per_byte)
        return found


def subject_of(report: Report) -> Gpu | None:
    """The GPU that the roofline is of: the report's, or the predicted one for a CPU's report."""
    return gpu_of(str(report.machine["device"]) if is_of_gpu(report) else PREDICTED)


def is_of_gpu(report: Report) -> bool:
    """Whether its kernels ran on a GPU."""
    return any(row.method != CPU_METHOD for row in report.rows)


def cases_of(report: Report) -> list[Case]:
    """Those that its roofline is of."""
    from ...kernels.cases import cases

    ops, measured = {row.op for row in report.rows}, {row.case for row in report.rows}
    return [
        case
        for case in cases()
        if case.full_name in measured or (case.op in ops and case.gate is not None)
    ]


def roofline_of(
    report: Report, gpu: Gpu, counted: Iterable[tuple[Case, float | None, float | None]]
) -> Roofline:
    """From what was measured, and the instructions and integers of `cases_of` it, compiled for
    `gpu`; None where they cannot be counted.
    """
    ran = is_of_gpu(report)
    copy_gb_s = _copy_gb_s(report.rows) if ran else gpu.copy_gb_s
    groups = [group for inside in groups_of(report.rows).values() for group in inside]
    measured = {group.case: group.largest for group in groups if group.largest} if ran else {}
    points, uncounted = [], []
    # Its copy is the one that was measured.
    here = replace(gpu, copy_gb_s=copy_gb_s)
    for case, instructions, integers in counted:
        row = measured.pop(case.full_name, None)
        if instructions is None or integers is None:
            uncounted.append(case.full_name)
            continue
        most = predict(here, case.moved_bytes, instructions, integers)
        point = Point(
            case=case,
            instructions=instructions,
            bound=most.bound,
            roof_gb_s=copy_gb_s * most.share,
            target=None if case.copy_share is None else most.target(case.copy_share),
            measured=row,
        )
        points.append(point)
    return Roofline(
        gpu=gpu,
        copy_gb_s=copy_gb_s,
        is_prediction=not ran,
        points=tuple(points),
        uncounted=tuple(uncounted),
        unknown=tuple(measured),
    )


def _issue_gb_s(gpu: Gpu, per_byte: float) -> float:
    return gpu.copy_gb_s / predict(gpu, 1.0, per_byte, 0.0).issued


def _copy_gb_s(rows: Sequence[Row]) -> float:
    """The highest rate of a copy out of memory, or of any, where all stayed in the cache; of reads
    where nothing was copied.
    """
    copies = [row for row in rows if row.baseline in (COPY, TRITON_COPY)] or rows
    cold = [row for row in copies if row.cold]
    return max(row.copy_gb_per_s for row in cold or copies)


def spread_out(positions: Sequence[float], gap: float, most: float) -> list[float]:
    """Places for labels near ascending `positions`, at least `gap` apart and inside [0, most] where
    there is room for all; else evenly.
    """
    gaps = len(positions) - 1
    gap = min(gap, most / max(1, gaps))
    right = accumulate(positions, lambda last, position: max(last + gap, position))
    # What was pushed over the end goes back, and pushes the others.
    return [min(place, most - gap * (gaps - index)) for index, place in enumerate(right)]
