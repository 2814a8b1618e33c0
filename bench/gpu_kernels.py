"""The step of `make gpu-check` that times kernels: in this process and case by case, so that what
there was time for is kept; a case of every op first.

What does not do what its definition says has no times. Whether anything else failed does not count.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from ..kernels import pack_
from ..kernels.case import Case
from ..kernels.inputs import offsets_of
from . import clocks, kernel_table
from .gpu_steps import FAILED, NO_TIME, NOT_RUN, OK, Result
from .kernel_cases.competitors import OURS
from .kernel_cases.selection import Selection, select
from .reports import Report, Row

KERNELS = "kernels"
LIMIT_S = 90.0
# What every training calls: first among the first cases.
FIRST_OPS = ("pack_", "unpack_", "reduce_", "flat_adamw_", "flat_sgd_", "l2_norm_")
# torch.compile would take minutes.
PACE = replace(kernel_table.GPU_PACE, compiled=False)
DRY_NUMEL = 16 * 1024
DRY_PACE = kernel_table.Pace(passes=1, min_rounds=1, max_rounds=1, seconds=0.0, sample_s=0.0)


def kernels(
    device: torch.device, seconds: float, tell: Callable[[str], None], *, dry_run: bool
) -> tuple[Result, Report | None]:
    """The standard cases behind their gate, for `seconds`; `tell` hears of each as it is found."""
    if not seconds:
        return Result(NOT_RUN, NO_TIME), None
    end = time.monotonic() + seconds
    cases, pace = select(Selection()), DRY_PACE if dry_run else PACE
    numel = DRY_NUMEL if dry_run else kernel_table.default_numel(cases, device)
    found: dict[str, kernel_table.Measured] = {}
    late = []
    for case in by_need(cases):
        if time.monotonic() >= end:
            late.append(case.full_name)
            continue
        found[case.full_name] = _measured(case, numel, device, pace)
        tell(told(found[case.full_name]))
    parts = [found[case.full_name] for case in cases if case.full_name in found]
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    measured = kernel_table.Measured(
        rows=tuple(row for part in parts for row in part.rows),
        wrong=tuple(fault for part in parts for fault in part.wrong),
        notes=(*notes, *([f"{NO_TIME} for {', '.join(late)}"] if late else [])),
    )
    report = kernel_table.report_of(measured, device, pace, " ".join(sys.argv))
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a device that a kernel broke
            torch.cuda.empty_cache()
    if report.wrong:
        return Result(FAILED, f"wrong results: {'; '.join(report.wrong)}"), report
    detail = f"{len(parts)} of {len(cases)} cases right and measured"
    if late:
        detail += f"; {NO_TIME} for {len(late)}: {', '.join(late)}"
    host_us = host_microseconds(device, calls=200 if dry_run else 1000)
    return Result(OK, detail, {"pack_host_us": host_us, "not_reached": late}), report


def _measured(
    case: Case, numel: int, device: torch.device, pace: kernel_table.Pace
) -> kernel_table.Measured:
    try:
        return kernel_table.measure([case], [numel], device, pace)
    except Exception as error:  # noqa: BLE001 - whatever it is, other cases keep their times
        size = f"{case.numel(numel)} elements"
        fault = f"{case.full_name}, {size}: {type(error).__name__}: {error}"
        return kernel_table.Measured((), (fault,), ())


def told(measured: kernel_table.Measured) -> str:
    """One case in a line: ours, or what is wrong."""

    def figures(row: Row) -> str:
        return f"  {row.case}: {row.median_us:.1f} us, {row.percent_of_copy:.1f} % of a copy"

    ours = [figures(row) for row in measured.rows if row.candidate == OURS]
    return "; ".join([*ours, *(f"  WRONG {fault}" for fault in measured.wrong)])


def by_need(cases: Sequence[Case]) -> list[Case]:
    """The first case of every op, then the second of those that have one, and so on; in each turn
    `FIRST_OPS`, then the others in their order. What the time does not reach is then the least.
    """
    seen: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for case in cases:
        rank = FIRST_OPS.index(case.op) if case.op in FIRST_OPS else len(FIRST_OPS)
        turns.append((seen[case.op], rank))
        seen[case.op] += 1
    order = sorted(range(len(cases)), key=turns.__getitem__)
    return [cases[index] for index in order]


def host_microseconds(device: torch.device, *, calls: int) -> float:
    """The time of a call of `pack_` that is all host time."""
    tensors = [torch.ones(8, 8, device=device) for _ in range(9)]
    offsets, end = offsets_of(tensors)
    flat = torch.empty(end, device=device)
    clock = clocks.clock_of(device)
    return clocks.host_microseconds(lambda: pack_(flat, tensors, offsets), clock, calls=calls)
