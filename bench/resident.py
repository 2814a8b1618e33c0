"""Resident memory that means what was in use: memory that was freed goes back at once.

glibc keeps what is freed between blocks that live, and takes ever larger blocks from there once one
was freed. How much stays resident is then a matter of luck, and grows for many steps: of 26 M
parameters ZeRO-3 used 350 MiB and held 500 to 650.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h; a fixed value also ends its growth
MIN_RETURNED_BYTES = 1 << 20


def return_freed_memory() -> bool:
    """From now on every block of a MiB or more is mapped alone, and unmapped when it is freed:
    exact, and slow for lack of reuse. False where the C library cannot.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, MIN_RETURNED_BYTES))
