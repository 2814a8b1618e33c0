"""Which optimizers may see flat shards: those that update each element by itself."""

from __future__ import annotations

import inspect

import torch

from ..arguments import kind_of, require_flag
from .adamw import AdamW

_ELEMENTWISE = (
    AdamW,
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
_MATRICES = "it preconditions whole matrices"
_NORMS = "it scales by the norm of each tensor"
_PROJECTS = "it projects onto each tensor or its rows"
_FACTORS = "it factors the second moment over rows and columns"
_INNER_PRODUCTS = "it takes inner products over all parameters"
_BLOCKS = "it quantises its state in blocks of each tensor, which a shard cuts elsewhere"
_NOT_ELEMENTWISE = {
    "muon": "it orthogonalises whole matrices",
    "shampoo": _MATRICES,
    "distributedshampoo": _MATRICES,
    "soap": _MATRICES,
    "kron": _MATRICES,
    "psgd": _MATRICES,
    "scion": "it orthogonalises whole matrices",
    "galoreadamw": _MATRICES,
    "apolloadamw": _MATRICES,
    "adafactor": _FACTORS,
    "came": _FACTORS,
    "sm3": _FACTORS,
    "adammini": "it keeps one second moment for each block of a tensor",
    "lars": _NORMS,
    "lamb": _NORMS,
    "novograd": _NORMS,
    "fromage": _NORMS,
    "stableadamw": "it scales by the root mean square of each tensor's update",
    "adamp": _PROJECTS,
    "sgdp": _PROJECTS,
    "ranger": "it subtracts the mean of each gradient's rows",
    "ranger21": "it subtracts the mean of each gradient's rows",
    "prodigy": _INNER_PRODUCTS,
    "dadaptadam": _INNER_PRODUCTS,
    "dadaptadan": _INNER_PRODUCTS,
    "dadaptsgd": _INNER_PRODUCTS,
    "dadaptlion": _INNER_PRODUCTS,
    "lbfgs": _INNER_PRODUCTS,
    "sparseadam": "it needs sparse gradients",
    "sam": "it scales by the norm of all gradients",
}
"""Names in torch and in packages, in lower case and without underscores, and what stands against
each.
"""
_QUANTISED = ("8bit", "4bit", "fp8")
"""Parts of the names that bitsandbytes and torchao give to optimizers with quantised state."""


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
    reason = _reason_against(kind)
    if reason is not None:
        raise ValueError(
            "optimizer: expected an elementwise optimizer such as AdamW or SGD, got "
            f"{kind.__name__}: {reason}, which a flat shard does not hold; choose one "
            "that updates each element by itself"
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
            f"{kind.__module__}.{kind.__name__}; if each element's update depends on that element "
            "alone, pass elementwise=True"
        )


def _reason_against(kind: type[torch.optim.Optimizer]) -> str | None:
    for base in kind.__mro__:
        name = base.__name__.lower().replace("_", "")
        if any(part in name for part in _QUANTISED):
            return _BLOCKS
        if name in _NOT_ELEMENTWISE:
            return _NOT_ELEMENTWISE[name]
    return None


def describe_options(optimizer: torch.optim.Optimizer | None) -> str:
    """Class, groups and options of `optimizer`, to compare between ranks."""
    if optimizer is None:
        return "no optimizer"
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__} {groups}"
