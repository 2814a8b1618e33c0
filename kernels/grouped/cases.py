"""The cases of grouped casts: eight groups, of which two are empty and one has most of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..formats.table import BITS_PER_BYTE, E2M1, E4M3, ELEMENTS, FP8_TENSOR, MXFP4, MXFP8, NVFP4
from ..inputs import NOISE, ROW_NUMEL, STOCHASTIC, made_from, matrix, matrix_numel, matrix_shape
from .op import (
    amax_nvfp4_grouped,
    quantize_fp8_grouped,
    quantize_mx_grouped,
    quantize_nvfp4_grouped,
)
from .reference import scales_numel

_LAYOUT = "scales in 128x4 tiles, a group padded to 128 rows"
_FP8 = Row(
    "quantize_fp8_grouped_", "quantize_fp8_grouped", "fp32, bf16, fp16 -> e4m3, e5m2, e4m3fnuz",
    "source, twice, + 1", "as quantize_fp8 of every group; a scale a group",
    "bit-exact: quantize_fp8 of every group", "as quantize_fp8_", 0.88,
)  # fmt: skip
_MX = Row(
    "quantize_mx_grouped_", "quantize_mx_grouped", "fp32, bf16, fp16 -> mxfp8 (e4m3, e5m2), mxfp4",
    "source + 1 or 0.5 + 1/32", f"as quantize_mx of every group; {_LAYOUT}",
    "bit-exact: quantize_mx of every group", "as quantize_mx_", 0.88,
)  # fmt: skip
_AMAX = Row(
    "amax_nvfp4_grouped_", "amax_nvfp4_grouped", "fp32, bf16, fp16 -> fp32",
    "source", "exact", "bit-exact: amax_nvfp4 of every group", "as amax_nvfp4_", 0.92,
)  # fmt: skip
_NVFP4 = Row(
    "quantize_nvfp4_grouped_", "quantize_nvfp4_grouped",
    "fp32, bf16, fp16 -> nvfp4 (e2m1, e4m3, fp32)",
    "source + 0.5 + 1/16", f"as quantize_nvfp4 of every group, an amax a group; {_LAYOUT}",
    "bit-exact: quantize_nvfp4 of every group", "as quantize_nvfp4_", 0.70,
)  # fmt: skip

# Where groups end, in sixteenths of the rows.
_ENDS = (1, 1, 3, 4, 4, 13, 15, 16)
_AMAXES = 4.0  # what exceeds them saturates
_RECORDED_NUMEL = 2048 * ROW_NUMEL

# Some 130 instructions of a thread find the group.
_GATES = {
    _FP8: {"e4m3 from bf16": Gate(10.0)},
    _MX: {
        "e4m3 from bf16": Gate(12.0),
        "e2m1 from bf16 stochastic": Gate(24.0, 72),
    },
    _AMAX: {"of bf16": Gate(7.0)},
    _NVFP4: {"from bf16 stochastic": Gate(26.0, 104)},
}


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _FP8, _MX, _AMAX, _NVFP4


def cases() -> Iterator[Case]:
    """All."""
    for dtype in DTYPES:
        yield _fp8_case(dtype)
        yield _amax_case(dtype)
        for stochastic in (False, True):
            for element in (E4M3.name, E2M1.name):
                yield _mx_case(dtype, element, stochastic=stochastic)
            yield _nvfp4_case(dtype, stochastic=stochastic)


def _ends(device: torch.device, numel: int) -> torch.Tensor:
    rows = matrix_shape(numel)[0]
    ends = [rows * sixteenths // 16 for sixteenths in _ENDS]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _with_ends(
    dtype: str, make: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
) -> Callable[[torch.device, int], Operands]:
    """What `make` makes of a matrix and the ends of its groups, and these."""

    def operands(device: torch.device, numel: int) -> Operands:
        ends = _ends(device, numel)
        made = made_from(dtype, lambda x: make(x, ends))(device, numel)
        return replace(made, scalars=[ends])

    return operands


def _num_bytes(numel: int, moved: float, block_numel: int) -> int:
    """The matrix at so many bytes an element, and all the memory that scales lie in."""
    num_rows, columns = matrix_shape(numel)
    scales = scales_numel(num_rows, -(-columns // block_numel), len(_ENDS))
    return round(num_rows * columns * moved) + scales


def _noise(stochastic: bool, index: dict[str, Any]) -> dict[str, Any]:
    return (NOISE if stochastic else {}) | index


def _case(row: Row, dtype: str, name: str, **options: Any) -> Case:
    """options: what `Case` has besides."""
    return Case(
        op=row.op,
        name=name,
        dtype=dtype,
        numel=matrix_numel,
        gate=_GATES[row].get(name),
        recorded_numel=_RECORDED_NUMEL,
        standard=dtype == "bf16" and STOCHASTIC not in name,
        **{"copy_share": row.share_of()} | options,
    )


def _fp8_case(dtype: str) -> Case:
    def call(operands: Operands) -> None:
        (x,), (codes, scales), (ends,) = operands.read, operands.written, operands.scalars
        quantize_fp8_grouped(x, ends, out=(codes, scales))

    return _case(
        _FP8,
        dtype,
        f"e4m3 from {dtype}",
        format=FP8_TENSOR.name,
        make=_with_ends(dtype, quantize_fp8_grouped),
        call=call,
        num_bytes=lambda numel: matrix_numel(numel) * (2 * DTYPES[dtype].itemsize + 1),
        passes=2,
        counted=1,
    )


def _mx_case(dtype: str, element: str, *, stochastic: bool) -> Case:
    moved = DTYPES[dtype].itemsize + ELEMENTS[element].stored_bits / BITS_PER_BYTE

    def call(operands: Operands, **index: Any) -> None:
        (x,), (data, scales), (ends,) = operands.read, operands.written, operands.scalars
        noise = _noise(stochastic, index)
        quantize_mx_grouped(x, ends, element=element, out=(data, scales), **noise)

    return _case(
        _MX,
        dtype,
        f"{element} from {dtype}" + STOCHASTIC * stochastic,
        format=(MXFP4 if element == E2M1.name else MXFP8).name,
        make=_with_ends(dtype, lambda x, ends: quantize_mx_grouped(x, ends, element=element)),
        call=call,
        num_bytes=lambda numel: _num_bytes(numel, moved, 32),
        copy_share=_MX.share_of(fp4=element == E2M1.name, stochastic=stochastic),
    )


def _amax_case(dtype: str) -> Case:
    def make(device: torch.device, numel: int) -> Operands:
        ends = _ends(device, numel)
        x = matrix(device, numel, DTYPES[dtype])
        return Operands(read=[x], written=[torch.zeros(len(ends), device=device)], scalars=[ends])

    def call(operands: Operands) -> None:
        amax_nvfp4_grouped(operands.read[0], operands.scalars[0], out=operands.written[0])

    return _case(
        _AMAX,
        dtype,
        f"of {dtype}",
        format=NVFP4.name,
        make=make,
        call=call,
        num_bytes=lambda numel: matrix_numel(numel) * DTYPES[dtype].itemsize,
    )


def _nvfp4_case(dtype: str, *, stochastic: bool) -> Case:
    moved = DTYPES[dtype].itemsize + E2M1.stored_bits / BITS_PER_BYTE

    def make(device: torch.device, numel: int) -> Operands:
        amaxes = torch.full((len(_ENDS),), _AMAXES, device=device)

        def parts(x: torch.Tensor, ends: torch.Tensor) -> Sequence[torch.Tensor]:
            return quantize_nvfp4_grouped(x, ends, amaxes=amaxes)[:2]

        made = _with_ends(dtype, parts)(device, numel)
        return replace(made, scalars=[*made.scalars, amaxes])

    def call(operands: Operands, **index: Any) -> None:
        (x,), out, (ends, amaxes) = operands.read, operands.written, operands.scalars
        noise = _noise(stochastic, index)
        quantize_nvfp4_grouped(x, ends, amaxes=amaxes, out=(out[0], out[1]), **noise)

    return _case(
        _NVFP4,
        dtype,
        f"from {dtype}" + STOCHASTIC * stochastic,
        format=NVFP4.name,
        make=make,
        call=call,
        num_bytes=lambda numel: _num_bytes(numel, moved, 16),
        copy_share=_NVFP4.share_of(stochastic=stochastic),
    )
