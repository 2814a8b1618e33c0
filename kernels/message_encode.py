"""Owns what `message_kernels` does with a tile: a tensor's elements to codes and scales in place.

Formulas and rounding are those of `reference_message`, and the device functions those of the
formats' own kernels. FULL: the elements all exist, from an aligned address on; else loads are
masked, and what the tensor lacks is zeros. The message is 16-byte aligned, and whole blocks of it
are stored.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import device_codes as device
from .fp8_kernels import inverse_of, scale_of
from .hadamard import joined
from .message_layout import HEADER_BYTES
from .message_tiles import (
    KIND_BF16,
    KIND_FP16,
    KIND_FP32,
    aligned_from,
    block_numel,
    kind_pointer,
    section,
)
from .mx import encode_rounded, scaled_blocks
from .nvfp4_blocks import largest_of, magnitudes, quantize_halves, tensor_scale_of
from .portable import round_to, to_fp32

_DATA_AT = tl.constexpr(HEADER_BYTES)


@triton.jit
def _loaded(source, lanes, count, scale, FULL: tl.constexpr):
    """FP32 elements times `scale`; zeros where the tensor has none, whatever the scale."""
    if FULL:
        x = to_fp32(tl.load(aligned_from(source, lanes)))
        if scale is not None:
            x = x * scale
    else:
        exists = lanes < count
        x = to_fp32(tl.load(source + lanes, mask=exists, other=0.0))
        if scale is not None:
            x = tl.where(exists, x * scale, 0.0)
    return x


@triton.jit
def _values(address, kind, begin, lanes, count, scale, FULL: tl.constexpr):
    """`_loaded` from the tensor at `address`, from its element `begin` on; kind: its dtype's code.

    A kind known when compiling leaves one of the branches, and one layout.
    """
    if kind == KIND_FP32:
        x = _loaded(kind_pointer(address, KIND_FP32) + begin, lanes, count, scale, FULL)
    elif kind == KIND_BF16:
        x = _loaded(kind_pointer(address, KIND_BF16) + begin, lanes, count, scale, FULL)
    else:
        x = _loaded(kind_pointer(address, KIND_FP16) + begin, lanes, count, scale, FULL)
    return x


@triton.jit
def _noise(seed, index, lanes, FULL: tl.constexpr):
    """The noise of the elements `index` + `lanes`; in full tiles `index` is a multiple of 16."""
    if FULL:
        return device.noise_of_block(seed, index >> 4, lanes)
    else:
        return device.noise_of(seed, index + lanes)


@triton.jit
def _stored_blocks(
    x,
    bits,
    message,
    start,
    extent,
    scales_at,
    rows_at,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    HARDWARE: tl.constexpr,
    FULL: tl.constexpr,
):
    """FP32 blocks [n, elements of one], into the message from element `start` on."""
    BLOCK: tl.constexpr = x.shape[1]
    STOCHASTIC: tl.constexpr = bits is not None
    blocks = tl.arange(0, x.shape[0])
    mask = None
    mask_blocks = None
    if not FULL:
        mask = blocks * BLOCK < extent
        mask_blocks = mask[:, None]
    lanes = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if FORMAT == "fp32" or FORMAT == "bf16" or FORMAT == "fp16":
        dtype: tl.constexpr = (
            tl.float32 if FORMAT == "fp32" else (tl.bfloat16 if FORMAT == "bf16" else tl.float16)
        )
        made = device.round_bf16_stochastic(x, bits) if STOCHASTIC else round_to(x, dtype)
        data = section(message, _DATA_AT, dtype) + start
    elif FORMAT == "mxfp4":
        x, scale_bytes = scaled_blocks(x, "e2m1", RULE)
        made = device.pack_nibbles(encode_rounded(x, bits, "e2m1", STOCHASTIC, HARDWARE))
        lanes = blocks[:, None] * 16 + tl.arange(0, 16)[None, :]
        data = message + _DATA_AT + (start >> 1)
        tl.store(message + scales_at + (start >> 5) + blocks, scale_bytes, mask=mask)
    else:
        if FORMAT == "mxfp8":
            x, scale_bytes = scaled_blocks(x, "e4m3", RULE)
            tl.store(message + scales_at + (start >> 5) + blocks, scale_bytes, mask=mask)
        else:
            tl.static_assert(FORMAT == "fp8_row" or FORMAT == "fp8_1x128")
            at = rows_at if FORMAT == "fp8_row" else scales_at
            scale = scale_of(device.amax(x, 1), "e4m3", RULE == "power_of_2")
            inverses = section(message, at, tl.float32) + start // BLOCK + blocks
            tl.store(inverses, inverse_of(scale), mask=mask)
            x = x * scale[:, None]
        made = encode_rounded(x, bits, "e4m3", STOCHASTIC, HARDWARE)
        data = message + _DATA_AT + start
    tl.store(aligned_from(data, lanes), made, mask=mask_blocks)


@triton.jit
def _stored_halves(
    low,
    high,
    low_bits,
    high_bits,
    message,
    start,
    extent,
    scales_at,
    rows_at,
    ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    FULL: tl.constexpr,
):
    """NVFP4 of halves of blocks, FP32 [n, 8] twice, in rows of ROW elements."""
    BLOCKS: tl.constexpr = low.shape[0]
    ROWS: tl.constexpr = BLOCKS * 16 // ROW
    largest = largest_of(tl.maximum(magnitudes(low), magnitudes(high)), 1)
    row_amax = tl.max(tl.reshape(largest, [ROWS, ROW // 16]), 1)
    row_scale = tensor_scale_of(row_amax, False)[:, None] + tl.zeros([ROWS, ROW // 16], tl.float32)
    low, high, scale_bytes = quantize_halves(
        low,
        high,
        low_bits,
        high_bits,
        tl.reshape(row_scale, [BLOCKS]),
        low_bits is not None,
        False,
        HARDWARE,
    )
    blocks, rows, pairs = tl.arange(0, BLOCKS), tl.arange(0, ROWS), tl.arange(0, BLOCKS * 8)
    mask_blocks = None
    mask_rows = None
    mask_pairs = None
    if not FULL:
        mask_blocks = blocks * 16 < extent
        mask_rows = rows * ROW < extent
        mask_pairs = pairs * 2 < extent
    tl.store(message + scales_at + (start >> 4) + blocks, scale_bytes, mask=mask_blocks)
    amaxes = section(message, rows_at, tl.float32) + start // ROW + rows
    tl.store(amaxes, row_amax, mask=mask_rows)
    data = tl.multiple_of(message + _DATA_AT + (start >> 1) + pairs.to(tl.int64), 16)
    tl.store(data, joined(low, high), mask=mask_pairs)


@triton.jit
def pack_part(
    address,
    kind,
    begin,
    count,
    message,
    start,
    extent,
    index,
    scales_at,
    rows_at,
    scale,
    seed,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    RULE: tl.constexpr,
    HARDWARE: tl.constexpr,
    FULL: tl.constexpr,
    NUMEL: tl.constexpr,
) -> None:
    """NUMEL elements of the tensor from `begin` on, to `start` and on in the message.

    The tensor has `count` of them, its piece of the message `extent`. index: `begin`'s, for noise.
    """
    if FORMAT == "nvfp4":
        lanes = tl.arange(0, NUMEL // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
        low_bits = None
        high_bits = None
        if seed is not None:
            low_bits = _noise(seed, index, lanes, FULL)
            high_bits = _noise(seed, index, lanes + 8, FULL)
        _stored_halves(
            _values(address, kind, begin, lanes, count, scale, FULL),
            _values(address, kind, begin, lanes + 8, count, scale, FULL),
            low_bits,
            high_bits,
            message,
            start,
            extent,
            scales_at,
            rows_at,
            ROW,
            HARDWARE,
            FULL,
        )
    else:
        BLOCK: tl.constexpr = block_numel(FORMAT, ROW)
        lanes = tl.arange(0, NUMEL // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        bits = None
        if seed is not None:
            bits = _noise(seed, index, lanes, FULL)
        _stored_blocks(
            _values(address, kind, begin, lanes, count, scale, FULL),
            bits,
            message,
            start,
            extent,
            scales_at,
            rows_at,
            FORMAT,
            RULE,
            HARDWARE,
            FULL,
        )
