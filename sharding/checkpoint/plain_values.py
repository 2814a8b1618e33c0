"""Which values can be stored: those that are read back without running code."""

from __future__ import annotations

import io
import re

import torch


def require_plain(name: str, value: object) -> None:
    """Check that `value`, stored under `name`, can be read back without unsafe unpickling.

    Raises:
        TypeError: it cannot.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
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
