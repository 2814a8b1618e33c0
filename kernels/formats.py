"""Owns the number formats gradients and parameters travel in: widths, limits and byte counts.

| name | element bits | max finite             | block | scale |
|------|--------------|------------------------|-------|-------|
| fp32 | 32           | (2 - 2^-23) * 2^127    | 1     | none  |
| bf16 | 16           | (2 - 2^-7) * 2^127     | 1     | none  |
| fp16 | 16           | (2 - 2^-10) * 2^15     | 1     | none  |

A block is the elements that share one scale; formats without scales have blocks of one element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class WireFormat:
    """One number format, as it lies in memory or on the wire.

    ``scale_dtype`` is ``None`` for formats whose elements need no scale.
    """

    name: str
    dtype: torch.dtype
    element_bits: int
    max_finite: float
    block_numel: int = 1
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.element_bits > 0, self
        assert self.max_finite > 0, self
        assert self.block_numel > 0, self
        assert (self.block_numel * self.element_bits) % BITS_PER_BYTE == 0, self

    def num_bytes(self, numel: int) -> int:
        """Bytes that `numel` elements take, the scales of their blocks included.

        Raises `ValueError` for a negative `numel`.
        """
        if numel < 0:
            raise ValueError(f"numel: expected 0 or more, got {numel}; pass an element count")
        element_bytes = -(-numel * self.element_bits // BITS_PER_BYTE)
        if self.scale_dtype is None:
            return element_bytes
        return element_bytes + -(-numel // self.block_numel) * self.scale_dtype.itemsize


# IEEE 754-2019, table 3.5: binary32 has p = 24, emax = 127.
FP32 = WireFormat("fp32", torch.float32, 32, (2.0 - 2.0**-23) * 2.0**127)
# The upper 16 bits of a binary32 (p = 8, emax = 127): Intel, "BFLOAT16 - Hardware Numerics
# Definition", 2018, section 1.
BF16 = WireFormat("bf16", torch.bfloat16, 16, (2.0 - 2.0**-7) * 2.0**127)
# IEEE 754-2019, table 3.5: binary16 has p = 11, emax = 15.
FP16 = WireFormat("fp16", torch.float16, 16, (2.0 - 2.0**-10) * 2.0**15)

WIRE_FORMATS: tuple[WireFormat, ...] = (FP32, BF16, FP16)

_BY_DTYPE = {wire_format.dtype: wire_format for wire_format in WIRE_FORMATS}
_BY_NAME = {wire_format.name: wire_format for wire_format in WIRE_FORMATS}


def wire_format_of(dtype: torch.dtype) -> WireFormat:
    """The format whose elements have `dtype`; `ValueError` when the kernels know none."""
    found = _BY_DTYPE.get(dtype)
    if found is None:
        known = ", ".join(str(known_dtype) for known_dtype in _BY_DTYPE)
        raise ValueError(f"dtype: expected one of {known}, got {dtype}; cast the tensor first")
    return found


def wire_format_named(name: str) -> WireFormat:
    """The format called `name`; `ValueError` when there is none."""
    found = _BY_NAME.get(name)
    if found is None:
        known = ", ".join(_BY_NAME)
        raise ValueError(f"name: expected one of {known}, got {name!r}; choose a known format")
    return found
