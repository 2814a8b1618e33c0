"""What the quantisers of tensors use until they take elements and codecs as constants."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..portable import INTERPRETED
from .table import E2M1, E4M3, E5M2

_EXPONENT = tl.constexpr(0x7F80_0000)
_MANTISSA = tl.constexpr(0x007F_FFFF)
_NAN_FP8 = tl.constexpr(0x7F)
_NAN_BYTE = tl.constexpr(255)
_TWO_TO_MINUS_127 = tl.constexpr(0x0040_0000)
_RECIPROCAL_E4M3, _RECIPROCAL_E5M2, _RECIPROCAL_E2M1 = (
    tl.constexpr(1.0 / element.max_finite) for element in (E4M3, E5M2, E2M1)
)


@triton.jit
def encode_e4m3(x, HARDWARE: tl.constexpr) -> tl.tensor:
    """`codes.encode(x, E4M3)`."""
    if HARDWARE and not INTERPRETED:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _with_nan(_encode(x, 448.0, 3, 7), x)


@triton.jit
def encode_e5m2(x, HARDWARE: tl.constexpr) -> tl.tensor:
    """`codes.encode(x, E5M2)`."""
    if HARDWARE and not INTERPRETED:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _with_nan(_encode(x, 57344.0, 2, 15), x)


@triton.jit
def encode_e2m1(x) -> tl.tensor:
    """`codes.encode(x, E2M1)`, one code a byte; `pack_nibbles` puts two in one."""
    return _encode(x, 6.0, 1, 1).to(tl.uint8)


@triton.jit
def encode_e4m3_stochastic(x, bits) -> tl.tensor:
    """`codes.encode_stochastic(x, E4M3, bits)`; `bits`: uint32, from `noise_of`."""
    return _with_nan(_encode_stochastic(x, bits, 448.0, 3, 7), x)


@triton.jit
def encode_e5m2_stochastic(x, bits) -> tl.tensor:
    """`codes.encode_stochastic(x, E5M2, bits)`; `bits`: uint32, from `noise_of`."""
    return _with_nan(_encode_stochastic(x, bits, 57344.0, 2, 15), x)


@triton.jit
def encode_e2m1_stochastic(x, bits) -> tl.tensor:
    """`codes.encode_stochastic(x, E2M1, bits)`, one code a byte; `bits`: uint32."""
    return _encode_stochastic(x, bits, 6.0, 1, 1).to(tl.uint8)


@triton.jit
def decode_e4m3(codes, HARDWARE: tl.constexpr) -> tl.tensor:
    """`codes.decode(codes, E4M3)`.

    Arithmetic: the code's fields in FP32's places make value * 2^(7 - 127), subnormals included.
    """
    if HARDWARE and not INTERPRETED:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    word = codes.to(tl.int32)
    placed = ((word & 0x7F) << 20) | ((word & 0x80) << 24)
    value = placed.to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((word & 0x7F) == _NAN_FP8, float("nan"), value)


@triton.jit
def decode_e5m2(codes) -> tl.tensor:
    """`codes.decode(codes, E5M2)`: E5M2 is the upper half of an FP16."""
    return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_e2m1(codes) -> tl.tensor:
    """`codes.decode(codes, E2M1)`; bits above the low four are ignored. See `decode_e4m3`."""
    word = codes.to(tl.int32)
    # Two shifts spread the sign over the bits above the other three; the mask leaves the four.
    placed = ((word << 28) >> 6) & -0x7E40_0000
    return placed.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def encode(x, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """Codes of FP32 `x` in the format ELEMENT to nearest, one a byte."""
    if ELEMENT == "e4m3":
        return encode_e4m3(x, HARDWARE)
    elif ELEMENT == "e5m2":
        return encode_e5m2(x, HARDWARE)
    else:
        tl.static_assert(ELEMENT == "e2m1")
        return encode_e2m1(x)


@triton.jit
def encode_stochastic(x, bits, ELEMENT: tl.constexpr) -> tl.tensor:
    """Codes of FP32 `x` in the format ELEMENT with the noise `bits`, one a byte."""
    if ELEMENT == "e4m3":
        return encode_e4m3_stochastic(x, bits)
    elif ELEMENT == "e5m2":
        return encode_e5m2_stochastic(x, bits)
    else:
        tl.static_assert(ELEMENT == "e2m1")
        return encode_e2m1_stochastic(x, bits)


@triton.jit
def decode(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """FP32 values of codes in the format ELEMENT, one a byte."""
    if ELEMENT == "e4m3":
        return decode_e4m3(codes, HARDWARE)
    elif ELEMENT == "e5m2":
        return decode_e5m2(codes)
    else:
        tl.static_assert(ELEMENT == "e2m1")
        return decode_e2m1(codes)


@triton.jit
def scale_byte(amax, ELEMENT: tl.constexpr, RULE: tl.constexpr) -> tl.tensor:
    """`codes.SCALE_RULES[RULE](amax, element)`: FP32 >= 0 -> E8M0 bytes, uint8."""
    tl.static_assert(ELEMENT == "e4m3" or ELEMENT == "e5m2" or ELEMENT == "e2m1")
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == "rceil":
        RECIPROCAL: tl.constexpr = (
            _RECIPROCAL_E4M3
            if ELEMENT == "e4m3"
            else (_RECIPROCAL_E5M2 if ELEMENT == "e5m2" else _RECIPROCAL_E2M1)
        )
        product = (amax * RECIPROCAL).to(tl.int32, bitcast=True)
        # Field 0 stands for 2^-127, a subnormal; all others for a mantissa of zero.
        above = tl.where(product < 2 * _TWO_TO_MINUS_127, _TWO_TO_MINUS_127, 0)
        field = (product + (_MANTISSA - above)) >> 23
    else:
        EMAX: tl.constexpr = 8 if ELEMENT == "e4m3" else (15 if ELEMENT == "e5m2" else 2)
        MANTISSA_BITS: tl.constexpr = 3 if ELEMENT == "e4m3" else (2 if ELEMENT == "e5m2" else 1)
        if RULE == "floor":
            rounded = bits
        elif RULE == "ceil":
            rounded = bits + _MANTISSA
        else:
            tl.static_assert(RULE == "even")
            rounded = bits + (1 << (22 - MANTISSA_BITS))
        field = tl.maximum((rounded >> 23) - EMAX, 0)
    return tl.where(bits < _EXPONENT, field, _NAN_BYTE).to(tl.uint8)


@triton.jit
def clamp(x, MAX: tl.constexpr) -> tl.tensor:
    """x held to +-MAX, a NaN being +MAX: compiled minimum and maximum prefer a number."""
    if INTERPRETED:
        x = tl.where(x == x, x, MAX)
    return tl.maximum(tl.minimum(x, MAX), -MAX)


@triton.jit
def _encode(x, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """int32 codes, to nearest. NaN gives the code of MAX.

    The anchor is the power of two whose ulp is the step of the format at |x|, so that the adder
    does the rounding. By example, e2m1, x = 2.6: the binade starts at 2, where the step is 1; the
    anchor is 2^23, and 2^23 + 2.6 rounds to 2^23 + 3, so |x| is 3 steps. Two binades up from the
    subnormals, which share the first one's step, add one binade's 2 codes: code 5.
    """
    MIN_NORMAL: tl.constexpr = (128 - BIAS) << 23
    TO_ANCHOR: tl.constexpr = (23 - MANTISSA_BITS) << 23
    clamped = clamp(x, MAX)
    word = clamped.to(tl.int32, bitcast=True)
    binade = tl.maximum(word & _EXPONENT, MIN_NORMAL)
    anchor = binade + TO_ANCHOR
    total = tl.abs(clamped) + anchor.to(tl.float32, bitcast=True)
    steps = total.to(tl.int32, bitcast=True) - anchor
    code = steps + ((binade - MIN_NORMAL) >> (23 - MANTISSA_BITS))
    return _with_sign(code, word, MANTISSA_BITS)


@triton.jit
def _encode_stochastic(x, bits, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """int32 codes, stochastically. NaN gives the code of MAX.

    Times 2^(BIAS - 127), the format's subnormals are FP32's, and the code is the top of the bits.
    """
    clamped = clamp(x, MAX)
    scaled = tl.abs(clamped) * (2.0 ** (BIAS - 127))
    added = (bits >> (9 + MANTISSA_BITS)).to(tl.int32, bitcast=True)
    code = (scaled.to(tl.int32, bitcast=True) + added) >> (23 - MANTISSA_BITS)
    return _with_sign(code, clamped.to(tl.int32, bitcast=True), MANTISSA_BITS)


@triton.jit
def _with_sign(code, word, MANTISSA_BITS: tl.constexpr):
    """The sign of the FP32 bits `word` above the code: bit 3 of e2m1's, bit 7 of the others'."""
    if MANTISSA_BITS == 1:
        return code | ((word >> 28) & 8)
    return code | ((word >> 24) & 0x80)


@triton.jit
def _with_nan(code, x):
    """uint8 codes, a NaN's where x is one."""
    return tl.where(x == x, code, _NAN_FP8).to(tl.uint8)
