"""Optimizers over flat shards: an elementwise torch optimizer keeps its class, groups, options and
state.

Its `param_groups` are re-pointed at flat 1-D parameters, one per unit and stretch of tensors that
share a group. State of single tensors, if there is any, is laid into flat state in the same places.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gradients import FlatRun
from .runtime import Runtime
from .sharded_tensor import ShardedTensor
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

# Counters and the like: 0-d tensors in every state, so that shape does not tell them from a 0-d
# parameter's moments.
_SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})


@dataclass(frozen=True, slots=True)
class Location:
    """Tensor `index` of `unit`, a position in the runtime's list of units."""

    unit: int
    index: int


@dataclass(frozen=True, slots=True)
class _RunKey:
    """Tensors next to each other share a flat parameter when they agree in this."""

    group: int
    scalar_state: tuple[object, ...]


def check_elementwise(optimizer: torch.optim.Optimizer, *, declared: bool = False) -> None:
    """Refuse optimizers whose update of one element depends on others, since they see flat shards.

    `declared`: the caller vouches that an unknown class is elementwise.

    Raises:
        TypeError: no torch optimizer.
        ValueError: an optimizer known not to be elementwise, or an unknown one that is not
        `declared`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
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
                    f"module has {len(names)} parameters: {', '.join(names[:4])}, ..."
                )
            located[-1].append(location)
    return located


def rebind(
    optimizer: torch.optim.Optimizer, runtime: Runtime, located: list[list[Location | None]]
) -> None:
    """Point `optimizer` at flat runs of the runtime's units, and carry its state over."""
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
            keys[location] = _RunKey(number, _scalar_signature(state, param))
    optimizer.state.clear()
    for position, unit in enumerate(runtime.units):
        for run in _regroup(unit, position, keys):
            states = [old_state[Location(position, index)] for index in run.indices]
            flat_params[keys[Location(position, run.indices[0])].group].append(run.param)
            if states[0]:
                optimizer.state[run.param] = _flat_state(unit, run, states)
    for group, params in zip(optimizer.param_groups, flat_params, strict=True):
        group["params"] = params
        if "param_names" in group:
            group["param_names"] = [f"flat_{place}" for place in range(len(params))]
    _watch_steps(optimizer, runtime)


def _watch_steps(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    reference = weakref.ref(runtime)
    bound = sum(len(group["params"]) for group in optimizer.param_groups)

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


def _has_shape(key: str, value: object, shape: Sequence[int]) -> bool:
    """Whether a state entry belongs to the parameter's elements one by one."""
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == tuple(shape)
        and key not in _SCALAR_STATE
    )


def _scalar_signature(state: dict[str, Any], param: Tensor) -> tuple[object, ...]:
    """What must agree for tensors to share flat state: the entries that are not shaped like the
    tensor.
    """
    entries: list[object] = []
    for key, value in sorted(state.items()):
        if _has_shape(key, value, param.shape):
            entries.append(key)
        elif isinstance(value, Tensor):
            entries.append((key, value.tolist()))
        else:
            entries.append((key, repr(value)))
    return tuple(entries)


def _regroup(unit: Unit, position: int, keys: Mapping[Location, _RunKey]) -> list[FlatRun]:
    """Cut the unit into runs of equal key; returns those that have one. Other optimizers' runs
    stay.
    """
    old_runs = {index: run for run in unit.gradients.runs for index in run.indices}
    stretches: list[list[int]] = []
    previous: object = None
    for index in unit.spec.layout.order:
        key: object = keys.get(Location(position, index), id(old_runs[index]))
        if stretches and key == previous:
            stretches[-1].append(index)
        else:
            stretches.append([index])
        previous = key
    had_grad = unit.gradients.has_grad
    runs = [
        old
        if (old := old_runs[stretch[0]]).indices == tuple(stretch)
        else unit.make_run(tuple(stretch))
        for stretch in stretches
    ]
    unit.gradients.runs = runs
    if had_grad:
        unit.gradients.publish()
    return [run for run in runs if Location(position, run.indices[0]) in keys]


def _flat_state(unit: Unit, run: FlatRun, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in states[0].items():
        if not _has_shape(key, value, unit.spec.layout.segments[run.indices[0]].shape):
            flat[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        target = torch.zeros_like(run.param, dtype=value.dtype, requires_grad=False)
        for index, state in zip(run.indices, states, strict=True):
            unit.sharded_view(target, index, base=run.start).copy_(state[key])
        flat[key] = target
    return flat


def find_runs(
    runtime: Runtime, optimizer: torch.optim.Optimizer
) -> list[tuple[Unit, FlatRun, int]]:
    """Every run that `optimizer` updates, with its unit and the number of its group.

    Raises:
        ValueError: `optimizer` is not bound to this model.
    """
    numbers = {
        id(param): number
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    found = [
        (unit, run, numbers.pop(id(run.param)))
        for unit in runtime.units
        for run in unit.gradients.runs
        if id(run.param) in numbers
    ]
    if numbers:
        raise ValueError(
            "optimizer: expected the optimizer that fully_shard bound to this module, got one with "
            f"{len(numbers)} other parameters; pass it to fully_shard or fully_shard_optimizer "
            "first"
        )
    return found


def named_state(runtime: Runtime, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer`'s state by parameter name, as torch.distributed.checkpoint lays it out.

    `{"state": {name: {key: ShardedTensor or scalar}}, "param_groups": [{..., "params": [names]}]}`.
    Sharded tensors alias the live state; a parameter that has no state yet is left out.
    """
    groups: list[dict[str, Any]] = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "params": [],
        }
        for group in optimizer.param_groups
    ]
    state: dict[str, dict[str, Any]] = {}
    for unit, run, number in find_runs(runtime, optimizer):
        for index in run.indices:
            name = unit.spec.names[index]
            groups[number]["params"].append(name)
            if run.param in optimizer.state:
                state[name] = {
                    key: unit.sharded_view(value, index, base=run.start)
                    if _is_flat(value, run)
                    else value
                    for key, value in optimizer.state[run.param].items()
                }
    return {"state": state, "param_groups": groups}


def _is_flat(value: object, run: FlatRun) -> bool:
    return _has_shape("", value, run.param.shape)


def prepare_state(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Mapping[str, Tensor | None]],
) -> None:
    """Make `optimizer`'s state have just the entries of a checkpoint, to be overwritten by its
    values.

    `saved` maps a parameter's name to its entries: a meta tensor for one with the parameter's
    shape, whose dtype counts, and None for any other. A parameter that is absent loses its state.

    Raises:
        ValueError: parameters that share flat state here have different entries in the checkpoint.
    """
    found = find_runs(runtime, optimizer)
    for unit, run, _ in found:
        names = [unit.spec.names[index] for index in run.indices]
        expected = set(saved.get(names[0], {}))
        for name in names:
            if set(saved.get(name, {})) != expected:
                raise ValueError(
                    f"optimizer state: expected one set of entries for all of {names}, which share "
                    "flat state, "
                    f"got {sorted(expected)} for '{names[0]}' and {sorted(saved.get(name, {}))} "
                    f"for '{name}'"
                )
    for unit, run, _ in found:
        entries = saved.get(unit.spec.names[run.indices[0]], {})
        if not entries:
            optimizer.state.pop(run.param, None)
            continue
        state = optimizer.state[run.param]
        for key in [key for key in state if key not in entries]:
            del state[key]
        for key, like in entries.items():
            if like is not None and key not in _SCALAR_STATE and not _is_flat(state.get(key), run):
                state[key] = torch.zeros_like(run.param, dtype=like.dtype, requires_grad=False)


def load_scalars(
    runtime: Runtime, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]
) -> None:
    """Take what `loaded` (shaped like `named_state`) holds besides sharded tensors: options and
    counters.
    """
    by_name = {name: group for group in loaded["param_groups"] for name in group["params"]}
    for unit, run, number in find_runs(runtime, optimizer):
        name = unit.spec.names[run.indices[0]]
        for key, value in loaded["state"].get(name, {}).items():
            if not isinstance(value, ShardedTensor):
                optimizer.state[run.param][key] = value
        source = by_name.get(name)
        if source is not None:
            group = optimizer.param_groups[number]
            group.update(
                {
                    key: value
                    for key, value in source.items()
                    if key not in ("params", "param_names")
                }
            )
