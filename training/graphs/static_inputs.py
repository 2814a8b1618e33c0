"""What a step is called with, as a CUDA graph needs it: tensors in buffers that stay, all else as a
part of the key under which the graph is kept.

    args, kwargs     dicts, lists, tuples and dataclasses of tensors and plain values, at any depth
    tensors_of       the tensors, in a fixed order
    key_of           all the rest, and of each tensor what a kernel depends on
    with_tensors     the same containers with other tensors
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...sharding.modules.structures import map_tensors, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, type(None), torch.dtype, torch.device)


def key_of(value: object, place: str = "inputs") -> Hashable:
    """What two calls have in common that one graph can serve.

    Raises:
        TypeError: a value that is neither a container, a tensor nor a plain value; a subclass of
        tensors.
        ValueError: a tensor with a gradient, or that is not strided.
    """
    if isinstance(value, Tensor):
        _check_tensor(value, place)
        return value.shape, value.dtype, value.stride()  # wherever it lies, it is copied
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, but not the same step.
        return type(value), repr(value) if isinstance(value, float) else value
    items = _items(value, place)
    return type(value), *((name, key_of(item, f"{place}{name}")) for name, item in items)


def _items(value: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, MutableMapping):
        for name, item in value.items():
            yield f"[{name!r}]", item
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield f"[{number}]", item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield f".{entry.name}", getattr(value, entry.name, None)
    else:
        raise TypeError(
            f"{place}: expected a tensor, a plain value, or a dict, list, tuple or dataclass of "
            f"such, got {type(value).__name__}, which no CUDA graph can follow; pass its tensors"
        )


def _check_tensor(tensor: Tensor, place: str) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"{place}: expected a tensor, got the subclass {type(tensor).__name__}, which a copy "
            "in a buffer would lose; pass the tensors that it is made of"
        )
    if tensor.requires_grad:
        raise ValueError(
            f"{place}: expected a tensor that requires no gradient, got one that does; inputs are "
            "copied, so no gradient would reach it: pass it detached"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{place}: expected a strided tensor, got {tensor.layout}; pass it dense, or its parts"
        )


def tensors_of(value: object) -> list[Tensor]:
    """Every tensor in `value`, in the order of `with_tensors`."""
    return list(tensors_in(value))


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """`value` with its tensors replaced by `tensors`."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), value)


def on_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; from pinned memory they are copied while the host goes
    on.
    """
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


def buffers_like(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Memory on `device` for what `tensors` hold, with their strides."""
    return [_buffer(tensor, device) for tensor in tensors]


def _buffer(tensor: Tensor, device: torch.device) -> Tensor:
    # Where elements overlap, as in what was expanded, no copy can be made into the same strides.
    strides = tensor.stride() if _is_dense(tensor) else None
    if strides is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)


def _is_dense(tensor: Tensor) -> bool:
    numel, extent = tensor.numel(), 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: p[1]):
        if size == 1:
            continue
        if stride != extent:
            return False
        extent *= size
    return extent == numel or numel == 0


def fill(buffers: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy `tensors` into `buffers`, on the current stream; the host does not wait for what lies on
    the GPU or in pinned memory.
    """
    with torch.no_grad():
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
