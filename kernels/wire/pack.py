"""Packing on the GPU: any number of tensors into one or more wire messages, in one launch.

`tiles` tells each program its tile, the format's codec what its scales are. Formulas and rounding
are those of `reference`. A tile that is full and 16-byte aligned takes the unmasked path, 16 bytes
an access; the ends of tensors with the gaps after them, and unaligned tensors, take the masked one,
an element a load: there FULL is false, and what the tensor lacks is zeros. Messages are 16-byte
aligned, and whole blocks of them are stored. One program more a message writes the header, and the
bytes between the sections.
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

from ..formats import device_codes as device
from ..formats.device_table import codec_of
from ..formats.table import ALIGN_NUMEL, MessageFormat, rule_of
from ..launch import LaunchConfig, launch
from ..numbers import unless_one
from ..table_cache import TableCache
from ..tuned import config_for
from ..wide import side_by_side
from .layout import HEADER_BYTES, MessageLayout, header_bytes, layout_of_numel
from .reference import MessageCast, aligned_memory
from .tiles import (
    NUM_WARPS,
    TILE_NUMEL,
    Pieces,
    aligned_from,
    for_piece,
    lanes_of,
    over,
    packed_pieces,
    part_numel,
    paths_of,
    piece_table,
    section,
    values_of,
)

_DATA_AT = tl.constexpr(HEADER_BYTES)
_NUMEL_AT = tl.constexpr(8)  # in the header, after magic and format
_EIGHT = tl.constexpr(8)
# Where there is little to share, neighbouring threads had better read neighbouring bytes.
_SHARED_NUMEL = tl.constexpr(32)

_tables = TableCache(table_of=piece_table)


@triton.jit
def _noise(seed, index, places, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """The noise of [n, NUMEL] elements from `index` + each place on, a multiple of 16 with FULL."""
    if FULL:
        GROUPS: tl.constexpr = places.shape[0] * NUMEL // 16
        bits = device.noise_of_groups(seed, (index >> 4) + tl.arange(0, GROUPS))
        return tl.reshape(bits, [places.shape[0], NUMEL])
    else:
        return device.noise_of(seed, index + lanes_of(places, NUMEL))


@triton.jit
def _noise_of_halves(seed, index, NUMEL: tl.constexpr, FULL: tl.constexpr, HALF: tl.constexpr):
    """The noise of NUMEL elements from `index` on as halves, [n, HALF] each."""
    places = tl.arange(0, NUMEL // (2 * HALF)) * (2 * HALF)
    if FULL and HALF == _EIGHT:
        return device.noise_of_halves(seed, (index >> 4) + tl.arange(0, NUMEL // 16))
    else:
        low = device.noise_of(seed, index + lanes_of(places, HALF))
        return low, device.noise_of(seed, index + lanes_of(places + HALF, HALF))


@triton.jit
def _store_codes(made, message, start, extent, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """Words, [n, m] or [n], of NUMEL elements into the message from element `start` on."""
    EACH: tl.constexpr = NUMEL // made.numel
    words = section(message, _DATA_AT, made.dtype) + over(start, EACH)
    rows = tl.arange(0, made.shape[0])
    mask = None
    if len(made.shape) == 1:
        if not FULL:
            mask = rows * EACH < extent
        tl.store(tl.multiple_of(words + rows.to(tl.int64), 16), made, mask=mask)
    else:
        WIDTH: tl.constexpr = made.shape[1]
        if not FULL:
            mask = (rows * (WIDTH * EACH) < extent)[:, None]
        lanes = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(aligned_from(words, lanes), made, mask=mask)


@triton.jit
def _store_scales(scales, message, at, start, extent, FULL: tl.constexpr, EACH: tl.constexpr):
    """Scales [n], for EACH elements one, into the section at byte `at`: `start` is the first's."""
    lanes = tl.arange(0, scales.shape[0])
    mask = None
    if not FULL:
        mask = lanes * EACH < extent
    tl.store(section(message, at, scales.dtype) + over(start, EACH) + lanes, scales, mask=mask)


@triton.jit
def _pack_part(piece, kind, begin, arguments, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """NUMEL elements of the tensor from `begin` on to where they belong in the message."""
    address, numel, offset, extent, index, message_at = piece
    messages, scales_at, rows_at, scale, seed = arguments[:5]
    message = messages + message_at
    CODEC: tl.constexpr = arguments[5]
    ROW: tl.constexpr = arguments[6]
    HARDWARE: tl.constexpr = arguments[7]
    count = numel - begin
    start = offset + begin
    extent -= begin
    index += begin
    BLOCK: tl.constexpr = CODEC.block_numel if CODEC.block_numel else ROW
    WIDTH: tl.constexpr = BLOCK // 2 if CODEC.in_halves else BLOCK
    SIXTEENS: tl.constexpr = seed is not None or BLOCK <= _SHARED_NUMEL
    places = tl.arange(0, NUMEL // BLOCK) * BLOCK
    # Noise comes first, or of halves last: the other way round takes instructions, or registers.
    bits = None
    if seed is not None and not CODEC.in_halves:
        bits = _noise(seed, index, places, FULL, BLOCK)
    x = values_of(address, kind, begin, places, count, scale, SIXTEENS, FULL, WIDTH)
    if CODEC.in_halves:
        places += WIDTH
        x = (x, values_of(address, kind, begin, places, count, scale, SIXTEENS, FULL, WIDTH))
    if CODEC.scaled is not None:
        x, scales, row_scales = CODEC.scaled(x, CODEC, ROW, HARDWARE)
        if CODEC.block_numel:
            _store_scales(scales, message, scales_at, start, extent, FULL, BLOCK)
        if CODEC.has_rows:
            _store_scales(row_scales, message, rows_at, start, extent, FULL, ROW)
    if CODEC.in_halves:
        low_bits = None
        high_bits = None
        if seed is not None:
            low_bits, high_bits = _noise_of_halves(seed, index, NUMEL, FULL, WIDTH)
        low = device.stored(x[0], low_bits, CODEC.element, HARDWARE)
        high = device.stored(x[1], high_bits, CODEC.element, HARDWARE)
        made = tl.reshape(side_by_side(low, high), [2 * low.numel])
    else:
        made = device.stored(x, bits, CODEC.element, HARDWARE)
    _store_codes(made, message, start, extent, FULL, NUMEL)


@triton.jit
def _store_frame(message, header, numel, scales_end, rows_at, rows_end, num_bytes):
    """The header, and zeros between the sections, a byte a store."""
    lanes = tl.arange(0, 16)
    word = tl.where(lanes < _NUMEL_AT, header, numel) >> ((lanes & 7) * 8).to(tl.int64)
    tl.store(message + lanes, (word & 0xFF).to(tl.uint8))
    zeros = tl.zeros([16], tl.uint8)
    tl.store(message + scales_end + lanes, zeros, mask=scales_end + lanes < rows_at)
    tl.store(message + rows_end + lanes, zeros, mask=rows_end + lanes < num_bytes)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_tiles", "header", "numel", "scales_at", "scales_end"),
        *("rows_at", "rows_end", "num_bytes", "scale", "seed"),
    ],
    do_not_specialize_on_alignment=["messages", "table"],
)
def _pack_kernel(
    messages,
    table,
    num_rows,
    num_tiles,
    header,
    numel,
    scales_at,
    scales_end,
    rows_at,
    rows_end,
    num_bytes,
    scale,
    seed,
    CODEC: tl.constexpr,
    ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    STEPS: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """One tile of one piece, or after the last one the frame of a message.

    KIND: the code of all tensors' dtype, or MIXED. FULL, MASKED: the paths that are needed. PART:
    how many elements the masked one takes at a time. scale, seed: None where there is none.

    Example: tensors of 5000 and 100 elements in fp8_1x128 make pieces of 5120 and 128. Program 1
    has elements 4096 to 4999 of the first and 120 zeros: bytes 16 + 4096 to 16 + 5119 of the
    message and scales 32 to 39. Program 2 has the second piece, program 3 the frame. In two
    messages of 2688 elements, the first piece is cut: program 0 has its first 2688, program 1 what
    is left to 4999, with 120 zeros, program 2 the second piece, programs 3 and 4 have the frames.
    """
    if tl.program_id(0) < num_tiles:
        for_piece(
            _pack_part,
            table,
            num_rows,
            (messages, scales_at, rows_at, scale, seed, CODEC, ROW, HARDWARE),
            STEPS,
            KIND,
            FULL,
            MASKED,
            TILE,
            PART,
        )
    else:
        number = (tl.program_id(0) - num_tiles).to(tl.int64)
        message = messages + number * num_bytes
        _store_frame(message, header, numel, scales_end, rows_at, rows_end, num_bytes)


def tile_numel(form: MessageFormat, stochastic: bool) -> int:
    """Elements of a tile.

    MXFP8 takes 6.9 instructions an element to nearest with 32 a thread, 5.9 with 64. To the others
    what a program finds in its table is less, and registers are more.
    """
    return TILE_NUMEL * (1 if stochastic else form.pack_tiles)


@functools.cache
def default_config(form: MessageFormat, stochastic: bool) -> LaunchConfig:
    """An element counts as a byte."""
    return LaunchConfig(tile_numel(form, stochastic), NUM_WARPS)


def pack_message_(
    message: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    numel: int,
    offsets: Sequence[int],
    first_indices: Sequence[int],
    *options: Any,
) -> None:
    """`reference.pack_message_` in one launch; what is not contiguous is made so first."""
    cast = MessageCast(*options)
    layout = layout_of_numel(format, numel, row_numel=cast.row_numel)
    indices = None if cast.seed is None else first_indices
    rows = [tensor.contiguous() for tensor in tensors]
    made = aligned_memory(message)
    pieces = packed_pieces(rows, offsets, indices, layout, made.numel() // layout.num_bytes)
    _launch(made, pieces, layout, cast)
    if made is not message:
        message.copy_(made)


def _launch(
    messages: torch.Tensor, pieces: Pieces, layout: MessageLayout, cast: MessageCast
) -> None:
    form = layout.format
    row_numel = layout.row_numel if form.has_rows else ALIGN_NUMEL
    stochastic = cast.seed is not None
    case = form.name + " stochastic" * stochastic
    default = default_config(form, stochastic)
    config = config_for("pack_message_", case, default, messages.device)
    tile = config.block_bytes
    paths = paths_of(pieces, tile)
    table = _tables.get(pieces, tile, messages.device)
    launch(
        _pack_kernel,
        table.num_tiles + messages.numel() // layout.num_bytes,
        messages,
        table.entries,
        table.num_rows,
        table.num_tiles,
        int.from_bytes(header_bytes(layout)[: _NUMEL_AT.value], "little"),
        layout.numel,
        layout.scales_at,
        layout.scales_end,
        layout.row_scales_at,
        layout.row_scales_end,
        layout.num_bytes,
        unless_one(cast.scale),
        cast.seed,
        on=messages,
        num_warps=config.num_warps,
        CODEC=codec_of(form, rule_of(form, cast.rule, cast.power_of_2)),
        ROW=row_numel,
        STEPS=table.search_steps,
        KIND=paths.dtype,
        FULL=paths.full,
        MASKED=paths.masked,
        TILE=tile,
        PART=part_numel(tile, row_numel),
    )
