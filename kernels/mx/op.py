"""MXFP8 and MXFP4, `quantize_mx` and `dequantize_mx`: what they accept, and the ops behind them.

The ops write in place; the functions here make what they write into, unless it is given.
`reference` defines both. They are not differentiable.
"""

from __future__ import annotations

import torch

from ..arguments import (
    Wanted,
    check_row_blocks,
    check_rows,
    check_source,
    checked_row_numel,
    result_dtype,
    result_of,
    results_of,
    scale_shape,
)
from ..checks import check_choice, check_flag, check_like, check_tensor
from ..formats.noise import Seed, check_first_index, checked_seed
from ..formats.table import ELEMENTS, MXFP8, SCALE_RULES
from ..numbers import tensor_of
from ..op import Op, call, on_first_use
from . import reference
from .reference import BLOCK_NUMEL, elements

_QUANTIZE = Op(
    "quantize_mx_(Tensor(a!) data, Tensor(b!) scales, Tensor x, str element, str rule, "
    "SymInt? seed, SymInt first_index, bool swizzled, *, Tensor? seed_tensor=None) -> ()",
    reference.quantize_mx_,
    on_first_use("mx.kernel", "quantize_mx_"),
)
_DEQUANTIZE = Op(
    "dequantize_mx_(Tensor(a!) out, Tensor data, Tensor scales, str element, bool swizzled) -> ()",
    reference.dequantize_mx_,
    on_first_use("mx.kernel", "dequantize_mx_"),
)


def quantize_mx(
    x: torch.Tensor,
    *,
    element: str = "e4m3",
    rule: str = "rceil",
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    swizzled: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 or MXFP4 of `x` [..., K]: (data, scales), a scale for 32 elements of a row.

    x: FP32, BF16 or FP16, contiguous; the last block of a row may be short. element: "e4m3" or
    "e5m2", data being float8 of x's shape, or "e2m1", data being uint8 [..., ceil(K / 2)], the even
    element in the low nibble. rule, of the scales: "rceil", "floor", "ceil" or "even". scales:
    float8_e8m0fnu [..., ceil(K / 32)], or, swizzled, 1-D in the layout of `swizzle_scales`.

    rounding: "nearest", ties to even, or "stochastic", which needs a `seed`, of 64 bits, an
    integer or an int64 tensor of one element that is read on the device of x; its noise depends on
    that and an element's index alone, at most 2^63 - 1, `first_index` being that of x's first.

    byte = rule(max |x| of the block); code = round(x * 2^(127 - byte)), saturating. Where a block
    has a NaN or infinity its byte is 255, and it decodes to NaNs. Bytes moved an element, of BF16:
    3.03, or 2.53 for e2m1. out: written into instead, contiguous (data, scales), which share memory
    with nothing.

    Source: OCP MX 1.0, section 6.3; the rules': see `reference`. Raises `ValueError` before
    anything is written.
    """
    check_choice("element", element, elements())
    swizzled = check_flag("swizzled", swizzled)
    check_choice("rule", rule, SCALE_RULES)
    check_source("x", x)
    seed = checked_seed(rounding, seed, x.device)
    _check_rows("x", x)
    check_first_index(first_index, x.numel())
    wanted = parts_of(x.shape, element, swizzled)
    data, scales = results_of(out, wanted, x.device, {"x": x, "seed": tensor_of(seed)})
    call(_QUANTIZE, x, data, as_bytes(scales), x, element, rule, seed, first_index, swizzled)
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
    check_choice("element", element, elements())
    swizzled = check_flag("swizzled", swizzled)
    dtype = result_dtype(dtype, out)
    check_tensor("data", data)
    check_rows("data", data)
    row_numel = checked_row_numel(data, row_numel, ELEMENTS[element].codes_per_byte)
    shape = torch.Size((*data.shape[:-1], row_numel))
    parts = {"data": data, "scales": scales}
    wanted = parts_of(shape, element, swizzled)
    for (name, part), (part_shape, part_dtype) in zip(parts.items(), wanted, strict=True):
        check_like(name, part, part_shape, part_dtype, data.device)
    out = result_of(out, (shape, dtype), data.device, parts)
    _check_rows("out", out)
    call(_DEQUANTIZE, data, out, data, as_bytes(scales), element, swizzled)
    return out


def as_bytes(scales: torch.Tensor) -> torch.Tensor:
    """The scales as ops get them: of E8M0, torch.compile makes no code (torch 2.13)."""
    return scales.view(torch.uint8)


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor is [..., K], of rows whose blocks kernels can count."""
    check_rows(name, tensor)
    if tensor.shape[-1] % BLOCK_NUMEL:
        check_row_blocks(name, MXFP8.num_blocks(tensor.shape[-1]))


def parts_of(shape: torch.Size, element: str, swizzled: bool) -> tuple[Wanted, Wanted]:
    """The shapes and dtypes of data and scales for a tensor of `shape`."""
    form = ELEMENTS[element]
    data = (*shape[:-1], -(-shape[-1] // form.codes_per_byte))
    scales = scale_shape(shape[:-1], MXFP8.num_blocks(shape[-1]), swizzled)
    return (data, form.dtype), (scales, MXFP8.scale_dtype)
