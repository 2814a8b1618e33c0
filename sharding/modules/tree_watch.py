"""What people change in the module tree after `fully_shard`: noted when it happens, judged at the
next use.

torch calls global hooks wherever a module or a parameter is registered. Ours only note that the
tree of a sharded model changed; the next forward then walks it. Some methods of torch's lists go
around these hooks, so forward compares the lists' lengths too. Who saves, sums up or binds an
optimizer walks in any case.

A new parameter would be trained by each rank for itself, so it is refused. A new module without
any, such as a dropout, is fine, and so is taking a module away: its parameters get no gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..messages import listed
from ..tensor.sharded_tensor import ShardedTensor
from ..unit import Unit
from .uncompiled import param_places


class TreeWatch:
    """Knows the modules of one sharded model, weakly, and the places of its parameters."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._root = weakref.ref(module)
        self._units = units
        self._slots = {slot for unit in units for slot in unit.faces.slots()}
        self._learn(module)
        _watch_registrations()
        _WATCHES.add(self)

    def _learn(self, module: nn.Module) -> None:
        modules = [*module.modules()]
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(modules)
        lists = (nn.ModuleList, nn.Sequential)
        # Weakly: this watch hangs on the modules' hooks.
        self._lists = [weakref.ref(entry) for entry in modules if isinstance(entry, lists)]
        self._lists_length = self._length_of_lists()
        self.changed = False

    def _length_of_lists(self) -> int:
        return sum(len(entry._modules) for ref in self._lists if (entry := ref()) is not None)

    def note(self, parent: nn.Module, child: object) -> None:
        """`child`, a module or a parameter, is about to be registered in `parent`."""
        known = isinstance(child, nn.Module) and child in self._modules
        if parent in self._modules and not known:
            self.changed = True

    def covers(self, module: nn.Module) -> bool:
        """Whether `module` is a part of this model, or the other way round."""
        return module in self._modules or any(part is self._root() for part in module.modules())

    def check_before_forward(self) -> None:
        """`check` if something was registered since it was called last; raises as that does."""
        if self.changed or self._length_of_lists() != self._lists_length:
            self.check()

    def check(self) -> None:
        """Look at the whole tree.

        Raises:
            RuntimeError: it holds parameters that `fully_shard` did not see there; they are named.
        """
        for unit in self._units:
            unit.faces.require_unreplaced()
        module = self._root()
        assert module is not None, "nobody asks for a model that is gone"
        new = [
            place.name
            for place in param_places(module)
            if (id(place.module._parameters), place.attribute) not in self._slots
            and (isinstance(place.param, ShardedTensor) or place.param.is_floating_point())
        ]
        if new:
            raise RuntimeError(
                "module: expected the parameters that it had when fully_shard sharded it, got "
                f"{_quoted(new)} besides, which each rank would hold and train for itself; add or "
                "tie parameters before fully_shard, or take them out again"
            )
        self._learn(module)

    def check_names(self) -> None:
        """Check that state saved under the parameters' names belongs to them.

        Raises:
            RuntimeError: parameters were taken out of the module, or stand under another one's
                name; they are named.
        """
        module = self._root()
        assert module is not None, "nobody asks for a model that is gone"
        found = {place.name: place.param for place in param_places(module)}
        standing = {id(param) for param in found.values()}
        moved = []
        for unit in self._units:
            faces = zip(unit.spec.names, unit.faces.sharded, unit.faces.full, strict=True)
            for name, sharded, full in faces:
                own = {id(sharded), id(full)}
                if standing.isdisjoint(own) or id(found.get(name, sharded)) not in own:
                    moved.append(name)
        if moved:
            raise RuntimeError(
                "module: expected parameters under the names that they had when fully_shard "
                f"sharded it, got {_quoted(moved)} taken out or renamed, while the optimizer's "
                "state goes by these names; change the module before fully_shard, or save it "
                "without the optimizer"
            )


_WATCHES: weakref.WeakSet[TreeWatch] = weakref.WeakSet()


def watches_of(module: nn.Module) -> list[TreeWatch]:
    """Of the sharded models that `module` is, contains or is a part of."""
    return [watch for watch in _WATCHES if watch.covers(module)]


@functools.cache
def _watch_registrations() -> None:
    """Once for the process, and for good: torch's hooks are global."""

    def note(parent: nn.Module, _name: str, child: object) -> None:
        for watch in _WATCHES:
            watch.note(parent, child)

    register_module_module_registration_hook(note)
    register_module_parameter_registration_hook(note)


def _quoted(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names])
