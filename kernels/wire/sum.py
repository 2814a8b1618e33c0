"""The sum of wire messages on the GPU: decode one per rank, add in rank order, round once.

Formula and rounding are those of `reference`. Bytes moved: those of the messages, and those of the
result, the result's twice with `accumulate`. One path serves full tiles and the last one: a message
has whole groups of 128 elements, so a tile's missing groups are read as its last one again and not
stored, and accesses are 16 bytes wide to the end. Memory that is not 16-byte aligned is read byte
by byte.

Compiled anew for: the format, the dtype of the result, rows or table, scaled, accumulating, aligned
or not, and of the world size w: up to 8 messages there is no loop, so for w; above that a loop
takes three at a time, however many, so for w - 1 modulo 3.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..device_numbers import number_of
from ..formats import device_codes as device
from ..formats.device_table import codec_of
from ..formats.table import ALIGN_NUMEL, BITS_PER_BYTE, MessageFormat
from ..launch import ACCESS_BYTES, THREADS_PER_WARP, LaunchConfig, is_aligned, launch
from ..numbers import Scale, unless_one
from ..portable import round_to, to_fp32
from ..table_cache import TableCache
from ..tables import TileTable
from ..tuned import config_for
from ..wide import aligned_pointers
from .layout import DEFAULT_ROW_NUMEL, HEADER_BYTES, MessageLayout, layout_of_numel
from .tiles import word_of

NUM_WARPS = 4
MAX_UNROLLED = 8  # messages, as many as a node has GPUs, that need no loop
# With seven, ptxas 12.9 spills 8 bytes of MXFP4's kernel for sm_100; it has two loads in flight
# before it decodes, whatever it is given.
ROWS_IN_LOOP = 3

_GROUP = tl.constexpr(ALIGN_NUMEL)  # every message has whole ones, and so has every row of one
_ACCESS_BYTES = tl.constexpr(ACCESS_BYTES)
_DATA_AT = tl.constexpr(HEADER_BYTES)
_BITS_PER_BYTE = tl.constexpr(BITS_PER_BYTE)
_ROWS_IN_LOOP = tl.constexpr(ROWS_IN_LOOP)


def _addresses(addresses: Sequence[int], _tile_size: int) -> TileTable:
    """Every program reads the whole table, so none of it tells what is a program's own."""
    return TileTable(torch.tensor(addresses), len(addresses), 0, 0)


_tables = TableCache(table_of=_addresses)


@triton.jit
def _words(base, places, WIDTH: tl.constexpr, unsigned: tl.constexpr, ALIGNED: tl.constexpr):
    """`unsigned` words [places, WIDTH] of the memory at `base`, where each place has WIDTH words.

    ALIGNED: what a place has is aligned to its size, or to 16 bytes; else it may begin anywhere.
    """
    at = places[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BYTES: tl.constexpr = unsigned.primitive_bitwidth // 8
    if ALIGNED:
        pointers = base.to(tl.pointer_type(unsigned), bitcast=True) + at
        return tl.load(tl.multiple_of(pointers, [1, min(_ACCESS_BYTES, WIDTH * BYTES)]))
    else:
        words = tl.zeros(at.shape, unsigned)
        for byte in tl.static_range(BYTES):
            words |= tl.load(base + (at * BYTES + byte)).to(unsigned) << (8 * byte)
        return words


@triton.jit
def _factors(
    message, tile, layout, CODEC: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr
):
    """What blocks are multiplied by, FP32 [groups, blocks of a group]."""
    first_group, groups = tile
    scales_at, row_scales_at, row_shift = layout
    scales = None
    row_scales = None
    if CODEC.block_numel:
        BITS: tl.constexpr = CODEC.scale.primitive_bitwidth
        BLOCKS: tl.constexpr = _GROUP // CODEC.block_numel
        base = message + scales_at + first_group * (BLOCKS * BITS // _BITS_PER_BYTE)
        scales = _words(base, groups, BLOCKS, word_of(BITS), ALIGNED).to(CODEC.scale, bitcast=True)
    if CODEC.has_rows:
        rows = (first_group + groups) >> row_shift
        row_scales = _words(message + row_scales_at, rows, 1, tl.uint32, ALIGNED)
        row_scales = row_scales.to(tl.float32, bitcast=True)
    return CODEC.factors(scales, row_scales, CODEC, HARDWARE)


@triton.jit
def _codes(data, tile, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Codes [groups, 128] of BITS bits: of 4, words of eight, uint32 [groups, 16]."""
    first_group, groups = tile
    base = data + first_group * (_GROUP * BITS // _BITS_PER_BYTE)
    if BITS < _BITS_PER_BYTE:
        return _words(base, groups, 16, tl.uint32, ALIGNED)
    else:
        return _words(base, groups, _GROUP, word_of(BITS), ALIGNED)


@triton.jit
def _decoded(
    message, tile, layout, CODEC: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr
):
    """The tile's elements of one message, FP32 [groups, 128]."""
    codes = _codes(message + _DATA_AT, tile, CODEC.element.form.stored_bits, ALIGNED)
    values = device.values_of(codes, CODEC.element, HARDWARE)
    if CODEC.factors is not None:
        factors = _factors(message, tile, layout, CODEC, ALIGNED, HARDWARE)
        GROUPS: tl.constexpr = codes.shape[0]
        BLOCKS: tl.constexpr = GROUPS * factors.shape[1]
        values = tl.reshape(values, [BLOCKS, GROUPS * _GROUP // BLOCKS])
        values = tl.reshape(values * tl.reshape(factors, [BLOCKS])[:, None], [GROUPS, _GROUP])
    return values


@triton.jit
def _message_of(rank, messages, num_bytes, TABLE: tl.constexpr):
    """Where the message of `rank` begins: in rows, or where the table says."""
    rank = tl.cast(rank, tl.int64)
    if TABLE:
        return tl.load(messages + rank).to(tl.pointer_type(tl.uint8))
    else:
        return messages + rank * num_bytes


@triton.jit(
    do_not_specialize=[
        "world",
        "num_bytes",
        "num_groups",
        "scales_at",
        "row_scales_at",
        "row_shift",
        "scale",
    ],
    do_not_specialize_on_alignment=["out", "messages"],
)
def _reduce_kernel(
    out,
    messages,
    world,
    num_bytes,
    num_groups,
    scales_at,
    row_scales_at,
    row_shift,
    scale,
    CODEC: tl.constexpr,
    TABLE: tl.constexpr,
    REST: tl.constexpr,
    LOOPED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """GROUPS groups of 128 elements: row 0, REST rows more, and rows by threes if LOOPED.

    Example: MXFP8, world 9, 256 elements, GROUPS 16. 1 + 2 rows, then 2 times 3. Program 0 has 2
    groups of its own and reads group 1 in the place of 14 others; element 130 of rank r is
    code[16 + 130] * 2^(byte[16 + 256 + 130 // 32] - 127) of the bytes of row r.
    """
    first_group = tl.program_id(0).to(tl.int64) * GROUPS
    lanes = tl.arange(0, GROUPS)
    last = tl.minimum(num_groups - first_group, GROUPS).to(tl.int32) - 1
    groups = tl.minimum(lanes, last)
    tile = (first_group, groups)
    layout = (scales_at, row_scales_at, row_shift)
    message = _message_of(0, messages, num_bytes, TABLE)
    total = _decoded(message, tile, layout, CODEC, ALIGNED, HARDWARE)
    for step in tl.static_range(REST):
        message = _message_of(1 + step, messages, num_bytes, TABLE)
        total += _decoded(message, tile, layout, CODEC, ALIGNED, HARDWARE)
    if LOOPED:
        rank = 1 + REST
        while rank < world:
            for step in tl.static_range(_ROWS_IN_LOOP):
                message = _message_of(rank + step, messages, num_bytes, TABLE)
                total += _decoded(message, tile, layout, CODEC, ALIGNED, HARDWARE)
            rank += _ROWS_IN_LOOP
    if scale is not None:
        total = total * number_of(scale)
    destinations = out + first_group * _GROUP
    if ALIGNED:
        destinations = aligned_pointers(destinations, lanes * _GROUP, _GROUP)
    else:
        destinations += lanes[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    mask = (lanes <= last)[:, None]
    if ACCUMULATE:
        total = to_fp32(tl.load(destinations, mask=mask, other=0.0)) + total
    tl.store(destinations, round_to(total, out.dtype.element_ty), mask=mask)


def tile_groups(form: MessageFormat) -> int:
    """Groups of a program: 16 bytes an access of the codes, and of a result of 2 bytes."""
    threads = NUM_WARPS * THREADS_PER_WARP
    numel = max(ACCESS_BYTES * BITS_PER_BYTE // form.element.stored_bits, ACCESS_BYTES // 2)
    return threads * numel // ALIGN_NUMEL


@functools.cache
def default_config(form: MessageFormat) -> LaunchConfig:
    """An element counts as a byte."""
    return LaunchConfig(tile_groups(form) * ALIGN_NUMEL, NUM_WARPS)


def reduce_messages_(
    out: torch.Tensor,
    messages: torch.Tensor,
    format: str,
    scale: Scale = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """`reference.reduce_messages_` in one launch."""
    layout = layout_of_numel(format, out.numel(), row_numel=row_numel)
    if layout.numel == 0:
        return
    aligned, world = is_aligned(out, messages), len(messages)
    _launch(out, messages, world, layout, scale, accumulate, aligned=aligned)


def reduce_peer_messages_(
    out: torch.Tensor,
    messages: Sequence[torch.Tensor],
    format: str,
    scale: Scale = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """`reference.reduce_peer_messages_` in one launch, by a table of addresses."""
    layout = layout_of_numel(format, out.numel(), row_numel=row_numel)
    if layout.numel == 0:
        return
    aligned = is_aligned(out, *messages)
    addresses = tuple(message.data_ptr() for message in messages)
    table = _tables.get(addresses, 0, out.device).entries
    _launch(out, table, len(messages), layout, scale, accumulate, aligned=aligned)


def _launch(
    out: torch.Tensor,
    messages: torch.Tensor,
    world: int,
    layout: MessageLayout,
    scale: Scale,
    accumulate: bool,
    *,
    aligned: bool,
) -> None:
    """`messages`: uint8 [world, num_bytes], or int64 [world], the table of addresses."""
    form = layout.format
    by_addresses = messages.dtype is torch.int64
    op = "reduce_peer_messages_" if by_addresses else "reduce_messages_"
    config = config_for(op, form.name, default_config(form), out.device)
    num_groups, groups = layout.numel // ALIGN_NUMEL, config.block_bytes // ALIGN_NUMEL
    launch(
        _reduce_kernel,
        triton.cdiv(num_groups, groups),
        out,
        messages,
        world,
        layout.num_bytes,
        num_groups,
        layout.scales_at,
        layout.row_scales_at,
        (layout.row_numel // ALIGN_NUMEL).bit_length() - 1,
        unless_one(scale),
        on=out,
        num_warps=config.num_warps,
        CODEC=codec_of(form),
        TABLE=by_addresses,
        REST=world - 1 if world <= MAX_UNROLLED else (world - 2) % ROWS_IN_LOOP + 1,
        LOOPED=world > MAX_UNROLLED,
        ACCUMULATE=accumulate,
        ALIGNED=aligned,
        GROUPS=groups,
    )
