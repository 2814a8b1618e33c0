"""How messages are cut into tiles: tables that tell programs what to work on, and the source.

A piece is the elements of a tensor and the gap after it, in the vector of all messages. It is cut
where they end, and a program has a tile of one cut. Table rows, a cut each, are those of `tables`,
longer by three: EXTENT, how many elements of the message it has, INDEX, the first one's for the
noise of stochastic rounding, and MESSAGE_AT, the byte at which its message begins. OFFSET counts
in that message. Aligned rows are those of which full tiles may take the unmasked path: all cuts of
a piece or none, since messages have whole groups of 128 elements.

Rows of up to 4096 elements divide a tile, so a program has whole blocks, and whole rows.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import tables
from ..device_numbers import number_of
from ..device_tables import CODE_BF16, CODE_FP16, CODE_FP32, fields_of, pointer_of, row_of
from ..formats.noise import GROUP_NUMEL
from ..launch import ACCESS_BYTES
from ..portable import INTERPRETED, covered, to_fp32
from ..wide import aligned_blocks, aligned_eights
from .layout import MAX_ROW_NUMEL, MessageLayout

EXTENT, INDEX, MESSAGE_AT = (tables.ROW_FIELDS + field for field in range(3))
ROW_FIELDS = tables.ROW_FIELDS + 3
TILE_NUMEL = MAX_ROW_NUMEL  # 32 elements a thread
NUM_WARPS = 4
MIXED = len(tables.CODED_DTYPES)  # in the place of a dtype's code: tensors of several

_EIGHT, _MIXED = tl.constexpr(8), tl.constexpr(MIXED)
_EXTENT, _INDEX, _ROW_FIELDS = tl.constexpr(EXTENT), tl.constexpr(INDEX), tl.constexpr(ROW_FIELDS)
_MESSAGE_AT = tl.constexpr(MESSAGE_AT)

# Address, numel, offset, dtype code, aligned, extent, index: of one tensor.
PieceKey = tuple[int, int, int, int, bool, int, int]
_ELEMENT_BYTES = tuple(dtype.itemsize for dtype in tables.CODED_DTYPES)


class Pieces(NamedTuple):
    """Pieces of the vector of messages that have `numel` elements and `num_bytes` each.

    A key of tables: it tells all of them, and is no longer for more messages.
    """

    keys: tuple[PieceKey, ...]
    numel: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Paths:
    """What a launch must be compiled for: one dtype's code or MIXED, and which paths."""

    dtype: int
    full: bool
    masked: bool


def piece_table(pieces: Pieces, tile_numel: int) -> tables.TileTable:
    """The table, on the CPU; see `tables`."""
    rows: list[tuple[int, ...]] = []
    first_tile = 0
    for key in pieces.keys:
        for address, numel, offset, code, aligned, extent, index, message_at in _cuts(key, pieces):
            first = tables.first_tile_of(first_tile, aligned)
            rows.append((address, numel, offset, first, code, extent, index, message_at))
            first_tile += -(-extent // tile_numel)
    return tables.table_of(rows, first_tile)


def _cuts(key: PieceKey, pieces: Pieces) -> Iterator[tuple[int, ...]]:
    """A piece, at least once: its key in each message, whose place comes last.

    Example: of messages of 256 elements, a tensor of 600 at 128 is cut into 128, 256 and 216, with
    the offsets 128, 0 and 0.
    """
    address, numel, offset, code, aligned, extent, index = key
    size = pieces.numel or 1
    end = offset + extent
    for number in range(offset // size, max(end - 1, offset) // size + 1):
        place = max(offset - number * size, 0)
        skipped = number * size + place - offset
        extent = min(end - number * size, size) - place
        there = max(min(numel - skipped, extent), 0)
        start = address + skipped * _ELEMENT_BYTES[code]
        message_at = number * pieces.num_bytes
        yield start, there, place, code, aligned, extent, index + skipped, message_at


def packed_pieces(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    first_indices: Sequence[int] | None,
    layout: MessageLayout,
    num_messages: int = 1,
) -> Pieces:
    """Pieces that make all elements of the messages, at least one; contiguous tensors.

    What is before the first tensor, or messages without any, is a piece of its own, all gap.
    """
    placed = _placed(tensors, offsets, first_indices)
    begins = [*(offset for offset, _, _ in placed), layout.numel * num_messages]
    keys: list[PieceKey] = []
    if begins[0] or not placed:
        keys.append((0, 0, 0, 0, False, begins[0], 0))
    for (offset, tensor, index), end in zip(placed, begins[1:], strict=True):
        keys.append(_key(tensor, offset, end - offset, index))
    return Pieces(tuple(keys), layout.numel, layout.num_bytes)


def unpacked_pieces(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], layout: MessageLayout
) -> Pieces:
    """Pieces that fill the contiguous tensors."""
    placed = _placed(tensors, offsets, None)
    keys = tuple(_key(tensor, offset, tensor.numel(), 0) for offset, tensor, _ in placed)
    return Pieces(keys, layout.numel, layout.num_bytes)


def paths_of(pieces: Pieces, tile_numel: int) -> Paths:
    """The paths that tiles of these pieces take, or of those that are cut may take."""
    codes = {code for _, numel, _, code, _, _, _ in pieces.keys if numel}
    full = masked = False
    for _, numel, offset, _, aligned, extent, _ in pieces.keys:
        full |= aligned and min(numel, pieces.numel) >= tile_numel
        has_tail = any(size % tile_numel for size in _sizes(offset, extent, pieces.numel))
        masked |= has_tail or (extent > 0 and (not aligned or numel < extent))
    dtype = codes.pop() if len(codes) == 1 else MIXED
    return Paths(dtype=dtype, full=full, masked=masked)


def _sizes(offset: int, extent: int, message_numel: int) -> tuple[int, ...]:
    """Of the cuts of a piece, of which only the first and the last are not whole messages."""
    place = offset % max(message_numel, 1)
    if place + extent <= message_numel:
        return (extent,)
    return message_numel - place, message_numel, (place + extent) % message_numel


def _placed(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], first_indices: Sequence[int] | None
) -> list[tuple[int, torch.Tensor, int]]:
    """(Offset, tensor, index) of those that have elements, in the order of the message."""
    indices = [0] * len(tensors) if first_indices is None else first_indices
    placed = zip(offsets, tensors, indices, strict=True)
    return sorted((entry for entry in placed if entry[1].numel()), key=lambda entry: entry[0])


def _key(tensor: torch.Tensor, offset: int, extent: int, index: int) -> PieceKey:
    address = tensor.data_ptr()
    # Noise is drawn for 16 elements at once, from a multiple of 16 on.
    aligned = address % ACCESS_BYTES == 0 and index % GROUP_NUMEL == 0
    code = tables.CODED_DTYPES.index(tensor.dtype)
    return address, tensor.numel(), offset, code, aligned, extent, index


def part_numel(tile_numel: int, row_numel: int) -> int:
    """Elements of the parts, of whole rows, that a masked tile is worked on in.

    Their other shape keeps the compiler from giving both paths one layout. To Triton's interpreter
    a layout is nothing, and a part as much work as a tile.
    """
    return tile_numel if INTERPRETED.value else max(tile_numel // 4, row_numel)


@triton.constexpr_function
def word_of(bits: int) -> tl.dtype:
    """The unsigned integer of so many bits."""
    return {8: tl.uint8, 16: tl.uint16, 32: tl.uint32}[bits]


@triton.jit
def over(start, EACH: tl.constexpr) -> tl.tensor:
    """start // EACH of start >= 0, EACH a power of two: a shift, as compilers do not know that."""
    return start >> log2(EACH)


@triton.constexpr_function
def log2(number: int) -> int:
    """Of a power of two."""
    return number.bit_length() - 1


@triton.jit
def for_piece(
    PART: tl.constexpr,
    table,
    num_rows,
    arguments,
    STEPS: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    PART_NUMEL: tl.constexpr,
) -> None:
    """Calls the JIT function PART(piece, kind, begin, arguments, FULL, NUMEL) for all of a tile.

    Once, FULL, with TILE elements from `begin` on and a kind, the code of the tensor's dtype, that
    is a constant; or for parts of PART_NUMEL, masked. KIND: the code of all tensors' dtype, or
    MIXED. FULL, MASKED: the paths that are needed. piece: (address, numel, offset, extent, index,
    byte at which its message begins).
    """
    row, tile = row_of(table, num_rows, STEPS, _ROW_FIELDS)
    address, numel, offset, kind, aligned = fields_of(row)
    extent = tl.load(row + _EXTENT)
    index = tl.load(row + _INDEX)
    message_at = tl.load(row + _MESSAGE_AT)
    piece = (address, numel, offset, extent, index, message_at)
    begin = tile.to(tl.int64) * TILE
    if KIND != _MIXED:
        kind = KIND
    is_full = FULL
    if FULL and MASKED:
        is_full = (aligned != 0) & (numel - begin >= TILE)
    if is_full:
        for code in tl.static_range(_MIXED):
            if kind == code:
                PART(piece, code, begin, arguments, True, TILE)
    elif MASKED:
        for first in range(0, covered(extent - begin, TILE), PART_NUMEL):
            PART(piece, kind, begin + first, arguments, False, PART_NUMEL)


@triton.jit
def loaded(
    source, places, count, scale, SIXTEENS: tl.constexpr, FULL: tl.constexpr, NUMEL: tl.constexpr
) -> tl.tensor:
    """FP32 [n, NUMEL] from each place on, times `scale`; zeros where the tensor has none."""
    if FULL:
        if NUMEL == _EIGHT:
            x = aligned_eights(source, places)
        elif SIXTEENS:
            x = aligned_blocks(source, places, NUMEL)
        else:
            x = to_fp32(tl.load(aligned_from(source, lanes_of(places, NUMEL))))
        if scale is not None:
            x = x * number_of(scale)
    else:
        lanes = lanes_of(places, NUMEL)
        exists = lanes < count
        x = to_fp32(tl.load(source + lanes, mask=exists, other=0.0))
        if scale is not None:
            x = tl.where(exists, x * number_of(scale), 0.0)
    return x


@triton.jit
def lanes_of(places, NUMEL: tl.constexpr) -> tl.tensor:
    """[n, NUMEL] from each place on."""
    return places[:, None] + tl.arange(0, NUMEL)[None, :]


@triton.jit
def values_of(
    address,
    kind,
    begin,
    places,
    count,
    scale,
    SIXTEENS: tl.constexpr,
    FULL: tl.constexpr,
    NUMEL: tl.constexpr,
) -> tl.tensor:
    """`loaded` from the tensor at `address`, from its element `begin` on; kind: its dtype's code.

    A kind known when compiling leaves one of the branches, and one layout.
    """
    if kind == CODE_FP32:
        wide = pointer_of(address, CODE_FP32) + begin
        x = loaded(wide, places, count, scale, SIXTEENS, FULL, NUMEL)
    elif kind == CODE_BF16:
        brain = pointer_of(address, CODE_BF16) + begin
        x = loaded(brain, places, count, scale, SIXTEENS, FULL, NUMEL)
    else:
        half = pointer_of(address, CODE_FP16) + begin
        x = loaded(half, places, count, scale, SIXTEENS, FULL, NUMEL)
    return x


@triton.jit
def aligned_from(base, lanes) -> tl.tensor:
    """Pointers [n, m] to the elements `lanes` from `base` on, 16-byte aligned, m of them at once.

    The hint must sit on the sum it is about. Of 32-bit offsets AMD's compiler makes other sums.
    """
    return tl.multiple_of(base + lanes.to(tl.int64), [1, 16])


@triton.jit
def section(message, at, dtype: tl.constexpr) -> tl.tensor:
    """A pointer to the elements of `dtype` that begin at byte `at`."""
    return (message + at).to(tl.pointer_type(dtype), bitcast=True)
