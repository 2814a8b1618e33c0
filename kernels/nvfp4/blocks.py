"""Owns how NVFP4's kernels cut tensors, and what they do with blocks: `reference` exactly.

Blocks come as halves of eight elements, as `hadamard` makes them: then a thread has a block's
elements, its amax and its scale, and none of them is found twice.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.table import E2M1, E4M3, FP32
from ..portable import INTERPRETED, round_to, to_fp32
from . import reference
from .hadamard import (
    aligned_halves,
    masked_halves,
    shape_in_rows,
    transform_halves,
    transform_whole,
)
from .reference import BLOCK_NUMEL

_MAX_FP32 = tl.constexpr(FP32.max_finite)
_MAX_PRODUCT = tl.constexpr(reference.MAX_PRODUCT)
_ONE_OVER_PRODUCT = tl.constexpr(1.0 / reference.MAX_PRODUCT)
_LEAST_AMAX = tl.constexpr(reference.MAX_PRODUCT / FP32.max_finite)
_LARGE_AMAX = tl.constexpr(reference.LARGE_AMAX)
_DOWN, _UP = tl.constexpr(reference.DOWN), tl.constexpr(reference.UP)
_MAX_E2M1, _MAX_E4M3 = tl.constexpr(E2M1.max_finite), tl.constexpr(E4M3.max_finite)
_ONE_SIXTH = tl.constexpr(1.0 / E2M1.max_finite)
_TORCHAO_MIN_SCALE = tl.constexpr(reference.TORCHAO_MIN_SCALE)
_TORCHAO_MIN_TENSOR_SCALE = tl.constexpr(reference.TORCHAO_MIN_TENSOR_SCALE)

# Of a reciprocal of 62 bits an int64 has room for 1's own; of 20 an int32, times a lane.
_RECIPROCAL_BITS = 62
_LANE_BITS = 20
_SPARE_BITS = tl.constexpr(64 - _RECIPROCAL_BITS)
_CUT_BITS = tl.constexpr(_RECIPROCAL_BITS - _LANE_BITS)
_LANE_SHIFT, _LANE_ONE = tl.constexpr(_LANE_BITS), tl.constexpr(1 << _LANE_BITS)
_MAX_LANES = tl.constexpr(1 << _LANE_BITS // 2)


@triton.jit
def _is_usable(amax):
    return (amax > 0.0) & (amax < float("inf"))


@triton.jit
def tensor_scale_of(amax, TORCHAO: tl.constexpr) -> tl.tensor:
    """FP32 scalar: torchao's P, else E."""
    if TORCHAO:
        scale = tl.div_rn(amax, tl.full((), _MAX_PRODUCT, tl.float32))
        scale = tl.maximum(scale, _TORCHAO_MIN_TENSOR_SCALE)
    else:
        scale = tl.div_rn(tl.full((), _MAX_PRODUCT, tl.float32), amax)
        scale = tl.minimum(scale, _MAX_FP32)
    return tl.where(_is_usable(amax), scale, 1.0)


@triton.jit
def _block_scales(block_amax, tensor_scale, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr):
    """(scale bytes, FP32 factors of the elements), for amax >= 0 without NaN."""
    one = tl.full((), 1.0, tl.float32)
    if TORCHAO:
        wanted = tl.div_rn(block_amax, tl.full(block_amax.shape, _MAX_E2M1, tl.float32))
        wanted = tl.div_rn(wanted, tensor_scale + tl.zeros_like(wanted))
        wanted = tl.minimum(tl.maximum(wanted, _TORCHAO_MIN_SCALE), _MAX_E4M3)
        scale_bytes = device.encode_e4m3(wanted, HARDWARE)
        encode = tl.div_rn(one, tensor_scale)
        decoded = device.decode_e4m3(scale_bytes, HARDWARE)
        factors = tl.div_rn(encode + tl.zeros_like(decoded), decoded)
    else:
        scale_bytes = device.encode_e4m3(block_amax * (tensor_scale * _ONE_SIXTH), HARDWARE)
        decoded = device.decode_e4m3(scale_bytes, HARDWARE) * tl.div_rn(one, tensor_scale)
        factors = tl.div_rn(tl.full(decoded.shape, 1.0, tl.float32), decoded)
    return scale_bytes, tl.minimum(factors, _MAX_FP32)


@triton.jit
def decode_factors(scale_bytes, amax, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """What the blocks' elements are multiplied by."""
    if TORCHAO:
        return device.decode_e4m3(scale_bytes, HARDWARE) * tensor_scale_of(amax, True)
    is_large = amax > _LARGE_AMAX
    usable = _is_usable(amax)
    multiplier = tl.maximum(amax, _LEAST_AMAX)
    multiplier = tl.where(is_large, multiplier * _DOWN, multiplier)
    multiplier = tl.where(usable, multiplier, 1.0)
    divisor = tl.where(is_large, _ONE_OVER_PRODUCT * _UP, _ONE_OVER_PRODUCT)
    divisor = tl.where(usable, divisor, 1.0)
    return (device.decode_e4m3(scale_bytes, HARDWARE) * multiplier) * divisor


@triton.jit
def magnitudes(x) -> tl.tensor:
    """|x|; where Triton interprets, 0 for a NaN, as its maxima would keep it."""
    if INTERPRETED:
        x = tl.where(x == x, x, 0.0)
    return tl.abs(x)


@triton.jit
def largest_of(magnitude, axis: tl.constexpr) -> tl.tensor:
    """The maximum of `magnitudes`. Compiled maxima prefer a number: only all NaNs make one."""
    largest = tl.max(magnitude, axis)
    return tl.where(largest == largest, largest, 0.0)


@triton.jit
def scaled_halves(
    low, high, tensor_scale, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """FP32 [blocks, 8] twice -> (both as they are to be encoded, scale bytes [blocks])."""
    largest = largest_of(tl.maximum(magnitudes(low), magnitudes(high)), 1)
    scale_bytes, factors = _block_scales(largest, tensor_scale, TORCHAO, HARDWARE)
    return low * factors[:, None], high * factors[:, None], scale_bytes


@triton.jit
def full_halves(source, HADAMARD: tl.constexpr, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """TILE elements from aligned memory as halves of blocks in FP32, transformed with HADAMARD."""
    low, high = aligned_halves(source, TILE)
    if HADAMARD:
        dtype: tl.constexpr = source.dtype.element_ty
        low, high = transform_halves(low, high, False)
        low, high = to_fp32(round_to(low, dtype)), to_fp32(round_to(high, dtype))
    return low, high


@triton.jit
def prepared_halves(
    source, blocks, num_blocks, row_blocks, row_numel, HADAMARD: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """`hadamard.masked_halves`, transformed with HADAMARD, and where the low ones lie."""
    low, high, places, columns = masked_halves(source, blocks, num_blocks, row_blocks, row_numel)
    if HADAMARD:
        dtype: tl.constexpr = source.dtype.element_ty
        low, high = transform_whole(low, high, columns, row_numel, False, dtype)
    return low, high, places


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
    return tiles + ((near & 31) * 16 + ((near >> 5) & 3) * 4 + (column & 3))


def reciprocal_of(columns: int) -> int:
    """What makes a product of a division by `columns`.

    With e = reciprocal * columns - 2^62, from 1 to `columns`, n * reciprocal // 2^62 is exactly
    n // columns where n * e < 2^62, and else, for any n of 62 bits, that or one more.
    """
    return (1 << _RECIPROCAL_BITS) // columns + 1


@dataclass(frozen=True, slots=True)
class Cut:
    """How the elements of a contiguous tensor fall into rows, blocks and tiles."""

    num_blocks: int
    row_blocks: int
    row_numel: int
    num_tiles: int
    is_flat: bool


def cut_of(x: torch.Tensor, tile_numel: int) -> Cut:
    """How programs of `tile_numel` elements share the contiguous `x`; one row where that may be."""
    rows, row_numel = shape_in_rows(x)
    row_blocks = triton.cdiv(row_numel, BLOCK_NUMEL)
    num_blocks = rows * row_blocks
    num_tiles = triton.cdiv(num_blocks, tile_numel // BLOCK_NUMEL)
    return Cut(num_blocks, row_blocks, row_numel, num_tiles, rows == 1)
