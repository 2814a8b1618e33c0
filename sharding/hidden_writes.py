"""Which modules' forward may write parameters in ways that the ranks' counters do not show.

A write through `.data` raises no version counter, and a parameter class that saw it would cost a
quarter of a small operator's time in every use. So the code is read instead: what a forward, and
what it calls by a name that can be followed, mentions. What is found too much costs a comparison.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from .uncompiled import param_places

_MARKS = frozenset({"data", "set_", "vector_to_parameters"})
_NOT_FOLLOWED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "einops"})


def modules_that_use_data(module: nn.Module) -> list[nn.Module]:
    """The modules in `module` whose forward or forward hooks, or what these call, mention `.data`.

    Python code only, and not what is called through a value, such as a function in a list.
    """
    known: dict[tuple[types.CodeType, type], bool] = {}
    found = []
    for submodule in module.modules():
        owner = type(submodule)
        for function in _entries(submodule):
            key = function.__code__, owner
            if key not in known:
                known[key] = _reaches_mark(function, owner)
            if known[key]:
                found.append(submodule)
                break
    return found


def refuse_writes_by_data(module: nn.Module, world_size: int) -> None:
    """Refuse modules that write their weights as a rank's own inputs say, where there are others.

    Raises:
        ValueError: an embedding with `max_norm`.
    """
    if world_size == 1:
        return
    for name, owner, _, _ in param_places(module):
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm:
            raise ValueError(
                f"parameter '{name}': expected writes in forward to be the same on all "
                f"ranks, got max_norm={owner.max_norm}, which rescales the rows that a rank "
                "looks up, so that ranks would differ; set max_norm to None and rescale the rows "
                "after optimizer.step"
            )


def _entries(module: nn.Module) -> Iterator[types.FunctionType]:
    hooks: Iterable[Any] = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for entry in (module.forward, *hooks):
        yield from _functions_of(entry)


def _reaches_mark(function: types.FunctionType, owner: type) -> bool:
    """Whether `function`, a method of `owner` perhaps, or what it calls mentions a mark."""
    seen: set[types.CodeType] = set()
    ahead = [function]
    while ahead:
        current = ahead.pop()
        if current.__code__ in seen:
            continue
        seen.add(current.__code__)
        names = set(_names(current.__code__))
        if names & _MARKS:
            return True
        for value in _values(current, owner, names):
            ahead.extend(_functions_of(value))
    return False


def _functions_of(value: object) -> Iterator[types.FunctionType]:
    """The Python functions that calling, or reading, `value` runs."""
    if isinstance(value, property):
        value = value.fget
    elif hasattr(value, "func"):
        value = value.func  # a partial
    elif not hasattr(value, "__func__") and not isinstance(value, (types.FunctionType, type)):
        value = inspect.getattr_static(type(value), "__call__", None)
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return
    if (function.__module__ or "").partition(".")[0] not in _NOT_FOLLOWED:
        yield function


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _values(function: types.FunctionType, owner: type, names: Iterable[str]) -> Iterator[object]:
    """What `names` may stand for inside `function`, and what it closes over."""
    for name in names:
        yield function.__globals__.get(name)
        yield inspect.getattr_static(owner, name, None)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
