"""Owns the definition of MXFP8 and MXFP4 in plain PyTorch: the GPU kernels' oracle, the CPU path.

Blocks of 32 consecutive elements of a row share an E8M0 scale, 2^(byte - 127); the last block of a
row may be short. With a the largest magnitude of a block and x an element of it:

    byte    = codes.SCALE_RULES[rule](a, element)
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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import pad

from ..formats import codes, swizzle
from ..formats.noise import noise_bits
from ..formats.table import E2M1, E4M3, E5M2, MXFP8, SCALE_RULES, ElementFormat

BLOCK_NUMEL = 32
ELEMENTS: Mapping[str, ElementFormat] = MappingProxyType(
    {element.name: element for element in (E4M3, E5M2, E2M1)}
)

assert MXFP8.block_numel == BLOCK_NUMEL

# Conversions need some ten times an element's bytes, so rows are worked on in pieces.
_CHUNK_NUMEL = 128 * 1024


@dataclass(frozen=True, slots=True)
class MxCast:
    """How elements become codes: the element's format, the rule of the scales, the rounding.

    seed: rounds stochastically; without one, to nearest even.
    """

    element: str
    rule: str = "rceil"
    seed: int | None = None
    first_index: int = 0
    swizzled: bool = False

    def __post_init__(self) -> None:
        check_element(self.element)
        if self.rule not in SCALE_RULES:
            known = ", ".join(SCALE_RULES)
            raise ValueError(f"rule: expected one of {known}, got {self.rule!r}; choose one")
        if self.first_index < 0:
            raise ValueError(
                f"first_index: expected 0 or more, got {self.first_index}; pass the index of the "
                "first element in the whole tensor"
            )


def check_element(name: str) -> None:
    """Raise `ValueError` unless `name` is in `ELEMENTS`."""
    if name not in ELEMENTS:
        raise ValueError(f"element: expected one of {', '.join(ELEMENTS)}, got {name!r}")


def row_bytes(row_numel: int, element: ElementFormat) -> int:
    """Bytes of the codes of a row: of e2m1's, the last high nibble may be nobody's, and 0."""
    return -(-row_numel * element.bits // 8)


def row_blocks(row_numel: int) -> int:
    """Blocks, and so scales, of a row."""
    return -(-row_numel // BLOCK_NUMEL)


def quantize_mx_(data: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, *options: Any) -> None:
    """Write the codes and the scales of `x` [..., K]; `options` are those of `MxCast`.

    data: bytes [..., row_bytes(K)]. scales: bytes [..., row_blocks(K)], or swizzled ones, 1-D.
    """
    cast = MxCast(*options)
    element = ELEMENTS[cast.element]
    width = _width(x.shape[-1])
    rows = x.view(-1, width)
    made_data = data.view(torch.uint8).view(len(rows), row_bytes(width, element))
    made_scales = scales.view(torch.uint8)
    plain = made_scales
    if cast.swizzled:
        plain = plain.new_empty(*x.shape[:-1], row_blocks(x.shape[-1]))
    by_row = plain.view(len(rows), row_blocks(width))
    for piece in _pieces(len(rows), width):
        first = cast.first_index + piece.start * width
        _quantize_rows_(made_data[piece], by_row[piece], rows[piece].float(), cast, first)
    if cast.swizzled:
        made_scales.copy_(swizzle.swizzle_scales(plain))


def dequantize_mx_(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    element: str,
    swizzled: bool = False,
) -> None:
    """Write the values of the codes into `out` [..., K]: the inverse of `quantize_mx_`."""
    row_numel = out.shape[-1]
    scale_bytes = scales.view(torch.uint8)
    if swizzled:
        num_rows = out.shape[:-1].numel()
        scale_bytes = swizzle.unswizzle_scales(scale_bytes, num_rows, row_blocks(row_numel))
    width = _width(row_numel)
    rows = out.view(-1, width)
    scale_bytes = scale_bytes.view(len(rows), row_blocks(width))
    data_bytes = data.view(torch.uint8).view(len(rows), row_bytes(width, ELEMENTS[element]))
    for piece in _pieces(len(rows), width):
        made = data_bytes[piece]
        if element == E2M1.name:
            made = codes.unpack_nibbles(made, width)
        blocks = _blocks(codes.decode(made, ELEMENTS[element]))
        blocks = blocks * codes.e8m0_to_fp32(scale_bytes[piece]).unsqueeze(-1)
        rows[piece] = blocks.flatten(-2)[:, :width]


def _quantize_rows_(
    data: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, cast: MxCast, first_index: int
) -> None:
    """FP32 `values` [r, K] -> bytes in `data` [r, row_bytes(K)] and `scales` [r, row_blocks(K)]."""
    element = ELEMENTS[cast.element]
    blocks = _blocks(values)
    # As integers, NaNs are above infinity, and the largest one's sign cannot come out set.
    amax = blocks.abs().view(torch.int32).amax(-1).view(torch.float32)
    scale_bytes = codes.scale_byte(amax, element, SCALE_RULES[cast.rule])
    scaled = blocks * codes.reciprocal_e8m0(scale_bytes).unsqueeze(-1)
    scaled = scaled.flatten(-2)[:, : values.shape[1]].contiguous()
    if cast.seed is None:
        made = codes.encode(scaled, element)
    else:
        noise = noise_bits(cast.seed, first_index, values.numel(), values.device)
        made = codes.encode_stochastic(scaled, element, noise.view(values.shape))
    data.copy_(codes.pack_nibbles(made) if element is E2M1 else made)
    scales.copy_(scale_bytes)


def _width(row_numel: int) -> int:
    """The length of rows to work on: whole blocks are rows of their own, so no row is too long."""
    return row_numel if row_numel % BLOCK_NUMEL else BLOCK_NUMEL


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[r, K] -> [r, blocks, 32], zeros for the elements that a short block lacks."""
    return pad(rows, (0, -rows.shape[1] % BLOCK_NUMEL)).unflatten(-1, (-1, BLOCK_NUMEL))


def _pieces(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_NUMEL * torch.get_num_threads() // width)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
