"""Runs the schedule: turns what happens in forward and backward into gathers, exchanges and
releases.

`hooks.py` calls the event methods below; `schedule.py` states the order they lead to. Order of use
is recorded and only ever a hint for the next gather; the order of exchanges is agreed between the
ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.autograd.variable import Variable

from ..buffers import BufferPool
from .collectives import Collectives
from .gradients import Exchange
from .lanes import Lane
from .schedule import Kind, Trace
from .unit import Unit, UnitState

MAX_EXCHANGES_IN_FLIGHT = 2
"""Exchanges whose buffers may be alive at once: one on the wire while the next unit is packed."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How far the runtime overlaps. `prefetch`: gathers started ahead of the unit in use."""

    prefetch: int
    overlap_param_gather: bool


@dataclass(eq=False, slots=True)
class UnitGroup:
    """The units of one module: they are gathered and released together."""

    index: int
    name: str
    units: list[Unit]
    reshard_after_forward: bool
    is_root: bool
    open_inputs: int = 0
    has_frozen: bool = False
    """Whether a unit is gathered whose parameters get no gradient, so that none ends its use."""


@dataclass(slots=True)
class _Backward:
    """The state of one backward pass."""

    sync: bool
    next_in_order: int = 0
    # Unit indices in the order in which they became ready.
    ready: dict[int, None] = field(default_factory=dict)
    in_flight: deque[tuple[Unit, Exchange]] = field(default_factory=deque)
    ending: list[Exchange] = field(default_factory=list)


class Runtime:
    """One sharded model on this rank. `sync`: whether the next backward exchanges gradients."""

    def __init__(
        self,
        groups: list[UnitGroup],
        collectives: Collectives,
        pool: BufferPool,
        lanes: tuple[Lane, Lane],
        options: RuntimeOptions,
    ) -> None:
        self.groups = groups
        self.units = [unit for group in groups for unit in group.units]
        self.collectives = collectives
        self.pool = pool
        self.trace = Trace()
        self.sync = True
        self._gather_lane, self._reduce_lane = lanes
        self._options = options
        self._group_of = {id(unit): group for group in groups for unit in group.units}
        self._backward: _Backward | None = None
        # Registration order until a forward has been seen.
        self._forward_order = [group.index for group in groups]
        self._plan_prefetch()
        self._seen: dict[int, None] = {}
        self._exchange_order = [unit.spec.index for unit in reversed(self.units)]
        self._order_agreed = collectives.world_size == 1 or len(self.units) == 1

    @property
    def prefetch(self) -> int:
        """How many units ahead are gathered."""
        return self._options.prefetch if self._options.overlap_param_gather else 0

    # ---- forward

    def root_pre_forward(self) -> None:
        """A forward of the whole model begins."""
        if self._backward is not None:
            if torch._C._current_graph_task_id() != -1:
                return
            self.recover()
        seen = list(self._seen)
        if seen != self._forward_order:
            self._adopt_forward_order(seen)
        self._seen.clear()
        if self._options.overlap_param_gather:
            # Replicated parameters stay: all gathers can be on their way at once. In the order of
            # registration, since ranks may have used the units in different orders.
            for unit in self.units:
                if not unit.frees_parameters:
                    self._start_gather(unit)

    def _adopt_forward_order(self, seen: list[int]) -> None:
        known = set(seen)
        rest = [index for index in self._forward_order if index not in known]
        self._forward_order = seen + rest
        self._plan_prefetch()

    def _plan_prefetch(self) -> None:
        """For every group, the units to gather when its forward or its backward begins."""
        order = [self.groups[index] for index in self._forward_order]
        self._gathers_with_forward: dict[int, list[Unit]] = {}
        self._gathers_with_backward: dict[int, list[Unit]] = {}
        for place, group in enumerate(order):
            after = order[place + 1 : place + 1 + self.prefetch]
            # The root's backward comes first: what follows is the last unit of the forward.
            end = len(order) if group.is_root else place
            before = order[max(end - self.prefetch, 0) : end][::-1]
            self._gathers_with_forward[group.index] = _units_that_move(after)
            self._gathers_with_backward[group.index] = _units_that_move(before)

    def pre_forward(self, group: UnitGroup) -> None:
        """The module of `group` is about to run."""
        recompute = self._backward is not None
        for unit in group.units:
            self._start_gather(unit)
        if not recompute:
            self._seen.setdefault(group.index)
            for unit in self._gathers_with_forward[group.index]:
                self._start_gather(unit)
        for unit in group.units:
            self._finish_gather(unit)
            if unit.show_full():
                group.has_frozen = not all(other.needs_reduction for other in group.units)
            self.trace.add(Kind.FORWARD, unit.spec.index)

    def post_forward(self, group: UnitGroup) -> None:
        """The module of `group` has run."""
        if self._backward is not None:
            return
        if not torch.is_grad_enabled():
            if group.is_root:
                self.rest()
            else:
                self._release_group(group)
        elif group.reshard_after_forward:
            self._release_group(group)

    def _release_group(self, group: UnitGroup) -> None:
        for unit in group.units:
            unit.faces.show_sharded()
            self._release(unit)

    # ---- backward

    def pre_backward(self, group: UnitGroup) -> None:
        """The gradient of an output of `group`'s module is there: its backward begins."""
        backward = self._enter_backward()
        for unit in group.units:
            self._start_gather(unit)
        for unit in self._gathers_with_backward[group.index]:
            if unit.spec.index not in backward.ready:
                self._start_gather(unit)
        for unit in group.units:
            self._finish_gather(unit)

    def unit_ready(self, unit: Unit) -> None:
        """All trainable parameters of `unit` have their gradients."""
        backward = self._enter_backward()
        self.trace.add(Kind.BACKWARD, unit.spec.index)
        backward.ready[unit.spec.index] = None
        if not backward.sync:
            self._launch(unit, backward)
        else:
            self._launch_in_order(backward)
        if unit.frees_parameters:
            self._release(unit)
            group = self._group_of[id(unit)]
            if group.has_frozen:
                self._release_frozen(group, backward)

    def inputs_done(self, group: UnitGroup) -> None:
        """The gradients of one call's inputs are there: nothing before them needs frozen
        parameters.
        """
        group.open_inputs -= 1
        if self._backward is not None:
            self._release_frozen(group, self._backward)

    def _release_frozen(self, group: UnitGroup, backward: _Backward) -> None:
        if group.open_inputs:
            return
        if all(unit.spec.index in backward.ready for unit in group.units if unit.needs_reduction):
            for unit in group.units:
                if unit.frees_parameters:
                    self._release(unit)

    def _enter_backward(self) -> _Backward:
        if self._backward is None:
            self._backward = _Backward(sync=self.sync)
            Variable._execution_engine.queue_callback(self._finish_backward)
        return self._backward

    def _launch_in_order(self, backward: _Backward, *, all_of_them: bool = False) -> None:
        # One order on every rank, whichever gradients exist: otherwise exchanges would pair up
        # wrongly.
        while backward.next_in_order < len(self._exchange_order):
            unit = self.units[self._exchange_order[backward.next_in_order]]
            if unit.needs_reduction:
                if not all_of_them and unit.spec.index not in backward.ready:
                    return
                self._launch(unit, backward)
            backward.next_in_order += 1

    def _launch(self, unit: Unit, backward: _Backward) -> None:
        if len(backward.in_flight) >= MAX_EXCHANGES_IN_FLIGHT:
            self._finish_exchange(backward)
        self.trace.add(Kind.EXCHANGE if backward.sync else Kind.ACCUMULATE, unit.spec.index)
        backward.in_flight.append((unit, unit.reduce(self._reduce_lane, sync=backward.sync)))

    def _finish_exchange(self, backward: _Backward) -> None:
        unit, exchange = backward.in_flight.popleft()
        unit.gradients.finish(exchange)
        backward.ending.append(exchange)
        self.trace.add(Kind.FINISH_EXCHANGE, unit.spec.index)

    def _finish_exchanges(self, backward: _Backward) -> None:
        while backward.in_flight:
            self._finish_exchange(backward)
        for exchange in backward.ending:
            exchange.event.wait()

    def _finish_backward(self) -> None:
        backward = self._backward
        assert backward is not None
        if backward.sync:
            self._launch_in_order(backward, all_of_them=True)
        else:
            for unit in self.units:
                if unit.needs_reduction and unit.spec.index not in backward.ready:
                    self._launch(unit, backward)
        self._finish_exchanges(backward)
        if backward.sync:
            for unit in self.units:
                if unit.needs_reduction:
                    unit.gradients.publish()
        self._backward = None
        for group in self.groups:
            group.open_inputs = 0
        self.rest()
        self.pool.trim()
        if backward.sync and not self._order_agreed:
            self._agree_exchange_order(backward.ready)

    def _agree_exchange_order(self, ready: dict[int, None]) -> None:
        rest = [index for index in self._exchange_order if index not in ready]
        order = torch.tensor([*ready, *rest], dtype=torch.int64, device=self.pool.device)
        self.collectives.broadcast(order, "agreement on the order of exchanges")
        self._exchange_order = order.tolist()
        self._order_agreed = True

    # ---- between steps

    def rest(self) -> None:
        """Bring every unit to rest: parameters released, the modules show the sharded ones."""
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                self._finish_gather(unit)
            self._release(unit)
            unit.faces.show_sharded()

    def settle(self) -> None:
        """Bring every unit to rest for somebody who looks from outside. A backward that failed is
        forgotten, one that runs goes on undisturbed.
        """
        if self._backward is None:
            self.rest()
        elif torch._C._current_graph_task_id() == -1:
            self.recover()

    def recover(self) -> None:
        """Forget a backward that an exception ended: its gradients, its exchanges, what it
        accumulated.
        """
        backward, self._backward = self._backward, None
        try:
            if backward is not None:
                self._finish_exchanges(backward)
        finally:
            for group in self.groups:
                group.open_inputs = 0
            for unit in self.units:
                unit.drop_grads()
        self.rest()
        self.pool.trim()

    def mark_stale(self) -> None:
        """The optimizer stepped: what is gathered must be refreshed before its next use."""
        for unit in self.units:
            unit.mark_stale()

    def before_optimizer_step(self) -> None:
        """The optimizer is about to change the main parameters.

        Raises:
            RuntimeError: gradients accumulated under `no_sync` were never exchanged.
        """
        for unit in self.units:
            if unit.gradients.has_unreduced_sum:
                raise RuntimeError(
                    f"optimizer.step: expected exchanged gradients, unit '{unit.spec.name}' holds "
                    "some that were only accumulated under no_sync; run the last backward of a "
                    "step outside no_sync, or clear the gradients"
                )
            # An unfinished gather still reads what the optimizer writes.
            self._finish_gather(unit)

    # ---- gathers

    def _start_gather(self, unit: Unit) -> None:
        if unit.state is not UnitState.SHARDED:
            if unit.is_fresh:
                return
            # Left over from a forward that no backward followed, or that failed.
            self._finish_gather(unit)
            self._release(unit)
        if unit.gather(self._gather_lane):
            self.trace.add(Kind.GATHER, unit.spec.index)

    def _finish_gather(self, unit: Unit) -> None:
        if unit.state is UnitState.GATHERING:
            unit.finish_gather()
            self.trace.add(Kind.FINISH_GATHER, unit.spec.index)

    def _release(self, unit: Unit) -> None:
        if unit.state is UnitState.GATHERED:
            unit.release()
            self.trace.add(Kind.RELEASE, unit.spec.index)


def _units_that_move(groups: Iterable[UnitGroup]) -> list[Unit]:
    return [unit for group in groups for unit in group.units if unit.frees_parameters]
