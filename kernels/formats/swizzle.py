"""The 128x4 swizzled layout of block scales, which `torch._scaled_mm` and tensor cores read.

A matrix of one-byte scales, a row of blocks a row, padded with zeros to 128 rows and 4 columns, is
cut into tiles of 128 x 4 bytes, which follow each other row by row. In a tile, with r the row and
c the column there:

    position = (r % 32) * 16 + (r // 32) * 4 + c

| position  | 0   | 1   | 2   | 3   | 4    | ... | 12   | 15   | 16  | ... | 511    |
|-----------|-----|-----|-----|-----|------|-----|------|------|-----|-----|--------|
| r, c      | 0,0 | 0,1 | 0,2 | 0,3 | 32,0 | ... | 96,0 | 96,3 | 1,0 | ... | 127,3  |

So a warp reads one 16-byte line a lane and has the scales of rows r, r + 32, r + 64 and r + 96.
The other way: r = position // 16 + (position // 4 % 4) * 32, c = position % 4.
Source: cuBLAS, "1D Block Scaling Factors Layout"; the same for blocks of 32 (MX) and 16 (NVFP4).
"""

from __future__ import annotations

from typing import TypeVar

import torch

from ..checks import check_integer, check_tensor

TILE_ROWS = 128
TILE_COLUMNS = 4
TILE_NUMEL = TILE_ROWS * TILE_COLUMNS

Index = TypeVar("Index", int, torch.Tensor)


def tiles_across(columns: int) -> int:
    """Tiles side by side that `columns` scales a row need."""
    return -(-columns // TILE_COLUMNS)


def swizzled_numel(rows: int, columns: int) -> int:
    """Bytes of the swizzled scales of a [rows, columns] matrix, padding included."""
    return -(-rows // TILE_ROWS) * tiles_across(columns) * TILE_NUMEL


def swizzled_index(row: Index, column: Index, across: int) -> Index:
    """Where the scale at (row, column) lies; `across` is `tiles_across` of the matrix.

    Example: row 37, column 6, across 2: tile 0 * 2 + 1, so 512; row 37 of it is 5 of the second
    32, so 5 * 16 + 1 * 4; column 6 of the matrix is 2 of the tile: 512 + 80 + 4 + 2 = 598.
    """
    tile = (row >> 7) * across + (column >> 2)
    return tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (column & 3)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """One-byte `scales` [..., columns] -> the swizzled layout, 1-D, of their dtype.

    All dimensions before the last are rows; the padding is zeros, byte 0 whatever the dtype.
    """
    _check_bytes("scales", scales)
    if scales.dim() == 0:
        raise ValueError("scales: expected [..., columns], got a scalar; give it a dimension")
    matrix = scales.view(torch.uint8).reshape(scales.shape[:-1].numel(), scales.shape[-1])
    rows, columns = matrix.shape
    numel = swizzled_numel(rows, columns)
    swizzled = torch.zeros(numel, dtype=torch.uint8, device=scales.device)
    swizzled[_indices(rows, columns, scales.device)] = matrix
    return swizzled.view(scales.dtype)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The [rows, columns] scales from 1-D `swizzled`: the inverse of `swizzle_scales`.

    Raises `ValueError` when `swizzled` has not `swizzled_numel(rows, columns)` bytes.
    """
    _check_bytes("swizzled", swizzled)
    rows, columns = check_integer("rows", rows, 0), check_integer("columns", columns, 0)
    check_swizzled_numel("swizzled", swizzled, rows, columns)
    matrix = swizzled.view(torch.uint8)[_indices(rows, columns, swizzled.device)]
    return matrix.view(swizzled.dtype)


def check_swizzled_numel(name: str, swizzled: torch.Tensor, rows: int, columns: int) -> None:
    """Raise `ValueError` unless `swizzled` is the 1-D layout of [rows, columns] scales."""
    expected = swizzled_numel(rows, columns)
    if tuple(swizzled.shape) != (expected,) or not swizzled.is_contiguous():
        raise ValueError(
            f"{name}: expected {expected} contiguous elements, the swizzled scales of {rows} rows "
            f"of {columns} blocks, got shape {tuple(swizzled.shape)} with strides "
            f"{swizzled.stride()}; pass what `swizzle_scales` returns"
        )


def _indices(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    row = torch.arange(rows, device=device).unsqueeze(1)
    return swizzled_index(row, torch.arange(columns, device=device), tiles_across(columns))


def _check_bytes(name: str, scales: torch.Tensor) -> None:
    check_tensor(name, scales)
    if scales.element_size() != 1 or scales.is_quantized:
        raise ValueError(
            f"{name}: expected a dtype of one byte, got {scales.dtype}; scales are E8M0 or E4M3"
        )
