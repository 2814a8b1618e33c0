"""Owns the steps of `make gpu-check` that take times: kernels, a training step, a kernel tuned.

One after the other, with nothing beside them. Kernels are measured in this process, case by case,
so that what there was time for is kept: a case of every op first.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..kernels import pack_
from . import clocks, kernel_table
from .gpu_steps import (
    FAILED,
    NO_TIME,
    NOT_RUN,
    OK,
    Budget,
    Outcome,
    StepResult,
    sidestream,
    unfinished,
)
from .kernel_cases.case import ALIGNMENT_NUMEL, Case, Run
from .kernel_cases.selection import Selection, select
from .reports import Report

KERNELS, STEP, AUTOTUNE = "kernels", "step time against FSDP2", "autotune of pack_"
KERNELS_LIMIT_S = 90.0
STEP_LIMIT_S = 75.0
AUTOTUNE_LIMIT_S = 60.0
AUTOTUNE_BUDGET_S = 20
TUNED_OP = "pack_"
# A kernel of that op compiles faster than a process that could do it starts.
AUTOTUNE_JOBS = 1
# What every training calls: first among the first cases.
FIRST_OPS = ("pack_", "unpack_", "reduce_", "flat_adamw_", "flat_sgd_", "l2_norm_")
# torch.compile would take minutes.
PACE = replace(kernel_table.GPU_PACE, compiled=False)
DRY_NUMEL = 64 * 1024
DRY_PACE = kernel_table.Pace(passes=1, min_rounds=1, max_rounds=1, seconds=0.0, sample_s=0.0)
DRY_ARCH = "sm_90"


def kernels(
    budget: Budget, device: torch.device, *, dry_run: bool
) -> tuple[StepResult, Report | None]:
    """The standard cases behind their gate, for as long as there is time."""
    start = time.monotonic()
    seconds = min(budget.limit(KERNELS_LIMIT_S), budget.left_s)
    if not seconds:
        return StepResult(KERNELS, NOT_RUN, 0.0, NO_TIME), None
    cases, pace = select(Selection()), DRY_PACE if dry_run else PACE
    numel = DRY_NUMEL if dry_run else kernel_table.default_numel(cases, device)
    found, late, raised = {}, [], []
    for case in by_need(cases):
        if time.monotonic() - start >= seconds:
            late.append(case.name)
            continue
        try:
            found[case.name] = kernel_table.measure([case], [numel], device, pace)
        except Exception as error:  # noqa: BLE001 - whatever it is, other cases keep their times
            size = f"{case.numel(numel)} elements"
            raised.append(f"{case.name}, {size}: {type(error).__name__}: {error}")
    parts = [found[case.name] for case in cases if case.name in found]
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    measured = kernel_table.Measured(
        rows=tuple(row for part in parts for row in part.rows),
        wrong=(*(fault for part in parts for fault in part.wrong), *raised),
        notes=(*notes, *([f"{NO_TIME} for {', '.join(late)}"] if late else [])),
    )
    report = kernel_table.report_of(measured, device, pace, " ".join(sys.argv))
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a device that a kernel broke
            torch.cuda.empty_cache()
    if report.wrong:
        detail = f"wrong results: {'; '.join(report.wrong)}"
        return StepResult(KERNELS, FAILED, time.monotonic() - start, detail), report
    detail = f"{len(parts)} of {len(cases)} cases right and measured"
    if late:
        detail += f"; {NO_TIME} for {len(late)}: {', '.join(late)}"
    values = {
        "pack_host_us": host_microseconds(device, calls=200 if dry_run else 1000),
        "not_reached": late,
    }
    return StepResult(KERNELS, OK, time.monotonic() - start, detail, values), report


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
    return clocks.host_microseconds(_tiny_pack(device), clocks.clock_of(device), calls=calls)


def _tiny_pack(device: torch.device) -> Run:
    tensors = [torch.ones(8, 8, device=device) for _ in range(9)]
    offsets = [ALIGNMENT_NUMEL * index for index in range(len(tensors))]
    flat = torch.empty(ALIGNMENT_NUMEL * len(tensors), device=device)
    return lambda: pack_(flat, tensors, offsets)


def step_time(budget: Budget, *, dry_run: bool) -> StepResult:
    """A step of ZeRO-3 beside FSDP2's in the same process, one rank; trained alike or failed."""
    device = ["--device", "cpu", "--tiny", "--pairs", "3"] if dry_run else ["--device", "cuda"]
    arguments = ["--world", "1", "--against", "fsdp2", "--launches", "1", *device]
    outcome, found = _measured(budget, ["bench", "step", *arguments], STEP_LIMIT_S)
    return _told(STEP, outcome, found, step_detail)


def step_detail(found: Mapping[str, Any]) -> str:
    """The ratio, and whether both trained alike."""
    (row,) = found["rows"]
    ours, theirs, ratio = row["candidate_figures"], row["rival_figures"], row["ratio"]
    bits = (
        "equal bits"
        if row["share_of_unequal_elements"] == 0.0
        else f"weights {row['relative_difference']:.1e} apart"
    )
    return (
        f"{row['candidate']} / {row['rival']}: {ratio['median']:.3f} "
        f"[{ratio['low']:.3f}, {ratio['high']:.3f}], {ours['ms']:.1f} / {theirs['ms']:.1f} ms, "
        f"{ours['peak_mib']:.0f} / {theirs['peak_mib']:.0f} MiB, "
        f"loss {ours['loss']:.4f} / {theirs['loss']:.4f}, {bits}"
    )


def autotune(budget: Budget, *, dry_run: bool) -> StepResult:
    """One op tuned, into a folder that is then deleted: the check leaves the machine as it was."""
    arguments = ["autotune", "--op", TUNED_OP]
    with tempfile.TemporaryDirectory(prefix="sidestream-gpu-check-") as folder:
        if dry_run:
            arguments += ["--dry-run", "--arch", DRY_ARCH]
        else:
            arguments += ["--budget", str(AUTOTUNE_BUDGET_S), "--to", folder]
            arguments += ["--jobs", str(AUTOTUNE_JOBS)]
        outcome, found = _measured(budget, arguments, AUTOTUNE_LIMIT_S)
    return _told(AUTOTUNE, outcome, found, candidates_detail if dry_run else tuned_detail)


def tuned_detail(found: Mapping[str, Any]) -> str:
    """What was chosen for each case, how much faster than the default it is, of how many."""
    return "; ".join(
        f"{entry['case']}: {entry['block_bytes']} B {entry['num_warps']} W, {_gain(entry)}, "
        f"{sum('median_us' in one for one in entry['candidates'])} of "
        f"{len(entry['candidates'])} candidates timed"
        for entry in found["entries"]
    )


def _gain(entry: Mapping[str, Any]) -> str:
    chosen = {name: entry[name] for name in ("block_bytes", "num_warps")}
    if chosen == entry["default"]:
        return "the default"
    (ratio,) = (
        one["ratio"]
        for one in entry["candidates"]
        if all(one[name] == value for name, value in chosen.items())
    )
    return f"{1.0 - ratio:.1%} faster than the default"


def candidates_detail(found: Mapping[str, Any]) -> str:
    """How many candidates there are, and how many of them the compiler leaves."""
    rows = found["rows"]
    kept = sum(row["reason"] is None for row in rows)
    return f"dry run: {kept} of {len(rows)} candidates for {found['target']} would be timed"


def _measured(
    budget: Budget, arguments: list[str], limit_s: float
) -> tuple[Outcome, dict[str, Any] | None]:
    """How a command of sidestream ended, and what it wrote with --json."""
    with tempfile.TemporaryDirectory(prefix="sidestream-gpu-check-") as folder:
        file = Path(folder, "found.json")
        outcome = budget.run(sidestream(*arguments, "--json", str(file)), limit_s=limit_s)
        return outcome, json.loads(file.read_text()) if file.exists() else None


def _told(
    name: str,
    outcome: Outcome,
    found: dict[str, Any] | None,
    tell: Callable[[Mapping[str, Any]], str],
) -> StepResult:
    if late := unfinished(name, outcome):
        return late
    if outcome.code != 0 or found is None:
        return StepResult(name, FAILED, outcome.seconds, outcome.tail)
    return StepResult(name, OK, outcome.seconds, tell(found), found)
