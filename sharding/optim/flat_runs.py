"""How an optimizer's parameters lie in flat ones: where each is, who owns it, and where to cut."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..messages import listed
from ..optimizer_view import FlatRun
from ..runtime import Runtime
from ..unit import Unit

CACHED_RUN_NUMEL = 256 * 1024
"""On a CPU an optimizer passes over each parameter some ten times, so a flat parameter takes no
more tensors once it has this many elements: what it holds stays in the caches. A step of AdamW over
26 M elements on one core of an AMD EPYC: 262 ms with a parameter per unit of 3.2 M elements, 159 ms
cut like this. A rank's part of a unit is contiguous, so a run lies in one or two ranks as a whole;
the count is that of all ranks, so that all cut alike.
"""


@dataclass(frozen=True, slots=True)
class Location:
    """Tensor `index` of `unit`, a position in the runtime's list of units."""

    unit: int
    index: int


Located = list[list[Location | None]]


@dataclass(frozen=True, slots=True)
class RunKey:
    """Tensors next to each other can share a flat parameter when they agree in this."""

    group: int
    scalar_state: tuple[object, ...]


def locate_params(
    optimizer: torch.optim.Optimizer, locations: Mapping[int, Location], names: Sequence[str]
) -> Located:
    """The location of every parameter of every group; `locations` maps the id of a parameter to it.

    None for integer parameters, which are not sharded and stay in their group as they are.

    Raises:
        ValueError: a parameter that is not one of the module's, or has state on the meta device.
    """
    located: Located = []
    for number, group in enumerate(optimizer.param_groups):
        located.append([])
        for position, param in enumerate(group["params"]):
            location = locations.get(id(param))
            if location is None and param.is_floating_point():
                raise ValueError(
                    f"optimizer: expected only parameters of the module, got a foreign one at "
                    f"param_groups[{number}]['params'][{position}], shape {tuple(param.shape)}; "
                    "make the optimizer from module.parameters() and pass both to fully_shard, or "
                    f"make it after fully_shard. The module has {len(names)} parameters: "
                    f"{listed(names)}"
                )
            _require_values(optimizer.state.get(param, {}), f"['params'][{position}]", number)
            located[-1].append(location)
    return located


def _require_values(state: Mapping[str, object], place: str, number: int) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ValueError(
                f"optimizer: expected state with values, got '{key}' of param_groups[{number}]"
                f"{place} on the meta device; make the optimizer from module.parameters() after "
                "fully_shard, and pass it to fully_shard_optimizer"
            )


def sharded_locations(runtime: Runtime) -> dict[int, Location]:
    """Where the model's sharded parameters are, by their ids."""
    return {
        id(tensor): Location(position, index)
        for position, unit in enumerate(runtime.units)
        for index, tensor in enumerate(unit.faces.sharded)
    }


def replaced_owners(
    optimizer: torch.optim.Optimizer, runtime: Runtime, located: Located
) -> list[torch.optim.Optimizer]:
    """The optimizers that lose all they have when `optimizer` gets what is at `located`.

    Raises:
        ValueError: one, still alive, would lose some of it and keep the rest.
    """
    wanted = {location for places in located for location in places}
    held = _held_by_others(optimizer, runtime)
    if _split_by(wanted, held):
        gc.collect()  # an optimizer that nobody uses may live on in a cycle with its scheduler
        held = _held_by_others(optimizer, runtime)
    if split := _split_by(wanted, held):
        taken = [place for place in split if place in wanted]
        names = [runtime.units[place.unit].spec.names[place.index] for place in taken]
        raise ValueError(
            "optimizer: expected parameters that no other optimizer updates, got "
            f"{listed(names)}, which another one holds together with {len(split) - len(taken)} "
            "more and would lose without notice; give each parameter to one optimizer, or "
            "replace the other one as a whole"
        )
    return [other for other, places in held.items() if places[0] in wanted]


def _held_by_others(
    optimizer: torch.optim.Optimizer, runtime: Runtime
) -> dict[torch.optim.Optimizer, list[Location]]:
    held: dict[torch.optim.Optimizer, list[Location]] = {}
    for position, unit in enumerate(runtime.units):
        for run in unit.gradients.runs:
            owner = None if run.owner is None else run.owner()
            if owner is not None and owner is not optimizer:
                places = [Location(position, index) for index in run.indices]
                held.setdefault(owner, []).extend(places)
    return held


def _split_by(
    wanted: set[Location | None], held: Mapping[torch.optim.Optimizer, list[Location]]
) -> list[Location]:
    """What an optimizer of `held` has that would lose some of it, but not all, to one that has
    `wanted`.
    """
    for places in held.values():
        if 0 < sum(place in wanted for place in places) < len(places):
            return places
    return []


def owned_grad(unit: Unit, run: FlatRun) -> torch.Tensor | None:
    """What this rank answers for of the gradient of `run`, 1-D: a part of its own slice, also where
    it holds all; None where there is no gradient, or no such part.
    """
    if run.param.grad is None:
        return None
    low, high = (bound - unit.main_span[0] for bound in unit.owned_span)
    start, stop = max(low, run.start), min(high, run.stop)
    if stop <= start:
        return None
    return run.param.grad.detach()[start - run.start : stop - run.start]


def recut(
    unit: Unit, position: int, keys: Mapping[Location, RunKey], optimizer: torch.optim.Optimizer
) -> list[FlatRun]:
    """Cut the unit into stretches of equal key, on a CPU each into runs of about
    `CACHED_RUN_NUMEL`; returns those that have a key. Other optimizers' runs stay.
    """
    old_runs = {index: run for run in unit.gradients.runs for index in run.indices}
    limit = CACHED_RUN_NUMEL if unit.main.is_cpu else math.inf
    cuts: list[tuple[int, list[int]]] = []
    previous: object = None
    stretch = numel = 0
    for index in unit.spec.layout.order:
        key: object = keys.get(Location(position, index), old_runs[index].stretch)
        if cuts and key == previous and numel < limit:
            cuts[-1][1].append(index)
        else:
            stretch += key != previous
            cuts.append((stretch, [index]))
            numel = 0
        previous = key
        numel += unit.spec.layout.segments[index].numel
    runs, cut = [], []
    for stretch, indices in cuts:
        old = old_runs[indices[0]]
        run = old if old.indices == tuple(indices) else unit.make_run(tuple(indices))
        run.stretch = stretch
        runs.append(run)
        owner = None if old.owner is None else old.owner()
        run.owner = None if owner is optimizer else old.owner
        if Location(position, indices[0]) in keys:
            run.owner = weakref.ref(optimizer)
            cut.append(run)
    unit.gradients.replace_runs(runs)
    return cut
