"""FP8 scaling on the GPU: the kernels whose programs find a block's scale, and the way back.

| kernel      | a program has                            | for                                 |
|-------------|------------------------------------------|-------------------------------------|
| _lines      | blocks of a row, each with its own amax  | 1x128, rows that fit in registers   |
| _square     | one block of 128 x 128                   | 128x128                             |
| _dequantize | parts of rows                            | all                                 |

Longer rows and whole tensors are `two_pass`'s. Formulas are those of `reference`. A program has
BLOCK elements, 32 a thread: two accesses of 16 bytes to the codes. A line is LINE consecutive
elements of a row, or fewer, as the last of a row may be short; a row has `lines` of them, and one
of up to MAX_LINE elements is a line, in the registers of up to 16 warps. Where lines lie one behind
the other and all is aligned, CONTIGUOUS, full programs take unmasked accesses of 16 bytes; with
aligned rows of a multiple of 16 elements, WIDE, the masked accesses are 16 bytes as well.

They call the codec's functions and not the codec: blocks of it run along a row, in whole ones.
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
from ..formats.device_table import element_of
from ..launch import LaunchConfig, is_aligned, launch
from ..portable import round_to, to_fp32
from ..tuned import MAX_WARPS, config_for
from .device_codec import inverse_of, scale_of
from .reference import BY_DTYPE, SQUARE
from .two_pass import MIN_LINE, default_config, quantize_known

MAX_LINE = 16384
SQUARE_WARPS = 8

_SQUARE = tl.constexpr(SQUARE)


@triton.jit
def _at(base, offset, WIDE: tl.constexpr):
    """Pointers [n, m], 16-byte aligned if WIDE: the hint must sit on the sum it is about."""
    pointers = base + offset
    if WIDE:
        pointers = tl.multiple_of(pointers, [1, 16])
    return pointers


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
    return device.code_of(x * scale[:, None], None, ELEMENT, HARDWARE)


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
        value = to_fp32(tl.load(_at(x + first * LINE, lanes, True)))
        at = first + tl.arange(0, COUNT)
        made = _quantized_lines(value, scale_inv, at, None, ELEMENT, POWER_OF_2, HARDWARE)
        tl.store(_at(codes + first * LINE, lanes, True), made)
    else:
        row, place = _rows_of(first, lines, COUNT, SINGLE)
        offset, mask = _lines_at(row, place, rows, columns, LINE, WIDE)
        value = to_fp32(tl.load(_at(x, offset, WIDE), mask=mask, other=0.0))
        at = first + tl.arange(0, COUNT)
        made = _quantized_lines(value, scale_inv, at, row < rows, ELEMENT, POWER_OF_2, HARDWARE)
        tl.store(_at(codes, offset, WIDE), made, mask=mask)


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
    value = to_fp32(tl.load(_at(x, offset, WIDE), mask=mask, other=0.0))
    amax = device.amax(tl.reshape(value, [1, _SQUARE * _SQUARE]), 1)
    scale = scale_of(amax, ELEMENT, POWER_OF_2)
    tl.store(scale_inv + program + tl.arange(0, 1), inverse_of(scale))
    made = device.code_of(value * scale[:, None], None, ELEMENT, HARDWARE)
    tl.store(_at(codes, offset, WIDE), made, mask=mask)


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
    dtype: tl.constexpr = out.dtype.element_ty
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
        code = tl.load(_at(codes + first * LINE, lanes, True))
        value = round_to(device.value_of(code, ELEMENT, HARDWARE) * factor, dtype)
        tl.store(_at(out + first * LINE, lanes, True), value)
    else:
        offset, mask = _lines_at(row, place, rows, columns, LINE, WIDE)
        code = tl.load(_at(codes, offset, WIDE), mask=mask, other=0)
        value = round_to(device.value_of(code, ELEMENT, HARDWARE) * factor, dtype)
        tl.store(_at(out, offset, WIDE), value, mask=mask)


@dataclass(frozen=True, slots=True)
class Lines:
    """How rows are cut into lines, and lines dealt to programs."""

    rows: int
    columns: int
    line: int
    count: int
    contiguous: bool
    wide: bool
    config: LaunchConfig

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return triton.cdiv(self.columns, self.line)

    @property
    def programs(self) -> int:
        """Programs for all rows."""
        return triton.cdiv(self.rows * self.lines, self.count)

    @property
    def num_warps(self) -> int:
        """Warps of a program, so that each thread has as many elements."""
        config = self.config
        return min(config.num_warps * max(1, self.line // config.block_bytes), MAX_WARPS)

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel of lines is compiled for."""
        return {
            "LINE": self.line,
            "COUNT": self.count,
            "SINGLE": self.lines == 1,
            "CONTIGUOUS": self.contiguous,
            "WIDE": self.wide,
        }


def lines_of(
    shape: torch.Size, scaling: str, config: LaunchConfig, *, aligned: bool, max_line: int
) -> Lines:
    """The lines of a tensor that has elements; aligned: it, and what it becomes, by 16 bytes."""
    if scaling == "tensor":
        rows, columns = 1, shape.numel()
    else:
        rows, columns = shape[:-1].numel(), shape[-1]
    line = SQUARE
    if scaling in ("tensor", "row"):
        line = min(max(triton.next_power_of_2(columns), MIN_LINE), max_line)
    return Lines(
        rows=rows,
        columns=columns,
        line=line,
        count=max(1, config.block_bytes // line),
        contiguous=aligned and (rows == 1 or columns % line == 0),
        wide=aligned and columns % MIN_LINE == 0,
        config=config,
    )


@functools.cache
def squares_config() -> LaunchConfig:
    """For squares of 128 x 128, whose block is not looked at."""
    return LaunchConfig(default_config().block_bytes, SQUARE_WARPS)


def quantize_fp8_(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    scaling: str,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """`reference.quantize_fp8_` in one launch, or in two where a block exceeds a program."""
    constants = {"ELEMENT": element_of(BY_DTYPE[codes.dtype]), "POWER_OF_2": power_of_2}
    codes = codes.view(torch.uint8)
    if scaling == "tensor" or (scaling == "row" and x.shape[-1] > MAX_LINE):
        quantize_known(codes, scale_inv, x, scale, amax, **constants)
        return
    aligned = is_aligned(codes, x)
    if scaling == "128x128":
        rows, columns = x.shape[-2:]
        config = config_for("quantize_fp8_", scaling, squares_config(), x.device)
        constants["WIDE"] = aligned and columns % MIN_LINE == 0
        kernel, programs, num_warps = _square_kernel, scale_inv.numel(), config.num_warps
        sizes: tuple[int, ...] = (rows, columns)
    else:
        config = config_for("quantize_fp8_", scaling, default_config(), x.device)
        plan = lines_of(x.shape, scaling, config, aligned=aligned, max_line=MAX_LINE)
        constants |= plan.constants
        kernel, programs, num_warps = _lines_kernel, plan.programs, plan.num_warps
        sizes = (plan.rows, plan.columns, plan.lines)
    launch(kernel, programs, codes, scale_inv, x, *sizes, on=x, num_warps=num_warps, **constants)


def dequantize_fp8_(
    out: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, scaling: str
) -> None:
    """`reference.dequantize_fp8_` in one launch."""
    config = config_for("dequantize_fp8_", scaling, default_config(), codes.device)
    plan = lines_of(
        codes.shape, scaling, config, aligned=is_aligned(codes, out), max_line=config.block_bytes
    )
    matrix_rows = codes.shape[-2] if scaling == "128x128" else plan.rows
    launch(
        _dequantize_kernel,
        plan.programs,
        out,
        codes.view(torch.uint8),
        scale_inv,
        plan.rows,
        plan.columns,
        plan.lines,
        matrix_rows,
        on=codes,
        num_warps=plan.num_warps,
        SCALING=scaling,
        MATRICES=matrix_rows < plan.rows,
        ELEMENT=element_of(BY_DTYPE[codes.dtype]),
        **plan.constants,
    )
