"""FP8 scaling on the GPU in two passes, amax and codes, and the step of delayed scaling.

| kernel  | a program has                            | for                                     |
|---------|------------------------------------------|-----------------------------------------|
| _amax   | a part of a row: its amax, by an atomic  | tensor, longest rows: first pass        |
| _known  | a part of a row whose amax is known      | the same: second pass; delayed scaling  |
| _update | one tensor's history of amaxes           | delayed scaling: between steps          |

Rows, or the tensor as one, are read by as many programs as they have blocks. Formulas are those of
`reference`. A maximum is the same in any order, so atomics leave nothing to chance.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.table import ELEMENTS, FP32
from ..launch import LaunchConfig, is_aligned, launch
from ..paths import for_tile, load, store
from ..portable import to_fp32
from ..tuned import config_for
from .device_codec import inverse_of, scale_of
from .reference import MIN_SCALE

BLOCK = 4096
NUM_WARPS = 4
MIN_LINE = 16  # elements: one access of 16 bytes to the codes

_EXPONENT = tl.constexpr(0x7F80_0000)
_MAX_FP32, _MIN_SCALE = tl.constexpr(FP32.max_finite), tl.constexpr(MIN_SCALE)


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
def _part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """If there are `codes`, they are made with `factor`; if there is an amax, it records |x|."""
    x, codes, factor, amax = arguments[:4]
    ELEMENT: tl.constexpr = arguments[4]
    WIDE: tl.constexpr = arguments[5]
    HARDWARE: tl.constexpr = arguments[6]
    value = to_fp32(load(x, place, FULL, NUMEL, WIDE))
    if codes is not None:
        made = device.code_of(value * factor, None, ELEMENT, HARDWARE)
        store(codes, made, place, FULL, NUMEL, WIDE)
    if amax is not None:
        device.raise_amax(amax, value)


@triton.jit(do_not_specialize=["columns", "parts"], do_not_specialize_on_alignment=["amax", "x"])
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
    for_tile(_part, (x + offset, None, None, amax + row, None, WIDE, False), count, ALIGNED, BLOCK)


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
    for_tile(
        _part,
        (
            x + offset,
            codes + offset,
            factor,
            None if scale is None else amax,
            ELEMENT,
            WIDE,
            HARDWARE,
        ),
        count,
        ALIGNED,
        BLOCK,
    )


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["history", "scales"])
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


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of codes, a byte an element."""
    return LaunchConfig(BLOCK, NUM_WARPS)


def _cut(
    x: torch.Tensor, rows: int, aligned: bool, delayed: bool
) -> tuple[int, int, dict[str, Any]]:
    """(Elements of a row, programs that share it, how they are launched)."""
    columns = x.numel() // rows
    case = "delayed" if delayed else "tensor"
    config = config_for("quantize_fp8_", case, default_config(), x.device)
    wide = aligned and columns % MIN_LINE == 0
    shape = {"ALIGNED": wide or (aligned and rows == 1), "WIDE": wide, "BLOCK": config.block_bytes}
    parts = triton.cdiv(columns, config.block_bytes)
    return columns, parts, {"on": x, "num_warps": config.num_warps, **shape}


def row_amaxes(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The amax of each of the rows, or of the tensor as one: the bits of FP32, int32 [rows]."""
    bits = torch.zeros(rows, dtype=torch.int32, device=x.device)
    columns, parts, launched = _cut(x, rows, is_aligned(x), False)
    launch(_amax_kernel, rows * parts, bits, x, columns, parts, **launched)
    return bits


def quantize_known(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    **constants: Any,
) -> None:
    """Rows, or the tensor as one: amax first, unless the scale is given, then the codes."""
    rows = scale_inv.numel()
    if scale is None:
        bits: torch.Tensor | None = row_amaxes(x, rows)
    else:
        bits = None if amax is None else amax.view(torch.int32)
    columns, parts, launched = _cut(x, rows, is_aligned(codes, x), scale is not None)
    launch(
        _known_kernel,
        rows * parts,
        codes,
        scale_inv,
        x,
        bits,
        scale,
        columns,
        parts,
        **launched,
        **constants,
    )


def update_fp8_scales_(
    amax_history: torch.Tensor, scales: torch.Tensor, element: str, margin: int, algorithm: str
) -> None:
    """`reference.update_fp8_scales_` in one launch, a program a tensor."""
    length = amax_history.shape[1]
    launch(
        _update_kernel,
        scales.numel(),
        amax_history,
        scales,
        ELEMENTS[element].max_finite * 2.0 ** (-margin),
        length,
        on=scales,
        num_warps=NUM_WARPS,
        MOST_RECENT=algorithm == "most_recent",
        BLOCK=triton.next_power_of_2(length),
    )
