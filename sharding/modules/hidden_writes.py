"""Which modules' forward may write parameters in ways that the ranks' counters do not show.

A write through `.data` raises no version counter, and a parameter class that saw it would cost a
quarter of a small operator's time in every use. So the code is read instead: what a forward, and
what it calls by a name that can be followed, mentions. What is found too much costs a comparison.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_MARKS = frozenset({"data", "set_", "vector_to_parameters"})
_NOT_FOLLOWED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "einops"})
_PARTIALS = (functools.partial, functools.partialmethod, functools.cached_property)
_METHODS = (types.MethodType, classmethod, staticmethod)
_MODULE_STATE = frozenset(vars(nn.Module()))


def modules_that_use_data(module: nn.Module) -> list[nn.Module]:
    """The modules in `module` whose forward or forward hooks, or what these call, mention `.data`.

    Python code only. A name stands for whatever any module of `module`, or an object that one holds
    as an attribute, calls by it.
    """
    known: dict[types.CodeType, bool] = {}
    found = []
    attributes = _Attributes(module)
    for submodule in module.modules():
        for function in _entries(submodule):
            key = function.__code__
            if key not in known:
                known[key] = _reaches_mark(function, attributes)
            if known[key]:
                found.append(submodule)
                break
    return found


def method_uses_data(module: nn.Module, method: Callable[..., object]) -> bool:
    """Whether `method` of `module`, or what it calls, mentions `.data`."""
    attributes = _Attributes(module)
    return any(_reaches_mark(function, attributes) for function in _functions_of(method))


class _Attributes:
    """What attributes of a name may be, on all modules of a tree and on the objects they hold."""

    def __init__(self, module: nn.Module) -> None:
        self._owners: dict[type, None] = {}
        self._values: dict[str, list[object]] = {}
        for submodule in module.modules():
            self._owners[type(submodule)] = None
            for name, value in vars(submodule).items():
                if name not in _MODULE_STATE:
                    for item in _items(value, set()):
                        self._values.setdefault(name, []).append(item)
                        if _is_followed(type(item)):
                            self._owners[type(item)] = None
        self._known: dict[str, list[object]] = {}

    def __getitem__(self, name: str) -> list[object]:
        if name not in self._known:
            on_classes = (inspect.getattr_static(owner, name, None) for owner in self._owners)
            self._known[name] = [*on_classes, *self._values.get(name, ())]
        return self._known[name]


def _items(value: object, seen: set[int]) -> Iterator[object]:
    """`value`, or what it holds where it is a container."""
    if id(value) in seen:
        return
    if isinstance(value, Mapping):
        inside: Iterable[object] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = value
    else:
        yield value
        return
    seen.add(id(value))
    for item in inside:
        yield from _items(item, seen)


def _entries(module: nn.Module) -> Iterator[types.FunctionType]:
    hooks: Iterable[Any] = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for entry in (module.forward, *hooks):
        yield from _functions_of(entry)


def _reaches_mark(function: types.FunctionType, attributes: _Attributes) -> bool:
    """Whether `function`, or what it calls, mentions a mark."""
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
        for value in _values(current, attributes, names):
            ahead.extend(_functions_of(value))
    return False


def _functions_of(value: object) -> Iterator[types.FunctionType]:
    """The Python functions that calling, or reading, `value` runs."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, _PARTIALS):
        value = value.func
    elif not isinstance(value, (*_METHODS, types.FunctionType, type)):
        value = inspect.getattr_static(type(value), "__call__", None)
    function = value.__func__ if isinstance(value, _METHODS) else value
    if not isinstance(function, types.FunctionType):
        return
    if _is_followed(function):
        yield function


def _is_followed(value: Any) -> bool:
    """Whether a function or class is of a package whose code is read."""
    return (value.__module__ or "").partition(".")[0] not in _NOT_FOLLOWED


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _values(
    function: types.FunctionType, attributes: _Attributes, names: Iterable[str]
) -> Iterator[object]:
    """What `names` may stand for inside `function`, and what it closes over."""
    for name in names:
        yield from attributes[name]
    for value in _outside(function, names):
        yield value
        # What is called on it: `utilities.average(...)`, `Average.update(...)`.
        if isinstance(value, types.ModuleType):
            yield from map(vars(value).get, names)
        elif isinstance(value, type):
            also = ("forward",) if issubclass(value, torch.autograd.Function) else ()
            for name in (*names, *also):
                yield inspect.getattr_static(value, name, None)
        elif value is not None and not isinstance(value, types.FunctionType):
            for name in names:
                yield inspect.getattr_static(type(value), name, None)


def _outside(function: types.FunctionType, names: Iterable[str]) -> Iterator[object]:
    """The globals that `names` are in `function`, and what it closes over."""
    yield from map(function.__globals__.get, names)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
