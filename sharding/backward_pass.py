"""One backward on this rank: which units have their gradients, and the exchanges of them.

The gradients of a unit say when to exchange them, not when its parameters have done their work:
what is used detached, or recomputed, may be read later. A unit whose gradients are complete is
spent, and may be released once the backward of another module begins that is not part of its own:
the engine takes what was recorded last first, so by then it has run all of the unit's graph that
does not lie beyond that module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .exchange import Exchange
from .lanes import DONE, Lane
from .modules.uncompiled import uncompiled
from .trace import Kind, Trace
from .unit import Unit
from .use_order import UnitGroup


@dataclass(eq=False, slots=True)
class BackwardPass:
    """The state of one backward, from its first hook to the engine's callback.

    `order`: indices of all units, as their exchanges follow each other on every rank. `sync`:
    whether gradients are exchanged, or only added up on this rank. `number`: how many backwards
    that did so came before. `callback`: refers to what the engine alone holds, so it is dead once
    the backward has ended, with an exception too.
    """

    units: Sequence[Unit]
    order: Sequence[int]
    lane: Lane
    trace: Trace
    sync: bool
    number: int
    callback: weakref.ref[Callable[[], None]]
    creates_graph: bool
    allowed_exchanges: int
    """How many of `order` may start: all, or those for which all ranks have said to be ready."""
    is_over: bool = False
    """Whether the engine is done: no gradient will come."""
    current: UnitGroup | None = None
    # Indices of units whose gradients are complete, in the order in which they became so.
    ready: dict[int, None] = field(default_factory=dict)
    # How far the exchanges have come in `order`.
    next_in_order: int = 0
    _spent: dict[int, tuple[UnitGroup, Unit]] = field(default_factory=dict)
    # The exchange that still holds gradients, and all that were started and not shown yet.
    _packing: tuple[Unit, Exchange] | None = None
    _in_flight: list[tuple[Unit, Exchange]] = field(default_factory=list)

    # ---- exchanges

    def unit_ready(self, unit: Unit) -> None:
        """All trainable parameters of `unit` have their gradients."""
        if unit.faces.awaits_more:
            return  # `finish` exchanges it, on all ranks
        self.trace.add(Kind.BACKWARD, unit.spec.index)
        is_first = unit.spec.index not in self.ready
        self.ready[unit.spec.index] = None
        if self.sync:
            self._launch_in_order()
        elif is_first:
            self._launch(unit)

    def add_gradient(self, unit: Unit, index: int, grad: Tensor) -> None:
        """Add to the gradient of parameter `index`, whose own path may bring more."""
        assert unit.faces.awaits_more, "all ranks exchange the unit at the end"
        full = unit.faces.full[index]
        if full.requires_grad:
            with torch.no_grad():
                full.grad = grad if full.grad is None else full.grad + grad

    def finish(self) -> None:
        """The engine is done: reduce what is left, and show all gradients to the optimizer."""
        self.is_over = True
        self.allowed_exchanges = len(self.order)
        if self.sync:
            self._launch_in_order()
        else:
            for unit in self.units:
                if unit.reduction.is_needed and unit.spec.index not in self.ready:
                    self._launch(unit)
        self._publish()

    def late_units(self) -> list[Unit]:
        """Those with gradients that came after their exchange, as when a parameter is used in
        several reentrant checkpoints, or with a sum that somebody began to add to then.
        """
        return [
            unit
            for unit in self.units
            if unit.reduction.holds_grads
            or (self.sync and unit.reduction.is_needed and unit.gradients.waiting is not None)
        ]

    def exchange_late(self, late: Sequence[Unit]) -> None:
        """Reduce what is left of `late`, as `finish` does."""
        for unit in late:
            self._launch(unit, ~self.number)  # which no backward has: noise of its own
        self._publish()

    def finish_exchanges(self) -> None:
        """Order the following compute after all exchanges so far."""
        self._finish_packing()
        for _, exchange in self._in_flight:
            exchange.event.wait()

    def abandon(self, deadline: float) -> None:
        """Nobody asks for the exchanges: see `Event.abandon`."""
        for _, exchange in self._in_flight:
            exchange.event.abandon(deadline)
            exchange.drop()

    def forget_exchanges(self) -> None:
        """What they wait for was recorded for a CUDA graph that failed, and never comes."""
        for _, exchange in self._in_flight:
            exchange.event = DONE

    def count_ready(self) -> int:
        """How many of `order`, from the first on, this rank is ready to exchange."""
        place = self.next_in_order
        while place < len(self.order):
            if self._awaits_gradients(self.units[self.order[place]]):
                break
            place += 1
        return place

    def _awaits_gradients(self, unit: Unit) -> bool:
        ready = self.is_over or unit.spec.index in self.ready
        return unit.reduction.is_needed and not ready

    def launch_allowed(self) -> None:
        """Start the exchanges for which all ranks are ready."""
        if self.sync:
            self._launch_in_order()

    def _launch_in_order(self) -> None:
        # One order on every rank, whichever gradients exist: otherwise exchanges would pair up
        # wrongly.
        stop = min(self.allowed_exchanges, len(self.order))
        while self.next_in_order < stop:
            unit = self.units[self.order[self.next_in_order]]
            if self._awaits_gradients(unit):
                return
            if unit.reduction.is_needed:
                self._launch(unit)
            self.next_in_order += 1

    def _launch(self, unit: Unit, number: int | None = None) -> None:
        """Reduce `unit`; `number`: of the exchange, None: the backward's."""
        number = self.number if number is None else number
        with torch.no_grad():  # a backward that makes a graph runs its hooks with gradients enabled
            self._finish_packing()
            self.trace.add(Kind.EXCHANGE if self.sync else Kind.ACCUMULATE, unit.spec.index)
            self._packing = (
                unit,
                unit.reduction.start(self.lane, sync=self.sync, number=number),
            )
            self._in_flight.append(self._packing)

    def _finish_packing(self) -> None:
        if self._packing is not None:
            unit, exchange = self._packing
            self._packing = None
            exchange.finish()
            self.trace.add(Kind.FINISH_EXCHANGE, unit.spec.index)

    def _publish(self) -> None:
        self.finish_exchanges()
        for unit, _ in self._in_flight:
            unit.gradients.publish()
        self._in_flight.clear()

    # ---- what has done its work

    def spend(self, group: UnitGroup) -> None:
        """Note which units of `group` nothing needs any more, once another module's turn comes."""
        trained = [unit for unit in group.units if unit.reduction.is_needed]
        spent = [unit for unit in trained if unit.spec.index in self.ready]
        if group.has_frozen and len(spent) == len(trained) and not group.open_inputs:
            spent = group.units
        for unit in spent:
            if unit.frees_parameters:
                self._spent[unit.spec.index] = group, unit

    def enter(self, group: UnitGroup, *, certain: bool = True) -> None:
        """The backward of `group`'s module begins; unless `certain`, perhaps that of another."""
        if not certain:
            self.current = None
        elif self.current is None or group.index not in self.current.ancestors:
            # A module whose output is its last part's begins with that part.
            self.current = group

    def take_spent(self) -> list[Unit]:
        """The spent units that are not part of the module whose backward began last."""
        current, taken = self.current, []
        if current is not None and self._spent:
            for index, (group, unit) in list(self._spent.items()):
                if group is not current and group.index not in current.ancestors:
                    del self._spent[index]
                    taken.append(unit)
        return taken


@uncompiled
def engine_let_go(
    show_sharded: Callable[[], Callable[[weakref.ref[Callable[[], None]]], None] | None],
    callback: weakref.ref[Callable[[], None]],
) -> None:
    """A backward is over. If an exception ended it, most waits for the next use, but whoever
    catches that sees sharded parameters, say to clear gradients. `show_sharded`: weak.
    """
    alive = show_sharded()
    if alive is not None:
        alive(callback)
