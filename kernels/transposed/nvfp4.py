"""NVFP4 of a matrix and of its transpose on the GPU: codes and scales in one read, amaxes in one.

Formulas and rounding are those of `reference`. Bytes moved an element of BF16: 3.13 for the codes,
2 for the amaxes.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats.device_table import element_constant
from ..formats.noise import Seed
from ..formats.table import E2M1
from ..launch import launch
from ..nvfp4.device_codec import block_scales, number_amax, raise_amax, tensor_scale_of
from ..nvfp4.hadamard import sign_factors, stages_of_eight
from ..portable import round_to, to_fp32
from . import tiles

_E2M1 = element_constant(E2M1)


@triton.jit
def _transformed_lines(x, dtype: tl.constexpr):
    """The Hadamard transform of every 16 elements of lines, FP32 [L, n], rounded to `dtype`.

    Two threads share a block, so for the last stage each gets the other's elements: their sum, as
    integers that wrap around, less its own. Compiled that is one exchange and no sum.
    """
    half = tl.arange(0, 2)[None, :, None]
    lanes = half * 8 + tl.arange(0, 8)[None, None, :]
    halves = tl.reshape(x, [x.numel // 16, 2, 8]) * sign_factors(lanes)
    halves = tl.reshape(stages_of_eight(tl.reshape(halves, [x.numel // 8, 8])), halves.shape)
    bits = halves.to(tl.uint32, bitcast=True)
    other = (tl.sum(bits, 1)[:, None, :] - bits).to(tl.float32, bitcast=True)
    made = other + tl.where(half == 0, halves, -halves)
    return tl.reshape(to_fp32(round_to(made, dtype)), x.shape)


@triton.jit
def _square_amaxes(x):
    """The amax of squares of 16 x 16, of FP32 [8, r, c], for every block of 16 that has a part.

    ([8 * r * c / 16], in the order of `tiles.row_lines`; the same number, of `column_lines`.)
    """
    PAIRS: tl.constexpr = x.shape[1] // 2
    ACROSS: tl.constexpr = x.shape[2] // 16
    amax = number_amax(tl.reshape(x, [8, PAIRS, 2, ACROSS, 16]), 4)
    amax = tl.max(tl.max(amax, 0), 1)  # [PAIRS, ACROSS]
    every = tl.zeros([8, PAIRS, 2, ACROSS], tl.float32) + amax[None, :, None, :]
    other = tl.zeros([ACROSS, 16, PAIRS], tl.float32) + tl.permute(amax, (1, 0))[:, None, :]
    return tl.reshape(every, [x.numel // 16]), tl.reshape(other, [x.numel // 16])


@triton.jit
def _write(
    data, scales, lines, side, noise, block_amax, amax, HARDWARE: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """The codes and scales of a side's lines, FP32; block_amax: None for each block's own."""
    blocks = tl.reshape(lines, [lines.numel // 16, 16])
    if block_amax is None:
        block_amax = number_amax(blocks, 1)
    made, factors = block_scales(block_amax, tensor_scale_of(tl.load(amax), False), False, HARDWARE)
    scaled = blocks * factors[:, None]
    tiles.write_side(data, scales, scaled, made, side, noise, _E2M1, HARDWARE, LAYOUT)


@triton.jit(
    do_not_specialize=["rows", "columns", "across", "seed", "first_index"],
    do_not_specialize_on_alignment=[
        "source", "data", "scales", "data_t", "scales_t", "amax", "amax_t",
    ],
)  # fmt: skip
def _quantize_kernel(
    source,
    data,
    scales,
    data_t,
    scales_t,
    amax,
    amax_t,
    rows,
    columns,
    across,
    seed,
    first_index,
    HADAMARD: tl.constexpr,
    SQUARE: tl.constexpr,
    HARDWARE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One tile, along its rows and along its columns; HADAMARD: the columns transformed."""
    tile, noise = tiles.tile_of(rows, columns, across), (seed, first_index)
    x = tiles.load_tile(source, tile, LAYOUT)
    row_amax = None
    column_amax = None
    if SQUARE:
        row_amax, column_amax = _square_amaxes(x)
    lines, side = tiles.row_lines(x), tiles.row_side(tile)
    _write(data, scales, lines, side, noise, row_amax, amax, HARDWARE, LAYOUT)
    lines, side = tiles.column_lines(x), tiles.column_side(tile)
    if HADAMARD:
        lines = _transformed_lines(lines, source.dtype.element_ty)
    _write(data_t, scales_t, lines, side, noise, column_amax, amax_t, HARDWARE, LAYOUT)


@triton.jit(
    do_not_specialize=["rows", "columns", "across"],
    do_not_specialize_on_alignment=["source", "amax", "amax_t"],
)
def _amax_kernel(source, amax, amax_t, rows, columns, across, LAYOUT: tl.constexpr):
    """Raises both to the largest magnitudes of a tile and of its columns' transform."""
    x = tiles.load_tile(source, tiles.tile_of(rows, columns, across), LAYOUT)
    raise_amax(amax, tl.reshape(x, [x.numel]))
    x = _transformed_lines(tiles.column_lines(x), source.dtype.element_ty)
    raise_amax(amax_t, tl.reshape(x, [x.numel]))


def amax_nvfp4_with_transpose_(amax: torch.Tensor, amax_t: torch.Tensor, x: torch.Tensor) -> None:
    """`reference.amax_nvfp4_with_transpose_`, in one launch after those that write zeros."""
    amaxes = amax.zero_().view(torch.int32), amax_t.zero_().view(torch.int32)
    cut = tiles.cut_of(x, (), E2M1)
    if cut.programs:
        launch(
            _amax_kernel,
            cut.programs,
            tiles.aligned_source(x),
            *amaxes,
            *cut.sizes,
            on=x,
            num_warps=tiles.NUM_WARPS,
            LAYOUT=cut.layout,
        )


def quantize_nvfp4_with_transpose_(
    data: torch.Tensor,
    scales: torch.Tensor,
    data_t: torch.Tensor,
    scales_t: torch.Tensor,
    x: torch.Tensor,
    amax: torch.Tensor,
    amax_t: torch.Tensor,
    seed: Seed | None = None,
    first_index: int = 0,
    hadamard: bool = False,
    square: bool = False,
    swizzled: bool = False,
) -> None:
    """`reference.quantize_nvfp4_with_transpose_` in one launch."""
    cut = tiles.cut_of(x, (data, data_t), E2M1, swizzled=swizzled, first_index=first_index)
    if cut.programs:
        launch(
            _quantize_kernel,
            cut.programs,
            tiles.aligned_source(x),
            *(part.view(torch.uint8) for part in (data, scales, data_t, scales_t)),
            amax,
            amax_t,
            *cut.sizes,
            seed,
            first_index,
            on=x,
            num_warps=tiles.NUM_WARPS,
            HADAMARD=hadamard,
            SQUARE=square,
            LAYOUT=cut.layout,
        )
