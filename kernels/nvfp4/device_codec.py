"""`codec` inside Triton kernels, bit for bit.

Blocks come as halves of eight elements, low and high: then a thread has a block's elements, its
amax and its scale, and none of them is found twice.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.device_table import element_constant
from ..formats.table import E2M1, E4M3, FP32
from ..portable import INTERPRETED
from . import codec

_E4M3 = element_constant(E4M3)
_MAX_FP32 = tl.constexpr(FP32.max_finite)
_EXPONENT = tl.constexpr(0x7F80_0000)  # and the bits of infinity
_MAX_PRODUCT = tl.constexpr(codec.MAX_PRODUCT)
_ONE_OVER_PRODUCT = tl.constexpr(1.0 / codec.MAX_PRODUCT)
_LEAST_AMAX = tl.constexpr(codec.MAX_PRODUCT / FP32.max_finite)
_LARGE_AMAX = tl.constexpr(codec.LARGE_AMAX)
_DOWN, _UP = tl.constexpr(codec.DOWN), tl.constexpr(codec.UP)
_MAX_E2M1, _MAX_E4M3 = tl.constexpr(E2M1.max_finite), tl.constexpr(E4M3.max_finite)
_ONE_SIXTH = tl.constexpr(1.0 / E2M1.max_finite)
_TORCHAO_MIN_SCALE = tl.constexpr(codec.TORCHAO_MIN_SCALE)
_TORCHAO_MIN_TENSOR_SCALE = tl.constexpr(codec.TORCHAO_MIN_TENSOR_SCALE)


@triton.jit
def scaled(halves, CODEC: tl.constexpr, ROW: tl.constexpr, HARDWARE: tl.constexpr) -> tuple:
    """Halves of blocks in rows of ROW elements -> (both scaled, scale bytes, the rows' amaxes)."""
    low, high = halves
    BLOCKS: tl.constexpr = low.shape[0]
    ROWS: tl.constexpr = BLOCKS * 16 // ROW
    block_amax, counted = block_amaxes(low, high, True)
    row_amax = tl.max(tl.reshape(counted, [ROWS, ROW // 16]), 1)
    row_scale = tensor_scale_of(row_amax, False)[:, None] + tl.zeros([ROWS, ROW // 16], tl.float32)
    low, high, scale_bytes = scaled_halves(
        low, high, block_amax, tl.reshape(row_scale, [BLOCKS]), False, HARDWARE
    )
    return (low, high), scale_bytes, row_amax


@triton.jit
def factors(scales, row_scales, CODEC: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """Scale bytes and the rows' amaxes -> what codes are multiplied by."""
    return decode_factors(scales, row_scales, False, HARDWARE)


@triton.jit
def _is_usable(amax):
    return (amax > 0.0) & (amax < float("inf"))


@triton.jit
def tensor_scale_of(amax, TORCHAO: tl.constexpr) -> tl.tensor:
    """FP32 scalar: torchao's P, else E."""
    if TORCHAO:
        scale = tl.div_rn(amax, tl.full((), _MAX_PRODUCT, tl.float32))
        scale = tl.maximum(scale, _TORCHAO_MIN_TENSOR_SCALE)
    else:
        scale = tl.div_rn(tl.full((), _MAX_PRODUCT, tl.float32), amax)
        scale = tl.minimum(scale, _MAX_FP32)
    return tl.where(_is_usable(amax), scale, 1.0)


@triton.jit
def block_scales(
    block_amax, tensor_scale, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(Scale bytes, FP32 factors of the elements), of amax >= 0, or NaN, which makes NaNs."""
    one = tl.full((), 1.0, tl.float32)
    if TORCHAO:
        wanted = tl.div_rn(block_amax, tl.full(block_amax.shape, _MAX_E2M1, tl.float32))
        wanted = tl.div_rn(wanted, tensor_scale + tl.zeros_like(wanted))
        wanted = tl.maximum(wanted, _TORCHAO_MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
        wanted = tl.minimum(wanted, _MAX_E4M3, propagate_nan=tl.PropagateNan.ALL)
        scale_bytes = device.code_of(wanted, None, _E4M3, HARDWARE)
        encode = tl.div_rn(one, tensor_scale)
        decoded = device.value_of(scale_bytes, _E4M3, HARDWARE)
        factors = tl.div_rn(encode + tl.zeros_like(decoded), decoded)
    else:
        wanted = block_amax * (tensor_scale * _ONE_SIXTH)
        scale_bytes = device.code_of(wanted, None, _E4M3, HARDWARE)
        decoded = device.value_of(scale_bytes, _E4M3, HARDWARE) * tl.div_rn(one, tensor_scale)
        factors = tl.div_rn(tl.full(decoded.shape, 1.0, tl.float32), decoded)
    return scale_bytes, tl.minimum(factors, _MAX_FP32, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decode_factors(scale_bytes, amax, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """What the blocks' elements are multiplied by."""
    if TORCHAO:
        return device.value_of(scale_bytes, _E4M3, HARDWARE) * tensor_scale_of(amax, True)
    is_large = amax > _LARGE_AMAX
    usable = _is_usable(amax)
    multiplier = tl.maximum(amax, _LEAST_AMAX)
    multiplier = tl.where(is_large, multiplier * _DOWN, multiplier)
    multiplier = tl.where(usable, multiplier, 1.0)
    divisor = tl.where(is_large, _ONE_OVER_PRODUCT * _UP, _ONE_OVER_PRODUCT)
    divisor = tl.where(usable, divisor, 1.0)
    return (device.value_of(scale_bytes, _E4M3, HARDWARE) * multiplier) * divisor


@triton.jit
def _magnitudes(x):
    """|x|; where Triton interprets, 0 for a NaN, as its maxima would keep it."""
    if INTERPRETED:
        x = tl.where(x == x, x, 0.0)
    return tl.abs(x)


@triton.jit
def number_amax(x, axis: tl.constexpr) -> tl.tensor:
    """max(|x|) along `axis`, NaNs left out."""
    amax = tl.max(_magnitudes(x), axis)
    # Compiled maxima prefer a number: only all NaNs make one.
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def raise_amax(amax, x) -> None:
    """amax = max(amax, |x|) of FP32 [n], NaNs left out; as int32: floats >= 0 have their order."""
    tl.atomic_max(amax, number_amax(x, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def block_amaxes(low, high, AS_NAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """`codec.block_amaxes`: FP32 [blocks, 8] twice -> [blocks] twice."""
    if AS_NAN:
        bits = device.amax(low, 1).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, device.amax(high, 1).to(tl.int32, bitcast=True))
        amax = bits.to(tl.float32, bitcast=True)
        is_finite = bits < _EXPONENT
        return tl.where(is_finite, amax, float("nan")), tl.where(is_finite, amax, 0.0)
    else:
        amax = tl.max(tl.maximum(_magnitudes(low), _magnitudes(high)), 1)
        # Compiled maxima prefer a number: only all NaNs make one.
        amax = tl.where(amax == amax, amax, 0.0)
        return amax, amax


@triton.jit
def scaled_halves(
    low, high, block_amax, tensor_scale, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """FP32 [blocks, 8] twice -> (both as they are to be encoded, scale bytes [blocks])."""
    scale_bytes, factors = block_scales(block_amax, tensor_scale, TORCHAO, HARDWARE)
    return low * factors[:, None], high * factors[:, None], scale_bytes
