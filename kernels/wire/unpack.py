"""Unpacking on the GPU: one or more wire messages into any number of tensors, in one launch.

Formulas and rounding are those of `reference`; `tiles` tells each program its tile.
A tile that is full and 16-byte aligned takes the unmasked path, 16 bytes an access; the ends of
tensors and unaligned tensors take the masked one, an element a store. The header and the gaps are
not read.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..device_numbers import number_of
from ..device_tables import NUM_CODES, pointer_of
from ..formats import device_codes as device
from ..formats.device_table import codec_of
from ..formats.table import ALIGN_NUMEL, BITS_PER_BYTE
from ..launch import LaunchConfig, launch
from ..numbers import unless_one
from ..portable import round_to, to_fp32
from ..table_cache import TableCache
from ..tuned import config_for
from .layout import HEADER_BYTES, layout_of_numel
from .reference import aligned_memory
from .tiles import (
    NUM_WARPS,
    TILE_NUMEL,
    aligned_from,
    for_piece,
    over,
    part_numel,
    paths_of,
    piece_table,
    section,
    unpacked_pieces,
    word_of,
)

_DATA_AT = tl.constexpr(HEADER_BYTES)
_BITS_PER_BYTE = tl.constexpr(BITS_PER_BYTE)

_tables = TableCache(table_of=piece_table)


@triton.jit
def _block_factors(
    message,
    start,
    blocks,
    mask,
    scales_at,
    rows_at,
    CODEC: tl.constexpr,
    ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the elements of blocks are multiplied by, FP32 [n]."""
    scales = None
    row_scales = None
    if CODEC.block_numel:
        pointers = section(message, scales_at, CODEC.scale) + over(start, BLOCK) + blocks
        scales = tl.load(pointers, mask=mask)
    if CODEC.has_rows:
        rows = section(message, rows_at, tl.float32) + over(start, ROW) + blocks // (ROW // BLOCK)
        row_scales = tl.load(rows, mask=mask)
    return CODEC.factors(scales, row_scales, CODEC, HARDWARE)


@triton.jit
def _codes(
    message,
    start,
    count,
    BITS: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMEL: tl.constexpr,
):
    """Codes of BITS bits, [n, BLOCK], as unsigned integers: of 4, words of eight, uint32."""
    blocks = tl.arange(0, NUMEL // BLOCK)
    mask = None
    if BITS >= _BITS_PER_BYTE:
        if not FULL:
            mask = (blocks * BLOCK < count)[:, None]
        words = section(message, _DATA_AT, word_of(BITS)) + start
        lanes = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        return tl.load(aligned_from(words, lanes), mask=mask)
    else:
        # A block's bytes may be fewer than an access has.
        eights = tl.arange(0, NUMEL // 8)
        if not FULL:
            mask = eights * 8 < count
        words = section(message, _DATA_AT, tl.uint32) + over(start, 8) + eights.to(tl.int64)
        packed = tl.load(tl.multiple_of(words, 16), mask=mask)
        return tl.reshape(packed, [NUMEL // BLOCK, BLOCK // 8])


@triton.jit
def _decoded(
    message,
    start,
    count,
    scales_at,
    rows_at,
    CODEC: tl.constexpr,
    ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    FULL: tl.constexpr,
    NUMEL: tl.constexpr,
):
    """NUMEL elements from `start` on in FP32, in blocks [n, elements of one].

    Blocks that begin beyond the tensor's `count` elements are not read, and hold anything.
    """
    BLOCK: tl.constexpr = CODEC.block_numel if CODEC.block_numel else ROW
    codes = _codes(message, start, count, CODEC.element.form.stored_bits, FULL, BLOCK, NUMEL)
    values = device.values_of(codes, CODEC.element, HARDWARE)
    if CODEC.factors is not None:
        blocks = tl.arange(0, NUMEL // BLOCK)
        mask = None
        if not FULL:
            mask = blocks * BLOCK < count
        factors = _block_factors(
            message, start, blocks, mask, scales_at, rows_at, CODEC, ROW, HARDWARE, BLOCK
        )
        values = values * factors[:, None]
    return values


@triton.jit
def _store(values, tensor, count, scale, ACCUMULATE: tl.constexpr, FULL: tl.constexpr):
    """round(float32(old) + values * scale) to the elements of `tensor`, a pointer, that exist."""
    WIDTH: tl.constexpr = values.shape[1]
    lanes = tl.arange(0, values.shape[0])[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    pointers = aligned_from(tensor, lanes) if FULL else tensor + lanes
    mask = None
    if not FULL:
        mask = lanes < count
    if scale is not None:
        values = values * number_of(scale)
    if ACCUMULATE:
        values = to_fp32(tl.load(pointers, mask=mask)) + values
    tl.store(pointers, round_to(values, tensor.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_part(piece, kind, begin, arguments, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """NUMEL elements of the message to those of the tensor from `begin` on.

    A kind, a dtype's code, that is known when compiling leaves one of the branches.
    """
    address, numel, offset, _, _, message_at = piece
    messages, scales_at, rows_at, scale = arguments[:4]
    message = messages + message_at
    CODEC: tl.constexpr = arguments[4]
    ROW: tl.constexpr = arguments[5]
    ACCUMULATE: tl.constexpr = arguments[6]
    HARDWARE: tl.constexpr = arguments[7]
    count = numel - begin
    start = offset + begin
    values = _decoded(message, start, count, scales_at, rows_at, CODEC, ROW, HARDWARE, FULL, NUMEL)
    for code in tl.static_range(NUM_CODES):
        if kind == code:
            _store(values, pointer_of(address, code) + begin, count, scale, ACCUMULATE, FULL)


@triton.jit(
    do_not_specialize=["num_rows", "scales_at", "rows_at", "scale"],
    do_not_specialize_on_alignment=["messages", "table"],
)
def _unpack_kernel(
    messages,
    table,
    num_rows,
    scales_at,
    rows_at,
    scale,
    CODEC: tl.constexpr,
    ROW: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HARDWARE: tl.constexpr,
    STEPS: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """One tile of one tensor; arguments as those of `pack._pack_kernel`.

    Example: of tensors of 5000 and 100 elements in mxfp8, program 1 fills elements 4096 to 4999 of
    the first from bytes 16 + 4096 to 16 + 4999 and the scales 128 to 156.
    """
    for_piece(
        _unpack_part,
        table,
        num_rows,
        (messages, scales_at, rows_at, scale, CODEC, ROW, ACCUMULATE, HARDWARE),
        STEPS,
        KIND,
        FULL,
        MASKED,
        TILE,
        PART,
    )


@functools.cache
def default_config() -> LaunchConfig:
    """An element counts as a byte."""
    return LaunchConfig(TILE_NUMEL, NUM_WARPS)


def unpack_message_(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    format: str,
    numel: int,
    offsets: Sequence[int],
    *options: Any,
) -> None:
    """`reference.unpack_message_` in one launch; not contiguous: by way of copies."""
    scale, accumulate, row_numel = options
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    rows = [tensor.contiguous() for tensor in tensors]
    pieces = unpacked_pieces(rows, offsets, layout)
    if not pieces.keys:
        return
    config = config_for("unpack_message_", format, default_config(), message.device)
    tile = config.block_bytes
    paths = paths_of(pieces, tile)
    row_numel = row_numel if layout.format.has_rows else ALIGN_NUMEL
    source = aligned_memory(message)
    if source is not message:
        source.copy_(message)
    table = _tables.get(pieces, tile, message.device)
    launch(
        _unpack_kernel,
        table.num_tiles,
        source,
        table.entries,
        table.num_rows,
        layout.scales_at,
        layout.row_scales_at,
        unless_one(scale),
        on=message,
        num_warps=config.num_warps,
        CODEC=codec_of(layout.format),
        ROW=row_numel,
        ACCUMULATE=accumulate,
        STEPS=table.search_steps,
        KIND=paths.dtype,
        FULL=paths.full,
        MASKED=paths.masked,
        TILE=tile,
        PART=part_numel(tile, row_numel),
    )
    for tensor, row in zip(tensors, rows, strict=True):
        if row is not tensor:
            tensor.copy_(row)
