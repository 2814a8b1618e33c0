"""The codec of NVFP4: blocks of 16 with an E4M3 scale, and an FP32 amax of all of them besides.

A is the amax of the tensor, or of a message's row, a that of a block, x an element:

| step     | variant "te"                             | variant "torchao"                      |
|----------|------------------------------------------|----------------------------------------|
| tensor   | E = min(2688 / A, FLT_MAX); D = 1 / E    | P = max(A / 2688, 2^-126)              |
| block    | s = E4M3(a * (E * (1/6)))                | s = E4M3(clamp((a / 6) / P, 2^-6, 448))|
| factor   | f = min(1 / (s * D), FLT_MAX)            | f = min((1 / P) / s, FLT_MAX)          |
| code     | E2M1(x * f)                              | E2M1(x * f)                            |
| decoded  | code * ((s * A) * (1/2688))              | code * (s * P)                         |

2688 is 448 * 6, the largest scale times the largest element. Where A is not a positive finite
number, E, D and P are 1. Decoding takes A below 2688 / FLT_MAX for that, as E does. Messages have
the variant "te", a row of theirs being a tensor.

In a message a block with a NaN or an infinity has a NaN for a: its scale is byte 0x7F, f is NaN and
every code that of a NaN. A leaves the block out, so that no other one knows of it.
"""

from __future__ import annotations

import torch

from ..formats import codes
from ..formats.table import E2M1, E4M3, FP32, BlockFormat

MAX_PRODUCT = E4M3.max_finite * E2M1.max_finite
TORCHAO_MIN_SCALE = E4M3.min_normal
TORCHAO_MIN_TENSOR_SCALE = 2.0**-126
# Above it, decoding works on A * 2^-12: the same bits, without overflow of 448 * A.
LARGE_AMAX = 2.0**100
DOWN, UP = 2.0**-12, 2.0**12


def scales_of(
    amax: torch.Tensor, form: BlockFormat, rule: None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `table.Codec`."""
    block_amax, counted = _finite_amaxes(amax)
    row_amax = counted.amax(-1, keepdim=True)
    scale_bytes, factors = block_scales(block_amax, row_amax, False)
    return factors, scale_bytes, row_amax


def factors_of(scales: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
    """See `table.Codec`."""
    return block_factors(scales, row_scales, False)


def block_amaxes(blocks: torch.Tensor, as_nan: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of FP32 [..., elements of one]: the amax of each, and what of it the amax of all looks at.

    as_nan: a block with an element that is not finite has a NaN, and 0; else a NaN counts as 0.
    """
    magnitudes = blocks.abs()
    if not as_nan:
        amax = magnitudes.masked_fill_(magnitudes.isnan(), 0.0).amax(-1)
        return amax, amax
    return _finite_amaxes(magnitudes.amax(-1))


def block_scales(
    block_amax: torch.Tensor, tensor_amax: torch.Tensor, torchao: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and the factors that elements are multiplied by, of `block_amax`'s shape.

    tensor_amax: 0-d, or [rows, 1], one for each row.
    """
    device = block_amax.device
    one, product, six = (
        torch.tensor(value, dtype=torch.float32, device=device)
        for value in (1.0, MAX_PRODUCT, E2M1.max_finite)
    )
    usable = _is_usable(tensor_amax)
    if torchao:
        scale = (tensor_amax / product).clamp_min(TORCHAO_MIN_TENSOR_SCALE)
        scale = torch.where(usable, scale, one)
        wanted = ((block_amax / six) / scale).clamp(TORCHAO_MIN_SCALE, E4M3.max_finite)
        scale_bytes = codes.encode(wanted, E4M3)
        factors = (one / scale) / codes.decode(scale_bytes, E4M3)
    else:
        encode = torch.where(usable, (product / tensor_amax).clamp_max(FP32.max_finite), one)
        scale_bytes = codes.encode(block_amax * (encode * (one / six)), E4M3)
        factors = one / (codes.decode(scale_bytes, E4M3) * (one / encode))
    return scale_bytes, factors.clamp_max(FP32.max_finite)


def block_factors(
    scale_bytes: torch.Tensor, tensor_amax: torch.Tensor, torchao: bool
) -> torch.Tensor:
    """What codes are multiplied by, FP32 of the scale bytes' shape; `tensor_amax` as above."""
    multiplier, divisor = _decode_factors(tensor_amax, torchao)
    return (codes.decode(scale_bytes, E4M3) * multiplier) * divisor


def _finite_amaxes(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`block_amaxes`' two, of which a block that is not finite has a NaN, and 0."""
    is_finite = amax.isfinite()
    return torch.where(is_finite, amax, torch.nan), torch.where(is_finite, amax, 0.0)


def _decode_factors(tensor_amax: torch.Tensor, torchao: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two FP32 scalars that a scale is multiplied by, one after the other."""
    one, product = (
        torch.tensor(value, dtype=torch.float32, device=tensor_amax.device)
        for value in (1.0, MAX_PRODUCT)
    )
    usable = _is_usable(tensor_amax)
    if torchao:
        scale = (tensor_amax / product).clamp_min(TORCHAO_MIN_TENSOR_SCALE)
        return torch.where(usable, scale, one), one
    large = tensor_amax > LARGE_AMAX
    multiplier = tensor_amax.clamp_min(MAX_PRODUCT / FP32.max_finite)
    multiplier = torch.where(large, multiplier * DOWN, multiplier)
    divisor = torch.where(large, (one / product) * UP, one / product)
    return torch.where(usable, multiplier, one), torch.where(usable, divisor, one)


def _is_usable(tensor_amax: torch.Tensor) -> torch.Tensor:
    return (tensor_amax > 0) & tensor_amax.isfinite()
