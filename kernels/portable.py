"""What compiled and interpreted kernels must do in different ways: casts, quotients, loop bounds.

Triton's interpreter cuts FP32 off when it casts to BF16, flushes BF16 subnormals when it casts to
FP32, cannot loop up to a number it has loaded, and leaves a Python float FP64. Where it runs,
integers make the right bits; compiled kernels use the hardware's casts.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Read once, as Triton does: a kernel is interpreted or compiled for good when it is decorated.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def as_compiled(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch's arguments, floats being FP32 where Triton interprets, as a compiler makes them."""
    if not INTERPRETED.value:
        return arguments
    return tuple(_fp32(argument) if type(argument) is float else argument for argument in arguments)


def _fp32(value: float) -> tl.tensor:
    from triton.runtime.interpreter import TensorHandle

    rounded = torch.tensor([value], dtype=torch.float32, device="cpu").numpy()
    return tl.tensor(TensorHandle(rounded, tl.float32), tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr) -> tl.tensor:
    """Round FP32 `x` to `dtype`.

    Integers, by example: 0x3F808000 lies half way between 0x3F80 and 0x3F81. Adding 0x7FFF and the
    last kept bit, 0, gives 0x3F80FFFF, which is cut to the even 0x3F80.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(x == x, kept, 0x7FC0)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_fp32(x) -> tl.tensor:
    """FP32, BF16 or FP16 `x` in FP32, exactly; BF16 is the upper half of an FP32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def covered(count, BLOCK: tl.constexpr) -> tl.tensor:
    """Up to where a masked loop over BLOCK elements must go when `count` are left."""
    if INTERPRETED:
        return BLOCK
    return tl.minimum(count, BLOCK).to(tl.int32)


@triton.jit
def quotient_terms(bits) -> tuple:
    """What `quotient` needs of a divisor, the bits of a finite FP32 that is 0 or more.

    (divisor, 2^k, divisor * 2^k, FP32 nearest to its reciprocal, what that lacks). The power of two
    brings the divisor above 2^-23 and below 4, so that nothing that counts is subnormal.
    """
    divisor = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
    exponent = divisor.to(tl.int32, bitcast=True) >> 23
    scale = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    scaled = divisor * scale
    high = tl.div_rn(1.0, scaled)
    return divisor, scale, scaled, high, tl.fma(-high, scaled, 1.0) * high


@triton.jit
def quotient(x, terms) -> tl.tensor:
    """FP32 x / divisor, rounded as by IEEE's division, where |x| <= divisor; from 2^-80 on.

    The interpreter's fused multiply-add rounds twice, so there NumPy divides.
    """
    if INTERPRETED:
        return tl.div_rn(x, terms[0])
    return fused_quotient(x, terms)


@triton.jit
def fused_quotient(x, terms) -> tl.tensor:
    """Five operations, where a division that knows nothing of its divisor has nine and a branch.

    With the reciprocal in two parts the first quotient is one of the two FP32 beside the exact one,
    so its remainder is exact, and one correction rounds correctly (Markstein's theorem).
    """
    _, scale, scaled, high, low = terms
    x = x * scale
    near = tl.fma(x, high, x * low)
    return tl.fma(tl.fma(-near, scaled, x), high, near)
