"""The command with its launcher: processes that are killed from outside, in saves too, and a resume
to the bits of a run that nobody killed.

`SIDESTREAM_KILLS=20 pytest tests/faults/test_commands.py -m "" -s` kills that many.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.tests.faults.runs import STEPS, complete_steps, job, pids_of, run, saving
from sidestream.tests.training.processes import one_thread_each
from sidestream.training.step_file import folder_name

KILLS = int(os.environ.get("SIDESTREAM_KILLS", "1"))  # each starts Python three times
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60 + 60 * KILLS),
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds ranks in /proc"),
]


def run_killed(command: list[str], who: str, step: int, delay_s: float) -> int:
    """Run `command` and SIGKILL `who` a while after `step` was saved; return the exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=one_thread_each(), text=True, **pipes) as started:
        assert started.stdout is not None
        for line in started.stdout:
            if re.search(f"saved .*{folder_name(step)}", line):
                time.sleep(delay_s)
                for pid in pids_of(who, started.pid):
                    os.kill(pid, signal.SIGKILL)
                break
        started.stdout.read()  # ends once all ranks have
        return started.wait(timeout=60)


def test_a_command_whose_processes_are_killed_resumes_to_the_same_bits(
    text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    moments = random.Random(1)
    for count in range(KILLS):
        who = ("launcher", "rank", "all")[count % 3]
        step, delay_s = moments.randint(1, STEPS - 4), moments.uniform(0, 0.1)
        saved = tmp_path / f"saved-{count}"
        command = [sys.executable, "-m", "sidestream", "train", "--nproc", "2", *job(), *text]
        code = run_killed([*command, *saving(saved)], who, step, delay_s)
        assert code == (-signal.SIGKILL if who == "launcher" else 128 + signal.SIGKILL), who
        last = complete_steps(saved)[-1]
        # By ranks that have torch loaded; the demo resumes by the command.
        resumed = run([*job(), *text, *saving(saved, resume=True)], 2, tmp_path / f"{count}")
        figures = resumed.result["params_sha256"], resumed.result["first_step"]
        assert figures == (unbroken(), last + 1), (who, step, delay_s)
        print(f"kill {count + 1} of {KILLS} {who} after step {step}: the same bits")
