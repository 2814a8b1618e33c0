"""Tests of what `make test` runs: one failure in any third fails all, and all are counted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("side_by_side.py")
PASSES = "def test_passes(): pass\n"
OTHERS = "import pytest\ndef test_skips(): pytest.skip()\ndef test_fails(): assert {}\n"
FOLDERS = ("kernels", "training", "sharding")
COMMAND = [sys.executable, f"tests/{SCRIPT.name}"]
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# Writes its process id into a file.
HANGS = """
import os, pathlib, time
def test_hangs():
    pathlib.Path("{name}").write_text(str(os.getpid()))
    time.sleep(100)
"""


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, content in contents.items():
        (folder / "tests" / name).mkdir(parents=True)
        (folder / "tests" / name / f"test_{name}.py").write_text(content)
    (folder / "pytest.ini").touch()
    (folder / "tests" / SCRIPT.name).write_text(SCRIPT.read_text())


@pytest.mark.parametrize("wrong", ["", *FOLDERS])
def test_failures_of_all_thirds_count(wrong: str, tmp_path: Path) -> None:
    _write(tmp_path, {name: PASSES + OTHERS.format(name != wrong) for name in FOLDERS})
    ran = subprocess.run(
        COMMAND,
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == bool(wrong), ran.stdout + ran.stderr
    counted = " 1 failed, 5 passed, 3 skipped in " if wrong else "= 6 passed, 3 skipped in "
    assert counted in ran.stdout.splitlines()[-1]
    assert all(f"test_{name}.py" in ran.stdout for name in FOLDERS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "time-limit"])
def test_what_is_ended_from_outside_ends_all_thirds_and_prints_what_there_is(
    number: signal.Signals, tmp_path: Path
) -> None:
    _write(tmp_path, {"kernels": PASSES, "bench": HANGS.format(name="beside")})
    _write(tmp_path, {"training": HANGS.format(name="too"), "sharding": HANGS.format(name="rest")})
    files = [tmp_path / name for name in ("beside", "too", "rest")]
    output = tmp_path / "output"
    with output.open("w") as stream:
        ran = subprocess.Popen(
            COMMAND,
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.05)
        ran.send_signal(number)
        assert ran.wait(timeout=30) != 0
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
    assert "tests/kernels/test_kernels.py ." in output.read_text()
