"""`torch.compile` for single functions, with a switch that every call obeys, also of functions that
were decorated, or imported, before it was turned.

    @jit_fuser
    def bias_gelu(x, bias):
        return torch.nn.functional.gelu(x + bias)

    disable_jit_fuser()          # from now on, in all threads, the plain functions
    with jit_fuser_disabled():   # meanwhile, in this thread alone
        ...
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Switch:
    """Whether fused functions are compiled in this process."""

    def __init__(self) -> None:
        self.is_on = True


_SWITCH = _Switch()
_BLOCKS: ContextVar[int] = ContextVar("blocks of jit_fuser_disabled", default=0)


def enable_jit_fuser() -> None:
    """Run what `jit_fuser` has decorated compiled, in all threads. So it is at first."""
    _SWITCH.is_on = True


def disable_jit_fuser() -> None:
    """Run what `jit_fuser` has decorated as it was written, in all threads. What is compiled stays,
    for the next `enable_jit_fuser`.
    """
    _SWITCH.is_on = False


@contextlib.contextmanager
def jit_fuser_disabled() -> Iterator[None]:
    """Inside, this thread runs decorated functions as they were written."""
    token = _BLOCKS.set(_BLOCKS.get() + 1)
    try:
        yield
    finally:
        _BLOCKS.reset(token)


@overload
def jit_fuser(function: _Function, /, **options: Any) -> _Function: ...
@overload
def jit_fuser(function: None = None, /, **options: Any) -> Callable[[_Function], _Function]: ...
def jit_fuser(function: Any = None, /, **options: Any) -> Any:
    """Decorate a function or method with `torch.compile(function, **options)`.

    It is compiled at its first call with the switch on; until then the compiler is not even
    imported. Called by another compiled function it is a part of that one's code.

    Raises:
        TypeError: something that cannot be called.
    """
    if function is None:
        return functools.partial(jit_fuser, **options)
    if not callable(function):
        raise TypeError(
            f"jit_fuser: expected a function, got {type(function).__name__}; under @staticmethod, "
            "@classmethod or @property, put @jit_fuser next to the function"
        )
    compiled: list[Callable[..., Any]] = []
    lock = threading.Lock()

    def compile_once() -> Callable[..., Any]:
        with lock:
            if not compiled:
                compiled.append(torch.compile(function, **options))
        return compiled[0]

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        # First: whoever compiles a caller is to see nothing but the function.
        if torch.compiler.is_compiling() or not _SWITCH.is_on or _BLOCKS.get():
            return function(*args, **kwargs)
        return (compiled[0] if compiled else compile_once())(*args, **kwargs)

    return fused


def noop_decorator(function: _Function) -> _Function:
    """`function` itself, for where a decorator is expected."""
    return function
