"""Owns the MX ops `sidestream::quantize_mx_` and `dequantize_mx_`: schemas and argument checks.

| op             | reads        | writes       | cpu            | cuda |
|----------------|--------------|--------------|----------------|------|
| quantize_mx_   | x            | data, scales | `reference_mx` | `mx` |
| dequantize_mx_ | data, scales | out          | `reference_mx` | `mx` |

The ops write in place; the functions here make what they write into, unless it is given.
`reference_mx` defines both. They are not differentiable.
"""

from __future__ import annotations

import torch

from . import ops, reference_mx, swizzle
from .formats import E2M1, E8M0, wire_format_of
from .noise import signed_seed
from .reference_mx import BLOCK_NUMEL, ELEMENTS, MxCast, row_blocks, row_bytes

_QUANTIZE = ops.Op(
    "quantize_mx_(Tensor(a!) data, Tensor(b!) scales, Tensor x, str element, str rule, "
    "SymInt? seed, SymInt first_index, bool swizzled) -> ()",
    reference_mx.quantize_mx_,
    ops.on_first_use("mx", "quantize_mx_"),
)
_DEQUANTIZE = ops.Op(
    "dequantize_mx_(Tensor(a!) out, Tensor data, Tensor scales, str element, bool swizzled) -> ()",
    reference_mx.dequantize_mx_,
    ops.on_first_use("mx", "dequantize_mx_"),
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
    depends on that and an element's index alone, `first_index` being that of x's first.

    byte = rule(max |x| of the block); code = round(x * 2^(127 - byte)), saturating. Where a block
    has a NaN or infinity its byte is 255, and it decodes to NaNs. Bytes moved an element, of BF16:
    3.03, or 2.53 for e2m1. out: written into instead, contiguous (data, scales).

    Source: OCP MX 1.0, section 6.3; the rules': see `reference_mx`. Raises `ValueError` before
    anything is written.
    """
    _check_rounding(rounding, seed)
    cast = MxCast(element, rule, _signed(seed), first_index, swizzled)
    _check_source("x", x)
    if out is None:
        data_shape, scale_shape = _shapes(x.shape, cast)
        data = x.new_empty(data_shape, dtype=ELEMENTS[element].dtype)
        scales = x.new_empty(scale_shape, dtype=E8M0.dtype)
    else:
        data, scales = out
        _check_parts(data, scales, x.shape, x.device, cast)
    ops.call(_QUANTIZE, x, data, scales, x, element, rule, cast.seed, first_index, swizzled)
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
    written into instead, contiguous, its dtype counting. value = round(code * 2^(byte - 127)),
    rounded once, to nearest even. Bytes moved an element, to BF16: 3.03, or 2.53 for e2m1. Raises
    `ValueError` before anything is written.
    """
    cast = MxCast(element, swizzled=swizzled)
    if data.dim() == 0:
        raise ValueError("data: expected [..., K], got a scalar; pass what quantize_mx returns")
    if row_numel is None:
        row_numel = data.shape[-1] * (2 if element == E2M1.name else 1)
    shape = torch.Size((*data.shape[:-1], row_numel))
    _check_parts(data, scales, shape, data.device, cast)
    if out is None:
        wire_format_of(dtype)
        out = data.new_empty(shape, dtype=dtype)
    else:
        _check_source("out", out)
        _check_tensor("out", out, tuple(shape), out.dtype, data.device)
    ops.call(_DEQUANTIZE, data, out, data, scales, element, swizzled)
    return out


def _check_rounding(rounding: str, seed: int | None) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding: expected nearest or stochastic, got {rounding!r}; choose one")
    if (rounding == "stochastic") != (seed is not None):
        raise ValueError(
            f"seed: expected {'an integer' if seed is None else 'None'} with {rounding!r} "
            f"rounding, got {seed}; a seed goes with 'stochastic', and with that alone"
        )


def _signed(seed: int | None) -> int | None:
    """The same 64 bits as a signed number, which is what schemas and kernels take."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: expected -2^63 to 2^64 - 1, got {seed}; take the low 64 bits")
    return signed_seed(seed)


def _check_source(name: str, tensor: torch.Tensor) -> None:
    wire_format_of(tensor.dtype)
    if tensor.dim() == 0 or not tensor.is_contiguous():
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
    data: torch.Tensor, scales: torch.Tensor, shape: torch.Size, device: torch.device, cast: MxCast
) -> None:
    data_shape, scale_shape = _shapes(shape, cast)
    _check_tensor("data", data, data_shape, ELEMENTS[cast.element].dtype, device)
    _check_tensor("scales", scales, scale_shape, E8M0.dtype, device)


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name}: expected device {device}, as the data, got {tensor.device}; move the tensor"
        )
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous {dtype} of shape {shape}, got {tensor.dtype} of "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}; see quantize_mx for the layout"
        )
