"""Ways into a sharded model other than its forward: whole parameters for a while, and methods that
gather as forward does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .arguments import kind_of, require_flag, require_module
from .fully_shard import runtimes
from .gathered_unit import (
    GatheredUnit,
    agree_on_paths,
    check_not_gathered,
    check_same_units,
    check_whole,
)
from .hooks import entry_of
from .modules.cached_params import let_rnns_be
from .modules.hidden_writes import method_uses_data
from .runtime import Runtime
from .unit import Unit


@contextlib.contextmanager
def gathered(module: nn.Module, write: bool = False) -> Iterator[None]:
    """Inside, the parameters of `module` are whole and plain, of the compute dtype, on all ranks.

    `module`: a sharded module or any part of one; the units that own its parameters are gathered.
    Modules can be called inside, and read what was written. What reads the parameters keeps their
    memory: a loss of them may be differentiated inside and after the block, and counts as this
    rank's contribution. Gradients are not to be seen or cleared there. At the end the memory is
    freed, apart from what somebody holds.

    With `write`, what was written, in place or by `.data =`, goes to the main parameters at the
    end; elements whose bits did not change keep their main value. Every rank must write the same.

    A collective at both ends, of which the second compares the ranks' values. After an exception
    inside nothing is written, and the sharded parameters are back; it should come on all ranks:
    those without it wait for the others at the end of the block until the process group's timeout
    has passed or the others have gone. Parameters of units whose forward or backward runs are whole
    already: they stay as they are, and writes count as others inside forward.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: `module` is no part of a sharded model.
        RuntimeError: at the end, on all ranks, with their names: parameters that were written to
            without `write`, with other values on some ranks, with another shape or dtype, or that
            were replaced; nothing is written then. At the start: `write` during a backward, or
            inside a block over the same parameters without it; another part on some ranks.
    """
    require_module(module)
    require_flag("gathered: write", write)
    found = _units_of(module)
    if write and any(runtime.runs_backward for runtime, _ in found):
        raise RuntimeError(
            "gathered: expected write=False during a backward, got True; write after it"
        )
    with contextlib.ExitStack() as stack:
        stack.callback(let_rnns_be, module)  # they would go on holding what was lent
        for runtime, units in found:
            check_same_units(units, runtime.collectives)
        blocks = [(runtime, _lend(runtime, units, write, stack)) for runtime, units in found]
        yield
        _check_and_write(blocks, write)
        blocks.clear()  # whoever holds a whole parameter now, may go on doing so
    for runtime, units in found:
        agree_on_paths(units, runtime.collectives)


def _check_and_write(blocks: list[tuple[Runtime, list[GatheredUnit]]], write: bool) -> None:
    for runtime, units in blocks:
        check_whole(units, runtime.collectives, write)
    if write:
        for _, units in blocks:
            for block in units:
                block.write_back()


def _lend(
    runtime: Runtime, units: list[Unit], write: bool, stack: contextlib.ExitStack
) -> list[GatheredUnit]:
    """Whole parameters in all `units` that have none yet, until `stack` ends."""
    blocks = []
    inside_reads = not runtime.open_writes and any(unit.faces.whole is not None for unit in units)
    if write and inside_reads:
        raise RuntimeError(
            "gathered: expected write=True in the block around too, got True inside one that only "
            "reads the same parameters; pass it there, or leave that block first"
        )
    if write:
        runtime.open_writes += 1
        stack.callback(_close_write, runtime)
    for unit in units:
        if unit.faces.whole is None and not unit.faces.shows_full:
            blocks.append(GatheredUnit(runtime, unit))
            stack.callback(unit.faces.take_back)
        elif write and unit.faces.shows_full:
            unit.faces.writes_data = True
    return blocks


def _close_write(runtime: Runtime) -> None:
    runtime.open_writes -= 1


def check_sharded(module: nn.Module, caller: str) -> None:
    """Refuse to go on inside `gathered`.

    Raises:
        RuntimeError: parameters of the models that `module` has a part in are whole.
    """
    for runtime, _ in _owners(module):
        check_not_gathered(runtime.units, caller)


def runtimes_over(module: nn.Module) -> list[Runtime]:
    """The runtimes that shard parameters of `module`, or a model that it is a part of."""
    owners = [runtime for runtime, _ in _owners(module)]
    return owners or [runtime for root, runtime in runtimes() if module in root.modules()]


def _owners(module: nn.Module) -> list[tuple[Runtime, list[Unit]]]:
    """The units that own parameters of `module`, by their runtimes."""
    places = {id(part._parameters) for part in module.modules()}
    found = [
        (runtime, [unit for unit in runtime.units if unit.faces.lies_in(places)])
        for _, runtime in runtimes()
    ]
    return [(runtime, units) for runtime, units in found if units]


def _units_of(module: nn.Module) -> list[tuple[Runtime, list[Unit]]]:
    owners = _owners(module)
    if not runtimes_over(module):
        raise ValueError(
            "module: expected a module that fully_shard has sharded or a part of one, got a "
            f"{kind_of(module)} that is none; shard it first"
        )
    return owners


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make the method `name` of `module` an entry as its forward is: calling it gathers, casts
    inputs, and has the gradients of what it returns reduced.

    `module`: a sharded module, or the module of one of its units. A second call changes nothing.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: `module` is no such module, or has no method `name`; forward itself, which is an
            entry where the module is called; a generator or a coroutine, which runs later.
    """
    require_module(module)
    entry = entry_of(module)
    if entry is None:
        raise ValueError(_no_entry(module))
    method = _method(module, name)
    if getattr(method, "is_entry", False):
        return
    is_bound = getattr(method, "__self__", None) is module
    function: Callable[..., Any] = getattr(method, "__func__", method) if is_bound else method
    reference = weakref.ref(module)  # the module refers to the wrapper

    @functools.wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "called through a module that is gone"
        bound = functools.partial(function, target) if is_bound else function
        return entry.call(target, bound, args, kwargs)

    enter.is_entry = True  # type: ignore[attr-defined]
    setattr(module, name, enter)
    if method_uses_data(module, function):
        for _, units in _owners(module):
            for unit in units:
                unit.faces.writes_data = True


def _method(module: nn.Module, name: str) -> Callable[..., Any]:
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a method, got {name!r}; pass its name")
    method = getattr(module, name, None)
    kind = type(module).__name__
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(
            f"name: expected a method of {kind}, got {name!r}, which is none; correct the name"
        )
    if name in ("forward", "__call__"):
        raise ValueError(
            f"name: expected a method other than forward, got {name!r}, which gathers where the "
            "module is called: write module(x), not module.forward(x)"
        )
    code = inspect.unwrap(method)
    if inspect.isgeneratorfunction(code) or inspect.iscoroutinefunction(code):
        raise ValueError(
            f"name: expected a method that returns its result, got {name!r} of {kind}, which runs "
            "after the call; register what it calls, or use it inside gathered(module)"
        )
    return method


def _no_entry(module: nn.Module) -> str:
    """Why `module` has no entry, and which modules around it or inside it do."""
    names = [unit.spec.name for _, units in _owners(module) for unit in units]
    if names:
        fix = (
            f"name the module of the unit that owns its parameters: {', '.join(sorted(set(names)))}"
        )
    else:
        fix = "shard it first, or name the module that was sharded"
    return (
        "module: expected a module that fully_shard has sharded, or the module of one of its "
        f"units, got a {kind_of(module)} that is neither; {fix}"
    )
