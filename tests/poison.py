"""Fills memory that torch hands out uninitialised: NaN for floats, the largest value for integers.

A read before the first write then shows in the result instead of passing by luck. Covers the
factories below and a storage that grows from nothing; memory that torch takes inside its own
operators is out of reach.
"""

import functools
import os
from collections.abc import Callable

import torch

SWITCH = "SIDESTREAM_TEST_POISON"
FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
METHODS = ("new_empty", "new_empty_strided")
ALL_ONES = 0xFF  # read as fp32, bf16, fp16 or fp8 these bytes are NaN


def install() -> None:
    """Replace the factories for the rest of this process, unless `SIDESTREAM_TEST_POISON=0`."""
    if os.environ.setdefault(SWITCH, "1") == "0" or hasattr(torch.empty, "__wrapped__"):
        return
    # torch notes here, once, which functions `with torch.device(...)` changes: the real ones.
    with torch.device("cpu"):
        torch.empty(0)
    for name in FUNCTIONS:
        setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
    torch.UntypedStorage.resize_ = _poisoned_resize(torch.UntypedStorage.resize_)


def _poisoned(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        return _fill(factory(*args, **kwargs))

    return wrapper


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            if tensor.element_size() > 1:
                return tensor.fill_(float("nan"))
            tensor.view(torch.uint8).fill_(ALL_ONES)
            return tensor
        return tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _poisoned_resize(resize: Callable) -> Callable:
    @functools.wraps(resize)
    def wrapper(storage, size):
        was_empty = storage.nbytes() == 0
        result = resize(storage, size)
        if was_empty and size > 0 and storage.device.type != "meta":
            torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).fill_(ALL_ONES)
        return result

    return wrapper
