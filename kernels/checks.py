"""Owns the checks of arguments that several ops share: what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        known = ", ".join(choices)
        raise ValueError(f"{name}: expected one of {known}, got {value!r}; choose one of them")


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise `ValueError` unless the tensor's dtype is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected {known}, got {tensor.dtype}; cast or view the tensor")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous()"
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise `ValueError` unless the tensor is on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}; move the tensor")


def check_like(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise `ValueError` unless the tensor is contiguous and has this shape, dtype and device."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}; pass memory of "
            "that shape"
        )
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor, device)
    check_contiguous(name, tensor)


def check_integer(name: str, value: int, low: int, high: int) -> None:
    """Raise `ValueError` unless low <= `value` <= high."""
    if not low <= value <= high:
        raise ValueError(
            f"{name}: expected {low} to {high}, got {value}; choose a number in that range"
        )
