"""The cases of matrices that are quantised along both sides in one read."""

from __future__ import annotations

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
    "fp32, bf16, fp16 -> e4m3, e5m2, e4m3fnuz, of x and of x.T; current, delayed",
    "source (twice: current) + 2", "as quantize_fp8", "bit-exact: quantize_fp8 of either",
    "TransformerEngine", 0.88,
)  # fmt: skip

# An H100 has time for 40 instructions an element while it moves the bytes of MXFP8 and FP8 and for
# 31 with codes of half a byte, of BF16. A thread keeps its 64 elements for the second side.
_GATES = {
    _MX: {
        "e4m3 from bf16": Gate(19.5, 128),
        "e4m3 from bf16 stochastic swizzled": Gate(50.5, 168),
    },
    _NVFP4: {
        "from bf16": Gate(43.0, 168),
        "from bf16 square": Gate(37.0, 144),
        "from bf16 hadamard stochastic swizzled": Gate(59.5, 255),
    },
    _AMAX: {"of bf16": Gate(14.5, 96)},
    _FP8: {"tensor from bf16": Gate(10.5, 96)},
}
_BLOCK = 32  # sides are multiples of that at least
_MANY = 1 << 20
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


def _options(words: str) -> dict[str, Any]:
    """The options that a case's name tells."""
    return {name: value for word in words.split() for name, value in _OPTIONS[word].items()}


def _flat(pairs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one for pair in pairs for one in pair)


def _pairs(out: Any) -> Any:
    return out and (out[:2], out[2:])


def _case(
    row: Row, dtype: str, name: str, quantize: Callable[..., Sequence[torch.Tensor]], **options: Any
) -> Case:
    """quantize(x, out, *scalars, *updated) returns results, which `out` has if it is not None.

    options: what `Case` has; `moved`, bytes an element; `scalars` and `updated`, a number each.
    """
    given = [options.pop(kind, ()) for kind in ("scalars", "updated")]
    moved = options.pop("moved")

    def make(device: torch.device, numel: int) -> Operands:
        x = torch.randn(_shape(numel), device=device).to(DTYPES[dtype])
        scalars, updated = ([torch.tensor(one, device=device) for one in kind] for kind in given)
        numbers = (one.clone() for one in (*scalars, *updated))
        written = [zeros_like(one) for one in quantize(x, None, *numbers)]
        return Operands(read=[x], written=written, scalars=scalars, updated=updated)

    def call(operands: Operands, **index: Any) -> None:
        numbers = (*operands.scalars, *operands.updated)
        quantize(operands.read[0], operands.written, *numbers, **index)

    return Case(
        op=row.op,
        name=name,
        dtype=dtype,
        make=make,
        call=call,
        numel=_numel,
        num_bytes=lambda numel: round(_numel(numel) * moved),
        gate=_GATES[row].get(name),
        recorded_numel=SQUARE_ROWS * ROW_NUMEL,
        standard=dtype == "bf16" and "swizzled" not in name,
        **{"copy_share": row.share_of()} | options,
    )


def _blocks(dtype: str, form: BlockFormat) -> dict[str, Any]:
    """What cases of block formats have, read once and written along both sides."""
    each = form.num_bytes(_MANY) / _MANY
    return {"format": form.name, "moved": DTYPES[dtype].itemsize + 2 * each}


def _mx_case(dtype: str, element: str, words: str) -> Case:
    form = _FORMATS[element]

    def quantize(x: torch.Tensor, out: Any, **index: Any) -> tuple[torch.Tensor, ...]:
        options = {"element": element, **_options(words), **index}
        return _flat(quantize_mx_with_transpose(x, out=_pairs(out), **options))

    share = _MX.share_of(fp4=form.element is E2M1, stochastic="stochastic" in words)
    name = f"{element} from {dtype} {words}".rstrip()
    return _case(_MX, dtype, name, quantize, copy_share=share, **_blocks(dtype, form))


def _nvfp4_case(dtype: str, words: str) -> Case:
    def quantize(
        x: torch.Tensor, out: Any, *amaxes: torch.Tensor, **index: Any
    ) -> tuple[torch.Tensor, ...]:
        options: dict[str, Any] = {"amaxes": amaxes, "out": _pairs(out), **_options(words)}
        made = quantize_nvfp4_with_transpose(x, **options | index)
        return _flat(side[:2] for side in made)

    share = _NVFP4.share_of(stochastic="stochastic" in words)
    options = {"scalars": (AMAX, AMAX), "copy_share": share, **_blocks(dtype, NVFP4)}
    return _case(_NVFP4, dtype, f"from {dtype} {words}".rstrip(), quantize, **options)


def _amax_case(dtype: str) -> Case:
    def amaxes(x: torch.Tensor, out: Any) -> tuple[torch.Tensor, ...]:
        return amax_nvfp4_with_transpose(x, out=out)

    moved = DTYPES[dtype].itemsize
    return _case(_AMAX, dtype, f"of {dtype}", amaxes, format=NVFP4.name, moved=moved)


def _fp8_case(dtype: str, kind: str) -> Case:
    # Without a scale the amax of all must be known before the first code is.
    is_delayed = kind == "delayed"
    passes = 1 if is_delayed else 2

    def quantize(x: torch.Tensor, out: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, amax = given or (None, None)
        return quantize_fp8_with_transpose(x, scale=scale, amax=amax, out=out)

    options: dict[str, Any] = {"format": f"fp8_{kind}", "passes": passes, "counted": passes - 1}
    options |= {"scalars": (1.0,), "updated": (1.0,)} if is_delayed else {}
    moved = passes * DTYPES[dtype].itemsize + 2
    return _case(_FP8, dtype, f"{kind} from {dtype}", quantize, moved=moved, **options)
