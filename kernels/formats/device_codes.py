"""The conversions between FP32 and element codes inside Triton kernels: `codes` bit for bit.

| function        | in -> out                       | what it is                                   |
|-----------------|---------------------------------|----------------------------------------------|
| stored, code_of | fp32, noise or None -> codes    | `codes.stored`; the same with one code each  |
| value_of        | codes -> fp32                   | `codes.decode`                               |
| values_of       | what is stored -> fp32          | `codes.loaded`                               |
| ARITHMETIC      | any format with a sign          | from its numbers, or by the GPU's conversion |
| OF_E5M2         | e5m2                            | decoded by way of fp16                       |
| OF_E8M0         | e8m0                            |                                              |
| PLAIN           | fp32, bf16, fp16                | casts; bf16 stochastically, too              |

E2M1 codes that eight make a word are `device_e2m1`'s. ELEMENT is the `device_table.Element` of a
format. HARDWARE is a constexpr, `launch.hardware_of` the GPU; where Triton interprets FP8 is
arithmetic alone. Kernels must be launched with `enable_fp_fusion=False`.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..device_numbers import number_of
from ..portable import INTERPRETED, round_to, to_fp32
from ..wide import side_by_side
from . import noise
from .device_table import Conversions

_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)
_EXPONENT = tl.constexpr(0x7F80_0000)  # and the bits of infinity
_QUIET_NAN = tl.constexpr(0x7FC0_0000)
_NAN_BYTE = tl.constexpr(255)
_MIN_NORMAL = tl.constexpr(0x0080_0000)
_TWO_TO_MINUS_127 = tl.constexpr(0x0040_0000)
_HALF_WAY_BELOW = tl.constexpr(0x0060_0000)  # 1.5 * 2^-127
_MAX_FINITE_BF16 = tl.constexpr(0x7F7F_0000)
_PHILOX_ROUNDS = tl.constexpr(noise.PHILOX_ROUNDS)


@triton.jit
def stored(x, bits, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """FP32 [n, m] as it is stored, stochastically if there are `bits`, of noise, else to nearest.

    Codes, one a byte, or what `ELEMENT.dtype` has; where two codes share a byte, words of eight if
    the format packs them itself, uint32 [n, m / 8], else bytes [n, m / 2].
    """
    if ELEMENT.pack is not None:
        return ELEMENT.pack(x, bits, HARDWARE)
    else:
        made = code_of(x, bits, ELEMENT, HARDWARE)
        return (
            pack_nibbles(made) if ELEMENT.form.stored_bits < made.dtype.primitive_bitwidth else made
        )


@triton.jit
def code_of(x, bits, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """FP32 as codes, one each, stochastically if there are `bits`, of noise, else to nearest."""
    if bits is None:
        return ELEMENT.encode(x, ELEMENT, HARDWARE)
    else:
        return ELEMENT.encode_stochastic(x, bits, ELEMENT)


@triton.jit
def value_of(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """Codes, one each, in FP32; what lies above a code's bits is ignored."""
    return ELEMENT.decode(codes, ELEMENT, HARDWARE)


@triton.jit
def values_of(kept, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """What `stored` makes in FP32, an element each: codes, bytes of two, or words of eight [n, m].

    Where two codes share a byte, any format's may come as words, uint32.
    """
    if ELEMENT.form.stored_bits >= kept.dtype.primitive_bitwidth:
        return value_of(kept, ELEMENT, HARDWARE)
    elif kept.dtype != tl.uint32:
        return value_of(unpack_nibbles(kept), ELEMENT, HARDWARE)
    elif ELEMENT.unpack is not None:
        return ELEMENT.unpack(kept, HARDWARE)
    else:
        return value_of(nibbles_of(kept), ELEMENT, HARDWARE)


@triton.jit
def round_bf16_stochastic(x, bits) -> tl.tensor:
    """`codes.round_bf16_stochastic(x, bits)`; `bits`: uint32, from `noise_of`."""
    word = x.to(tl.int32, bitcast=True)
    magnitude = word & _MAGNITUDE
    rounded = tl.minimum(magnitude, _MAX_FINITE_BF16) + (bits >> 16).to(tl.int32, bitcast=True)
    rounded = tl.where(magnitude < _EXPONENT, rounded, magnitude)
    rounded = (rounded | (word & ~_MAGNITUDE)) >> 16
    rounded = tl.where(magnitude > _EXPONENT, _QUIET_NAN >> 16, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode_e8m0(scales) -> tl.tensor:
    """`codes.e8m0_to_fp32(scales)`."""
    word = scales.to(tl.int32)
    placed = tl.where(word == 0, _TWO_TO_MINUS_127, word << 23)
    return tl.where(word == _NAN_BYTE, _QUIET_NAN, placed).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_e8m0(scales) -> tl.tensor:
    """`codes.reciprocal_e8m0(scales)`: 255 gives 255, a NaN, as it should."""
    word = 254 - scales.to(tl.int32)
    placed = tl.maximum(word << 23, _TWO_TO_MINUS_127)
    return tl.where(word < 0, _QUIET_NAN, placed).to(tl.float32, bitcast=True)


@triton.jit
def pack_nibbles(codes) -> tl.tensor:
    """Codes [..., 2 * n] -> bytes [..., n]: the even element has the low nibble."""
    PAIRS: tl.constexpr = codes.shape[-1] // 2
    SHAPE: tl.constexpr = codes.shape[:-1] + [PAIRS, 2]  # noqa: RUF005 - Triton has no unpacking
    even, odd = tl.split(tl.reshape(codes, SHAPE))
    return even | (odd << 4)


@triton.jit
def unpack_nibbles(packed) -> tl.tensor:
    """Bytes [..., n] -> codes [..., 2 * n]."""
    NUMEL: tl.constexpr = packed.shape[-1] * 2
    SHAPE: tl.constexpr = packed.shape[:-1] + [NUMEL]  # noqa: RUF005 - Triton has no unpacking
    return tl.reshape(tl.join(packed & 0xF, packed >> 4), SHAPE)


@triton.jit
def nibbles_of(words) -> tl.tensor:
    """uint32 [n, m] -> [n, 8 * m], the lowest four bits first.

    What is above a code stays: decoding does not look at it, and to clear it takes instructions.
    """
    codes = tl.join(words, words >> 16)
    codes = tl.join(codes, codes >> 8)
    return tl.reshape(tl.join(codes, codes >> 4), [words.shape[0], 8 * words.shape[1]])


@triton.jit
def amax(x, axis: tl.constexpr) -> tl.tensor:
    """max(|x|) along `axis`, a NaN if there is one.

    As integers, NaNs are above infinity; compiled, one instruction an element takes the magnitudes
    and keeps NaNs.
    """
    if INTERPRETED:
        return tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, axis).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(x), axis, _larger_or_nan)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def raise_amax(amax, x) -> None:
    """amax = max(amax, |x|), of FP32 [n], as int32: in the same order, NaN above infinity."""
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    tl.atomic_max(amax, tl.max(bits, 0), sem="relaxed")


@triton.jit
def noise_of(seed, index) -> tl.tensor:
    """`noise.noise_bits` of the elements `index` (int64, global): uint32 of its shape.

    seed: one integer, 64 bits, or where it lies. A compiler shares the Philox call among those of a
    group's elements that one thread has, if it can tell them: see `noise_of_block`.
    """
    return _noise(seed, index >> 4, (index & 15).to(tl.int32))


@triton.jit
def noise_of_block(seed, first_group, lanes) -> tl.tensor:
    """`noise_of` the elements 16 * `first_group` + `lanes`: for blocks that start with a group.

    first_group: an integer scalar. lanes: int32, in the data's shape, best made of `tl.arange` by
    sums and products: reshaped, threads share fewer calls, 28 instructions an element for 24.
    """
    return _noise(seed, (lanes >> 4).to(tl.int64) + first_group, lanes & 15)


@triton.jit
def noise_of_groups(seed, groups) -> tl.tensor:
    """`noise_of` the sixteen elements of each of `groups`, int64 [n]: [n, 16].

    One Philox call a group and thread, which compilers do not always find out for themselves.
    """
    low, high = noise_of_halves(seed, groups)
    return side_by_side(low, high)


@triton.jit
def noise_of_halves(seed, groups) -> tuple[tl.tensor, tl.tensor]:
    """`noise_of_groups` of the first eight and of the last eight elements of each, [n, 8] both."""
    words = noise_words(seed, groups)
    return spread_noise(words[0], words[1]), spread_noise(words[2], words[3])


@triton.jit
def noise_words(seed, groups) -> tuple[tl.tensor, ...]:
    """The four words of noise of each of `groups`, for four elements each: `spread_noise`."""
    low, high = groups.to(tl.uint32), (groups >> 32).to(tl.uint32)
    return tl.philox(number_of(seed), low, high, 0, 0, _PHILOX_ROUNDS)


@triton.jit
def spread_noise(first, second) -> tl.tensor:
    """Two of the `noise_words`, [n] -> `noise_of` the eight elements that they are for, [n, 8]."""
    lanes = tl.arange(0, 8)[None, :]
    word = tl.where((lanes & 4) == 0, first[:, None], second[:, None])
    return _rotated(word, lanes)


@triton.jit
def _noise(seed, group, lane):
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    word_0, word_1, word_2, word_3 = tl.philox(number_of(seed), low, high, 0, 0, _PHILOX_ROUNDS)
    lower = tl.where((lane & 4) == 0, word_0, word_1)
    upper = tl.where((lane & 4) == 0, word_2, word_3)
    return _rotated(tl.where((lane & 8) == 0, lower, upper), lane)


@triton.jit
def _rotated(word, lane):
    shift = ((lane & 3) * 8).to(tl.uint32)
    return (word >> shift) | (word << ((32 - shift) & 31))


@triton.jit
def clamp(x, MAX: tl.constexpr) -> tl.tensor:
    """x held to +-MAX, a NaN being +MAX: compiled minimum and maximum prefer a number."""
    if INTERPRETED:
        x = tl.where(x == x, x, MAX)
    return tl.maximum(tl.minimum(x, MAX), -MAX)


@triton.jit
def _encode_any(x, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """`codes.encode`, by the GPU's conversion where it has one."""
    if HARDWARE and not INTERPRETED and ELEMENT.dtype is not None:
        return x.to(ELEMENT.dtype).to(tl.uint8, bitcast=True)
    return _with_nan(_encode(x, ELEMENT), x, ELEMENT)


@triton.jit
def _encode_any_stochastic(x, bits, ELEMENT: tl.constexpr):
    """`codes.encode_stochastic`."""
    return _with_nan(_encode_stochastic(x, bits, ELEMENT), x, ELEMENT)


@triton.jit
def _decode_any(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """`codes.decode` of a format with a sign.

    The code's fields in FP32's places make value * 2^(bias - 127), subnormals included.
    """
    if HARDWARE and not INTERPRETED and ELEMENT.dtype is not None:
        return codes.to(ELEMENT.dtype, bitcast=True).to(tl.float32)
    form: tl.constexpr = ELEMENT.form
    MAGNITUDE: tl.constexpr = form.sign_code - 1
    word = codes.to(tl.int32)
    magnitude = word & MAGNITUDE
    sign = (word & form.sign_code) << (32 - form.bits)
    placed = (magnitude << (23 - form.mantissa_bits)) | sign
    value = placed.to(tl.float32, bitcast=True) * 2.0 ** (127 - form.bias)
    if not form.has_negative_zero:
        return tl.where(word == form.nan_code, float("nan"), value)
    if form.max_code < MAGNITUDE:
        if form.infinity_code is not None:
            infinity = (sign | _EXPONENT).to(tl.float32, bitcast=True)
            value = tl.where(magnitude == form.infinity_code, infinity, value)
            return tl.where(magnitude > form.infinity_code, float("nan"), value)
        return tl.where(magnitude > form.max_code, float("nan"), value)
    return value


@triton.jit
def _encode(x, ELEMENT: tl.constexpr):
    """int32 codes, to nearest. NaN gives the code of the largest.

    The anchor is the power of two whose ulp is the step of the format at |x|, so that the adder
    does the rounding. By example, e2m1, x = 2.6: the binade starts at 2, where the step is 1; the
    anchor is 2^23, and 2^23 + 2.6 rounds to 2^23 + 3, so |x| is 3 steps. Two binades up from the
    subnormals, which share the first one's step, add one binade's 2 codes: code 5.
    """
    MIN_NORMAL: tl.constexpr = (128 - ELEMENT.form.bias) << 23
    DROPPED: tl.constexpr = 23 - ELEMENT.form.mantissa_bits
    clamped = clamp(x, ELEMENT.form.max_finite)
    word = clamped.to(tl.int32, bitcast=True)
    binade = tl.maximum(word & _EXPONENT, MIN_NORMAL)
    anchor = binade + (DROPPED << 23)
    total = tl.abs(clamped) + anchor.to(tl.float32, bitcast=True)
    steps = total.to(tl.int32, bitcast=True) - anchor
    code = steps + ((binade - MIN_NORMAL) >> DROPPED)
    return _with_sign(code, word, ELEMENT)


@triton.jit
def _encode_stochastic(x, bits, ELEMENT: tl.constexpr):
    """int32 codes, stochastically. NaN gives the code of the largest.

    Times 2^(bias - 127), the format's subnormals are FP32's, and the code is the top of the bits.
    """
    DROPPED: tl.constexpr = 23 - ELEMENT.form.mantissa_bits
    clamped = clamp(x, ELEMENT.form.max_finite)
    scaled = tl.abs(clamped) * (2.0 ** (ELEMENT.form.bias - 127))
    added = (bits >> (32 - DROPPED)).to(tl.int32, bitcast=True)
    code = (scaled.to(tl.int32, bitcast=True) + added) >> DROPPED
    return _with_sign(code, clamped.to(tl.int32, bitcast=True), ELEMENT)


@triton.jit
def _with_sign(code, word, ELEMENT: tl.constexpr):
    """The sign of the FP32 bits `word` above the code; the one of a zero, if it may have it."""
    sign = (word >> (32 - ELEMENT.form.bits)) & ELEMENT.form.sign_code
    if not ELEMENT.form.has_negative_zero:
        sign = tl.where(code == 0, 0, sign)
    return code | sign


@triton.jit
def _with_nan(code, x, ELEMENT: tl.constexpr):
    """uint8 codes, what stands for NaN where x is one."""
    if ELEMENT.form.nan_code is not None:
        code = tl.where(x == x, code, ELEMENT.form.nan_code)
    return code.to(tl.uint8)


@triton.jit
def _decode_e5m2(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """E5M2 is the upper half of an FP16."""
    return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _encode_e8m0(x, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """The mantissa's upper half carries into the exponent field.

    Field 0 stands for 2^-127, a subnormal of FP32, so half way to 2^-126 is 1.5 * 2^-127.
    """
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    nearest = (magnitude + _TWO_TO_MINUS_127) >> 23
    below = (magnitude >= _HALF_WAY_BELOW).to(tl.int32)
    nearest = tl.where(magnitude < _MIN_NORMAL, below, nearest)
    return tl.where(magnitude < _EXPONENT, tl.minimum(nearest, 254), 255).to(tl.uint8)


@triton.jit
def _decode_e8m0(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    return decode_e8m0(codes)


@triton.jit
def _round(x, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    return round_to(x, ELEMENT.dtype)


@triton.jit
def _round_bf16_stochastic(x, bits, ELEMENT: tl.constexpr):
    tl.static_assert(ELEMENT.dtype == tl.bfloat16)
    return round_bf16_stochastic(x, bits)


@triton.jit
def _widened(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """`codes`: of the dtype, or its bits."""
    return to_fp32(codes.to(ELEMENT.dtype, bitcast=True))


ARITHMETIC = Conversions(_encode_any, _encode_any_stochastic, _decode_any)
OF_E5M2 = Conversions(_encode_any, _encode_any_stochastic, _decode_e5m2)
OF_E8M0 = Conversions(_encode_e8m0, None, _decode_e8m0)
PLAIN = Conversions(_round, _round_bf16_stochastic, _widened)
