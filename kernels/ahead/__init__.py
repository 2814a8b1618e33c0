"""The configurations that are compiled ahead of time: of every op, with a name and a cost.

The gates on compiled kernels and `sidestream inspect` look at the same ones; `cases` has all. A
kernel's new option that changes its code gets a case here, and a gate in `registry`.
"""

from __future__ import annotations

import functools

from . import casts, fp8, many_tensors, messages, mx, nvfp4, optimizers
from .case import HARDWARE_FP8, Case, Configuration
from .count import CountError

__all__ = ["HARDWARE_FP8", "Case", "Configuration", "CountError", "case_of", "cases"]

_MODULES = (many_tensors, casts, fp8, mx, nvfp4, messages, optimizers)


@functools.cache
def cases() -> tuple[Case, ...]:
    """All cases, in the order of the registry's rows."""
    return tuple(case for module in _MODULES for case in module.cases())


def case_of(op: str, name: str) -> Case:
    """The case `name` of the op called `op`; `KeyError` if there is none."""
    for found in cases():
        if (found.op, found.name) == (op, name):
            return found
    raise KeyError(f"{op}: no case {name!r}")
