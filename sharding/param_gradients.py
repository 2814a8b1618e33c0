"""The gradients of one unit as its sharded parameters show them, and what stands for those in
autograd's graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from .tensor.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from .unit import Unit


class ParamGradients:
    """The `GradSource` of a unit's parameters."""

    on_contribution: Callable[[], None]
    """See `graph_leaf`."""

    def __init__(self, unit: Unit) -> None:
        """`unit`: a weak proxy, since the unit holds this."""
        self._unit = unit
        self._indices: dict[int, int] = {}
        self._views: dict[int, ShardedTensor] = {}

    def own(self, sharded: Sequence[ShardedTensor]) -> None:
        """Be asked for these parameters, the unit's own in its order."""
        self._indices = {id(tensor): index for index, tensor in enumerate(sharded)}

    def forget_views(self) -> None:
        """The memory of the gradients was freed."""
        self._views.clear()

    def _view(self, index: int) -> ShardedTensor:
        unit = self._unit
        copy = unit.gradients.copy_of(index)
        if copy is not None:
            view = unit.sharded_view(copy[0], index, base=copy[1])
            view.shown_by = weakref.ref(unit.gradients)
            return view
        if index not in self._views:
            assert unit.gradients.main_grad is not None
            view = unit.sharded_view(unit.gradients.main_grad, index)
            view.shown_by = weakref.ref(unit.gradients)
            self._views[index] = view
        return self._views[index]

    def get_grad(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """The reduced gradient of one parameter, sharded like it; None when there is none."""
        index = self._indices[id(parameter)]
        return self._view(index) if self._unit.gradients.has_tensor(index) else None

    def set_grad(self, parameter: ShardedTensor, value: ShardedTensor | None) -> None:
        """Clear (None) or overwrite the reduced gradient of one parameter."""
        index, gradients = self._indices[id(parameter)], self._unit.gradients
        if value is not None:
            value.require_exchanged()
            local = value.local.clone()  # it may be a view of what is cleared for it
            gradients.free_cleared()  # others may be too, which are to be put back next
            with gradients.editing():
                gradients.show_tensor(index)
                self._view(index).local.copy_(local)
        elif gradients.has_tensor(index):
            with gradients.editing():
                gradients.clear_tensor(index, self._view(index).local)

    def requires_grad_changed(self) -> None:
        """A parameter was frozen or unfrozen, which counts from its next use on."""
        self._unit.requires_grad_changed()

    def graph_leaf(self, parameter: ShardedTensor) -> tuple[nn.Parameter, Callable[[], None]]:
        """The full parameter, which stands for `parameter` in graphs, and whom to tell in backward
        that its gradient comes.
        """
        full = self._unit.faces.full[self._indices[id(parameter)]]
        full.requires_grad_(parameter.requires_grad)
        return full, self.on_contribution

    def graph_leaves(self, parameter: ShardedTensor) -> list[nn.Parameter]:
        """All that stands for `parameter` in graphs: whole parameters that were lent, too."""
        index = self._indices[id(parameter)]
        return [self.graph_leaf(parameter)[0], *self._unit.faces.lent_leaves(index)]
