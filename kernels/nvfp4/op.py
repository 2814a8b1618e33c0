"""NVFP4 and the Hadamard transform: what they accept, and the ops behind them.

The ops write in place; the functions here make what they write into, unless it is given. Nothing is
differentiable, and no host waits for a device.
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
from ..checks import check_choice, check_contiguous, check_dtype, check_flag, check_like, check_one
from ..formats.noise import Seed, check_first_index, checked_seed
from ..formats.table import E2M1, E4M3, NVFP4
from ..numbers import tensor_of
from ..op import Op, call, on_first_use
from . import reference

_VARIANTS = ("te", "torchao")
_NONFINITE = ("saturate", "nan")

_AMAX = Op(
    "amax_nvfp4_(Tensor(a!) amax, Tensor x, bool hadamard, bool as_nan) -> ()",
    reference.amax_nvfp4_,
    on_first_use("nvfp4.kernel", "amax_nvfp4_"),
)
_QUANTIZE = Op(
    "quantize_nvfp4_(Tensor(a!) data, Tensor(b!) scales, Tensor x, Tensor global_amax, "
    "SymInt? seed, SymInt first_index, bool torchao, bool hadamard, bool swizzled, bool as_nan, *, "
    "Tensor? seed_tensor=None) -> ()",
    reference.quantize_nvfp4_,
    on_first_use("nvfp4.kernel", "quantize_nvfp4_"),
)
_DEQUANTIZE = Op(
    "dequantize_nvfp4_(Tensor(a!) out, Tensor data, Tensor scales, Tensor global_amax, "
    "bool torchao, bool swizzled) -> ()",
    reference.dequantize_nvfp4_,
    on_first_use("nvfp4.kernel", "dequantize_nvfp4_"),
)
_HADAMARD = Op(
    "hadamard16_(Tensor(a!) out, Tensor x, bool inverse) -> ()",
    reference.hadamard16_,
    on_first_use("nvfp4.hadamard", "hadamard16_"),
)


def quantize_nvfp4(
    x: torch.Tensor,
    *,
    global_amax: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    variant: str = "te",
    hadamard: bool = False,
    swizzled: bool = False,
    nonfinite: str = "saturate",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4 of `x`: 4-bit elements, an E4M3 scale for 16 of them, and one FP32 amax for all.

    x: [..., K], FP32, BF16 or FP16, contiguous; blocks run along a row, the last may be short.
    Returns (data, uint8 [..., ceil(K / 2)], the even element in the low nibble; scales,
    float8_e4m3fn [..., ceil(K / 16)]; the amax, FP32, 0-d). Formulas and sources: `reference`.
    Bytes moved an element of BF16: 4.56, 2.56 if the amax is given.

    global_amax: `amax_nvfp4(x)`, with the same options, if `None`; ranks that share a tensor pass
    the largest of theirs. On the device of x, and no host waits for it. What exceeds it saturates.
    rounding: "nearest", ties to even, or "stochastic", with noise of `seed`, any 64 bits, an
    integer or an int64 tensor of one element that is read on the device of x, and the element's
    index, which is `first_index` for the first of x, and at most 2^63 - 1: so shards round as the
    whole does.
    variant: "te", TransformerEngine's numerics, for training; "torchao", torchao's, for inference.
    hadamard: of `hadamard16(x)`, in the same pass; the amax is of that, too.
    swizzled: scales are 1-D, in the layout of `swizzle_scales`, padding included.
    nonfinite: "saturate", a NaN becomes 6 times its block's scale and infinity the largest that
    there is; or "nan", all of a block that has either becomes NaN, its scale byte 0x7F, and no
    other block changes, whatever rank has it, if an amax that is given leaves it out too.
    out: written into instead, contiguous (data, scales), which share memory with nothing; for the
    amax there is `amax_nvfp4(x, out=...)`. Raises `ValueError` before anything is written.
    """
    _check_input(x)
    check_choice("variant", variant, _VARIANTS)
    hadamard, swizzled = check_flag("hadamard", hadamard), check_flag("swizzled", swizzled)
    check_choice("nonfinite", nonfinite, _NONFINITE)
    seed = checked_seed(rounding, seed, x.device)
    check_first_index(first_index, x.numel())
    if global_amax is not None:
        global_amax = checked_amax("global_amax", global_amax, x.device)
    wanted = parts_of(x.shape, swizzled)
    sources = {"x": x, "global_amax": global_amax, "seed": tensor_of(seed)}
    data, scales = results_of(out, wanted, x.device, sources)
    if global_amax is None:
        global_amax = amax_nvfp4(x, hadamard=hadamard, nonfinite=nonfinite)
    options = (seed, first_index, variant == "torchao", hadamard, swizzled, nonfinite == "nan")
    call(_QUANTIZE, x, data, scales, x, global_amax, *options)
    return data, scales, global_amax


def amax_nvfp4(
    x: torch.Tensor,
    *,
    hadamard: bool = False,
    nonfinite: str = "saturate",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest magnitude in `x`, or in `hadamard16(x)`, NaNs left out: FP32, 0-d, on its device.

    x: [..., K], FP32, BF16 or FP16, contiguous. nonfinite: as for `quantize_nvfp4`; with "nan" all
    of a block with a NaN or an infinity is left out, so that the result is finite. out: written
    into instead, FP32, 0-d, its memory apart from that of x. Raises `ValueError` before anything is
    written.
    """
    _check_input(x)
    hadamard = check_flag("hadamard", hadamard)
    check_choice("nonfinite", nonfinite, _NONFINITE)
    out = result_of(out, ((), torch.float32), x.device, {"x": x})
    call(_AMAX, x, out, x, hadamard, nonfinite == "nan")
    return out


def dequantize_nvfp4(
    data: torch.Tensor,
    scales: torch.Tensor,
    global_amax: torch.Tensor,
    *,
    row_numel: int | None = None,
    dtype: torch.dtype = torch.float32,
    variant: str = "te",
    swizzled: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tensor [..., row_numel] that `quantize_nvfp4`'s results stand for, rounded to `dtype`.

    row_numel: K, where it is odd and so not data.shape[-1] * 2. dtype: FP32, BF16 or FP16.
    variant: the one it was quantised by; they differ in the order of two products. The Hadamard
    transform is not undone: `hadamard16` with `inverse` does, after a sum over ranks, say.
    out: is written into instead, contiguous, its dtype counting, its memory apart. Raises
    `ValueError` before anything is written.
    """
    check_choice("variant", variant, _VARIANTS)
    swizzled = check_flag("swizzled", swizzled)
    check_dtype("data", data, (torch.uint8,))
    check_rows("data", data)
    check_contiguous("data", data)
    row_numel = checked_row_numel(data, row_numel, 2)
    shape = torch.Size((*data.shape[:-1], row_numel))
    _, (scales_shape, scales_dtype) = parts_of(shape, swizzled)
    check_like("scales", scales, scales_shape, scales_dtype, data.device)
    global_amax = checked_amax("global_amax", global_amax, data.device)
    wanted = shape, result_dtype(dtype, out)
    sources = {"data": data, "scales": scales, "global_amax": global_amax}
    out = result_of(out, wanted, data.device, sources)
    call(_DEQUANTIZE, data, out, data, scales, global_amax, variant == "torchao", swizzled)
    return out


def hadamard16(
    x: torch.Tensor, *, inverse: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The random Hadamard transform of `x`, in groups of 16 along its last dim; a new tensor.

    x: [..., K], FP32, BF16 or FP16; the end of a row that fills no group is passed through. Four
    stages of FP32 additions in a fixed order, then one rounding to x's dtype, so bits are defined:
    `reference`. Orthonormal, and the signs are fixed, so `inverse` restores x up to
    rounding, and the transform of a sum over ranks is the sum of the transforms. Bytes moved an
    element: twice its own. out: written into instead, contiguous, of x's shape and dtype; x itself,
    which is then transformed in place, or memory apart. Raises `ValueError` before anything is
    written.
    """
    _check_input(x)
    inverse = check_flag("inverse", inverse)
    if out is not x:
        out = result_of(out, (x.shape, x.dtype), x.device, {"x": x})
    call(_HADAMARD, x, out, x, inverse)
    return out


def _check_input(x: torch.Tensor) -> None:
    check_source("x", x)
    check_rows("x", x)


def checked_amax(name: str, amax: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The amax of a tensor, 0-d."""
    check_one(name, amax, (torch.float32,), device)
    return amax.view(()) if amax.dim() else amax


def parts_of(shape: torch.Size, swizzled: bool) -> tuple[Wanted, Wanted]:
    """The shapes and dtypes of data and scales for a tensor of `shape`."""
    num_blocks = NVFP4.num_blocks(shape[-1])
    if swizzled:
        check_row_blocks("x", num_blocks)
    scales = scale_shape(shape[:-1], num_blocks, swizzled)
    return ((*shape[:-1], NVFP4.data_bytes(shape[-1])), E2M1.dtype), (scales, E4M3.dtype)
