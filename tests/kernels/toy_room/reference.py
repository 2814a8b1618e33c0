"""The definition of `toy_negate_`: out = -x, the sign bit alone, so that a NaN keeps its bits."""

import torch

SIGN = -(2**31)


def negate_(out: torch.Tensor, x: torch.Tensor) -> None:
    """Fill `out` with -x; both FP32."""
    out.view(torch.int32).copy_(x.view(torch.int32) ^ SIGN)
