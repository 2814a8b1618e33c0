"""The definition of grouped casts in plain PyTorch: the GPU kernels' oracle, and the CPU path.

Group i has the rows from where group i - 1 ends, or 0, to `ends[i]`. What is made of it is, bit for
bit, what the single cast makes of these rows; the noise of an element is that of its index in the
whole matrix. The rows from the last end on belong to no group.

    scales of a group     one FP32 a group: FP8's inverse scale, NVFP4's amax
    scales of blocks      the swizzled layout of each group's own scales, padded to 128 rows, group
                          after group: what `torch.nn.functional.scaled_grouped_mm` reads

What belongs to no group is NaN: the codes of its rows, and all block scales behind the last
group's. Where the ends are not in order, or one lies beyond the rows, nothing belongs to a group,
and the scales of groups are NaN too: a device cannot raise, so what is decoded shows it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from ..formats import swizzle
from ..formats.table import BITS_PER_BYTE, ELEMENTS, NVFP4, BlockFormat, ElementFormat
from ..fp8 import reference as fp8
from ..mx import reference as mx
from ..nvfp4 import reference as nvfp4


def quantize_fp8_grouped_(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    power_of_2: bool,
) -> None:
    """Fill `codes` [rows, K] and `scale_inv` [groups]: scaling "tensor" of each group."""
    codes.view(torch.uint8).fill_(nan_byte(fp8.BY_DTYPE[codes.dtype]))
    scale_inv.fill_(math.nan)
    for index, rows in enumerate(groups_of(ends, len(x))):
        if x[rows].numel():
            fp8.quantize_fp8_(
                codes[rows], scale_inv[index], x[rows], "tensor", power_of_2, None, None
            )
        else:
            scale_inv[index] = 1.0


def amax_nvfp4_grouped_(amaxes: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
    """Fill `amaxes` [groups] with the largest magnitude of each, NaNs left out."""
    amaxes.fill_(math.nan)
    for index, rows in enumerate(groups_of(ends, len(x))):
        if x[rows].numel():
            nvfp4.amax_nvfp4_(amaxes[index], x[rows])
        else:
            amaxes[index] = 0.0


def quantize_mx_grouped_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    element: str,
    rule: str,
    seed: int | None = None,
    first_index: int = 0,
) -> None:
    """Fill `data` [rows, bytes of K codes] and the swizzled `scales`."""
    form = mx.form_of(ELEMENTS[element])
    for rows, place, _ in _parts_of(data, scales, x, ends, form):
        index = first_index + rows.start * x.shape[1]
        mx.quantize_mx_(data[rows], scales[place], x[rows], element, rule, seed, index, True)


def quantize_nvfp4_grouped_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    amaxes: torch.Tensor,
    seed: int | None = None,
    first_index: int = 0,
) -> None:
    """Fill `data` [rows, ceil(K / 2)] and the swizzled `scales`; amaxes: FP32 [groups]."""
    for rows, place, group in _parts_of(data, scales, x, ends, NVFP4):
        index = first_index + rows.start * x.shape[1]
        nvfp4.quantize_nvfp4_(
            data[rows], scales[place], x[rows], amaxes[group], seed, index, swizzled=True
        )


def groups_of(ends: torch.Tensor, num_rows: int) -> list[slice]:
    """The rows of every group; none where the ends are out of order or pass the rows."""
    bounds = [0, *ends.tolist()]
    if bounds[-1] > num_rows or any(start > end for start, end in pairwise(bounds)):
        return []
    return [slice(*pair) for pair in pairwise(bounds)]


def most_tiles(rows: int, row_size: int, tile: int, num_groups: int) -> int:
    """The most tiles that groups, and the rows that are in none, can need, each having its own.

    A row has `row_size` units, a tile `tile` of them.
    """
    return (rows * row_size + (tile - 1) * min(num_groups + 1, rows)) // tile


def scales_numel(rows: int, num_blocks: int, num_groups: int) -> int:
    """Swizzled scales of rows of so many blocks, however they are grouped."""
    tiles = most_tiles(rows, 1, swizzle.TILE_ROWS, num_groups)
    return tiles * swizzle.tiles_across(num_blocks) * swizzle.TILE_NUMEL


def nan_byte(element: ElementFormat) -> int:
    """A byte of the codes of NaN, or of what stands for it."""
    code = element.max_code if element.nan_code is None else element.nan_code
    return sum(code << shift for shift in range(0, BITS_PER_BYTE, element.stored_bits))


def nan_scale(form: BlockFormat) -> int:
    """The byte of a block's scale that is NaN."""
    code = next(one.nan_code for one in ELEMENTS.values() if one.dtype is form.scale_dtype)
    assert code is not None
    return code


def _parts_of(
    data: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, form: BlockFormat
) -> list[tuple[slice, slice, int]]:
    """(Rows, where its scales lie, index) of every group that has rows; all is made NaN first."""
    data.view(torch.uint8).fill_(nan_byte(form.element))
    scales.view(torch.uint8).fill_(nan_scale(form))
    found, at = [], 0
    for index, rows in enumerate(groups_of(ends, len(x))):
        numel = swizzle.swizzled_numel(rows.stop - rows.start, form.num_blocks(x.shape[1]))
        if numel:
            found.append((rows, slice(at, at + numel), index))
        at += numel
    return found
