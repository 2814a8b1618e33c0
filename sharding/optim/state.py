"""State of optimizers, by the model's parameters outside `step` and by flat ones inside.

An entry is either one of the parameter's shape (moments), flat and sharded like the parameters, or
one value (step counters, options), which all tensors of a run share. Nothing else can be moved to
another sharding, so nothing else is shown or saved.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optimizer_view import FlatRun
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.torch_state_dict import part_like
from ..unit import Unit

SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""Counters and the like: 0-d tensors in every state, so that shape does not tell them from a 0-d
parameter's moments.
"""

State = dict[str, Any]

Names = Mapping[int, str]
"""Of every parameter of a model, by the parameter's id."""


class ShardedState(collections.defaultdict[Any, State]):
    """`optimizer.state` outside `step`, made when somebody first looks: a step costs nothing.

    What it gave holds until the next step, after which another one is made.
    """

    def __init__(self, make: Callable[[], Mapping[Any, State]]) -> None:
        super().__init__(dict)
        self._make: Callable[[], Mapping[Any, State]] | None = make

    @property
    def was_looked_at(self) -> bool:
        """Whether somebody may have changed it."""
        return self._make is None

    def fill(self) -> None:
        """Make it now."""
        if self._make is not None:
            make, self._make = self._make, None
            super().update(make())

    def copy(self) -> collections.defaultdict[Any, State]:  # type: ignore[override]
        """As it is now, in a dictionary of its own."""
        self.fill()
        return collections.defaultdict(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return collections.defaultdict, (dict,), None, None, iter(self.items())


def _looking(name: str) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    @functools.wraps(method)
    def look(self: ShardedState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    return look


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__"),
    *("__ne__", "__or__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get"),
    *("items", "keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(ShardedState, _name, _looking(_name))


def scalar_signature(state: State, param: Tensor, name: str) -> tuple[object, ...]:
    """What must agree for tensors to share flat state: the entries that are not shaped like the
    tensor.

    Raises:
        ValueError: an entry is neither of the tensor's shape nor one value.
    """
    entries: list[object] = []
    for key, value in sorted(state.items()):
        if _has_shape(key, value, param.shape):
            entries.append((key, value.dtype))
        elif isinstance(value, Tensor):
            _require_one_value(key, value, name)
            entries.append((key, value.item()))
        else:
            entries.append((key, repr(value)))
    return tuple(entries)


def _require_one_value(key: str, value: Tensor, name: str) -> None:
    if value.numel() != 1:
        raise ValueError(
            f"optimizer: state entry '{key}' of '{name}' has shape {tuple(value.shape)}, expected "
            "the parameter's own shape or one value, which alone can be moved to another sharding; "
            "use an optimizer whose state is elementwise, such as AdamW"
        )


def flat_state(unit: Unit, run: FlatRun, states: Sequence[State]) -> State:
    """The state of `run` from that of each of its tensors, which agree in `scalar_signature`."""
    flat: State = {}
    for key, value in states[0].items():
        if not _has_shape(key, value, unit.spec.layout.segments[run.indices[0]].shape):
            flat[key] = copy.copy(value) if not isinstance(value, Tensor) else value.clone()
            continue
        target = torch.zeros_like(run.param, dtype=value.dtype, requires_grad=False)
        for index, state in zip(run.indices, states, strict=True):
            unit.sharded_view(target, index, base=run.start).copy_(state[key])
        flat[key] = target
    return flat


def shown_state(unit: Unit, run: FlatRun, flat: State, index: int) -> State:
    """The entries of tensor `index` in the state `flat` of `run`: views of it, and copies of its
    single values.

    Raises:
        ValueError: an entry is neither as long as the run nor one value.
    """
    shown: State = {}
    for key, value in flat.items():
        if _is_flat(value, run):
            shown[key] = unit.sharded_view(value, index, base=run.start)
        elif isinstance(value, Tensor):
            _require_one_value(key, value, unit.spec.names[index])
            shown[key] = value.clone()
        else:
            shown[key] = copy.copy(value)
    return shown


def is_shown(unit: Unit, run: FlatRun, flat: State, states: Sequence[State]) -> bool:
    """Whether `states` of the run's tensors are what `shown_state` gives, not changed since."""
    for index, state in zip(run.indices, states, strict=True):
        if state.keys() != flat.keys():
            return False
        for key, value in shown_state(unit, run, flat, index).items():
            if not _same(state[key], value):
                return False
    return True


def _same(ours: Any, shown: Any) -> bool:
    if isinstance(shown, ShardedTensor):
        return (
            isinstance(ours, ShardedTensor)
            and ours.dtype == shown.dtype
            and ours.has_layout_of(shown)
            and (not shown.local.numel() or ours.local.data_ptr() == shown.local.data_ptr())
        )
    if isinstance(shown, Tensor):
        return isinstance(ours, Tensor) and torch.equal(ours, shown)
    return type(ours) is type(shown) and bool(ours == shown)


def _require_own(names: Names, optimizer: torch.optim.Optimizer) -> None:
    others = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) not in names and param.is_floating_point()
    ]
    if others:
        raise ValueError(
            "optimizer: expected the optimizer that fully_shard bound to this module, got one with "
            f"{len(others)} other parameters; pass it to fully_shard or fully_shard_optimizer "
            "first (for PyTorch's own fully_shard: make it over the sharded parameters)"
        )


def named_state(names: Names, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer`'s state by parameter name, as torch.distributed.checkpoint lays it out.

    `{"state": {name: {key: sharded or one value}}, "param_groups": [{..., "params": [names]}]}`.
    Sharded tensors alias the live state; a parameter that has no state yet is left out.

    Raises:
        ValueError: `optimizer` is not this model's; its state cannot be moved to another sharding.
    """
    _require_own(names, optimizer)
    groups: list[dict[str, Any]] = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "params": [names[id(param)] for param in group["params"] if id(param) in names],
        }
        for group in optimizer.param_groups
    ]
    state = {
        names[id(param)]: dict(entries)
        for param, entries in optimizer.state.items()
        if entries and id(param) in names
    }
    return {"state": state, "param_groups": groups}


def prepare_state(
    names: Names,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Mapping[str, Tensor | None]],
    *,
    kept: Collection[str] = (),
) -> None:
    """Make `optimizer`'s state have just the entries of a checkpoint, to be overwritten by its
    values.

    `saved` maps a parameter's name to its entries: a meta tensor for one with the parameter's
    shape, whose dtype counts, and None for any other. A parameter that is absent loses its state,
    unless it is named in `kept`.

    Raises:
        ValueError: `optimizer` is not this model's.
    """
    _require_own(names, optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names or names[id(param)] in kept:
                continue
            entries = saved.get(names[id(param)], {})
            if not entries:
                optimizer.state.pop(param, None)
                continue
            state = optimizer.state[param]
            for key in [key for key in state if key not in entries]:
                del state[key]
            for key, like in entries.items():
                if like is not None and key not in SCALAR_STATE:
                    current = state.get(key)
                    if not hasattr(current, "__create_chunk_list__") or current.dtype != like.dtype:
                        state[key] = _zeros_like(param, like.dtype)


def load_scalars(names: Names, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Take what `loaded` (shaped like `named_state`) holds besides sharded tensors: options and
    counters.
    """
    _require_own(names, optimizer)
    by_name = {name: group for group in loaded["param_groups"] for name in group["params"]}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names.get(id(param), "")
            for key, value in loaded["state"].get(name, {}).items():
                if not isinstance(value, ShardedTensor):
                    optimizer.state[param][key] = value
        sources = [by_name[names[id(p)]] for p in group["params"] if names.get(id(p)) in by_name]
        for key, value in sources[0].items() if sources else ():
            if key not in ("params", "param_names"):
                group[key] = value


@torch.no_grad()
def take_own_parts(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Put this rank's parts into `state_dict`, a shallow copy that `optimizer` is about to load, in
    place of whole tensors and of sharded ones of another layout (a collective for the latter).

    Raises:
        ValueError: an entry has neither its parameter's shape nor one value.
    """
    state = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        # Where the numbers differ, torch refuses the whole.
        for param, key in zip(group["params"], saved["params"], strict=False):
            if isinstance(param, ShardedTensor) and isinstance(state.get(key), dict):
                state[key] = {
                    entry: _own_part(param, entry, value) for entry, value in state[key].items()
                }
    state_dict["state"] = state


def _own_part(param: ShardedTensor, entry: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or entry in SCALAR_STATE:
        return value
    if value.shape != param.shape and value.numel() != 1:
        raise ValueError(
            f"optimizer.load_state_dict: expected state '{entry}' of '{param.name}' to have its "
            f"shape {tuple(param.shape)} or one value, got {tuple(value.shape)}; load the state of "
            "an optimizer over the same parameters in the same order and groups"
        )
    return part_like(param, value)


def _zeros_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(param, ShardedTensor):
        return param.with_local(torch.zeros_like(param.local, dtype=dtype))
    return torch.zeros_like(param, dtype=dtype)


def _has_shape(key: str, value: object, shape: Sequence[int]) -> bool:
    """Whether a state entry belongs to the parameter's elements one by one."""
    return isinstance(value, ShardedTensor) or (
        isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and key not in SCALAR_STATE
    )


def _is_flat(value: object, run: FlatRun) -> bool:
    return _has_shape("", value, run.param.shape)
