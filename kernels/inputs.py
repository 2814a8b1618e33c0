"""The tensors that cases are about: those of a transformer block, and a matrix with long rows.

Their memory is aligned, as is that of trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .case import DTYPES, RECORDED_NUMEL, Operands
from .formats.table import ALIGN_NUMEL

# Meta, Llama 3 8B: hidden size 4096, 8 key/value heads of 128, intermediate size 14336.
_SQUARE, _GROUPED, _WIDE = (4096, 4096), (1024, 4096), (14336, 4096)
LLAMA_BLOCK: tuple[tuple[int, ...], ...] = (
    *(_SQUARE, _GROUPED, _GROUPED, _SQUARE),
    *(_WIDE, _WIDE, _WIDE[::-1]),
    *((4096,), (4096,)),
)
_DIM_MULTIPLE = 8

ROW_NUMEL = 4096
SQUARE_ROWS = 128
"""Larger matrices have a multiple of so many rows, so that blocks of 128 x 128 are whole."""
SHORT_ROWS = 3
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 0x5EED_0000_0001}
"""Seeds of users have more than 32 bits, which costs registers."""
STOCHASTIC = " stochastic"


def block_shapes(numel: int) -> tuple[tuple[int, ...], ...]:
    """The tensors of a Llama 3 8B block, made narrower so that they have about `numel` elements.

    One tensor where that would leave fragments of tiles.
    """
    if numel <= RECORDED_NUMEL:
        return ((numel,),)
    whole = sum(torch.Size(shape).numel() for shape in LLAMA_BLOCK)
    factor = (numel / whole) ** 0.5
    return tuple(
        tuple(max(1, round(size * factor / _DIM_MULTIPLE)) * _DIM_MULTIPLE for size in shape)
        for shape in LLAMA_BLOCK
    )


def block_numel(numel: int) -> int:
    """The elements of all of `block_shapes(numel)`."""
    return sum(torch.Size(shape).numel() for shape in block_shapes(numel))


def block(device: torch.device, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Normal numbers in those shapes."""
    return [torch.randn(shape, device=device).to(dtype) for shape in block_shapes(numel)]


def offsets_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where aligned tensors lie one after the other, and where the last one ends."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() // ALIGN_NUMEL) * ALIGN_NUMEL
    return offsets, end


def matrix_shape(numel: int, columns: int = ROW_NUMEL) -> tuple[int, int]:
    """Of the matrix of about `numel` elements; less than a row of `columns` are a few short ones,
    which no block divides.
    """
    if numel < columns:
        return SHORT_ROWS, max(1, numel // SHORT_ROWS)
    found = numel // columns
    return found // SQUARE_ROWS * SQUARE_ROWS if found >= SQUARE_ROWS else found, columns


def matrix_numel(numel: int, columns: int = ROW_NUMEL) -> int:
    """Elements of the matrix of about `numel` elements."""
    return math.prod(matrix_shape(numel, columns))


def matrix(
    device: torch.device, numel: int, dtype: torch.dtype, columns: int = ROW_NUMEL
) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(matrix_shape(numel, columns), device=device).to(dtype)


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros to be written, of any dtype."""
    made = torch.empty_like(tensor)
    made.view(-1).view(torch.uint8).zero_()
    return made


def made_from(
    dtype: str, make: Callable[[torch.Tensor], Sequence[torch.Tensor]], columns: int = ROW_NUMEL
) -> Callable[[torch.device, int], Operands]:
    """Makes the matrix to read, and memory for all that `make` returns of it."""

    def operands(device: torch.device, numel: int) -> Operands:
        x = matrix(device, numel, DTYPES[dtype], columns)
        return Operands(read=[x], written=[zeros_like(one) for one in make(x)])

    return operands


def decoded_from(
    dtype: str, make: Callable[[torch.Tensor], Sequence[torch.Tensor]], columns: int = ROW_NUMEL
) -> Callable[[torch.device, int], Operands]:
    """Makes what `make` returns of a matrix to read, and a matrix to be written."""

    def operands(device: torch.device, numel: int) -> Operands:
        wide = matrix(device, numel, torch.bfloat16, columns)
        out = torch.zeros(wide.shape, dtype=DTYPES[dtype], device=device)
        return Operands(read=make(wide), written=[out])

    return operands
