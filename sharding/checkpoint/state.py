"""The state that a checkpoint holds, of a model and its optimizer, by the plain model's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import kind_of, require_module
from ..entries import check_sharded
from ..fully_shard import runtime_of
from ..modules.tree_watch import watches_of
from ..modules.uncompiled import plain_name, uncompiled
from ..optim.state import named_state
from ..tensor.sharded_tensor import ShardedTensor


@torch.no_grad()
@uncompiled
def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole, plain, new tensors on every rank (a collective).

    Keys, dtypes and devices are the unsharded model's; names of one tied parameter share a tensor.
    A part of a sharded module and a plain module will do as well.

    Raises:
        RuntimeError: parameters were added after `fully_shard`; ranks have different experts.
    """
    require_module(module)
    for watch in watches_of(module):
        watch.check()
    whole: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[name] = value
            continue
        if isinstance(value, ShardedTensor):
            value.require_one_value("full_state_dict")
        if id(value) not in whole:
            whole[id(value)] = (
                value.full_tensor() if isinstance(value, ShardedTensor) else value.detach().clone()
            )
        state[name] = whole[id(value)]
    return state


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The state to save or to load into, sharded tensors as they are."""
    require_module(module)
    check_sharded(module, "save_checkpoint and load_checkpoint")
    for watch in watches_of(module):
        watch.check()
        if optimizer is not None:
            watch.check_names()
    if optimizer is None:
        return {"model": _named_plainly(module.state_dict())}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {kind_of(optimizer)}; pass the one "
            "that fully_shard bound (what else is to be saved goes to save_checkpoint's extra)"
        )
    model = _named_plainly(module.state_dict())
    return {"optim": named_state(runtime_of(module), optimizer), "model": model}


def _named_plainly(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` under the names that it has where nothing is compiled."""
    return {plain_name(key): value for key, value in state.items()}
