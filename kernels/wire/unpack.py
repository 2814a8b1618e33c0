"""Owns unpacking on the GPU: one wire message into any number of tensors, in one launch.

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

from .. import tables
from ..formats import device_codes as device
from ..launch import LaunchConfig, launch
from ..nvfp4.blocks import decode_factors
from ..portable import covered, round_to, to_fp32
from ..tuned import config_for
from .layout import ALIGN_NUMEL, HEADER_BYTES, layout_of_numel
from .reference import aligned_memory
from .tiles import (
    KIND_BF16,
    KIND_FP16,
    KIND_FP32,
    MIXED,
    NUM_WARPS,
    TILE_NUMEL,
    aligned_from,
    block_numel,
    kind_pointer,
    part_numel,
    paths_of,
    piece_entries,
    piece_of,
    section,
    unpacked_pieces,
)

_ADDRESS, _NUMEL, _OFFSET = (
    tl.constexpr(field) for field in (tables.ADDRESS, tables.NUMEL, tables.OFFSET)
)
_DTYPE, _ALIGNED = tl.constexpr(tables.DTYPE), tl.constexpr(tables.ALIGNED)
_MIXED = tl.constexpr(MIXED)
_DATA_AT = tl.constexpr(HEADER_BYTES)

_tables = tables.TableCache(entries_of=piece_entries)


@triton.jit
def _block_factors(
    message,
    start,
    blocks,
    mask,
    scales_at,
    rows_at,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """What the elements of blocks are multiplied with, FP32 [n]."""
    if FORMAT == "nvfp4":
        scale_bytes = tl.load(message + scales_at + (start >> 4) + blocks, mask=mask)
        rows = section(message, rows_at, tl.float32) + start // ROW + blocks // (ROW // 16)
        return decode_factors(scale_bytes, tl.load(rows, mask=mask), False, HARDWARE)
    elif FORMAT == "mxfp8" or FORMAT == "mxfp4":
        return device.decode_e8m0(tl.load(message + scales_at + (start >> 5) + blocks, mask=mask))
    else:
        tl.static_assert(FORMAT == "fp8_row" or FORMAT == "fp8_1x128")
        at = rows_at if FORMAT == "fp8_row" else scales_at
        factors = section(message, at, tl.float32) + start // block_numel(FORMAT, ROW) + blocks
        return tl.load(factors, mask=mask)


@triton.jit
def _decoded(
    message,
    start,
    count,
    scales_at,
    rows_at,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    FULL: tl.constexpr,
    NUMEL: tl.constexpr,
):
    """NUMEL elements from `start` on in FP32, in blocks [n, elements of one].

    Blocks in which the tensor has none of its `count` elements are not read, and anything.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else block_numel(FORMAT, ROW)
    blocks = tl.arange(0, NUMEL // BLOCK)
    lanes = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = None
    mask_blocks = None
    if not FULL:
        mask = blocks * BLOCK < count
        mask_blocks = mask[:, None]
    data = message + _DATA_AT
    if FORMAT == "fp32" or FORMAT == "bf16" or FORMAT == "fp16":
        dtype: tl.constexpr = (
            tl.float32 if FORMAT == "fp32" else (tl.bfloat16 if FORMAT == "bf16" else tl.float16)
        )
        elements = section(message, _DATA_AT, dtype) + start
        return to_fp32(tl.load(aligned_from(elements, lanes), mask=mask_blocks))
    else:
        if FORMAT == "nvfp4":
            pairs = tl.arange(0, NUMEL // 2)
            mask_pairs = None
            if not FULL:
                mask_pairs = pairs * 2 < count
            pointers = tl.multiple_of(data + (start >> 1) + pairs.to(tl.int64), 16)
            packed = tl.load(pointers, mask=mask_pairs)
            values = device.decode_e2m1(device.unpack_nibbles(tl.reshape(packed, [NUMEL // 16, 8])))
        elif FORMAT == "mxfp4":
            pairs = blocks[:, None] * 16 + tl.arange(0, 16)[None, :]
            packed = tl.load(aligned_from(data + (start >> 1), pairs), mask=mask_blocks)
            values = device.decode_e2m1(device.unpack_nibbles(packed))
        else:
            made = tl.load(aligned_from(data + start, lanes), mask=mask_blocks)
            values = device.decode_e4m3(made, HARDWARE)
        factors = _block_factors(
            message, start, blocks, mask, scales_at, rows_at, FORMAT, ROW, HARDWARE
        )
        return values * factors[:, None]


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
        values = values * scale
    if ACCUMULATE:
        values = to_fp32(tl.load(pointers, mask=mask)) + values
    tl.store(pointers, round_to(values, tensor.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_part(
    address,
    kind,
    begin,
    count,
    message,
    start,
    scales_at,
    rows_at,
    scale,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HARDWARE: tl.constexpr,
    FULL: tl.constexpr,
    NUMEL: tl.constexpr,
):
    """NUMEL elements from `start` on in the message to those of the tensor from `begin` on.

    A kind, a dtype's code, that is known when compiling leaves one of the branches.
    """
    values = _decoded(message, start, count, scales_at, rows_at, FORMAT, ROW, HARDWARE, FULL, NUMEL)
    if kind == KIND_FP32:
        _store(values, kind_pointer(address, KIND_FP32) + begin, count, scale, ACCUMULATE, FULL)
    elif kind == KIND_BF16:
        _store(values, kind_pointer(address, KIND_BF16) + begin, count, scale, ACCUMULATE, FULL)
    else:
        _store(values, kind_pointer(address, KIND_FP16) + begin, count, scale, ACCUMULATE, FULL)


@triton.jit(
    do_not_specialize=["tiles_at", "scales_at", "rows_at"],
    do_not_specialize_on_alignment=["message", "table"],
)
def _unpack_kernel(
    message,
    table,
    tiles_at,
    scales_at,
    rows_at,
    scale,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HARDWARE: tl.constexpr,
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
    # A tensor may have more than 2**31 elements, so all that counts elements is int64.
    program = tl.program_id(0).to(tl.int64)
    row, begin = piece_of(table, tiles_at, program, TILE)
    address = tl.load(row + _ADDRESS)
    count = tl.load(row + _NUMEL) - begin
    start = tl.load(row + _OFFSET) + begin
    kind = KIND
    if KIND == _MIXED:
        kind = tl.load(row + _DTYPE)
    is_full = FULL
    if FULL and MASKED:
        is_full = (tl.load(row + _ALIGNED) != 0) & (count >= TILE)
    if is_full:
        for code in tl.static_range(_MIXED):
            if kind == code:
                _unpack_part(
                    address,
                    code,
                    begin,
                    count,
                    message,
                    start,
                    scales_at,
                    rows_at,
                    scale,
                    FORMAT,
                    ROW,
                    ACCUMULATE,
                    HARDWARE,
                    True,
                    TILE,
                )
    elif MASKED:
        for first in range(0, covered(count, TILE), PART):
            _unpack_part(
                address,
                kind,
                begin + first,
                count - first,
                message,
                start + first,
                scales_at,
                rows_at,
                scale,
                FORMAT,
                ROW,
                ACCUMULATE,
                HARDWARE,
                False,
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
    keys = unpacked_pieces(rows, offsets)
    if not keys:
        return
    config = config_for("unpack_message_", format, default_config(), message.device)
    tile = config.block_bytes
    paths = paths_of(keys, tile)
    row_numel = row_numel if layout.format.has_rows else ALIGN_NUMEL
    source = aligned_memory(message)
    if source is not message:
        source.copy_(message)
    table = _tables.get(keys, tile, message.device)
    launch(
        _unpack_kernel,
        table.num_tiles,
        source,
        table.entries,
        table.tiles_at,
        layout.scales_at,
        layout.row_scales_at,
        None if scale == 1.0 else scale,
        on=message,
        num_warps=config.num_warps,
        FORMAT=format,
        ROW=row_numel,
        ACCUMULATE=accumulate,
        KIND=paths.dtype,
        FULL=paths.full,
        MASKED=paths.masked,
        TILE=tile,
        PART=part_numel(tile, row_numel),
    )
    for tensor, row in zip(tensors, rows, strict=True):
        if row is not tensor:
            tensor.copy_(row)
