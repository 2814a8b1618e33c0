"""The definition of the plain casts in PyTorch: the oracle and the CPU path.

    cast_       out = stored(float32(x))      to nearest even, or stochastically
    cast_back_  out = round(loaded(codes))    exact up to the rounding to out's dtype

`codes` and `noise` define stored, loaded and what stochastic rounding draws. Everything is
elementwise, so no result depends on how the work is cut. Four-bit codes lie two a byte, the even
element of a row in the low nibble; a row of odd length ends with a high nibble of 0.
"""

from __future__ import annotations

import torch

from ..formats.codes import loaded, stored
from ..formats.noise import noise_bits
from ..formats.table import BITS_PER_BYTE, CASTS
from ..pack.reference import CHUNK_NUMEL


def cast_(
    out: torch.Tensor, x: torch.Tensor, to: str, seed: int | None = None, first_index: int = 0
) -> None:
    """Fill `out` with `x` in the format `to`, stochastically with a `seed`."""
    flat, out_flat = x.reshape(-1), _bytes_of(out).view(-1)
    row, done = odd_row(x.shape, to), 0
    for piece in _pieces(flat.numel(), row):
        values, noise = flat[piece].float(), None
        values = values.view(-1, row) if row else values
        if seed is not None:
            first = first_index + piece.start
            noise = noise_bits(seed, first, values.numel(), x.device).view(values.shape)
        made = stored(values, CASTS[to], noise).view(-1)
        out_flat[done : done + made.numel()] = made
        done += made.numel()


def cast_back_(out: torch.Tensor, codes: torch.Tensor, from_: str) -> None:
    """Fill `out` with the values of `codes`; a byte of four-bit codes has two elements."""
    flat, out_flat, done = _bytes_of(codes).reshape(-1), out.view(-1), 0
    for piece in _pieces(flat.numel(), 0):
        values = loaded(flat[piece], CASTS[from_])
        out_flat[done : done + values.numel()] = values
        done += values.numel()


def has_pairs(name: str) -> bool:
    """Whether two elements of the format called `name` share a byte."""
    return CASTS[name].stored_bits < BITS_PER_BYTE


def odd_row(shape: torch.Size, to: str) -> int:
    """The length of the rows, where they end with half a byte and there are several; or 0."""
    several = len(shape) > 1 and shape[:-1].numel() > 1
    return shape[-1] if several and shape[-1] % 2 and has_pairs(to) else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as the bytes they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _pieces(numel: int, row: int) -> list[slice]:
    """Chunks of whole rows, or of an even number of elements, to keep temporaries in the cache."""
    step = max(1, CHUNK_NUMEL // row) * row if row else CHUNK_NUMEL
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]
