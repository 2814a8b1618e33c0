"""The tables of `tables` in Triton kernels: a program's row, its fields, addresses as pointers; and
the kernel that writes one.

A tensor may have more than 2**31 elements, so all that counts elements is int64.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import tables
from .launch import launch

NUM_CODES = tl.constexpr(len(tables.CODED_DTYPES))
CODE_FP32, CODE_BF16, CODE_FP16 = (
    tl.constexpr(tables.CODED_DTYPES.index(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
ROW_FIELDS = tl.constexpr(tables.ROW_FIELDS)

_ADDRESS, _NUMEL = tl.constexpr(tables.ADDRESS), tl.constexpr(tables.NUMEL)
_OFFSET, _FIRST_TILE = tl.constexpr(tables.OFFSET), tl.constexpr(tables.FIRST_TILE)
_DTYPE, _SEARCHED = tl.constexpr(tables.DTYPE), tl.constexpr(tables.SEARCHED_ROWS)

ARGUMENT_NUMEL = 128  # entries that travel as arguments of a kernel, which may have 4 KiB of them
# Triton compiles anew for numbers in a tuple that are 1, multiples of 16 or of other widths,
# whatever a kernel asks for: all that it gets are odd and have 64 bits.
_BIAS = tl.constexpr((1 << 62) + 1)
_ARGUMENT_LIMIT = 1 << 60


@triton.jit
def row_of(table, num_rows, STEPS: tl.constexpr, FIELDS: tl.constexpr = ROW_FIELDS) -> tuple:
    """(This program's row of FIELDS fields, which tile of it the program has).

    A step finds the last of 32 rows, as far apart as that takes, whose first tile is not above the
    program. STEPS: `TileTable.search_steps`.

    Example: tensors of two tiles and one make the first tiles 0 and 2. For program 1 that of row 0
    is the last, so it has tile 1 - 0 of it; for program 2 that of row 1: tile 2 - 2.
    """
    program = tl.program_id(0)
    # The lower half of each number; in the upper one is whether the row is aligned.
    first_tiles = (table + _FIRST_TILE).to(tl.pointer_type(tl.int32), bitcast=True)
    row = 0
    for step in tl.static_range(STEPS):
        rows = row + tl.arange(0, _SEARCHED) * (_SEARCHED ** (STEPS - 1 - step))
        rows = tl.minimum(rows, num_rows - 1)
        firsts = tl.load(first_tiles + rows.to(tl.int64) * (2 * FIELDS))
        row = tl.max(tl.where(firsts <= program, rows, 0), axis=0)
    begin = table + tl.cast(row, tl.int64) * FIELDS
    first = tl.load(first_tiles + tl.cast(row, tl.int64) * (2 * FIELDS))
    return begin, program - first


@triton.jit
def fields_of(row) -> tuple:
    """(Address, numel, offset, dtype code, aligned) of a row; what is not used is not loaded."""
    return (
        tl.load(row + _ADDRESS),
        tl.load(row + _NUMEL),
        tl.load(row + _OFFSET),
        tl.load(row + _DTYPE),
        tl.load((row + _FIRST_TILE).to(tl.pointer_type(tl.int32), bitcast=True) + 1),
    )


@triton.jit
def pointer_of(address, code: tl.constexpr) -> tl.tensor:
    """An address as a pointer to the dtype of this code."""
    if code == CODE_FP32:
        return address.to(tl.pointer_type(tl.float32))
    elif code == CODE_BF16:
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


@triton.constexpr_function
def numel_of(dtype: tl.dtype, num_bytes: int) -> int:
    """Elements of this dtype in so many bytes."""
    return num_bytes * 8 // dtype.primitive_bitwidth


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table"])
def _write_kernel(table, count, words):
    for place in tl.static_range(len(words)):
        tl.store(table + place, (words[place] - _BIAS) >> 1, mask=place < count)


def fit_arguments(numbers: Sequence[int]) -> bool:
    """Whether `write_table` takes them; the index of an element may be too large."""
    few = len(numbers) <= ARGUMENT_NUMEL
    return few and all(-_ARGUMENT_LIMIT < number < _ARGUMENT_LIMIT for number in numbers)


def write_table(table: torch.Tensor, numbers: Sequence[int]) -> None:
    """Write numbers that `fit_arguments` to `table`, int64, as long."""
    bias = _BIAS.value
    words = tuple(bias + 2 * number for number in numbers)
    words += (bias,) * (ARGUMENT_NUMEL - len(words))
    launch(_write_kernel, 1, table, len(numbers), words, on=table, num_warps=1)
