"""Where the scales of consecutive blocks lie, inside Triton kernels: in a row, or swizzled.

The layout is `swizzle`'s. Rows are of any number of blocks, so places take divisions, which are
products here.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

# Of a reciprocal of 62 bits an int64 has room for 1's own; of 20 an int32, times a lane.
_RECIPROCAL_BITS = 62
_LANE_BITS = 20
_SPARE_BITS = tl.constexpr(64 - _RECIPROCAL_BITS)
_CUT_BITS = tl.constexpr(_RECIPROCAL_BITS - _LANE_BITS)
_LANE_SHIFT, _LANE_ONE = tl.constexpr(_LANE_BITS), tl.constexpr(1 << _LANE_BITS)
_MAX_LANES = tl.constexpr(1 << _LANE_BITS // 2)


@triton.jit
def scale_pointers(
    scales,
    first_block,
    columns,
    reciprocal,
    SWIZZLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Pointers to the scales of BLOCKS blocks, of rows of `columns`, in either layout.

    first_block: int64. reciprocal: `reciprocal_of(columns)`.
    """
    if SWIZZLED:
        pointers = _swizzled_pointers(scales, first_block, columns, reciprocal, BLOCKS)
    else:
        pointers = scales + first_block + tl.arange(0, BLOCKS)
        if ALIGNED:
            pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def swizzled_index(row, column, across) -> tl.tensor:
    """`swizzle.swizzled_index(row, column, across)`: int64 all, of any shapes that fit."""
    return ((row >> 7) * across + (column >> 2)) * 512 + _place_in_tile(row, column)


@triton.jit
def tile_of(first, across) -> tuple:
    """(Row, column), int64, of the tile that has the scale `first`, of `across` side by side.

    Unsigned, and of 32 bits, a division is a fourth of what it is of 64; tiles, of 8192 elements
    or more, 31 bits can count.
    """
    tile = (first // 512).to(tl.uint32)
    across = across.to(tl.uint32)
    return (tile // across).to(tl.int64), (tile % across).to(tl.int64)


@triton.jit
def places_of(first, tile_row, tile_column, BLOCKS: tl.constexpr) -> tuple:
    """(Rows, columns), int64 [BLOCKS], whose scales lie at `first` and after, in one tile."""
    place = (first % 512).to(tl.int32) + tl.arange(0, BLOCKS)
    row = tile_row * 128 + ((place >> 4) + ((place >> 2) & 3) * 32)
    return row, tile_column * 4 + (place & 3)


@triton.jit
def _place_in_tile(row, column):
    return (row & 31) * 16 + ((row >> 5) & 3) * 4 + (column & 3)


@triton.jit
def _row_and_column(block, width, reciprocal):
    """(block // width, block % width), int64, all three arguments too. See `reciprocal_of`."""
    product = tl.umulhi((block << _SPARE_BITS).to(tl.uint64), reciprocal.to(tl.uint64))
    row = product.to(tl.int64)
    too_far = (block - row * width) >> 63
    row += too_far
    return row, block - row * width


@triton.jit
def _swizzled_pointers(scales, first_block, columns, reciprocal, BLOCKS: tl.constexpr):
    """`swizzle.swizzled_index` by products: a division of 64 bits alone takes 100 instructions.

    A lane is `beyond` rows below the first one's: 1 + (lane - left) // columns, where `left` blocks
    are left in that row, and 0 before. The first row's tile is reached by 64 bits, once; the tiles
    from there on 31 bits can count.
    """
    tl.static_assert(BLOCKS <= _MAX_LANES)
    width = columns.to(tl.int64)
    row, column = _row_and_column(first_block, width, reciprocal)
    left = width - column
    step = ((reciprocal - 1) >> _CUT_BITS) + 1
    begin = _LANE_ONE - left * step
    lanes = tl.arange(0, BLOCKS)
    beyond = (lanes * step.to(tl.int32) + begin.to(tl.int32)) >> _LANE_SHIFT
    beyond = tl.maximum(beyond, 0)
    column = column.to(tl.int32) + lanes - beyond * width.to(tl.int32)
    near = (row & 127).to(tl.int32) + beyond
    across = (width + 3) >> 2
    tile = (near >> 7) * across.to(tl.int32) + (column >> 2)
    tiles = scales + (row >> 7) * (across * 512) + tile.to(tl.int64) * 512
    return tiles + _place_in_tile(near, column)


def reciprocal_of(columns: int) -> int:
    """What makes a product of a division by `columns`.

    With e = reciprocal * columns - 2^62, from 1 to `columns`, n * reciprocal // 2^62 is exactly
    n // columns where n * e < 2^62, and else, for any n of 62 bits, that or one more.
    """
    return (1 << _RECIPROCAL_BITS) // columns + 1
