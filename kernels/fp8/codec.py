"""The codec of blocks with FP32 scales, of 128 elements or of whole rows.

With x an element of a block:

    amax       max |x| of the block, ignoring nothing
    scale      min(max_finite / amax, FLT_MAX), IEEE division; 1 where amax is 0;
               where it shall be a power of two its mantissa is cut off;
               where amax is inf or NaN: NaN in a message, 1 in the cast of a tensor
    code       encode(x * scale), one product in FP32, to nearest or stochastically
    stored     1 / scale, IEEE division
    decoded    decode(code) * stored

So all of a message's block is NaN, codes and stored scale, where an element of it is not finite.
"""

from __future__ import annotations

import torch

from ..formats.table import FP32, BlockFormat, ElementFormat

_SIGN_AND_EXPONENT = -(2**23)  # FP32 bits without those of the mantissa


def scale_of(amax: torch.Tensor, element: ElementFormat, power_of_2: bool) -> torch.Tensor:
    """What the elements of a block with this FP32 `amax` are multiplied by; 1 if not finite."""
    # A tensor over a tensor: a Python number over one is a product with the reciprocal.
    scale = (torch.full_like(amax, element.max_finite) / amax).clamp_max_(FP32.max_finite)
    if power_of_2:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def scales_of(
    amax: torch.Tensor, form: BlockFormat, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `table.Codec`: the stored scales are those of rows where a row is a block."""
    scale = torch.where(amax.isfinite(), scale_of(amax, form.element, power_of_2), torch.nan)
    stored = torch.ones_like(scale) / scale
    return (scale, None, stored) if form.has_rows else (scale, stored, None)


def factors_of(scales: torch.Tensor | None, row_scales: torch.Tensor | None) -> torch.Tensor:
    """See `table.Codec`: what is stored, whichever there is."""
    factors = row_scales if scales is None else scales
    assert factors is not None
    return factors
