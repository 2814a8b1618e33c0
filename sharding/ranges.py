"""Ranges that name our work in the traces of `torch.profiler`: `sidestream::VERB WHAT`.

    start WHAT       stages up to the first operation; of a gradient exchange: packs, starts to send
    complete WHAT    a stage that follows operations: the sum
    wait WHAT        the host waits for them (gloo; on a GPU streams wait and the host does not)

WHAT names the unit. While no profiler runs nobody asks for a range: that costs one look at a flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd.profiler import record_function

PREFIX = "sidestream::"
T = TypeVar("T")

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler runs."""


def ranged(verb: str, what: str, work: Callable[[], T]) -> T:
    """`work()`, as a range of that name."""
    with record_function(f"{PREFIX}{verb} {what}"):
        return work()
