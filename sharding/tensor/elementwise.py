"""Which operators may run on one rank's part of a sharded tensor, and how: rules for dispatch.

An elementwise operator computes each element from the elements at the same position, so a rank can
run it on its own interval without communication::

    operand                               what the local operator gets
    sharded, the same layout              its local part
    plain, of the full shape              the interval cut out of it
    0-d tensor, number, anything else     itself

Reductions are collectives (`reductions.py`). Everything else is refused, with the parameter's name
and the fix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload

from .reductions import reduction_rule

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

# Elementwise operators that PyTorch does not tag as `pointwise`.
_UNTAGGED = frozenset(
    {
        "clone",
        "copy_",
        "empty_like",
        "fill",
        "fill_",
        "full_like",
        "masked_fill",
        "masked_fill_",
        "ones_like",
        "zero",
        "zero_",
        "zeros_like",
    }
)
_ALIASES = frozenset({"alias", "detach", "detach_", "lift_fresh"})
_FUSED_OPTIMIZERS = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
_FOREACH = "_foreach_"


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator and its arguments. `sharded_type`: the class of sharded tensors, whose file
    imports this one.
    """

    sharded_type: type[ShardedTensor]
    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    def is_sharded(self, x: Any) -> TypeGuard[ShardedTensor]:
        """Whether `x` is a sharded tensor."""
        return isinstance(x, self.sharded_type)

    def sharded(self) -> Iterator[ShardedTensor]:
        """The sharded tensors among the arguments and inside their lists."""
        return self._sharded_in(self.values)

    def _sharded_in(self, values: Any) -> Iterator[ShardedTensor]:
        for x in values:
            if self.is_sharded(x):
                yield x
            elif isinstance(x, (list, tuple)):
                yield from self._sharded_in(x)

    def written(self) -> list[Any]:
        """The arguments that the operator writes to."""
        return [
            self.args[position] if position < len(self.args) else self.kwargs[name]
            for position, name in _written(self.operator)
        ]

    def run(self, local: Callable[[Any], Any]) -> Any:
        """What the operator returns for `local` of each argument."""
        kwargs = {key: local(x) for key, x in self.kwargs.items()}
        if "memory_format" in kwargs:
            kwargs["memory_format"] = torch.preserve_format  # the local part is always 1-D
        return self.operator(*(local(x) for x in self.args), **kwargs)


def dispatch(
    sharded_type: type[ShardedTensor],
    operator: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `operator` on the local parts of the sharded tensors in its arguments, or refuse it.

    Raises:
        RuntimeError: the operator is not elementwise, draws random numbers, moves a parameter to
            another dtype or device, mixes layouts or shapes, or reads a gradient that waits for its
            exchange.
    """
    call = _Call(sharded_type, operator, args, kwargs)
    for x in call.sharded():
        x.require_exchanged()
    return _rule(operator)(call)


@functools.cache
def _rule(operator: OpOverload) -> Callable[[_Call], Any]:
    name = operator._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return _refuse_random
    if name in _ALIASES:
        return _alias
    if name == "_to_copy":
        return _convert
    reduction = reduction_rule(name, operator)
    if reduction is not None:
        return lambda call: reduction(call.operator, call.args, call.kwargs)
    if name.startswith(_FOREACH):
        return _run_on_lists if _is_elementwise_name(name.removeprefix(_FOREACH)) else _refuse
    if name in _FUSED_OPTIMIZERS:
        return _run_on_lists
    if torch.Tag.pointwise in operator.tags or name in _UNTAGGED:
        return _run
    return _refuse


def _is_elementwise_name(name: str) -> bool:
    name = name.removesuffix("_")
    if name in _UNTAGGED or f"{name}_" in _UNTAGGED:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def _alias(call: _Call) -> Any:
    # Not by the operator: below autograd, the alias it makes has a version counter of its own.
    like: ShardedTensor = call.args[0]
    return like if _written(call.operator) else like.with_local(like.local)


def _run(call: _Call) -> Any:
    like = next(x for x in call.values if call.is_sharded(x))
    operator, written = call.operator, call.written()
    if not all(map(call.is_sharded, written)):
        _refuse_plain_target(like, operator)
    result = call.run(lambda x: _local(x, like, operator))
    if written:
        _mark_written(written)
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(result, (tuple, list)):
        return type(result)(_wrap(x, like, operator) for x in result)
    return _wrap(result, like, operator)


def _run_on_lists(call: _Call) -> Any:
    """`_run` for operators over lists: the tensors at one position of all lists share a layout."""
    likes, operator, written = _layouts(call), call.operator, call.written()
    for targets in written:
        for position, x in enumerate(targets):
            if position in likes and not call.is_sharded(x):
                _refuse_plain_target(likes[position], operator)

    def local(x: Any) -> Any:
        if not _is_tensor_list(x):
            return x.local if call.is_sharded(x) else x
        return [
            _local(t, likes[position], operator) if position in likes else t
            for position, t in enumerate(x)
        ]

    result = call.run(local)
    for targets in written:
        _mark_written([x for x in targets if call.is_sharded(x)])
    if written:
        return result
    return [
        _wrap(x, likes[position], operator) if position in likes else x
        for position, x in enumerate(result)
    ]


def _layouts(call: _Call) -> dict[int, ShardedTensor]:
    """By position in the lists among the arguments: the first sharded tensor that stands there."""
    likes: dict[int, ShardedTensor] = {}
    for tensors in filter(_is_tensor_list, call.values):
        for position, x in enumerate(tensors):
            if call.is_sharded(x):
                likes.setdefault(position, x)
    return likes


def _local(x: Any, like: ShardedTensor, operator: OpOverload) -> Any:
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, type(like)):
        if x is not like and not like.has_layout_of(x):
            raise RuntimeError(
                f"{operator}: expected sharded tensors of one layout on all ranks, got "
                f"{like.describe()} and {x.describe()}; bring one to the full shape with "
                "full_tensor()"
            )
        return x.local
    if x.dim() == 0:
        return x
    if x.shape != like.shape:
        raise RuntimeError(
            f"{operator}: expected a plain tensor of the full shape {tuple(like.shape)} (or a 0-d "
            f"one) next to {like.describe()}, got shape {tuple(x.shape)}; expand it first"
        )
    return like.interval_of(x)


def _wrap(result: Tensor, like: ShardedTensor, operator: OpOverload) -> ShardedTensor:
    if result.shape != like.local.shape:
        _refuse_tensor(like, operator)
    return like.with_local(result)


def _is_tensor_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and isinstance(x[0], Tensor)


@functools.cache
def _written(operator: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument the operator writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _mark_written(targets: list[ShardedTensor]) -> None:
    # Below autograd, where dispatch runs, an in-place operator leaves the version of its target as
    # it was; units compare versions to see that a shard was edited and must be gathered again.
    for target in targets:
        torch.autograd.graph.increment_version(target.local)


def _convert(call: _Call) -> Any:
    like: ShardedTensor = call.args[0]
    kwargs = call.kwargs
    dtype = kwargs.get("dtype") or like.dtype
    device = torch.device(kwargs.get("device") or like.device)
    is_other = dtype != like.dtype or _with_index(device) != _with_index(like.device)
    if is_other and isinstance(like, torch.nn.Parameter):
        raise RuntimeError(
            f"{like.describe()} keeps the dtype and device it was sharded with, {like.dtype} on "
            f"{like.device}, got a conversion to {dtype} on {device}: convert the model before "
            "fully_shard (compute in another dtype with MixedPrecisionPolicy)"
        )
    if not is_other:
        return like.with_local(like.local.clone())
    non_blocking = bool(kwargs.get("non_blocking"))
    return like.with_local(like.local.to(device, dtype, non_blocking=non_blocking, copy=True))


def _with_index(device: torch.device) -> torch.device:
    """`device` with the index that it has where it does not say so."""
    index: int | None = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return torch.device(device.type, index)


def _refuse_random(call: _Call) -> NoReturn:
    like = next(call.sharded())
    raise RuntimeError(
        f"{call.operator} on {like.describe()} would draw other numbers on each rank and for "
        "each world size: initialise the model before fully_shard, or fill it from a full "
        "tensor with copy_"
    )


def _refuse(call: _Call) -> NoReturn:
    _refuse_tensor(next(call.sharded()), call.operator)


def _refuse_tensor(like: ShardedTensor, operator: OpOverload) -> NoReturn:
    raise RuntimeError(
        f"{operator} is not elementwise, so it cannot run on one rank's part of {like.describe()}: "
        "call the unit's module itself (not its .forward), make another method an entry with "
        "sidestream.register_forward_method(module, name), read or write whole parameters inside "
        "sidestream.gathered(module), or take the whole value with full_tensor() or "
        "full_state_dict()"
    )


def _refuse_plain_target(like: ShardedTensor, operator: OpOverload) -> NoReturn:
    raise RuntimeError(
        f"{operator}: expected a sharded tensor to write to, got a plain one, of which "
        f"{like.describe()} could fill only a part; take the whole value with full_tensor()"
    )
