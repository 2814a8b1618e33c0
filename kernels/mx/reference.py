"""The definition of MXFP8 and MXFP4 in plain PyTorch: the GPU kernels' oracle, the CPU path.

Blocks of 32 consecutive elements of a row share an E8M0 scale, 2^(byte - 127); the last block of a
row may be short. With a the largest magnitude of a block and x an element of it:

    byte    = codes.scale_byte(a, element, rule)
    code    = codes.encode(x * 2^(127 - byte), element), or encode_stochastic of that
    decoded = round(codes.decode(code, element) * 2^(byte - 127))

| rule    | byte - 127                             | saturates | source                    |
|---------|----------------------------------------|-----------|---------------------------|
| rceil   | ceil(log2(a * fp32(1 / max)))          | never     | cuBLAS, TransformerEngine |
| floor   | floor(log2(a)) - emax                  | yes       | OCP MX 1.0, section 6.3   |
| ceil    | ceil(log2(a)) - emax                   | never     | torchao                   |
| even    | floor(log2(a')) - emax, a' being a     | less      | torchao, FBGEMM           |
|         | rounded to the element's mantissa      |           |                           |

all of them held to -127 at least. Scaling is by a power of two and exact; an element so small that
it is not, FP32's subnormals, is far below what the code can tell from zero. Decoding is exact
before the one rounding to the output's dtype; there too large is infinity, as IEEE 754 has it.

NaN and infinity: a block with one has scale byte 255 and decodes to NaNs; the codes in it are those
of NaN, so 0x7F, or 7 for e2m1, which has none. No other block is affected. A block of zeros has
byte 0. Noise is that of an element's index in the whole tensor, `first_index` plus its index here.
"""

from __future__ import annotations

import functools

import torch

from ..formats import swizzle
from ..formats.codes import amax_of, loaded, stored
from ..formats.noise import noise_bits
from ..formats.rows import blocks_of, pieces_of, width_of
from ..formats.table import ELEMENTS, MXFP8, SCALE_RULES, BlockFormat, ElementFormat, ScaleRule
from .codec import factors_of, scales_of

BLOCK_NUMEL = 32

assert MXFP8.block_numel == BLOCK_NUMEL


def elements() -> dict[str, ElementFormat]:
    """What the elements of blocks may be, by name: formats with both zeros, as OCP's are."""
    return {name: element for name, element in ELEMENTS.items() if element.has_negative_zero}


@functools.cache
def form_of(element: ElementFormat) -> BlockFormat:
    """MX with such elements: MXFP8, or what differs from it in them alone."""
    return BlockFormat(
        f"mx_{element.name}", element, BLOCK_NUMEL, MXFP8.scale_dtype, codec=MXFP8.codec
    )


def quantize_mx_(
    data: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    element: str,
    rule: str,
    seed: int | None = None,
    first_index: int = 0,
    swizzled: bool = False,
) -> None:
    """Write the codes and the scales of `x` [..., K]; with a `seed`, rounded stochastically.

    data: the bytes of rows [..., K]. scales: bytes, one a block [..., ceil(K / 32)], or swizzled
    ones, 1-D.
    """
    form, width = form_of(ELEMENTS[element]), width_of(x.shape[-1], BLOCK_NUMEL)
    rows = x.view(-1, width)
    made_data = data.view(torch.uint8).view(len(rows), form.data_bytes(width))
    plain = scales.view(torch.uint8)
    if swizzled:
        plain = plain.new_empty(*x.shape[:-1], form.num_blocks(x.shape[-1]))
    by_row = plain.view(len(rows), form.num_blocks(width))
    for piece in pieces_of(len(rows), width):
        values, noise = rows[piece].float(), None
        if seed is not None:
            first = first_index + piece.start * width
            noise = noise_bits(seed, first, values.numel(), x.device).view(values.shape)
        made_data[piece], by_row[piece] = _quantized_rows(values, form, SCALE_RULES[rule], noise)
    if swizzled:
        scales.view(torch.uint8).copy_(swizzle.swizzle_scales(plain))


def dequantize_mx_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    element: str,
    swizzled: bool = False,
) -> None:
    """Write the values of the codes into `out` [..., K]: the inverse of `quantize_mx_`."""
    form, row_numel = form_of(ELEMENTS[element]), out.shape[-1]
    scale_bytes = scales.view(torch.uint8)
    if swizzled:
        num_rows, num_blocks = out.shape[:-1].numel(), form.num_blocks(row_numel)
        scale_bytes = swizzle.unswizzle_scales(scale_bytes, num_rows, num_blocks)
    width = width_of(row_numel, BLOCK_NUMEL)
    rows = out.view(-1, width)
    scale_bytes = scale_bytes.view(len(rows), form.num_blocks(width))
    data_bytes = data.view(torch.uint8).view(len(rows), form.data_bytes(width))
    for piece in pieces_of(len(rows), width):
        blocks = blocks_of(loaded(data_bytes[piece], form.element, width), BLOCK_NUMEL)
        blocks = blocks * factors_of(scale_bytes[piece]).unsqueeze(-1)
        rows[piece] = blocks.flatten(-2)[:, :width]


def _quantized_rows(
    values: torch.Tensor, form: BlockFormat, rule: ScaleRule, noise: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 [r, K] -> bytes [r, those of a row] of codes, and [r, blocks] of scales."""
    blocks = blocks_of(values, BLOCK_NUMEL)
    multipliers, scale_bytes, _ = scales_of(amax_of(blocks), form, rule)
    scaled = (blocks * multipliers.unsqueeze(-1)).flatten(-2)[:, : values.shape[1]]
    return stored(scaled.contiguous(), form.element, noise), scale_bytes
