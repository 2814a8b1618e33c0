"""What of a module a safetensors file holds: its parameters and persistent buffers, each once.

Extra state of modules is no tensor, and what a hook puts into a state dict is no part of the
module, so that writing to it would be lost: both have no place in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..arguments import require_module
from ..entries import check_sharded
from ..modules.tree_watch import watches_of
from ..modules.uncompiled import plain_name
from ..tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tensor of a module and all names that it has there, plain, in the order of registration."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """`unstorable` says, by its name, what in the module's state dict has no place in a file."""

    entries: tuple[Entry, ...]
    unstorable: dict[str, str]


def tensors_of(module: nn.Module, caller: str) -> ModuleState:
    """The tensors of `module`, themselves, not copies.

    Raises:
        TypeError: it is no module.
        RuntimeError: parameters are whole, inside `gathered`, or were added after `fully_shard`.
    """
    require_module(module)
    check_sharded(module, caller)
    for watch in watches_of(module):
        watch.check()
    own = {id(tensor) for tensor in _tensors(module)}
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    unstorable: dict[str, str] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if reason := _unstorable(value, own):
            unstorable[name] = reason
        else:
            tensors[id(value)] = value
            names.setdefault(id(value), []).append(name)
    entries = [Entry(tuple(names[key]), tensor) for key, tensor in tensors.items()]
    return ModuleState(tuple(entries), unstorable)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


def _unstorable(value: object, own: set[int]) -> str:
    """Why `value` of a state dict has no place in a file; empty if it has."""
    if not isinstance(value, Tensor):
        return "extra state, which is no tensor"
    if id(value) not in own:
        return "no parameter or buffer of the module: extra state, or made by a hook"
    if isinstance(value, ShardedTensor):
        return ""
    # A subclass that computes otherwise (a DTensor, a quantised one) has other bytes than it shows.
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(value).__name__}"
    if nn.parameter.is_lazy(value):
        return "a parameter without values yet"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    return "a tensor on the meta device" if value.is_meta else ""
