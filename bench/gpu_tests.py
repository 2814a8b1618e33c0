"""The steps of `make gpu-check` that are tests: those marked `gpu`, and those marked `sanitized`
under each tool of compute-sanitizer.

A program takes every n-th test: most of the time goes to compiling, on one core a program. What a
test did comes from the file of results that pytest writes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from .gpu_steps import FAILED, FILE, NOT_RUN, OK, ROOT, Finding, Outcome, Program, Step, unfinished

TESTS, SHARED, TIMED = "gpu tests", "ranks share the {device}, gloo", "gpu tests that take times"
TESTS_LIMIT_S, SHARED_LIMIT_S, TIMED_LIMIT_S = 200.0, 120.0, 90.0
TIMED_FOLDER, SHARED_FILE = "tests/bench/", "tests/sharding/test_shared_device.py"
SANITIZER, SANITIZER_FOLDERS = "compute-sanitizer", ("/usr/local/cuda/bin",)
SANITIZER_LIMIT_S = 120.0
# Each with what selects its tests: races are looked for in shared memory, at a high price.
TOOLS = {"memcheck": "cuda", "racecheck": "cuda and aligned"}
_SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error()"),
    # Warnings are of threads that rely on their warp: not ours to forbid, but told.
    "racecheck": re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)"),
}
# How a fault is told when it is met, long before the summary.
_FAULT = re.compile(r"^=+ (Invalid .*|Error: Race reported .*)", re.MULTILINE)
# pytest's, where it found none of the tests that it was to run.
_NO_TESTS = 5


@dataclass
class Ended:
    """How many tests of a program passed or were skipped, and what is told of the others."""

    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> str:
        """For people."""
        counts = {"passed": self.passed, "skipped": self.skipped}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def read_results(outcomes: Sequence[Outcome]) -> Ended:
    """What pytest wrote with --junitxml, of several programs. told: `record_property("detail")`."""
    ended = Ended()
    for outcome in outcomes:
        suites = ElementTree.fromstring(outcome.written) if outcome.written else ()
        for test in (test for suite in suites for test in suite.iter("testcase")):
            name = f"{test.get('classname')}::{test.get('name')}"
            faults = [*test.iter("failure"), *test.iter("error")]
            ended.failures += [f"{name}: {one.get('message')}\n{one.text}" for one in faults]
            skipped = test.find("skipped") is not None
            ended.skipped += skipped
            ended.passed += not (skipped or faults)
            for said in test.iter("property"):
                ended.told[name] = str(said.get("value"))
    return ended


def beside(*, dry_run: bool) -> list[Step]:
    """Right or wrong, in the order of need: they may run side by side."""
    files = [file for file in _marked("gpu") if not file.startswith(TIMED_FOLDER)]
    # Nothing runs on a CPU: one program skips all.
    parts = 1 if dry_run else len(os.sched_getaffinity(0))
    tests = [_pytest("-m", "gpu", "--part", f"{part}/{parts}", *files) for part in range(parts)]
    return [Step(TESTS, tests, judge), *(sanitizer(tool, dry_run=dry_run) for tool in TOOLS)]


def shared(*, dry_run: bool) -> Step:
    """Ranks that share the device."""
    device = "cpu" if dry_run else "cuda"
    program = _pytest(SHARED_FILE, "-k", device, limit_s=SHARED_LIMIT_S)
    return Step(SHARED.format(device=device), [program], judge)


def timed() -> Step:
    """Those that take times: nothing may run beside this step."""
    files = [file for file in _marked("gpu") if file.startswith(TIMED_FOLDER)]
    return Step(TIMED, [_pytest("-m", "gpu", *files, limit_s=TIMED_LIMIT_S)], judge)


def _marked(marker: str) -> list[str]:
    """Test files that use it: others may import what a bare machine has not."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if f"mark.{marker}" in path.read_text()]


def _pytest(*selection: str, limit_s: float = TESTS_LIMIT_S) -> Program:
    """pytest alone: its plugins, and our settings for them, are absent on a bare machine."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml", FILE]
    command += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="]
    return Program([*command, *selection], limit_s)


def judge(outcomes: Sequence[Outcome]) -> Finding:
    """What pytest's ends say of the tests that it was given."""
    ended = read_results(outcomes)
    late = [found for found in map(unfinished, outcomes) if found]
    wrong = [*ended.failures, *(found.detail for found in late if found.status == FAILED)]
    wrong += [one.tail for one in outcomes if one.code and one.code != _NO_TESTS and not one.written]
    values = {"passed": ended.passed, "skipped": ended.skipped, "told": ended.told}
    if wrong:
        return Finding(FAILED, "\n\n".join(wrong), values)
    if late:
        return Finding(NOT_RUN, late[0].detail, values)
    if not ended.passed + ended.skipped:
        return Finding(FAILED, f"no test was found, {outcomes[0].tail}", values)
    return Finding(OK, "; ".join([ended.counts, *ended.told.values()]), values)


def sanitizer(tool: str, *, dry_run: bool) -> Step:
    """One of `TOOLS` over every op, where compute-sanitizer is and works; on a dry run the tests
    that it would watch.
    """
    files = _marked("sanitized")
    if dry_run:
        return Step(tool, [_pytest("-m", "sanitized", "-k", "cpu", *files)], judge)
    path = os.pathsep.join([os.environ.get("PATH", ""), *SANITIZER_FOLDERS])
    found = shutil.which(SANITIZER, path=path)
    if found is None:
        where = f"no {SANITIZER} in PATH or {', '.join(SANITIZER_FOLDERS)}"
        return Step(tool, [], lambda _: Finding(NOT_RUN, where))
    # Loading torch and compiling need no watching. An API call that fails raises in the test.
    watching = [found, "--tool", tool, "--report-api-errors", "no", "--launch-timeout", "0"]
    watching += ["--target-processes", "application-only", "--print-limit", "20"]
    # Each tensor in an allocation of its own: what is out of bounds then belongs to nobody.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    parts = max(1, len(os.sched_getaffinity(0)) // len(TOOLS))
    programs = []
    for part in range(parts):
        tests = _pytest("-m", "sanitized", "-k", TOOLS[tool], "-s", "--part", f"{part}/{parts}")
        command = [*watching, *tests.command, *files]
        programs.append(Program(command, SANITIZER_LIMIT_S, apart))
    return Step(tool, programs, lambda outcomes: judge_sanitized(tool, outcomes))


def judge_sanitized(tool: str, outcomes: Sequence[Outcome]) -> Finding:
    """What a sanitizer's output says. It is slow, and not at home on every machine: neither is the
    kernels' fault. What it has told by then is.
    """
    found = [_sanitized(tool, one) for one in outcomes if one.code != _NO_TESTS]
    for status in (FAILED, NOT_RUN):
        if odd := [part.detail for part in found if part.status == status]:
            return Finding(status, "\n\n".join(odd))
    warnings = sum(part.values["warnings"] for part in found)
    tests = read_results(outcomes).counts
    return Finding(OK, f"no fault, {tests}" + f", {warnings} warnings" * bool(warnings))


def _sanitized(tool: str, outcome: Outcome) -> Finding:
    fault, summary = _FAULT.search(outcome.output), _SUMMARIES[tool].search(outcome.output)
    if outcome.code is None:
        late = f"over {outcome.seconds:.0f} s, {outcome.tail}"
        return Finding(FAILED, f"{fault[1]}; {late}") if fault else Finding(NOT_RUN, late)
    ended = read_results([outcome])
    if not (fault or ended.passed or ended.failures):
        return Finding(NOT_RUN, f"it does not work here, {outcome.tail}")
    if summary is None or int(summary[1]) or outcome.code != 0:
        return Finding(FAILED, "\n".join([*ended.failures, outcome.tail]))
    return Finding(OK, "", {"warnings": int(summary[2] or 0)})
