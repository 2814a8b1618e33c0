"""Which parts of a model wait for which parameters, where parameters are gathered beside forward.

A module waits for the units of its own parameters when it is called. In the first forward the
root waits for all, and it is seen which modules are called at all: what belongs to others, as
`MultiheadAttention` reads its `out_proj`, is waited for by the nearest module around them that is
called. Until then a module shows its sharded parameters, so what reads them before, from outside,
gets their error and no stale value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from .modules.uncompiled import uncompiled
from .runtime import Runtime
from .unit import Unit


class ParamWaits:
    """The waits of one model. Lives in the hooks of its modules, refers to all weakly."""

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._units: weakref.WeakKeyDictionary[nn.Module, list[Unit]] = weakref.WeakKeyDictionary()
        self._is_planned = False
        for part in module.modules():
            if part is not module:
                part.register_forward_pre_hook(self._called_one, prepend=True)
        module.register_forward_hook(self._root_returned)

    @uncompiled
    def _called_one(self, module: nn.Module, _args: object) -> None:
        runtime = self._runtime()
        if runtime is None:
            return
        if not self._is_planned:
            self._called.add(module)
            return
        if runtime.root_calls:
            for unit in self._units.get(module, ()):
                if not unit.faces.shows_full:
                    runtime.bring(unit)

    @uncompiled
    def _root_returned(self, module: nn.Module, _args: object, _output: object) -> None:
        runtime = self._runtime()
        if self._is_planned or runtime is None:
            return
        self._is_planned = True
        units_in: dict[int, set[Unit]] = {}
        for unit in runtime.units:
            for parameters, _ in unit.faces.slots():
                units_in.setdefault(parameters, set()).add(unit)
        waits: dict[nn.Module, set[Unit]] = {}
        for waiter, part in _waiters(module, set(self._called)):
            waits.setdefault(waiter, set()).update(units_in.get(id(part._parameters), ()))
        waited_for_by_root = waits.pop(module)
        for group in runtime.groups:
            group.deferred = [unit for unit in group.units if unit not in waited_for_by_root]
        for waiter, units in waits.items():
            self._units[waiter] = [unit for unit in runtime.units if unit in units]


def _waiters(root: nn.Module, called: set[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """For every module, itself or the nearest one around it that is `root` or `called`, over all
    paths to it.
    """
    pending, seen = [(root, root)], set()
    while pending:
        waiter, part = pending.pop()
        waiter = part if part in called else waiter
        if (waiter, part) not in seen:
            seen.add((waiter, part))
            yield waiter, part
            pending += [(waiter, child) for child in part.children()]
