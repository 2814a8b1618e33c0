"""Owns the random Hadamard transform on the GPU: groups of 16 elements, one pass, in one launch.

Formula, order of additions and rounding are those of `reference_hadamard`. Bytes moved: twice those
of an element. Blocks that are full and 16-byte aligned take the unmasked path, 16 bytes an access;
the tail, and rows whose length is no multiple of 16, take the masked one.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.table import wire_format_of
from ..launch import LaunchConfig, is_aligned, launch
from ..portable import covered, round_to, to_fp32
from ..tuned import config_for
from ..wide import aligned_eights, wide_lanes
from .reference_hadamard import GROUP_NUMEL, NORM, SIGNS

_NORM = tl.constexpr(NORM)
_NEGATIVE = tl.constexpr(sum(1 << lane for lane, sign in enumerate(SIGNS) if sign < 0))
BLOCK_NUMEL = 4096
NUM_WARPS = 4


@triton.jit
def _stage(x, GROUPS: tl.constexpr):
    """(a + b, a - b) of neighbours; then the lowest bit of an element's place becomes the highest.

    So three stages are the strides 1, 2 and 4, and leave every element in its place.
    """
    low, high = tl.split(tl.reshape(x, [GROUPS, 4, 2]))
    pairs = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [GROUPS, 8])


@triton.jit
def _factors(lanes):
    # A constant shifted by a tensor stays a constant in the interpreter of Triton 3.7.
    signs = tl.zeros_like(lanes) + _NEGATIVE
    return tl.where(((signs >> lanes) & 1) != 0, -_NORM, _NORM)[None, :]


@triton.jit
def transform_halves(low, high, INVERSE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """`reference_hadamard.hadamard16` of FP32 groups, not yet rounded.

    low, high: [groups, 8], elements 0 to 7 and 8 to 15 of each group. So eight elements lie in one
    thread, and no stage has to move them to another: 29 instructions an element for a fused NVFP4
    cast of BF16, 50 with whole groups.
    """
    GROUPS: tl.constexpr = low.shape[0]
    lanes = tl.arange(0, 8)
    if not INVERSE:
        low, high = low * _factors(lanes), high * _factors(lanes + 8)
    for _ in tl.static_range(3):
        low, high = _stage(low, GROUPS), _stage(high, GROUPS)
    low, high = low + high, low - high
    if INVERSE:
        low, high = low * _factors(lanes), high * _factors(lanes + 8)
    return low, high


@triton.jit
def aligned_halves(source, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """BLOCK elements from aligned memory on, in FP32, as halves of groups, [BLOCK / 16, 8] each."""
    places = tl.arange(0, BLOCK // 16) * 16
    return aligned_eights(source, places), aligned_eights(source, places + 8)


@triton.jit
def masked_halves(source, groups, num_groups, row_groups, row_numel) -> tuple[tl.tensor, ...]:
    """(Halves of these groups in FP32, 0 where no element is; where low ones are; their columns).

    groups: int64 [n]; those from `num_groups` on are not there. Rows have `row_groups` each, of
    which the last may be short.
    """
    columns = (groups % row_groups)[:, None] * 16 + tl.arange(0, 8)[None, :]
    columns = tl.where((groups < num_groups)[:, None], columns, row_numel)
    places = (groups // row_groups)[:, None] * row_numel + columns
    low = tl.load(source + places, mask=columns < row_numel, other=0.0)
    high = tl.load(source + places + 8, mask=columns + 8 < row_numel, other=0.0)
    return to_fp32(low), to_fp32(high), places, columns


@triton.jit
def transform_whole(
    low, high, columns, row_numel, INVERSE: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Halves transformed and rounded to `dtype`, but short groups left as they are."""
    made_low, made_high = transform_halves(low, high, INVERSE)
    is_whole = columns // 16 * 16 + 16 <= row_numel
    low = tl.where(is_whole, to_fp32(round_to(made_low, dtype)), low)
    return low, tl.where(is_whole, to_fp32(round_to(made_high, dtype)), high)


@triton.jit
def joined(low, high) -> tl.tensor:
    """Halves [groups, n] -> [groups * 2 * n], those of a group one after the other."""
    pairs = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(pairs, [2 * low.shape[0] * low.shape[1]])


@triton.jit
def _transform_full_block(source, destination, INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    low, high = aligned_halves(source, BLOCK)
    low, high = transform_halves(low, high, INVERSE)
    dtype: tl.constexpr = destination.dtype.element_ty
    made = joined(round_to(low, dtype), round_to(high, dtype))
    tl.store(tl.multiple_of(destination + wide_lanes(BLOCK), 16), made)


@triton.jit
def _transform_masked_groups(
    source,
    destination,
    first_group,
    num_groups,
    row_groups,
    row_numel,
    INVERSE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """In four pieces, whose other shape keeps the compiler from giving both paths one layout."""
    dtype: tl.constexpr = destination.dtype.element_ty
    for first in range(0, covered(num_groups - first_group, GROUPS), GROUPS // 4):
        groups = first_group + first + tl.arange(0, GROUPS // 4)
        low, high, places, columns = masked_halves(
            source, groups, num_groups, row_groups, row_numel
        )
        low, high = transform_whole(low, high, columns, row_numel, INVERSE, dtype)
        tl.store(destination + places, round_to(low, dtype), mask=columns < row_numel)
        tl.store(destination + places + 8, round_to(high, dtype), mask=columns + 8 < row_numel)


@triton.jit(
    do_not_specialize=["num_groups", "row_groups", "row_numel"],
    do_not_specialize_on_alignment=["source", "destination"],
)
def _hadamard_kernel(
    source,
    destination,
    num_groups,
    row_groups,
    row_numel,
    INVERSE: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK / 16 groups of rows that have `row_groups` each.

    Example: rows of 20 elements have 2 groups, so group 5 is the second of row 2: elements 56 to
    59, which are fewer than 16 and so copied.
    """
    GROUPS: tl.constexpr = BLOCK // 16
    first_group = tl.program_id(0).to(tl.int64) * GROUPS
    start = first_group * 16
    if FLAT and start + BLOCK <= row_numel:
        _transform_full_block(source + start, destination + start, INVERSE, BLOCK)
    else:
        _transform_masked_groups(
            source, destination, first_group, num_groups, row_groups, row_numel, INVERSE, GROUPS
        )


@functools.cache
def default_config(element_bytes: int) -> LaunchConfig:
    """The block is of the source."""
    return LaunchConfig(BLOCK_NUMEL * element_bytes, NUM_WARPS)


def hadamard16_(out: torch.Tensor, x: torch.Tensor, inverse: bool = False) -> None:
    """`reference_hadamard.hadamard16_` in one launch."""
    rows, row_numel = shape_in_rows(x)
    if x.numel() == 0:
        return
    row_groups = triton.cdiv(row_numel, GROUP_NUMEL)
    num_groups = rows * row_groups
    default = default_config(x.element_size())
    config = config_for("hadamard16_", wire_format_of(x.dtype).name, default, x.device)
    block = config.block_bytes // x.element_size()
    launch(
        _hadamard_kernel,
        triton.cdiv(num_groups, block // GROUP_NUMEL),
        x,
        out,
        num_groups,
        row_groups,
        row_numel,
        on=x,
        num_warps=config.num_warps,
        INVERSE=inverse,
        FLAT=rows == 1 and is_aligned(x, out),
        BLOCK=block,
    )


def shape_in_rows(x: torch.Tensor) -> tuple[int, int]:
    """(rows, elements a row) of the contiguous `x`: one row where that makes the same groups."""
    row_numel = x.shape[-1] if x.dim() else 1
    if x.numel() == 0 or row_numel % GROUP_NUMEL == 0:
        return 1, x.numel()
    return x.numel() // row_numel, row_numel
