"""Owns what the cases on a matrix share: casts, block formats and the Hadamard transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...kernels import E2M1, E4M3, E5M2, registry
from .case import DTYPES, Bind, Case, Operands

ROW_NUMEL = 4096
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 1}
SEED: int = NOISE["seed"]
STOCHASTIC = " SR"
# What a matrix is quantised with where the amax is given; normal numbers stay below it.
AMAX = 8.0
# Elements of a row and the dtype of their codes.
CODES: Mapping[str, tuple[int, torch.dtype]] = {
    E4M3.name: (ROW_NUMEL, E4M3.dtype),
    E5M2.name: (ROW_NUMEL, E5M2.dtype),
    E2M1.name: (ROW_NUMEL // 2, E2M1.dtype),
}
_BLOCK_ROWS = 128  # so that 128 x 128 blocks are whole


def rows_of(numel: int) -> int:
    """Rows of the matrix of about `numel` elements."""
    if numel >= _BLOCK_ROWS * ROW_NUMEL:
        return numel // ROW_NUMEL // _BLOCK_ROWS * _BLOCK_ROWS
    return max(numel // ROW_NUMEL, 1)


def matrix_numel(numel: int) -> int:
    """Elements of the matrix of about `numel` elements."""
    return rows_of(numel) * ROW_NUMEL


def matrix(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(rows_of(numel), ROW_NUMEL, device=device).to(dtype)


def codes(device: torch.device, numel: int, element: str) -> torch.Tensor:
    """Memory for the codes of the matrix."""
    columns, dtype = CODES[element]
    return torch.zeros(rows_of(numel), columns, dtype=torch.uint8, device=device).view(dtype)


def code_bytes(element: str) -> float:
    """Bytes of one code."""
    return CODES[element][0] * CODES[element][1].itemsize / ROW_NUMEL


def matrix_case(
    name: str,
    op: str,
    *,
    format: str,
    dtype: str,
    moved: float,
    scale_bytes: Callable[[int], int] | None = None,
    make: Callable[[torch.device, int], Operands],
    ours: Bind,
    definition: Callable[[Operands], object],
    rivals: Mapping[str, Bind] | None = None,
    plain: Bind | None = None,
    passes: int = 1,
    fp4: bool = False,
    standard: bool,
) -> Case:
    """A case on the matrix. moved: bytes an element, all passes together; scale_bytes: besides, of
    all scales, where a block is none of a row."""

    def num_bytes(numel: int) -> int:
        scales = 0 if scale_bytes is None else scale_bytes(numel)
        return round(matrix_numel(numel) * moved) + scales

    return Case(
        name=name,
        op=op,
        format=format,
        dtype=dtype,
        numel=matrix_numel,
        num_bytes=num_bytes,
        make=make,
        ours=ours,
        definition=definition,
        rivals=rivals or {},
        plain=plain,
        passes=passes,
        target=registry.target_share(op, fp4=fp4, stochastic=name.endswith(STOCHASTIC)),
        standard=standard,
    )


def source_and(
    dtype: str, *outputs: Callable[[torch.device, int], torch.Tensor]
) -> Callable[[torch.device, int], Operands]:
    """Makes the matrix to read, and what `outputs` make to be written."""

    def make(device: torch.device, numel: int) -> Operands:
        return Operands(
            read=[matrix(device, numel, DTYPES[dtype])],
            written=[output(device, numel) for output in outputs],
        )

    return make


def decoded_from(
    dtype: str, quantize: Callable[[torch.Tensor], Sequence[torch.Tensor]]
) -> Callable[[torch.device, int], Operands]:
    """Makes the parts of a quantised matrix to read, and a matrix to be written."""

    def make(device: torch.device, numel: int) -> Operands:
        wide = matrix(device, numel, torch.bfloat16)
        return Operands(
            read=list(quantize(wide)),
            written=[torch.zeros(wide.shape, dtype=DTYPES[dtype], device=device)],
        )

    return make
