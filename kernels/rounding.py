"""Owns the one rounding of the kernels: FP32 to a storage type, to nearest even, interpreted too.

Triton's interpreter cuts FP32 off when it casts to BF16; there integers make the right result.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

# Read once, as Triton does: a kernel is interpreted or compiled for good when it is decorated.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
