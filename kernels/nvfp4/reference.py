"""The definition of NVFP4 in plain PyTorch: the GPU kernels' oracle, and the CPU path.

Blocks of 16 consecutive elements of a row share an E4M3 scale; the tensor has an FP32 amax besides.
`codec` has the formulas, in FP32, every operation rounded, divisions IEEE's. With stochastic
rounding, which concerns the elements alone, noise is that of an element's index in the tensor.

NaN and infinity, by default ("saturate"): a NaN counts as 0 in every amax and gets the code of +6.
An infinity makes its own block's scale 448, itself +-6, and costs the other blocks their share of
the range; it does not reach their values. With "nan" a block that has either, after the transform
if there is one, has scale byte 0x7F and codes of 7 throughout, so that all of it is decoded as NaN;
the tensor's amax, always finite then, leaves the block out, so that no other one changes.

A block too small for a byte has byte 0 and decodes to zeros ("te"; its codes are +-6 then, as f is
FLT_MAX). Decoding never overflows before the last product.

Sources: TransformerEngine, `common/cast/nvfp4/core_nvfp4.cuh` and `dequantize_nvfp4.cuh`; torchao,
`prototype/mx_formats/nvfp4_tensor.py`. The bits are theirs for finite input with A from 1e-34 to
7e35 ("te" beyond that, too, as far as its decoding does not overflow).

The random Hadamard transform of a block, which `hadamard16` makes, and which may come first:

    forward   y = H (s * x) / 4        inverse   x = s * (H y) / 4

H is Sylvester's 16 x 16 matrix, H[i, j] = (-1)^popcount(i & j), and s the fixed signs `SIGNS`; both
directions are orthonormal, so the sum of squares stays. A last block of fewer than 16 elements is
passed through unchanged.

Bits are defined, as the order of additions is. In FP32: multiply by s / 4 (first when forward,
last when inverse); between, four stages for i of 1, 2, 4, 8, each of which makes of every pair of
elements (a, b), i apart, (a + b, a - b). Then round once to the dtype of x.

Signs: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, section 4.2, and the vector in
TransformerEngine, `transformer_engine/jax/quantize/hadamard.py`, so that its tensors and ours meet.
"""

from __future__ import annotations

import torch

from ..formats import swizzle
from ..formats.codes import loaded, stored
from ..formats.noise import noise_bits
from ..formats.rows import blocks_of, pieces_of, width_of
from ..formats.table import E2M1, NVFP4
from .codec import block_amaxes, block_factors, block_scales

BLOCK_NUMEL = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NORM = 0.25  # one over the square root of a block's length

assert NVFP4.block_numel == BLOCK_NUMEL


def amax_nvfp4_(
    amax: torch.Tensor, x: torch.Tensor, hadamard: bool = False, as_nan: bool = False
) -> None:
    """Make the 0-d FP32 `amax` the largest magnitude in `x` [..., K], or in its transform.

    NaNs count as 0, as does an empty tensor, and with `as_nan` a block with one or an infinity.
    """
    amax.zero_()
    width = width_of(x.shape[-1], BLOCK_NUMEL)
    rows = x.view(-1, width)
    for piece in pieces_of(len(rows), width):
        blocks = blocks_of(_values(rows[piece], hadamard), BLOCK_NUMEL)
        amax.copy_(torch.maximum(amax, block_amaxes(blocks, as_nan)[1].max()))


def quantize_nvfp4_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    global_amax: torch.Tensor,
    seed: int | None = None,
    first_index: int = 0,
    torchao: bool = False,
    hadamard: bool = False,
    swizzled: bool = False,
    as_nan: bool = False,
) -> None:
    """`x` [..., K] -> codes, uint8 [..., ceil(K / 2)], and scales, float8_e4m3fn [..., ceil(K/16)].

    All contiguous. With a `seed`, signed, of 64 bits, elements are rounded stochastically;
    first_index: that of the first one in the whole tensor. swizzled: scales as `swizzle` has them.
    as_nan: blocks that are not finite are NaN.
    """
    width = width_of(x.shape[-1], BLOCK_NUMEL)
    rows = x.view(-1, width)
    made_data = data.view(len(rows), NVFP4.data_bytes(width))
    plain = scales.view(torch.uint8)
    if swizzled:
        plain = plain.new_empty(*x.shape[:-1], NVFP4.num_blocks(x.shape[-1]))
    by_row = plain.view(len(rows), NVFP4.num_blocks(width))
    for piece in pieces_of(len(rows), width):
        values, noise = _values(rows[piece], hadamard), None
        if seed is not None:
            first = first_index + piece.start * width
            noise = noise_bits(seed, first, values.numel(), x.device).view(values.shape)
        blocks = blocks_of(values, BLOCK_NUMEL)
        block_amax, _ = block_amaxes(blocks, as_nan)
        by_row[piece], factors = block_scales(block_amax, global_amax, torchao)
        scaled = (blocks * factors.unsqueeze(-1)).flatten(-2)[:, :width]
        made_data[piece] = stored(scaled.contiguous(), E2M1, noise)
    if swizzled:
        scales.view(torch.uint8).copy_(swizzle.swizzle_scales(plain))


def dequantize_nvfp4_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    global_amax: torch.Tensor,
    torchao: bool = False,
    swizzled: bool = False,
) -> None:
    """The inverse of `quantize_nvfp4_`: into `out` [..., K], rounded once more, to its dtype."""
    scale_bytes = scales.view(torch.uint8)
    if swizzled:
        num_rows, num_blocks = out.shape[:-1].numel(), NVFP4.num_blocks(out.shape[-1])
        scale_bytes = swizzle.unswizzle_scales(scale_bytes, num_rows, num_blocks)
    width = width_of(out.shape[-1], BLOCK_NUMEL)
    rows = out.view(-1, width)
    scale_bytes = scale_bytes.view(len(rows), NVFP4.num_blocks(width))
    data = data.view(len(rows), NVFP4.data_bytes(width))
    for piece in pieces_of(len(rows), width):
        blocks = blocks_of(loaded(data[piece], E2M1, width), BLOCK_NUMEL)
        blocks = blocks * block_factors(scale_bytes[piece], global_amax, torchao).unsqueeze(-1)
        rows[piece] = blocks.flatten(-2)[:, :width]


def hadamard16_(out: torch.Tensor, x: torch.Tensor, inverse: bool = False) -> None:
    """Write into `out` the transform of the groups of every row of `x`, along its last dim.

    x, out: [..., K], FP32, BF16 or FP16, contiguous, sharing all memory or none. Infinities and
    NaNs spread within their group alone.
    """
    out.copy_(x)
    whole = x.shape[-1] // BLOCK_NUMEL * BLOCK_NUMEL
    if whole and x.numel():
        groups = x[..., :whole].float().reshape(-1, BLOCK_NUMEL)
        out[..., :whole] = _transform(groups, inverse).view(*x.shape[:-1], whole)


def _transform(groups: torch.Tensor, inverse: bool) -> torch.Tensor:
    """[n, 16] FP32 -> [n, 16] FP32."""
    factors = torch.tensor(SIGNS, dtype=torch.float32, device=groups.device) * NORM
    if not inverse:
        groups = groups * factors
    for apart in (1, 2, 4, 8):
        pairs = groups.view(-1, BLOCK_NUMEL // (2 * apart), 2, apart)
        low, high = pairs.unbind(2)
        groups = torch.stack((low + high, low - high), 2).view(-1, BLOCK_NUMEL)
    return groups * factors if inverse else groups


def _values(rows: torch.Tensor, hadamard: bool) -> torch.Tensor:
    if hadamard:
        transformed = torch.empty_like(rows)
        hadamard16_(transformed, rows)
        rows = transformed
    return rows.float()
