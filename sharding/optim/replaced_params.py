"""Parameters that `fully_shard` took out of a model: whoever still holds them trains nothing, so a
backward that reaches one and the step of an optimizer that holds one are refused.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..messages import listed

# By id, since tensors compare elementwise; the reference tells when an id was given to another.
_REPLACED: dict[int, tuple[weakref.ref[Tensor], str]] = {}


def note(param: Tensor, name: str) -> None:
    """`param` was the parameter `name` of a model that is sharded now.

    A backward to it raises RuntimeError. That of one that is frozen cannot be seen.
    """
    key = id(param)
    _REPLACED[key] = weakref.ref(param, lambda _: _REPLACED.pop(key, None)), name
    if param.requires_grad:

        def refuse_gradient(_grad: Tensor) -> None:
            raise RuntimeError(
                f"parameter '{name}': expected its uses to be seen by fully_shard, got a gradient "
                "for the plain one that it has replaced, which is used in a place that "
                "fully_shard did not see; keep it as an attribute of a module, in a list or a "
                "dictionary, and look it up there in forward"
            )

        param.register_hook(refuse_gradient)


def name_of(param: Tensor) -> str | None:
    """The name that `param` had in a model that is sharded now; None if it was in none."""
    reference, name = _REPLACED.get(id(param), (None, None))
    return name if reference is not None and reference() is param else None


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step over parameters that no model uses any more.

    Raises:
        ValueError: `optimizer` holds some; they are named.
    """
    if not _REPLACED:
        return
    names = [
        name
        for group in optimizer.param_groups
        for param in group["params"]
        if (name := name_of(param)) is not None
    ]
    if names:
        raise ValueError(
            "optimizer.step: expected parameters that a model uses, got "
            f"{listed(names)}, which fully_shard has replaced by sharded ones: pass the optimizer "
            "to fully_shard together with the module, or make it from module.parameters() "
            "afterwards and pass it to fully_shard_optimizer"
        )
