"""Memory that was freed between blocks that live is not resident any more."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, runpy, sys
from pathlib import Path

def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20

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


# What changes or replaces malloc.
SETTINGS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
EXACT_MIB = 8


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_blocks_are_not_resident() -> None:
    module = Path(__file__).parents[2] / "bench" / "resident.py"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)
    }
    found = {}
    for how in ("exact", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(module), how],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=environment,
        )
        found[how] = float(done.stdout)
    assert found["exact"] < EXACT_MIB
    if found["plain"] < EXACT_MIB:
        pytest.skip("this C library returns freed memory anyway")
