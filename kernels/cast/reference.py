"""The definition of the plain casts in PyTorch: the oracle and the CPU path.

    cast_       out = encode(float32(x))      to nearest even, or stochastically
    cast_back_  out = round(decode(codes))    exact up to the rounding to out's dtype

`codes` and `noise` define encode, decode and what stochastic rounding draws. Everything is
elementwise, so no result depends on how the work is cut. e2m1 codes lie two a byte, the even
element of a row in the low nibble; a row of odd length ends with a high nibble of 0.
"""

from __future__ import annotations

import torch

from ..formats import codes as element_codes
from ..formats.noise import noise_bits
from ..formats.table import E2M1, ELEMENT_FORMATS
from ..pack.reference import CHUNK_NUMEL

ELEMENTS = {element.name: element for element in ELEMENT_FORMATS}


def cast_(
    out: torch.Tensor, x: torch.Tensor, to: str, seed: int | None = None, first_index: int = 0
) -> None:
    """Fill `out` with `x` in the format `to`, stochastically with a `seed`."""
    flat, out_flat = x.reshape(-1), _bytes_of(out).view(-1)
    row = odd_row(x.shape) if to == E2M1.name else 0
    for piece in _pieces(flat.numel(), row):
        values = flat[piece].float()
        bits = None
        if seed is not None:
            bits = noise_bits(seed, first_index + piece.start, values.numel(), x.device)
        made = _encoded(values, to, bits)
        start = piece.start
        if to == E2M1.name:
            made = element_codes.pack_nibbles(made.view(-1, row) if row else made).view(-1)
            start = start // row * (row + 1) // 2 if row else start // 2
        out_flat[start : start + made.numel()] = made


def cast_back_(out: torch.Tensor, codes: torch.Tensor, from_: str) -> None:
    """Fill `out` with the values of `codes`; e2m1's bytes have two elements each."""
    flat, out_flat = _bytes_of(codes).reshape(-1), out.view(-1)
    per_code = 2 if from_ == E2M1.name else 1
    for piece in _pieces(flat.numel(), 0):
        part = flat[piece]
        if per_code > 1:
            part = element_codes.unpack_nibbles(part)
        values = element_codes.decode(part, ELEMENTS[from_]) if from_ in ELEMENTS else part.float()
        start = piece.start * per_code
        out_flat[start : start + values.numel()] = values


def odd_row(shape: torch.Size) -> int:
    """The length of the rows, if it is odd and there are several, so that padding shows; or 0."""
    several = len(shape) > 1 and shape[:-1].numel() > 1
    return shape[-1] if several and shape[-1] % 2 else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as the bytes they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _pieces(numel: int, row: int) -> list[slice]:
    """Chunks of whole rows, or of an even number of elements, to keep temporaries in the cache."""
    step = max(1, CHUNK_NUMEL // row) * row if row else CHUNK_NUMEL
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]


def _encoded(values: torch.Tensor, to: str, bits: torch.Tensor | None) -> torch.Tensor:
    if to == "bf16":
        if bits is not None:
            return element_codes.round_bf16_stochastic(values, bits)
        return element_codes.round_bf16(values)
    if to == "fp16":
        return values.to(torch.float16)
    if bits is not None:
        return element_codes.encode_stochastic(values, ELEMENTS[to], bits)
    return element_codes.encode(values, ELEMENTS[to])
