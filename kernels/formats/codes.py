"""The conversions between FP32 and element codes in plain PyTorch: their definition.

One code a byte, uint8; e2m1 codes are 0 to 15 until `pack_nibbles` puts two in a byte. One rule for
what a format cannot hold, whatever the rounding:

| input          | e4m3, e5m2 (*) | e2m1    | e8m0          | bf16, to nearest | bf16, stochastic |
|----------------|----------------|---------|---------------|------------------|------------------|
| NaN            | 0x7F           | +6      | 255           | NaN              | NaN, 0x7FC0      |
| +-infinity     | +-max          | +-6     | 255           | +-infinity       | +-infinity       |
| finite, > max  | +-max          | +-6     | 2^127 (254)   | +-infinity       | +-max            |
| sign of others | kept           | kept    | dropped       | kept             | kept             |
| zero           | zero           | zero    | 2^-127 (0)    | zero             | zero             |

(*) And e4m3fnuz, but that its NaN is 0x80 and its one zero 0. The sign of a NaN is dropped:
processors give NaNs they make different signs, and the conversion instructions drop it too. The
first three columns are PTX's `cvt.rn.satfinite`. Everything here is exact on a CPU that flushes
subnormals to zero, and independent of torch's own float8 casts.
"""

from __future__ import annotations

import functools
import math

import torch

from .table import BF16, BITS_PER_BYTE, E8M0, ElementFormat, ScaleRule, WireFormat, named

_MANTISSA_BITS = 23  # of FP32, as the next three
_BIAS = 127
_MAGNITUDE = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_MANTISSA = 0x007F_FFFF
_QUIET_NAN = 0x7FC0_0000
_NAN_BYTE = 255
_MAX_FINITE_BF16 = 0x7F7F_0000
_LOW_16 = 0xFFFF
# Byte 0 is 2^-127; FP32 has steps of 2^-149 there, and half of one rounds back to it.
_ROUNDS_ABOVE_BYTE_0 = 2.0**-127 + 2.0**-150


def encode(values: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """FP32 `values` -> codes of the same shape: to nearest, ties to even, saturating.

    For E8M0, of the magnitude: to the nearest power of two, 1.5 * 2^n up to 2^(n + 1).
    """
    _check_fp32("values", values)
    bits = values.view(torch.int32)
    if not element.has_sign:
        return _encode_scale(bits & _MAGNITUDE)
    dropped = _MANTISSA_BITS - element.mantissa_bits
    magnitude = values.abs().clamp_max_(element.max_finite)
    normal = magnitude.view(torch.int32)
    # Half a step less one, and one more where the last kept bit is odd: ties go to even.
    normal = (normal + ((1 << (dropped - 1)) - 1) + ((normal >> dropped) & 1)) >> dropped
    normal -= (_BIAS - element.bias) << element.mantissa_bits
    # With ulp(anchor) = min_subnormal the adder itself rounds to a multiple of it, ties to even.
    anchor = element.min_subnormal * 2.0**_MANTISSA_BITS
    subnormal = (magnitude + anchor).view(torch.int32) - bits_of(anchor)
    return _finish(torch.where(magnitude < element.min_normal, subnormal, normal), values, element)


def encode_stochastic(
    values: torch.Tensor, element: ElementFormat, noise: torch.Tensor
) -> torch.Tensor:
    """FP32 `values` -> codes: up in magnitude with the probability of the distance, saturating.

    noise: int32 of the same shape, as `noise.noise_bits` gives it: u = uint32(noise) / 2^32. The
    code is floor(|value| / step + u) with u cut to the bits that FP32 has below a step; below
    `min_normal` those of |value| + `min_normal`, rounded to nearest. So only the two neighbours of
    a value come out, and what the format holds never moves.
    """
    _check_fp32("values", values)
    _check_noise(noise, values)
    if not element.has_sign:
        raise ValueError(
            f"element: expected a format with a sign, got {element.name}; a scale has `encode`"
        )
    dropped = _MANTISSA_BITS - element.mantissa_bits
    magnitude = values.abs().clamp_max_(element.max_finite)
    is_subnormal = magnitude < element.min_normal
    # [min_normal, 2 * min_normal) has the subnormals' step and exponent field 1.
    bits = (magnitude + is_subnormal.to(torch.float32) * element.min_normal).view(torch.int32)
    bits = bits + _top_bits(noise, dropped)
    codes = (bits >> dropped) - ((_BIAS - element.bias) << element.mantissa_bits)
    codes -= is_subnormal.int() << element.mantissa_bits
    return _finish(codes, values, element)


def stored(
    values: torch.Tensor, element: ElementFormat | WireFormat, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 `values` [..., n] as they are stored: in their dtype, or codes as bytes, two in one.

    noise: of `values`' shape, to round stochastically; `None` to nearest.
    """
    if isinstance(element, WireFormat):
        if noise is not None:
            assert element is BF16, element
            return round_bf16_stochastic(values, noise)
        return values.to(element.dtype)
    made = encode(values, element) if noise is None else encode_stochastic(values, element, noise)
    return pack_nibbles(made) if element.codes_per_byte > 1 else made


def loaded(
    stored: torch.Tensor, element: ElementFormat | WireFormat, numel: int | None = None
) -> torch.Tensor:
    """The FP32 values of what is stored [..., n], or the first `numel` of each row."""
    if isinstance(element, WireFormat):
        return stored.float()
    if element.codes_per_byte > 1:
        stored = unpack_nibbles(stored, numel)
    return decode(stored, element)


def decode(codes: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """uint8 `codes` -> FP32 of the same shape, exactly. Bits above the format's are ignored."""
    if codes.dtype is not torch.uint8:
        raise ValueError(
            f"codes: expected torch.uint8, got {codes.dtype}; call .view(torch.uint8) on them"
        )
    table = _table(element, codes.device)
    flat = codes.reshape(-1).int()
    if element.bits < BITS_PER_BYTE:
        flat &= len(table) - 1
    return table.index_select(0, flat).view(codes.shape)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes [..., n] -> bytes [..., ceil(n / 2)]: the even element has the low nibble.

    An odd n leaves the last high nibble 0.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, numel: int | None = None) -> torch.Tensor:
    """bytes [..., n] -> e2m1 codes [..., 2 * n], or their first `numel` along the last dim."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return codes if numel is None else codes[..., :numel]


def round_bf16_stochastic(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """FP32 `values` in BF16, stochastically; `noise` as for `encode_stochastic`, 16 bits used.

    Exactly unbiased for finite values up to the largest BF16, where larger ones saturate.
    Infinities stay; a NaN becomes 0x7FC0.
    """
    _check_fp32("values", values)
    _check_noise(noise, values)
    bits = values.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    rounded = (magnitude.clamp_max(_MAX_FINITE_BF16) + _top_bits(noise, 16)) & ~_LOW_16
    rounded = torch.where(magnitude < _INFINITY, rounded, magnitude)
    rounded |= bits & ~_MAGNITUDE
    rounded.masked_fill_(magnitude > _INFINITY, _QUIET_NAN)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def e8m0_to_fp32(scales: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in FP32, exactly; NaN for byte 255. `scales`: uint8, any shape."""
    return decode(scales, E8M0)


def reciprocal_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """2^(127 - byte) in FP32, exactly; NaN for byte 255. `scales`: uint8, any shape."""
    # 254 - 255 wraps around to 255, the NaN, which is what it should be.
    return decode((254 - scales.int()).to(torch.uint8), E8M0)


def scale_byte_floor(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The MX specification's rule: floor(log2(amax)) - emax, so that the largest may saturate.

    `amax`: FP32, >= 0, any shape -> E8M0 bytes. A zero gives byte 0; infinity and NaN give 255, by
    this rule and the next three. OCP MX 1.0, section 6.3.
    """
    return _shared_exponent(amax, amax.view(torch.int32), element)


def scale_byte_ceil(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """`scale_byte_floor`'s exponent, and one more unless `amax` is a power of two."""
    return _shared_exponent(amax, amax.view(torch.int32) + _MANTISSA, element)


def scale_byte_even(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """`scale_byte_floor` of `amax` rounded to the element's mantissa, half of a step going up."""
    half = 1 << (_MANTISSA_BITS - element.mantissa_bits - 1)
    return _shared_exponent(amax, amax.view(torch.int32) + half, element)


def scale_byte_rceil(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The smallest 2^n >= amax * float32(1 / max_finite): nothing saturates.

    A product with the rounded reciprocal, not a quotient, as cuBLAS and `cvt.rp.ue8m0x2` do.
    """
    _check_fp32("amax", amax)
    reciprocal = torch.tensor(1.0 / element.max_finite, dtype=torch.float32, device=amax.device)
    bits = (amax * reciprocal).view(torch.int32)
    # FP64 holds the product exactly, so a CPU that flushes subnormal FP32 to zero does no harm.
    rounds_above = amax.double() * reciprocal.double() > _ROUNDS_ABOVE_BYTE_0
    field = bits >> _MANTISSA_BITS
    above = torch.where(field > 0, (bits & _MANTISSA) > 0, rounds_above)
    return _scale_byte(field + above, amax)


def amax_of(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of FP32 [..., elements of one], and a NaN where there is one."""
    # As integers, NaNs are above infinity, and the largest one's sign cannot come out set.
    return blocks.abs().view(torch.int32).amax(-1).view(torch.float32)


def scale_byte(amax: torch.Tensor, element: ElementFormat, rule: ScaleRule) -> torch.Tensor:
    """The scale of a block with this `amax`, FP32, >= 0, any shape, by the rule: E8M0 bytes."""
    made: torch.Tensor = named(*rule.definition)(amax, element)
    return made


def _shared_exponent(
    amax: torch.Tensor, rounded_bits: torch.Tensor, element: ElementFormat
) -> torch.Tensor:
    _check_fp32("amax", amax)
    field = (rounded_bits >> _MANTISSA_BITS) - element.emax
    return _scale_byte(field.clamp_min_(0), amax)


def _scale_byte(field: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    # Without the sign, which a NaN may have: torch.max of a whole tensor returns such a one.
    is_finite = (amax.view(torch.int32) & 0x7FFFFFFF) < _INFINITY
    return torch.where(is_finite, field, _NAN_BYTE).to(torch.uint8)


def _encode_scale(magnitude: torch.Tensor) -> torch.Tensor:
    """FP32 bits without sign -> the byte of the nearest power of two."""
    half = 1 << (_MANTISSA_BITS - 1)
    nearest = (magnitude + half) >> _MANTISSA_BITS
    # Without the implicit bit, 2^-127 <= |x| < 2^-126 has its half at 1.5 * 2^-127.
    nearest = torch.where(magnitude < 2 * half, (magnitude >= 3 * (half >> 1)).int(), nearest)
    nearest.clamp_max_(E8M0.max_code)
    return torch.where(magnitude < _INFINITY, nearest, _NAN_BYTE).to(torch.uint8)


def _finish(codes: torch.Tensor, values: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Put the signs on and what stands for NaN in."""
    shift = 32 - element.bits
    signs = (values.view(torch.int32) >> shift) & element.sign_code
    codes |= signs if element.has_negative_zero else signs.masked_fill_(codes == 0, 0)
    nan_code = element.max_code if element.nan_code is None else element.nan_code
    return codes.masked_fill_(values.isnan(), nan_code).to(torch.uint8)


def _top_bits(noise: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most significant bits of int32 `noise`, as an integer of 0 or more."""
    return (noise >> (32 - count)) & ((1 << count) - 1)


def bits_of(value: float) -> int:
    """The 32 bits of `value` rounded to FP32, as a signed integer."""
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))


@functools.lru_cache(maxsize=32)
def _table(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """The FP32 value of every code, by the format's definition."""
    bits = [bits_of(_value(code, element)) for code in range(1 << element.bits)]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


def _value(code: int, element: ElementFormat) -> float:
    if code == element.nan_code:
        return math.nan
    magnitude = code & ~element.sign_code if element.has_sign else code
    sign = -1.0 if code & element.sign_code else 1.0
    if magnitude > element.max_code:
        return sign * math.inf if magnitude == element.infinity_code else math.nan
    field, mantissa = divmod(magnitude, 1 << element.mantissa_bits)
    if field == 0 and element.has_sign:
        return sign * mantissa * element.min_subnormal
    significand = 1 + mantissa / (1 << element.mantissa_bits)
    return sign * significand * 2.0 ** (field - element.bias)


def _check_fp32(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32:
        raise ValueError(f"{name}: expected torch.float32, got {tensor.dtype}; call .float() on it")


def _check_noise(noise: torch.Tensor, values: torch.Tensor) -> None:
    if noise.dtype is not torch.int32 or noise.shape != values.shape:
        raise ValueError(
            f"noise: expected torch.int32 of shape {tuple(values.shape)}, got {noise.dtype} of "
            f"{tuple(noise.shape)}; draw it with `noise_bits` and view it in the values' shape"
        )
