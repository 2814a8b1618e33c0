"""The cases of matrices that are quantised along both sides in one read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..formats.table import BLOCK_FORMATS, E2M1, MXFP8, NVFP4, BlockFormat
from ..inputs import NOISE, ROW_NUMEL, SQUARE_ROWS, zeros_like
from ..nvfp4.cases import AMAX
from .op import (
    amax_nvfp4_with_transpose,
    quantize_fp8_with_transpose,
    quantize_mx_with_transpose,
    quantize_nvfp4_with_transpose,
)

_PROOF = "bit-exact: the cast of x and that of x.T.contiguous()"
_MX = Row(
    "quantize_mx_with_transpose_", "quantize_mx_with_transpose",
    "fp32, bf16, fp16 -> mxfp8 (e4m3, e5m2), mxfp4, of x and of x.T",
    "source + 2 * (1 or 0.5 + 1/32)", "as quantize_mx", _PROOF, "OCP MX 1.0, 6.3", 0.88,
)  # fmt: skip
_NVFP4 = Row(
    "quantize_nvfp4_with_transpose_", "quantize_nvfp4_with_transpose",
    "fp32, bf16, fp16 -> nvfp4, of x and of x.T; Hadamard of x.T; scales of 16 x 16",
    "source + 2 * (0.5 + 1/16)", "as quantize_nvfp4, nearest with scales of 16 x 16", _PROOF,
    "NVIDIA, NVFP4 pretraining, 2025; TransformerEngine", 0.70,
)  # fmt: skip
_AMAX = Row(
    "amax_nvfp4_with_transpose_", "amax_nvfp4_with_transpose",
    "fp32, bf16, fp16 -> fp32, of x and of x.T's Hadamard transform", "source", "exact",
    "bit-exact: amax_nvfp4 of either", "TransformerEngine", 0.92,
)  # fmt: skip
_FP8 = Row(
    "quantize_fp8_with_transpose_", "quantize_fp8_with_transpose",
    "fp32, bf16, fp16 -> e4m3, e5m2, of x and of x.T; current, delayed",
    "source (twice: current) + 2", "as quantize_fp8", "bit-exact: quantize_fp8 of either",
    "TransformerEngine", 0.88,
)  # fmt: skip

# An H100 has time for 40 instructions an element while it moves the bytes of MXFP8 and FP8 and for
# 31 with codes of half a byte, of BF16. A thread keeps its 64 elements for the second side.
_MX_GATES = {
    "e4m3 from bf16": Gate(19.5, 128),
    "e4m3 from bf16 stochastic swizzled": Gate(50.5, 144),
}
_NVFP4_GATES = {
    "from bf16": Gate(43.0, 144),
    "from bf16 square": Gate(37.0, 144),
    "from bf16 hadamard stochastic swizzled": Gate(59.5, 255),
}
_AMAX_GATES = {"of bf16": Gate(14.5, 96)}
_FP8_GATES = {"tensor from bf16": Gate(10.5, 96)}
_BLOCK = 32  # sides are multiples of that at least
_FORMATS = {form.element.name: form for form in BLOCK_FORMATS if form.codec is MXFP8.codec}
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "hadamard": {"hadamard": True},
    "square": {"square": True},
    "stochastic": NOISE,
    "swizzled": {"swizzled": True},
}


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _MX, _NVFP4, _AMAX, _FP8


def cases() -> Iterator[Case]:
    """All."""
    for dtype in DTYPES:
        for element in _FORMATS:
            yield _mx_case(dtype, element, "")
        for words in ("", "hadamard", "square"):
            yield _nvfp4_case(dtype, words)
        yield _amax_case(dtype)
        for kind in ("tensor", "delayed"):
            yield _fp8_case(dtype, kind)
    yield _mx_case("bf16", "e4m3", "stochastic swizzled")
    yield _nvfp4_case("bf16", "hadamard stochastic swizzled")


def _shape(numel: int) -> tuple[int, int]:
    """Of the matrix of about `numel` elements: of whole tiles, or a small one of whole blocks."""
    found = numel // ROW_NUMEL
    for multiple in (SQUARE_ROWS, _BLOCK):
        if found >= multiple:
            return found // multiple * multiple, ROW_NUMEL
    return _BLOCK, max(numel // _BLOCK**2, 1) * _BLOCK


def _numel(numel: int) -> int:
    return math.prod(_shape(numel))


_case = functools.partial(Case, numel=_numel, recorded_numel=SQUARE_ROWS * ROW_NUMEL)


def _options(words: str) -> dict[str, Any]:
    """The options that a case's name tells."""
    return {name: value for word in words.split() for name, value in _OPTIONS[word].items()}


def _made(
    dtype: str, make: Callable[[torch.Tensor], Sequence[torch.Tensor]], *scalars: float
) -> Callable[[torch.device, int], Operands]:
    """Makes the matrix to read, memory for all that `make` returns of it, and the scalars."""

    def operands(device: torch.device, numel: int) -> Operands:
        x = torch.randn(_shape(numel), device=device).to(DTYPES[dtype])
        written = [zeros_like(one) for one in make(x)]
        given = [torch.tensor(value, device=device) for value in scalars]
        return Operands(read=[x], written=written, scalars=given)

    return operands


def _pairs(written: Sequence[torch.Tensor]) -> Any:
    return tuple(written[:2]), tuple(written[2:])


def _moved(dtype: str, form: BlockFormat) -> float:
    """Bytes an element, read once and written along both sides."""
    return DTYPES[dtype].itemsize + 2 * form.num_bytes(1 << 20) / (1 << 20)


def _mx_case(dtype: str, element: str, words: str) -> Case:
    name = f"{element} from {dtype} {words}".rstrip()
    form = _FORMATS[element]

    def quantized(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        rows, columns = quantize_mx_with_transpose(x, element=element, **_options(words) | options)
        return *rows, *columns

    def call(operands: Operands, **index: Any) -> None:
        quantized(operands.read[0], out=_pairs(operands.written), **index)

    return _case(
        op=_MX.op,
        name=name,
        format=form.name,
        dtype=dtype,
        make=_made(dtype, quantized),
        call=call,
        num_bytes=lambda numel: round(_numel(numel) * _moved(dtype, form)),
        gate=_MX_GATES.get(name),
        copy_share=_MX.share_of(fp4=element == E2M1.name, stochastic="stochastic" in words),
        standard=dtype == "bf16" and not words,
    )


def _nvfp4_case(dtype: str, words: str) -> Case:
    name = f"from {dtype} {words}".rstrip()

    def quantized(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        rows, columns = quantize_nvfp4_with_transpose(x, **_options(words) | options)
        return *rows[:2], *columns[:2]

    def call(operands: Operands, **index: Any) -> None:
        options = {"amaxes": operands.scalars, "out": _pairs(operands.written)}
        quantized(operands.read[0], **options, **index)

    return _case(
        op=_NVFP4.op,
        name=name,
        format=NVFP4.name,
        dtype=dtype,
        make=_made(dtype, quantized, AMAX, AMAX),
        call=call,
        num_bytes=lambda numel: round(_numel(numel) * _moved(dtype, NVFP4)),
        gate=_NVFP4_GATES.get(name),
        copy_share=_NVFP4.share_of(stochastic="stochastic" in words),
        standard=dtype == "bf16" and words in ("", "hadamard", "square"),
    )


def _amax_case(dtype: str) -> Case:
    def call(operands: Operands) -> None:
        one, other = operands.written
        amax_nvfp4_with_transpose(operands.read[0], out=(one, other))

    return _case(
        op=_AMAX.op,
        name=f"of {dtype}",
        format=NVFP4.name,
        dtype=dtype,
        make=_made(dtype, amax_nvfp4_with_transpose),
        call=call,
        num_bytes=lambda numel: _numel(numel) * DTYPES[dtype].itemsize,
        gate=_AMAX_GATES.get(f"of {dtype}"),
        copy_share=_AMAX.share_of(),
        standard=dtype == "bf16",
    )


def _fp8_case(dtype: str, kind: str) -> Case:
    name = f"{kind} from {dtype}"
    delayed = kind == "delayed"
    # Without a scale the amax of all must be known before the first code is.
    passes = 1 if delayed else 2

    def call(operands: Operands) -> tuple[torch.Tensor, ...]:
        codes, codes_t, scale_inv = (*operands.written, *operands.scalars[:1])
        scale, amax = operands.scalars[1:] if delayed else (None, None)
        out = codes, codes_t, scale_inv
        made = quantize_fp8_with_transpose(operands.read[0], scale=scale, amax=amax, out=out)
        return made if amax is None else (*made, amax)

    return _case(
        op=_FP8.op,
        name=name,
        format=f"fp8_{kind}",
        dtype=dtype,
        make=_made(dtype, lambda x: quantize_fp8_with_transpose(x)[:2], *[1.0] * 3),
        call=call,
        num_bytes=lambda numel: _numel(numel) * (passes * DTYPES[dtype].itemsize + 2),
        passes=passes,
        gate=_FP8_GATES.get(name),
        counted=passes - 1,
        copy_share=_FP8.share_of(),
        standard=dtype == "bf16",
    )
