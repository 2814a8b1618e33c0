"""Programs of `make gpu-check`: what hangs is ended with all of its own, what it said is kept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sidestream.bench import gpu_speed, gpu_steps
from sidestream.bench.gpu_steps import Budget, StepResult

PATIENCE_S = 60.0


def _wait_until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def _is_gone(pid):
    """A dead process may stay listed for as long as nobody collects it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


RANK = """
import os, pathlib, sys, time
unfinished = pathlib.Path(sys.argv[1] + ".part")
unfinished.write_text(str(os.getpid()))
unfinished.rename(sys.argv[1])
time.sleep(100)
"""
PROGRAM = """
import os, subprocess, sys, time
print("begun", flush=True)
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if sys.argv[3] == "hangs":
    rank.wait()
os._exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(("end", "code"), [("hangs", None), ("0", None), ("3", 3)])
def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch, end, code):
    """Or has ended, while the rank that it started holds its output open."""
    ready = tmp_path / "rank"

    class Begun(subprocess.Popen):
        """Its time begins when the rank runs, and the program has ended if it is to."""

        def communicate(self, input=None, timeout=None):
            _wait_until(ready.exists)
            if end != "hangs" and self.returncode is None:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return super().communicate(input, timeout)

    monkeypatch.setattr(gpu_steps.subprocess, "Popen", Begun)
    hanging = Budget(60).run([sys.executable, "-c", PROGRAM, str(ready), RANK, end], limit_s=0.2)
    assert (hanging.code, hanging.output, hanging.whole_check) == (code, "begun\n", False)
    if code is None:
        late = gpu_steps.unfinished("it", hanging)
        assert (late.status, "over its limit" in late.detail) == ("failed", True)
    rank = int(ready.read_text())
    _wait_until(lambda: _is_gone(rank))


def test_stopping_ends_what_a_program_left_behind(tmp_path):
    ready = tmp_path / "rank"
    left, empty = (
        subprocess.Popen(command, start_new_session=True)
        for command in (
            [sys.executable, "-c", PROGRAM, str(ready), RANK, "0"],
            [sys.executable, "-c", "pass"],
        )
    )
    assert (left.wait(PATIENCE_S), empty.wait(PATIENCE_S)) == (0, 0)
    budget = Budget(60)
    budget._running.update((empty, left))
    budget.stop()
    rank = int(ready.read_text())
    _wait_until(lambda: _is_gone(rank))


def test_a_machine_that_limits_are_not_made_for_is_given_more():
    program = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert Budget(1.0, patience=100.0).run(program, limit_s=0.5).code == 0


def test_a_program_that_fails_is_told():
    failing = Budget(60).run([sys.executable, "-c", "print('why'); exit(3)"], limit_s=30)
    assert (failing.code, failing.output) == (3, "why\n")
    assert failing.tail.startswith("exit 3: why\n")


def test_what_the_budget_does_not_reach_is_not_run(monkeypatch):
    monkeypatch.setattr(gpu_steps, "LEAST_S", 0.1)
    budget = Budget(1.0)
    cut = budget.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=4)
    assert gpu_steps.unfinished("it", cut).detail.startswith("no time left: ended after ")
    monkeypatch.setattr(gpu_steps.subprocess, "Popen", lambda *_, **__: pytest.fail("it began"))
    skipped = budget.run([sys.executable, "-c", "pass"], limit_s=60)
    late = gpu_steps.unfinished("it", skipped)
    assert (late.status, late.seconds, late.detail) == ("not run", 0.0, "no time left")
    step, report = gpu_speed.kernels(budget, torch.device("cpu"), dry_run=True)
    assert (step.status, step.detail, report) == ("not run", "no time left", None)


def test_a_step_that_is_interrupted_ends_the_others(monkeypatch):
    monkeypatch.setattr(gpu_steps.os, "sched_getaffinity", lambda pid: range(8))
    budget = Budget(60)

    def interrupted():
        while not budget._running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    def hanging():
        budget.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=60)
        return StepResult("other", "ok", 0.0, "")

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gpu_steps.together(budget, {"one": interrupted, "other": hanging})
    assert time.monotonic() - begun < 30
    assert budget.left_s == 0.0
