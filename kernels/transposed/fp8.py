"""FP8 of a matrix and of its transpose on the GPU, with one scale: codes of both in one read.

Formulas and rounding are those of `fp8.reference`. Bytes moved an element of BF16: 4, and 2 more
for the amax, unless the scale is given.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_table import element_of
from ..fp8.device_codec import inverse_of, scale_of
from ..fp8.reference import BY_DTYPE
from ..fp8.two_pass import row_amaxes
from ..launch import launch
from . import tiles


@triton.jit(
    do_not_specialize=["rows", "columns", "across"],
    do_not_specialize_on_alignment=["codes", "codes_t", "scale_inv", "source", "amax", "scale"],
)
def _quantize_kernel(
    codes,
    codes_t,
    scale_inv,
    source,
    amax,
    scale,
    rows,
    columns,
    across,
    ELEMENT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One tile. Without `scale` it is made from `amax`; with it, `amax`, if there, records |x|."""
    tile = tiles.tile_of(rows, columns, across)
    x = tiles.load_tile(source, tile, LAYOUT)
    if scale is None:
        known = tl.load(amax + tl.arange(0, 1)).to(tl.float32, bitcast=True)
        factor = scale_of(known, ELEMENT, POWER_OF_2)
    else:
        factor = tl.load(scale + tl.arange(0, 1))
        if amax is not None:
            device.raise_amax(amax, tl.reshape(x, [x.numel]))
    if tl.program_id(0) == 0:
        tl.store(scale_inv + tl.arange(0, 1), inverse_of(factor))
    made = device.code_of(x * tl.sum(factor, 0), None, ELEMENT, HARDWARE)
    tiles.store_lines(codes, tiles.row_lines(made), tiles.row_side(tile), 1, LAYOUT)
    tiles.store_lines(codes_t, tiles.column_lines(made), tiles.column_side(tile), 1, LAYOUT)


def quantize_fp8_with_transpose_(
    codes: torch.Tensor,
    codes_t: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """`reference.quantize_fp8_with_transpose_`: amax first, unless the scale is given."""
    element = BY_DTYPE[codes.dtype]
    cut = tiles.cut_of(x, (codes, codes_t), element)
    if scale is None:
        bits: torch.Tensor | None = row_amaxes(x, 1)
    else:
        bits = None if amax is None else amax.view(torch.int32)
    launch(
        _quantize_kernel,
        cut.programs,
        codes.view(torch.uint8),
        codes_t.view(torch.uint8),
        scale_inv,
        tiles.aligned_source(x),
        bits,
        scale,
        *cut.sizes,
        on=x,
        num_warps=tiles.NUM_WARPS,
        ELEMENT=element_of(element),
        POWER_OF_2=power_of_2,
        LAYOUT=cut.layout,
    )
