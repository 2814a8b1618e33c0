"""The cases of NVFP4 and of the Hadamard transform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..formats.table import NVFP4
from ..inputs import NOISE, ROW_NUMEL, decoded_from, made_from, matrix, matrix_numel
from .op import amax_nvfp4, dequantize_nvfp4, hadamard16, quantize_nvfp4

# What a matrix is quantised with where the amax is given; normal numbers stay below it.
AMAX = 8.0

_AMAX = Row(
    "amax_nvfp4_", "amax_nvfp4", "fp32, bf16, fp16 -> fp32", "source", "exact",
    "bit-exact: `nvfp4.reference`", "TransformerEngine", 0.92,
)  # fmt: skip
_QUANTIZE = Row(
    "quantize_nvfp4_", "quantize_nvfp4", "fp32, bf16, fp16 -> nvfp4 (e2m1, e4m3, fp32)",
    "source + 0.5 + 1/16",
    "codes: nearest even or stochastic; scales: nearest even; not finite: the largest, or NaN",
    "bit-exact: torchao (its variant), golden vectors (TE's)", "TransformerEngine; torchao", 0.70,
)  # fmt: skip
_DEQUANTIZE = Row(
    "dequantize_nvfp4_", "dequantize_nvfp4", "nvfp4 -> fp32, bf16, fp16", "0.5 + 1/16 + result",
    "nearest even, once", "bit-exact: `nvfp4.reference`", "TransformerEngine; torchao", 0.88,
)  # fmt: skip
_HADAMARD = Row(
    "hadamard16_", "hadamard16", "fp32, bf16, fp16", "source + result",
    "fp32 sums in a fixed order, then nearest even, once",
    "bit-exact: `nvfp4.reference`; its matrix in FP64",
    "NVIDIA, NVFP4 pretraining, 2025", 0.88,
)  # fmt: skip

# An H100 has time for 25 instructions an element while it moves the bytes of a cast of BF16, and
# for 20 in a pass over the amax.
_AMAX_GATES = {
    "of bf16": Gate(4.0, 72),
    "of fp32": Gate(3.5, 72),
    "of fp32 hadamard": Gate(8.5),
    "of bf16 nan": Gate(4.0, 72),
}
_QUANTIZE_GATES = {
    "from bf16": Gate(20.0),
    "from fp32": Gate(19.5),
    "from bf16 stochastic": Gate(20.0, 96),
    "from bf16 nan": Gate(20.0),
    "from bf16 torchao": Gate(22.0),
    "from bf16 swizzled": Gate(22.0),
    "from bf16 hadamard": Gate(27.0, 72),
    "from bf16 hadamard stochastic": Gate(27.0, 96),
    "from bf16 hadamard stochastic swizzled": Gate(29.0, 96),
}
_DEQUANTIZE_GATES = {
    "to bf16": Gate(11.0),
    "to fp32 torchao": Gate(12.0),
    "to bf16 swizzled": Gate(15.5),
}
_HADAMARD_GATES = {"of bf16": Gate(9.0), "of fp32 inverse": Gate(9.0)}

Make = Callable[[torch.device, int], Operands]

_OPTIONS: Mapping[str, dict[str, Any]] = {
    "hadamard": {"hadamard": True},
    "inverse": {"inverse": True},
    "nan": {"nonfinite": "nan"},
    "stochastic": NOISE,
    "swizzled": {"swizzled": True},
    "torchao": {"variant": "torchao"},
}
# For all dtypes, and those that only the gates look at.
_QUANTIZED = ("", "hadamard", "stochastic")
_GATED = ("nan", "torchao", "swizzled", "hadamard stochastic", "hadamard stochastic swizzled")


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _AMAX, _QUANTIZE, _DEQUANTIZE, _HADAMARD


def cases() -> Iterator[Case]:
    """All."""
    for dtype in DTYPES:
        for words in ("", "hadamard"):
            yield _amax_case(dtype, words)
        for words in _QUANTIZED:
            yield _quantize_case(dtype, words)
        yield _dequantize_case(dtype, "")
        for words in ("", "inverse"):
            yield _hadamard_case(dtype, words)
    yield _amax_case("bf16", "nan")
    for words in _GATED:
        yield _quantize_case("bf16", words)
    yield _dequantize_case("fp32", "torchao")
    yield _dequantize_case("bf16", "swizzled")


def _options(words: str) -> dict[str, Any]:
    """The options that a case's name tells."""
    return {name: value for word in words.split() for name, value in _OPTIONS[word].items()}


def _bytes() -> float:
    """Bytes of an element with its part of the block's scale."""
    return (NVFP4.data_bytes(ROW_NUMEL) + NVFP4.scale_bytes(ROW_NUMEL)) / ROW_NUMEL


def _is_standard(dtype: str, words: str) -> bool:
    return dtype == "bf16" and words in _QUANTIZED


def _amax_case(dtype: str, words: str) -> Case:
    name = f"of {dtype} {words}".rstrip()

    def make(device: torch.device, numel: int) -> Operands:
        x = matrix(device, numel, DTYPES[dtype])
        return Operands(read=[x], written=[torch.zeros((), device=device)])

    def call(operands: Operands) -> None:
        amax_nvfp4(operands.read[0], out=operands.written[0], **_options(words))

    return Case(
        op="amax_nvfp4_",
        name=name,
        format=NVFP4.name,
        dtype=dtype,
        make=make,
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: matrix_numel(numel) * DTYPES[dtype].itemsize,
        gate=_AMAX_GATES.get(name),
        copy_share=_AMAX.share_of(),
        standard=dtype == "bf16" and not words,
    )


def _with_amax(maker: Callable[..., Make], dtype: str, words: str) -> Make:
    """What `maker` makes of a matrix and its quantised parts, and the amax they are made by."""

    def make(device: torch.device, numel: int) -> Operands:
        amax = torch.tensor(AMAX, device=device)
        parts = maker(dtype, lambda x: quantize_nvfp4(x, global_amax=amax, **_options(words))[:2])
        return replace(parts(device, numel), scalars=[amax])

    return make


def _quantize_case(dtype: str, words: str) -> Case:
    name = f"from {dtype} {words}".rstrip()
    moved = DTYPES[dtype].itemsize + _bytes()

    def call(operands: Operands, **index: Any) -> None:
        (x,), (data, scales), (amax,) = operands.read, operands.written, operands.scalars
        quantize_nvfp4(x, global_amax=amax, out=(data, scales), **_options(words), **index)

    return Case(
        op="quantize_nvfp4_",
        name=name,
        format=NVFP4.name,
        dtype=dtype,
        make=_with_amax(made_from, dtype, words),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: round(matrix_numel(numel) * moved),
        gate=_QUANTIZE_GATES.get(name),
        copy_share=_QUANTIZE.share_of(stochastic="stochastic" in words),
        standard=_is_standard(dtype, words),
    )


def _dequantize_case(dtype: str, words: str) -> Case:
    name = f"to {dtype} {words}".rstrip()
    moved = _bytes() + DTYPES[dtype].itemsize

    def call(operands: Operands) -> None:
        (data, scales), (out,), (amax,) = operands.read, operands.written, operands.scalars
        options: dict[str, Any] = _options(words) | {"dtype": out.dtype}
        options["row_numel"] = out.shape[-1]
        dequantize_nvfp4(data, scales, amax, out=out, **options)

    return Case(
        op="dequantize_nvfp4_",
        name=name,
        format=NVFP4.name,
        dtype=dtype,
        make=_with_amax(decoded_from, dtype, words),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: round(matrix_numel(numel) * moved),
        gate=_DEQUANTIZE_GATES.get(name),
        copy_share=_DEQUANTIZE.share_of(),
        standard=_is_standard(dtype, words),
    )


def _hadamard_case(dtype: str, words: str) -> Case:
    name = f"of {dtype} {words}".rstrip()

    def call(operands: Operands) -> None:
        hadamard16(operands.read[0], out=operands.written[0], **_options(words))

    return Case(
        op="hadamard16_",
        name=name,
        format=dtype,
        dtype=dtype,
        make=made_from(dtype, lambda x: [x]),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: matrix_numel(numel) * 2 * DTYPES[dtype].itemsize,
        gate=_HADAMARD_GATES.get(name),
        copy_share=_HADAMARD.share_of(),
        standard=_is_standard(dtype, words) and not words,
    )
