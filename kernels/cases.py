"""All cases of all ops: see `case`."""

from __future__ import annotations

from collections.abc import Sequence

from .case import Case, Row
from .cast import cases as cast
from .fp8 import cases as fp8
from .mx import cases as mx
from .nvfp4 import cases as nvfp4
from .optim import cases as optim
from .pack import cases as pack
from .wire import cases as wire

SECTIONS = (
    ("Many tensors at once", pack.rows()),
    ("Casts", (*cast.rows(), *fp8.rows())),
    ("Block formats", (*mx.rows(), *nvfp4.rows())),
    ("Wire messages", wire.rows()),
    ("Optimizers", optim.rows()),
)
"""What docs/kernels.md has, section by section."""


def rows() -> tuple[Row, ...]:
    """Every op's."""
    return tuple(row for _, rows in SECTIONS for row in rows)


def cases(worlds: Sequence[int] | None = None) -> tuple[Case, ...]:
    """Every case, in the order of the rows; sums are over `worlds` ranks, by default the usual."""
    found = (
        *pack.cases(worlds),
        *cast.cases(),
        *fp8.cases(),
        *mx.cases(),
        *nvfp4.cases(),
        *wire.cases(worlds),
        *optim.cases(),
    )
    order = [row.op for row in rows()]
    return tuple(sorted(found, key=lambda case: order.index(case.op)))


def case_of(op: str, name: str) -> Case:
    """The case `name` of the op called `op`; `KeyError` if there is none."""
    for found in cases():
        if (found.op, found.name) == (op, name):
            return found
    raise KeyError(f"{op}: no case {name!r}")
