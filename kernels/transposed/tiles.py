"""Tiles of a matrix that are read once and written along both sides, as they lie and transposed.

A program has TILE_ROWS x TILE_COLUMNS elements and a thread 8 x 8 of them: of eight rows the 16
bytes of eight elements of BF16. So the codes of both sides, and the words of eight that E2M1 makes
of them, are made where the elements are, a block's amax takes two exchanges between threads at
most, and what goes through shared memory is codes, the least that there is of a tile.

A side is how one of the two results sees the tile: as lines of its matrix, (line [L], the first of
the tile's elements in every line, lines of the matrix, elements of a line), int64 all. The lines of
one side are rows, those of the other columns. Sides of the matrix are multiples of eight at least.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats import swizzle
from ..formats.device_e2m1 import bytes_of
from ..formats.device_swizzle import swizzled_index
from ..formats.device_table import Constant
from ..formats.table import ElementFormat
from ..launch import ACCESS_BYTES, is_aligned
from ..wide import aligned_eights

TILE_ROWS, TILE_COLUMNS = 128, 64
_EIGHT = 8  # elements of a thread in a line
NUM_WARPS = 4  # of 64 elements a thread

_ROWS, _COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_COLUMNS)
_EIGHTS_DOWN, _EIGHTS_ACROSS = tl.constexpr(TILE_ROWS // 8), tl.constexpr(TILE_COLUMNS // 8)


@triton.jit
def tile_of(rows, columns, across) -> tuple:
    """(Rows and columns of the matrix; the first row and column of this program's tile), int64.

    across: tiles side by side.
    """
    program = tl.program_id(0)
    down = program // across
    first_row = down.to(tl.int64) * _ROWS
    first_column = (program - down * across).to(tl.int64) * _COLUMNS
    return rows.to(tl.int64), columns.to(tl.int64), first_row, first_column


@triton.jit
def load_tile(source, tile, LAYOUT: tl.constexpr) -> tl.tensor:
    """FP32 [8, TILE_ROWS / 8, TILE_COLUMNS]: at (i, r, c) what row 8 * r + i has in column c.

    Zeros where the matrix has no element. The source is 16-byte aligned.
    """
    rows, columns, first_row, first_column = tile
    row = first_row + tl.arange(0, _EIGHTS_DOWN)[None, :, None] * 8
    row += tl.arange(0, 8)[:, None, None]
    column = first_column + tl.arange(0, _EIGHTS_ACROSS)[None, None, :] * 8
    places = tl.reshape(row * columns + column, [_ROWS * _EIGHTS_ACROSS])
    exists = tl.reshape((row < rows) & (column < columns), [_ROWS * _EIGHTS_ACROSS])
    if not LAYOUT.whole:
        places = tl.where(exists, places, 0)
    x = aligned_eights(source, places)
    if not LAYOUT.whole:
        x = tl.where(exists[:, None], x, 0.0)
    return tl.reshape(x, [8, _EIGHTS_DOWN, _COLUMNS])


@triton.jit
def row_lines(x) -> tl.tensor:
    """[8, TILE_ROWS / 8, n] -> [TILE_ROWS, n]: rows in the order of `row_side`."""
    return tl.reshape(x, [_ROWS, x.shape[2]])


@triton.jit
def column_lines(x) -> tl.tensor:
    """[8, n / 8, TILE_COLUMNS] -> [TILE_COLUMNS, n]: columns, each from its first row on."""
    return tl.reshape(tl.permute(x, (2, 1, 0)), [x.shape[2], 8 * x.shape[1]])


@triton.jit
def row_side(tile) -> tuple:
    """How the result that lies as the source sees the tile."""
    rows, columns, first_row, first_column = tile
    lane = tl.arange(0, _ROWS)
    line = first_row + (lane % _EIGHTS_DOWN * 8 + lane // _EIGHTS_DOWN)
    return line, first_column, rows, columns


@triton.jit
def column_side(tile) -> tuple:
    """How the transposed result sees it."""
    rows, columns, first_row, first_column = tile
    return first_column + tl.arange(0, _COLUMNS), first_row, columns, rows


@triton.jit
def write_side(
    data,
    scales,
    scaled,
    scale_bytes,
    side,
    noise,
    ELEMENT: tl.constexpr,
    HARDWARE: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """The codes and the scales of a side's blocks, [n, elements of one] and [n].

    noise: (seed, index of the matrix's first element); seed: None to round to nearest.
    """
    _store_scales(scales, scale_bytes, side, scaled.shape[1], LAYOUT)
    bits = None
    if noise[0] is not None:
        NUMEL: tl.constexpr = scaled.numel // side[0].numel
        bits = tl.reshape(_noise_of_lines(noise, side, NUMEL, LAYOUT), scaled.shape)
    made = device.stored(scaled, bits, ELEMENT, HARDWARE)
    store_lines(data, made, side, ELEMENT.form.codes_per_byte, LAYOUT)


@triton.jit
def _noise_of_lines(noise, side, NUMEL: tl.constexpr, LAYOUT: tl.constexpr):
    """Of NUMEL elements of each line, by their index in the side's matrix: [L, NUMEL]."""
    line, first, _, line_numel = side
    starts = (noise[1].to(tl.int64) + first) + tl.arange(0, NUMEL // 8) * 8
    starts = tl.reshape(line[:, None] * line_numel + starts[None, :], [line.numel * NUMEL // 8])
    if LAYOUT.eights:
        words = device.noise_words(noise[0], starts >> 4)
        is_upper = (starts & 8) != 0
        one, other = tl.where(is_upper, words[2], words[0]), tl.where(is_upper, words[3], words[1])
        bits = device.spread_noise(one, other)
    else:
        bits = _noise_of_eights(noise[0], starts)
    return tl.reshape(bits, [line.numel, NUMEL])


@triton.jit
def _noise_of_eights(seed, starts):
    """Of the eight elements from the index `starts`, int64 [n], on: [n, 8].

    They lie in two groups at most: two Philox calls, where one an element takes all registers.
    """
    first, second = (
        device.noise_words(seed, starts >> 4),
        device.noise_words(seed, (starts + 7) >> 4),
    )
    number = ((starts >> 2) & 3).to(tl.int32)
    lanes = (starts & 3).to(tl.int32)[:, None] + tl.arange(0, 8)[None, :]
    one, two = _word_of(first, second, number), _word_of(first, second, number + 1)
    later = tl.where((lanes & 8) == 0, two, _word_of(first, second, number + 2))
    return device.rotated(tl.where((lanes & 12) == 0, one, later), lanes)


@triton.jit
def _word_of(first, second, number):
    """[n, 1]: the word of each number, [n], from 4 on of the second group."""
    return tl.where((number & 4) == 0, _word_in(first, number), _word_in(second, number))[:, None]


@triton.jit
def _word_in(words, number):
    lower = tl.where((number & 1) == 0, words[0], words[1])
    upper = tl.where((number & 1) == 0, words[2], words[3])
    return tl.where((number & 2) == 0, lower, upper)


@triton.jit
def store_lines(data, made, side, PER_BYTE: tl.constexpr, LAYOUT: tl.constexpr) -> None:
    """What was made of a side's lines, one after the other: bytes of codes, or words of eight."""
    line, first, num_lines, line_numel = side
    if made.dtype == tl.uint32:
        if LAYOUT.aligned:
            data = data.to(tl.pointer_type(tl.uint32), bitcast=True)
        else:
            made = bytes_of(tl.reshape(made, [made.numel, 1]))
    EACH: tl.constexpr = PER_BYTE * (made.dtype.primitive_bitwidth // 8)
    COUNT: tl.constexpr = made.numel // line.numel
    place = first // EACH + tl.arange(0, COUNT)
    length = line_numel // EACH
    pointers = data + (line[:, None] * length + place[None, :])
    if LAYOUT.aligned:
        pointers = tl.multiple_of(pointers, [1, 16])
    made = tl.reshape(made, [line.numel, COUNT])
    if LAYOUT.whole:
        tl.store(pointers, made)
    else:
        mask = (line < num_lines)[:, None] & (place < length)[None, :]
        if LAYOUT.aligned:
            mask = tl.max_constancy(mask, [1, 128 // made.dtype.primitive_bitwidth])
        tl.store(pointers, made, mask=mask)


@triton.jit
def _store_scales(scales, made, side, BLOCK: tl.constexpr, LAYOUT: tl.constexpr):
    """One for BLOCK elements of a line, to where they belong; swizzled ones with the padding."""
    line, first, num_lines, line_numel = side
    made = tl.reshape(made, [line.numel, made.numel // line.numel])
    block = first // BLOCK + tl.arange(0, made.shape[1])
    length = line_numel // BLOCK
    if LAYOUT.swizzled:  # zeros, where the matrix has no element, have byte 0, as padding has
        across = (length + 3) // 4
        places = swizzled_index(line[:, None], block[None, :], across)
        exists = (line >= 0)[:, None] & (block < across * 4)[None, :]
    else:
        places = line[:, None] * length + block[None, :]
        exists = (line < num_lines)[:, None] & (block < length)[None, :]
    if LAYOUT.whole:
        tl.store(scales + places, made)
    else:
        tl.store(scales + places, made, mask=exists)


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Constant):
    """What kernels are compiled for.

    aligned: all lines of codes start 16-byte aligned. whole: no tile lacks an element or a scale.
    eights: the first element's index is a multiple of eight, so that a thread's eight have one
    call of Philox.
    """

    aligned: bool
    whole: bool
    swizzled: bool
    eights: bool


_layout_of = functools.cache(Layout)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a matrix is cut into tiles, one a program: its sizes as kernels take them."""

    programs: int
    sizes: tuple[int, int, int]
    layout: Layout


def aligned_source(x: torch.Tensor) -> torch.Tensor:
    """`x`, or where it starts at another address than kernels load from, a copy."""
    return x if is_aligned(x) else x.clone()


def cut_of(
    x: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    element: ElementFormat,
    *,
    swizzled: bool = False,
    first_index: int = 0,
) -> Cut:
    """Of the matrix `x` and the codes of both sides; swizzled scales' padding is cut as well."""
    rows, columns = x.shape
    width = max(TILE_COLUMNS, swizzle.TILE_ROWS) if swizzled else TILE_COLUMNS
    across = triton.cdiv(columns, width) * (width // TILE_COLUMNS)
    access = ACCESS_BYTES * element.codes_per_byte
    layout = _layout_of(
        is_aligned(*results) and rows % access == 0 and columns % access == 0,
        rows % TILE_ROWS == 0 and columns % width == 0,
        swizzled,
        first_index % _EIGHT == 0,
    )
    return Cut(triton.cdiv(rows, TILE_ROWS) * across, (rows, columns, across), layout)
