"""Packing on the GPU: any number of tensors to or from one flat buffer in one launch.

Formula and rounding are those of `reference`; `tables` tells each program its tile. Bytes moved:
numel * (bytes of a source element + bytes of a destination element), the destination twice with
`accumulate`, and 8 bytes of table a tile. A tile that is full and 16-byte aligned on both sides
takes the unmasked path, 16 bytes an access; tails and unaligned tensors take the masked one, an
element an access. Both are in one kernel, as are all dtypes of the tensors: the table sends each
program its way, so that no mixture needs a second launch.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import tables
from ..formats.table import wire_format_of
from ..launch import LaunchConfig, config_of, launch
from ..portable import covered, round_to, to_fp32
from ..tuned import config_for
from ..wide import wide_lanes

_ADDRESS, _NUMEL = tl.constexpr(tables.ADDRESS), tl.constexpr(tables.NUMEL)
_OFFSET, _FIRST_TILE = tl.constexpr(tables.OFFSET), tl.constexpr(tables.FIRST_TILE)
_DTYPE, _ALIGNED = tl.constexpr(tables.DTYPE), tl.constexpr(tables.ALIGNED)
_ROW_FIELDS = tl.constexpr(tables.ROW_FIELDS)
_FP32, _BF16, _FP16 = (
    tl.constexpr(tables.CODED_DTYPES.index(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)

_tables = tables.TableCache()


@triton.jit
def _combine(
    value, old, scale, SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, dtype: tl.constexpr
):
    """round(float32(old) + float32(value) * scale) to `dtype`."""
    if value.dtype == dtype and not SCALED and not ACCUMULATE:
        return value
    total = to_fp32(value)
    if SCALED:
        total = total * scale
    if ACCUMULATE:
        total = to_fp32(old) + total
    return round_to(total, dtype)


@triton.jit
def _move_full_tile(
    source, destination, scale, SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr
):
    """Both pointers are 16-byte aligned, which loaded addresses do not show: hence the hints."""
    sources = tl.multiple_of(source + wide_lanes(BLOCK), 16)
    destinations = tl.multiple_of(destination + wide_lanes(BLOCK), 16)
    value = tl.load(sources)
    old = value
    if ACCUMULATE:
        old = tl.load(destinations)
    dtype: tl.constexpr = destination.dtype.element_ty
    tl.store(destinations, _combine(value, old, scale, SCALED, ACCUMULATE, dtype))


@triton.jit
def _move_masked_tile(
    source,
    destination,
    count,
    scale,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In four pieces: their shape is not the full tile's, so the compiler does not give both paths
    one layout, which here would make strided scalar accesses."""
    dtype: tl.constexpr = destination.dtype.element_ty
    for first in range(0, covered(count, BLOCK), BLOCK // 4):
        lanes = first + tl.arange(0, BLOCK // 4)
        mask = lanes < count
        value = tl.load(source + lanes, mask=mask, other=0.0)
        old = value
        if ACCUMULATE:
            old = tl.load(destination + lanes, mask=mask, other=0.0)
        moved = _combine(value, old, scale, SCALED, ACCUMULATE, dtype)
        tl.store(destination + lanes, moved, mask=mask)


@triton.jit
def _move_tile(
    tensor,
    flat,
    start,
    numel,
    aligned,
    scale,
    UNPACK: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    source = (flat if UNPACK else tensor) + start
    destination = (tensor if UNPACK else flat) + start
    count = numel - start
    if aligned != 0 and count >= BLOCK:
        _move_full_tile(source, destination, scale, SCALED, ACCUMULATE, BLOCK)
    else:
        _move_masked_tile(source, destination, count, scale, SCALED, ACCUMULATE, BLOCK)


@triton.jit(do_not_specialize=["tiles_at"], do_not_specialize_on_alignment=["flat", "table"])
def _pack_kernel(
    flat,
    table,
    tiles_at,
    scale,
    UNPACK: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """One tile of one tensor.

    Example with tiles of 16 bytes: FP32 tensors of 6 and 3 elements at offsets 0 and 8 make the
    rows [.., 6, 0, 0, ..] and [.., 3, 8, 2, ..] and the tiles [0, 0, 1]. Program 1 has tensor 0,
    starts at (1 - 0) * 4 = 4 and has 2 elements left: it moves elements 4 and 5 from or to flat[4]
    and flat[5].
    """
    # A tensor may have more than 2**31 elements, so all that counts elements is int64.
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(table + tiles_at + program) * _ROW_FIELDS
    address = tl.load(row + _ADDRESS)
    numel = tl.load(row + _NUMEL)
    flat += tl.load(row + _OFFSET)
    tile = program - tl.load(row + _FIRST_TILE)
    dtype = tl.load(row + _DTYPE)
    aligned = tl.load(row + _ALIGNED)
    WIDE: tl.constexpr = TILE_BYTES // 4
    HALF: tl.constexpr = TILE_BYTES // 2
    if dtype == _FP32:
        wide = address.to(tl.pointer_type(tl.float32))
        _move_tile(wide, flat, tile * WIDE, numel, aligned, scale, UNPACK, SCALED, ACCUMULATE, WIDE)
    elif dtype == _BF16:
        brain = address.to(tl.pointer_type(tl.bfloat16))
        _move_tile(
            brain, flat, tile * HALF, numel, aligned, scale, UNPACK, SCALED, ACCUMULATE, HALF
        )
    elif dtype == _FP16:
        half = address.to(tl.pointer_type(tl.float16))
        _move_tile(half, flat, tile * HALF, numel, aligned, scale, UNPACK, SCALED, ACCUMULATE, HALF)


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of one tensor, so its elements follow from the dtype; two accesses in flight."""
    return config_of(num_warps=8, accesses=2)


def pack_(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """`reference.pack_` in one launch; non-contiguous tensors are made contiguous first."""
    rows = [tensor.contiguous() for tensor in tensors]
    _launch(flat, rows, offsets, scale, accumulate, unpack=False)


def unpack_(
    tensors: Sequence[torch.Tensor],
    flat: torch.Tensor,
    offsets: Sequence[int],
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """`reference.unpack_` in one launch; non-contiguous tensors are filled by way of a copy."""
    rows = [tensor.contiguous() for tensor in tensors]
    _launch(flat, rows, offsets, scale, accumulate, unpack=True)
    for tensor, row in zip(tensors, rows, strict=True):
        if row is not tensor:
            tensor.copy_(row)


def _launch(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float,
    accumulate: bool,
    *,
    unpack: bool,
) -> None:
    keys = tables.tensor_keys(flat, tensors, offsets)
    if not keys:
        return
    config = config_for(
        "unpack_" if unpack else "pack_",
        wire_format_of(flat.dtype).name + " accumulate" * accumulate,
        default_config(),
        flat.device,
    )
    table = _tables.get(keys, config.block_bytes, flat.device)
    launch(
        _pack_kernel,
        table.num_tiles,
        flat,
        table.entries,
        table.tiles_at,
        scale,
        on=flat,
        num_warps=config.num_warps,
        UNPACK=unpack,
        SCALED=scale != 1.0,
        ACCUMULATE=accumulate,
        TILE_BYTES=config.block_bytes,
    )
