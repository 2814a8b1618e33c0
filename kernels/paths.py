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
def _pointers(base, place, FULL: tl.constexpr, NUMEL: tl.constexpr, WIDE: tl.constexpr):
    """Aligned by 16 bytes, which the sums do not show: the hint must sit on the sum it is about."""
    if FULL:
        return tl.multiple_of(base + wide_lanes(NUMEL), 16)
    pointers = base + (place[0] + tl.arange(0, NUMEL))
    if WIDE:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def load(
    base, place, FULL: tl.constexpr, NUMEL: tl.constexpr, WIDE: tl.constexpr = False
) -> tl.tensor:
    """NUMEL elements of the tile at `base`; zeros where a masked piece has none.

    WIDE: a masked piece is 16-byte aligned too, and so is its end.
    """
    pointers = _pointers(base, place, FULL, NUMEL, WIDE)
    if FULL:
        return tl.load(pointers)
    else:
        mask = place[0] + tl.arange(0, NUMEL) < place[1]
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store(
    base, values, place, FULL: tl.constexpr, NUMEL: tl.constexpr, WIDE: tl.constexpr = False
) -> None:
    """`values` to where `load` has them from."""
    pointers = _pointers(base, place, FULL, NUMEL, WIDE)
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=place[0] + tl.arange(0, NUMEL) < place[1])
