"""The definition of NVFP4 in plain PyTorch: the GPU kernels' oracle, and the CPU path.

Blocks of 16 consecutive elements of a row share an E4M3 scale; the tensor has an FP32 amax besides.
Everything in FP32, every operation rounded, divisions IEEE's. A is the amax of the tensor, a that
of a block, x an element:

| step     | variant "te"                             | variant "torchao"                      |
|----------|------------------------------------------|----------------------------------------|
| tensor   | E = min(2688 / A, FLT_MAX); D = 1 / E    | P = max(A / 2688, 2^-126)              |
| block    | s = E4M3(a * (E * (1/6)))                | s = E4M3(clamp((a / 6) / P, 2^-6, 448))|
| factor   | f = min(1 / (s * D), FLT_MAX)            | f = min((1 / P) / s, FLT_MAX)          |
| code     | E2M1(x * f)                              | E2M1(x * f)                            |
| decoded  | code * ((s * A) * (1/2688))              | code * (s * P)                         |

2688 is 448 * 6, the largest scale times the largest element. E4M3 and E2M1 are `codes.encode`'s;
with stochastic rounding, which concerns the elements alone, `codes.encode_stochastic` of the noise
of an element's index in the tensor.

NaN and infinity: a NaN counts as 0 in every amax and gets the code of +6. Where A is not a positive
finite number, E, D and P are 1. So an infinity makes its own block's scale 448, itself +-6, and
costs the other blocks their share of the range; it does not reach their values. A block too small
for a byte has byte 0 and decodes to zeros ("te"; its codes are +-6 then, as f is FLT_MAX). Decoding
takes A below 2688 / FLT_MAX for that, as E does, and never overflows before the last product.

Sources: TransformerEngine, `common/cast/nvfp4/core_nvfp4.cuh` and `dequantize_nvfp4.cuh`; torchao,
`prototype/mx_formats/nvfp4_tensor.py`. The bits are theirs for finite input with A from 1e-34 to
7e35 ("te" beyond that, too, as far as its decoding does not overflow).

The random Hadamard transform of a block, which `hadamard16` makes, and which may come first:

    forward   y = H (s * x) / 4        inverse   x = s * (H y) / 4

H is Sylvester's 16 x 16 matrix, H[i, j] = (-1)^popcount(i & j), and s the fixed signs `SIGNS`; both
directions are orthonormal, so the sum of squares stays. Blocks are those of the scales; a
last one of fewer than 16 elements is passed through unchanged.

Bits are defined, as the order of additions is. In FP32: multiply by s / 4 (first when forward,
last when inverse); between, four stages for i of 1, 2, 4, 8, each of which makes of every pair of
elements (a, b), i apart, (a + b, a - b). Then round once to the dtype of x.

Signs: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, section 4.2, and the vector in
TransformerEngine, `transformer_engine/jax/quantize/hadamard.py`, so that its tensors and ours meet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from ..formats import codes, swizzle
from ..formats.noise import noise_bits
from ..formats.table import E2M1, E4M3, FP32, NVFP4

BLOCK_NUMEL = 16
MAX_PRODUCT = E4M3.max_finite * E2M1.max_finite
TORCHAO_MIN_SCALE = E4M3.min_normal
TORCHAO_MIN_TENSOR_SCALE = 2.0**-126
# Above it, decoding works on A * 2^-12: the same bits, without overflow of 448 * A.
LARGE_AMAX = 2.0**100
DOWN, UP = 2.0**-12, 2.0**12
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NORM = 0.25  # one over the square root of a block's length

assert NVFP4.block_numel == BLOCK_NUMEL

# Rows are worked on in pieces, as the conversions need some ten times an element's bytes.
_CHUNK_NUMEL = 128 * 1024


def amax_nvfp4_(amax: torch.Tensor, x: torch.Tensor, hadamard: bool = False) -> None:
    """Make the 0-d FP32 `amax` the largest magnitude in `x` [..., K], or in its transform.

    NaNs count as 0, as does an empty tensor.
    """
    amax.zero_()
    for _, piece in _pieces(_rows(x)):
        amax.copy_(torch.maximum(amax, magnitudes(_values(piece, hadamard)).max()))


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
) -> None:
    """`x` [..., K] -> codes, uint8 [..., ceil(K / 2)], and scales, float8_e4m3fn [..., ceil(K/16)].

    All contiguous. With a `seed`, signed, of 64 bits, elements are rounded stochastically;
    first_index: that of the first one in the whole tensor. swizzled: scales as `swizzle` has them.
    """
    flat_data, done = data.view(-1), 0
    row_blocks = -(-x.shape[-1] // BLOCK_NUMEL)
    scale_bytes = torch.zeros(x.shape[:-1].numel() * row_blocks, dtype=torch.uint8, device=x.device)
    scales_done = 0
    for start, piece in _pieces(_rows(x)):
        values = _values(piece, hadamard)
        noise = None
        if seed is not None:
            noise = noise_bits(seed, first_index + start, values.numel(), x.device)
        codes_made, scales_made = quantize_piece(values, global_amax, noise, torchao)
        flat_data[done : done + codes_made.numel()] = codes_made.view(-1)
        scale_bytes[scales_done : scales_done + scales_made.numel()] = scales_made.view(-1)
        done += codes_made.numel()
        scales_done += scales_made.numel()
    if swizzled:
        scale_bytes = swizzle.swizzle_scales(scale_bytes.view(x.shape[:-1].numel(), row_blocks))
    scales.view(torch.uint8).view(-1).copy_(scale_bytes)


def dequantize_nvfp4_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    global_amax: torch.Tensor,
    torchao: bool = False,
    swizzled: bool = False,
) -> None:
    """The inverse of `quantize_nvfp4_`: into `out` [..., K], rounded once more, to its dtype."""
    row_numel, row_blocks = out.shape[-1], -(-out.shape[-1] // BLOCK_NUMEL)
    if swizzled:
        scales = swizzle.unswizzle_scales(scales, out.shape[:-1].numel(), row_blocks)
    scale_bytes = scales.view(torch.uint8).view(*out.shape[:-1], row_blocks)
    values = codes.decode(codes.unpack_nibbles(data, row_numel), E2M1)
    multiplier, divisor = _decode_factors(global_amax, torchao)
    factors = (codes.decode(scale_bytes, E4M3) * multiplier) * divisor
    blocks = pad(values, (0, -row_numel % BLOCK_NUMEL)).unflatten(-1, (row_blocks, BLOCK_NUMEL))
    out.copy_((blocks * factors.unsqueeze(-1)).flatten(-2)[..., :row_numel])


def hadamard16_(out: torch.Tensor, x: torch.Tensor, inverse: bool = False) -> None:
    """Write into `out` the transform of the groups of every row of `x`, along its last dim.

    x, out: [..., K], FP32, BF16 or FP16, contiguous, sharing no memory. Infinities and NaNs spread
    within their group alone.
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


def quantize_piece(
    values: torch.Tensor, global_amax: torch.Tensor, noise: torch.Tensor | None, torchao: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 [r, k] -> bytes of codes [r, ceil(k / 2)], and of scales [r, ceil(k / 16)].

    global_amax: 0-d, or [r, 1], one for each row.
    """
    missing = -values.shape[-1] % BLOCK_NUMEL
    blocks = pad(values, (0, missing)).unflatten(-1, (-1, BLOCK_NUMEL))
    scale_bytes, factors = _block_scales(magnitudes(blocks).amax(-1), global_amax, torchao)
    scaled = (blocks * factors.unsqueeze(-1)).flatten(-2)[..., : values.shape[-1]]
    if noise is None:
        made = codes.encode(scaled.contiguous(), E2M1)
    else:
        made = codes.encode_stochastic(scaled.contiguous(), E2M1, noise.view(values.shape))
    return codes.pack_nibbles(made), scale_bytes


def _block_scales(
    block_amax: torch.Tensor, global_amax: torch.Tensor, torchao: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and the factors that elements are multiplied by, of `block_amax`'s shape."""
    device = block_amax.device
    one, product, six = (
        torch.tensor(value, dtype=torch.float32, device=device)
        for value in (1.0, MAX_PRODUCT, E2M1.max_finite)
    )
    usable = _is_usable(global_amax)
    if torchao:
        scale = (global_amax / product).clamp_min(TORCHAO_MIN_TENSOR_SCALE)
        scale = torch.where(usable, scale, one)
        wanted = ((block_amax / six) / scale).clamp(TORCHAO_MIN_SCALE, E4M3.max_finite)
        scale_bytes = codes.encode(wanted, E4M3)
        factors = (one / scale) / codes.decode(scale_bytes, E4M3)
    else:
        encode = torch.where(usable, (product / global_amax).clamp_max(FP32.max_finite), one)
        scale_bytes = codes.encode(block_amax * (encode * (one / six)), E4M3)
        factors = one / (codes.decode(scale_bytes, E4M3) * (one / encode))
    return scale_bytes, factors.clamp_max(FP32.max_finite)


def _decode_factors(global_amax: torch.Tensor, torchao: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two FP32 scalars that a scale is multiplied by, one after the other."""
    one, product = (
        torch.tensor(value, dtype=torch.float32, device=global_amax.device)
        for value in (1.0, MAX_PRODUCT)
    )
    usable = _is_usable(global_amax)
    if torchao:
        scale = (global_amax / product).clamp_min(TORCHAO_MIN_TENSOR_SCALE)
        return torch.where(usable, scale, one), one
    large = global_amax > LARGE_AMAX
    multiplier = global_amax.clamp_min(MAX_PRODUCT / FP32.max_finite)
    multiplier = torch.where(large, multiplier * DOWN, multiplier)
    divisor = torch.where(large, (one / product) * UP, one / product)
    return torch.where(usable, multiplier, one), torch.where(usable, divisor, one)


def _is_usable(global_amax: torch.Tensor) -> torch.Tensor:
    return (global_amax > 0) & global_amax.isfinite()


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """|values|, 0 for a NaN."""
    return values.abs().masked_fill_(values.isnan(), 0.0)


def _values(piece: torch.Tensor, hadamard: bool) -> torch.Tensor:
    if hadamard:
        transformed = torch.empty_like(piece)
        hadamard16_(transformed, piece)
        piece = transformed
    return piece.float()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as [rows, K]; as one row where that cuts it into the same blocks."""
    if x.shape[-1] % BLOCK_NUMEL == 0:
        return x.reshape(1, -1)
    return x.reshape(-1, x.shape[-1])


def _pieces(rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of whole blocks, each a run of elements, with the index of its first element."""
    if rows.numel() == 0:
        return
    row_numel = rows.shape[1]
    if len(rows) == 1:
        for start in range(0, row_numel, _CHUNK_NUMEL):
            yield start, rows[:, start : start + _CHUNK_NUMEL]
    else:
        step = max(1, _CHUNK_NUMEL // row_numel)
        for row in range(0, len(rows), step):
            yield row * row_numel, rows[row : row + step]
