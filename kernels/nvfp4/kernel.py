"""NVFP4 on the GPU: the amax of a tensor, its codes and scales, and the way back.

Formulas and rounding are those of `reference`. Bytes moved an element, to or from BF16: 2 for the
amax and 2 + 1/2 + 1/16 for the codes. The amax stays on the device. The Hadamard transform, if
wanted, is made anew in each pass, which costs less than writing it once. Tiles that are full and
16-byte aligned take the unmasked path; the tail, and rows whose length is no multiple of 16, take
the masked one. Swizzled scales are scattered a byte at a time: a fortieth of what is moved.

Tiles are cut, and come as halves of blocks, as `hadamard` has it. The kernels call the codec's
functions and not the codec, which finds the amax itself and knows no variant of torchao's.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_e2m1 import bytes_of, decode_e2m1, packed_e2m1, unpacked_e2m1
from ..formats.device_swizzle import reciprocal_of, scale_pointers
from ..formats.noise import Seed
from ..formats.table import wire_format_of
from ..launch import LaunchConfig, is_aligned, launch
from ..portable import covered, round_to
from ..tuned import config_for
from .device_codec import (
    block_amaxes,
    decode_factors,
    scaled_halves,
    tensor_scale_of,
)
from .hadamard import cut_of, full_halves, joined, masked_halves
from .reference import BLOCK_NUMEL

# Sixteen bytes of codes a thread: 32 elements * 32 threads * 4 warps.
TILE_NUMEL = 4096
NUM_WARPS = 4
AMAX_TILE_NUMEL = 8192


@triton.jit
def packed_blocks(low, high, seed, groups, HARDWARE: tl.constexpr) -> tl.tensor:
    """Halves of blocks, [n, 8] each, as words of codes [2 * n], with the noise of `groups`, int64
    [n], if there is a seed.
    """
    low_bits = None
    high_bits = None
    if seed is not None:
        low_bits, high_bits = device.noise_of_halves(seed, groups)
    return joined(packed_e2m1(low, low_bits, HARDWARE), packed_e2m1(high, high_bits, HARDWARE))


@triton.jit
def quantize_masked_blocks(
    source,
    data,
    blocks,
    cut,
    tensor_scale,
    noise,
    HADAMARD: tl.constexpr,
    TORCHAO: tl.constexpr,
    AS_NAN: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tl.tensor:
    """Writes the codes of `blocks`; returns their scale bytes."""
    num_blocks, row_blocks, row_numel = cut
    seed, first_index = noise
    low, high, places, element = masked_halves(source, blocks, cut, HADAMARD, False)
    low_bits = None
    high_bits = None
    if seed is not None:
        low_bits = device.noise_of(seed, first_index + places)
        high_bits = device.noise_of(seed, first_index + places + 8)
    block_amax, _ = block_amaxes(low, high, AS_NAN)
    low, high, scale_bytes = scaled_halves(low, high, block_amax, tensor_scale, TORCHAO, HARDWARE)
    if AS_NAN:  # such a block has NaNs in the place of what does not exist
        low = tl.where(element < row_numel, low, 0.0)
        high = tl.where(element + 8 < row_numel, high, 0.0)
    row_bytes = (row_numel + 1) // 2
    columns = (blocks % row_blocks)[:, None] * 8 + tl.arange(0, 4)[None, :]
    columns = tl.where((blocks < num_blocks)[:, None], columns, row_bytes)
    data += (blocks // row_blocks)[:, None] * row_bytes + columns
    low = bytes_of(packed_e2m1(low, low_bits, HARDWARE))
    high = bytes_of(packed_e2m1(high, high_bits, HARDWARE))
    tl.store(data, low, mask=columns < row_bytes)
    tl.store(data + 4, high, mask=columns + 4 < row_bytes)
    return scale_bytes


@triton.jit(
    do_not_specialize=[
        "num_blocks",
        "row_blocks",
        "row_numel",
        "scale_columns",
        "reciprocal",
        "seed",
        "first_index",
    ],
    do_not_specialize_on_alignment=["source", "data", "scales", "amax"],
)
def _quantize_kernel(
    source,
    data,
    scales,
    amax,
    num_blocks,
    row_blocks,
    row_numel,
    scale_columns,
    reciprocal,
    seed,
    first_index,
    HADAMARD: tl.constexpr,
    TORCHAO: tl.constexpr,
    SWIZZLED: tl.constexpr,
    AS_NAN: tl.constexpr,
    HARDWARE: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE / 16 blocks of rows that have `row_blocks` each.

    Example: rows of 20 elements have 2 blocks and 10 bytes of codes, so block 5 is the second of
    row 2: elements 56 to 59, bytes 28 and 29, scale 5. Where rows are whole blocks, all of them are
    one row here, and `scale_columns` alone tells their length, in blocks.
    """
    BLOCKS: tl.constexpr = TILE // 16
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first_block * 16
    cut = (num_blocks, row_blocks, row_numel)
    tensor_scale = tensor_scale_of(tl.load(amax), TORCHAO)
    if FLAT and start + TILE <= row_numel:
        at = scale_pointers(scales, first_block, scale_columns, reciprocal, SWIZZLED, True, BLOCKS)
        low, high = full_halves(source + start, HADAMARD, False, TILE)
        block_amax, _ = block_amaxes(low, high, AS_NAN)
        low, high, scale_bytes = scaled_halves(
            low, high, block_amax, tensor_scale, TORCHAO, HARDWARE
        )
        groups = ((first_index + start) >> 4) + tl.arange(0, BLOCKS)
        made = packed_blocks(low, high, seed, groups, HARDWARE)
        tl.store(at, scale_bytes)
        places = (data + first_block * 8).to(tl.pointer_type(tl.uint32), bitcast=True)
        tl.store(tl.multiple_of(places + tl.arange(0, TILE // 8), 16), made)
    else:
        # In four pieces, whose other shape keeps the compiler from giving both paths one layout.
        for first in range(0, covered(num_blocks - first_block, BLOCKS), BLOCKS // 4):
            blocks = first_block + first + tl.arange(0, BLOCKS // 4)
            noise = (seed, first_index)
            scale_bytes = quantize_masked_blocks(
                source, data, blocks, cut, tensor_scale, noise, HADAMARD, TORCHAO, AS_NAN, HARDWARE
            )
            at = scale_pointers(
                scales, first_block + first, scale_columns, reciprocal, SWIZZLED, False, BLOCKS // 4
            )
            tl.store(at, scale_bytes, mask=blocks < num_blocks)


@triton.jit
def _raise_amax(amax, low, high, AS_NAN: tl.constexpr):
    """max(amax, the largest magnitude of halves of blocks): for floats >= 0 their bits' order."""
    _, counted = block_amaxes(low, high, AS_NAN)
    tl.atomic_max(amax, tl.max(counted, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(
    do_not_specialize=["num_blocks", "row_blocks", "row_numel"],
    do_not_specialize_on_alignment=["source", "amax"],
)
def _amax_kernel(
    source,
    amax,
    num_blocks,
    row_blocks,
    row_numel,
    HADAMARD: tl.constexpr,
    AS_NAN: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raises amax to the largest magnitude of TILE / 16 blocks."""
    BLOCKS: tl.constexpr = TILE // 16
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first_block * 16
    cut = (num_blocks, row_blocks, row_numel)
    if FLAT and start + TILE <= row_numel:
        low, high = full_halves(source + start, HADAMARD, False, TILE)
        _raise_amax(amax, low, high, AS_NAN)
    else:
        for first in range(0, covered(num_blocks - first_block, BLOCKS), BLOCKS // 4):
            blocks = first_block + first + tl.arange(0, BLOCKS // 4)
            low, high, _, _ = masked_halves(source, blocks, cut, HADAMARD, False)
            _raise_amax(amax, low, high, AS_NAN)


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
    """TILE / 16 blocks, cut as `_quantize_kernel` cuts them."""
    BLOCKS: tl.constexpr = TILE // 16
    dtype: tl.constexpr = destination.dtype.element_ty
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first_block * 16
    largest = tl.load(amax)
    if FLAT and start + TILE <= row_numel:
        at = scale_pointers(scales, first_block, scale_columns, reciprocal, SWIZZLED, True, BLOCKS)
        words = (data + first_block * 8).to(tl.pointer_type(tl.uint32), bitcast=True)
        packed = tl.load(tl.multiple_of(words + tl.arange(0, TILE // 8), 16))
        factors = decode_factors(tl.load(at), largest, TORCHAO, HARDWARE)
        values = unpacked_e2m1(tl.reshape(packed, [BLOCKS, 2]), HARDWARE)
        rounded = round_to(tl.reshape(values * factors[:, None], [TILE]), dtype)
        tl.store(tl.multiple_of(destination + start + tl.arange(0, TILE), 16), rounded)
    else:
        # In eight pieces, whose other shape keeps the compiler from giving both paths one layout.
        # Four take 96 registers on sm_90, which full tiles would pay for with fewer warps.
        PIECE: tl.constexpr = BLOCKS // 8
        for first in range(0, covered(num_blocks - first_block, BLOCKS), PIECE):
            blocks = first_block + first + tl.arange(0, PIECE)
            at = scale_pointers(
                scales, first_block + first, scale_columns, reciprocal, SWIZZLED, False, PIECE
            )
            scale_bytes = tl.load(at, mask=blocks < num_blocks, other=0)
            factors = decode_factors(scale_bytes, largest, TORCHAO, HARDWARE)
            row, block_column = (blocks // row_blocks)[:, None], (blocks % row_blocks)[:, None]
            exists = (blocks < num_blocks)[:, None]
            row_bytes = (row_numel + 1) // 2
            columns = block_column * 8 + tl.arange(0, 8)[None, :]
            mask = exists & (columns < row_bytes)
            packed = tl.load(data + row * row_bytes + columns, mask=mask, other=0)
            values = decode_e2m1(device.unpack_nibbles(packed)) * factors[:, None]
            columns = block_column * 16 + tl.arange(0, 16)[None, :]
            mask = exists & (columns < row_numel)
            places = destination + row * row_numel + columns
            tl.store(places, round_to(values, dtype), mask=mask)


@functools.cache
def amax_config(hadamard: bool) -> LaunchConfig:
    """An element counts as a byte. The transform takes registers, so its tiles are smaller."""
    return LaunchConfig(TILE_NUMEL if hadamard else AMAX_TILE_NUMEL, NUM_WARPS)


@functools.cache
def default_config() -> LaunchConfig:
    """Of codes, both ways: an element counts as a byte."""
    return LaunchConfig(TILE_NUMEL, NUM_WARPS)


def case_of(hadamard: bool, stochastic: bool = False) -> str:
    """The case that a table knows."""
    return ("hadamard" * hadamard + " stochastic" * stochastic).strip() or "plain"


def amax_nvfp4_(
    amax: torch.Tensor, x: torch.Tensor, hadamard: bool = False, as_nan: bool = False
) -> None:
    """`reference.amax_nvfp4_`, in one launch after the one that writes the zero it starts from."""
    amax.zero_()
    config = config_for("amax_nvfp4_", case_of(hadamard), amax_config(hadamard), x.device)
    cut = cut_of(x, config.block_bytes)
    if cut.num_blocks:
        launch(
            _amax_kernel,
            cut.num_tiles,
            x,
            amax.view(torch.int32),
            cut.num_blocks,
            cut.row_blocks,
            cut.row_numel,
            on=x,
            num_warps=config.num_warps,
            HADAMARD=hadamard,
            AS_NAN=as_nan,
            FLAT=cut.is_flat and is_aligned(x),
            TILE=config.block_bytes,
        )


def quantize_nvfp4_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    global_amax: torch.Tensor,
    seed: Seed | None = None,
    first_index: int = 0,
    torchao: bool = False,
    hadamard: bool = False,
    swizzled: bool = False,
    as_nan: bool = False,
) -> None:
    """`reference.quantize_nvfp4_` in one launch, and one for the padding of swizzled scales."""
    case = case_of(hadamard, seed is not None)
    config = config_for("quantize_nvfp4_", case, default_config(), x.device)
    cut = cut_of(x, config.block_bytes)
    scale_bytes = scales.view(torch.uint8)
    if swizzled:
        scale_bytes.zero_()
    if cut.num_blocks == 0:
        return
    columns = triton.cdiv(x.shape[-1], BLOCK_NUMEL)
    # Noise of whole groups needs blocks that start with one.
    is_flat = cut.is_flat and (seed is None or first_index % BLOCK_NUMEL == 0)
    launch(
        _quantize_kernel,
        cut.num_tiles,
        x,
        data,
        scale_bytes,
        global_amax,
        cut.num_blocks,
        cut.row_blocks,
        cut.row_numel,
        columns,
        reciprocal_of(columns),
        seed,
        first_index,
        on=x,
        num_warps=config.num_warps,
        HADAMARD=hadamard,
        TORCHAO=torchao,
        SWIZZLED=swizzled,
        AS_NAN=as_nan,
        FLAT=is_flat and is_aligned(x, data, scale_bytes),
        TILE=config.block_bytes,
    )


def dequantize_nvfp4_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    global_amax: torch.Tensor,
    torchao: bool = False,
    swizzled: bool = False,
) -> None:
    """`reference.dequantize_nvfp4_` in one launch."""
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
