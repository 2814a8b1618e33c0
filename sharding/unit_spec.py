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

    `first_indices`: how many elements of the model come before each tensor. `wires`: how gradients
    travel along the first axis, and how sums do along all others. `param_wire`: the format in which
    parameters are gathered, None: as they are. `scale`: what the sum over all ranks is multiplied
    by. `is_expert`: whether other ranks of the model have others in its place.
    """

    index: int
    name: str
    names: tuple[str, ...]
    layout: FlatLayout
    first_indices: tuple[int, ...]
    dtypes: UnitDtypes
    placements: UnitPlacements
    wires: tuple[Wire, Wire]
    param_wire: str | None
    scale: float
    is_expert: bool = False
