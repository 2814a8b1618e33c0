"""Norms of tensors: the op `sidestream::l2_norm_`, and its two halves for norms over ranks.

| function           | reads             | writes          | CUDA                      |
|--------------------|-------------------|-----------------|---------------------------|
| l2_norm_           | tensors           | norm, found_inf | `norm.l2_norm_`           |
| largest_magnitudes | tensors           | its result      | `norm.largest_magnitudes` |
| power_sums         | tensors, maxima   | its result      | `norm.square_sums`        |

Elsewhere, and for other powers than squares, each is its definition in `norm_reference`. No host
waits for a device. A norm over ranks takes the maximum and the sum of what the halves give on each
of them, integers both, and then `norms_of`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..aliasing import are_sources, check_apart
from ..checks import (
    SOURCE_DTYPES,
    check_device,
    check_dtype,
    check_flag,
    check_one,
    check_tensor,
    check_tensors,
)
from ..op import Op, is_usual, launches, on_first_use
from . import norm_reference
from .norm_reference import Quantities, norms_of

__all__ = ["Quantities", "l2_norm_", "largest_magnitudes", "norms_of", "power_sums"]

_L2_NORM = Op(
    "l2_norm_(Tensor(a!) norm, Tensor[] tensors, *, Tensor(b!)? found_inf, bool squared) -> ()",
    norm_reference.l2_norm_,
    on_first_use("optim.norm", "l2_norm_"),
)
_launch_largest = on_first_use("optim.norm", "largest_magnitudes")
_launch_squares = on_first_use("optim.norm", "square_sums")

_PRECISE = (torch.float32, torch.float64)
_FLAGS = (torch.bool, torch.int32, torch.float32)
_SQUARE = 2.0


def l2_norm_(
    norm: torch.Tensor,
    tensors: Iterable[torch.Tensor],
    *,
    found_inf: torch.Tensor | None = None,
    squared: bool = False,
) -> None:
    """norm = root of the sum of all elements' squares; found_inf = is any of them NaN or infinite.

    norm: one element, FP32 or FP64; with `squared` the sum itself, for a sum over ranks. tensors:
    any number, shapes and strides, FP32, BF16 and FP16 mixed; none at all have norm 0. found_inf:
    one element, bool, int32 or FP32. All on one device, none of it waited for.

    The same bits on any device, at any launch configuration, in any order of the tensors: sums of
    128 squares in FP32, added as integers, see `norm_reference`. Relative error of the norm below
    7 * 2^-24, of the square below 12 * 2^-24, whatever the range of the elements: they are divided
    by the largest first. Bytes moved: the tensors', twice.

    Raises `ValueError` before anything is written.
    """
    check_tensor("norm", norm)
    check_one("norm", norm, _PRECISE, norm.device)
    if found_inf is not None:
        check_one("found_inf", found_inf, _FLAGS, norm.device)
    tensors = check_tensors("tensors", tensors)  # parameters() can be gone through but once
    named: dict[str, torch.Tensor] = {}
    if not is_usual(are_sources, norm, tensors, SOURCE_DTYPES, found_inf):
        named = {f"tensors[{index}]": tensor for index, tensor in enumerate(tensors)}
    for name, tensor in named.items():
        check_dtype(name, tensor, SOURCE_DTYPES)
        check_device(name, tensor, norm.device)
    check_apart({"norm": norm, "found_inf": found_inf}, named)
    _L2_NORM.overload(norm, tensors, found_inf=found_inf, squared=check_flag("squared", squared))


def largest_magnitudes(quantities: Quantities, device: torch.device) -> torch.Tensor:
    """The bits, int32 [n], of the largest |x| of each quantity: `norm_reference` says more.

    quantities: tensors of any shape, FP32, BF16 or FP16, on `device`; trusted. One launch.
    """
    on_gpu = launches(device, *(tensor for tensors in quantities for tensor in tensors))
    return (_launch_largest if on_gpu else norm_reference.largest_magnitudes)(quantities, device)


def power_sums(
    quantities: Quantities, largest: torch.Tensor, exponent: float = _SQUARE
) -> torch.Tensor:
    """The sums of (|x| / largest)^exponent of each quantity, int64 [n, 2], in limbs.

    largest: int32 [n], from `largest_magnitudes`, or the maximum over ranks. One launch for
    squares; other powers, at least 1 and finite, are made by PyTorch.
    """
    tensors = (tensor for tensors in quantities for tensor in tensors)
    if exponent == _SQUARE and launches(largest.device, largest, *tensors):
        return _launch_squares(quantities, largest)
    return norm_reference.power_sums(quantities, largest, exponent)
