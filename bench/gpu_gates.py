"""Owns the steps of `make gpu-check` before which no kernel is timed: GPU tests and sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .gpu_memcheck import FAMILIES, STARTED
from .gpu_steps import (
    FAILED,
    NO_TIME,
    NOT_RUN,
    OK,
    ROOT,
    Budget,
    Outcome,
    StepResult,
    module,
    unfinished,
)

TESTS, TIMED = "gpu tests", "gpu tests that take times"
# A program compiles for up to 100 s on a core of its own; sanitizers share the cores with it.
TESTS_LIMIT_S = 200.0
TIMED_LIMIT_S = 90.0
GPU_MARKER = "mark.gpu"
TIMED_FOLDER = "tests/bench/"
# What these compile takes one core a minute or two: each of their tests is a program of its own.
HEAVY_FILES = (
    "tests/kernels/test_blocks_on_gpu.py",
    "tests/kernels/wire/test_on_gpu.py",
    "tests/kernels/cast/test_on_gpu.py",
)
_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
SANITIZER = "compute-sanitizer"
SANITIZER_FOLDERS = ("/usr/local/cuda/bin",)
SANITIZER_LIMIT_S = 120.0
TOOLS = ("memcheck", "racecheck")
_OPTIONS = {
    "memcheck": (),
    # Only shared memory is looked at, at a high price: fewer sizes, and the same kernels.
    "racecheck": ("--few",),
}
_SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    # Warnings are of threads that rely on their warp: not ours to forbid, but told.
    "racecheck": re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)"),
}
# How a fault is told when it is met, long before the summary.
_FAULTS = {
    "memcheck": re.compile(r"^=+ (Invalid .*)", re.MULTILINE),
    "racecheck": re.compile(r"^=+ (Error: Race reported .*)", re.MULTILINE),
}


@dataclass(frozen=True, slots=True)
class Groups:
    """What pytest is given: each test marked `gpu` is in one group. timed: takes times."""

    beside: list[list[str]]
    timed: list[str]


def groups() -> Groups:
    """Files side by side, the heavy ones by their tests, but for those that take times."""
    beside: list[list[str]] = []
    timed = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if GPU_MARKER not in (text := path.read_text()):
            continue
        file = str(path.relative_to(ROOT))
        if file.startswith(TIMED_FOLDER):
            timed.append(file)
        elif file in HEAVY_FILES:
            beside += [[f"{file}::{name}"] for name in _TEST.findall(text)]
        else:
            beside.append([file])
    return Groups(beside, timed)


def gpu_tests(budget: Budget, *, dry_run: bool) -> StepResult:
    """The tests marked `gpu`, but for those that take times: most of the time goes to compiling, so
    they run side by side."""
    beside = groups().beside
    # Nothing runs on a CPU: one program skips all.
    given = [[target for group in beside for target in group]] if dry_run else beside
    return _tests(budget, TESTS, given, dry_run=dry_run)


def timed_tests(budget: Budget, *, dry_run: bool) -> StepResult:
    """The tests marked `gpu` that take times: nothing may run beside this step."""
    return _tests(budget, TIMED, [groups().timed], limit_s=TIMED_LIMIT_S, dry_run=dry_run)


def _tests(
    budget: Budget,
    name: str,
    given: Sequence[Sequence[str]],
    *,
    limit_s: float = TESTS_LIMIT_S,
    dry_run: bool,
) -> StepResult:
    """Each group by a pytest, alone: its plugins, and our settings for them, are absent on a bare
    machine."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="]

    def run(group: Sequence[str]) -> Outcome:
        return budget.run([*command, *group], limit_s=limit_s)

    start = time.monotonic()
    with ThreadPoolExecutor(max_workers=_cores()) as pool:
        outcomes = list(pool.map(run, given))
    seconds = time.monotonic() - start
    results = [
        _tested(name, group, outcome, dry_run=dry_run)
        for group, outcome in zip(given, outcomes, strict=True)
    ]
    values = {"given": given}
    for status in (FAILED, NOT_RUN):
        if odd := [result.detail for result in results if result.status == status]:
            return StepResult(name, status, seconds, "\n\n".join(odd), values)
    return StepResult(name, OK, seconds, _counts(outcomes), values)


def _counts(outcomes: Sequence[Outcome]) -> str:
    """How many tests did what, over all of pytest's last lines."""
    lines = "\n".join(_last_line(outcome) for outcome in outcomes)
    found = {word: re.findall(rf"(\d+) {word}", lines) for word in ("passed", "skipped")}
    return ", ".join(f"{sum(map(int, counts))} {word}" for word, counts in found.items() if counts)


def _tested(name: str, group: Sequence[str], outcome: Outcome, *, dry_run: bool) -> StepResult:
    """What pytest's end says of the group it was given."""
    right = outcome.code == 0 and (dry_run or " passed" in _last_line(outcome))
    ended = unfinished(name, outcome) or StepResult(
        name, OK if right else FAILED, outcome.seconds, outcome.tail
    )
    return replace(ended, detail=f"{' '.join(group)}: {ended.detail}")


def _last_line(outcome: Outcome) -> str:
    return outcome.output.strip().rpartition("\n")[2]


def sanitizer(budget: Budget, tool: str, *, dry_run: bool) -> StepResult:
    """One of `TOOLS` over every kernel, where compute-sanitizer is and works; on a dry run the
    program that it would watch.
    """
    program = [*module("gpu_memcheck"), *_OPTIONS[tool]]
    if dry_run:
        outcome = budget.run(program, limit_s=SANITIZER_LIMIT_S)
        return unfinished(tool, outcome) or StepResult(
            tool,
            FAILED if outcome.code else OK,
            outcome.seconds,
            outcome.tail if outcome.code else "dry run: every op called, nothing watched",
        )
    path = os.pathsep.join([os.environ.get("PATH", ""), *SANITIZER_FOLDERS])
    found = shutil.which(SANITIZER, path=path)
    if found is None:
        where = f"no {SANITIZER} in PATH or {', '.join(SANITIZER_FOLDERS)}"
        return StepResult(tool, NOT_RUN, 0.0, where)
    # Loading torch and compiling need no watching. An API call that fails raises in the program.
    command = [found, "--tool", tool, "--report-api-errors", "no", "--launch-timeout", "0"]
    command += ["--target-processes", "application-only", "--print-limit", "20", *program]
    # Each tensor in an allocation of its own: what is out of bounds then belongs to nobody.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}

    def part(family: str) -> StepResult:
        ended = budget.run([*command, family], limit_s=SANITIZER_LIMIT_S, variables=apart)
        return judge(tool, family, ended)

    # Compiling takes longer than running, on one core a program.
    workers = max(1, min(len(FAMILIES), _cores() // len(TOOLS)))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return combined(tool, list(pool.map(part, FAMILIES)))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def combined(tool: str, parts: Sequence[StepResult]) -> StepResult:
    """One result of all families: of those that failed, or were not run, or of all."""
    seconds = max(part.seconds for part in parts)
    values = {part.name: {"status": part.status, **part.values} for part in parts}
    for status in (FAILED, NOT_RUN):
        if odd := [part for part in parts if part.status == status]:
            detail = "; ".join(part.name for part in odd) + f": {odd[0].detail}"
            return StepResult(tool, status, seconds, detail, values)
    warnings = sum(part.values["warnings"] for part in parts)
    detail = f"no fault, {warnings} warnings" if warnings else "no fault"
    return StepResult(tool, OK, seconds, detail, values)


def judge(tool: str, family: str, outcome: Outcome) -> StepResult:
    """What a sanitizer's output says of one family. It is slow, and not at home on every machine:
    neither is the kernels' fault. What it has told by then is.
    """
    seconds = outcome.seconds
    reached = [line for line in outcome.output.splitlines() if line.startswith(STARTED)]
    if outcome.code is None:
        late = f"over {seconds:.0f} s, while {reached[-1]}" if reached else f"over {seconds:.0f} s"
        if fault := _FAULTS[tool].search(outcome.output):
            return StepResult(family, FAILED, seconds, f"{fault[1]}; {late}\n{outcome.tail}")
        return StepResult(family, NOT_RUN, seconds, late if seconds else NO_TIME)
    summary = _SUMMARIES[tool].search(outcome.output)
    if not reached:
        return StepResult(family, NOT_RUN, seconds, f"it does not work here, {outcome.tail}")
    if summary is None or int(summary[1]) or outcome.code != 0:
        return StepResult(family, FAILED, seconds, outcome.tail)
    warnings = int(summary[2]) if tool == "racecheck" else 0
    return StepResult(family, OK, seconds, "no fault", {"warnings": warnings})
