"""The conversions of `codes` made fast for a CPU: the same bits, by few passes over a chunk.

    nearest     S = the power of two at or below |x|, `min_normal` at least; with a constant M a
                multiple of 2, x + S * M has the format's steps, so (x + S * M) - S * M is x rounded
    stochastic  as `codes.encode_stochastic`, and the code's value from the bits that are left
    stored      torch's own e4m3 of the value times a power of two, which is exact, has the code's
                bits in other places; a table knows them. Of e4m3 torch's conversion is the code
    loaded      a table has the values of a byte

The tables are made by `codes`, so a NaN becomes what it makes of one. They are read by `gather` in
several rows, which is the one such call that threads share.
"""

from __future__ import annotations

import functools

import torch

from . import codes
from .table import BITS_PER_BYTE, E4M3, ElementFormat, WireFormat

_MANTISSA_BITS = 23  # of FP32
_BF16_DROPPED = 16
_MAGNITUDE = 0x7FFF_FFFF
_EXPONENT = 0x7F80_0000
_INFINITY = 0x7F80_0000
_QUIET_NAN = 0x7FC0_0000
_SIGN_AND_E4M3 = -0x4080  # of an FP16 whose upper bits are copies of the sign
_FROM_FP16 = 2.0**8
_SIGN_AND_E4M3_IN_BF16 = -0x7810
_BF16_FROM_E4M3 = 120  # in the exponent
_LARGEST_BF16_SCALE = 254 - _BF16_FROM_E4M3
_SUBNORMAL = 2.0**-130
_E4M3_NAN = 0x7F
_NUM_BYTES = 1 << BITS_PER_BYTE
_ROWS = 16  # of the indices for `gather`: what has 128 elements has a multiple of so many bytes


class Scratch:
    """Memory for the conversion of up to `numel` elements, a multiple of 128."""

    def __init__(self, numel: int) -> None:
        self.values = torch.empty(numel, dtype=torch.float32, device="cpu")
        self.noise = torch.empty(numel, dtype=torch.int32, device="cpu")
        self.indices = torch.empty(numel, dtype=torch.int64, device="cpu")
        self.codes = torch.empty(numel, dtype=E4M3.dtype, device="cpu")

    def pair(self, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two FP32 tensors of `numel` elements in the memory of the indices."""
        both = self.indices.view(torch.float32)
        return both[:numel], both[numel : 2 * numel]


def amax_of(blocks: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """`codes.amax_of` of FP32 [..., elements of one], contiguous."""
    magnitudes, _ = scratch.pair(blocks.numel())
    torch.abs(blocks, out=magnitudes.view(blocks.shape))
    return magnitudes.view(torch.int32).view(blocks.shape).amax(-1).view(torch.float32)


def store_(
    stored: torch.Tensor,
    values: torch.Tensor,
    element: ElementFormat | WireFormat,
    noise: torch.Tensor | None,
    scratch: Scratch,
) -> None:
    """Fill the bytes `stored` with FP32 `values` [n] as `codes.stored` does; n % 128 is 0.

    Values and noise are written over; the values may be the scratch's.
    """
    if isinstance(element, WireFormat):
        _store_bf16_(stored, values, element, noise, scratch)
        return
    if not _has_carrier(element):
        stored.copy_(codes.stored(values, element, noise))
        return
    values.clamp_(-element.max_finite, element.max_finite)
    if noise is not None:
        _round_stochastically_(values, noise, element, scratch)
    elif element is not E4M3:
        _round_(values, element, scratch)
    _store_exact_(stored, values, element, scratch)


def load_(
    values: torch.Tensor,
    stored: torch.Tensor,
    element: ElementFormat | WireFormat,
    scratch: Scratch,
) -> None:
    """Fill FP32 `values` [n], on multiples of 8 bytes, as `codes.loaded` does; n % 128 is 0."""
    if isinstance(element, WireFormat):
        values.copy_(codes.loaded(stored.view(element.dtype), element))
        return
    if element is E4M3 and not _has_nan(stored, scratch):
        _load_e4m3_(values, stored, scratch)
        return
    indices = scratch.indices[: stored.numel()].copy_(stored)
    table = _values_of_bytes(element)
    _look_up_(values.view(table.dtype), table, indices)


def load_bf16_(
    values: torch.Tensor,
    stored: torch.Tensor,
    exponents: torch.Tensor,
    element: ElementFormat | WireFormat,
    scratch: Scratch,
) -> bool:
    """Fill BF16 `values` [blocks, elements of one] with what codes of e4m3 [n] and E8M0 scales
    `exponents` [blocks] say, rounded once, if it can: without FP32 between.

    Not if there is a NaN, a scale above 2^7, another element, or if small numbers are flushed.
    """
    if (
        element is not E4M3
        or not exponents.numel()
        or exponents.amax() > _LARGEST_BF16_SCALE
        or _flushes_subnormals()
        or _has_nan(stored, scratch)
    ):
        return False
    words = values.view(torch.int16)
    words.view(-1).copy_(stored.view(torch.int8))
    # BF16 has the bits of e4m3 four places higher, and exponents that are greater by 120.
    words.bitwise_left_shift_(4).bitwise_and_(_SIGN_AND_E4M3_IN_BF16)
    factors = (exponents.to(torch.int16) + _BF16_FROM_E4M3).bitwise_left_shift_(7)
    values.mul_(factors.view(torch.bfloat16).unsqueeze(-1))
    return True


def _flushes_subnormals() -> bool:
    """Whether `torch.set_flush_denormal` has been told to."""
    return bool(torch.tensor(_SUBNORMAL, device="cpu").mul_(1.0) == 0.0)


def _has_nan(stored: torch.Tensor, scratch: Scratch) -> bool:
    """Whether there is a NaN among codes of e4m3."""
    magnitudes = scratch.codes.view(torch.uint8)[: stored.numel()]
    torch.bitwise_and(stored, _E4M3_NAN, out=magnitudes)
    return bool(magnitudes.amax() == _E4M3_NAN)


def _load_e4m3_(values: torch.Tensor, stored: torch.Tensor, scratch: Scratch) -> None:
    """By way of FP16, which has the bits of e4m3 three places lower, and other exponents."""
    words = scratch.indices.view(torch.int16)[: values.numel()]
    words.copy_(stored.view(torch.int8))
    words.bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_E4M3)
    values.copy_(words.view(torch.float16)).mul_(_FROM_FP16)


def _store_bf16_(
    stored: torch.Tensor,
    values: torch.Tensor,
    element: WireFormat,
    noise: torch.Tensor | None,
    scratch: Scratch,
) -> None:
    """To BF16 stochastically: the sum of integers, so that subnormals stay where FP32's do not."""
    magnitudes, signs = (part.view(torch.int32) for part in scratch.pair(values.numel()))
    torch.bitwise_and(values.view(torch.int32), _MAGNITUDE, out=magnitudes)
    if noise is None or magnitudes.amax() >= _INFINITY:
        stored.copy_(codes.stored(values, element, noise).view(torch.uint8))
        return
    torch.bitwise_and(values.view(torch.int32), ~_MAGNITUDE, out=signs)
    _keep_top_(noise, _BF16_DROPPED)
    magnitudes.clamp_max_(codes.bits_of(element.max_finite)).add_(noise)
    magnitudes.bitwise_or_(signs).bitwise_right_shift_(_BF16_DROPPED)
    made = noise.view(torch.int16)[: values.numel()].copy_(magnitudes)
    stored.copy_(made.view(torch.uint8))


def _has_carrier(element: ElementFormat) -> bool:
    """Whether e4m3 has all values of the element, times one power of two."""
    return (
        element.has_sign
        and element.mantissa_bits <= E4M3.mantissa_bits
        and element.max_finite * _to_carrier(element) <= E4M3.max_finite
    )


def _to_carrier(element: ElementFormat) -> float:
    """What turns the smallest normal value into that of e4m3."""
    return E4M3.min_normal / element.min_normal


def _round_(values: torch.Tensor, element: ElementFormat, scratch: Scratch) -> None:
    """Round values of at most `max_finite` to nearest, ties to even."""
    powers, rounded = scratch.pair(values.numel())
    bits = powers.view(torch.int32)
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=bits)
    powers.clamp_min_(element.min_normal)
    # The sum has an ulp of S * 2^-mantissa_bits, be the value positive or negative.
    shift = 1.5 * 2.0 ** (_MANTISSA_BITS - element.mantissa_bits)
    torch.add(values, powers, alpha=shift, out=rounded)
    rounded.sub_(powers, alpha=shift)
    torch.copysign(rounded, values, out=values)


def _round_stochastically_(
    values: torch.Tensor,
    noise: torch.Tensor,
    element: ElementFormat,
    scratch: Scratch,
) -> None:
    """Round values of at most `max_finite` as `codes.encode_stochastic` does."""
    dropped = _MANTISSA_BITS - element.mantissa_bits
    magnitude, is_small = scratch.pair(values.numel())
    bits = magnitude.view(torch.int32)
    torch.abs(values, out=magnitude)
    torch.lt(magnitude, element.min_normal, out=is_small)
    # The smallest normal value beside a smaller one gives it the exponent, and so the steps.
    magnitude.add_(is_small, alpha=element.min_normal)
    _keep_top_(noise, dropped)
    # Whatever the bits of a NaN are, the sum is that of one.
    bits.clamp_max_(_QUIET_NAN).add_(noise).bitwise_and_(-(1 << dropped))
    magnitude.sub_(is_small, alpha=element.min_normal)
    torch.copysign(magnitude, values, out=values)


def _keep_top_(noise: torch.Tensor, count: int) -> None:
    """Make int32 noise its `count` most significant bits, as an integer of 0 or more."""
    noise.bitwise_right_shift_(32 - count).bitwise_and_((1 << count) - 1)


def _store_exact_(
    stored: torch.Tensor, values: torch.Tensor, element: ElementFormat, scratch: Scratch
) -> None:
    """The codes of values that the element has; or, if it is e4m3, that torch rounds to it."""
    if element is E4M3:
        stored.view(E4M3.dtype).copy_(values)
        if stored.amax() == _NUM_BYTES - 1:  # the other NaN
            stored.masked_fill_(stored == _NUM_BYTES - 1, _E4M3_NAN)
        return
    values.mul_(_to_carrier(element))
    carrier = scratch.codes[: values.numel()].copy_(values)
    words = carrier.view(torch.uint8 if element.codes_per_byte == 1 else torch.uint16)
    indices = scratch.indices[: words.numel()].copy_(words)
    _look_up_(stored, _bytes_of_carriers(element), indices)


def _look_up_(made: torch.Tensor, table: torch.Tensor, indices: torch.Tensor) -> None:
    """made[i] = table[indices[i]]."""
    rows = made.view(_ROWS, -1)
    torch.gather(table.expand(_ROWS, -1), 1, indices.view(_ROWS, -1), out=rows)


@functools.lru_cache(maxsize=32)
def _values_of_bytes(element: ElementFormat) -> torch.Tensor:
    """Of every byte its one value, FP32, or two as one int64."""
    every = torch.arange(_NUM_BYTES, dtype=torch.uint8, device="cpu").view(-1, 1)
    values = codes.loaded(every, element)
    return values.view(-1) if element.codes_per_byte == 1 else values.view(torch.int64).view(-1)


@functools.lru_cache(maxsize=32)
def _bytes_of_carriers(element: ElementFormat) -> torch.Tensor:
    """What is stored for every e4m3, or pair of them, that `_store_exact_` looks up."""
    every = torch.arange(_NUM_BYTES, dtype=torch.uint8, device="cpu")
    values = codes.decode(every, E4M3) / _to_carrier(element)
    if element.codes_per_byte > 1:  # as bytes lie in a word, the first one is the low one
        values = torch.stack((values.repeat(_NUM_BYTES), values.repeat_interleave(_NUM_BYTES)), -1)
    return codes.stored(values, element).view(-1)
