"""MXFP8 and MXFP4 of a matrix and of its transpose on the GPU, in one launch that reads it once.

Formulas and rounding are those of `mx.reference`. Bytes moved an element of BF16: 4.06 for MXFP8,
3.06 for MXFP4, where two casts move 6.06 and 5.06.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.device_table import codec_of
from ..formats.noise import Seed
from ..formats.table import ELEMENTS, SCALE_RULES
from ..launch import launch
from ..mx.reference import form_of
from . import tiles


@triton.jit
def _write(
    data, scales, lines, side, noise, CODEC: tl.constexpr, HARDWARE: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """The codes and scales of a side's lines, FP32."""
    blocks = tl.reshape(lines, [lines.numel // 32, 32])
    scaled, made, _ = CODEC.scaled(blocks, CODEC, 0, HARDWARE)
    tiles.write_side(data, scales, scaled, made, side, noise, CODEC.element, HARDWARE, LAYOUT)


@triton.jit(
    do_not_specialize=["rows", "columns", "across", "seed", "first_index"],
    do_not_specialize_on_alignment=["source", "data", "scales", "data_t", "scales_t"],
)
def _quantize_kernel(
    source,
    data,
    scales,
    data_t,
    scales_t,
    rows,
    columns,
    across,
    seed,
    first_index,
    CODEC: tl.constexpr,
    HARDWARE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One tile, along its rows and along its columns."""
    tile, noise = tiles.tile_of(rows, columns, across), (seed, first_index)
    x = tiles.load_tile(source, tile, LAYOUT)
    lines, side = tiles.row_lines(x), tiles.row_side(tile)
    _write(data, scales, lines, side, noise, CODEC, HARDWARE, LAYOUT)
    lines, side = tiles.column_lines(x), tiles.column_side(tile)
    _write(data_t, scales_t, lines, side, noise, CODEC, HARDWARE, LAYOUT)


def quantize_mx_with_transpose_(
    data: torch.Tensor,
    scales: torch.Tensor,
    data_t: torch.Tensor,
    scales_t: torch.Tensor,
    x: torch.Tensor,
    element: str,
    rule: str,
    seed: Seed | None = None,
    first_index: int = 0,
    swizzled: bool = False,
) -> None:
    """`reference.quantize_mx_with_transpose_` in one launch."""
    form, codes = form_of(ELEMENTS[element]), (data, data_t)
    cut = tiles.cut_of(x, codes, form.element, swizzled=swizzled, first_index=first_index)
    if cut.programs:
        launch(
            _quantize_kernel,
            cut.programs,
            tiles.aligned_source(x),
            *(part.view(torch.uint8) for part in (data, scales, data_t, scales_t)),
            *cut.sizes,
            seed,
            first_index,
            on=x,
            num_warps=tiles.NUM_WARPS,
            CODEC=codec_of(form, SCALE_RULES[rule]),
            LAYOUT=cut.layout,
        )
