"""The cases of the plain casts: `cast_`, `cast_back_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..formats.table import BITS_PER_BYTE, CASTS, E2M1
from ..inputs import NOISE, STOCHASTIC, decoded_from, made_from, matrix_numel
from .op import cast, cast_back

_CAST = Row(
    "cast_", "cast", "fp32, bf16, fp16 -> bf16, fp16, e4m3, e5m2, e2m1, e8m0, e4m3fnuz",
    "source + 2, 2, 1, 1, 0.5, 1, 1",
    "nearest even, to e8m0 ties up, saturating (not bf16, fp16); or stochastic",
    "bit-exact: ml_dtypes on all bf16 and on boundary fp32", "OFP8 1.0; OCP MX 1.0; AMD", 0.88,
)  # fmt: skip
_CAST_BACK = Row(
    "cast_back_", "cast_back", "bf16, fp16, e4m3, e5m2, e2m1, e8m0, e4m3fnuz -> fp32, bf16, fp16",
    "2, 2, 1, 1, 0.5, 1, 1 + result", "exact in fp32, else nearest even, once",
    "bit-exact: ml_dtypes on every code", "OFP8 1.0; OCP MX 1.0; AMD", 0.88,
)  # fmt: skip

_CAST_GATES = {
    "bf16 from bf16": Gate(4.0),
    "fp16 from bf16": Gate(4.0),
    "e4m3 from bf16": Gate(4.0),
    "e5m2 from bf16": Gate(4.0),
    "e2m1 from bf16": Gate(17.0),
    "e8m0 from bf16": Gate(15.0),
    "e4m3fnuz from bf16": Gate(19.5),
    "bf16 from bf16 stochastic": Gate(27.0),
    "e4m3 from bf16 stochastic": Gate(20.0),
    "e5m2 from bf16 stochastic": Gate(20.0),
    "e2m1 from bf16 stochastic": Gate(25.0),
}
_BACK_GATES = {
    "bf16 to bf16": Gate(4.0),
    "fp16 to bf16": Gate(4.0),
    "e4m3 to bf16": Gate(5.0),
    "e5m2 to bf16": Gate(6.5),
    "e2m1 to bf16": Gate(11.5),
    "e8m0 to bf16": Gate(11.0),
    "e4m3fnuz to bf16": Gate(12.0),
}
_STANDARD = (
    "e4m3 from bf16", "e2m1 from bf16", "e2m1 from bf16 stochastic", "bf16 from fp32 stochastic",
    "e4m3 to bf16",
)  # fmt: skip


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _CAST, _CAST_BACK


def cases() -> Iterator[Case]:
    """All, of every format in the table."""
    for dtype in DTYPES:
        for form in CASTS:
            yield _cast_case(dtype, form, stochastic=False)
            if CASTS[form].has_stochastic:
                yield _cast_case(dtype, form, stochastic=True)
            yield _cast_back_case(form, dtype)


def _width(form: str) -> float:
    """Bytes of an element."""
    return CASTS[form].stored_bits / BITS_PER_BYTE


def _cast_case(dtype: str, form: str, *, stochastic: bool) -> Case:
    name = f"{form} from {dtype}" + STOCHASTIC * stochastic
    moved = DTYPES[dtype].itemsize + _width(form)

    def call(operands: Operands, **index: Any) -> None:
        (x,), (out,) = operands.read, operands.written
        cast(x, form, out=out, **(NOISE if stochastic else {}), **index)

    return Case(
        op="cast_",
        name=name,
        format=form,
        dtype=dtype,
        make=made_from(dtype, lambda x: [cast(x, form)]),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: round(matrix_numel(numel) * moved),
        gate=_CAST_GATES.get(name),
        copy_share=_CAST.share_of(fp4=form == E2M1.name, stochastic=stochastic),
        standard=name in _STANDARD,
    )


def _cast_back_case(form: str, dtype: str) -> Case:
    name = f"{form} to {dtype}"
    moved = _width(form) + DTYPES[dtype].itemsize

    def codes(x: torch.Tensor) -> list[torch.Tensor]:
        return [cast(x, form)]

    def call(operands: Operands) -> None:
        (made,), (out,) = operands.read, operands.written
        cast_back(made, form, out.dtype, out=out)

    return Case(
        op="cast_back_",
        name=name,
        format=form,
        dtype=dtype,
        make=decoded_from(dtype, codes),
        call=call,
        numel=matrix_numel,
        num_bytes=lambda numel: round(matrix_numel(numel) * moved),
        gate=_BACK_GATES.get(name),
        copy_share=_CAST_BACK.share_of(),
        standard=name in _STANDARD,
    )
