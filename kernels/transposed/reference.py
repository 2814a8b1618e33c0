"""The definition of a matrix and its transpose, quantised: the GPU kernels' oracle, the CPU path.

What lies as the matrix x does is what the cast of its format makes of x, and what is transposed is
what that makes of x.T.contiguous(), bit for bit: `mx.reference`, `nvfp4.reference` and
`fp8.reference` say how. With noise every element of either has that of its index there. In NVFP4

    hadamard    x.T is transformed first, and so is its amax; x is not
    square      a is the largest magnitude of a square of 16 x 16, for the sixteen blocks of x and
                the sixteen of x.T that have a part of it: what both stand for is the same

Square scales are NVIDIA's for weights ("Pretraining Large Language Models with NVFP4", 2025,
section 4.3), so that forward and backward pass see one weight; the transform is for the operands of
weights' gradients (section 4.2).
"""

from __future__ import annotations

import torch

from ..formats import swizzle
from ..formats.codes import stored
from ..formats.table import E2M1
from ..fp8.reference import quantize_fp8_
from ..mx.reference import quantize_mx_
from ..nvfp4.codec import block_amaxes, block_scales
from ..nvfp4.reference import BLOCK_NUMEL, amax_nvfp4_, quantize_nvfp4_


def quantize_mx_with_transpose_(
    data: torch.Tensor,
    scales: torch.Tensor,
    data_t: torch.Tensor,
    scales_t: torch.Tensor,
    x: torch.Tensor,
    element: str,
    rule: str,
    seed: int | None = None,
    first_index: int = 0,
    swizzled: bool = False,
) -> None:
    """`mx.reference.quantize_mx_` of `x`, a matrix, and of its transpose."""
    options = (element, rule, seed, first_index, swizzled)
    quantize_mx_(data, scales, x, *options)
    quantize_mx_(data_t, scales_t, x.t().contiguous(), *options)


def amax_nvfp4_with_transpose_(amax: torch.Tensor, amax_t: torch.Tensor, x: torch.Tensor) -> None:
    """`nvfp4.reference.amax_nvfp4_` of `x`, a matrix, and of its transpose's transform."""
    amax_nvfp4_(amax, x)
    amax_nvfp4_(amax_t, x.t().contiguous(), hadamard=True)


def quantize_nvfp4_with_transpose_(
    data: torch.Tensor,
    scales: torch.Tensor,
    data_t: torch.Tensor,
    scales_t: torch.Tensor,
    x: torch.Tensor,
    amax: torch.Tensor,
    amax_t: torch.Tensor,
    seed: int | None = None,
    first_index: int = 0,
    hadamard: bool = False,
    square: bool = False,
    swizzled: bool = False,
) -> None:
    """`nvfp4.reference.quantize_nvfp4_` of `x`, a matrix, and of its transpose."""
    if square:
        scale_bytes, factors = _square_scales(x, amax)
        _square_side(data, scales, x, scale_bytes, factors, swizzled)
        _square_side(data_t, scales_t, x.t(), scale_bytes.t(), factors.t(), swizzled)
        return
    quantize_nvfp4_(data, scales, x, amax, seed, first_index, False, False, swizzled)
    transposed = x.t().contiguous()
    quantize_nvfp4_(
        data_t, scales_t, transposed, amax_t, seed, first_index, False, hadamard, swizzled
    )


def quantize_fp8_with_transpose_(
    codes: torch.Tensor,
    codes_t: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """`fp8.reference.quantize_fp8_` of `x`, a matrix, as one block, and the transposed codes."""
    quantize_fp8_(codes, scale_inv, x, "tensor", power_of_2, scale, amax)
    codes_t.view(torch.uint8).copy_(codes.view(torch.uint8).t())


def _square_scales(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and factors of squares, [rows / 16, columns / 16] each."""
    rows, columns = (side // BLOCK_NUMEL for side in x.shape)
    squares = x.float().view(rows, BLOCK_NUMEL, columns, BLOCK_NUMEL).transpose(1, 2)
    block_amax, _ = block_amaxes(squares.reshape(rows, columns, BLOCK_NUMEL**2), False)
    return block_scales(block_amax, amax, False)


def _square_side(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    factors: torch.Tensor,
    swizzled: bool,
) -> None:
    """Codes and scales along the rows of `x`, with the scales and factors of its squares."""
    factors = factors.repeat_interleave(BLOCK_NUMEL, 0).repeat_interleave(BLOCK_NUMEL, 1)
    data.copy_(stored((x.float() * factors).contiguous(), E2M1, None))
    plain = scale_bytes.repeat_interleave(BLOCK_NUMEL, 0)
    scales.view(torch.uint8).copy_(swizzle.swizzle_scales(plain) if swizzled else plain)
