"""What NVFP4's kernels do with the halves of blocks: `reference` exactly."""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.table import E2M1, E4M3, FP32
from ..portable import INTERPRETED
from . import reference

_MAX_FP32 = tl.constexpr(FP32.max_finite)
_MAX_PRODUCT = tl.constexpr(reference.MAX_PRODUCT)
_ONE_OVER_PRODUCT = tl.constexpr(1.0 / reference.MAX_PRODUCT)
_LEAST_AMAX = tl.constexpr(reference.MAX_PRODUCT / FP32.max_finite)
_LARGE_AMAX = tl.constexpr(reference.LARGE_AMAX)
_DOWN, _UP = tl.constexpr(reference.DOWN), tl.constexpr(reference.UP)
_MAX_E2M1, _MAX_E4M3 = tl.constexpr(E2M1.max_finite), tl.constexpr(E4M3.max_finite)
_ONE_SIXTH = tl.constexpr(1.0 / E2M1.max_finite)
_TORCHAO_MIN_SCALE = tl.constexpr(reference.TORCHAO_MIN_SCALE)
_TORCHAO_MIN_TENSOR_SCALE = tl.constexpr(reference.TORCHAO_MIN_TENSOR_SCALE)


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
def _block_scales(block_amax, tensor_scale, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr):
    """(scale bytes, FP32 factors of the elements), for amax >= 0 without NaN."""
    one = tl.full((), 1.0, tl.float32)
    if TORCHAO:
        wanted = tl.div_rn(block_amax, tl.full(block_amax.shape, _MAX_E2M1, tl.float32))
        wanted = tl.div_rn(wanted, tensor_scale + tl.zeros_like(wanted))
        wanted = tl.minimum(tl.maximum(wanted, _TORCHAO_MIN_SCALE), _MAX_E4M3)
        scale_bytes = device.encode_e4m3(wanted, HARDWARE)
        encode = tl.div_rn(one, tensor_scale)
        decoded = device.decode_e4m3(scale_bytes, HARDWARE)
        factors = tl.div_rn(encode + tl.zeros_like(decoded), decoded)
    else:
        scale_bytes = device.encode_e4m3(block_amax * (tensor_scale * _ONE_SIXTH), HARDWARE)
        decoded = device.decode_e4m3(scale_bytes, HARDWARE) * tl.div_rn(one, tensor_scale)
        factors = tl.div_rn(tl.full(decoded.shape, 1.0, tl.float32), decoded)
    return scale_bytes, tl.minimum(factors, _MAX_FP32)


@triton.jit
def decode_factors(scale_bytes, amax, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """What the blocks' elements are multiplied by."""
    if TORCHAO:
        return device.decode_e4m3(scale_bytes, HARDWARE) * tensor_scale_of(amax, True)
    is_large = amax > _LARGE_AMAX
    usable = _is_usable(amax)
    multiplier = tl.maximum(amax, _LEAST_AMAX)
    multiplier = tl.where(is_large, multiplier * _DOWN, multiplier)
    multiplier = tl.where(usable, multiplier, 1.0)
    divisor = tl.where(is_large, _ONE_OVER_PRODUCT * _UP, _ONE_OVER_PRODUCT)
    divisor = tl.where(usable, divisor, 1.0)
    return (device.decode_e4m3(scale_bytes, HARDWARE) * multiplier) * divisor


@triton.jit
def magnitudes(x) -> tl.tensor:
    """|x|; where Triton interprets, 0 for a NaN, as its maxima would keep it."""
    if INTERPRETED:
        x = tl.where(x == x, x, 0.0)
    return tl.abs(x)


@triton.jit
def largest_of(magnitude, axis: tl.constexpr) -> tl.tensor:
    """The maximum of `magnitudes`. Compiled maxima prefer a number: only all NaNs make one."""
    largest = tl.max(magnitude, axis)
    return tl.where(largest == largest, largest, 0.0)


@triton.jit
def scaled_halves(
    low, high, tensor_scale, TORCHAO: tl.constexpr, HARDWARE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """FP32 [blocks, 8] twice -> (both as they are to be encoded, scale bytes [blocks])."""
    largest = largest_of(tl.maximum(magnitudes(low), magnitudes(high)), 1)
    scale_bytes, factors = _block_scales(largest, tensor_scale, TORCHAO, HARDWARE)
    return low * factors[:, None], high * factors[:, None], scale_bytes
