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

from ..formats import device_codes as device
from ..formats.device_table import codec_of
from ..formats.table import ELEMENTS, SCALE_RULES
from ..launch import launch
from ..mx.reference import form_of
from . import tiles


@triton.jit
def _write(
    data,
    scales,
    x,
    side,
    seed,
    first_index,
    CODEC: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The codes and scales of lines, FP32 [L, n]."""
    NUMEL: tl.constexpr = x.shape[1]
    blocks: tl.constexpr = [x.numel // 32, 32]
    scaled, scale_bytes, _ = CODEC.scaled(tl.reshape(x, blocks), CODEC, 0, HARDWARE)
    bits = None
    if seed is not None:
        bits = tl.reshape(tiles.noise_of_lines(seed, first_index, side, NUMEL, EIGHTS), blocks)
    made = device.stored(scaled, bits, CODEC.element, HARDWARE)
    tiles.store_lines(data, made, side, NUMEL, ALIGNED, WHOLE)
    tiles.store_scales(scales, scale_bytes, side, 32, SWIZZLED, WHOLE)


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
    SWIZZLED: tl.constexpr,
    EIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile, along its rows and along its columns."""
    tile = tiles.tile_of(rows, columns, across)
    x = tiles.load_tile(source, tile, WHOLE)
    first_index = first_index.to(tl.int64)
    _write(
        data, scales, tiles.row_lines(x), tiles.row_side(tile), seed, first_index,
        CODEC, HARDWARE, SWIZZLED, EIGHTS, ALIGNED, WHOLE,
    )  # fmt: skip
    _write(
        data_t, scales_t, tiles.column_lines(x), tiles.column_side(tile), seed, first_index,
        CODEC, HARDWARE, SWIZZLED, EIGHTS, ALIGNED, WHOLE,
    )  # fmt: skip


def quantize_mx_with_transpose_(
    data: torch.Tensor,
    scales: torch.Tensor,
    data_t: torch.Tensor,
    scales_t: torch.Tensor,
    x: torch.Tensor,
    element: str,
    rule: str,
    seed: int | None = None,
    first_index: int = 0,
    swizzled: bool = False,
) -> None:
    """`reference.quantize_mx_with_transpose_` in one launch."""
    cut = tiles.cut_of(x, (data, data_t), ELEMENTS[element].stored_bits, swizzled)
    if x.numel() == 0:
        return
    launch(
        _quantize_kernel,
        cut.programs,
        tiles.aligned_source(x),
        *(part.view(torch.uint8) for part in (data, scales, data_t, scales_t)),
        cut.rows,
        cut.columns,
        cut.across,
        seed,
        first_index,
        on=x,
        num_warps=tiles.NUM_WARPS,
        CODEC=codec_of(form_of(ELEMENTS[element]), SCALE_RULES[rule]),
        SWIZZLED=swizzled,
        EIGHTS=first_index % tiles.EIGHT == 0,
        **cut.constants,
    )
