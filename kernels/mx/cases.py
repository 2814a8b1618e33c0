"""The cases of MXFP8 and MXFP4: `quantize_mx_`, `dequantize_mx_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..case import DTYPES, RECORDED_NUMEL, Case, Gate, Operands, Row
from ..formats.table import BITS_PER_BYTE, BLOCK_FORMATS, E2M1, ELEMENTS, MXFP8
from ..inputs import (
    NOISE,
    ROW_NUMEL,
    SQUARE_ROWS,
    STOCHASTIC,
    decoded_from,
    made_from,
    matrix_numel,
)
from .op import dequantize_mx, quantize_mx
from .reference import BLOCK_NUMEL, elements

SWIZZLED = " swizzled"

_QUANTIZE = Row(
    "quantize_mx_", "quantize_mx", "fp32, bf16, fp16 -> mxfp8 (e4m3, e5m2), mxfp4",
    "source + 1 or 0.5 + 1/32",
    "codes: nearest even or stochastic, saturating; scales: rceil, floor, ceil, even",
    "bit-exact: torchao (floor, ceil, even, rceil), golden vectors", "OCP MX 1.0, 6.3", 0.88,
)  # fmt: skip
_DEQUANTIZE = Row(
    "dequantize_mx_", "dequantize_mx", "mxfp8, mxfp4 -> fp32, bf16, fp16",
    "1 or 0.5 + 1/32 + result", "nearest even, once", "bit-exact: `mx.reference`",
    "OCP MX 1.0, 6.3", 0.88,
)  # fmt: skip

# While an H100 moves its bytes there is time for 30 instructions an element of MXFP8 and 25 of
# MXFP4; swizzled tiles cost one division more.
_GATES = {
    "e4m3 from bf16": Gate(6.5),
    "e5m2 from bf16": Gate(6.5),
    "e2m1 from bf16": Gate(18.0),
    "e2m1 from bf16 stochastic": Gate(18.0),
    "e4m3 from bf16 stochastic": Gate(20.5),
    "e4m3 from bf16 swizzled": Gate(8.0),
    "e2m1 from bf16 swizzled": Gate(19.5),
    "e2m1 from bf16 stochastic swizzled": Gate(19.5),
    "e4m3 to bf16": Gate(6.5),
    "e2m1 to bf16": Gate(10.5),
    "e4m3 to bf16 swizzled": Gate(9.5),
    "e2m1 to bf16 swizzled": Gate(12.5),
}
_STANDARD = (
    "e4m3 from bf16", "e2m1 from bf16", "e2m1 from bf16 stochastic", "e4m3 to bf16", "e2m1 to bf16",
)  # fmt: skip
# What block formats are called by their elements; e5m2 is a variant of mxfp8.
_FORMATS = {form.element.name: form.name for form in BLOCK_FORMATS if form.codec is MXFP8.codec}


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _QUANTIZE, _DEQUANTIZE


def cases() -> Iterator[Case]:
    """All, of every element format that blocks may have."""
    for dtype in DTYPES:
        for element in elements():
            for stochastic in (False, True):
                yield _quantize_case(dtype, element, stochastic=stochastic)
            yield _dequantize_case(element, dtype)
    for element in elements():
        for stochastic in (False, True):
            yield _quantize_case("bf16", element, stochastic=stochastic, swizzled=True)
        yield _dequantize_case(element, "bf16", swizzled=True)


def _recorded_numel(swizzled: bool) -> int:
    """Swizzled scales lie in tiles of 128 rows."""
    return SQUARE_ROWS * ROW_NUMEL if swizzled else RECORDED_NUMEL


def _bytes_of(element: str) -> float:
    """Bytes of an element with its part of the block's scale."""
    return ELEMENTS[element].stored_bits / BITS_PER_BYTE + 1 / BLOCK_NUMEL


def _quantize_case(dtype: str, element: str, *, stochastic: bool, swizzled: bool = False) -> Case:
    name = f"{element} from {dtype}" + STOCHASTIC * stochastic + SWIZZLED * swizzled
    moved = DTYPES[dtype].itemsize + _bytes_of(element)

    def call(operands: Operands, **index: Any) -> None:
        (x,), (data, scales) = operands.read, operands.written
        noise = (NOISE if stochastic else {}) | index
        quantize_mx(x, element=element, swizzled=swizzled, out=(data, scales), **noise)

    return Case(
        op="quantize_mx_",
        name=name,
        format=_FORMATS.get(element, MXFP8.name),
        dtype=dtype,
        make=made_from(dtype, lambda x: quantize_mx(x, element=element, swizzled=swizzled)),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: round(matrix_numel(numel) * moved),
        gate=_GATES.get(name),
        recorded_numel=_recorded_numel(swizzled),
        copy_share=_QUANTIZE.share_of(fp4=element == E2M1.name, stochastic=stochastic),
        standard=name in _STANDARD,
    )


def _dequantize_case(element: str, dtype: str, *, swizzled: bool = False) -> Case:
    name = f"{element} to {dtype}" + SWIZZLED * swizzled
    moved = _bytes_of(element) + DTYPES[dtype].itemsize

    def call(operands: Operands) -> None:
        (data, scales), (out,) = operands.read, operands.written
        options: dict[str, Any] = {"element": element, "swizzled": swizzled}
        options |= {"dtype": out.dtype, "row_numel": out.shape[-1]}
        dequantize_mx(data, scales, out=out, **options)

    return Case(
        op="dequantize_mx_",
        name=name,
        format=_FORMATS.get(element, MXFP8.name),
        dtype=dtype,
        make=decoded_from(dtype, lambda x: quantize_mx(x, element=element, swizzled=swizzled)),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: round(matrix_numel(numel) * moved),
        gate=_GATES.get(name),
        recorded_numel=_recorded_numel(swizzled),
        copy_share=_DEQUANTIZE.share_of(),
        standard=name in _STANDARD,
    )
