"""Grouped MXFP8, MXFP4 and NVFP4 on the GPU: a program has swizzled scales of one group.

Formulas, layout and rounding are those of `reference`, the arithmetic the single casts': a program
finds its group, and goes on as if the group's rows were all there is. Bytes moved an element of
BF16: 3.03 with MXFP8, 2.53 with MXFP4, 2.56 with NVFP4. Scales are counted as they lie, so each is
written once and in place, padding included.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import swizzle
from ..formats.device_swizzle import places_of, tile_of
from ..formats.device_table import codec_of
from ..formats.noise import GROUP_NUMEL, Seed
from ..formats.table import ELEMENTS, NVFP4, SCALE_RULES, BlockFormat, ScaleRule
from ..launch import is_aligned, launch
from ..mx.kernel import masked_codes, store_blocks
from ..mx.reference import form_of
from ..nvfp4.device_codec import block_amaxes, scaled_halves, tensor_scale_of
from ..nvfp4.kernel import packed_blocks, quantize_masked_blocks
from ..portable import INTERPRETED
from ..wide import aligned_eights, aligned_pointers
from .device_groups import group_of, lanes_for
from .reference import nan_byte, nan_scale

TILE_NUMEL = 4096  # elements of a program
NUM_WARPS = 4
ROW_MULTIPLE = 32  # elements: rows of 4-bit codes begin on 16 bytes

# Pieces' other shape keeps registers few. To Triton's interpreter one is as much work as all.
_PIECES = tl.constexpr(1 if INTERPRETED else 4)
_TILE_ROWS = tl.constexpr(swizzle.TILE_ROWS)


@triton.jit
def _nvfp4_tile(source, data, scales, starts, exists, amax, noise, HARDWARE: tl.constexpr):
    """`store_blocks` of blocks of 16, of which two side by side, 16 bytes, exist together."""
    seed, first_index = noise
    PAIRS: tl.constexpr = starts.shape[0] // 2
    low, high = aligned_eights(source, starts), aligned_eights(source, starts + 8)
    block_amax, _ = block_amaxes(low, high, False)
    tensor_scale = tensor_scale_of(amax, False)
    low, high, scale_bytes = scaled_halves(low, high, block_amax, tensor_scale, False, HARDWARE)
    tl.store(scales, tl.where(exists, scale_bytes, 0))
    made = packed_blocks(low, high, seed, (first_index + starts) >> 4, HARDWARE)
    starts, _ = tl.split(tl.reshape(starts, [PAIRS, 2]))
    exists, _ = tl.split(tl.reshape(exists, [PAIRS, 2]))
    pointers = aligned_pointers(data.to(tl.pointer_type(tl.uint32), bitcast=True), starts >> 3, 4)
    tl.store(pointers, tl.reshape(made, [PAIRS, 4]), mask=exists[:, None])


@triton.jit
def _masked_piece(
    source, data, place, count, row_numel, amax, noise, CODEC: tl.constexpr, HARDWARE: tl.constexpr
) -> tl.tensor:
    """Stores the codes of blocks at any addresses, the last of a row short; returns all scales."""
    row, column = place
    row_blocks = (row_numel + (CODEC.block_numel - 1)) // CODEC.block_numel
    exists = (row < count) & (column < row_blocks)
    if amax is None:
        return masked_codes(source, data, row, column, exists, row_numel, noise, CODEC, HARDWARE)
    else:
        num_blocks = count * row_blocks
        blocks = tl.where(exists, row * row_blocks + column, num_blocks)
        return quantize_masked_blocks(
            source, data, blocks, (num_blocks, row_blocks, row_numel),
            tensor_scale_of(amax, False), noise, False, False, False, HARDWARE,
        )  # fmt: skip


@triton.jit
def _fill(
    data,
    place,
    exists,
    row_bytes,
    VALUE: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """VALUE in the bytes of the codes of blocks that exist at a place, BYTES each if not short."""
    row, column = place
    starts = row * row_bytes + column * BYTES
    if ALIGNED:
        at = starts[:, None] + tl.arange(0, BYTES)[None, :]
        pointers = tl.multiple_of(data + at, [1, BYTES])
        tl.store(pointers, tl.full(at.shape, VALUE, tl.uint8), mask=exists[:, None])
    else:
        for byte in range(BYTES):
            is_there = exists & (column * BYTES + byte < row_bytes)
            tl.store(data + (starts + byte), tl.full(row.shape, VALUE, tl.uint8), mask=is_there)


@triton.jit(
    do_not_specialize=["num_groups", "rows", "row_numel", "across", "seed", "first_index"],
    do_not_specialize_on_alignment=["source", "data", "scales", "ends", "amaxes"],
)
def _blocks_kernel(
    source,
    data,
    scales,
    ends,
    amaxes,
    num_groups,
    rows,
    row_numel,
    across,
    seed,
    first_index,
    CODEC: tl.constexpr,
    NAN_CODES: tl.constexpr,
    NAN_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """BLOCKS scales of a swizzled tile, one of `across` side by side; amaxes: None but for NVFP4.

    Example, K 64 of MX, ends [130, 135]: group 0 has tile rows 0 and 1, group 1 the third, which
    has rows 130 to 134 of the matrix as its rows 0 to 4.
    """
    row_numel = row_numel.to(tl.int64)
    first_index = first_index.to(tl.int64)
    PER_BYTE: tl.constexpr = CODEC.element.form.codes_per_byte
    SIZE: tl.constexpr = CODEC.block_numel
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    tile_row, tile_column = tile_of(first, across)
    group, first_row, count, group_tile, _ = group_of(
        ends, num_groups, rows, tile_row.to(tl.int32), 1, _TILE_ROWS, GROUPS
    )
    # As if the group's matrix were all: where its memory begins, and the scales from there on.
    row_bytes = (row_numel + PER_BYTE - 1) // PER_BYTE
    source += first_row * row_numel
    data += first_row * row_bytes
    first_index += first_row * row_numel
    noise = (seed, first_index)
    group_tile = group_tile.to(tl.int64)
    row, column = places_of(first, group_tile, tile_column, BLOCKS)
    exists = (row < count) & (column * SIZE < row_numel)
    scales += first
    scales_at = scales + tl.arange(0, BLOCKS)
    if ALIGNED:
        scales_at = tl.multiple_of(scales_at, 16)
    if group == num_groups:
        _fill(data, (row, column), exists, row_bytes, NAN_CODES, SIZE // PER_BYTE, ALIGNED)
        tl.store(scales_at, tl.full([BLOCKS], NAN_SCALE, tl.uint8))
    elif ALIGNED:
        # What does not exist is read from a place that does.
        starts = tl.where(exists, row * row_numel + column * SIZE, 0)
        if amaxes is None:
            store_blocks(source, data, scales_at, starts, exists, noise, CODEC, HARDWARE)
        else:
            amax = tl.load(amaxes + group)
            _nvfp4_tile(source, data, scales_at, starts, exists, amax, noise, HARDWARE)
    else:
        amax = None if amaxes is None else tl.load(amaxes + group)
        for piece in range(0, BLOCKS, BLOCKS // _PIECES):
            place = places_of(first + piece, group_tile, tile_column, BLOCKS // _PIECES)
            made = _masked_piece(
                source, data, place, count, row_numel, amax, noise, CODEC, HARDWARE
            )
            tl.store(scales + piece + tl.arange(0, BLOCKS // _PIECES), made)


def _quantize_blocks(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    amaxes: torch.Tensor | None,
    form: BlockFormat,
    rule: ScaleRule | None,
    seed: Seed | None,
    first_index: int,
) -> None:
    assert form.block_numel is not None
    blocks = TILE_NUMEL // form.block_numel
    programs = scales.numel() // blocks
    if programs == 0:
        return
    # Noise is drawn for 16 elements at once, from a multiple of 16 on.
    whole = x.shape[1] % ROW_MULTIPLE == 0 and (seed is None or first_index % GROUP_NUMEL == 0)
    launch(
        _blocks_kernel,
        programs,
        x,
        data.view(torch.uint8),
        scales.view(torch.uint8),
        ends,
        amaxes,
        ends.numel(),
        *x.shape,
        swizzle.tiles_across(form.num_blocks(x.shape[1])),
        seed,
        first_index,
        on=x,
        num_warps=NUM_WARPS,
        CODEC=codec_of(form, rule),
        NAN_CODES=nan_byte(form.element),
        NAN_SCALE=nan_scale(form),
        ALIGNED=whole and is_aligned(x, data, scales),
        BLOCKS=blocks,
        GROUPS=lanes_for(ends),
    )


def quantize_mx_grouped_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    element: str,
    rule: str,
    seed: Seed | None = None,
    first_index: int = 0,
) -> None:
    """`reference.quantize_mx_grouped_` in one launch."""
    form = form_of(ELEMENTS[element])
    _quantize_blocks(data, scales, x, ends, None, form, SCALE_RULES[rule], seed, first_index)


def quantize_nvfp4_grouped_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    amaxes: torch.Tensor,
    seed: Seed | None = None,
    first_index: int = 0,
) -> None:
    """`reference.quantize_nvfp4_grouped_` in one launch."""
    _quantize_blocks(data, scales, x, ends, amaxes, NVFP4, None, seed, first_index)
