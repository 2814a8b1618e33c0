"""Runs `interpreted/` in a process of its own: Triton interprets or compiles, never both in one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
MIN_PASSED = 45  # a run that collected little did not test the kernels


@pytest.mark.timeout(600)
def test_kernels_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=590, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout[-2000:]
    assert int(passed[1]) >= MIN_PASSED
    assert "skipped" not in run.stdout
