"""Checks of arguments that several public functions take."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn


def kind_of(value: object) -> str:
    """What `value` is, for an error: its type's name, or the class itself where that was passed."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def require_kind(name: str, value: object, kind: type, fix: str = "pass such a one") -> None:
    """Refuse what is no `kind`, such as another package's of that name.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, kind):
        ours, theirs = (of.__module__.partition(".")[0] for of in (kind, type(value)))
        raise TypeError(
            f"{name}: expected a {kind.__name__} of {ours}, got {kind_of(value)} of {theirs}; {fix}"
        )


def require_module(module: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module: expected a torch.nn.Module, got {kind_of(module)}; pass the model itself"
        )


def lacks_forward(module: nn.Module) -> bool:
    """Whether `module` has no forward of its own, as containers have none."""
    forward = module.forward
    return getattr(forward, "__func__", forward) is nn.Module.forward


def require_forward(module: nn.Module) -> None:
    """Refuse a model that is never called.

    Raises:
        ValueError: it has no forward.
    """
    if lacks_forward(module):
        raise ValueError(
            f"module: expected a model with a forward, got {kind_of(module)}, which is never "
            "called; pass the module whose forward uses it, or shard each of its parts by itself"
        )


def require_member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or that of all ranks for None, if this rank is in it.

    Raises:
        ValueError: it is not, or there is none.
    """
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0 or group is None:
        raise ValueError(
            "group: expected one that this rank is in, got one without it; call it on its own ranks"
        )
    return group


def require_flag(name: str, value: object, expected: str = "True or False") -> None:
    """Refuse what is no bool: any text would count as true.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, got {value!r}; pass one of them")


def require_number(name: str, value: object, expected: str, fits: Callable[[Any], bool]) -> None:
    """Refuse what is no real number, as a bool and a tensor are not, or does not fit.

    Raises:
        TypeError: it is something else.
        ValueError: it does not fit, which `expected` says in words.
    """
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_real and fits(value)):
        kind = ValueError if is_real else TypeError
        raise kind(f"{name}: expected {expected}, got {value!r}; pass such a value")


def require_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number of at least `least`; raises as `require_number` does."""
    expected = f"a whole number of at least {least}"
    require_number(name, value, expected, lambda n: n >= least and isinstance(n, numbers.Integral))


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Refuse what is none of the `known` names.

    Raises:
        ValueError: it is another one; with the list.
    """
    names = list(known)
    if value not in names:
        raise ValueError(
            f"{name}: expected one of {', '.join(names)}, got {value!r}; pass one of them"
        )
