"""E2M1 codes in words of eight, to and from FP32: what `device_codes` does one code a byte.

| way               | by                                                 | instructions a code |
|-------------------|----------------------------------------------------|---------------------|
| encode, Blackwell | `e2m1_instructions.TO_WORD`, to nearest            | 0.5                 |
| encode            | arithmetic, to nearest; stochastically on any GPU  | 11                  |
| decode, Blackwell | `e2m1_instructions.OF_WORD`                        | 1.5                 |
| decode, Hopper    | `e2m1_instructions.OF_WORD_BY_PRMT`                | 2.9                 |
| decode            | arithmetic                                         | 4                   |

By arithmetic a code is finished in its word. Rounding leaves it in bits 24 to 22 of an FP32's, and
its sign in bit 31, a field of E2M1 here; eight fields become a word by what 32 bits can do at once,
at two instructions an element. By way of a byte each it takes four and a half.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import FP4
from . import device_codes, e2m1_instructions
from .device_codes import ARITHMETIC, clamp
from .device_table import Conversions
from .table import E2M1

_MAX = tl.constexpr(E2M1.max_finite)
_SIGN = tl.constexpr(-0x8000_0000)
_EXPONENT = tl.constexpr(0x7F80_0000)
_ONE = tl.constexpr(127 << 23)  # the smallest normal
_FP4 = tl.constexpr(FP4)
_TO_WORD = tl.constexpr(e2m1_instructions.TO_WORD)
_OF_WORD = tl.constexpr(e2m1_instructions.OF_WORD)
_OF_WORD_BY_PRMT = tl.constexpr(e2m1_instructions.OF_WORD_BY_PRMT)


@triton.jit
def packed_e2m1(x, bits, HARDWARE: tl.constexpr) -> tl.tensor:
    """FP32 [n, 8 * m] -> uint32 [n, m], the first of eight codes in the lowest four bits.

    As `device_codes.code_of`, with `bits` or None.
    """
    if bits is not None:
        return _packed(_fields_stochastic(x, bits))
    elif HARDWARE == _FP4:
        return _converted(x)
    else:
        return _packed(_fields(x))


@triton.jit
def unpacked_e2m1(words, HARDWARE: tl.constexpr) -> tl.tensor:
    """uint32 [n, m] -> FP32 [n, 8 * m]: the values of what `packed_e2m1` makes."""
    if HARDWARE:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            _OF_WORD if HARDWARE == _FP4 else _OF_WORD_BY_PRMT,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
        even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
        return tl.reshape(tl.join(even, odd), [words.shape[0], 8 * words.shape[1]])
    else:
        return decode_e2m1(device_codes.nibbles_of(words))


@triton.jit
def decode_e2m1(codes) -> tl.tensor:
    """`codes.decode(codes, E2M1)`: the code's fields in FP32's places, times what is missing.

    Bits above the low four are ignored.
    """
    word = codes.to(tl.int32)
    # Two shifts spread the sign over the bits above the other three; the mask leaves the four.
    placed = ((word << 28) >> 6) & -0x7E40_0000
    return placed.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def bytes_of(words) -> tl.tensor:
    """uint32 [n, m] -> uint8 [n, 4 * m], the lowest byte of each first."""
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    made = (words[:, :, None] >> shifts[None, None, :]).to(tl.uint8)
    return tl.reshape(made, [words.shape[0], 4 * words.shape[1]])


@triton.jit
def _converted(x):
    """By the instruction: words, as `_packed` makes them."""
    ROWS: tl.constexpr = x.shape[0]
    WORDS: tl.constexpr = x.shape[1] // 8
    even, odd = tl.split(tl.reshape(x, [ROWS * WORDS, 2, 2, 2]))
    x04, x26 = _split_twice(even)
    x15, x37 = _split_twice(odd)
    words = tl.inline_asm_elementwise(
        _TO_WORD,
        "=r,f,f,f,f,f,f,f,f",
        [x04[0], x15[0], x26[0], x37[0], x04[1], x15[1], x26[1], x37[1]],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )
    return tl.reshape(words, [ROWS, WORDS])


@triton.jit
def _split_twice(x):
    """[n, 2, 2] -> [n] four times: of the last index 0 both of the first, and then of 1."""
    low, high = tl.split(x)
    return tl.split(low), tl.split(high)


@triton.jit
def _fields(x):
    """To nearest, by the anchor of `device_codes`: its own bits are shifted out of the word."""
    clamped = clamp(x, _MAX)
    word = clamped.to(tl.int32, bitcast=True)
    binade = tl.maximum(word & _EXPONENT, _ONE)
    anchor = binade + (22 << 23)
    total = tl.abs(clamped) + anchor.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) << 22) + (binade - _ONE)
    return (code | (word & _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def _fields_stochastic(x, bits):
    """Below bit 22 is what rounding has left. Noise never reaches the sign."""
    scaled = clamp(x, _MAX) * (2.0**-126)
    return scaled.to(tl.uint32, bitcast=True) + (bits >> 10)


@triton.jit
def _packed(fields):
    """Half a word has fields 0 and 4, two halves become pairs 0 1 and 4 5.

    A pair's signs are bits 15 and 11 of its half, its codes bits 8 to 6 and 4 to 2; the signs six
    bits down make it a byte.
    """
    ROWS: tl.constexpr = fields.shape[0]
    WORDS: tl.constexpr = fields.shape[1] // 8
    places = tl.reshape(fields, [ROWS * WORDS, 2, 2, 2])
    low, high = tl.split(tl.permute(places, (0, 2, 3, 1)))
    even, odd = tl.split((low >> 16) | (high & 0xFFFF_0000))
    pairs = _merged(odd, even >> 4, 0x81C0_81C0)
    pairs = _merged(pairs, pairs >> 6, 0x01DC_01DC)
    low, high = tl.split(pairs)
    return tl.reshape(_merged(low >> 2, high << 6, 0x00FF_00FF), [ROWS, WORDS])


@triton.jit
def _merged(a, b, OF_A: tl.constexpr):
    return (a & OF_A) | (b & (0xFFFF_FFFF ^ OF_A))


@triton.jit
def _decode(codes, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    return decode_e2m1(codes)


OF_E2M1 = Conversions(
    ARITHMETIC.encode, ARITHMETIC.encode_stochastic, _decode, packed_e2m1, unpacked_e2m1
)
