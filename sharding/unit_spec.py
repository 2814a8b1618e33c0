"""What a communication unit is, decided before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ..buffers import FlatLayout
from .placements import UnitPlacements
from .precision import UnitDtypes
from .wire import Wire


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit. `names` are parameter FQNs, in the order of the layout's segments.

    `wires`: how gradients travel along the first axis, and how sums do along all others. `scale`:
    what the sum over all ranks is multiplied by.
    """

    index: int
    name: str
    names: tuple[str, ...]
    layout: FlatLayout
    dtypes: UnitDtypes
    placements: UnitPlacements
    wires: tuple[Wire, Wire]
    scale: float
