"""Tests in `make gpu-check`: what pytest and the sanitizers do, and what is made of it."""

import os
import subprocess
import sys

import pytest

from sidestream.bench import gpu_tests
from sidestream.bench.gpu_steps import FILE, FOLDER, Budget, Outcome, Step, side_by_side
from sidestream.kernels.cases import cases

PASSING = """
def test_one(record_property):
    record_property("detail", "found it")

def test_two():
    pass
"""
FAILING = "def test_three():\n    assert 1 + 1 == 3\n"
SKIPPED = "import pytest\n\ndef test_four():\n    pytest.skip('not here')\n"
HANGING = "def test_five():\n    import time\n    time.sleep(100)\n"
BROKEN = "import no_such_package\n"
DYING = "import os\n\ndef test_six():\n    os._exit(9)\n"


def _pytest(tmp_path, *texts, options=(), before=()):
    for number, text in enumerate(texts):
        (tmp_path / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml", FILE]
    return [*before, *command, *options, "--rootdir", str(tmp_path), str(tmp_path)]


def _run(commands, judge=gpu_tests.judge, limit_s=60.0):
    step = Step("tests", commands, judge, limit_s, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    (result,) = side_by_side(Budget(100), [step], lambda _: None)
    return result


@pytest.mark.parametrize(
    ("texts", "status", "detail"),
    [
        pytest.param([PASSING, SKIPPED], "ok", "2 passed, 1 skipped; found it", id="passes"),
        pytest.param([PASSING, FAILING], "failed", "test_1::test_three: assert (1", id="fails"),
        pytest.param([PASSING, BROKEN], "failed", "no_such_package", id="cannot-be-imported"),
        pytest.param([PASSING, DYING], "failed", "exit 9: ", id="dies"),
        pytest.param([], "failed", "no test was found", id="nothing"),
    ],
)
def test_what_pytest_found(tmp_path, texts, status, detail):
    result = _run([_pytest(tmp_path, *texts)])
    assert (result.status, detail in result.detail) == (status, True), result.detail


@pytest.mark.parametrize("whole_check", [False, True], ids=["its-limit", "the-check's"])
def test_a_process_that_is_late_hides_no_test_that_failed(tmp_path, whole_check):
    late = Outcome(None, "..", 2.0, whole_check=whole_check)
    command = _pytest(tmp_path, PASSING, FAILING)
    result = _run([command], lambda outcomes: gpu_tests.judge([late, *outcomes]))
    assert (result.status, result.values) == ("failed", {"passed": 2, "skipped": 0})
    assert "test_three" in result.detail
    assert ("over its limit" in result.detail) != whole_check


@pytest.mark.parametrize("code", [1, 2, 3, -11, 139])
def test_an_end_that_no_result_explains_is_a_fault(code):
    written = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'
    result = gpu_tests.judge([Outcome(code, "what it said", 1.0, written)])
    assert (result.status, result.detail.partition(":")[0]) == ("failed", f"exit {code}")
    assert gpu_tests.judge([Outcome(0, "", 1.0, written)]).status == "ok"


def test_tests_that_time_did_not_reach_are_not_run():
    late = Outcome(None, "", 0.0, whole_check=True)
    result = gpu_tests.judge([late, late])
    assert (result.status, result.detail) == ("not run", "no time left")


def test_a_process_takes_every_nth_test():
    (command,) = gpu_tests.sanitizer("memcheck", dry_run=True).commands
    command = [part for part in command if part not in ("-v", "--junitxml", FILE)]
    ended = subprocess.run(
        [*command, "--part", "1/3", "--collect-only", "-q"],
        cwd=gpu_tests.ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = [line.partition("[")[2] for line in ended.stdout.splitlines() if "::" in line]
    names = [f"{case.full_name}-cpu-late]" for case in cases() if case.standard]
    assert found == names[1::3]


def test_what_takes_times_is_apart_from_what_runs_beside():
    (tests, *_), timed = gpu_tests.beside(dry_run=True), gpu_tests.timed()
    files = [
        {part for part in command if part.startswith("tests/")}
        for command in (tests.commands[0], timed.commands[0])
    ]
    assert all(files) and not files[0] & files[1]
    assert all(file.startswith("tests/bench/") for file in files[1])


# ---- sanitizers: a stand-in that says what it is told to, and runs what it is to watch

TOOL = """#!/bin/sh
echo "cache $PYTORCH_NO_CUDA_MEMORY_CACHING, $*" >> "{folder}/calls"
echo "{says}"
while [ "$1" != "{python}" ]; do shift; done
{runs}
"""
CLEAN = "========= ERROR SUMMARY: 0 errors"
INVALID = "========= Invalid __global__ read of size 4 bytes"
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed ({} errors, {} warnings)"
RACE = "========= Error: Race reported between Write access at kernel+0x10"


def _tool(folder, says, runs='exec "$@"'):
    path = folder / gpu_tests.SANITIZER
    path.write_text(TOOL.format(folder=folder, says=says, python=sys.executable, runs=runs))
    path.chmod(0o755)
    return [str(path), "--tool", "memcheck"]


@pytest.mark.parametrize(
    ("says", "texts", "status", "detail"),
    [
        pytest.param(CLEAN, [PASSING], "ok", "no fault, 2 passed", id="clean"),
        pytest.param(RACES.format(0, 2), [PASSING], "ok", "found it, 2 warnings", id="warnings"),
        pytest.param(CLEAN.replace("0", "1"), [PASSING], "failed", "1 error", id="fault"),
        pytest.param(RACES.format(1, 0), [PASSING], "failed", "1 errors", id="race"),
        pytest.param(CLEAN, [PASSING, FAILING], "failed", "test_three", id="test-fails"),
        pytest.param("", [PASSING], "failed", "exit 0", id="no-summary"),
        pytest.param("Device not supported", [SKIPPED], "not run", "does not work", id="at-home"),
        pytest.param("x", [HANGING], "not run", "over 2 s", id="slow"),
        pytest.param(INVALID, [HANGING], "failed", "Invalid __global__ read", id="slow-fault"),
        pytest.param(RACE, [HANGING], "failed", "Error: Race reported", id="slow-race"),
    ],
)
def test_what_a_sanitizer_found(tmp_path, says, texts, status, detail):
    command = _pytest(tmp_path, *texts, before=_tool(tmp_path, says))
    limit_s = 1.5 if HANGING in texts else 60.0
    result = _run([command], gpu_tests.sanitized, limit_s)
    assert (result.status, detail in result.detail) == (status, True), result.detail


def test_a_sanitizer_that_does_not_start_fails_nothing(tmp_path):
    command = _pytest(tmp_path, PASSING, before=_tool(tmp_path, "no driver", runs="exit 1"))
    result = _run([command], gpu_tests.sanitized)
    assert (result.status, "no driver" in result.detail) == ("not run", True)


@pytest.mark.parametrize(("tool", "cache"), [("memcheck", "1"), ("racecheck", "")])
def test_a_sanitizer_watches_the_tests_made_for_it(tmp_path, monkeypatch, tool, cache):
    _tool(tmp_path, CLEAN, runs="exit 5")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    monkeypatch.setattr(gpu_tests, "num_cores", lambda: 4)
    step = gpu_tests.sanitizer(tool, dry_run=False)
    side_by_side(Budget(60), [step], lambda _: None)
    called = (tmp_path / "calls").read_text().splitlines()
    assert len(called) == 2
    for line in called:
        assert line.startswith(f"cache {cache}, --tool {tool} ")
        assert "-m sanitized" in line and "tests/kernels/test_awkward_memory.py" in line
        assert FOLDER not in line


def test_a_missing_sanitizer_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_tests, "SANITIZER_FOLDERS", ("/nowhere",))
    (result,) = side_by_side(
        Budget(60), [gpu_tests.sanitizer("memcheck", dry_run=False)], lambda _: None
    )
    assert (result.status, "/nowhere" in result.detail) == ("not run", True)
