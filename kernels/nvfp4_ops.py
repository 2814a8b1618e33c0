"""Owns the ops of NVFP4 and of the Hadamard transform: schemas, devices, argument checks.

| op                | reads              | writes       | cpu                  | cuda           |
|-------------------|--------------------|--------------|----------------------|----------------|
| amax_nvfp4_       | x                  | amax         | `reference_nvfp4`    | `nvfp4`        |
| quantize_nvfp4_   | x, amax            | data, scales | `reference_nvfp4`    | `nvfp4`        |
| dequantize_nvfp4_ | data, scales, amax | out          | `reference_nvfp4`    | `nvfp4_decode` |
| hadamard16_       | x                  | out          | `reference_hadamard` | `hadamard`     |

The ops write in place; the functions here make what they write into. Nothing is differentiable, and
no host waits for a device.
"""

from __future__ import annotations

import torch

from . import ops, reference_hadamard, reference_nvfp4, swizzle
from .checks import check_choice
from .formats import E4M3, NVFP4, WIRE_FORMATS
from .noise import signed_seed

_DTYPES = tuple(wire_format.dtype for wire_format in WIRE_FORMATS)
_ROUNDINGS = ("nearest", "stochastic")
_VARIANTS = ("te", "torchao")
_SEED_BITS = 64
_MAX_SWIZZLED_COLUMNS = 2**30  # the GPU kernels count the blocks of a row with 31 bits then

_AMAX = ops.Op(
    "amax_nvfp4_(Tensor(a!) amax, Tensor x, bool hadamard) -> ()",
    reference_nvfp4.amax_,
    ops.on_first_use("nvfp4", "amax_"),
)
_QUANTIZE = ops.Op(
    "quantize_nvfp4_(Tensor(a!) data, Tensor(b!) scales, Tensor x, Tensor global_amax, int? seed, "
    "SymInt first_index, bool torchao, bool hadamard, bool swizzled) -> ()",
    reference_nvfp4.quantize_,
    ops.on_first_use("nvfp4", "quantize_"),
)
_DEQUANTIZE = ops.Op(
    "dequantize_nvfp4_(Tensor(a!) out, Tensor data, Tensor scales, Tensor global_amax, "
    "bool torchao, bool swizzled) -> ()",
    reference_nvfp4.dequantize_,
    ops.on_first_use("nvfp4_decode", "dequantize_"),
)
_HADAMARD = ops.Op(
    "hadamard16_(Tensor(a!) out, Tensor x, bool inverse) -> ()",
    reference_hadamard.hadamard16_,
    ops.on_first_use("hadamard", "hadamard16_"),
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
    `reference_nvfp4`. Bytes moved an element of BF16: 4.56, 2.56 if the amax is given.

    global_amax: `amax_nvfp4(x)` if `None`; ranks that share a tensor pass the largest of theirs. On
    the device of x, and no host waits for it. What exceeds it saturates.
    rounding: "nearest", ties to even, or "stochastic", with noise of `seed`, any 64 bits, and the
    element's index, which is `first_index` for the first of x: so shards round as the whole does.
    variant: "te", TransformerEngine's numerics, for training; "torchao", torchao's, for inference.
    hadamard: of `hadamard16(x)`, in the same pass; the amax is of that, too.
    swizzled: scales are 1-D, in the layout of `swizzle_scales`, padding included.
    Raises `ValueError` for a bad argument.
    """
    _check_input(x)
    check_choice("rounding", rounding, _ROUNDINGS)
    check_choice("variant", variant, _VARIANTS)
    _check_seed(rounding, seed, first_index)
    columns = NVFP4.num_blocks(x.shape[-1])
    if global_amax is None:
        global_amax = amax_nvfp4(x, hadamard=hadamard)
    else:
        _check_amax(global_amax, x.device)
    data = x.new_empty((*x.shape[:-1], -(-x.shape[-1] // 2)), dtype=torch.uint8)
    scales = x.new_empty(_scale_shape(x.shape[:-1], columns, swizzled), dtype=E4M3.dtype)
    noise_seed = None if seed is None else signed_seed(seed)
    options = (noise_seed, first_index, variant == "torchao", hadamard, swizzled)
    ops.call(_QUANTIZE, x, data, scales, x, global_amax, *options)
    return data, scales, global_amax


def amax_nvfp4(x: torch.Tensor, *, hadamard: bool = False) -> torch.Tensor:
    """The largest magnitude in `x`, or in `hadamard16(x)`, NaNs left out: FP32, 0-d, on its device.

    Raises `ValueError` for another dtype than FP32, BF16 and FP16.
    """
    _check_input(x)
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
    row_numel = _checked_row_numel(data, row_numel)
    _check_scales(scales, data, row_numel, swizzled)
    _check_amax(global_amax, data.device)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected one of {_listed(_DTYPES)}, got {dtype}; cast afterwards")
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
    out = torch.empty_like(x)
    ops.call(_HADAMARD, x, out, x, inverse)
    return out


def _listed(choices: tuple[object, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)


def _check_input(x: torch.Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"x: expected one of {_listed(_DTYPES)}, got {x.dtype}; cast it first")
    if x.dim() == 0:
        raise ValueError("x: expected at least one dim, got a 0-d tensor; pass x.view(1)")
    _check_contiguous("x", x)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous memory, got strides {tensor.stride()}; call .contiguous()"
        )


def _scale_shape(shape: torch.Size, columns: int, swizzled: bool) -> tuple[int, ...]:
    if not swizzled:
        return (*shape, columns)
    if columns > _MAX_SWIZZLED_COLUMNS:
        raise ValueError(
            f"x: expected at most {_MAX_SWIZZLED_COLUMNS} blocks a row with swizzled scales, got "
            f"{columns}; shorten the rows"
        )
    return (swizzle.swizzled_numel(shape.numel(), columns),)


def _check_seed(rounding: str, seed: int | None, first_index: int) -> None:
    if (seed is None) is (rounding == "stochastic"):
        wanted = "an integer" if rounding == "stochastic" else "None"
        raise ValueError(
            f"seed: expected {wanted} with {rounding} rounding, got {seed}; the seed is the noise's"
        )
    if seed is not None and not -(2 ** (_SEED_BITS - 1)) <= seed < 2**_SEED_BITS:
        raise ValueError(f"seed: expected -2^63 to 2^64 - 1, got {seed}; take its low 64 bits")
    if first_index < 0:
        raise ValueError(f"first_index: expected 0 or more, got {first_index}; count from 0")


def _check_amax(global_amax: torch.Tensor, device: torch.device) -> None:
    if global_amax.numel() != 1 or global_amax.dtype is not torch.float32:
        raise ValueError(
            f"global_amax: expected one torch.float32 number, got {global_amax.dtype} of shape "
            f"{tuple(global_amax.shape)}; `amax_nvfp4` makes it"
        )
    if global_amax.device != device:
        raise ValueError(
            f"global_amax: expected device {device}, as the data, got {global_amax.device}; move it"
        )


def _checked_row_numel(data: torch.Tensor, row_numel: int | None) -> int:
    if data.dtype is not torch.uint8 or data.dim() == 0:
        raise ValueError(
            f"data: expected torch.uint8 [..., ceil(K / 2)], got {data.dtype} of shape "
            f"{tuple(data.shape)}; pass `quantize_nvfp4`'s"
        )
    _check_contiguous("data", data)
    row_bytes = data.shape[-1]
    if row_numel is None:
        return 2 * row_bytes
    if row_numel < 0 or -(-row_numel // 2) != row_bytes:
        raise ValueError(
            f"row_numel: expected {max(2 * row_bytes - 1, 0)} or {2 * row_bytes} for {row_bytes} "
            f"bytes a row, got {row_numel}; pass the length of the quantised rows"
        )
    return row_numel


def _check_scales(scales: torch.Tensor, data: torch.Tensor, row_numel: int, swizzled: bool) -> None:
    expected = _scale_shape(data.shape[:-1], NVFP4.num_blocks(row_numel), swizzled)
    if scales.dtype is not E4M3.dtype or tuple(scales.shape) != expected:
        raise ValueError(
            f"scales: expected {E4M3.dtype} of shape {expected}, got {scales.dtype} of shape "
            f"{tuple(scales.shape)}; pass those made with the data, `swizzled` as they are"
        )
    _check_contiguous("scales", scales)
    if scales.device != data.device:
        raise ValueError(
            f"scales: expected device {data.device}, as the data, got {scales.device}; move them"
        )
