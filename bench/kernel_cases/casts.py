"""Owns the cases of the casts and of FP8 with scales.

Rivals: `Tensor.copy_`, which casts, and torchao's and TransformerEngine's quantisers where they are
installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ...kernels import (
    E2M1,
    E4M3,
    cast,
    cast_back,
    dequantize_fp8,
    quantize_fp8,
    registry,
    update_fp8_scales_,
)
from ...kernels.cast import reference as reference_cast
from ...kernels.fp8 import reference as reference_fp8
from . import rivals
from .case import DTYPES, Case, Operands, Run, as_bind
from .matrix import (
    CODES,
    NOISE,
    ROW_NUMEL,
    SEED,
    STOCHASTIC,
    code_bytes,
    codes,
    decoded_from,
    matrix,
    matrix_case,
    rows_of,
    source_and,
)

# The formats' names, by scaling.
SCALINGS = {scaling: f"fp8_{scaling}" for scaling in ("tensor", "row", "1x128", "128x128")}
HISTORY = 16  # TransformerEngine's default is 1024, of few tensors


def cases() -> Iterator[Case]:
    """All, each for any size."""
    for dtype in DTYPES:
        for to in CODES:
            yield _cast_case(dtype, to, standard=dtype == "bf16" and to != "e5m2")
            yield _noisy_case(dtype, to, standard=dtype == "bf16" and to == "e2m1")
            yield _cast_back_case(to, dtype)
        for scaling in SCALINGS:
            yield _quantize_case(dtype, scaling)
            yield _dequantize_case(scaling, dtype)
        yield _delayed_case(dtype)
    yield _cast_case("fp32", "bf16", standard=False)
    yield _noisy_case("fp32", "bf16", standard=True)
    yield _scales_case()


def _output(to: str) -> Callable[[torch.device, int], torch.Tensor]:
    """Memory for the matrix in the format `to`."""
    if to in CODES:
        return lambda device, numel: codes(device, numel, to)
    return lambda device, numel: matrix(device, numel, DTYPES[to])


def _width(to: str) -> float:
    return code_bytes(to) if to in CODES else DTYPES[to].itemsize


def _copy(operands: Operands) -> Run:
    """What casts without a kernel of one's own."""
    (x,), (out,) = operands.read, operands.written
    return lambda: out.copy_(x)


def _cast_case(dtype: str, to: str, *, standard: bool) -> Case:
    def ours(operands: Operands) -> Run:
        (x,), (out,) = operands.read, operands.written
        return lambda: cast(x, to, out=out)

    def definition(operands: Operands) -> None:
        reference_cast.cast_(operands.written[0], operands.read[0], to)

    return matrix_case(
        f"cast {dtype} -> {to}",
        "cast_",
        format=to,
        dtype=dtype,
        moved=DTYPES[dtype].itemsize + _width(to),
        make=source_and(dtype, _output(to)),
        ours=ours,
        definition=definition,
        rivals={} if to == E2M1.name else {"Tensor.copy_": _copy},
        plain=None if to == E2M1.name else _copy,
        fp4=to == E2M1.name,
        standard=standard,
    )


def _noisy_case(dtype: str, to: str, *, standard: bool) -> Case:
    def ours(operands: Operands) -> Run:
        (x,), (out,) = operands.read, operands.written
        return lambda: cast(x, to, out=out, **NOISE)

    def definition(operands: Operands) -> None:
        reference_cast.cast_(operands.written[0], operands.read[0], to, SEED)

    return matrix_case(
        f"cast {dtype} -> {to}{STOCHASTIC}",
        "cast_",
        format=to,
        dtype=dtype,
        moved=DTYPES[dtype].itemsize + _width(to),
        make=source_and(dtype, _output(to)),
        ours=ours,
        definition=definition,
        standard=standard,
    )


def _cast_back_case(element: str, dtype: str) -> Case:
    def ours(operands: Operands) -> Run:
        (made,), (out,) = operands.read, operands.written
        return lambda: cast_back(made, element, out.dtype, out=out)

    def definition(operands: Operands) -> None:
        reference_cast.cast_back_(operands.written[0], operands.read[0], element)

    return matrix_case(
        f"cast_back {element} -> {dtype}",
        "cast_back_",
        format=element,
        dtype=dtype,
        moved=DTYPES[dtype].itemsize + code_bytes(element),
        make=decoded_from(dtype, lambda x: [cast(x, element)]),
        ours=ours,
        definition=definition,
        rivals={} if element == E2M1.name else {"Tensor.copy_": _copy},
        standard=dtype == "bf16" and element == "e4m3",
    )


def _scale_shape(numel: int, scaling: str) -> torch.Size:
    return reference_fp8.scale_shape(torch.Size((rows_of(numel), ROW_NUMEL)), scaling)


def _scale_bytes(scaling: str) -> Callable[[int], int]:
    return lambda numel: 4 * _scale_shape(numel, scaling).numel()


def _scales(scaling: str) -> Callable[[torch.device, int], torch.Tensor]:
    """Memory for the scales of the matrix."""
    return lambda device, numel: torch.zeros(_scale_shape(numel, scaling), device=device)


def _plainly_quantized(scaling: str, operands: Operands) -> None:
    """The same by torch alone, a few lines as one would write them."""
    (x,), (out, scale_inv) = operands.read, operands.written
    rows = {"tensor": len(x), "128x128": min(128, len(x))}.get(scaling, 1)
    columns = 128 if scaling.endswith("128") else x.shape[1]
    blocks = x.float().view(len(x) // rows, rows, x.shape[1] // columns, columns)
    scale = E4M3.max_finite / blocks.abs().amax((1, 3), keepdim=True)
    out.copy_((blocks * scale).view_as(x))
    scale_inv.copy_(scale.reciprocal().view_as(scale_inv))


def _quantize_case(dtype: str, scaling: str) -> Case:
    # The amax of all must be known before the first code is.
    passes = 2 if scaling == "tensor" else 1

    def ours(operands: Operands) -> Run:
        (x,), out = operands.read, (operands.written[0], operands.written[1])
        return lambda: quantize_fp8(x, scaling=scaling, out=out)

    def definition(operands: Operands) -> None:
        (x,), (made, scales) = operands.read, operands.written
        reference_fp8.quantize_fp8_(made, scales, x, scaling, False, None, None)

    return matrix_case(
        f"quantize_fp8 {scaling} {dtype}",
        "quantize_fp8_",
        format=SCALINGS[scaling],
        dtype=dtype,
        moved=passes * DTYPES[dtype].itemsize + 1,
        scale_bytes=_scale_bytes(scaling),
        make=source_and(dtype, _output("e4m3"), _scales(scaling)),
        ours=ours,
        definition=definition,
        rivals=rivals.fp8(scaling),
        plain=as_bind(partial(_plainly_quantized, scaling)),
        passes=passes,
        standard=dtype == "bf16",
    )


def _delayed_case(dtype: str) -> Case:
    def make(device: torch.device, numel: int) -> Operands:
        made = source_and(dtype, _output("e4m3"))(device, numel)
        return replace(made, scalars=[torch.ones((), device=device) for _ in range(2)])

    def ours(operands: Operands) -> Run:
        (x,), (out,), (scale, inverse) = operands.read, operands.written, operands.scalars
        return lambda: quantize_fp8(x, scale=scale, out=(out, inverse))

    def definition(operands: Operands) -> tuple[torch.Tensor, ...]:
        (x,), (out,), (scale, inverse) = operands.read, operands.written, operands.scalars
        reference_fp8.quantize_fp8_(out, inverse, x, "tensor", False, scale, None)
        return out, inverse

    return matrix_case(
        f"quantize_fp8 delayed {dtype}",
        "quantize_fp8_",
        format="fp8_delayed",
        dtype=dtype,
        moved=DTYPES[dtype].itemsize + 1,
        make=make,
        ours=ours,
        definition=definition,
        standard=dtype == "bf16",
    )


def _dequantize_case(scaling: str, dtype: str) -> Case:
    def ours(operands: Operands) -> Run:
        (made, scales), (out,) = operands.read, operands.written
        return lambda: dequantize_fp8(made, scales, scaling=scaling, dtype=out.dtype, out=out)

    def definition(operands: Operands) -> None:
        (made, scales), (out,) = operands.read, operands.written
        reference_fp8.dequantize_fp8_(out, made, scales, scaling)

    return matrix_case(
        f"dequantize_fp8 {scaling} {dtype}",
        "dequantize_fp8_",
        format=SCALINGS[scaling],
        dtype=dtype,
        moved=1 + DTYPES[dtype].itemsize,
        scale_bytes=_scale_bytes(scaling),
        make=decoded_from(dtype, lambda x: quantize_fp8(x, scaling=scaling)),
        ours=ours,
        definition=definition,
        standard=dtype == "bf16" and scaling == "1x128",
    )


def _scales_case() -> Case:
    def tensors(numel: int) -> int:
        return max(numel // HISTORY, 1)

    def make(device: torch.device, numel: int) -> Operands:
        history = torch.rand(tensors(numel), HISTORY, device=device)
        return Operands(updated=[history], scalars=[torch.ones(len(history), device=device)])

    def ours(operands: Operands) -> Run:
        (history,), (scales,) = operands.updated, operands.scalars

        def run() -> tuple[torch.Tensor, ...]:
            update_fp8_scales_(history, scales)
            return history, scales

        return run

    def definition(operands: Operands) -> tuple[torch.Tensor, ...]:
        (history,), (scales,) = operands.updated, operands.scalars
        reference_fp8.update_fp8_scales_(history, scales, "e4m3", 0, "max")
        return history, scales

    return Case(
        name=f"update_fp8_scales of {HISTORY}",
        op="update_fp8_scales_",
        format="fp8_delayed",
        dtype="fp32",
        numel=lambda numel: tensors(numel) * HISTORY,
        num_bytes=lambda numel: tensors(numel) * HISTORY * 8,
        make=make,
        ours=ours,
        definition=definition,
        target=registry.target_share("update_fp8_scales_"),
    )
