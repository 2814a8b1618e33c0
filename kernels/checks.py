"""Checks of arguments that several ops share: what was expected, what came, what to do.

An object of another Python type is a `TypeError`, and all else that is wrong a `ValueError`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized
from numbers import Integral, Real
from typing import Any, cast

import torch

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_FP32 = torch.finfo(torch.float32).max


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(choices)
        raise ValueError(f"{name}: expected one of {known}, got {value!r}; choose one of them")


def check_tensor(name: str, tensor: object) -> None:
    """Raise unless it is a tensor whose elements lie in memory as they are, some stride apart."""
    if not isinstance(tensor, torch.Tensor):
        got = type(tensor).__name__
        raise TypeError(f"{name}: expected a torch.Tensor, got {got}; pass a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{name}: expected a dense tensor, got {got}; call .to_dense()")
    if not torch.compiler.is_compiling() and (tensor.is_neg() or tensor._is_zerotensor()):
        got = "a negated view" if tensor.is_neg() else "zeros without memory"
        raise ValueError(
            f"{name}: expected elements as they lie in memory, got {got}; call .clone()"
        )


def check_tensors(name: str, tensors: object) -> list[torch.Tensor]:
    """The tensors as a list; `TypeError` for a tensor, or what is no list at all."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        got = type(tensors).__name__
        raise TypeError(f"{name}: expected a list of tensors, got {got}; pass [tensor]")
    return list(tensors)


def check_pair(name: str, pair: object) -> None:
    """Raise unless it is two of something, in a tuple or a list."""
    check_count(name, pair, 2)


def check_count(name: str, values: object, count: int) -> None:
    """Raise unless it is so many of something, in a tuple or a list."""
    expected = "a pair" if count == 2 else f"a tuple of {count}"  # noqa: PLR2004
    if not isinstance(values, (tuple, list)):
        got = type(values).__name__
        raise TypeError(f"{name}: expected {expected}, got {got}; pass a tuple of {count}")
    if len(values) != count:
        raise ValueError(f"{name}: expected {expected}, got {len(values)}; pass a tuple of {count}")


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless it is a tensor, of one of `dtypes`."""
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected {known}, got {tensor.dtype}; cast or view the tensor")


def check_result_dtype(dtype: torch.dtype) -> None:
    """Raise `ValueError` unless `dtype`, an argument of that name, is one of `SOURCE_DTYPES`."""
    if dtype not in SOURCE_DTYPES:
        known = ", ".join(str(found) for found in SOURCE_DTYPES)
        raise ValueError(f"dtype: expected one of {known}, got {dtype}; choose one of them")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous()"
        )


def check_vector(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor is contiguous and 1-D."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous 1-D tensor, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; pass .view(-1) of contiguous memory"
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
    """Raise unless it is a contiguous tensor of this shape, dtype and device."""
    check_dtype(name, tensor, (dtype,))
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}; pass memory of "
            "that shape"
        )
    check_device(name, tensor, device)
    check_contiguous(name, tensor)


def check_one(
    name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise unless it is a tensor of one element, of one of `dtypes`, on `device`."""
    check_dtype(name, tensor, dtypes)
    check_device(name, tensor, device)
    if tensor.numel() != 1:
        raise ValueError(
            f"{name}: expected one element, got shape {tuple(tensor.shape)}; pass a 0-d tensor"
        )


def check_is_integer(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is an integer."""
    if not isinstance(value, (int, torch.SymInt, Integral)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}; pass an int")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value`, if it is an integer and low <= `value` <= high."""
    check_is_integer(name, value)
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: expected {allowed}, got {value}; choose a number in that range")
    number: int = int(value) if isinstance(value, Integral) else value
    return number


def check_integers(name: str, values: object) -> list[int]:
    """`values` as a list of integers."""
    if isinstance(values, torch.Tensor) or not isinstance(values, Iterable):
        got = type(values).__name__
        raise TypeError(f"{name}: expected a list of integers, got {got}; pass a list")
    found = list(values)
    for index, value in enumerate(found):
        if type(value) is not int:  # a name takes time to make
            check_is_integer(f"{name}[{index}]", value)
    return found


def check_one_a_tensor(name: str, values: Sequence[int], tensors: Sized) -> None:
    """Raise `ValueError` unless there are as many values as tensors."""
    if len(values) != len(tensors):
        raise ValueError(
            f"{name}: expected one per tensor, {len(tensors)}, got {len(values)}; pass lists of "
            "equal length"
        )


def check_flag(name: str, value: object) -> bool:
    """`value` as a bool, if it is one, or 0 or 1."""
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{name}: expected True or False, got {value!r}; pass one of them")
    return bool(value)


def check_number(name: str, value: Any) -> float:
    """`value`, if it is a number: NaN and infinity are."""
    if type(value) is float:
        return value
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt, Real)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}; pass a float")
    try:
        return float(value) if isinstance(value, Real) else cast(float, value)
    except OverflowError:
        raise ValueError(f"{name}: expected a float, got {value}; it is too large") from None
