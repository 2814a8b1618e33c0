"""Owns the Triton kernels of FP8 scaling whose programs find a block's scale, or are given it.

| kernel      | a program has                            | for                                 |
|-------------|------------------------------------------|-------------------------------------|
| _lines      | blocks of a row, each with its own amax  | 1x128, rows that fit in registers   |
| _square     | one block of 128 x 128                   | 128x128                             |
| _dequantize | parts of rows                            | all                                 |

`launch` launches them; formulas are those of `reference`. A line is LINE consecutive
elements of a row, or fewer, as the last of a row may be short; a row has `lines` of them. Where
lines lie one behind the other and all is aligned, CONTIGUOUS, full programs take unmasked accesses
of 16 bytes; with aligned rows of a multiple of 16 elements, WIDE, the masked accesses are 16 bytes
as well.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device
from ..portable import round_to, to_fp32
from .reference import MAX_FP32, SQUARE

_EXPONENT = tl.constexpr(0x7F80_0000)
_MAX_FP32 = tl.constexpr(MAX_FP32)
_SQUARE = tl.constexpr(SQUARE)


@triton.jit
def scale_of(amax, ELEMENT: tl.constexpr, POWER_OF_2: tl.constexpr) -> tl.tensor:
    """`reference.scale_of`: FP32 amax >= 0 or NaN, of any shape."""
    MAX: tl.constexpr = 448.0 if ELEMENT == "e4m3" else 57344.0
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax), _MAX_FP32)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    bits = amax.to(tl.int32, bitcast=True)
    return tl.where((bits > 0) & (bits < _EXPONENT), scale, 1.0)


@triton.jit
def inverse_of(scale) -> tl.tensor:
    """1 / scale, IEEE division."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def encode(x, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """`codes.encode(x, element)`."""
    tl.static_assert(ELEMENT == "e4m3" or ELEMENT == "e5m2")
    return device.encode(x, ELEMENT, HARDWARE)


@triton.jit
def _decode(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    tl.static_assert(ELEMENT == "e4m3" or ELEMENT == "e5m2")
    return device.decode(codes, ELEMENT, HARDWARE)


@triton.jit
def _contiguous_lines(LINE: tl.constexpr, COUNT: tl.constexpr):
    """Offsets [COUNT, LINE] of lines that lie one behind the other."""
    return tl.arange(0, COUNT)[:, None] * LINE + tl.arange(0, LINE)[None, :]


@triton.jit
def _rows_of(first, lines, COUNT: tl.constexpr, SINGLE: tl.constexpr):
    """(row int64, line in its row int32), [COUNT] each, of COUNT lines from `first` on.

    One division of 64 bits a program, and none where a row is a SINGLE line.
    """
    if SINGLE:
        return first + tl.arange(0, COUNT), tl.zeros([COUNT], tl.int32)
    first_row = first // lines
    place = (first - first_row * lines).to(tl.int32) + tl.arange(0, COUNT)
    rows_on = place // lines
    return first_row + rows_on, place - rows_on * lines


@triton.jit
def _lines_at(row, place, rows, columns, LINE: tl.constexpr, WIDE: tl.constexpr):
    """(offset int64, mask), [COUNT, LINE] each, of the lines `place` of the rows `row`."""
    if WIDE:
        # The factor tells the compiler that rows, and their ends, are multiples of 16.
        columns = columns // 16 * 16
    column = (place.to(tl.int64) * LINE)[:, None] + tl.arange(0, LINE)[None, :]
    return row[:, None] * columns + column, (column < columns) & (row < rows)[:, None]


@triton.jit
def _quantized_lines(
    x, scale_inv, at, mask, ELEMENT: tl.constexpr, POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr
):
    """Codes of FP32 lines `x`, whose inverse scales are stored at `at`, where not masked."""
    scale = scale_of(device.amax(x, 1), ELEMENT, POWER_OF_2)
    tl.store(scale_inv + at, inverse_of(scale), mask=mask)
    return encode(x * scale[:, None], ELEMENT, HARDWARE)


@triton.jit(
    do_not_specialize=["rows", "columns", "lines"],
    do_not_specialize_on_alignment=["codes", "scale_inv", "x"],
)
def _lines_kernel(
    codes,
    scale_inv,
    x,
    rows,
    columns,
    lines,
    ELEMENT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    LINE: tl.constexpr,
    COUNT: tl.constexpr,
    SINGLE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """COUNT lines, each a block.

    Example, LINE 4, COUNT 2, rows of 6 elements: 2 lines a row, of 4 and 2 elements. Program 1 has
    lines 2 and 3: elements 6 to 9, and 10 and 11; it stores scale_inv[2] and scale_inv[3].
    """
    first = tl.program_id(0).to(tl.int64) * COUNT
    columns = columns.to(tl.int64)
    if CONTIGUOUS and (first + COUNT) * LINE <= rows * columns:
        lanes = _contiguous_lines(LINE, COUNT)
        value = to_fp32(tl.load(tl.multiple_of(x + first * LINE + lanes, [1, 16])))
        at = first + tl.arange(0, COUNT)
        made = _quantized_lines(value, scale_inv, at, None, ELEMENT, POWER_OF_2, HARDWARE)
        tl.store(tl.multiple_of(codes + first * LINE + lanes, [1, 16]), made)
    else:
        row, place = _rows_of(first, lines, COUNT, SINGLE)
        offset, mask = _lines_at(row, place, rows, columns, LINE, WIDE)
        sources = x + offset
        destinations = codes + offset
        if WIDE:
            sources = tl.multiple_of(sources, [1, 16])
            destinations = tl.multiple_of(destinations, [1, 16])
        value = to_fp32(tl.load(sources, mask=mask, other=0.0))
        at = first + tl.arange(0, COUNT)
        made = _quantized_lines(value, scale_inv, at, row < rows, ELEMENT, POWER_OF_2, HARDWARE)
        tl.store(destinations, made, mask=mask)


@triton.jit(
    do_not_specialize=["rows", "columns"],
    do_not_specialize_on_alignment=["codes", "scale_inv", "x"],
)
def _square_kernel(
    codes,
    scale_inv,
    x,
    rows,
    columns,
    ELEMENT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One block of 128 x 128 of one matrix of [rows, columns].

    Example: 3 matrices of 130 x 200 have 2 x 2 blocks each. Program 7 has matrix 1, block row 1,
    block column 1: rows 128 and 129, columns 128 to 199.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = columns.to(tl.int64)
    block_columns = tl.cdiv(columns, _SQUARE)
    block_row = program // block_columns
    block_rows = tl.cdiv(rows, _SQUARE)
    matrix = block_row // block_rows
    row = (block_row - matrix * block_rows) * _SQUARE + tl.arange(0, _SQUARE)
    column = (program - block_row * block_columns) * _SQUARE + tl.arange(0, _SQUARE)
    if WIDE:
        columns = columns // 16 * 16
    offset = (matrix * rows + row)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    sources = x + offset
    destinations = codes + offset
    if WIDE:
        sources = tl.multiple_of(sources, [1, 16])
        destinations = tl.multiple_of(destinations, [1, 16])
    value = to_fp32(tl.load(sources, mask=mask, other=0.0))
    amax = device.amax(tl.reshape(value, [1, _SQUARE * _SQUARE]), 1)
    scale = scale_of(amax, ELEMENT, POWER_OF_2)
    tl.store(scale_inv + program + tl.arange(0, 1), inverse_of(scale))
    tl.store(destinations, encode(value * scale[:, None], ELEMENT, HARDWARE), mask=mask)


@triton.jit(
    do_not_specialize=["rows", "columns", "lines", "matrix_rows"],
    do_not_specialize_on_alignment=["out", "codes", "scale_inv"],
)
def _dequantize_kernel(
    out,
    codes,
    scale_inv,
    rows,
    columns,
    lines,
    matrix_rows,
    SCALING: tl.constexpr,
    MATRICES: tl.constexpr,
    ELEMENT: tl.constexpr,
    LINE: tl.constexpr,
    COUNT: tl.constexpr,
    SINGLE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """COUNT lines, as in `_lines_kernel`; with several MATRICES each has `matrix_rows` rows."""
    first = tl.program_id(0).to(tl.int64) * COUNT
    columns = columns.to(tl.int64)
    row, place = _rows_of(first, lines, COUNT, SINGLE)
    if SCALING == "tensor":
        at = row * 0
    elif SCALING == "row":
        at = row
    elif SCALING == "1x128":
        at = first + tl.arange(0, COUNT)
    else:
        block_row = row // _SQUARE
        if MATRICES:
            matrix = row // matrix_rows
            row_in_matrix = row - matrix * matrix_rows
            block_row = matrix * tl.cdiv(matrix_rows, _SQUARE) + row_in_matrix // _SQUARE
        at = block_row * lines + place
    factor = tl.load(scale_inv + at, mask=row < rows, other=1.0)[:, None]
    if CONTIGUOUS and (first + COUNT) * LINE <= rows * columns:
        lanes = _contiguous_lines(LINE, COUNT)
        code = tl.load(tl.multiple_of(codes + first * LINE + lanes, [1, 16]))
        value = round_to(_decode(code, ELEMENT, HARDWARE) * factor, out.dtype.element_ty)
        tl.store(tl.multiple_of(out + first * LINE + lanes, [1, 16]), value)
    else:
        offset, mask = _lines_at(row, place, rows, columns, LINE, WIDE)
        sources = codes + offset
        destinations = out + offset
        if WIDE:
            sources = tl.multiple_of(sources, [1, 16])
            destinations = tl.multiple_of(destinations, [1, 16])
        code = tl.load(sources, mask=mask, other=0)
        value = round_to(_decode(code, ELEMENT, HARDWARE) * factor, out.dtype.element_ty)
        tl.store(destinations, value, mask=mask)
