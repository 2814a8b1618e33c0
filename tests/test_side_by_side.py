"""Tests of what `make test` runs: one failure in either half fails all, and all are counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("side_by_side.py")
PASSES = "def test_passes(): pass\n"
OTHERS = "import pytest\ndef test_skips(): pytest.skip()\ndef test_fails(): assert {}\n"


@pytest.mark.parametrize("wrong", ["", "kernels", "sharding"], ids=["none", "beside", "rest"])
def test_failures_of_both_halves_count(wrong: str, tmp_path: Path) -> None:
    for name in ("kernels", "bench", "sharding"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        content = PASSES + OTHERS.format(name != wrong)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(content)
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests" / SCRIPT.name).write_text(SCRIPT.read_text())
    ran = subprocess.run(
        [sys.executable, f"tests/{SCRIPT.name}"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == bool(wrong), ran.stdout + ran.stderr
    counted = " 1 failed, 5 passed, 3 skipped in " if wrong else "= 6 passed, 3 skipped in "
    assert counted in ran.stdout.splitlines()[-1]
    assert all(f"test_{name}.py" in ran.stdout for name in ("kernels", "bench", "sharding"))
