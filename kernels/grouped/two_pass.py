"""Grouped FP8 on the GPU, and NVFP4's amaxes: a program has TILE_NUMEL elements of one group.

| kernel | for                                                              |
|--------|------------------------------------------------------------------|
| _amax  | FP8, first pass; NVFP4's amaxes: by an atomic maximum             |
| _fp8   | FP8, second pass: codes by the amax of their group, and its scale |

Formulas are those of `reference`. Bytes moved an element of BF16: 5, or 2 for the amaxes alone. A
maximum is the same in any order, so atomics leave nothing to chance.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_table import element_of
from ..fp8.device_codec import inverse_of, scale_of
from ..fp8.reference import BY_DTYPE
from ..launch import is_aligned, launch
from ..nvfp4.device_codec import raise_amax
from ..paths import for_tile, load, store
from ..portable import to_fp32
from .device_groups import group_of, lanes_for
from .reference import most_tiles

TILE_NUMEL = 4096
NUM_WARPS = 4
ROW_MULTIPLE = 16  # elements: rows of codes begin on 16 bytes

_QUIET_NAN = tl.constexpr(0x7FC0_0000)


@triton.jit
def _amax_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    x, amax = arguments[:2]
    KEEP_NAN: tl.constexpr = arguments[2]
    WIDE: tl.constexpr = arguments[3]
    value = to_fp32(load(x, place, FULL, NUMEL, WIDE))
    if KEEP_NAN:
        device.raise_amax(amax, value)
    else:
        raise_amax(amax, value)


@triton.jit(
    do_not_specialize=["num_groups", "rows", "columns"],
    do_not_specialize_on_alignment=["amaxes", "x", "ends"],
)
def _amax_kernel(
    amaxes,
    x,
    ends,
    num_groups,
    rows,
    columns,
    KEEP_NAN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """amaxes[group] = max(amaxes[group], |x|) as FP32 bits; all are NaN if the ends are wrong."""
    columns = columns.to(tl.int64)
    program = tl.program_id(0)
    group, row, count, tile, is_valid = group_of(
        ends, num_groups, rows, program, columns, BLOCK, GROUPS
    )
    if group < num_groups:
        start = tile.to(tl.int64) * BLOCK
        for_tile(
            _amax_part,
            (x + row * columns + start, amaxes + group, KEEP_NAN, ALIGNED),
            count * columns - start,
            ALIGNED,
            BLOCK,
        )
    elif (program == 0) & (is_valid == 0):
        lanes = tl.arange(0, GROUPS)
        nans = tl.full([GROUPS], _QUIET_NAN, tl.int32)
        tl.store(amaxes + lanes, nans, mask=lanes < num_groups)


@triton.jit
def _codes_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    x, codes, factor = arguments[:3]
    ELEMENT: tl.constexpr = arguments[3]
    WIDE: tl.constexpr = arguments[4]
    HARDWARE: tl.constexpr = arguments[5]
    value = to_fp32(load(x, place, FULL, NUMEL, WIDE)) * factor
    store(codes, device.code_of(value, None, ELEMENT, HARDWARE), place, FULL, NUMEL, WIDE)


@triton.jit(
    do_not_specialize=["num_groups", "rows", "columns"],
    do_not_specialize_on_alignment=["codes", "scale_inv", "x", "ends", "amaxes"],
)
def _fp8_kernel(
    codes,
    scale_inv,
    x,
    ends,
    amaxes,
    num_groups,
    rows,
    columns,
    ELEMENT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """BLOCK codes of one group; program 0 stores all inverse scales. amaxes: FP32 bits."""
    columns = columns.to(tl.int64)
    program = tl.program_id(0)
    group, row, count, tile, is_valid = group_of(
        ends, num_groups, rows, program, columns, BLOCK, GROUPS
    )
    if program == 0:
        lanes = tl.arange(0, GROUPS)
        known = tl.load(amaxes + lanes, mask=lanes < num_groups, other=0)
        inverse = inverse_of(scale_of(known.to(tl.float32, bitcast=True), ELEMENT, POWER_OF_2))
        inverse = tl.where(is_valid, inverse, float("nan"))
        tl.store(scale_inv + lanes, inverse, mask=lanes < num_groups)
    one = tl.arange(0, 1)
    known = tl.load(amaxes + group + one, mask=group + one < num_groups, other=0)
    factor = scale_of(known.to(tl.float32, bitcast=True), ELEMENT, POWER_OF_2)
    factor = tl.where(group < num_groups, tl.sum(factor, 0), float("nan"))
    start = tile.to(tl.int64) * BLOCK
    offset = row * columns + start
    for_tile(
        _codes_part,
        (x + offset, codes + offset, factor, ELEMENT, ALIGNED, HARDWARE),
        count * columns - start,
        ALIGNED,
        BLOCK,
    )


def _launch_parts(
    kernel: Any, x: torch.Tensor, ends: torch.Tensor, *given: torch.Tensor, **constants: Any
) -> None:
    """A kernel whose programs have TILE_NUMEL consecutive elements of a group each."""
    rows, columns = x.shape
    tiles = most_tiles(rows, columns, TILE_NUMEL, ends.numel())
    launch(
        kernel,
        max(tiles, 1),
        *given,
        ends.numel(),
        rows,
        columns,
        on=x,
        num_warps=NUM_WARPS,
        BLOCK=TILE_NUMEL,
        GROUPS=lanes_for(ends),
        **constants,
    )


def _raise_amaxes(
    amaxes: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, *, keep_nan: bool, aligned: bool
) -> None:
    """amaxes: int32 zeros [groups], FP32 bits; a NaN counts as 0 unless it is kept."""
    _launch_parts(_amax_kernel, x, ends, amaxes, x, ends, KEEP_NAN=keep_nan, ALIGNED=aligned)


def amax_nvfp4_grouped_(amaxes: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
    """`reference.amax_nvfp4_grouped_`, in one launch after the one that writes zeros."""
    aligned = is_aligned(x) and x.shape[1] % ROW_MULTIPLE == 0
    _raise_amaxes(amaxes.zero_().view(torch.int32), x, ends, keep_nan=False, aligned=aligned)


def quantize_fp8_grouped_(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    power_of_2: bool,
) -> None:
    """`reference.quantize_fp8_grouped_` in two launches after the one that writes zeros."""
    amaxes = torch.zeros(ends.shape, dtype=torch.int32, device=x.device)
    aligned = is_aligned(codes, x) and x.shape[1] % ROW_MULTIPLE == 0
    _raise_amaxes(amaxes, x, ends, keep_nan=True, aligned=aligned)
    _launch_parts(
        _fp8_kernel,
        x,
        ends,
        *(codes.view(torch.uint8), scale_inv, x, ends, amaxes),
        ELEMENT=element_of(BY_DTYPE[codes.dtype]),
        POWER_OF_2=power_of_2,
        ALIGNED=aligned,
    )
