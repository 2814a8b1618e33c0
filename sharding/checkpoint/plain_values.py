"""Which values and tensors can be stored: those that are read back as they are, without running
code.
"""

from __future__ import annotations

import io
import re
from typing import Any

import torch
from torch import Tensor


def require_plain(name: str, value: object) -> None:
    """Check that `value`, stored under `name`, can be read back without unsafe unpickling.

    Raises:
        TypeError: it cannot.
    """
    try:
        read_back(value)
    except Exception as error:  # an object can raise anything when it is pickled
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        found = (
            f"{unsafe[1]}, which only unsafe unpickling could read"
            if unsafe
            else f"an object that cannot be saved ({error})"
        )
        raise TypeError(
            f"{name}: expected numbers, strings, tensors and containers of them, got {found}; save "
            "its state instead (for example a state_dict)"
        ) from error


def read_back(value: object) -> Any:
    """What `value` is when it has been stored and read again, on the CPU."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=True)


def require_storable(name: str, tensor: Tensor) -> None:
    """Check that `tensor`, stored under `name`, is its elements and nothing else.

    Raises:
        TypeError: it is sparse, quantised, without values, or a subclass that computes otherwise.
    """
    computes_otherwise = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    is_sharded = hasattr(tensor, "__create_write_items__")
    if (
        (computes_otherwise and not is_sharded)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
    ):
        raise TypeError(
            f"{name}: expected a tensor whose elements are all of it, got a {tensor.layout} "
            f"{type(tensor).__name__} on {tensor.device}; store what it is made of, or register it "
            "with persistent=False"
        )
