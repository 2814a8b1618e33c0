"""Owns the cases of MXFP8, MXFP4, NVFP4 and the Hadamard transform.

Rivals: torchao's and TransformerEngine's casts where they are installed, the formulas in plain
PyTorch for torch.compile, and for the Hadamard transform a product with its matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...kernels import (
    E2M1,
    E4M3,
    MXFP4,
    MXFP8,
    NVFP4,
    amax_nvfp4,
    dequantize_mx,
    dequantize_nvfp4,
    hadamard16,
    quantize_mx,
    quantize_nvfp4,
)
from ...kernels.mx import reference as reference_mx
from ...kernels.nvfp4 import reference as reference_nvfp4
from . import rivals
from .case import DTYPES, Case, Operands, Run, as_bind
from .matrix import (
    AMAX,
    NOISE,
    ROW_NUMEL,
    SEED,
    STOCHASTIC,
    codes,
    decoded_from,
    matrix,
    matrix_case,
    rows_of,
    source_and,
)

_MX = {form.element.name: form for form in (MXFP8, MXFP4)}
_GROUP = 16
# What is passed to quantize_nvfp4, and to its definition: seed, first index, torchao, hadamard.
_NVFP4: dict[str, tuple[dict[str, Any], tuple[int | None, int, bool, bool]]] = {
    "": ({}, (None, 0, False, False)),
    " hadamard": ({"hadamard": True}, (None, 0, False, True)),
    STOCHASTIC: (NOISE, (SEED, 0, False, False)),
}


def cases() -> Iterator[Case]:
    """All, each for any size."""
    for dtype in DTYPES:
        for element in _MX:
            yield _quantize_mx_case(dtype, element)
            yield _dequantize_mx_case(element, dtype)
        yield _quantize_mx_case(dtype, "e2m1", STOCHASTIC)
        yield _amax_case(dtype)
        for variant in _NVFP4:
            yield _quantize_nvfp4_case(dtype, variant)
        yield _dequantize_nvfp4_case(dtype)
        yield _hadamard_case(dtype)


def _row_bytes(form: Any) -> float:
    """Bytes of an element with its part of the block's scale."""
    return (form.data_bytes(ROW_NUMEL) + form.scale_bytes(ROW_NUMEL)) / ROW_NUMEL


def _plainly_quantized_mx(element: str, operands: Operands) -> Run:
    """A few lines as one would write them, for finite numbers."""
    (x,), (data, scales) = operands.read, operands.written
    scale_bytes = scales.view(torch.uint8)  # the compiler knows no E8M0
    form = _MX[element]

    def run() -> None:
        blocks = x.float().unflatten(-1, (-1, form.block_numel))
        largest = blocks.abs().amax(-1, keepdim=True) / form.element.max_finite
        exponent = largest.log2().ceil().clamp(-127.0, 127.0)
        scaled = (blocks * torch.exp2(-exponent)).view_as(x)
        data.copy_(_plainly_packed_e2m1(scaled) if element == E2M1.name else scaled)
        scale_bytes.copy_(exponent.squeeze(-1) + 127.0)

    return run


def _plainly_quantized_nvfp4(operands: Operands) -> None:
    """A few lines as one would write them, for finite numbers and no block of zeros."""
    (x,), (data, scales), (amax,) = operands.read, operands.written, operands.scalars
    blocks = x.float().unflatten(-1, (-1, _GROUP))
    encode = E4M3.max_finite * E2M1.max_finite / amax
    largest = blocks.abs().amax(-1, keepdim=True) / E2M1.max_finite
    scale = (largest * encode).to(NVFP4.scale_dtype)
    data.copy_(_plainly_packed_e2m1((blocks * (encode / scale.float())).view_as(x)))
    scales.copy_(scale.squeeze(-1))


def _plainly_packed_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Two codes a byte. The steps are 1/2 up to 2, 1 up to 4, and 2 up to 6."""
    size = values.abs()
    upper = torch.where(size < 4.0, size.round() + 2.0, ((size / 2.0).round() + 4.0).clamp_max(7.0))
    code = torch.where(size < 2.0, (size * 2.0).round(), upper) + 8.0 * values.signbit()
    code = code.to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4


def _quantize_mx_case(dtype: str, element: str, variant: str = "") -> Case:
    form, seed = _MX[element], SEED if variant else None
    options: dict[str, Any] = NOISE if variant else {}

    def scales(device: torch.device, numel: int) -> torch.Tensor:
        shape = rows_of(numel), ROW_NUMEL // 32
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(form.scale_dtype)

    def ours(operands: Operands) -> Run:
        (x,), out = operands.read, (operands.written[0], operands.written[1])
        return lambda: quantize_mx(x, element=element, out=out, **options)

    def definition(operands: Operands) -> None:
        data, made = operands.written
        reference_mx.quantize_mx_(data, made, operands.read[0], element, "rceil", seed)

    return matrix_case(
        f"quantize_mx {element} {dtype}{variant}",
        "quantize_mx_",
        format=form.name,
        dtype=dtype,
        moved=DTYPES[dtype].itemsize + _row_bytes(form),
        make=source_and(dtype, lambda device, numel: codes(device, numel, element), scales),
        ours=ours,
        definition=definition,
        rivals={} if variant else rivals.mx(element),
        plain=None if variant else partial(_plainly_quantized_mx, element),
        fp4=form is MXFP4,
        standard=dtype == "bf16",
    )


def _dequantize_mx_case(element: str, dtype: str) -> Case:
    form = _MX[element]

    def ours(operands: Operands) -> Run:
        (data, scales), (out,) = operands.read, operands.written
        return lambda: dequantize_mx(data, scales, element=element, dtype=out.dtype, out=out)

    def definition(operands: Operands) -> None:
        (data, scales), (out,) = operands.read, operands.written
        reference_mx.dequantize_mx_(out, data.view(torch.uint8), scales, element)

    return matrix_case(
        f"dequantize_mx {element} {dtype}",
        "dequantize_mx_",
        format=form.name,
        dtype=dtype,
        moved=_row_bytes(form) + DTYPES[dtype].itemsize,
        make=decoded_from(dtype, lambda x: quantize_mx(x, element=element)),
        ours=ours,
        definition=definition,
        standard=dtype == "bf16",
    )


def _amax_case(dtype: str) -> Case:
    def make(device: torch.device, numel: int) -> Operands:
        made = source_and(dtype)(device, numel)
        return replace(made, scalars=[torch.zeros((), device=device)])

    def ours(operands: Operands) -> Run:
        (x,) = operands.read
        return lambda: amax_nvfp4(x)

    def definition(operands: Operands) -> torch.Tensor:
        (amax,) = operands.scalars
        reference_nvfp4.amax_nvfp4_(amax, operands.read[0])
        return amax

    def norm(operands: Operands) -> Run:
        (x,) = operands.read
        return lambda: torch.linalg.vector_norm(x, float("inf"))

    return matrix_case(
        f"amax_nvfp4 {dtype}",
        "amax_nvfp4_",
        format=NVFP4.name,
        dtype=dtype,
        moved=DTYPES[dtype].itemsize,
        make=make,
        ours=ours,
        definition=definition,
        rivals={"vector_norm": norm},
        plain=norm,
        standard=dtype == "bf16",
    )


def _quantize_nvfp4_case(dtype: str, variant: str) -> Case:
    options, positional = _NVFP4[variant]

    def make(device: torch.device, numel: int) -> Operands:
        made = source_and(dtype, lambda device, numel: codes(device, numel, "e2m1"), _nvfp4_scales)
        return replace(made(device, numel), scalars=[torch.tensor(AMAX, device=device)])

    def ours(operands: Operands) -> Run:
        (x,), (amax,) = operands.read, operands.scalars
        return lambda: quantize_nvfp4(x, global_amax=amax, **options)[:2]

    def definition(operands: Operands) -> None:
        data, made = operands.written
        reference_nvfp4.quantize_nvfp4_(
            data, made, operands.read[0], operands.scalars[0], *positional
        )

    return matrix_case(
        f"quantize_nvfp4 {dtype}{variant}",
        "quantize_nvfp4_",
        format=NVFP4.name,
        dtype=dtype,
        moved=DTYPES[dtype].itemsize + _row_bytes(NVFP4),
        make=make,
        ours=ours,
        definition=definition,
        rivals={} if variant else rivals.nvfp4(),
        plain=None if variant else as_bind(_plainly_quantized_nvfp4),
        standard=dtype == "bf16",
    )


def _nvfp4_scales(device: torch.device, numel: int) -> torch.Tensor:
    shape = rows_of(numel), ROW_NUMEL // _GROUP
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(NVFP4.scale_dtype)


def _dequantize_nvfp4_case(dtype: str) -> Case:
    def make(device: torch.device, numel: int) -> Operands:
        amax = torch.tensor(AMAX, device=device)
        parts = decoded_from(dtype, lambda x: quantize_nvfp4(x, global_amax=amax)[:2])
        return replace(parts(device, numel), scalars=[amax])

    def ours(operands: Operands) -> Run:
        (data, scales), (amax,) = operands.read, operands.scalars
        return lambda: dequantize_nvfp4(data, scales, amax, dtype=DTYPES[dtype])

    def definition(operands: Operands) -> None:
        (data, scales), (amax,) = operands.read, operands.scalars
        reference_nvfp4.dequantize_nvfp4_(operands.written[0], data, scales, amax)

    return matrix_case(
        f"dequantize_nvfp4 {dtype}",
        "dequantize_nvfp4_",
        format=NVFP4.name,
        dtype=dtype,
        moved=_row_bytes(NVFP4) + DTYPES[dtype].itemsize,
        make=make,
        ours=ours,
        definition=definition,
        standard=dtype == "bf16",
    )


def _hadamard_case(dtype: str) -> Case:
    def ours(operands: Operands) -> Run:
        (x,) = operands.read
        return lambda: hadamard16(x)

    def definition(operands: Operands) -> None:
        reference_nvfp4.hadamard16_(operands.written[0], operands.read[0])

    def product(operands: Operands) -> Run:
        (x,), (out,) = operands.read, operands.written
        groups, results = x.view(-1, _GROUP), out.view(-1, _GROUP)
        factor = hadamard16(torch.eye(_GROUP, device=x.device)).to(x.dtype)
        return lambda: torch.mm(groups, factor, out=results)

    return matrix_case(
        f"hadamard16 {dtype}",
        "hadamard16_",
        format=dtype,
        dtype=dtype,
        moved=2 * DTYPES[dtype].itemsize,
        make=source_and(dtype, lambda device, numel: matrix(device, numel, DTYPES[dtype])),
        ours=ours,
        definition=definition,
        rivals={"torch.mm": product},
        standard=dtype == "bf16",
    )
