"""Optimizers over flat shards: an elementwise torch optimizer keeps its class, groups, options and
state.

Its `param_groups` are re-pointed at flat 1-D parameters, one per unit and stretch of tensors that
share a group (on a CPU, a long stretch is cut into several). State of single tensors, if there is
any, is laid into flat state in the same places.
"""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arguments import kind_of, require_flag
from .gradients import FlatRun
from .optimizer_state import flat_state, scalar_signature
from .runtime import Runtime
from .uncompiled import uncompiled
from .unit import Unit

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_NOT_ELEMENTWISE = {
    "Muon": "it orthogonalises whole matrices",
    "Shampoo": "it preconditions whole matrices",
    "DistributedShampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
    "Adafactor": "it factors the second moment over rows and columns",
    "LBFGS": "it takes inner products over all parameters",
    "LARS": "it scales by the norm of each tensor",
    "LAMB": "it scales by the norm of each tensor",
    "SparseAdam": "it needs sparse gradients",
}

_NAMED = 4
"""Parameters that an error names."""

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


@dataclass(frozen=True, slots=True)
class _RunKey:
    """Tensors next to each other can share a flat parameter when they agree in this."""

    group: int
    scalar_state: tuple[object, ...]


def check_elementwise(optimizer: torch.optim.Optimizer, *, declared: bool = False) -> None:
    """Refuse optimizers whose update of one element depends on others, since they see flat shards.

    `declared`: the caller vouches that an unknown class is elementwise.

    Raises:
        TypeError: no torch optimizer, or `declared` is no bool.
        ValueError: an optimizer known not to be elementwise, or an unknown one that is not
        `declared`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {kind_of(optimizer)}; make one from "
            "module.parameters()"
        )
    require_flag("elementwise", declared)
    kind = type(optimizer)
    for base in kind.__mro__:
        if base.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                "optimizer: expected an elementwise optimizer such as AdamW or SGD, got "
                f"{kind.__name__}: "
                f"{_NOT_ELEMENTWISE[base.__name__]}, which a flat shard does not hold"
            )
    # torch wraps `step` anew in each class that is instantiated: compare what is inside. A subclass
    # that overrides `step` may do anything.
    step = inspect.unwrap(kind.step)
    known = any(
        issubclass(kind, base) and step is inspect.unwrap(base.step) for base in _ELEMENTWISE
    )
    if not known and not declared:
        raise ValueError(
            "optimizer: expected an optimizer known to be elementwise, got "
            f"{kind.__module__}.{kind.__name__}; "
            "if each element's update depends on that element alone, pass elementwise=True"
        )


def locate_params(
    optimizer: torch.optim.Optimizer, locations: Mapping[int, Location], names: Sequence[str]
) -> list[list[Location | None]]:
    """The location of every parameter of every group; `locations` maps the id of a parameter to it.

    None for integer parameters, which are not sharded and stay in their group as they are.

    Raises:
        ValueError: a parameter that is not one of the module's.
    """
    located: list[list[Location | None]] = []
    for number, group in enumerate(optimizer.param_groups):
        located.append([])
        for position, param in enumerate(group["params"]):
            location = locations.get(id(param))
            if location is None and param.is_floating_point():
                raise ValueError(
                    f"optimizer: expected only parameters of the module, got a foreign one at "
                    f"param_groups[{number}]['params'][{position}], shape {tuple(param.shape)}; "
                    "make the optimizer "
                    "from module.parameters() and pass both to fully_shard, or make it after "
                    "fully_shard. The "
                    f"module has {len(names)} parameters: {', '.join(names[:_NAMED])}, ..."
                )
            located[-1].append(location)
    return located


def rebind(
    optimizer: torch.optim.Optimizer, runtime: Runtime, located: list[list[Location | None]]
) -> None:
    """Point `optimizer` at flat runs of the runtime's units, and carry its state over.

    Raises:
        ValueError: another optimizer, still alive, updates some of these parameters and others
            besides.
    """
    _check_owners(runtime, located)
    old_state: dict[Location, dict[str, Any]] = {}
    keys: dict[Location, _RunKey] = {}
    flat_params: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for number, (group, places) in enumerate(zip(optimizer.param_groups, located, strict=True)):
        for param, location in zip(group["params"], places, strict=True):
            if location is None:
                flat_params[number].append(param)
                continue
            state = dict(optimizer.state.get(param, {}))
            old_state[location] = state
            keys[location] = _RunKey(number, scalar_signature(state, param))
    optimizer.state.clear()
    for position, unit in enumerate(runtime.units):
        for run in _regroup(unit, position, keys):
            states = [old_state[Location(position, index)] for index in run.indices]
            flat_params[keys[Location(position, run.indices[0])].group].append(run.param)
            run.owner = weakref.ref(optimizer)
            if states[0]:
                optimizer.state[run.param] = flat_state(unit, run, states)
    for group, params in zip(optimizer.param_groups, flat_params, strict=True):
        group["params"] = params
        if "param_names" in group:
            group["param_names"] = [f"flat_{place}" for place in range(len(params))]
    _watch_steps(optimizer, runtime)


def _check_owners(runtime: Runtime, located: list[list[Location | None]]) -> None:
    wanted = {location for places in located for location in places}
    if not _split_by(wanted, runtime):
        return
    gc.collect()  # an optimizer that nobody uses may live on in a cycle with its scheduler
    if split := _split_by(wanted, runtime):
        taken = [place for place in split if place in wanted]
        names = [runtime.units[place.unit].spec.names[place.index] for place in taken]
        raise ValueError(
            "optimizer: expected parameters that no other optimizer updates, got "
            f"{', '.join(names[:_NAMED])}, which another one holds together with "
            f"{len(split) - len(taken)} more and would lose without notice; give each "
            "parameter to one optimizer, or replace the other one as a whole"
        )


def _split_by(wanted: set[Location | None], runtime: Runtime) -> list[Location]:
    """What an optimizer holds that would lose some of it, but not all, to one that has `wanted`."""
    held: dict[int, list[Location]] = {}
    for position, unit in enumerate(runtime.units):
        for run in unit.gradients.runs:
            owner = None if run.owner is None else run.owner()
            if owner is not None:
                places = [Location(position, index) for index in run.indices]
                held.setdefault(id(owner), []).extend(places)
    for places in held.values():
        if 0 < sum(place in wanted for place in places) < len(places):
            return places
    return []


def _watch_steps(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    reference = weakref.ref(runtime)
    bound = sum(len(group["params"]) for group in optimizer.param_groups)

    @uncompiled
    def before_step(stepped: torch.optim.Optimizer, *_: object) -> None:
        count = sum(len(group["params"]) for group in stepped.param_groups)
        if count != bound:
            raise ValueError(
                f"optimizer.step: expected the {bound} flat parameters that fully_shard bound, got "
                f"{count}: what was added since would be stepped with this rank's own gradient; "
                "give the optimizer all its groups before fully_shard"
            )
        if (current := reference()) is not None:
            current.before_optimizer_step()

    @uncompiled
    def after_step(*_: object) -> None:
        # Through `.data` an optimizer can change parameters without a trace in version counters.
        if (current := reference()) is not None:
            current.mark_stale()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def describe_options(optimizer: torch.optim.Optimizer | None) -> str:
    """Class, groups and options of `optimizer`, to compare between ranks."""
    if optimizer is None:
        return "no optimizer"
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__qualname__} {groups}"


def _regroup(unit: Unit, position: int, keys: Mapping[Location, _RunKey]) -> list[FlatRun]:
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
    had_grad = unit.gradients.has_grad
    runs = []
    for stretch, indices in cuts:
        old = old_runs[indices[0]]
        run = old if old.indices == tuple(indices) else unit.make_run(tuple(indices))
        run.stretch = stretch
        runs.append(run)
    unit.gradients.runs = runs
    if had_grad:
        unit.gradients.publish()
    return [run for run in runs if Location(position, run.indices[0]) in keys]
