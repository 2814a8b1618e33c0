"""Owns what `pack` does with a tile: a tensor's elements to codes and scales in place.

Formulas and rounding are those of `reference`, and the device functions those of the
formats' own kernels. FULL: the elements all exist, from an aligned address on; else loads are
masked, and what the tensor lacks is zeros. The message is 16-byte aligned, and whole blocks of it
are stored.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_e2m1 import packed_e2m1
from ..fp8.kernel import inverse_of, scale_of
from ..mx import reference as mx
from ..mx.kernel import encoded, scaled_blocks
from ..nvfp4 import reference as nvfp4
from ..nvfp4.blocks import largest_of, magnitudes, scaled_halves, tensor_scale_of
from ..nvfp4.hadamard import joined
from ..portable import round_to, to_fp32
from ..wide import aligned_blocks, aligned_eights
from .layout import HEADER_BYTES
from .tiles import KIND_BF16, KIND_FP16, KIND_FP32, aligned_from, block_numel, kind_pointer, section

_DATA_AT = tl.constexpr(HEADER_BYTES)
_HALF = tl.constexpr(nvfp4.BLOCK_NUMEL // 2)
_MX_BLOCK = tl.constexpr(mx.BLOCK_NUMEL)


@triton.jit
def _loaded(
    source, places, count, scale, SIXTEENS: tl.constexpr, FULL: tl.constexpr, NUMEL: tl.constexpr
):
    """FP32 [n, NUMEL] from each place on, times `scale`; zeros where the tensor has none."""
    if FULL:
        if NUMEL == _HALF:
            x = aligned_eights(source, places)
        elif SIXTEENS:
            x = aligned_blocks(source, places, NUMEL)
        else:
            x = to_fp32(tl.load(aligned_from(source, _lanes(places, NUMEL))))
        if scale is not None:
            x = x * scale
    else:
        lanes = _lanes(places, NUMEL)
        exists = lanes < count
        x = to_fp32(tl.load(source + lanes, mask=exists, other=0.0))
        if scale is not None:
            x = tl.where(exists, x * scale, 0.0)
    return x


@triton.jit
def _lanes(places, NUMEL: tl.constexpr):
    return places[:, None] + tl.arange(0, NUMEL)[None, :]


@triton.jit
def _values(
    address,
    kind,
    begin,
    places,
    count,
    scale,
    SIXTEENS: tl.constexpr,
    FULL: tl.constexpr,
    NUMEL: tl.constexpr,
):
    """`_loaded` from the tensor at `address`, from its element `begin` on; kind: its dtype's code.

    A kind known when compiling leaves one of the branches, and one layout.
    """
    if kind == KIND_FP32:
        wide = kind_pointer(address, KIND_FP32) + begin
        x = _loaded(wide, places, count, scale, SIXTEENS, FULL, NUMEL)
    elif kind == KIND_BF16:
        brain = kind_pointer(address, KIND_BF16) + begin
        x = _loaded(brain, places, count, scale, SIXTEENS, FULL, NUMEL)
    else:
        half = kind_pointer(address, KIND_FP16) + begin
        x = _loaded(half, places, count, scale, SIXTEENS, FULL, NUMEL)
    return x


@triton.jit
def _noise(seed, index, places, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """The noise of [n, NUMEL] elements from `index` + each place on, a multiple of 16 with FULL."""
    if FULL:
        GROUPS: tl.constexpr = places.shape[0] * NUMEL // 16
        bits = device.noise_of_groups(seed, (index >> 4) + tl.arange(0, GROUPS))
        return tl.reshape(bits, [places.shape[0], NUMEL])
    else:
        return device.noise_of(seed, index + _lanes(places, NUMEL))


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
        made = encoded(x, bits, "e2m1", HARDWARE)
        lanes = blocks[:, None] * 4 + tl.arange(0, 4)[None, :]
        data = section(message, _DATA_AT + (start >> 1), tl.uint32)
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
        made = encoded(x, bits, "e4m3", HARDWARE)
        data = message + _DATA_AT + start
    tl.store(aligned_from(data, lanes), made, mask=mask_blocks)


@triton.jit
def _scaled_rows(low, high, ROW: tl.constexpr, HARDWARE: tl.constexpr):
    """Halves of blocks in rows of ROW elements -> (both scaled, scale bytes, the rows' amaxes)."""
    BLOCKS: tl.constexpr = low.shape[0]
    ROWS: tl.constexpr = BLOCKS * 16 // ROW
    largest = largest_of(tl.maximum(magnitudes(low), magnitudes(high)), 1)
    row_amax = tl.max(tl.reshape(largest, [ROWS, ROW // 16]), 1)
    row_scale = tensor_scale_of(row_amax, False)[:, None] + tl.zeros([ROWS, ROW // 16], tl.float32)
    scale = tl.reshape(row_scale, [BLOCKS])
    low, high, scale_bytes = scaled_halves(low, high, scale, False, HARDWARE)
    return low, high, scale_bytes, row_amax


@triton.jit
def _stored_halves(
    low,
    high,
    low_bits,
    high_bits,
    scale_bytes,
    row_amax,
    message,
    start,
    extent,
    scales_at,
    rows_at,
    ROW: tl.constexpr,
    FULL: tl.constexpr,
):
    """NVFP4 of scaled halves of blocks, FP32 [n, 8] twice, in rows of ROW elements."""
    BLOCKS: tl.constexpr = low.shape[0]
    blocks = tl.arange(0, BLOCKS)
    rows = tl.arange(0, BLOCKS * 16 // ROW)
    words = tl.arange(0, BLOCKS * 2)
    mask_blocks = None
    mask_rows = None
    mask_words = None
    if not FULL:
        mask_blocks = blocks * 16 < extent
        mask_rows = rows * ROW < extent
        mask_words = words * 8 < extent
    tl.store(message + scales_at + (start >> 4) + blocks, scale_bytes, mask=mask_blocks)
    amaxes = section(message, rows_at, tl.float32) + start // ROW + rows
    tl.store(amaxes, row_amax, mask=mask_rows)
    data = section(message, _DATA_AT + (start >> 1), tl.uint32) + words.to(tl.int64)
    made = joined(packed_e2m1(low, low_bits), packed_e2m1(high, high_bits))
    tl.store(tl.multiple_of(data, 16), made, mask=mask_words)


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
        places = tl.arange(0, NUMEL // 16) * 16
        low, high, scale_bytes, row_amax = _scaled_rows(
            _values(address, kind, begin, places, count, scale, False, FULL, 8),
            _values(address, kind, begin, places + 8, count, scale, False, FULL, 8),
            ROW,
            HARDWARE,
        )
        low_bits = None
        high_bits = None
        if seed is not None:
            if FULL:
                words = device.noise_words(seed, (index >> 4) + tl.arange(0, NUMEL // 16))
                low_bits = device.spread_noise(words[0], words[1])
                high_bits = device.spread_noise(words[2], words[3])
            else:
                low_bits = _noise(seed, index, places, FULL, 8)
                high_bits = _noise(seed, index, places + 8, FULL, 8)
        _stored_halves(
            low,
            high,
            low_bits,
            high_bits,
            scale_bytes,
            row_amax,
            message,
            start,
            extent,
            scales_at,
            rows_at,
            ROW,
            FULL,
        )
    else:
        BLOCK: tl.constexpr = block_numel(FORMAT, ROW)
        places = tl.arange(0, NUMEL // BLOCK) * BLOCK
        bits = None
        if seed is not None:
            bits = _noise(seed, index, places, FULL, BLOCK)
        # Where there is little to share, neighbouring threads had better read neighbouring bytes.
        SIXTEENS: tl.constexpr = seed is not None or BLOCK == _MX_BLOCK
        _stored_blocks(
            _values(address, kind, begin, places, count, scale, SIXTEENS, FULL, BLOCK),
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
