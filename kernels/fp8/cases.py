"""The cases of FP8 with scales: `quantize_fp8_`, `dequantize_fp8_`, `update_fp8_scales_`.

Rows have 4096 elements where the name does not tell of others: short ones lie several in a program,
long ones take more warps, and uneven ones end in a short block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..inputs import ROW_NUMEL, SQUARE_ROWS, decoded_from, made_from, matrix_numel, matrix_shape
from .op import dequantize_fp8, quantize_fp8, update_fp8_scales_
from .reference import scale_shape

_QUANTIZE = Row(
    "quantize_fp8_", "quantize_fp8",
    "fp32, bf16, fp16 -> e4m3, e5m2, e4m3fnuz; scaling tensor, row, 1x128, 128x128, delayed",
    "source (twice: tensor, rows above 16384) + 1 + 4 / block",
    "nearest even, saturating; scale = max / amax, IEEE division; powers of two on request",
    "bit-exact: torchao (tensor, row), golden vectors",
    "TransformerEngine; DeepSeek-V3 3.3.2", 0.88,
)  # fmt: skip
_DEQUANTIZE = Row(
    "dequantize_fp8_", "dequantize_fp8", "e4m3, e5m2, e4m3fnuz -> fp32, bf16, fp16",
    "1 + 4 / block + result", "nearest even, once", "bit-exact: `fp8.reference`",
    "as quantize_fp8_", 0.88,
)  # fmt: skip
_UPDATE = Row(
    "update_fp8_scales_", "update_fp8_scales_", "fp32 history -> fp32 scales",
    "8 a history entry", "IEEE division", "bit-exact: `fp8.reference`, golden vectors",
    "TransformerEngine, delayed scaling", None,
)  # fmt: skip

SCALINGS = ("tensor", "row", "1x128", "128x128")
HISTORY = 16  # TransformerEngine's default is 1024, of few tensors
# What comes before the scaling in a case's name, and the elements of a row.
_SHORT, _UNEVEN, _LONG = ("short ", 496), ("uneven ", 4080), ("long ", 16384)
_USUAL = ("", ROW_NUMEL)

# The tensor's are those of the second pass, which makes the codes.
_QUANTIZE_GATES = {
    "tensor from bf16": Gate(7.0),
    "row from bf16": Gate(10.0),
    "short row from bf16": Gate(10.0),
    "long row from bf16": Gate(10.0),
    "1x128 from bf16": Gate(10.0),
    "uneven 1x128 from bf16": Gate(14.0),
    "128x128 from bf16": Gate(10.0, 128),
    "delayed from bf16": Gate(14.0),
}
_DEQUANTIZE_GATES = {
    "tensor to bf16": Gate(14.0),
    "row to bf16": Gate(14.0),
    "short row to bf16": Gate(14.0),
    "1x128 to bf16": Gate(14.0),
    "128x128 to bf16": Gate(14.5),
    "uneven 128x128 to bf16": Gate(14.5),
}


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _QUANTIZE, _DEQUANTIZE, _UPDATE


def cases() -> Iterator[Case]:
    """All."""
    for dtype in DTYPES:
        for scaling in SCALINGS:
            yield _quantize_case(dtype, scaling)
            yield _dequantize_case(scaling, dtype)
        yield _delayed_case(dtype)
    for scaling, shape in (("row", _SHORT), ("row", _LONG), ("1x128", _UNEVEN)):
        yield _quantize_case("bf16", scaling, shape)
    for scaling, shape in (("row", _SHORT), ("128x128", _UNEVEN)):
        yield _dequantize_case(scaling, "bf16", shape)
    yield _scales_case()


def _scale_bytes(numel: int, columns: int, scaling: str) -> int:
    shape = torch.Size(matrix_shape(numel, columns))
    return torch.float32.itemsize * scale_shape(shape, scaling).numel()


def _recorded_numel(scaling: str, columns: int) -> int:
    """Whole blocks, of few rows where rows are all there is."""
    num_rows = SQUARE_ROWS if scaling == "128x128" else 16
    return num_rows * max(columns, ROW_NUMEL)


def _quantize_case(dtype: str, scaling: str, shape: tuple[str, int] = _USUAL) -> Case:
    kind, columns = shape
    name = f"{kind}{scaling} from {dtype}"
    # The amax of all must be known before the first code is.
    passes = 2 if scaling == "tensor" else 1

    def num_bytes(numel: int) -> int:
        codes = matrix_numel(numel, columns) * (passes * DTYPES[dtype].itemsize + 1)
        return codes + _scale_bytes(numel, columns, scaling)

    def call(operands: Operands) -> None:
        (x,), (codes, scales) = operands.read, operands.written
        quantize_fp8(x, scaling=scaling, out=(codes, scales))

    return Case(
        op="quantize_fp8_",
        name=name,
        format=f"fp8_{scaling}",
        dtype=dtype,
        make=made_from(dtype, lambda x: quantize_fp8(x, scaling=scaling), columns),
        call=call,
        numel=lambda numel: matrix_numel(numel, columns),
        num_bytes=num_bytes,
        passes=passes,
        gate=_QUANTIZE_GATES.get(name),
        counted=passes - 1,
        recorded_numel=_recorded_numel(scaling, columns),
        copy_share=_QUANTIZE.share_of(),
        standard=dtype == "bf16" and shape == _USUAL,
    )


def _delayed_case(dtype: str) -> Case:
    name = f"delayed from {dtype}"

    def make(device: torch.device, numel: int) -> Operands:
        made = made_from(dtype, lambda x: quantize_fp8(x)[:1])(device, numel)
        return replace(made, scalars=[torch.ones((), device=device) for _ in range(3)])

    def call(operands: Operands) -> tuple[torch.Tensor, ...]:
        (x,), (codes,) = operands.read, operands.written
        scale, inverse, amax = operands.scalars
        quantize_fp8(x, scale=scale, amax=amax, out=(codes, inverse))
        return codes, inverse, amax

    return Case(
        op="quantize_fp8_",
        name=name,
        format="fp8_delayed",
        dtype=dtype,
        make=make,
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: matrix_numel(numel) * (DTYPES[dtype].itemsize + 1),
        gate=_QUANTIZE_GATES.get(name),
        copy_share=_QUANTIZE.share_of(),
        standard=dtype == "bf16",
    )


def _dequantize_case(scaling: str, dtype: str, shape: tuple[str, int] = _USUAL) -> Case:
    kind, columns = shape
    name = f"{kind}{scaling} to {dtype}"

    def num_bytes(numel: int) -> int:
        codes = matrix_numel(numel, columns) * (1 + DTYPES[dtype].itemsize)
        return codes + _scale_bytes(numel, columns, scaling)

    def call(operands: Operands) -> None:
        (codes, scales), (out,) = operands.read, operands.written
        dequantize_fp8(codes, scales, scaling=scaling, dtype=out.dtype, out=out)

    return Case(
        op="dequantize_fp8_",
        name=name,
        format=f"fp8_{scaling}",
        dtype=dtype,
        make=decoded_from(dtype, lambda x: quantize_fp8(x, scaling=scaling), columns),
        call=call,
        numel=lambda numel: matrix_numel(numel, columns),
        num_bytes=num_bytes,
        gate=_DEQUANTIZE_GATES.get(name),
        recorded_numel=_recorded_numel(scaling, columns),
        copy_share=_DEQUANTIZE.share_of(),
        standard=name == "1x128 to bf16",
    )


def _scales_case() -> Case:
    def tensors(numel: int) -> int:
        return max(numel // HISTORY, 1)

    def make(device: torch.device, numel: int) -> Operands:
        history = torch.rand(tensors(numel), HISTORY, device=device)
        return Operands(updated=[history], scalars=[torch.ones(len(history), device=device)])

    def call(operands: Operands) -> tuple[torch.Tensor, ...]:
        (history,), (scales,) = operands.updated, operands.scalars
        update_fp8_scales_(history, scales)
        return history, scales

    return Case(
        op="update_fp8_scales_",
        name=f"max of {HISTORY}",
        format="fp8_delayed",
        dtype="fp32",
        make=make,
        call=call,
        numel=lambda numel: tensors(numel) * HISTORY,
        num_bytes=lambda numel: tensors(numel) * HISTORY * 8,
        count=None,
        copy_share=_UPDATE.share_of(),
        standard=True,
    )
