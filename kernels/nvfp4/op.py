"""Owns the ops of NVFP4 and of the Hadamard transform: schemas, devices, argument checks.

| op                | reads              | writes       | cpu                  | cuda           |
|-------------------|--------------------|--------------|----------------------|----------------|
| amax_nvfp4_       | x                  | amax         | `reference`    | `nvfp4`        |
| quantize_nvfp4_   | x, amax            | data, scales | `reference`    | `nvfp4`        |
| dequantize_nvfp4_ | data, scales, amax | out          | `reference`    | `decode` |
| hadamard16_       | x                  | out          | `reference_hadamard` | `hadamard`     |

The ops write in place; the functions here make what they write into. Nothing is differentiable, and
no host waits for a device.
"""

from __future__ import annotations

import torch

from .. import op as ops
from ..checks import (
    SOURCE_DTYPES,
    check_choice,
    check_contiguous,
    check_dtype,
    check_flag,
    check_integer,
    check_like,
    check_one,
    check_result_dtype,
)
from ..formats import swizzle
from ..formats.noise import check_first_index, checked_seed
from ..formats.table import E4M3, NVFP4
from . import reference as reference_nvfp4
from . import reference_hadamard

_VARIANTS = ("te", "torchao")
_MAX_SWIZZLED_COLUMNS = 2**30  # the GPU kernels count the blocks of a row with 31 bits then

_AMAX = ops.Op(
    "amax_nvfp4_(Tensor(a!) amax, Tensor x, bool hadamard) -> ()",
    reference_nvfp4.amax_,
    ops.on_first_use("nvfp4.kernel", "amax_"),
)
_QUANTIZE = ops.Op(
    "quantize_nvfp4_(Tensor(a!) data, Tensor(b!) scales, Tensor x, Tensor global_amax, int? seed, "
    "SymInt first_index, bool torchao, bool hadamard, bool swizzled) -> ()",
    reference_nvfp4.quantize_,
    ops.on_first_use("nvfp4.kernel", "quantize_"),
)
_DEQUANTIZE = ops.Op(
    "dequantize_nvfp4_(Tensor(a!) out, Tensor data, Tensor scales, Tensor global_amax, "
    "bool torchao, bool swizzled) -> ()",
    reference_nvfp4.dequantize_,
    ops.on_first_use("nvfp4.decode", "dequantize_"),
)
_HADAMARD = ops.Op(
    "hadamard16_(Tensor(a!) out, Tensor x, bool inverse) -> ()",
    reference_hadamard.hadamard16_,
    ops.on_first_use("nvfp4.hadamard", "hadamard16_"),
)


def quantize_nvfp4(
    x: torch.Tensor,
    *,
    global_amax: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    first_index: int = 0,
    variant: str = "te",
    hadamard: bool = False,
    swizzled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4 of `x`: 4-bit elements, an E4M3 scale for 16 of them, and one FP32 amax for all.

    x: [..., K], FP32, BF16 or FP16, contiguous; blocks run along a row, the last may be short.
    Returns (data, uint8 [..., ceil(K / 2)], the even element in the low nibble; scales,
    float8_e4m3fn [..., ceil(K / 16)]; the amax, FP32, 0-d). Formulas, NaN and infinity, sources:
    `reference`. Bytes moved an element of BF16: 4.56, 2.56 if the amax is given.

    global_amax: `amax_nvfp4(x)` if `None`; ranks that share a tensor pass the largest of theirs. On
    the device of x, and no host waits for it. What exceeds it saturates.
    rounding: "nearest", ties to even, or "stochastic", with noise of `seed`, any 64 bits, and the
    element's index, which is `first_index` for the first of x, and at most 2^63 - 1: so shards
    round as the whole does.
    variant: "te", TransformerEngine's numerics, for training; "torchao", torchao's, for inference.
    hadamard: of `hadamard16(x)`, in the same pass; the amax is of that, too.
    swizzled: scales are 1-D, in the layout of `swizzle_scales`, padding included.
    Raises `ValueError` for a bad argument.
    """
    _check_input(x)
    check_choice("variant", variant, _VARIANTS)
    hadamard, swizzled = check_flag("hadamard", hadamard), check_flag("swizzled", swizzled)
    seed = checked_seed(rounding, seed)
    check_first_index(first_index, x.numel())
    columns = NVFP4.num_blocks(x.shape[-1])
    if global_amax is None:
        global_amax = amax_nvfp4(x, hadamard=hadamard)
    else:
        check_one("global_amax", global_amax, (torch.float32,), x.device)
        global_amax = global_amax.view(()) if global_amax.dim() else global_amax
    data = x.new_empty((*x.shape[:-1], -(-x.shape[-1] // 2)), dtype=torch.uint8)
    scales = x.new_empty(_scale_shape(x.shape[:-1], columns, swizzled), dtype=E4M3.dtype)
    options = (seed, first_index, variant == "torchao", hadamard, swizzled)
    ops.call(_QUANTIZE, x, data, scales, x, global_amax, *options)
    return data, scales, global_amax


def amax_nvfp4(x: torch.Tensor, *, hadamard: bool = False) -> torch.Tensor:
    """The largest magnitude in `x`, or in `hadamard16(x)`, NaNs left out: FP32, 0-d, on its device.

    Raises `ValueError` for another dtype than FP32, BF16 and FP16.
    """
    _check_input(x)
    hadamard = check_flag("hadamard", hadamard)
    found = x.new_empty((), dtype=torch.float32)
    ops.call(_AMAX, x, found, x, hadamard)
    return found


def dequantize_nvfp4(
    data: torch.Tensor,
    scales: torch.Tensor,
    global_amax: torch.Tensor,
    *,
    row_numel: int | None = None,
    dtype: torch.dtype = torch.float32,
    variant: str = "te",
    swizzled: bool = False,
) -> torch.Tensor:
    """The tensor [..., row_numel] that `quantize_nvfp4`'s results stand for, rounded to `dtype`.

    row_numel: K, where it is odd and so not data.shape[-1] * 2. dtype: FP32, BF16 or FP16.
    variant: the one it was quantised by; they differ in the order of two products. The Hadamard
    transform is not undone: `hadamard16` with `inverse` does, after a sum over ranks, say.
    Raises `ValueError` for a bad argument.
    """
    check_choice("variant", variant, _VARIANTS)
    swizzled = check_flag("swizzled", swizzled)
    row_numel = _checked_row_numel(data, row_numel)
    scale_shape = _scale_shape(data.shape[:-1], NVFP4.num_blocks(row_numel), swizzled)
    check_like("scales", scales, scale_shape, E4M3.dtype, data.device)
    check_one("global_amax", global_amax, (torch.float32,), data.device)
    global_amax = global_amax.view(()) if global_amax.dim() else global_amax
    check_result_dtype(dtype)
    out = data.new_empty((*data.shape[:-1], row_numel), dtype=dtype)
    ops.call(_DEQUANTIZE, data, out, data, scales, global_amax, variant == "torchao", swizzled)
    return out


def hadamard16(x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """The random Hadamard transform of `x`, in groups of 16 along its last dim; a new tensor.

    x: [..., K], FP32, BF16 or FP16; the end of a row that fills no group is passed through. Four
    stages of FP32 additions in a fixed order, then one rounding to x's dtype, so bits are defined:
    `reference_hadamard`. Orthonormal, and the signs are fixed, so `inverse` restores x up to
    rounding, and the transform of a sum over ranks is the sum of the transforms. Bytes moved an
    element: twice its own. Raises `ValueError` for another dtype.
    """
    _check_input(x)
    inverse = check_flag("inverse", inverse)
    out = torch.empty_like(x)
    ops.call(_HADAMARD, x, out, x, inverse)
    return out


def _check_input(x: torch.Tensor) -> None:
    check_dtype("x", x, SOURCE_DTYPES)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dim, got a 0-d tensor; pass x.view(1)")
    check_contiguous("x", x)


def _scale_shape(shape: torch.Size, columns: int, swizzled: bool) -> tuple[int, ...]:
    if not swizzled:
        return (*shape, columns)
    if columns > _MAX_SWIZZLED_COLUMNS:
        raise ValueError(
            f"x: expected at most {_MAX_SWIZZLED_COLUMNS} blocks a row with swizzled scales, got "
            f"{columns}; shorten the rows"
        )
    return (swizzle.swizzled_numel(shape.numel(), columns),)


def _checked_row_numel(data: torch.Tensor, row_numel: int | None) -> int:
    check_dtype("data", data, (torch.uint8,))
    if data.dim() == 0:
        raise ValueError("data: expected [..., ceil(K / 2)], got a 0-d tensor; pass data.view(1)")
    check_contiguous("data", data)
    high = 2 * data.shape[-1]
    if row_numel is None:
        return high
    return check_integer("row_numel", row_numel, max(high - 1, 0), high)
