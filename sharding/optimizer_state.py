"""State of optimizers over flat runs: made from single tensors' state, given and taken by name.

An entry is either one of the parameter's shape (moments), flat and sharded like the parameters, or
anything else (step counters, options), which all tensors of a run share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .gradients import FlatRun
from .runtime import Runtime
from .sharded_tensor import ShardedTensor
from .unit import Unit

# Counters and the like: 0-d tensors in every state, so that shape does not tell them from a 0-d
# parameter's moments.
_SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})


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


def scalar_signature(state: dict[str, Any], param: Tensor) -> tuple[object, ...]:
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


def flat_state(unit: Unit, run: FlatRun, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of `run` from that of each of its tensors, which agree in `scalar_signature`."""
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


def _has_shape(key: str, value: object, shape: Sequence[int]) -> bool:
    """Whether a state entry belongs to the parameter's elements one by one."""
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == tuple(shape)
        and key not in _SCALAR_STATE
    )


def _is_flat(value: object, run: FlatRun) -> bool:
    return _has_shape("", value, run.param.shape)
