"""Groups of units, the order in which the forward uses them, and what to gather ahead of each.

The order is recorded in every forward and only ever a hint: a forward in another order is slower,
not wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from .unit import Unit


@dataclass(eq=False, slots=True)
class UnitGroup:
    """The units of one module: they are gathered and released together."""

    index: int
    name: str
    units: list[Unit]
    reshard_after_forward: bool
    is_root: bool
    ancestors: frozenset[int] = frozenset()
    """Indices of the groups whose modules contain this one's."""
    open_calls: int = 0
    """Calls of the module that have not returned: more than one where it calls itself."""
    open_inputs: int = 0
    """Calls whose inputs still wait for their gradients, counted while `has_frozen`."""
    has_frozen: bool = False
    """Whether parameters were frozen in its last forward: no gradient says when they are done."""
    deferred: Collection[Unit] = ()
    """Units for which the module does not wait: its parts do, where they use them."""


@dataclass(slots=True)
class UseOrder:
    """For every group the units to gather when its forward or its backward begins.

    `prefetch`: how many groups ahead. The first order is that of registration.
    """

    groups: Sequence[UnitGroup]
    prefetch: int
    with_forward: dict[int, list[Unit]] = field(default_factory=dict)
    with_backward: dict[int, list[Unit]] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    _seen: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._order = [group.index for group in self.groups]
        self._plan()

    def see(self, group: UnitGroup) -> None:
        """The forward of `group` begins."""
        self._seen.setdefault(group.index)

    def restart(self) -> None:
        """A forward of the whole model begins: the one before it, if it was another, is adopted."""
        seen = list(self._seen)
        if seen != self._order:
            self._order = seen + [index for index in self._order if index not in self._seen]
            self._plan()
        self._seen.clear()

    def _plan(self) -> None:
        order = [self.groups[index] for index in self._order]
        for place, group in enumerate(order):
            after = order[place + 1 : place + 1 + self.prefetch]
            # The root's backward comes first: what follows is the last unit of the forward.
            end = len(order) if group.is_root else place
            before = order[max(end - self.prefetch, 0) : end][::-1]
            self.with_forward[group.index] = _units_that_move(after)
            self.with_backward[group.index] = _units_that_move(before)


def _units_that_move(groups: Iterable[UnitGroup]) -> list[Unit]:
    return [unit for group in groups for unit in group.units if unit.frees_parameters]
