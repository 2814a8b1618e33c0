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
    """Calls the JIT function PART(arguments, place, FULL, NUMEL) for all of a tile.

    Once, FULL, with TILE elements, or for four masked pieces, whose other shape keeps the compiler
    from giving both paths one layout. count: how many there are from the tile's first on. place:
    (first of the piece, count). Of `arguments` constants stay constants where they are given in the
    call, and made a constexpr by PART; what is assigned before becomes a tensor.
    """
    if aligned != 0 and count >= TILE:
        PART(arguments, (0, count), True, TILE)
    else:
        for first in range(0, covered(count, TILE), TILE // 4):
            PART(arguments, (first, count), False, TILE // 4)


@triton.jit
def load(base, place, FULL: tl.constexpr, NUMEL: tl.constexpr) -> tl.tensor:
    """NUMEL elements of the tile at `base`; zeros where a masked piece has none.

    FULL: all from `base` on, aligned by 16 bytes, which the sum does not show: hence the hint,
    which must sit on the sum it is about.
    """
    if FULL:
        return tl.load(tl.multiple_of(base + wide_lanes(NUMEL), 16))
    else:
        lanes = place[0] + tl.arange(0, NUMEL)
        return tl.load(base + lanes, mask=lanes < place[1], other=0.0)


@triton.jit
def store(base, values, place, FULL: tl.constexpr, NUMEL: tl.constexpr) -> None:
    """`values` to where `load` has them from."""
    if FULL:
        tl.store(tl.multiple_of(base + wide_lanes(NUMEL), 16), values)
    else:
        lanes = place[0] + tl.arange(0, NUMEL)
        tl.store(base + lanes, values, mask=lanes < place[1])
