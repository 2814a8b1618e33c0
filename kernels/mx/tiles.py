"""Owns how MX kernels cut a tensor: which blocks a program has, and where all that is theirs lies.

Scales are counted as they lie: a program has TILE_BLOCKS consecutive ones, from `first` on, and
the blocks they belong to. Plain scales make those consecutive blocks of the tensor; swizzled ones a
quarter of a 128x4 tile, rows r to r + 7, and the same of the three further groups of 32 rows, in
four columns, so that a program stores one piece of scales, padding included.

A tensor of `rows` rows of `row_numel` elements; `width` is the blocks of a row, or the tiles across
that swizzled ones need. Rows of whole blocks with plain scales are taken as rows of one block.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats import swizzle
from ..launch import LaunchConfig, is_aligned
from .reference import BLOCK_NUMEL, row_blocks

# Sixteen bytes of MXFP4's codes a thread: a block each of 32 threads * 4 warps.
TILE_BLOCKS = 128
NUM_WARPS = 4

_SCALE_TILE = tl.constexpr(swizzle.TILE_NUMEL)


@triton.jit
def aligned_pointers(base, places, BLOCK: tl.constexpr) -> tl.tensor:
    """Pointers [blocks, BLOCK] to BLOCK elements from each place on, 16-byte aligned all of them.

    The hint must sit on the sum it is about.
    """
    return tl.multiple_of(base + (places[:, None] + tl.arange(0, BLOCK)[None, :]), [1, 16])


@triton.jit
def _tile_of(first, width):
    """(Row, column), int64, of the swizzled tile that has the scale `first`; unsigned is faster."""
    tile = (first // _SCALE_TILE).to(tl.uint32)
    across = width.to(tl.uint32)
    return (tile // across).to(tl.int64), (tile % across).to(tl.int64)


@triton.jit
def block_places(
    first, width, SWIZZLED: tl.constexpr, BLOCKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(Rows, columns), int64 [BLOCKS], of the blocks whose scales lie at `first` and after.

    width: blocks a row, int32, or swizzled tiles across. 64 bits are divided once a program, not
    once a block; the tiles, of 16384 elements, 31 bits can count.
    """
    lanes = tl.arange(0, BLOCKS)
    if SWIZZLED:
        tile_row, tile_column = _tile_of(first, width)
        place = (first % _SCALE_TILE).to(tl.int32) + lanes
        row = tile_row * 128 + ((place >> 4) + ((place >> 2) & 3) * 32)
        column = tile_column * 4 + (place & 3)
    else:
        beyond = (first % width).to(tl.int32) + lanes
        row = first // width + beyond // width
        column = beyond % width
    return row, column.to(tl.int64)


@triton.jit
def block_starts(
    first, row_numel, width, SWIZZLED: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Where the blocks of a full tile begin in the tensor, int64 [BLOCKS]."""
    if SWIZZLED:
        row, column = block_places(first, width, SWIZZLED, BLOCKS)
        return row * row_numel + column * 32
    return first * 32 + tl.arange(0, BLOCKS) * 32


@triton.jit
def code_places(row, column, row_numel, ELEMENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(Where the blocks' codes lie, which there are): of e2m1's bytes, 16 a block, else 32."""
    if ELEMENT == "e2m1":
        at = (column * 16)[:, None] + tl.arange(0, 16)[None, :]
        row_bytes = (row_numel + 1) // 2
    else:
        at = (column * 32)[:, None] + tl.arange(0, 32)[None, :]
        row_bytes = row_numel
    return row[:, None] * row_bytes + at, at < row_bytes


@triton.jit
def is_full_tile(
    first, rows, row_numel, width, SWIZZLED: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Whether all of the program's blocks exist. Rows must be whole blocks, or it says nothing."""
    if SWIZZLED:
        tile_row, tile_column = _tile_of(first, width)
        return ((tile_row + 1) * 128 <= rows) & ((tile_column + 1) * 128 <= row_numel)
    return first + BLOCKS <= rows * width


@functools.cache
def default_config() -> LaunchConfig:
    """An element counts as a byte; the block follows from the scales, so only warps may differ."""
    return LaunchConfig(TILE_BLOCKS * BLOCK_NUMEL, NUM_WARPS)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a tensor is cut into programs, and which paths they take."""

    programs: int
    rows: int
    row_numel: int
    width: int
    full: bool
    masked: bool


def plan_launch(tensors: Sequence[torch.Tensor], shape: torch.Size, swizzled: bool) -> Launch:
    """For a tensor [..., K] of `shape`; all of `tensors` must be aligned for full tiles."""
    rows, row_numel = shape[:-1].numel(), shape[-1]
    if row_numel % BLOCK_NUMEL == 0 and not swizzled:
        rows, row_numel = rows * (row_numel // BLOCK_NUMEL), BLOCK_NUMEL
    columns = row_blocks(row_numel)
    num_blocks = swizzle.swizzled_numel(rows, columns) if swizzled else rows * columns
    full = is_aligned(*tensors) and row_numel % BLOCK_NUMEL == 0
    if swizzled:
        no_tail = rows % swizzle.TILE_ROWS == 0 and columns % swizzle.TILE_COLUMNS == 0
    else:
        no_tail = num_blocks % TILE_BLOCKS == 0
    return Launch(
        programs=triton.cdiv(num_blocks, TILE_BLOCKS),
        rows=rows,
        row_numel=row_numel,
        width=swizzle.tiles_across(columns) if swizzled else columns,
        full=full,
        masked=not (full and no_tail),
    )
