"""MXFP8 and MXFP4 on the GPU: codes and scales of a tensor in one launch, and the way back.

Formulas and rounding are those of `reference`. Bytes moved an element, BF16 in or out: 3.03 for
MXFP8, 2.53 for MXFP4; swizzled scales are written and read in place, padding included, at no more.
Full tiles take the unmasked path, 16 bytes an access; the tail, unaligned memory and rows whose
length is no multiple of 32 take the masked one.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_e2m1 import bytes_of, packed_e2m1
from ..formats.noise import GROUP_NUMEL
from ..launch import launch
from ..portable import INTERPRETED, round_to, to_fp32
from ..tuned import config_for
from ..wide import aligned_blocks
from .tiles import (
    TILE_BLOCKS,
    aligned_pointers,
    block_places,
    block_starts,
    code_places,
    default_config,
    is_full_tile,
    plan_launch,
)

# A masked tile's other shape keeps the compiler from giving both paths one layout. To Triton's
# interpreter a layout is nothing, and a piece as much work as a tile.
PIECES = tl.constexpr(1 if INTERPRETED else 4)


@triton.jit
def encoded(x, bits, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """FP32 [n, m] as it is stored, stochastically if there are `bits`, of noise, else to nearest.

    Codes, one a byte; of e2m1 words of eight codes, uint32 [n, m / 8].
    """
    if ELEMENT == "e2m1":
        return packed_e2m1(x, bits)
    elif bits is None:
        return device.encode(x, ELEMENT, HARDWARE)
    else:
        return device.encode_stochastic(x, bits, ELEMENT)


@triton.jit
def scaled_blocks(x, ELEMENT: tl.constexpr, RULE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """FP32 [blocks, 32] -> (what is to be encoded, the scale bytes [blocks])."""
    scale_bytes = device.scale_byte(device.amax(x, 1), ELEMENT, RULE)
    return x * device.reciprocal_e8m0(scale_bytes)[:, None], scale_bytes


@triton.jit
def _quantize_full_tile(
    source,
    data,
    scales,
    starts,
    seed,
    first_index,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Blocks whose elements begin at `starts`; `scales` points at the first one's."""
    x, scale_bytes = scaled_blocks(aligned_blocks(source, starts, 32), ELEMENT, RULE)
    tl.store(tl.multiple_of(scales + tl.arange(0, BLOCKS), 16), scale_bytes)
    bits = None
    if seed is not None:
        groups = ((first_index + starts) >> 4)[:, None] + tl.arange(0, 2)[None, :]
        bits = device.noise_of_groups(seed, tl.reshape(groups, [2 * BLOCKS]))
        bits = tl.reshape(bits, [BLOCKS, 32])
    made = encoded(x, bits, ELEMENT, HARDWARE)
    if ELEMENT == "e2m1":
        words = data.to(tl.pointer_type(tl.uint32), bitcast=True)
        tl.store(aligned_pointers(words, starts >> 3, 4), made)
    else:
        tl.store(aligned_pointers(data, starts, 32), made)


@triton.jit
def _quantize_masked_piece(
    source,
    data,
    scales,
    first,
    rows,
    row_numel,
    width,
    seed,
    first_index,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, column = block_places(first, width, SWIZZLED, BLOCKS)
    begins = row < rows
    at = (column * 32)[:, None] + tl.arange(0, 32)[None, :]
    exists = begins[:, None] & (at < row_numel)
    index = row[:, None] * row_numel + at
    x = to_fp32(tl.load(source + index, mask=exists, other=0.0))
    x, scale_bytes = scaled_blocks(x, ELEMENT, RULE)
    bits = None
    if seed is not None:
        bits = device.noise_of(seed, first_index + index)
    # A NaN's block has NaNs in the place of what does not exist.
    code = encoded(tl.where(exists, x, 0.0), bits, ELEMENT, HARDWARE)
    if ELEMENT == "e2m1":
        code = bytes_of(code)
    places, in_row = code_places(row, column, row_numel, ELEMENT)
    tl.store(data + places, code, mask=begins[:, None] & in_row)
    scales_at = scales + first + tl.arange(0, BLOCKS)
    if SWIZZLED:
        # The padding is written as well: the amax of nothing, and so its byte, is 0.
        tl.store(scales_at, scale_bytes)
    else:
        tl.store(scales_at, scale_bytes, mask=begins)


@triton.jit(
    do_not_specialize=["rows", "row_numel", "width", "seed", "first_index"],
    do_not_specialize_on_alignment=["source", "data", "scales"],
)
def _quantize_kernel(
    source,
    data,
    scales,
    rows,
    row_numel,
    width,
    seed,
    first_index,
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS consecutive scales, and the codes of their blocks; FULL and MASKED: paths it needs.

    Example: rows of 40 elements have 2 blocks, so block 5 is the second of row 2: elements 112 to
    119, scale 5, or, swizzled, scale 2 * 16 + 1.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    rows = rows.to(tl.int64)
    row_numel = row_numel.to(tl.int64)
    tl.assume(row_numel >= 0)
    first_index = first_index.to(tl.int64)
    is_full = FULL
    if FULL and MASKED:
        is_full = is_full_tile(first, rows, row_numel, width, SWIZZLED, BLOCKS)
    if is_full:
        _quantize_full_tile(
            source,
            data,
            scales + first,
            block_starts(first, row_numel, width, SWIZZLED, BLOCKS),
            seed,
            first_index,
            ELEMENT,
            RULE,
            HARDWARE,
            BLOCKS,
        )
    elif MASKED:
        for piece in range(0, BLOCKS, BLOCKS // PIECES):
            _quantize_masked_piece(
                source,
                data,
                scales,
                first + piece,
                rows,
                row_numel,
                width,
                seed,
                first_index,
                ELEMENT,
                RULE,
                HARDWARE,
                SWIZZLED,
                BLOCKS // PIECES,
            )


@triton.jit
def _dequantize_full_tile(
    out,
    data,
    scales,
    starts,
    ELEMENT: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    if ELEMENT == "e2m1":
        code = device.unpack_nibbles(tl.load(aligned_pointers(data, starts >> 1, 16)))
    else:
        code = tl.load(aligned_pointers(data, starts, 32))
    scale = device.decode_e8m0(tl.load(tl.multiple_of(scales + tl.arange(0, BLOCKS), 16)))
    value = device.decode(code, ELEMENT, HARDWARE) * scale[:, None]
    tl.store(aligned_pointers(out, starts, 32), round_to(value, out.dtype.element_ty))


@triton.jit
def _dequantize_masked_piece(
    out,
    data,
    scales,
    first,
    rows,
    row_numel,
    width,
    ELEMENT: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, column = block_places(first, width, SWIZZLED, BLOCKS)
    begins = (row < rows) & (column * 32 < row_numel)
    places, in_row = code_places(row, column, row_numel, ELEMENT)
    code = tl.load(data + places, mask=begins[:, None] & in_row, other=0)
    if ELEMENT == "e2m1":
        code = device.unpack_nibbles(code)
    scale = tl.load(scales + first + tl.arange(0, BLOCKS), mask=begins, other=0)
    value = device.decode(code, ELEMENT, HARDWARE) * device.decode_e8m0(scale)[:, None]
    at = (column * 32)[:, None] + tl.arange(0, 32)[None, :]
    exists = begins[:, None] & (at < row_numel)
    index = row[:, None] * row_numel + at
    tl.store(out + index, round_to(value, out.dtype.element_ty), mask=exists)


@triton.jit(
    do_not_specialize=["rows", "row_numel", "width"],
    do_not_specialize_on_alignment=["out", "data", "scales"],
)
def _dequantize_kernel(
    out,
    data,
    scales,
    rows,
    row_numel,
    width,
    ELEMENT: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The blocks of BLOCKS consecutive scales, as `_quantize_kernel` has them."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    rows = rows.to(tl.int64)
    row_numel = row_numel.to(tl.int64)
    is_full = FULL
    if FULL and MASKED:
        is_full = is_full_tile(first, rows, row_numel, width, SWIZZLED, BLOCKS)
    if is_full:
        starts = block_starts(first, row_numel, width, SWIZZLED, BLOCKS)
        _dequantize_full_tile(out, data, scales + first, starts, ELEMENT, HARDWARE, BLOCKS)
    elif MASKED:
        for piece in range(0, BLOCKS, BLOCKS // PIECES):
            _dequantize_masked_piece(
                out,
                data,
                scales,
                first + piece,
                rows,
                row_numel,
                width,
                ELEMENT,
                HARDWARE,
                SWIZZLED,
                BLOCKS // PIECES,
            )


def quantize_mx_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    element: str,
    rule: str,
    seed: int | None = None,
    first_index: int = 0,
    swizzled: bool = False,
) -> None:
    """`reference.quantize_mx_` in one launch."""
    plan = plan_launch((data, scales, x), x.shape, swizzled)
    if plan.programs == 0:
        return
    stochastic = seed is not None
    # Noise is drawn for 16 elements at once, from a multiple of 16 on.
    full = plan.full and not (stochastic and first_index % GROUP_NUMEL)
    case = element + " stochastic" * stochastic + " swizzled" * swizzled
    config = config_for("quantize_mx_", case, default_config(), x.device)
    launch(
        _quantize_kernel,
        plan.programs,
        x,
        data.view(torch.uint8),
        scales.view(torch.uint8),
        plan.rows,
        plan.row_numel,
        plan.width,
        seed,
        first_index,
        on=x,
        num_warps=config.num_warps,
        ELEMENT=element,
        RULE=rule,
        SWIZZLED=swizzled,
        FULL=full,
        MASKED=plan.masked or not full,
        BLOCKS=TILE_BLOCKS,
    )


def dequantize_mx_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    element: str,
    swizzled: bool = False,
) -> None:
    """`reference.dequantize_mx_` in one launch."""
    plan = plan_launch((out, data, scales), out.shape, swizzled)
    if plan.programs == 0:
        return
    case = element + " swizzled" * swizzled
    config = config_for("dequantize_mx_", case, default_config(), out.device)
    launch(
        _dequantize_kernel,
        plan.programs,
        out,
        data.view(torch.uint8),
        scales.view(torch.uint8),
        plan.rows,
        plan.row_numel,
        plan.width,
        on=out,
        num_warps=config.num_warps,
        ELEMENT=element,
        SWIZZLED=swizzled,
        FULL=plan.full,
        MASKED=plan.masked,
        BLOCKS=TILE_BLOCKS,
    )
