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

from ..formats.device_e2m1 import packed_e2m1
from ..formats.table import E2M1
from ..launch import launch
from ..nvfp4.device_codec import block_scales, number_amax, tensor_scale_of
from ..nvfp4.hadamard import sign_factors, stages_of_eight
from ..portable import round_to, to_fp32
from . import tiles


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
    data,
    scales,
    x,
    side,
    block_amax,
    amax,
    seed,
    first_index,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The codes and scales of lines, FP32 [L, n]; block_amax: of each block, None for its own."""
    NUMEL: tl.constexpr = x.shape[1]
    blocks: tl.constexpr = [x.numel // 16, 16]
    x = tl.reshape(x, blocks)
    if block_amax is None:
        block_amax = number_amax(x, 1)
    tensor_scale = tensor_scale_of(tl.load(amax), False)
    scale_bytes, factors = block_scales(block_amax, tensor_scale, False, HARDWARE)
    bits = None
    if seed is not None:
        bits = tl.reshape(tiles.noise_of_lines(seed, first_index, side, NUMEL, EIGHTS), blocks)
    made = packed_e2m1(x * factors[:, None], bits)
    tiles.store_lines(data, made, side, NUMEL, ALIGNED, WHOLE)
    tiles.store_scales(scales, scale_bytes, side, 16, SWIZZLED, WHOLE)


@triton.jit(
    do_not_specialize=["rows", "columns", "across", "seed", "first_index"],
    do_not_specialize_on_alignment=[
        "source", "data", "scales", "amax", "data_t", "scales_t", "amax_t",
    ],
)  # fmt: skip
def _quantize_kernel(
    source,
    data,
    scales,
    amax,
    data_t,
    scales_t,
    amax_t,
    rows,
    columns,
    across,
    seed,
    first_index,
    HADAMARD: tl.constexpr,
    SQUARE: tl.constexpr,
    HARDWARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile, along its rows and along its columns; HADAMARD: the columns transformed."""
    tile = tiles.tile_of(rows, columns, across)
    x = tiles.load_tile(source, tile, WHOLE)
    first_index = first_index.to(tl.int64)
    row_amax = None
    column_amax = None
    if SQUARE:
        row_amax, column_amax = _square_amaxes(x)
    _write(
        data, scales, tiles.row_lines(x), tiles.row_side(tile), row_amax, amax, seed, first_index,
        HARDWARE, SWIZZLED, EIGHTS, ALIGNED, WHOLE,
    )  # fmt: skip
    x = tiles.column_lines(x)
    if HADAMARD:
        x = _transformed_lines(x, source.dtype.element_ty)
    _write(
        data_t, scales_t, x, tiles.column_side(tile), column_amax, amax_t, seed, first_index,
        HARDWARE, SWIZZLED, EIGHTS, ALIGNED, WHOLE,
    )  # fmt: skip


@triton.jit
def _raise_to(amax, x):
    """max(amax, |x|), NaNs left out: for floats >= 0 their bits' order."""
    largest = number_amax(tl.reshape(x, [x.numel]), 0)
    tl.atomic_max(amax, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(
    do_not_specialize=["rows", "columns", "across"],
    do_not_specialize_on_alignment=["source", "amax", "amax_t"],
)
def _amax_kernel(source, amax, amax_t, rows, columns, across, WHOLE: tl.constexpr):
    """Raises both to the largest magnitudes of a tile and of its columns' transform."""
    x = tiles.load_tile(source, tiles.tile_of(rows, columns, across), WHOLE)
    _raise_to(amax, x)
    _raise_to(amax_t, _transformed_lines(tiles.column_lines(x), source.dtype.element_ty))


def amax_nvfp4_with_transpose_(amax: torch.Tensor, amax_t: torch.Tensor, x: torch.Tensor) -> None:
    """`reference.amax_nvfp4_with_transpose_`, in one launch after those that write zeros."""
    amax.zero_()
    amax_t.zero_()
    cut = tiles.cut_of(x, (), E2M1.stored_bits, False)
    if x.numel():
        launch(
            _amax_kernel,
            cut.programs,
            tiles.aligned_source(x),
            amax.view(torch.int32),
            amax_t.view(torch.int32),
            cut.rows,
            cut.columns,
            cut.across,
            on=x,
            num_warps=tiles.NUM_WARPS,
            WHOLE=cut.whole,
        )


def quantize_nvfp4_with_transpose_(
    data: torch.Tensor,
    scales: torch.Tensor,
    data_t: torch.Tensor,
    scales_t: torch.Tensor,
    x: torch.Tensor,
    amax: torch.Tensor,
    amax_t: torch.Tensor,
    seed: int | None = None,
    first_index: int = 0,
    hadamard: bool = False,
    square: bool = False,
    swizzled: bool = False,
) -> None:
    """`reference.quantize_nvfp4_with_transpose_` in one launch."""
    cut = tiles.cut_of(x, (data, data_t), E2M1.stored_bits, swizzled)
    if x.numel() == 0:
        return
    launch(
        _quantize_kernel,
        cut.programs,
        tiles.aligned_source(x),
        data,
        scales.view(torch.uint8),
        amax,
        data_t,
        scales_t.view(torch.uint8),
        amax_t,
        cut.rows,
        cut.columns,
        cut.across,
        seed,
        first_index,
        on=x,
        num_warps=tiles.NUM_WARPS,
        HADAMARD=hadamard,
        SQUARE=square,
        SWIZZLED=swizzled,
        EIGHTS=first_index % tiles.EIGHT == 0,
        **cut.constants,
    )
