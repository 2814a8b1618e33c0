"""Who competes in a case: ours, what does the same by other means, and how each is called.

Run    a call without arguments
Bind   operands -> a run; views, offsets and buffers are made here, outside of the clock
"""

from __future__ import annotations

from collections.abc import Callable

from ...kernels.case import Case, Operands

OURS = "sidestream"
COMPILED = "compiled"

Run = Callable[[], object]
Bind = Callable[[Operands], Run]


def ours(case: Case) -> Bind:
    """The public function, as the case calls it."""
    return lambda operands: lambda: case.call(operands)


def as_bind(function: Callable[[Operands], object]) -> Bind:
    """`function` as a candidate."""
    return lambda operands: lambda: function(operands)
