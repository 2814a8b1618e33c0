"""What an op is: a schema, its implementation by device type, and the shortest way to call it.

The ops write into their arguments, return nothing and are not differentiable. On a CPU an op is its
definition in plain PyTorch, on a GPU the launcher of a Triton kernel, imported when it is first
called.

A number of a call, such as a seed, may be a tensor of one element on its device. A definition is
given what that has, a launcher the tensor, for its kernel to read: so a CUDA graph follows it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .aliasing import PLAIN_TYPES

_TENSOR = "_tensor"
_library = torch.library.Library("sidestream", "DEF")
_blocks_launching_on_cpu = 0


def _without_autograd(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                function(*arguments, **options)
        else:
            function(*arguments, **options)

    return call


def on_first_use(module: str, name: str) -> Callable[..., Any]:
    """Our `module`'s function `name`, imported when it is first called: CPUs need no Triton."""
    found: Callable[..., Any] | None = None

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f".{module}", __package__), name)
        return found(*arguments, **options)

    return call


class Op:
    """One op of ours: its overload and its implementation by device type.

    `schema` is without the namespace: "reduce_(Tensor(a!) out, Tensor parts) -> ()". An op writes
    into its arguments and returns nothing. A number that may be a tensor is in the schema twice: as
    "SymInt? seed", where `dispatch` and implementations have either, and behind all, by name alone,
    as "Tensor? seed_tensor=None".
    """

    def __init__(self, schema: str, cpu: Callable[..., None], cuda: Callable[..., None]) -> None:
        _library.define(schema)
        name = schema.partition("(")[0]
        self.overload = getattr(torch.ops.sidestream, name).default
        taken = self.overload._schema.arguments
        self._defaults = [one.default_value for one in taken if not one.kwarg_only]
        places = {one.name: place for place, one in enumerate(taken)}
        names = (one.name.removesuffix(_TENSOR) for one in taken if one.name.endswith(_TENSOR))
        self._numbers = tuple((places[name], name + _TENSOR) for name in names)
        self.by_device = {
            "cpu": _without_autograd(self._reading(cpu)),
            "cuda": _without_autograd(cuda),
        }
        for device_type in self.by_device:
            _library.impl(name, functools.partial(self._run, device_type), device_type.upper())
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"sidestream::{name}", _writes_in_place, lib=_library)

    def dispatch(self, *arguments: Any) -> None:
        """Call the overload, by way of the dispatcher."""
        given, tensors = list(arguments), {}
        for place, name in self._numbers:
            if isinstance(given[place], torch.Tensor):
                tensors[name], given[place] = given[place], self._defaults[place]
        self.overload(*given, **tensors)

    def _run(self, device_type: str, *arguments: Any, **options: Any) -> None:
        given = [*arguments, *self._defaults[len(arguments) :]]  # dispatchers leave defaults out
        for place, name in self._numbers:
            tensor = options.pop(name, None)
            given[place] = given[place] if tensor is None else tensor
        chosen = "cuda" if _blocks_launching_on_cpu else device_type
        self.by_device[chosen](*given, **options)

    def _reading(self, function: Callable[..., None]) -> Callable[..., None]:
        """The `function` of numbers alone."""
        if not self._numbers:
            return function

        @functools.wraps(function)
        def call(*arguments: Any) -> None:
            given = list(arguments)
            for place, _ in self._numbers:
                if isinstance(given[place], torch.Tensor):
                    given[place] = given[place].item()
            function(*given)

        return call


@contextlib.contextmanager
def launching_on_cpu() -> Iterator[None]:
    """Within the block ops launch their Triton kernels for CPU tensors too.

    For Triton's interpreter, and to record what would be launched: see `launch.recorded`. It holds
    for the whole process, so for one thread at a time.
    """
    global _blocks_launching_on_cpu  # noqa: PLW0603 - it is the process that has the state
    _blocks_launching_on_cpu += 1
    try:
        yield
    finally:
        _blocks_launching_on_cpu -= 1


def _writes_in_place(*arguments: Any, **options: Any) -> None:
    """What the ops return on tensors without data: nothing."""


def launches(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether a function that is no op launches kernels for `tensors`: plain ones, on a GPU."""
    return (
        (device.type == "cuda" or _blocks_launching_on_cpu > 0)
        and not torch.compiler.is_compiling()
        and all(type(tensor) in PLAIN_TYPES for tensor in tensors)
    )


def runs_directly(anchor: torch.Tensor) -> bool:
    """Whether nobody watches operators: no trace, no dispatch mode, no tensor subclass."""
    return (
        not _blocks_launching_on_cpu
        and not torch.compiler.is_compiling()
        and type(anchor) in PLAIN_TYPES
        and not torch._C._len_torch_dispatch_stack()
    )


def call(op: Op, anchor: torch.Tensor, *arguments: Any) -> None:
    """Run `op` on the device of `anchor`.

    The dispatcher costs 9 us of host time for nine tensors, so it is left out where nobody watches.
    """
    if (
        runs_directly(anchor)
        and (implementation := op.by_device.get(anchor.device.type)) is not None
    ):
        implementation(*arguments)
    else:
        op.dispatch(*arguments)


def is_usual(looks: Callable[..., bool], anchor: torch.Tensor, *arguments: Any) -> bool:
    """Whether arguments are as they are in every step of a training: a host has no time for more.

    What is not, a closer look accepts or names, and only that makes names of list elements.
    """
    try:
        return runs_directly(anchor) and looks(anchor, *arguments)
    except (AttributeError, RuntimeError, TypeError):  # it is no tensor, or has no memory
        return False
