"""Owns the MX ops `sidestream::quantize_mx_` and `dequantize_mx_`: schemas and argument checks.

| op             | reads        | writes       | cpu            | cuda |
|----------------|--------------|--------------|----------------|------|
| quantize_mx_   | x            | data, scales | `reference` | `mx` |
| dequantize_mx_ | data, scales | out          | `reference` | `mx` |

The ops write in place; the functions here make what they write into, unless it is given.
`reference` defines both. They are not differentiable.
"""

from __future__ import annotations

import torch

from .. import op as ops
from ..aliasing import check_apart
from ..checks import (
    SOURCE_DTYPES,
    check_choice,
    check_dtype,
    check_flag,
    check_integer,
    check_like,
    check_pair,
    check_result_dtype,
    check_tensor,
)
from ..formats import swizzle
from ..formats.noise import check_first_index, checked_seed
from ..formats.table import E2M1, E8M0, SCALE_RULES
from . import reference as reference_mx
from .reference import BLOCK_NUMEL, ELEMENTS, MxCast, row_blocks, row_bytes

_QUANTIZE = ops.Op(
    "quantize_mx_(Tensor(a!) data, Tensor(b!) scales, Tensor x, str element, str rule, "
    "SymInt? seed, SymInt first_index, bool swizzled) -> ()",
    reference_mx.quantize_mx_,
    ops.on_first_use("mx.kernel", "quantize_mx_"),
)
_DEQUANTIZE = ops.Op(
    "dequantize_mx_(Tensor(a!) out, Tensor data, Tensor scales, str element, bool swizzled) -> ()",
    reference_mx.dequantize_mx_,
    ops.on_first_use("mx.kernel", "dequantize_mx_"),
)

# The GPU kernel counts the blocks of a row that ends in a short one with 31 bits.
_MAX_ROW_BLOCKS = 2**30


def quantize_mx(
    x: torch.Tensor,
    *,
    element: str = "e4m3",
    rule: str = "rceil",
    rounding: str = "nearest",
    seed: int | None = None,
    first_index: int = 0,
    swizzled: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 or MXFP4 of `x` [..., K]: (data, scales), a scale for 32 elements of a row.

    x: FP32, BF16 or FP16, contiguous; the last block of a row may be short. element: "e4m3" or
    "e5m2", data being float8 of x's shape, or "e2m1", data being uint8 [..., ceil(K / 2)], the even
    element in the low nibble. rule, of the scales: "rceil", "floor", "ceil" or "even". scales:
    float8_e8m0fnu [..., ceil(K / 32)], or, swizzled, 1-D in the layout of `swizzle_scales`.

    rounding: "nearest", ties to even, or "stochastic", which needs a `seed`, of 64 bits; its noise
    depends on that and an element's index alone, at most 2^63 - 1, `first_index` being that of x's
    first.

    byte = rule(max |x| of the block); code = round(x * 2^(127 - byte)), saturating. Where a block
    has a NaN or infinity its byte is 255, and it decodes to NaNs. Bytes moved an element, of BF16:
    3.03, or 2.53 for e2m1. out: written into instead, contiguous (data, scales), which share memory
    with nothing.

    Source: OCP MX 1.0, section 6.3; the rules': see `reference`. Raises `ValueError` before
    anything is written.
    """
    check_choice("element", element, ELEMENTS)
    swizzled = check_flag("swizzled", swizzled)
    check_choice("rule", rule, SCALE_RULES)
    seed = checked_seed(rounding, seed)
    _check_source("x", x)
    check_first_index(first_index, x.numel())
    cast = MxCast(element, rule, seed, first_index, swizzled)
    if out is None:
        data_shape, scale_shape = _shapes(x.shape, cast)
        data = x.new_empty(data_shape, dtype=ELEMENTS[element].dtype)
        scales = x.new_empty(scale_shape, dtype=E8M0.dtype)
    else:
        check_pair("out", out)
        data, scales = out
        _check_parts(("out[0]", "out[1]"), out, x.shape, x.device, cast)
        check_apart({"out[0]": data, "out[1]": scales}, {"x": x})
    ops.call(_QUANTIZE, x, data, scales, x, element, rule, seed, first_index, swizzled)
    return data, scales


def dequantize_mx(
    data: torch.Tensor,
    scales: torch.Tensor,
    *,
    element: str = "e4m3",
    dtype: torch.dtype = torch.float32,
    row_numel: int | None = None,
    swizzled: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of what `quantize_mx` returns: [..., K] of `dtype`, FP32, BF16 or FP16.

    row_numel: K, which data of "e2m1" leaves open; by default, 2 for each of its bytes. out: is
    written into instead, contiguous, its dtype counting, its memory apart. value =
    round(code * 2^(byte - 127)), rounded once, to nearest even. Bytes moved an element, to BF16:
    3.03, or 2.53 for e2m1. Raises `ValueError` before anything is written.
    """
    check_choice("element", element, ELEMENTS)
    swizzled = check_flag("swizzled", swizzled)
    check_result_dtype(dtype)
    cast = MxCast(element, swizzled=swizzled)
    check_tensor("data", data)
    if data.dim() == 0:
        raise ValueError("data: expected [..., K], got a scalar; pass what quantize_mx returns")
    shape = torch.Size((*data.shape[:-1], _row_numel(data.shape[-1], row_numel, element)))
    _check_parts(("data", "scales"), (data, scales), shape, data.device, cast)
    if out is None:
        out = data.new_empty(shape, dtype=dtype)
    else:
        _check_source("out", out)
        check_like("out", out, shape, out.dtype, data.device)
        check_apart({"out": out}, {"data": data, "scales": scales})
    ops.call(_DEQUANTIZE, data, out, data, scales, element, swizzled)
    return out


def _row_numel(num_bytes: int, row_numel: int | None, element: str) -> int:
    """The elements of a row whose data are `num_bytes`: `row_numel`, if it is given and may be."""
    high = num_bytes * (2 if element == E2M1.name else 1)
    if row_numel is None:
        return high
    low = high - 1 if element == E2M1.name and high else high
    return check_integer("row_numel", row_numel, low, high)


def _check_source(name: str, tensor: torch.Tensor) -> None:
    check_dtype(name, tensor, SOURCE_DTYPES)
    if tensor.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got shape (); call .view(1)")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor [..., K], got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; call .contiguous()"
        )
    row_numel = tensor.shape[-1]
    if row_numel % BLOCK_NUMEL and row_blocks(row_numel) > _MAX_ROW_BLOCKS:
        raise ValueError(
            f"{name}: expected rows of at most {_MAX_ROW_BLOCKS} blocks where the last one is "
            f"short, got {row_numel} elements; pad the rows to a multiple of {BLOCK_NUMEL}"
        )


def _shapes(shape: torch.Size, cast: MxCast) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of data and scales for a tensor of `shape`."""
    columns = row_blocks(shape[-1])
    scale_shape = (*shape[:-1], columns)
    if cast.swizzled:
        scale_shape = (swizzle.swizzled_numel(shape[:-1].numel(), columns),)
    return (*shape[:-1], row_bytes(shape[-1], ELEMENTS[cast.element])), scale_shape


def _check_parts(
    names: tuple[str, str],
    parts: tuple[torch.Tensor, torch.Tensor],
    shape: torch.Size,
    device: torch.device,
    cast: MxCast,
) -> None:
    dtypes = (ELEMENTS[cast.element].dtype, E8M0.dtype)
    for name, part, wanted, dtype in zip(names, parts, _shapes(shape, cast), dtypes, strict=True):
        check_like(name, part, wanted, dtype, device)
