"""Processes that are watched, ended and asked: late ones, groups, deaths, answers."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from sidestream.training.launch import processes

pytestmark = pytest.mark.timeout(60)

HANG = "import time; time.sleep(100)"
PATIENCE_S = 30.0


def _python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


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


def test_what_a_command_says_is_in_its_own_file(tmp_path):
    log = tmp_path / "log"
    code = "import os, sys; print(os.getcwd()); sys.exit(os.environ['WHY'])"
    command = processes.start(
        _python(code), log=log, environment={**os.environ, "WHY": "why"}, folder=tmp_path
    )
    assert processes.wait_for([command], PATIENCE_S) == []
    assert processes.exit_code(command) == 1
    assert processes.tail_of(log) == f"{tmp_path}\nwhy\n"
    assert processes.tail_of(log, 4) == "why\n"
    assert processes.tail_of(tmp_path / "none") == ""


def test_who_is_late_is_named_and_ended():
    late, quick = (processes.start(_python(code)) for code in (HANG, ""))
    try:
        seen = list(processes.watch([late, quick], 1.0))
        assert seen[-1] == [late]
    finally:
        processes.end([late, quick], terminate_s=PATIENCE_S)
    assert [processes.exit_code(one) for one in (late, quick)] == [-signal.SIGTERM, 0]


def test_who_does_not_hear_is_killed(tmp_path):
    ready = tmp_path / "ready"
    deaf = "import signal, sys; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w')"
    command = processes.start(_python(f"{deaf}; {HANG}", ready))
    _wait_until(ready.exists)
    processes.end([command], terminate_s=0.2)
    assert processes.exit_code(command) == -signal.SIGKILL


STARTS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
if sys.argv[1] == "hangs":
    child.wait()
"""


@pytest.mark.parametrize("then", ["hangs", "ends"])
def test_a_group_ends_with_what_it_started(tmp_path, then):
    log = tmp_path / "log"
    command = processes.start(_python(STARTS, then), log=log, own_group=True)
    try:
        _wait_until(lambda: log.read_text().endswith("\n"))
        if then == "ends":
            assert processes.wait_for([command], PATIENCE_S) == []
    finally:
        processes.end([command], groups=True)
    _wait_until(lambda: _is_gone(int(log.read_text())))


def _value(rank):
    if rank == 1:
        raise ValueError("one says no")
    if rank == 2:
        os._exit(3)
    if rank == 3:
        time.sleep(100)
    return rank


def _answer(folder, rank):
    processes.answer(folder, rank, lambda: _value(rank))


def test_functions_answer_or_are_told_of(tmp_path):
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_answer, args=(tmp_path, rank)) for rank in range(4)]
    try:
        for one in started:
            one.start()
        left = processes.wait_for(started[:3], PATIENCE_S)
        values, failures = processes.answers(tmp_path, started)
    finally:
        processes.end([*started, context.Process(target=_answer)])
    assert left == []
    assert values == {0: 0}
    assert set(failures) == {1, 2}
    assert failures[1].startswith("Traceback") and "one says no" in failures[1]
    assert failures[2] == "exited with code 3 before it returned"
    assert processes.exit_code(started[3]) == -signal.SIGKILL
