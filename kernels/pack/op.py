"""The ops `sidestream::pack_`, `unpack_`, `reduce_`: schemas, devices, argument checks.

| op       | reads         | writes  | cpu                  | cuda             |
|----------|---------------|---------|----------------------|------------------|
| pack_    | tensors       | flat    | `reference.pack_`    | `kernel.pack_`   |
| unpack_  | flat          | tensors | `reference.unpack_`  | `kernel.unpack_` |
| reduce_  | parts         | out     | `reference.reduce_`  | `sum.reduce_`    |

With `accumulate` what is written is read first. The ops write in place, return nothing and are not
differentiable. `reference` defines each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..aliasing import PLAIN_TYPES, check_apart, check_destinations, check_disjoint
from ..checks import (
    SOURCE_DTYPES,
    check_contiguous,
    check_device,
    check_dtype,
    check_flag,
    check_integers,
    check_one_a_tensor,
    check_tensors,
    check_vector,
)
from ..numbers import Scale, checked_scale
from ..op import Op, call, is_usual, on_first_use, runs_directly
from . import reference

_DTYPES = frozenset(SOURCE_DTYPES)
_REDUCE_DIMS = 2
_OPTIONS = "float scale=1.0, bool accumulate=False, *, Tensor? scale_tensor=None"

_PACK = Op(
    f"pack_(Tensor(a!) flat, Tensor[] tensors, SymInt[] offsets, {_OPTIONS}) -> ()",
    reference.pack_,
    on_first_use("pack.kernel", "pack_"),
)
_UNPACK = Op(
    f"unpack_(Tensor(a!)[] tensors, Tensor flat, SymInt[] offsets, {_OPTIONS}) -> ()",
    reference.unpack_,
    on_first_use("pack.kernel", "unpack_"),
)
_REDUCE = Op(
    f"reduce_(Tensor(a!) out, Tensor parts, {_OPTIONS}) -> ()",
    reference.reduce_,
    on_first_use("pack.sum", "reduce_"),
)


def pack_(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    scale: Scale = 1.0,
    accumulate: bool = False,
    slots: Sequence[torch.Tensor] | None = None,
) -> None:
    """Write every tensor into `flat` at its offset: cast, scale and accumulate in the same pass.

    flat: 1-D, contiguous. tensors: any shapes and strides, mixed dtypes. offsets: in elements of
    `flat`, one per tensor; the intervals [offset, offset + numel) are in bounds and disjoint.
    dtypes: FP32, BF16, FP16; one device. No tensor shares memory with `flat`. What no interval
    covers keeps its value.

    flat[o : o + n] = round(float32(tensor) * scale), or with `accumulate`
    flat[o : o + n] = round(float32(flat[o : o + n]) + float32(tensor) * scale): in FP32, no fused
    multiply-add, rounded once to nearest even. `scale` may be an FP32 tensor of one element, read
    on the device. Raises `ValueError` before anything is written.

    slots: the views of `flat` that `offsets` name, shaped like the tensors, where the caller packs
    into the same memory again and again. They are trusted, so that a CPU neither makes the views
    nor checks the arguments anew; other devices need no views, and spare themselves the look at
    what shares memory.
    """
    if (
        slots is not None
        and flat.is_cpu
        and runs_directly(flat)
        and not isinstance(scale, torch.Tensor)
    ):
        reference.move_(slots, tensors, scale, accumulate)
        return
    apart = slots is not None
    tensors, offsets = _checked_tensors(flat, tensors, offsets, disjoint=True, apart=apart)
    scale = checked_scale(scale, flat.device, flat=flat)
    accumulate = check_flag("accumulate", accumulate)
    call(_PACK, flat, flat, tensors, offsets, scale, accumulate)


def unpack_(
    tensors: Sequence[torch.Tensor],
    flat: torch.Tensor,
    offsets: Sequence[int],
    *,
    scale: Scale = 1.0,
    accumulate: bool = False,
) -> None:
    """Fill every tensor from `flat` at its offset: the inverse of `pack_`, same rules and rounding.

    `flat` is only read, so intervals may overlap, but no two elements written may be the same
    memory. Raises `ValueError` before anything is written.
    """
    tensors, offsets = _checked_tensors(flat, tensors, offsets, disjoint=False, apart=False)
    check_destinations("tensors", tensors)
    scale = checked_scale(scale, flat.device, tensors=tensors)
    accumulate = check_flag("accumulate", accumulate)
    call(_UNPACK, flat, tensors, flat, offsets, scale, accumulate)


def reduce_(
    out: torch.Tensor,
    parts: torch.Tensor | None,
    *,
    scale: Scale = 1.0,
    accumulate: bool = False,
    rows: Sequence[torch.Tensor] | None = None,
) -> None:
    """Sum one row per rank into `out`: in FP32, in rank order, scaled, rounded once.

    out: [shard]; parts: [world, shard], world >= 1, or None beside `rows`. Both contiguous, FP32,
    BF16 or FP16, on one device, not overlapping. out = round(sum * scale), or with `accumulate`
    out = round(float32(out) + sum * scale); `scale` as for `pack_`. Raises `ValueError` before
    anything is written.

    rows: the rows of `parts`, where the caller has them at hand; trusted like `pack_`'s slots.
    Rows that lie apart have no table: then `parts` is None.
    """
    if (
        rows is not None
        and out.is_cpu
        and runs_directly(out)
        and not isinstance(scale, torch.Tensor)
    ):
        reference.reduce_(out, parts, scale, accumulate, rows)
        return
    if parts is None:
        if rows is None:
            raise TypeError(
                "parts: expected a torch.Tensor, got None without rows; pass one of them"
            )
        parts = torch.stack(tuple(rows))
    _check_reduce(out, parts)
    scale = checked_scale(scale, out.device, out=out)
    accumulate = check_flag("accumulate", accumulate)
    call(_REDUCE, out, out, parts, scale, accumulate)


def _checked_tensors(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    disjoint: bool,
    apart: bool,
) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    """Accept the usual case, ascending offsets, in one pass; look at all else closely.

    apart: the caller knows that `flat` and the tensors share no memory, which takes time to see.
    """
    if is_usual(_are_tensors, flat, tensors, offsets, apart):
        return tensors, offsets
    return _closely_checked(flat, tensors, offsets, disjoint=disjoint)


def _are_tensors(flat: torch.Tensor, tensors: Any, offsets: Sequence[int], apart: bool) -> bool:
    if (
        flat.dtype not in _DTYPES
        or flat.dim() != 1
        or not flat.is_contiguous()
        or flat.is_neg()
        or len(tensors) != len(offsets)
        or isinstance(tensors, torch.Tensor)
        or not (flat_start := flat.data_ptr())
    ):
        return False
    device = flat.device
    flat_stop = flat_start + flat.nbytes
    end = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        if (
            type(offset) is not int
            or offset < end
            or tensor.dtype not in _DTYPES
            or tensor.device != device
            or tensor.is_neg()
        ):
            return False
        end = offset + tensor.numel()
        if apart:
            continue
        if type(tensor) not in PLAIN_TYPES or tensor.is_nested:
            return False
        start = tensor.data_ptr()
        if not start or (
            start < flat_stop and (start + tensor.nbytes > flat_start or not tensor.is_contiguous())
        ):
            return False
    return end <= flat.numel()


def _closely_checked(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int], *, disjoint: bool
) -> tuple[list[torch.Tensor], list[int]]:
    check_dtype("flat", flat, SOURCE_DTYPES)
    check_vector("flat", flat)
    tensors = check_tensors("tensors", tensors)
    offsets = check_integers("offsets", offsets)
    check_one_a_tensor("offsets", offsets, tensors)
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        check_dtype(f"tensors[{index}]", tensor, SOURCE_DTYPES)
        check_device(f"tensors[{index}]", tensor, flat.device)
        last = flat.numel() - tensor.numel()
        if offset < 0 or offset > last:
            raise ValueError(
                f"offsets[{index}]: expected {f'0 to {last}' if last >= 0 else 'no tensor'} for "
                f"{tensor.numel()} elements in a flat buffer of {flat.numel()}, got {offset}; "
                "make the buffer longer or correct the offset"
            )
    if disjoint:
        check_disjoint([tensor.numel() for tensor in tensors], offsets)
    named = {f"tensors[{index}]": tensor for index, tensor in enumerate(tensors)}
    check_apart({"flat": flat}, named)
    return tensors, offsets


def _check_reduce(out: torch.Tensor, parts: torch.Tensor) -> None:
    if is_usual(_are_rows, out, parts):
        return
    check_dtype("out", out, SOURCE_DTYPES)
    check_vector("out", out)
    check_dtype("parts", parts, SOURCE_DTYPES)
    check_device("parts", parts, out.device)
    if parts.dim() != _REDUCE_DIMS or parts.shape[1] != out.numel() or parts.shape[0] == 0:
        raise ValueError(
            f"parts: expected shape (world, {out.numel()}) with world >= 1, got "
            f"{tuple(parts.shape)}; pass one row per rank"
        )
    check_contiguous("parts", parts)
    check_apart({"out": out}, {"parts": parts})


def _are_rows(out: torch.Tensor, parts: torch.Tensor) -> bool:
    start, parts_start = out.data_ptr(), parts.data_ptr()
    return (
        out.dtype in _DTYPES
        and parts.dtype in _DTYPES
        and out.device == parts.device
        and not (out.is_neg() or parts.is_neg())
        and out.dim() == 1
        and parts.dim() == _REDUCE_DIMS
        and parts.shape[1] == out.numel()
        and parts.shape[0] > 0
        and out.is_contiguous()
        and parts.is_contiguous()
        and start > 0
        and (start >= parts_start + parts.nbytes or parts_start >= start + out.nbytes)
    )
