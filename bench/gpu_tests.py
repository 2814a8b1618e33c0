"""The steps of `make gpu-check` that are tests: those marked `gpu`, and those marked `sanitized`
under each tool of compute-sanitizer.

Most of the time goes to compiling, on one core a process, so several share the tests. What a test
did comes from the file of results that pytest writes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from ..training.launch.launcher import num_cores
from .gpu_steps import FAILED, FILE, NOT_RUN, OK, ROOT, Outcome, Result, Step, unfinished

TESTS, SHARED, TIMED = "gpu tests", "ranks share the device, gloo", "gpu tests that take times"
TESTS_LIMIT_S, SHARED_LIMIT_S, TIMED_LIMIT_S = 200.0, 120.0, 90.0
TIMED_FOLDER, SHARED_FILE = "tests/bench/", "tests/sharding/test_shared_device.py"
SYMMETRIC, SYMMETRIC_FILE = "symmetric memory", "tests/sharding/test_symmetric_on_gpu.py"
SYMMETRIC_LIMIT_S = 90.0
SANITIZER, SANITIZER_FOLDERS = "compute-sanitizer", ("/usr/local/cuda/bin",)
SANITIZER_LIMIT_S = 120.0
# Each with what selects its tests: races are looked for in shared memory, at a high price.
TOOLS = {"memcheck": "cuda", "racecheck": "cuda and aligned"}
# Errors; and warnings, of threads that rely on their warp: not ours to forbid, but told.
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK .*\((\d+) errors?, (\d+) warnings?")
# How a fault is told when it is met, long before the summary.
_FAULT = re.compile(r"^=+ (Invalid .*|Error: Race reported .*)", re.MULTILINE)
# pytest's, where a process has none of the tests that are shared; and those that need no results.
_NO_TESTS = 5
_ENDS = (None, 0, _NO_TESTS)


def beside(*, dry_run: bool) -> list[Step]:
    """Right or wrong, in the order of need: they may run side by side."""
    apart = (TIMED_FOLDER, SHARED_FILE, SYMMETRIC_FILE)
    files = [file for file in _marked("gpu") if not file.startswith(apart)]
    # Nothing runs on a CPU: one process skips all.
    command = _pytest("-m", "gpu", *files)
    commands = [command] if dry_run else _parts(command, num_cores())
    tests = Step(TESTS, commands, judge, TESTS_LIMIT_S)
    return [tests, *(sanitizer(tool, dry_run=dry_run) for tool in TOOLS)]


def timed() -> Step:
    """Those that take times: nothing may run beside this step."""
    files = [file for file in _marked("gpu") if file.startswith(TIMED_FOLDER)]
    return Step(TIMED, [_pytest("-m", "gpu", *files)], judge, TIMED_LIMIT_S)


def shared(*, dry_run: bool) -> Step:
    """Ranks that share the device."""
    command = _pytest(SHARED_FILE, "-k", "cpu" if dry_run else "cuda")
    return Step(SHARED, [command], judge, SHARED_LIMIT_S)


def symmetric(*, dry_run: bool) -> Step:
    """Sums that read memory of other ranks: those of one rank, and of two where there are two GPUs.
    On a dry run files take the place of memory.
    """
    command = _pytest(SYMMETRIC_FILE, "-k", "cpu" if dry_run else "cuda")
    return Step(SYMMETRIC, [command], judge, SYMMETRIC_LIMIT_S)


def sanitizer(tool: str, *, dry_run: bool) -> Step:
    """One of `TOOLS` over every op, where compute-sanitizer is and works; on a dry run the tests
    that it would watch.
    """
    files = _marked("sanitized")
    if dry_run:
        return Step(tool, [_pytest("-m", "sanitized", "-k", "cpu", *files)], judge, TESTS_LIMIT_S)
    path = os.pathsep.join([os.environ.get("PATH", ""), *SANITIZER_FOLDERS])
    found = shutil.which(SANITIZER, path=path)
    if found is None:
        where = f"no {SANITIZER} in PATH or {', '.join(SANITIZER_FOLDERS)}"
        return Step(tool, [], lambda _: Result(NOT_RUN, where))
    # Loading torch and compiling need no watching. An API call that fails raises in the test.
    watching = [found, "--tool", tool, "--report-api-errors", "no", "--launch-timeout", "0"]
    watching += ["--target-processes", "application-only", "--print-limit", "20"]
    command = [*watching, *_pytest("-s", "-m", "sanitized", "-k", TOOLS[tool], *files)]
    # Each tensor in an allocation of its own: what is out of bounds then belongs to nobody.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    commands = _parts(command, num_cores() // len(TOOLS))
    return Step(tool, commands, sanitized, SANITIZER_LIMIT_S, apart)


def _marked(marker: str) -> list[str]:
    """The test files that use it: others may import what a bare machine has not."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if f"mark.{marker}" in path.read_text()]


def _pytest(*selection: str) -> list[str]:
    """pytest alone: its plugins, and our settings for them, are absent on a bare machine."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml", FILE]
    return [*command, "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=", *selection]


def _parts(command: Sequence[str], count: int) -> list[list[str]]:
    return [[*command, "--part", f"{part}/{max(1, count)}"] for part in range(max(1, count))]


def judge(outcomes: Sequence[Outcome]) -> Result:
    """What pytest's ends, and the results that it wrote, say of all its tests."""
    wrong: list[str] = []
    told: list[str] = []
    passed = skipped = 0
    for test in (test for outcome in outcomes for test in _results(outcome)):
        faults = _faults(test)
        name = f"{test.get('classname')}::{test.get('name')}"
        wrong += [f"{name}: {fault.get('message')}\n{fault.text}" for fault in faults]
        told += [str(said.get("value")) for said in test.iter("property")]
        skipped += (is_skipped := test.find("skipped") is not None)
        passed += not (is_skipped or faults)
    broken = [one for one in outcomes if one.code not in _ENDS and not _has_fault(one)]
    late = [found for found in map(unfinished, outcomes) if found]
    wrong += [one.tail for one in broken]
    wrong += [found.detail for found in late if found.status == FAILED]
    counts = {"passed": passed, "skipped": skipped}
    if not (wrong or late or passed or skipped):
        wrong = [f"no test was found, {outcomes[0].tail}"]
    if wrong:
        return Result(FAILED, "\n\n".join(wrong), counts)
    if late:
        return Result(NOT_RUN, late[0].detail, counts)
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return Result(OK, "; ".join([words, *told]), {**counts, "told": told})


def _results(outcome: Outcome) -> Iterator[ElementTree.Element]:
    if outcome.written:
        yield from ElementTree.fromstring(outcome.written).iter("testcase")


def _faults(test: ElementTree.Element) -> list[ElementTree.Element]:
    return [*test.iter("failure"), *test.iter("error")]


def _has_fault(outcome: Outcome) -> bool:
    """Whether the results tell why pytest did not end as where all is well."""
    return any(map(_faults, _results(outcome)))


def sanitized(outcomes: Sequence[Outcome]) -> Result:
    """What a sanitizer says of all its tests. It is slow, and not at home on every machine: neither
    is the kernels' fault. What it has told by then is.
    """
    results = [_watched(outcome) for outcome in outcomes if outcome.code != _NO_TESTS]
    for status in (FAILED, NOT_RUN):
        if odd := [result.detail for result in results if result.status == status]:
            return Result(status, "\n\n".join(odd))
    warnings = sum(result.values["warnings"] for result in results)
    detail = f"no fault, {judge(outcomes).detail}"
    return Result(OK, f"{detail}, {warnings} warnings" if warnings else detail)


def _watched(outcome: Outcome) -> Result:
    fault, summary = _FAULT.search(outcome.output), _SUMMARY.search(outcome.output)
    if outcome.code is None:
        late = f"over {outcome.seconds:.0f} s, {outcome.tail}"
        return Result(FAILED, f"{fault[1]}; {late}") if fault else Result(NOT_RUN, late)
    errors = int(summary[1] or summary[2]) if summary else None
    tests = judge([outcome])
    has_run = _has_fault(outcome) or tests.values["passed"]
    if not (fault or errors or has_run):
        return Result(NOT_RUN, f"it does not work here, {outcome.tail}")
    if tests.status == FAILED:
        return tests
    if errors != 0 or outcome.code != 0:
        return Result(FAILED, outcome.tail)
    return Result(OK, "", {"warnings": int(summary[3] or 0) if summary else 0})
