"""Owns packing on the GPU: any number of tensors into one wire message, in one launch.

`tiles` tells each program its tile, `encode` has what is done with it. A tile that
is full and 16-byte aligned takes the unmasked path, 16 bytes an access; the ends of tensors with
the gaps after them, and unaligned tensors, take the masked one, an element a load. One program more
writes the header, and the bytes between the sections.
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

from .. import tables
from ..formats.table import FP8_1X128, FP8_ROW, MXFP4, MXFP8
from ..launch import LaunchConfig, launch
from ..portable import covered
from ..tuned import config_for
from .encode import pack_part
from .layout import ALIGN_NUMEL, MessageLayout, header_bytes, layout_of_numel
from .reference import MessageCast, aligned_memory
from .tiles import (
    EXTENT,
    INDEX,
    MIXED,
    NUM_WARPS,
    TILE_NUMEL,
    PieceKey,
    packed_pieces,
    part_numel,
    paths_of,
    piece_entries,
    piece_of,
)

_ADDRESS, _NUMEL, _OFFSET = (
    tl.constexpr(field) for field in (tables.ADDRESS, tables.NUMEL, tables.OFFSET)
)
_DTYPE, _ALIGNED = tl.constexpr(tables.DTYPE), tl.constexpr(tables.ALIGNED)
_EXTENT, _INDEX = tl.constexpr(EXTENT), tl.constexpr(INDEX)
_MIXED = tl.constexpr(MIXED)
_NUMEL_AT = tl.constexpr(8)  # in the header, after magic and format

_tables = tables.TableCache(entries_of=piece_entries)


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
        *("tiles_at", "num_tiles", "header", "numel", "scales_at", "scales_end"),
        *("rows_at", "rows_end", "num_bytes", "seed"),
    ],
    do_not_specialize_on_alignment=["message", "table"],
)
def _pack_kernel(
    message,
    table,
    tiles_at,
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
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    RULE: tl.constexpr,
    HARDWARE: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """One tile of one piece, or after the last one the frame around them.

    KIND: the code of all tensors' dtype, or MIXED. FULL, MASKED: the paths that are needed. PART:
    how many elements the masked one takes at a time. scale, seed: None where there is none.

    Example: tensors of 5000 and 100 elements in fp8_1x128 make pieces of 5120 and 128. Program 1
    has elements 4096 to 4999 of the first and 120 zeros: bytes 16 + 4096 to 16 + 5119 of the
    message and scales 32 to 39. Program 2 has the second piece, program 3 the frame.
    """
    # A tensor may have more than 2**31 elements, so all that counts elements is int64.
    program = tl.program_id(0).to(tl.int64)
    if program < num_tiles:
        row, begin = piece_of(table, tiles_at, program, TILE)
        address = tl.load(row + _ADDRESS)
        count = tl.load(row + _NUMEL) - begin
        start = tl.load(row + _OFFSET) + begin
        extent = tl.load(row + _EXTENT) - begin
        index = begin
        if seed is not None:
            index += tl.load(row + _INDEX)
        kind = KIND
        if KIND == _MIXED:
            kind = tl.load(row + _DTYPE)
        is_full = FULL
        if FULL and MASKED:
            is_full = (tl.load(row + _ALIGNED) != 0) & (count >= TILE)
        if is_full:
            for code in tl.static_range(_MIXED):
                if kind == code:
                    pack_part(
                        address,
                        code,
                        begin,
                        count,
                        message,
                        start,
                        extent,
                        index,
                        scales_at,
                        rows_at,
                        scale,
                        seed,
                        FORMAT,
                        ROW,
                        RULE,
                        HARDWARE,
                        True,
                        TILE,
                    )
        elif MASKED:
            for first in range(0, covered(extent, TILE), PART):
                pack_part(
                    address,
                    kind,
                    begin + first,
                    count - first,
                    message,
                    start + first,
                    extent - first,
                    index + first,
                    scales_at,
                    rows_at,
                    scale,
                    seed,
                    FORMAT,
                    ROW,
                    RULE,
                    HARDWARE,
                    False,
                    PART,
                )
    else:
        _store_frame(message, header, numel, scales_end, rows_at, rows_end, num_bytes)


def tile_numel(format: str, stochastic: bool) -> int:
    """Elements of a tile.

    MXFP8 to nearest is so cheap that what a program finds in its table shows: 6.9 instructions an
    element with 32 a thread, 5.9 with 64. To the others that is less, and registers are more.
    """
    return 2 * TILE_NUMEL if format == MXFP8.name and not stochastic else TILE_NUMEL


@functools.cache
def default_config(format: str, stochastic: bool) -> LaunchConfig:
    """An element counts as a byte."""
    return LaunchConfig(tile_numel(format, stochastic), NUM_WARPS)


def scale_rule(format: str, rule: str, power_of_2: bool) -> str:
    """What a kernel is compiled for of the options of scales: none that the format ignores."""
    if format in (MXFP8.name, MXFP4.name):
        return rule
    is_fp8 = format in (FP8_ROW.name, FP8_1X128.name)
    return "power_of_2" if power_of_2 and is_fp8 else ""


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
    keys = packed_pieces(rows, offsets, indices, numel)
    made = aligned_memory(message)
    _launch(made, keys, layout, cast)
    if made is not message:
        message.copy_(made)


def _launch(
    message: torch.Tensor, keys: tuple[PieceKey, ...], layout: MessageLayout, cast: MessageCast
) -> None:
    form = layout.format
    row_numel = layout.row_numel if form.has_rows else ALIGN_NUMEL
    stochastic = cast.seed is not None
    case = form.name + " stochastic" * stochastic
    default = default_config(form.name, stochastic)
    config = config_for("pack_message_", case, default, message.device)
    tile = config.block_bytes
    paths = paths_of(keys, tile)
    table = _tables.get(keys, tile, message.device)
    launch(
        _pack_kernel,
        table.num_tiles + 1,
        message,
        table.entries,
        table.tiles_at,
        table.num_tiles,
        int.from_bytes(header_bytes(layout)[: _NUMEL_AT.value], "little"),
        layout.numel,
        layout.scales_at,
        layout.scales_at + layout.num_scales * form.scale_bytes,
        layout.row_scales_at,
        layout.row_scales_at + layout.num_rows * torch.float32.itemsize,
        layout.num_bytes,
        None if cast.scale == 1.0 else cast.scale,
        cast.seed,
        on=message,
        num_warps=config.num_warps,
        FORMAT=form.name,
        ROW=row_numel,
        RULE=scale_rule(form.name, cast.rule, cast.power_of_2),
        KIND=paths.dtype,
        FULL=paths.full,
        MASKED=paths.masked,
        TILE=tile,
        PART=part_numel(tile, row_numel),
    )
