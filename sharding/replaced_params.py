"""Parameters that `fully_shard` took out of a model: an optimizer that still holds them moves
nothing, so its step is refused.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .messages import listed

# By id, since tensors compare elementwise; the reference tells when an id was given to another.
_REPLACED: dict[int, tuple[weakref.ref[Tensor], str]] = {}


def note(param: Tensor, name: str) -> None:
    """`param` was the parameter `name` of a model that is sharded now."""
    key = id(param)
    _REPLACED[key] = weakref.ref(param, lambda _: _REPLACED.pop(key, None)), name


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step over parameters that no model uses any more.

    Raises:
        ValueError: `optimizer` holds some; they are named.
    """
    if not _REPLACED:
        return
    names = [
        _REPLACED[id(param)][1]
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in _REPLACED and _REPLACED[id(param)][0]() is param
    ]
    if names:
        raise ValueError(
            "optimizer.step: expected parameters that a model uses, got "
            f"{listed(names)}, which fully_shard has replaced by sharded ones: "
            "pass the optimizer to fully_shard together with the module, or make it from "
            "module.parameters() afterwards and pass it to fully_shard_optimizer"
        )
