"""What `torch.compile` leaves alone, hooks that talk to process groups and free memory, and what a
model is without it: itself, and names as they are without its wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

# Private, since `torch.compiler.disable` imports dynamo, which takes longer than all of torch, and
# wraps the function. A marked one costs nothing where nothing is compiled.
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

_SKIP_WITH_ALL_IT_CALLS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_Function = TypeVar("_Function", bound=Callable[..., object])


def uncompiled(function: _Function) -> _Function:
    """Mark `function`, in place: compiled code that calls it breaks its graph there, and neither it
    nor anything it calls is compiled.
    """
    assert isinstance(function, FunctionType), "only a Python function's own code can be marked"
    # For whoever calls it while its own frame runs as it is, such as nn.Module's hooks.
    set_code_exec_strategy(function.__code__, _SKIP_WITH_ALL_IT_CALLS)
    # For who traces the caller.
    marks = vars(function)
    marks["_torchdynamo_disable"] = True
    marks["_torchdynamo_disable_msg"] = "sidestream gathers and releases parameters there"
    return function


_WRAPPED = "_orig_mod"
"""The only part of the module that `torch.compile(module)` returns: the module itself."""


def without_compile(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped to `module`; `module` itself if it did not."""
    wrapped = module._modules.get(_WRAPPED)
    return module if wrapped is None else wrapped


def plain_name(name: str) -> str:
    """`name` of a module, parameter or buffer as it is without `torch.compile` on the way to it."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


class ParamPlace(NamedTuple):
    """A parameter that `module` holds as `attribute`; `name` is plain."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Plain names and the modules, each once, in the order of registration."""
    for name, part in module.named_modules():
        yield plain_name(name), part


def param_places(module: nn.Module) -> Iterator[ParamPlace]:
    """Every parameter in every place, in the order of registration."""
    for prefix, part in named_modules(module):
        for attribute, param in part._parameters.items():
            if param is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield ParamPlace(name, part, attribute, param)


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Plain names and the buffers, each once, in the order of registration."""
    for name, buffer in module.named_buffers():
        yield plain_name(name), buffer
