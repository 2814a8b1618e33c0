"""In which order a model on the meta device gets its values, and from what: decided from the module
tree alone, nothing changed.

A model is cut into stages, modules whose tensors exist at the same time, in the order in which
constructors of modules end, which is the one in which they draw random numbers::

    initialiser    a stage                                                    what is called
    True           the outermost module that is reset, with all inside it     `reset_parameters` or
                                                                              `_reset_parameters`
    a function     a unit, or the outermost module that has none inside,      the function, with
                   with all inside it; else a module's own tensors            every module
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import listed
from .uncompiled import named_modules, without_compile

Initialiser = bool | Callable[[nn.Module], object]
OPTION = "init_model_with_meta_device"
_RESETS = ("reset_parameters", "_reset_parameters")


def require_initialiser(value: object) -> None:
    """Refuse what is no `Initialiser`.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, bool) and (not callable(value) or isinstance(value, type)):
        raise TypeError(
            f"{OPTION}: expected True, False or a function that takes a module and sets its "
            f"parameters and buffers, got {value!r}; pass one of them"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where a module holds a tensor of its own, by the tensor's first name in the model."""

    name: str
    tensors: dict[str, Any]
    key: str
    tensor: Tensor


class Slots:
    """Every parameter and buffer of a model in every place, as they were found."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [*named_modules(module)]
        self.of: dict[int, list[Slot]] = {}
        """By the modules' ids."""
        self.first: dict[int, Slot] = {}
        """By the tensors' ids."""
        for prefix, part in self.modules:
            self.of[id(part)] = [
                self._slot(tensors, key, tensor, f"{prefix}.{key}" if prefix else key)
                for tensors in (part._parameters, part._buffers)
                for key, tensor in tensors.items()
                if tensor is not None
            ]

    def _slot(self, tensors: dict[str, Any], key: str, tensor: Tensor, name: str) -> Slot:
        known = self.first.get(id(tensor))
        slot = Slot(name if known is None else known.name, tensors, key, tensor)
        return self.first.setdefault(id(tensor), slot) if known is None else slot

    def __iter__(self) -> Iterator[Slot]:
        for slots in self.of.values():
            yield from slots

    def clear(self) -> None:
        """Let go of all tensors."""
        self.of.clear()
        self.first.clear()

    def storages(self) -> dict[int, str]:
        """First names by what identifies the tensors' memory, or would if they had any."""
        return {
            slot.tensor.untyped_storage()._cdata: slot.name
            for slot in self.first.values()
            if has_storage(slot.tensor)
        }


def has_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is a plain one, whose memory can be told from that of others."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Modules whose own tensors exist at the same time, and what to call then, by the names of the
    modules.
    """

    modules: tuple[nn.Module, ...]
    calls: tuple[tuple[str, Callable[[], object]], ...]


def plan_stages(
    module: nn.Module,
    slots: Slots,
    missing: frozenset[str],
    initialiser: Initialiser,
    units: Iterable[nn.Module],
) -> list[Stage]:
    """The stages that fill what is `missing` of `module`; `units` are the modules of its units.

    Raises:
        ValueError: nothing would fill some of it; module and tensors are named.
    """
    names = {id(part): name for name, part in slots.modules}
    lacks = {key: [slot for slot in of if slot.name in missing] for key, of in slots.of.items()}
    inside = {key for key, part in _by_id(module) if any(lacks[other] for other, _ in _by_id(part))}
    plan = (
        _by_function(initialiser, {id(unit) for unit in units})
        if callable(initialiser)
        else _by_reset({key for key, lacking in lacks.items() if lacking})
    )
    stages, orphans = [], []
    done: set[int] = set()  # a module that stands in several places is made once
    for part, is_whole in _cut(module, plan.is_whole, set()):
        modules = [*_inside_out(part, done)] if is_whole else [part]
        calls = [
            (names[id(other)], call)
            for other in modules
            if id(other) in inside and (call := plan.call(other)) is not None
        ]
        if calls:
            stages.append(Stage(tuple(modules), tuple(calls)))
        elif lacks[id(part)]:
            keys = listed([slot.key for slot in lacks[id(part)]])
            orphans.append(f"'{names[id(part)]}' of class {type(part).__name__} ({keys})")
    if orphans:
        raise ValueError(
            f"{OPTION}: expected every module with parameters or buffers on the meta device to "
            f"have reset_parameters or _reset_parameters, got {listed(orphans, '; ')} without; "
            "define one, or pass a function that takes a module and sets what is its own"
        )
    return stages


def _by_id(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    for part in module.modules():
        yield id(part), part


@dataclass(frozen=True, slots=True)
class _Plan:
    """How modules are called, and which ones are a stage together with all inside them."""

    call: Callable[[nn.Module], Callable[[], object] | None]
    is_whole: Callable[[nn.Module], bool]


def _by_reset(lacking: set[int]) -> _Plan:
    def call(module: nn.Module) -> Callable[[], object] | None:
        for name in _RESETS:
            method = getattr(module, name, None)
            if callable(method):
                # What only passes it on to its children is called where its constructor did.
                is_due = id(module) in lacking or _calls_in_constructor(type(module), name)
                return method if is_due else None
        return None

    return _Plan(call, lambda module: call(module) is not None)


def _by_function(function: Callable[[nn.Module], object], units: set[int]) -> _Plan:
    def call(module: nn.Module) -> Callable[[], object] | None:
        is_wrapper = without_compile(module) is not module
        return None if is_wrapper else lambda: function(module)

    def is_whole(module: nn.Module) -> bool:
        return id(module) in units or not any(id(part) in units for part in module.modules())

    return _Plan(call, is_whole)


def _cut(
    module: nn.Module, is_whole: Callable[[nn.Module], bool], seen: set[int]
) -> Iterator[tuple[nn.Module, bool]]:
    """The outermost modules that are whole, and those around them, from the inside out."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if is_whole(module):
        seen.update(id(part) for part in module.modules())
        yield module, True
        return
    for child in module.children():
        yield from _cut(child, is_whole, seen)
    yield module, False


def _inside_out(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _inside_out(child, seen)
        yield module


def _calls_in_constructor(kind: type[nn.Module], method: str) -> bool:
    """Whether the constructor of `kind`, or what it calls on itself, mentions `method`."""
    seen = {"__init__"}
    ahead = ["__init__"]
    while ahead:
        name = ahead.pop()
        for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            function = vars(owner).get(name)
            if isinstance(function, types.FunctionType):
                mentioned = set(function.__code__.co_names)
                if method in mentioned:
                    return True
                ahead.extend(mentioned - seen)
                seen |= mentioned
    return False
