"""Memory that was freed between blocks that live is not resident any more."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import runpy, sys
from pathlib import Path

def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20

if sys.argv[2] == "exact":
    assert runpy.run_path(sys.argv[1])["return_freed_memory"]()
del_first = bytearray(b"x") * (30 << 20)
del del_first  # from here on glibc takes blocks of this size from its heap
before = resident_mib()
blocks, between = [], []
for _ in range(10):
    blocks.append(bytearray(b"x") * (4 << 20))
    between.append(bytearray(b"x") * 100_000)
del blocks
print(resident_mib() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_blocks_are_not_resident() -> None:
    module = Path(__file__).parents[2] / "bench" / "resident.py"
    found = {}
    for how in ("exact", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(module), how],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found[how] = float(done.stdout)
    assert found["exact"] < 8
    assert found["plain"] > 30, "glibc has changed: the exact way may have become needless"
