"""What each rank keeps of a unit between two uses, as data: a row a ZeRO level, a column an axis.

                             shard axis               outer axis
                                                      "no_shard"               "optim"
    strategy                 params      main         params      main         params      main
    0  no_shard              replicate   replicate    replicate   replicate    -
    1  optim                 replicate   shard        replicate   replicate    replicate   shard
    2  optim_grads           replicate   shard        replicate   replicate    replicate   shard
    3  optim_grads_params    shard       shard        replicate   replicate    replicate   shard

`main` are the main parameters, the optimizer's state and the reduced gradients. Levels 1 and 2 are
the same: elsewhere level 1 keeps a full gradient from step to step, but here one is needed during
its exchange alone, or under `no_sync`, which both allow. An outer axis that replicates is HSDP, one
over which the optimizer is sharded HFSDP. Where the shard axis is cut in two, ranks of a node and
nodes, both parts have its column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..buffers import Placement

_R, _S = Placement.REPLICATE, Placement.SHARD


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a unit along one axis."""

    params: Placement
    main: Placement


@dataclass(frozen=True, slots=True)
class Strategy:
    """A ZeRO level: a row of the table above."""

    level: int
    name: str
    shard: Held


STRATEGIES: tuple[Strategy, ...] = (
    Strategy(0, "no_shard", Held(_R, _R)),
    Strategy(1, "optim", Held(_R, _S)),
    Strategy(2, "optim_grads", Held(_R, _S)),
    Strategy(3, "optim_grads_params", Held(_S, _S)),
)
OUTER: Mapping[str, Held] = {"no_shard": Held(_R, _R), "optim": Held(_R, _S)}


@dataclass(frozen=True, slots=True)
class UnitPlacements:
    """A unit's placements along every axis. `params`: of the full parameters at rest; `main`: of
    main parameters, reduced gradients and optimizer state.
    """

    params: tuple[Placement, ...]
    main: tuple[Placement, ...]

    @property
    def whole(self) -> tuple[Placement, ...]:
        """That of full parameters in use."""
        return (_R,) * len(self.main)

    @property
    def frees_params(self) -> bool:
        """Whether full parameters are freed between two uses."""
        return self.params != self.whole


def resolve_strategy(strategy: int | str) -> Strategy:
    """The ZeRO level given by number or name.

    Raises:
        ValueError: unknown number or name.
    """
    for known in STRATEGIES:
        is_level = isinstance(strategy, int) and not isinstance(strategy, bool)
        if strategy == known.name or (is_level and strategy == known.level):
            return known
    names = ", ".join(f"{known.level} or '{known.name}'" for known in STRATEGIES)
    raise ValueError(
        f"zero_dp_strategy: expected one of {names}, got {strategy!r}; pass one of them"
    )


def resolve_outer(strategy: Strategy, outer: str, outer_dim: str | None) -> Held | None:
    """What is held along `outer_dim` of the mesh; None without one.

    Raises:
        ValueError: unknown name; one that shards without an outer dimension, or over it alone.
    """
    if not isinstance(outer, str) or outer not in OUTER:
        raise ValueError(
            f"outer_dp_sharding_strategy: expected one of {list(OUTER)}, got {outer!r}; pass one "
            "of them"
        )
    if outer_dim is None and OUTER[outer].main is _S:
        raise ValueError(
            f"outer_dp_sharding_strategy: expected 'no_shard' without dp_outer_dim, got {outer!r}; "
            "name the mesh's dimension to shard over, or leave the strategy out"
        )
    if OUTER[outer].main is _S and strategy.shard.main is _R:
        raise ValueError(
            "outer_dp_sharding_strategy: expected 'no_shard' with zero_dp_strategy "
            f"'{strategy.name}', which keeps the whole optimizer on every rank of the shard axis, "
            f"got {outer!r}; pass zero_dp_strategy 1, 2 or 3 with it"
        )
    return None if outer_dim is None else OUTER[outer]


def unit_placements(strategy: Strategy, outer: Held | None, num_axes: int) -> UnitPlacements:
    """The placements along `num_axes` axes, of which the last is the outer one, if there is one."""
    held = [strategy.shard] * (num_axes - (outer is not None))
    if outer is not None:
        held.append(outer)
    return UnitPlacements(tuple(h.params for h in held), tuple(h.main for h in held))
