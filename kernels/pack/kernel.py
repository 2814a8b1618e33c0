"""Packing on the GPU: any number of tensors to or from one flat buffer in one launch.

Formula and rounding are those of `reference`; `tables` tells each program its tile. Bytes moved:
numel * (bytes of a source element + bytes of a destination element), the destination twice with
`accumulate`. A tile that is full and 16-byte aligned on both sides takes the unmasked path, 16
bytes an access; tails and unaligned tensors take the masked one, an element an access. Both are in
one kernel, as are all dtypes of the tensors: the table sends each program its way, so that no
mixture needs a second launch.
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
from ..device_numbers import number_of
from ..device_tables import NUM_CODES, fields_of, numel_of, pointer_of, row_of
from ..formats.table import wire_format_of
from ..launch import LaunchConfig, config_of, launch
from ..numbers import Scale, unless_one
from ..paths import for_tile, load, store
from ..portable import round_to, to_fp32
from ..table_cache import TableCache
from ..tuned import config_for

_tables = TableCache()


@triton.jit
def _move_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """round(float32(old) + float32(value) * scale), to the destination's dtype."""
    source, destination, scale = arguments[:3]
    ACCUMULATE: tl.constexpr = arguments[3]
    dtype: tl.constexpr = destination.dtype.element_ty
    value = load(source, place, FULL, NUMEL)
    if value.dtype != dtype or scale is not None or ACCUMULATE:
        total = to_fp32(value)
        if scale is not None:
            total = total * number_of(scale)
        if ACCUMULATE:
            total = to_fp32(load(destination, place, FULL, NUMEL)) + total
        value = round_to(total, dtype)
    store(destination, value, place, FULL, NUMEL)


@triton.jit
def _move_tile(
    tensor,
    flat,
    tile,
    row,
    scale,
    UNPACK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """That of the `tensor`, whose row has these fields."""
    _, numel, offset, _, aligned = row
    BLOCK: tl.constexpr = numel_of(tensor.dtype.element_ty, TILE_BYTES)
    start = tile.to(tl.int64) * BLOCK
    tensor += start
    flat += offset + start
    source = flat if UNPACK else tensor
    destination = tensor if UNPACK else flat
    for_tile(_move_part, (source, destination, scale, ACCUMULATE), numel - start, aligned, BLOCK)


@triton.jit(
    do_not_specialize=["num_rows", "scale"], do_not_specialize_on_alignment=["flat", "table"]
)
def _pack_kernel(
    flat,
    table,
    num_rows,
    scale,
    UNPACK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """One tile of one tensor.

    Example with tiles of 16 bytes: FP32 tensors of 6 and 3 elements at offsets 0 and 8 make the
    rows [.., 6, 0, ..] and [.., 3, 8, ..] and the first tiles 0 and 2. Program 1 has tensor 0,
    starts at (1 - 0) * 4 = 4 and has 2 elements left: it moves elements 4 and 5 from or to flat[4]
    and flat[5].
    """
    row, tile = row_of(table, num_rows, STEPS)
    fields = fields_of(row)
    for code in tl.static_range(NUM_CODES):
        if fields[3] == code:
            tensor = pointer_of(fields[0], code)
            _move_tile(tensor, flat, tile, fields, scale, UNPACK, ACCUMULATE, TILE_BYTES)


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of one tensor, so its elements follow from the dtype; two accesses in flight."""
    return config_of(num_warps=8, accesses=2)


def pack_(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: Scale = 1.0,
    accumulate: bool = False,
) -> None:
    """`reference.pack_` in one launch; non-contiguous tensors are made contiguous first."""
    rows = [tensor.contiguous() for tensor in tensors]
    _launch(flat, rows, offsets, scale, accumulate, unpack=False)


def unpack_(
    tensors: Sequence[torch.Tensor],
    flat: torch.Tensor,
    offsets: Sequence[int],
    scale: Scale = 1.0,
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
    scale: Scale,
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
        table.num_rows,
        unless_one(scale),
        on=flat,
        num_warps=config.num_warps,
        UNPACK=unpack,
        ACCUMULATE=accumulate,
        STEPS=table.search_steps,
        TILE_BYTES=config.block_bytes,
    )
