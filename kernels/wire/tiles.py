"""How a message is cut into tiles: tables that tell programs what to work on, and the source.

A program has a tile of one piece: the elements of a tensor and the gap after it. Table rows are
those of `tables`, longer by two: EXTENT, how many elements of the message the piece has, and INDEX,
the first one's for the noise of stochastic rounding. ALIGNED says whether full tiles of the piece
may take the unmasked path.

Rows of up to 4096 elements divide a tile, so a program has whole blocks, and whole rows.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import tables
from ..formats.noise import GROUP_NUMEL
from ..launch import ACCESS_BYTES
from ..portable import INTERPRETED, to_fp32
from ..wide import aligned_blocks, aligned_eights
from .layout import MAX_ROW_NUMEL

EXTENT, INDEX = tables.ROW_FIELDS, tables.ROW_FIELDS + 1
ROW_FIELDS = tables.ROW_FIELDS + 2
TILE_NUMEL = MAX_ROW_NUMEL  # 32 elements a thread
NUM_WARPS = 4
MIXED = len(tables.CODED_DTYPES)  # in the place of a dtype's code: tensors of several

# The codes of dtypes, as kernels know them.
KIND_FP32, KIND_BF16, KIND_FP16 = (
    tl.constexpr(tables.CODED_DTYPES.index(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
_EIGHT = tl.constexpr(8)
_ROW_FIELDS, _FIRST_TILE = tl.constexpr(ROW_FIELDS), tl.constexpr(tables.FIRST_TILE)

# Address, numel, offset, dtype code, aligned, extent, index: of one tensor.
PieceKey = tuple[int, int, int, int, bool, int, int]


@dataclass(frozen=True, slots=True)
class Paths:
    """What a launch must be compiled for: one dtype's code or MIXED, and which paths."""

    dtype: int
    full: bool
    masked: bool


def piece_entries(keys: Sequence[PieceKey], tile_numel: int) -> tuple[torch.Tensor, int]:
    """The entries of the table, on the CPU, and the number of tiles; see `tables`."""
    rows: list[int] = []
    tile_counts: list[int] = []
    first_tile = 0
    for address, numel, offset, code, aligned, extent, index in keys:
        rows += (address, numel, offset, first_tile, code, aligned, extent, index)
        tile_counts.append(-(-extent // tile_numel))
        first_tile += tile_counts[-1]
    tiles = torch.repeat_interleave(torch.tensor(tile_counts), output_size=first_tile)
    return torch.cat((torch.tensor(rows), tiles)), first_tile


def packed_pieces(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    first_indices: Sequence[int] | None,
    numel: int,
) -> tuple[PieceKey, ...]:
    """Pieces that make all `numel` elements of a message, at least one; contiguous tensors.

    What is before the first tensor, or a message without any, is a piece of its own, all gap.
    """
    placed = _placed(tensors, offsets, first_indices)
    begins = [*(offset for offset, _, _ in placed), numel]
    keys: list[PieceKey] = []
    if begins[0] or not placed:
        keys.append((0, 0, 0, 0, False, begins[0], 0))
    for (offset, tensor, index), end in zip(placed, begins[1:], strict=True):
        keys.append(_key(tensor, offset, end - offset, index))
    return tuple(keys)


def unpacked_pieces(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int]
) -> tuple[PieceKey, ...]:
    """Pieces that fill the contiguous tensors."""
    placed = _placed(tensors, offsets, None)
    return tuple(_key(tensor, offset, tensor.numel(), 0) for offset, tensor, _ in placed)


def paths_of(keys: Sequence[PieceKey], tile_numel: int) -> Paths:
    """The paths that tiles of these pieces take."""
    dtypes = {code for _, numel, _, code, _, _, _ in keys if numel}
    fulls = [numel // tile_numel if aligned else 0 for _, numel, _, _, aligned, _, _ in keys]
    tiles = sum(-(-extent // tile_numel) for *_, extent, _ in keys)
    return Paths(
        dtype=dtypes.pop() if len(dtypes) == 1 else MIXED,
        full=any(fulls),
        masked=sum(fulls) < tiles,
    )


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
def piece_of(table, tiles_at, program, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """(Row of the program's piece, where in the piece its tile begins)."""
    row = table + tl.load(table + tiles_at + program) * _ROW_FIELDS
    return row, (program - tl.load(row + _FIRST_TILE)) * TILE


@triton.jit
def kind_pointer(address, kind: tl.constexpr) -> tl.tensor:
    """An address as a pointer to the dtype of this code."""
    if kind == KIND_FP32:
        return address.to(tl.pointer_type(tl.float32))
    elif kind == KIND_BF16:
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


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
            x = x * scale
    else:
        lanes = lanes_of(places, NUMEL)
        exists = lanes < count
        x = to_fp32(tl.load(source + lanes, mask=exists, other=0.0))
        if scale is not None:
            x = tl.where(exists, x * scale, 0.0)
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
    if kind == KIND_FP32:
        wide = kind_pointer(address, KIND_FP32) + begin
        x = loaded(wide, places, count, scale, SIXTEENS, FULL, NUMEL)
    elif kind == KIND_BF16:
        brain = kind_pointer(address, KIND_BF16) + begin
        x = loaded(brain, places, count, scale, SIXTEENS, FULL, NUMEL)
    else:
        half = kind_pointer(address, KIND_FP16) + begin
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
