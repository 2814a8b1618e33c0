"""Owns decoding NVFP4 on the GPU: codes, scales and the amax of a tensor back to its values.

Formula and rounding are those of `reference.dequantize_`. Bytes moved an element, to BF16:
2 + 1/2 + 1/16. Blocks that are full and 16-byte aligned take the unmasked path, 16 bytes an access
on the side of the values; the others take the masked one.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.table import wire_format_of
from ..launch import LaunchConfig, is_aligned, launch
from ..portable import covered, round_to
from ..tuned import config_for
from .blocks import cut_of, decode_factors, reciprocal_of, scale_pointers
from .reference import BLOCK_NUMEL

TILE_NUMEL = 4096
NUM_WARPS = 4


@triton.jit
def _dequantize_full_tile(
    destination,
    data,
    scales,
    amax,
    TORCHAO: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
):
    packed = tl.load(tl.multiple_of(data + tl.arange(0, TILE // 2), 16))
    factors = decode_factors(tl.load(scales), amax, TORCHAO, HARDWARE)
    values = device.decode_e2m1(device.unpack_nibbles(tl.reshape(packed, [TILE // 16, 8])))
    decoded = tl.reshape(values * factors[:, None], [TILE])
    rounded = round_to(decoded, destination.dtype.element_ty)
    tl.store(tl.multiple_of(destination + tl.arange(0, TILE), 16), rounded)


@triton.jit
def _dequantize_masked_blocks(
    destination, data, blocks, num_blocks, row_blocks, row_numel, factors
):
    row, block_column = (blocks // row_blocks)[:, None], (blocks % row_blocks)[:, None]
    exists = (blocks < num_blocks)[:, None]
    row_bytes = (row_numel + 1) // 2
    columns = block_column * 8 + tl.arange(0, 8)[None, :]
    mask = exists & (columns < row_bytes)
    packed = tl.load(data + row * row_bytes + columns, mask=mask, other=0)
    decoded = device.decode_e2m1(device.unpack_nibbles(packed)) * factors[:, None]
    rounded = round_to(decoded, destination.dtype.element_ty)
    columns = block_column * 16 + tl.arange(0, 16)[None, :]
    mask = exists & (columns < row_numel)
    tl.store(destination + row * row_numel + columns, rounded, mask=mask)


@triton.jit(
    do_not_specialize=["num_blocks", "row_blocks", "row_numel", "scale_columns", "reciprocal"],
    do_not_specialize_on_alignment=["destination", "data", "scales", "amax"],
)
def _dequantize_kernel(
    destination,
    data,
    scales,
    amax,
    num_blocks,
    row_blocks,
    row_numel,
    scale_columns,
    reciprocal,
    TORCHAO: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE / 16 blocks, cut as `nvfp4`'s quantisation cuts them."""
    BLOCKS: tl.constexpr = TILE // 16
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first_block * 16
    largest = tl.load(amax)
    if FLAT and start + TILE <= row_numel:
        _dequantize_full_tile(
            destination + start,
            data + first_block * 8,
            scale_pointers(scales, first_block, scale_columns, reciprocal, SWIZZLED, True, BLOCKS),
            largest,
            TORCHAO,
            HARDWARE,
            TILE,
        )
    else:
        # In eight pieces, whose other shape keeps the compiler from giving both paths one layout.
        # Four take 96 registers on sm_90, which full tiles would pay for with fewer warps.
        for first in range(0, covered(num_blocks - first_block, BLOCKS), BLOCKS // 8):
            blocks = first_block + first + tl.arange(0, BLOCKS // 8)
            pointers = scale_pointers(
                scales,
                first_block + first,
                scale_columns,
                reciprocal,
                SWIZZLED,
                False,
                BLOCKS // 8,
            )
            scale_bytes = tl.load(pointers, mask=blocks < num_blocks, other=0)
            factors = decode_factors(scale_bytes, largest, TORCHAO, HARDWARE)
            _dequantize_masked_blocks(
                destination, data, blocks, num_blocks, row_blocks, row_numel, factors
            )


@functools.cache
def default_config() -> LaunchConfig:
    """An element counts as a byte."""
    return LaunchConfig(TILE_NUMEL, NUM_WARPS)


def dequantize_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    global_amax: torch.Tensor,
    torchao: bool = False,
    swizzled: bool = False,
) -> None:
    """`reference.dequantize_` in one launch."""
    case = wire_format_of(out.dtype).name
    config = config_for("dequantize_nvfp4_", case, default_config(), out.device)
    cut = cut_of(out, config.block_bytes)
    if cut.num_blocks == 0:
        return
    columns = triton.cdiv(out.shape[-1], BLOCK_NUMEL)
    scale_bytes = scales.view(torch.uint8)
    launch(
        _dequantize_kernel,
        cut.num_tiles,
        out,
        data,
        scale_bytes,
        global_amax,
        cut.num_blocks,
        cut.row_blocks,
        cut.row_numel,
        columns,
        reciprocal_of(columns),
        on=out,
        num_warps=config.num_warps,
        TORCHAO=torchao,
        SWIZZLED=swizzled,
        FLAT=cut.is_flat and is_aligned(out, data, scale_bytes),
        TILE=config.block_bytes,
    )
