"""The two paths of a tile of consecutive elements: unmasked where it is whole, masked in parts.

A tile that is full and 16-byte aligned takes 16 bytes an access; another, one element an access.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .portable import covered
from .wide import wide_lanes


@triton.jit
def for_tile(PART: tl.constexpr, arguments, count, aligned, TILE: tl.constexpr) -> None:
    """Calls the JIT function PART(arguments, first, count, FULL, NUMEL) for all of a tile.

    Once, FULL, with TILE elements from `first` 0 on, or for four masked pieces, whose other shape
    keeps the compiler from giving both paths one layout. count: elements from the tile's first on.
    """
    if aligned != 0 and count >= TILE:
        PART(arguments, 0, count, True, TILE)
    else:
        for first in range(0, covered(count, TILE), TILE // 4):
            PART(arguments, first, count, False, TILE // 4)


@triton.jit
def elements(base, first, count, FULL: tl.constexpr, NUMEL: tl.constexpr) -> tuple:
    """(Pointers to NUMEL elements from `base` + `first` on, mask of those below `count`).

    FULL: `first` is 0, no mask, and aligned by 16 bytes, which the sums do not show: hence the
    hint, which must sit on the sum it is about.
    """
    if FULL:
        return tl.multiple_of(base + wide_lanes(NUMEL), 16), None
    else:
        lanes = first + tl.arange(0, NUMEL)
        return base + lanes, lanes < count
