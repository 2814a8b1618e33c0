"""The numbers of `numbers` inside Triton kernels."""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number_of(argument) -> tl.tensor:
    """The number that a kernel was given, or that lies where it was told.

    Kernels do not specialise on either: else a number that moves, or is 1, is compiled for anew.
    """
    number = tl.to_tensor(argument)
    if number.dtype.is_ptr():
        return tl.load(number)
    else:
        return number
