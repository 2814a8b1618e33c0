"""Owns the Triton kernels of FP8 scaling in two passes, amax and codes, and of delayed scaling.

| kernel  | a program has                            | for                                     |
|---------|------------------------------------------|-----------------------------------------|
| _amax   | a part of a row: its amax, by an atomic  | tensor, longest rows: first pass        |
| _known  | a part of a row whose amax is known      | the same: second pass; delayed scaling  |
| _update | one tensor's history of amaxes           | delayed scaling: between steps          |

`launch` launches them; formulas are those of `reference`. A maximum is the same in whatever
order it is taken, so atomics leave nothing to chance.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device
from ..portable import covered, to_fp32
from .kernel import encode, inverse_of, scale_of
from .reference import MAX_FP32, MIN_SCALE

_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)
_EXPONENT = tl.constexpr(0x7F80_0000)
_MAX_FP32, _MIN_SCALE = tl.constexpr(MAX_FP32), tl.constexpr(MIN_SCALE)


@triton.jit
def _part_of(parts, columns, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """(row, offset, first column, elements left in the row) of this program's part of a row."""
    program = tl.program_id(0).to(tl.int64)
    row = program // parts
    start = (program - row * parts) * BLOCK
    columns = columns.to(tl.int64)
    if WIDE:
        columns = columns // 16 * 16
    return row, row * columns + start, start, columns - start


@triton.jit
def _magnitude_bits(value):
    """|FP32 value| as integers, in the same order, NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit(do_not_specialize=["columns", "parts"], do_not_specialize_on_alignment=["x"])
def _amax_kernel(
    amax,
    x,
    columns,
    parts,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """amax[row] = max(amax[row], |x|) as FP32 bits, over one of the `parts` of a row."""
    row, offset, _, count = _part_of(parts, columns, WIDE, BLOCK)
    x += offset
    if ALIGNED and count >= BLOCK:
        value = to_fp32(tl.load(tl.multiple_of(x + tl.arange(0, BLOCK), 16)))
        largest = tl.max(_magnitude_bits(value), 0)
    else:
        # In four pieces, whose other shape keeps the compiler from giving both paths one layout.
        largest = 0
        for first in range(0, covered(count, BLOCK), BLOCK // 4):
            lanes = first + tl.arange(0, BLOCK // 4)
            sources = x + lanes
            if WIDE:
                sources = tl.multiple_of(sources, 16)
            value = to_fp32(tl.load(sources, mask=lanes < count, other=0.0))
            largest = tl.maximum(largest, tl.max(_magnitude_bits(value), 0))
    tl.atomic_max(amax + row, largest, sem="relaxed")


@triton.jit
def _known_part(
    codes,
    x,
    factor,
    count,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise a part of a row with `factor`; the bits of its amax, for those who record it."""
    largest = 0
    if ALIGNED and count >= BLOCK:
        lanes = tl.arange(0, BLOCK)
        value = to_fp32(tl.load(tl.multiple_of(x + lanes, 16)))
        tl.store(tl.multiple_of(codes + lanes, 16), encode(value * factor, ELEMENT, HARDWARE))
        largest = tl.max(_magnitude_bits(value), 0)
    else:
        for first in range(0, covered(count, BLOCK), BLOCK // 4):
            lanes = first + tl.arange(0, BLOCK // 4)
            sources = x + lanes
            destinations = codes + lanes
            if WIDE:
                sources = tl.multiple_of(sources, 16)
                destinations = tl.multiple_of(destinations, 16)
            value = to_fp32(tl.load(sources, mask=lanes < count, other=0.0))
            made = encode(value * factor, ELEMENT, HARDWARE)
            tl.store(destinations, made, mask=lanes < count)
            largest = tl.maximum(largest, tl.max(_magnitude_bits(value), 0))
    return largest


@triton.jit(
    do_not_specialize=["columns", "parts"],
    do_not_specialize_on_alignment=["codes", "scale_inv", "x", "amax", "scale"],
)
def _known_kernel(
    codes,
    scale_inv,
    x,
    amax,
    scale,
    columns,
    parts,
    ELEMENT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One of the `parts` of a row.

    Without `scale` the row's is made from amax[row]; with it, it is for all, and amax[0] records.
    """
    row, offset, start, count = _part_of(parts, columns, WIDE, BLOCK)
    if scale is None:
        known = tl.load(amax + row + tl.arange(0, 1)).to(tl.float32, bitcast=True)
        factor = scale_of(known, ELEMENT, POWER_OF_2)
    else:
        factor = tl.load(scale + tl.arange(0, 1))
    if start == 0:
        tl.store(scale_inv + row + tl.arange(0, 1), inverse_of(factor))
    factor = tl.sum(factor, 0)
    largest = _known_part(
        codes + offset, x + offset, factor, count, ELEMENT, ALIGNED, WIDE, HARDWARE, BLOCK
    )
    if scale is not None and amax is not None:
        tl.atomic_max(amax, largest, sem="relaxed")


@triton.jit
def _update_kernel(
    history,
    scales,
    target,
    length,
    MOST_RECENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The next scale of one tensor. Everything is read before any of it is moved."""
    tensor = tl.program_id(0).to(tl.int64)
    history += tensor * length
    lanes = tl.arange(0, BLOCK)
    after = tl.where(lanes + 1 < length, lanes + 1, 0)
    rolled = tl.load(history + after, mask=lanes < length, other=0.0)
    if MOST_RECENT:
        amax = tl.load(history + tl.arange(0, 1))
    else:
        amax = device.amax(tl.reshape(rolled, [1, BLOCK]), 1)
    tl.debug_barrier()
    tl.store(history + lanes, tl.where(lanes == 0, 0.0, rolled), mask=lanes < length)
    quotient = tl.div_rn(tl.full([1], 0.0, tl.float32) + target, amax)
    quotient = tl.minimum(tl.maximum(quotient, _MIN_SCALE), _MAX_FP32)
    bits = amax.to(tl.int32, bitcast=True)
    usable = (bits > 0) & (bits < _EXPONENT)
    tl.store(scales + tensor + tl.arange(0, 1), quotient, mask=usable)
