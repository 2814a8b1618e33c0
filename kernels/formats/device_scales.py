"""The rules of E8M0 scales inside Triton kernels: `codes.scale_byte_*` bit for bit.

Each is a JIT function of amax, FP32 >= 0 of any shape, and the `device_table.Element` of the codes;
it returns uint8 of that shape.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

_EXPONENT = tl.constexpr(0x7F80_0000)  # and the bits of infinity
_MANTISSA = tl.constexpr(0x007F_FFFF)
_NAN_BYTE = tl.constexpr(255)
_TWO_TO_MINUS_127 = tl.constexpr(0x0040_0000)


@triton.jit
def scale_byte_rceil(amax, ELEMENT: tl.constexpr) -> tl.tensor:
    """The smallest 2^n >= amax * float32(1 / max_finite)."""
    RECIPROCAL: tl.constexpr = 1.0 / ELEMENT.form.max_finite
    product = (amax * RECIPROCAL).to(tl.int32, bitcast=True)
    # Field 0 stands for 2^-127, a subnormal; all others for a mantissa of zero.
    above = tl.where(product < 2 * _TWO_TO_MINUS_127, _TWO_TO_MINUS_127, 0)
    return finite_byte((product + (_MANTISSA - above)) >> 23, amax)


@triton.jit
def scale_byte_floor(amax, ELEMENT: tl.constexpr) -> tl.tensor:
    """floor(log2(amax)) - emax."""
    return shared_exponent(amax, 0, ELEMENT)


@triton.jit
def scale_byte_ceil(amax, ELEMENT: tl.constexpr) -> tl.tensor:
    """One more than `scale_byte_floor` unless amax is a power of two."""
    return shared_exponent(amax, _MANTISSA, ELEMENT)


@triton.jit
def scale_byte_even(amax, ELEMENT: tl.constexpr) -> tl.tensor:
    """`scale_byte_floor` of amax rounded to the element's mantissa, half of a step going up."""
    HALF: tl.constexpr = 1 << (22 - ELEMENT.form.mantissa_bits)
    return shared_exponent(amax, HALF, ELEMENT)


@triton.jit
def shared_exponent(amax, ADDED: tl.constexpr, ELEMENT: tl.constexpr) -> tl.tensor:
    """The exponent of amax, whose bits have ADDED on top, less the element's largest."""
    field = (amax.to(tl.int32, bitcast=True) + ADDED) >> 23
    return finite_byte(tl.maximum(field - ELEMENT.form.emax, 0), amax)


@triton.jit
def finite_byte(field, amax) -> tl.tensor:
    """An exponent field as a byte: 255 where amax is infinity or NaN."""
    return tl.where(amax.to(tl.int32, bitcast=True) < _EXPONENT, field, _NAN_BYTE).to(tl.uint8)
