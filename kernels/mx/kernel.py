"""MXFP8 and MXFP4 on the GPU: codes and scales of a tensor in one launch, and the way back.

Formulas and rounding are those of `reference`. Bytes moved an element, BF16 in or out: 3.03 for
MXFP8, 2.53 for MXFP4; swizzled scales are written and read in place, padding included, at no more.
Full tiles take the unmasked path, 16 bytes an access; the tail, unaligned memory and rows whose
length is no multiple of 32 take the masked one.

Scales are counted as they lie: a program has TILE_BLOCKS consecutive ones, from `first` on, and
the blocks they belong to. Plain scales make those consecutive blocks of the tensor; swizzled ones a
quarter of a 128x4 tile, rows r to r + 7, and the same of the three further groups of 32 rows, in
four columns, so that a program stores one piece of scales, padding included.

A tensor has `rows` rows of `row_numel` elements; `width` is the blocks of a row, or the tiles
across that swizzled ones need. Rows of whole blocks with plain scales are taken as rows of one.
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

from ..formats import device_codes as device
from ..formats import swizzle
from ..formats.device_e2m1 import bytes_of
from ..formats.device_swizzle import places_of, tile_of
from ..formats.device_table import codec_of
from ..formats.noise import GROUP_NUMEL, Seed
from ..formats.table import ELEMENTS, SCALE_RULES
from ..launch import LaunchConfig, is_aligned, launch
from ..portable import INTERPRETED, round_to, to_fp32
from ..tuned import config_for
from ..wide import aligned_blocks, aligned_pointers
from .reference import BLOCK_NUMEL, form_of

# Sixteen bytes of MXFP4's codes a thread: a block each of 32 threads * 4 warps.
TILE_BLOCKS = 128
NUM_WARPS = 4

# A masked tile's other shape keeps the compiler from giving both paths one layout. To Triton's
# interpreter a layout is nothing, and a piece as much work as a tile.
_PIECES = tl.constexpr(1 if INTERPRETED else 4)


@triton.jit
def _block_places(first, width, SWIZZLED: tl.constexpr, BLOCKS: tl.constexpr):
    """(Rows, columns), int64 [BLOCKS], of the blocks whose scales lie at `first` and after.

    width: blocks a row, int32, or swizzled tiles across. 64 bits are divided once a program, not
    once a block.
    """
    if SWIZZLED:
        tile_row, tile_column = tile_of(first, width)
        row, column = places_of(first, tile_row, tile_column, BLOCKS)
    else:
        beyond = (first % width).to(tl.int32) + tl.arange(0, BLOCKS)
        row = first // width + beyond // width
        column = beyond % width
    return row, column.to(tl.int64)


@triton.jit
def _block_starts(first, row_numel, width, SWIZZLED: tl.constexpr, BLOCKS: tl.constexpr):
    """Where the blocks of a full tile begin in the tensor, int64 [BLOCKS]."""
    if SWIZZLED:
        row, column = _block_places(first, width, SWIZZLED, BLOCKS)
        return row * row_numel + column * 32
    return first * 32 + tl.arange(0, BLOCKS) * 32


@triton.jit
def _places_in_rows(row, column, row_numel, BLOCK: tl.constexpr):
    """(Where BLOCK of each of the blocks lie, of rows of `row_numel`; which of them there are)."""
    at = (column * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    return row[:, None] * row_numel + at, at < row_numel


@triton.jit
def _is_full_tile(first, rows, row_numel, width, SWIZZLED: tl.constexpr, BLOCKS: tl.constexpr):
    """Whether all of the program's blocks exist. Rows must be whole blocks, or it says nothing."""
    if SWIZZLED:
        tile_row, tile_column = tile_of(first, width)
        return ((tile_row + 1) * 128 <= rows) & ((tile_column + 1) * 128 <= row_numel)
    return first + BLOCKS <= rows * width


@triton.jit
def store_blocks(
    source, data, scales, starts, exists, noise, CODEC: tl.constexpr, HARDWARE: tl.constexpr
) -> None:
    """Stores scales and codes of the whole aligned blocks at `starts`, int64 [n].

    exists: which of them there are, None for all. The others have the scale 0 and no codes, and
    their starts lie where some block is. Scales first: where they come last, registers are 80 for
    64.
    """
    seed, first_index = noise
    BLOCKS: tl.constexpr = starts.shape[0]
    ELEMENT: tl.constexpr = CODEC.element
    PER_BYTE: tl.constexpr = ELEMENT.form.codes_per_byte
    x, scale_bytes, _ = CODEC.scaled(aligned_blocks(source, starts, 32), CODEC, 0, HARDWARE)
    mask = None
    if exists is not None:
        scale_bytes = tl.where(exists, scale_bytes, 0)
        mask = exists[:, None]
    tl.store(scales, scale_bytes)
    bits = None
    if seed is not None:
        groups = ((first_index + starts) >> 4)[:, None] + tl.arange(0, 2)[None, :]
        bits = device.noise_of_groups(seed, tl.reshape(groups, [2 * BLOCKS]))
        bits = tl.reshape(bits, [BLOCKS, 32])
    made = device.stored(x, bits, ELEMENT, HARDWARE)
    if ELEMENT.pack is not None:
        words = data.to(tl.pointer_type(tl.uint32), bitcast=True)
        tl.store(aligned_pointers(words, starts >> 3, 4), made, mask=mask)
    else:
        tl.store(aligned_pointers(data, starts // PER_BYTE, 32 // PER_BYTE), made, mask=mask)


@triton.jit
def masked_codes(
    source, data, row, column, begins, row_numel, noise, CODEC: tl.constexpr, HARDWARE: tl.constexpr
) -> tl.tensor:
    """Stores the codes of the blocks at these rows and columns that begin; returns all scales."""
    seed, first_index = noise
    PER_BYTE: tl.constexpr = CODEC.element.form.codes_per_byte
    index, in_row = _places_in_rows(row, column, row_numel, 32)
    exists = begins[:, None] & in_row
    x = to_fp32(tl.load(source + index, mask=exists, other=0.0))
    x, scale_bytes, _ = CODEC.scaled(x, CODEC, 0, HARDWARE)
    bits = None
    if seed is not None:
        bits = device.noise_of(seed, first_index + index)
    # A NaN's block has NaNs in the place of what does not exist.
    made = device.stored(tl.where(exists, x, 0.0), bits, CODEC.element, HARDWARE)
    if CODEC.element.pack is not None:
        made = bytes_of(made)
    row_bytes = (row_numel + PER_BYTE - 1) // PER_BYTE
    places, in_row = _places_in_rows(row, column, row_bytes, 32 // PER_BYTE)
    tl.store(data + places, made, mask=begins[:, None] & in_row)
    return scale_bytes


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
    CODEC: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, column = _block_places(first, width, SWIZZLED, BLOCKS)
    begins = row < rows
    noise = (seed, first_index)
    scale_bytes = masked_codes(source, data, row, column, begins, row_numel, noise, CODEC, HARDWARE)
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
    CODEC: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS consecutive scales, and the codes of their blocks; FULL and MASKED: paths it needs.

    Example: rows of 40 elements have 2 blocks, so block 5 is the second of row 2: elements 112 to
    119, scale 5, or, swizzled, scale 2 * 16 + 1. seed: None to round to nearest.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    rows = rows.to(tl.int64)
    row_numel = row_numel.to(tl.int64)
    tl.assume(row_numel >= 0)
    first_index = first_index.to(tl.int64)
    is_full = FULL
    if FULL and MASKED:
        is_full = _is_full_tile(first, rows, row_numel, width, SWIZZLED, BLOCKS)
    if is_full:
        starts = _block_starts(first, row_numel, width, SWIZZLED, BLOCKS)
        scales_at = tl.multiple_of(scales + first + tl.arange(0, BLOCKS), 16)
        noise = (seed, first_index)
        store_blocks(source, data, scales_at, starts, None, noise, CODEC, HARDWARE)
    elif MASKED:
        PIECE: tl.constexpr = BLOCKS // _PIECES
        for piece in range(0, BLOCKS, PIECE):
            _quantize_masked_piece(
                source, data, scales, first + piece, rows, row_numel, width, seed, first_index,
                CODEC, HARDWARE, SWIZZLED, PIECE,
            )  # fmt: skip


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
    CODEC: tl.constexpr,
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
    ELEMENT: tl.constexpr = CODEC.element
    PER_BYTE: tl.constexpr = ELEMENT.form.codes_per_byte
    dtype: tl.constexpr = out.dtype.element_ty
    is_full = FULL
    if FULL and MASKED:
        is_full = _is_full_tile(first, rows, row_numel, width, SWIZZLED, BLOCKS)
    if is_full:
        starts = _block_starts(first, row_numel, width, SWIZZLED, BLOCKS)
        if ELEMENT.unpack is not None:
            words = data.to(tl.pointer_type(tl.uint32), bitcast=True)
            kept = tl.load(aligned_pointers(words, starts >> 3, 4))
        else:
            kept = tl.load(aligned_pointers(data, starts // PER_BYTE, 32 // PER_BYTE))
        scale_bytes = tl.load(tl.multiple_of(scales + first + tl.arange(0, BLOCKS), 16))
        factors = CODEC.factors(scale_bytes, None, CODEC, HARDWARE)
        value = device.values_of(kept, ELEMENT, HARDWARE) * factors[:, None]
        tl.store(aligned_pointers(out, starts, 32), round_to(value, dtype))
    elif MASKED:
        PIECE: tl.constexpr = BLOCKS // _PIECES
        for piece in range(0, BLOCKS, PIECE):
            at = first + piece
            row, column = _block_places(at, width, SWIZZLED, PIECE)
            begins = (row < rows) & (column * 32 < row_numel)
            row_bytes = (row_numel + PER_BYTE - 1) // PER_BYTE
            places, in_row = _places_in_rows(row, column, row_bytes, 32 // PER_BYTE)
            kept = tl.load(data + places, mask=begins[:, None] & in_row, other=0)
            scale_bytes = tl.load(scales + at + tl.arange(0, PIECE), mask=begins, other=0)
            factors = CODEC.factors(scale_bytes, None, CODEC, HARDWARE)
            value = device.values_of(kept, ELEMENT, HARDWARE) * factors[:, None]
            index, in_row = _places_in_rows(row, column, row_numel, 32)
            tl.store(out + index, round_to(value, dtype), mask=begins[:, None] & in_row)


@functools.cache
def default_config() -> LaunchConfig:
    """An element counts as a byte; the block follows from the scales, so only warps may differ."""
    return LaunchConfig(TILE_BLOCKS * BLOCK_NUMEL, NUM_WARPS)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut into programs, and which paths they take."""

    programs: int
    rows: int
    row_numel: int
    width: int
    full: bool
    masked: bool


def cut_of(tensors: Sequence[torch.Tensor], shape: torch.Size, swizzled: bool) -> Cut:
    """For a tensor [..., K] of `shape`; all of `tensors` must be aligned for full tiles."""
    rows, row_numel = shape[:-1].numel(), shape[-1]
    if row_numel % BLOCK_NUMEL == 0 and not swizzled:
        rows, row_numel = rows * (row_numel // BLOCK_NUMEL), BLOCK_NUMEL
    columns = triton.cdiv(row_numel, BLOCK_NUMEL)
    num_blocks = swizzle.swizzled_numel(rows, columns) if swizzled else rows * columns
    full = is_aligned(*tensors) and row_numel % BLOCK_NUMEL == 0
    if swizzled:
        no_tail = rows % swizzle.TILE_ROWS == 0 and columns % swizzle.TILE_COLUMNS == 0
    else:
        no_tail = num_blocks % TILE_BLOCKS == 0
    return Cut(
        programs=triton.cdiv(num_blocks, TILE_BLOCKS),
        rows=rows,
        row_numel=row_numel,
        width=swizzle.tiles_across(columns) if swizzled else columns,
        full=full,
        masked=not (full and no_tail),
    )


def quantize_mx_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    element: str,
    rule: str,
    seed: Seed | None = None,
    first_index: int = 0,
    swizzled: bool = False,
) -> None:
    """`reference.quantize_mx_` in one launch."""
    cut = cut_of((data, scales, x), x.shape, swizzled)
    if cut.programs == 0:
        return
    stochastic = seed is not None
    # Noise is drawn for 16 elements at once, from a multiple of 16 on.
    full = cut.full and not (stochastic and first_index % GROUP_NUMEL)
    case = element + " stochastic" * stochastic + " swizzled" * swizzled
    config = config_for("quantize_mx_", case, default_config(), x.device)
    launch(
        _quantize_kernel,
        cut.programs,
        x,
        data.view(torch.uint8),
        scales.view(torch.uint8),
        cut.rows,
        cut.row_numel,
        cut.width,
        seed,
        first_index,
        on=x,
        num_warps=config.num_warps,
        CODEC=codec_of(form_of(ELEMENTS[element]), SCALE_RULES[rule]),
        SWIZZLED=swizzled,
        FULL=full,
        MASKED=cut.masked or not full,
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
    cut = cut_of((out, data, scales), out.shape, swizzled)
    if cut.programs == 0:
        return
    case = element + " swizzled" * swizzled
    config = config_for("dequantize_mx_", case, default_config(), out.device)
    launch(
        _dequantize_kernel,
        cut.programs,
        out,
        data.view(torch.uint8),
        scales.view(torch.uint8),
        cut.rows,
        cut.row_numel,
        cut.width,
        on=out,
        num_warps=config.num_warps,
        CODEC=codec_of(form_of(ELEMENTS[element])),
        SWIZZLED=swizzled,
        FULL=cut.full,
        MASKED=cut.masked,
        BLOCKS=TILE_BLOCKS,
    )
