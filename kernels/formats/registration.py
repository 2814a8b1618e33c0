"""Rows from outside in the table of formats, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .table import (
    ALIGN_NUMEL,
    BITS_PER_BYTE,
    BLOCK_FORMATS,
    CASTS,
    ELEMENTS,
    MESSAGES,
    SCALE_RULES,
    BlockFormat,
    ElementFormat,
    ScaleRule,
)

_MIN_ELEMENT_BITS = 3  # so that one or two codes share a byte, and no more

Row = ElementFormat | BlockFormat | ScaleRule
Table = dict[str, Any]


@contextlib.contextmanager
def registered(*rows: Row) -> Iterator[None]:
    """Within the block the tables have these rows as well.

    Elements are in `ELEMENTS` and `CASTS`, block formats in `MESSAGES`, rules in `SCALE_RULES`: all
    that is looked up by name, and the cases. `ELEMENT_FORMATS`, `BLOCK_FORMATS` and what was made
    of them stay as they are. It holds for the whole process, and not for those that it starts to
    compile, so `sidestream inspect` and `autotune` do not know the rows. All ranks must register
    the same rows in the same order: a format's place in the table stands in messages' headers.

    Raises `ValueError`, before anything is added, for a name that is taken and for a row that
    kernels have no code for.
    """
    _check(rows)
    added = [(table, row) for row in rows for table in _tables_of(row)]
    for table, row in added:
        table[row.name] = row
    try:
        yield
    finally:
        for table, row in added:
            del table[row.name]


def _tables_of(row: Row) -> tuple[Table, ...]:
    if isinstance(row, ElementFormat):
        return ELEMENTS, CASTS
    return (MESSAGES,) if isinstance(row, BlockFormat) else (SCALE_RULES,)


def _check(rows: tuple[Row, ...]) -> None:
    taken: set[tuple[int, str]] = set()
    for row in rows:
        if not isinstance(row, Row):
            raise ValueError(
                "rows: expected ElementFormat, BlockFormat or ScaleRule, got "
                f"{type(row).__name__}; WireFormats cannot be added"
            )
        for table in _tables_of(row):
            if row.name in table or (id(table), row.name) in taken:
                raise ValueError(
                    f"rows: expected new names, got {row.name!r} again; rename the row"
                )
            taken.add((id(table), row.name))
        if isinstance(row, ElementFormat):
            _check_element(row)
        elif isinstance(row, BlockFormat):
            _check_block(row)


def _check_element(row: ElementFormat) -> None:
    if not _MIN_ELEMENT_BITS <= row.bits <= BITS_PER_BYTE:
        raise ValueError(
            f"{row.name}: expected an element of {_MIN_ELEMENT_BITS} to {BITS_PER_BYTE} bits, got "
            f"{row.bits}; widen the mantissa or the exponent, or narrow them"
        )
    if not row.has_sign or row.exponent_bits < 1 or row.mantissa_bits < 1:
        raise ValueError(
            f"{row.name}: expected a sign and at least one bit each of exponent and mantissa, got "
            f"has_sign={row.has_sign}, {row.exponent_bits} and {row.mantissa_bits}; others have "
            "no rounding to even in kernels"
        )
    if not 0 < row.max_code < row.sign_code:
        raise ValueError(
            f"{row.name}: expected a max_code from 1 to {row.sign_code - 1}, got {row.max_code}; "
            "leave the sign out"
        )
    if row.dtype.itemsize != 1:
        raise ValueError(
            f"{row.name}: expected a dtype of one byte, got {row.dtype}; take torch.uint8"
        )


def _check_block(row: BlockFormat) -> None:
    _check_element(row.element)
    if row.name in {form.name for form in BLOCK_FORMATS}:
        raise ValueError(f"rows: expected new names, got {row.name!r} again; rename the row")
    if row.block_numel is not None and ALIGN_NUMEL % row.block_numel:
        raise ValueError(
            f"{row.name}: expected a block_numel that is a power of two up to {ALIGN_NUMEL}, or "
            f"None for a whole row, got {row.block_numel}; no block may straddle two tensors"
        )
    if row.codec is None:
        raise ValueError(
            f"{row.name}: expected a codec, got None; pass `Codec(module, module)`, or another "
            "row's, which tells how scales are made"
        )
    codec = row.codec
    for name in ("scale_dtype", "tensor_scale"):
        wanted, found = getattr(codec, name), getattr(row, name)
        if found != wanted:
            raise ValueError(
                f"{row.name}: expected {name}={wanted}, which its codec has functions for, got "
                f"{found}; take another codec or write one"
            )
    if row.block_numel is None and codec.scale_dtype is not torch.float32:
        raise ValueError(
            f"{row.name}: expected a block_numel, got None; only FP32 scales may be those of rows"
        )
    if codec.block_numel not in (None, row.block_numel):
        raise ValueError(
            f"{row.name}: expected block_numel={codec.block_numel}, which its codec has functions "
            f"for, got {row.block_numel}; take another codec or write one"
        )
