"""The codec of blocks with E8M0 scales: MXFP8, MXFP4 and whatever a row of the table makes.

With a the largest magnitude of a block and x an element of it:

    byte    = rule(a, element)                 one of `table.SCALE_RULES`
    code    = encode(x * 2^(127 - byte))       to nearest or stochastically
    decoded = decode(code) * 2^(byte - 127)

Where an element of the block is NaN or infinite the byte is 255, which is a NaN, and every code
that of a NaN.
"""

from __future__ import annotations

import torch

from ..formats import codes
from ..formats.table import BlockFormat, ScaleRule


def scales_of(
    amax: torch.Tensor, form: BlockFormat, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """See `table.Codec`: of blocks' amax, FP32 [...] -> (FP32 [...], bytes [...], None)."""
    scale_bytes = codes.scale_byte(amax, form.element, rule)
    return codes.reciprocal_e8m0(scale_bytes), scale_bytes, None


def factors_of(scales: torch.Tensor, row_scales: None = None) -> torch.Tensor:
    """See `table.Codec`: bytes -> FP32 of their shape."""
    return codes.e8m0_to_fp32(scales)
