"""The tables of `tables` inside Triton kernels: a program's row, its fields, addresses as pointers.

A tensor may have more than 2**31 elements, so all that counts elements is int64.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tables

NUM_CODES = tl.constexpr(len(tables.CODED_DTYPES))
CODE_FP32, CODE_BF16, CODE_FP16 = (
    tl.constexpr(tables.CODED_DTYPES.index(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
ROW_FIELDS = tl.constexpr(tables.ROW_FIELDS)

_ADDRESS, _NUMEL = tl.constexpr(tables.ADDRESS), tl.constexpr(tables.NUMEL)
_OFFSET, _FIRST_TILE = tl.constexpr(tables.OFFSET), tl.constexpr(tables.FIRST_TILE)
_DTYPE, _ALIGNED = tl.constexpr(tables.DTYPE), tl.constexpr(tables.ALIGNED)


@triton.jit
def row_of(table, tiles_at, FIELDS: tl.constexpr = ROW_FIELDS) -> tuple:
    """(This program's row of FIELDS fields, which tile of the row's tensor the program has).

    Example: tensors of two tiles and one make the tiles [0, 0, 1] and the first tiles 0 and 2.
    Program 1 has tile 1 - 0 of tensor 0, program 2 tile 2 - 2 of tensor 1.
    """
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(table + tiles_at + program) * FIELDS
    return row, program - tl.load(row + _FIRST_TILE)


@triton.jit
def fields_of(row) -> tuple:
    """(Address, numel, offset, dtype code, aligned) of a row; what is not used is not loaded."""
    return (
        tl.load(row + _ADDRESS),
        tl.load(row + _NUMEL),
        tl.load(row + _OFFSET),
        tl.load(row + _DTYPE),
        tl.load(row + _ALIGNED),
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
