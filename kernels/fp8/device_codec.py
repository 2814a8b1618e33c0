"""`codec` inside Triton kernels, bit for bit."""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device
from ..formats.table import FP32

_EXPONENT = tl.constexpr(0x7F80_0000)
_QUIET_NAN = tl.constexpr(0x7FC0_0000)
_MAX_FP32 = tl.constexpr(FP32.max_finite)


@triton.jit
def scale_of(amax, ELEMENT: tl.constexpr, POWER_OF_2: tl.constexpr) -> tl.tensor:
    """`codec.scale_of`: FP32 amax >= 0 or NaN, of any shape."""
    largest = tl.full(amax.shape, ELEMENT.form.max_finite, tl.float32)
    scale = tl.minimum(tl.div_rn(largest, amax), _MAX_FP32)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    bits = amax.to(tl.int32, bitcast=True)
    return tl.where((bits > 0) & (bits < _EXPONENT), scale, 1.0)


@triton.jit
def inverse_of(scale) -> tl.tensor:
    """1 / scale, IEEE division."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def scaled(x, CODEC: tl.constexpr, ROW: tl.constexpr, HARDWARE: tl.constexpr) -> tuple:
    """FP32 [blocks, elements of one] -> (what is to be encoded, what is stored [blocks], twice)."""
    amax = device.amax(x, 1)
    is_finite = amax.to(tl.int32, bitcast=True) < _EXPONENT
    scale = scale_of(amax, CODEC.element, CODEC.rule)
    # Processors differ in the bits of a NaN that they make, so none is divided.
    stored = inverse_of(scale).to(tl.int32, bitcast=True)
    stored = tl.where(is_finite, stored, _QUIET_NAN).to(tl.float32, bitcast=True)
    return x * tl.where(is_finite, scale, float("nan"))[:, None], stored, stored


@triton.jit
def factors(scales, row_scales, CODEC: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """What is stored is what codes are multiplied by."""
    if CODEC.has_rows:
        return row_scales
    else:
        return scales
