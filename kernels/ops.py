"""Owns the ops `sidestream::pack_`, `unpack_`, `reduce_`: schemas, devices, argument checks.

| op       | reads         | writes  | cpu                  | cuda             |
|----------|---------------|---------|----------------------|------------------|
| pack_    | tensors       | flat    | `reference.pack_`    | `pack.pack_`     |
| unpack_  | flat          | tensors | `reference.unpack_`  | `pack.unpack_`   |
| reduce_  | parts         | out     | `reference.reduce_`  | `reduce.reduce_` |

With `accumulate` what is written is read first. The ops write in place, return nothing and are not
differentiable. `reference` defines each of them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import reference
from .formats import WIRE_FORMATS, wire_format_of

_OPTIONS = "float scale=1.0, bool accumulate=False"
_library = torch.library.Library("sidestream", "DEF")

_DTYPES = frozenset(wire_format.dtype for wire_format in WIRE_FORMATS)
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_REDUCE_DIMS = 2


def pack_(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    slots: Sequence[torch.Tensor] | None = None,
) -> None:
    """Write every tensor into `flat` at its offset: cast, scale and accumulate in the same pass.

    flat: 1-D, contiguous. tensors: any shapes and strides, mixed dtypes. offsets: in elements of
    `flat`, one per tensor; the intervals [offset, offset + numel) are in bounds and disjoint.
    dtypes: FP32, BF16, FP16; one device. What no interval covers keeps its value.

    flat[o : o + n] = round(float32(tensor) * scale), or with `accumulate`
    flat[o : o + n] = round(float32(flat[o : o + n]) + float32(tensor) * scale): in FP32, no fused
    multiply-add, rounded once to nearest even. Raises `ValueError` before anything is written.

    slots: the views of `flat` that `offsets` name, shaped like the tensors, where the caller packs
    into the same memory again and again. They are trusted, so that a CPU neither makes the views
    nor checks the arguments anew; other devices need no views and pay no attention.
    """
    if slots is not None and flat.is_cpu and _runs_directly(flat):
        reference.move_(slots, tensors, scale, accumulate)
        return
    _check_flat(flat)
    _check_tensors(flat, tensors, offsets, disjoint=True)
    call(_PACK, flat, flat, tensors, offsets, scale, accumulate)


def unpack_(
    tensors: Sequence[torch.Tensor],
    flat: torch.Tensor,
    offsets: Sequence[int],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Fill every tensor from `flat` at its offset: the inverse of `pack_`, same rules and rounding.

    `flat` is only read, so intervals may overlap. Raises `ValueError` before anything is written.
    """
    _check_flat(flat)
    _check_tensors(flat, tensors, offsets, disjoint=False)
    call(_UNPACK, flat, tensors, flat, offsets, scale, accumulate)


def reduce_(
    out: torch.Tensor,
    parts: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    rows: Sequence[torch.Tensor] | None = None,
) -> None:
    """Sum one row per rank into `out`: in FP32, in rank order, scaled, rounded once.

    out: [shard]; parts: [world, shard], world >= 1. Both contiguous, FP32, BF16 or FP16, on one
    device, not overlapping. out = round(sum * scale), or with `accumulate`
    out = round(float32(out) + sum * scale). Raises `ValueError` before anything is written.

    rows: the rows of `parts`, where the caller has them at hand; trusted like `pack_`'s slots.
    """
    if rows is not None and out.is_cpu and _runs_directly(out):
        reference.sum_rows_(out, rows, scale, accumulate)
        return
    _check_reduce(out, parts)
    call(_REDUCE, out, out, parts, scale, accumulate)


def _without_autograd(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                function(*arguments, **options)
        else:
            function(*arguments, **options)

    return call


def on_first_use(module: str, name: str) -> Callable[..., None]:
    """Our `module`'s function `name`, imported when it is first called: CPUs need no Triton."""
    found: Callable[..., None] | None = None

    def call(*arguments: Any, **options: Any) -> None:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f".{module}", __package__), name)
        found(*arguments, **options)

    return call


class Op:
    """One op of ours: its overload and its implementation by device type.

    `schema` is without the namespace: "reduce_(Tensor(a!) out, Tensor parts) -> ()". An op writes
    into its arguments and returns nothing.
    """

    def __init__(self, schema: str, cpu: Callable[..., None], cuda: Callable[..., None]) -> None:
        _library.define(schema)
        name = schema.partition("(")[0]
        self.overload = getattr(torch.ops.sidestream, name).default
        self.by_device: Mapping[str, Callable[..., None]] = {
            "cpu": _without_autograd(cpu),
            "cuda": _without_autograd(cuda),
        }
        for device_type, implementation in self.by_device.items():
            _library.impl(name, implementation, device_type.upper())
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"sidestream::{name}", _writes_in_place, lib=_library)


def _writes_in_place(*arguments: Any, **options: Any) -> None:
    """What the ops return on tensors without data: nothing."""


_PACK = Op(
    f"pack_(Tensor(a!) flat, Tensor[] tensors, SymInt[] offsets, {_OPTIONS}) -> ()",
    reference.pack_,
    on_first_use("pack", "pack_"),
)
_UNPACK = Op(
    f"unpack_(Tensor(a!)[] tensors, Tensor flat, SymInt[] offsets, {_OPTIONS}) -> ()",
    reference.unpack_,
    on_first_use("pack", "unpack_"),
)
_REDUCE = Op(
    f"reduce_(Tensor(a!) out, Tensor parts, {_OPTIONS}) -> ()",
    reference.reduce_,
    on_first_use("reduce", "reduce_"),
)


def _runs_directly(anchor: torch.Tensor) -> bool:
    """Whether nobody watches operators: no trace, no dispatch mode, no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and type(anchor) in _PLAIN_TYPES
        and not torch._C._len_torch_dispatch_stack()
    )


def call(op: Op, anchor: torch.Tensor, *arguments: Any) -> None:
    """Run `op` on the device of `anchor`.

    The dispatcher costs 9 us of host time for nine tensors, so it is left out where nobody watches.
    """
    if (
        _runs_directly(anchor)
        and (implementation := op.by_device.get(anchor.device.type)) is not None
    ):
        implementation(*arguments)
    else:
        op.overload(*arguments)


def _check_flat(flat: torch.Tensor) -> None:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"flat: expected a contiguous 1-D tensor, got shape {tuple(flat.shape)} with strides "
            f"{flat.stride()}; pass flat.view(-1) of contiguous memory"
        )
    wire_format_of(flat.dtype)


def _check_tensors(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int], *, disjoint: bool
) -> None:
    """Accept the usual case, ascending offsets, in one pass; look at all else closely."""
    device = flat.device
    end = 0
    usual = len(tensors) == len(offsets)
    if usual:
        for tensor, offset in zip(tensors, offsets, strict=True):
            if offset < end or tensor.dtype not in _DTYPES or tensor.device != device:
                usual = False
                break
            end = offset + tensor.numel()
    if not usual or end > flat.numel():
        _check_tensors_closely(flat, tensors, offsets, disjoint=disjoint)


def _check_tensors_closely(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int], *, disjoint: bool
) -> None:
    if len(tensors) != len(offsets):
        raise ValueError(
            f"offsets: expected one per tensor, {len(tensors)}, got {len(offsets)}; "
            "pass lists of equal length"
        )
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        _check_tensor(f"tensors[{index}]", tensor, flat.device)
        if offset < 0 or offset + tensor.numel() > flat.numel():
            raise ValueError(
                f"offsets[{index}]: expected 0 to {flat.numel() - tensor.numel()} for "
                f"{tensor.numel()} elements in a flat buffer of {flat.numel()}, got {offset}; "
                "make the buffer longer or correct the offset"
            )
    if disjoint:
        check_disjoint([tensor.numel() for tensor in tensors], offsets)


def _check_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name}: expected device {device}, as the buffer, got {tensor.device}; move the tensor"
        )
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(wire_format.dtype) for wire_format in WIRE_FORMATS)
        raise ValueError(
            f"{name}: expected one of {known}, got {tensor.dtype}; cast the tensor first"
        )


def check_disjoint(numels: Sequence[int], offsets: Sequence[int]) -> None:
    """Raise `ValueError` unless tensors of `numels` elements at `offsets` keep apart."""
    filled = sorted((offsets[i], offsets[i] + numel, i) for i, numel in enumerate(numels) if numel)
    for (_, end, left), (start, _, right) in itertools.pairwise(filled):
        if start < end:
            raise ValueError(
                f"offsets[{right}]: expected {end} or more, where tensors[{left}] ends, got "
                f"{start}; give every tensor its own interval"
            )


def _check_reduce(out: torch.Tensor, parts: torch.Tensor) -> None:
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            f"out: expected a contiguous 1-D tensor, got shape {tuple(out.shape)} with strides "
            f"{out.stride()}; pass a contiguous shard"
        )
    if parts.dim() != _REDUCE_DIMS or parts.shape[1] != out.numel() or parts.shape[0] == 0:
        raise ValueError(
            f"parts: expected shape (world, {out.numel()}) with world >= 1, got "
            f"{tuple(parts.shape)}; pass one row per rank"
        )
    if not parts.is_contiguous():
        raise ValueError(
            f"parts: expected contiguous rows, got strides {parts.stride()}; call .contiguous()"
        )
    _check_tensor("out", out, out.device)
    _check_tensor("parts", parts, out.device)
