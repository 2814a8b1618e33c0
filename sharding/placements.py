"""ZeRO levels as data: what each rank keeps of parameters, gradients and optimizer state.

    strategy                 parameters   gradients    optimizer
    0  no_shard              replicate    replicate    replicate
    1  optim                 replicate    shard        shard
    2  optim_grads           replicate    shard        shard
    3  optim_grads_params    shard        shard        shard

Placements say what lies in memory between two uses. A `shard` is one of world-size equal slices of
the flat buffer. Levels 1 and 2 are the same: elsewhere level 1 keeps a full gradient from step to
step, but here one is needed during its exchange alone, or under `no_sync`, which both allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """What one rank holds of a unit's flat buffer along the data-parallel axis."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Placements:
    """A unit's placements along the data-parallel axis: a row of the table above."""

    name: str
    level: int
    params: Placement
    grads: Placement
    optimizer: Placement

    def __post_init__(self) -> None:
        if self.params is Placement.SHARD:
            assert self.optimizer is Placement.SHARD, (
                "a replicated optimizer needs replicated parameters"
            )
        assert (self.grads is Placement.REPLICATE) == (self.optimizer is Placement.REPLICATE)


_R, _S = Placement.REPLICATE, Placement.SHARD
STRATEGIES: tuple[Placements, ...] = (
    Placements("no_shard", 0, _R, _R, _R),
    Placements("optim", 1, _R, _S, _S),
    Placements("optim_grads", 2, _R, _S, _S),
    Placements("optim_grads_params", 3, _S, _S, _S),
)


def resolve_strategy(strategy: int | str) -> Placements:
    """The placements of a ZeRO level given by number or name.

    Raises:
        ValueError: unknown number or name.
    """
    for placements in STRATEGIES:
        if strategy == placements.name or (
            isinstance(strategy, int)
            and not isinstance(strategy, bool)
            and strategy == placements.level
        ):
            return placements
    known = ", ".join(f"{p.level} or '{p.name}'" for p in STRATEGIES)
    raise ValueError(
        f"zero_dp_strategy: expected one of {known}, got {strategy!r}; pass one of them"
    )
