"""Kernels that consist of NVFP4's and the transform's paths for full tiles alone, to be counted."""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ..nvfp4 import blocks as nvfp4_blocks
from ..nvfp4 import decode as nvfp4_decode
from ..nvfp4 import hadamard
from ..nvfp4 import kernel as nvfp4


@triton.jit
def quantize_probe(
    source,
    data,
    scales,
    amax,
    scale_columns,
    reciprocal,
    seed,
    first_index,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TORCHAO: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`nvfp4.kernel._quantize_full_tile` of this program's tile."""
    first_block = tl.program_id(0).to(tl.int64) * (TILE // 16)
    start = first_block * 16
    nvfp4._quantize_full_tile(
        source + start,
        data + first_block * 8,
        nvfp4_blocks.scale_pointers(
            scales, first_block, scale_columns, reciprocal, SWIZZLED, True, TILE // 16
        ),
        nvfp4_blocks.tensor_scale_of(tl.load(amax), TORCHAO),
        seed,
        (first_index + start) >> 4,
        HADAMARD,
        STOCHASTIC,
        TORCHAO,
        HARDWARE,
        TILE,
    )


@triton.jit
def dequantize_probe(
    destination,
    data,
    scales,
    amax,
    scale_columns,
    reciprocal,
    TORCHAO: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`nvfp4.decode._dequantize_full_tile` of this program's tile."""
    first_block = tl.program_id(0).to(tl.int64) * (TILE // 16)
    nvfp4_decode._dequantize_full_tile(
        destination + first_block * 16,
        data + first_block * 8,
        nvfp4_blocks.scale_pointers(
            scales, first_block, scale_columns, reciprocal, SWIZZLED, True, TILE // 16
        ),
        tl.load(amax),
        TORCHAO,
        HARDWARE,
        TILE,
    )


@triton.jit
def amax_probe(source, amax, HADAMARD: tl.constexpr, TILE: tl.constexpr) -> None:
    """The amax of this program's tile, as `nvfp4.kernel._amax_kernel` takes it of full ones."""
    start = tl.program_id(0).to(tl.int64) * TILE
    low, high = nvfp4_blocks.full_halves(source + start, HADAMARD, TILE)
    found = tl.maximum(nvfp4_blocks.magnitudes(low), nvfp4_blocks.magnitudes(high))
    largest = nvfp4_blocks.largest_of(tl.reshape(found, [TILE // 2]), 0)
    tl.atomic_max(amax, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def hadamard_probe(source, destination, INVERSE: tl.constexpr, TILE: tl.constexpr) -> None:
    """`nvfp4.hadamard._transform_full_block` of this program's block."""
    start = tl.program_id(0).to(tl.int64) * TILE
    hadamard._transform_full_block(source + start, destination + start, INVERSE, TILE)
