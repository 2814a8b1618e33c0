"""Owns the definition of the random 16-element Hadamard transform in plain PyTorch.

    forward   y = H (s * x) / 4        inverse   x = s * (H y) / 4

H is Sylvester's 16 x 16 matrix, H[i, j] = (-1)^popcount(i & j), and s the fixed signs `SIGNS`; both
directions are orthonormal, so the sum of squares stays. A row is cut into groups of 16; what is
left over at its end, fewer than 16 elements, is passed through unchanged.

Bits are defined, as the order of additions is. In FP32: multiply by s / 4 (first when forward,
last when inverse); between, four stages for i of 1, 2, 4, 8, each of which makes of every pair of
elements (a, b), i apart, (a + b, a - b). Then round once to the dtype of x.

Signs: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, section 4.2, and the vector in
TransformerEngine, `transformer_engine/jax/quantize/hadamard.py`, so that its tensors and ours meet.
"""

from __future__ import annotations

import torch

GROUP_NUMEL = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NORM = 0.25  # one over the square root of the group's length


def hadamard16_(out: torch.Tensor, x: torch.Tensor, inverse: bool = False) -> None:
    """Write into `out` the transform of the groups of every row of `x`, along its last dim.

    x, out: [..., K], FP32, BF16 or FP16, contiguous, sharing no memory. Infinities and NaNs spread
    within their group alone.
    """
    out.copy_(x)
    whole = x.shape[-1] // GROUP_NUMEL * GROUP_NUMEL
    if whole and x.numel():
        groups = x[..., :whole].float().reshape(-1, GROUP_NUMEL)
        out[..., :whole] = _transform(groups, inverse).view(*x.shape[:-1], whole)


def _transform(groups: torch.Tensor, inverse: bool) -> torch.Tensor:
    """[n, 16] FP32 -> [n, 16] FP32."""
    factors = torch.tensor(SIGNS, dtype=torch.float32, device=groups.device) * NORM
    if not inverse:
        groups = groups * factors
    for apart in (1, 2, 4, 8):
        pairs = groups.view(-1, GROUP_NUMEL // (2 * apart), 2, apart)
        low, high = pairs.unbind(2)
        groups = torch.stack((low + high, low - high), 2).view(-1, GROUP_NUMEL)
    return groups * factors if inverse else groups
