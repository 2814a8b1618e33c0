"""What comes before any time: sanitizers see every op, and what they say is understood."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.bench import gpu_gates, gpu_memcheck
from sidestream.bench.gpu_steps import Budget, Outcome
from sidestream.kernels import registry

CPU = torch.device("cpu")
BEGUN = f"{gpu_memcheck.STARTED} casts\n"
CLEAN = BEGUN + "========= ERROR SUMMARY: 0 errors\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


class _Programs:
    """Ends each test file as it is told, by the file's name, and writes down who ran when."""

    def __init__(self, ends):
        self.ends, self.events = ends, []

    def run(self, command, *, limit_s):
        # Of a group, the last.
        name = command[-1].rpartition("/")[2]
        self.events.append(("begins", name))
        time.sleep(0.05)
        self.events.append(("ends", name))
        return self.ends.get(name, Outcome(0, "..\n2 passed, 1 skipped in 1 s", 1.0))


TIMED = ("bench/test_clock", "bench/test_tune")
TESTS = "def test_a(x):\n    pass\n\n\ndef helper():\n    pass\n\n\ndef test_b():\n    pass\n"


@pytest.fixture
def _test_files(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_gates, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(gpu_gates, "HEAVY_FILES", ("tests/kernels/test_heavy.py",))
    for path in (*TIMED, "kernels/test_heavy", "kernels/test_one", "kernels/test_two"):
        file = tmp_path / "tests" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"pytestmark = pytest.{gpu_gates.GPU_MARKER}\n{TESTS}")
    (tmp_path / "tests" / "test_on_cpu.py").write_text(TESTS)


LATE = Outcome(None, "", 2.0, whole_check=True)
RED = Outcome(1, "no\n1 failed in 1 s", 1.0)
OVER = Outcome(None, "..", 2.0)


@pytest.mark.usefixtures("_test_files")
@pytest.mark.parametrize(
    ("one", "two", "status", "detail"),
    [
        (LATE, RED, "failed", "exit 1: 1 failed"),
        (LATE, OVER, "failed", "over its limit"),
        (Outcome(0, "2 passed in 1 s", 1.0), LATE, "not run", "no time left: ended after 2 s"),
        (Outcome(0, "2 deselected in 1 s", 1.0), LATE, "failed", "exit 0: 2 deselected"),
        (Outcome(0, "2 passed", 1.0), Outcome(0, "5 passed", 1.0), "ok", "11 passed, 2 skipped"),
    ],
)
def test_a_file_without_time_hides_no_other_that_failed(one, two, status, detail):
    programs = _Programs({"test_one.py": one, "test_two.py": two})
    step = gpu_gates.gpu_tests(programs, dry_run=False)
    named, _, told = step.detail.rpartition(".py: ")
    assert (step.status, told.startswith(detail)) == (status, True), step.detail
    assert named in ("", "tests/kernels/test_one", "tests/kernels/test_two")
    assert bool(named) == (status != "ok")
    heavy = [[f"tests/kernels/test_heavy.py::test_{name}"] for name in "ab"]
    light = [[f"tests/kernels/test_{name}.py"] for name in ("one", "two")]
    assert step.values["given"] == [*heavy, *light]


@pytest.mark.usefixtures("_test_files")
def test_every_group_that_failed_is_told():
    programs = _Programs({"test_one.py": RED, "test_two.py": OVER})
    first, second = gpu_gates.gpu_tests(programs, dry_run=False).detail.split("\n\n")
    assert first.startswith("tests/kernels/test_one.py: exit 1")
    assert second.startswith("tests/kernels/test_two.py: over its limit")


@pytest.mark.usefixtures("_test_files")
def test_tests_that_take_times_are_a_step_of_their_own():
    programs = _Programs({})
    gpu_gates.gpu_tests(programs, dry_run=False)
    assert not any(name in ("test_clock.py", "test_tune.py") for _, name in programs.events)
    programs = _Programs({})
    step = gpu_gates.timed_tests(programs, dry_run=False)
    assert step.values["given"] == [[f"tests/{path}.py" for path in TIMED]]
    assert programs.events == [("begins", "test_tune.py"), ("ends", "test_tune.py")]


@pytest.mark.usefixtures("_test_files")
def test_on_a_cpu_one_program_skips_all():
    programs = _Programs({})
    step = gpu_gates.gpu_tests(programs, dry_run=True)
    assert [len(group) for group in step.values["given"]] == [4]
    assert len(programs.events) == 2


def test_every_gpu_test_of_the_tree_is_in_one_group():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    ended = subprocess.run(
        command, cwd=gpu_gates.ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    tests = [line for line in ended.stdout.splitlines() if line.startswith("tests/")]
    assert tests
    found = gpu_gates.groups()
    given = [target for group in [*found.beside, found.timed] for target in group]
    seen = Counter()
    for test in tests:
        holding = [one for one in given if test.startswith((f"{one}::", f"{one}["))]
        holding += [one for one in given if test == one]
        assert len(holding) == 1, (test, holding)
        seen.update(holding)
    assert set(seen) == set(given)  # pytest fails where it finds nothing


def test_heavy_files_compile_in_several_programs():
    beside = gpu_gates.groups().beside
    for file in gpu_gates.HEAVY_FILES:
        assert [file] not in beside
        assert sum(group[0].startswith(f"{file}::") for group in beside) > 1, file
    blocks = "tests/kernels/test_blocks_on_gpu.py"
    for name in ("test_mx", "test_nvfp4", "test_hadamard"):
        assert [f"{blocks}::{name}"] in beside


def test_a_missing_sanitizer_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_gates, "SANITIZER_FOLDERS", ("/nowhere",))
    step = gpu_gates.sanitizer(Budget(60), "memcheck", dry_run=False)
    assert step.status == "not run"
    assert "/nowhere" in step.detail


TOOL = """#!/bin/sh
echo "cache: $PYTORCH_NO_CUDA_MEMORY_CACHING; $*" >> "{calls}"
echo "{begun}"
echo "{summary}"
case "$*" in *{failing}*) exit 3;; esac
"""


@pytest.mark.parametrize(
    ("tool", "summary", "end", "cache"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors", "gpu_memcheck", "1"),
        ("racecheck", NO_RACES, "gpu_memcheck --few", ""),
    ],
    ids=["memcheck", "racecheck"],
)
def test_a_sanitizer_watches_every_family(tmp_path, monkeypatch, tool, summary, end, cache):
    calls = tmp_path / "calls"
    program = tmp_path / gpu_gates.SANITIZER
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    for failing, status in (("nothing", "ok"), ("casts", "failed")):
        calls.write_text("")
        program.write_text(
            TOOL.format(calls=calls, begun=BEGUN.strip(), summary=summary, failing=failing)
        )
        program.chmod(0o755)
        step = gpu_gates.sanitizer(Budget(60), tool, dry_run=False)
        assert step.status == status
    assert step.detail.startswith("casts: exit 3")
    called = calls.read_text().splitlines()
    beginning = f"cache: {cache}; --tool {tool} --report-api-errors no "
    assert all(line.startswith(beginning) for line in called)
    ends = {line.partition(f" {sys.executable} -m ")[2] for line in called}
    assert ends == {f"sidestream.bench.{end} {family}" for family in gpu_memcheck.FAMILIES}


INVALID = "========= Invalid __global__ read of size 4 bytes\n=========     at kernel+0x10\n"
RACE = "========= Error: Race reported between Write access at kernel+0x10\n"
WARNING = "========= Warning: Race reported between Write access at kernel+0x10\n"
RACES = BEGUN + "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"


@pytest.mark.parametrize(
    ("tool", "code", "output", "status", "detail"),
    [
        ("memcheck", 0, CLEAN, "ok", "no fault"),
        ("memcheck", 0, BEGUN + "========= ERROR SUMMARY: 1 error\n", "failed", "1 error"),
        ("memcheck", 1, CLEAN + "RuntimeError: boo", "failed", "boo"),
        ("memcheck", 0, BEGUN, "failed", "casts"),
        ("memcheck", 1, "Device not supported", "not run", "does not work here, exit 1: Device"),
        ("memcheck", None, BEGUN, "not run", "over 3 s, while checking casts"),
        ("memcheck", None, BEGUN + INVALID, "failed", "casts: Invalid __global__ read of size 4"),
        ("racecheck", None, BEGUN + RACE, "failed", "casts: Error: Race reported between Write"),
        ("racecheck", None, BEGUN + WARNING, "not run", "over 3 s, while checking casts"),
        ("racecheck", 0, RACES.format(0, 0, 0), "ok", "no fault"),
        ("racecheck", 0, RACES.format(2, 0, 2), "ok", "no fault, 2 warnings"),
        ("racecheck", 0, RACES.format(1, 1, 0), "failed", "1 errors"),
        ("racecheck", 0, CLEAN, "failed", "ERROR SUMMARY"),
    ],
)
def test_what_a_sanitizer_says(tool, code, output, status, detail):
    clean = gpu_gates.judge(tool, "blocks", Outcome(0, CLEAN + NO_RACES, 1.0))
    assert clean.status == "ok"
    part = gpu_gates.judge(tool, "casts", Outcome(code, output, 3.0))
    step = gpu_gates.combined(tool, [clean, part])
    assert (step.status, step.seconds) == (status, 3.0)
    assert step.detail.startswith(detail if status == "ok" else "casts: ")
    assert detail in step.detail
    assert step.values["casts"]["status"] == status


class _Watch(TorchDispatchMode):
    """Writes down which of our ops are called."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "sidestream":
            self.ops.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sizes", [gpu_memcheck.ALL, gpu_memcheck.FEW], ids=["all", "few"])
def test_sanitizers_see_every_op_of_the_registry(sizes, capsys):
    with _Watch() as watch:
        gpu_memcheck.run(CPU, sizes)
    assert watch.ops == {row.op for row in registry.ROWS}
    assert capsys.readouterr().out.startswith(gpu_memcheck.STARTED)


def test_a_family_runs_alone(capsys):
    with _Watch() as watch:
        gpu_memcheck.run(CPU, gpu_memcheck.FEW, ["optimizers"])
    assert watch.ops == {"flat_adamw_", "flat_sgd_"}


def test_an_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_memcheck.main(["casts", "cast"])
    told = capsys.readouterr()
    expected = (
        f"families: expected some of {', '.join(gpu_memcheck.FAMILIES)}, got cast; name those"
    )
    assert expected in told.err
    assert told.out == ""
