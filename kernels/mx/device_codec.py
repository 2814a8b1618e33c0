"""`codec` inside Triton kernels, bit for bit."""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import device_codes as device


@triton.jit
def scaled(x, CODEC: tl.constexpr, ROW: tl.constexpr, HARDWARE: tl.constexpr) -> tuple:
    """FP32 [blocks, elements of one] -> (what is to be encoded, scale bytes [blocks], twice)."""
    scale_bytes = CODEC.rule(device.amax(x, 1), CODEC.element)
    return x * device.reciprocal_e8m0(scale_bytes)[:, None], scale_bytes, scale_bytes


@triton.jit
def factors(scales, row_scales, CODEC: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """Scale bytes -> what codes are multiplied by."""
    return device.decode_e8m0(scales)
