"""Turns what happens in forward and backward into gathers, exchanges and releases.

`hooks.py` calls the event methods below; the tests state the order they lead to as a plan of steps.
The order of exchanges is agreed between the ranks.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from ..buffers import BufferPool
from .backward_pass import BackwardPass, engine_let_go
from .exchange_order import ExchangeOrder
from .expert_ranks import ModelRanks
from .gathered_unit import agree_on_paths, check_not_gathered
from .lanes import Lane
from .lent_outputs import LentOutputs
from .modules.uncompiled import uncompiled
from .shard_config import RuntimeOptions
from .trace import Kind, Trace
from .turns import make_turns
from .unit import Unit, UnitState
from .use_order import UnitGroup, UseOrder
from .use_watch import Watch, make_watch
from .uses import END_OF_BACKWARD, END_OF_FORWARD

_ABANDONED_S = 5.0  # among the living, what is in flight takes milliseconds


class Runtime:
    """One sharded model on this rank. `sync`: whether the next backward exchanges gradients."""

    def __init__(
        self,
        groups: list[UnitGroup],
        ranks: ModelRanks,
        pool: BufferPool,
        lanes: tuple[Lane, Lane],
        options: RuntimeOptions,
    ) -> None:
        self.groups = groups
        self.units = [unit for group in groups for unit in group.units]
        self.ranks, self.collectives = ranks, ranks.together
        self.pool = pool
        self.trace = Trace()
        self.sync = True
        self.lanes = self._gather_lane, self._reduce_lane = lanes
        self._backward: BackwardPass | None = None
        self.options = options
        self._group_of = {id(unit): group for group in groups for unit in group.units}
        self._staying = [unit for unit in self.units if not unit.frees_parameters]
        frees = len(self._staying) < len(self.units)
        self._watch: Watch | None = None  # `__del__` asks it, whatever is raised here
        self._watch = make_watch(ranks, frees_parameters=frees)
        self._turns = make_turns(groups, self.collectives, options.ranks_may_differ)
        self._use_order = UseOrder(groups, self.prefetch)
        self._root = next(group for group in groups if group.is_root)
        self.open_writes = 0
        """Blocks of `gathered(write=True)` that are open."""
        self.after_exchanges: Callable[[Runtime], None] = lambda _: None
        """Called when gradients have been exchanged, by all ranks."""
        self._lent = LentOutputs(self.units)
        # A graph of gradients reads the gathered parameters until a backward has run through it.
        self._keeps_gathered = False
        self.exchange_order = ExchangeOrder(len(self.units), self.collectives)
        callbacks = weakref.WeakMethod(self.unit_ready), weakref.WeakMethod(self.enter_backward)
        for unit in self.units:
            unit.connect(*callbacks)

    def __del__(self) -> None:
        # After an exception something may be in flight: it uses memory that goes now, and gloo
        # would match the peers' halves of it with what the next model sends.
        if not sys.is_finalizing():
            # Ranks that were found to differ wait for each other: nothing more will come.
            gave_up = self._watch is not None and self._watch.gave_up
            deadline = time.monotonic() + (0 if gave_up else _ABANDONED_S)
            if self._backward is not None:
                self._backward.abandon(deadline)
            for unit in self.units:
                unit.abandon(deadline)
            if self.pool.streams is not None:
                self.pool.streams.catch_up()

    @property
    def prefetch(self) -> int:
        """How many units ahead are gathered."""
        options = self.options
        # Where the ranks agree on every gather, none is ahead.
        goes_ahead = options.overlap_param_gather and not options.ranks_may_differ
        return options.prefetch if goes_ahead else 0

    @property
    def max_exchanges(self) -> int:
        """How many exchanges are in flight at most."""
        return self._reduce_lane.max_exchanges

    # ---- forward

    def root_pre_forward(self) -> None:
        """A forward of the whole model begins."""
        if self.runs_backward:
            return
        self._use_order.restart()
        self._lent.lenders.clear()
        if not self._root.open_calls:
            for group in self.groups:
                group.open_calls = 0  # an exception left them open
        if any([unit.gradients.free_cleared() for unit in self.units]):
            self.pool.trim()
        # Replicated parameters stay: all gathers can be on their way at once. In the order of
        # registration, since ranks may have used the units in different orders, or not at all.
        for unit in self._staying:
            self.start_gather(unit)

    def pre_forward(self, group: UnitGroup) -> None:
        """The module of `group` is about to run."""
        recompute = self.runs_backward
        if not recompute:
            group.open_calls += 1  # first, as `post_forward` comes whatever is raised here
            self._turns.forward_begins()
        else:
            self._begin_backward_of(group)
        self._turns.take(group, self)
        if not recompute:
            self._use_order.see(group)
            for unit in self._use_order.with_forward[group.index]:
                self.start_gather(unit)
        for unit in group.units:
            if unit not in group.deferred:
                self.bring(unit)
        group.has_frozen = not all([unit.reduction.is_needed for unit in group.units])

    def bring(self, unit: Unit) -> None:
        """`unit`, whose gather was started, is about to be used in forward."""
        self.finish_gather(unit)
        unit.show_full()
        self.trace.add(Kind.FORWARD, unit.spec.index)

    def post_forward(self, group: UnitGroup, output: object) -> None:
        """The module of `group` has run, or an exception ended it, perhaps before `pre_forward`."""
        if self._backward is not None:
            return
        if group.open_calls:
            group.open_calls -= 1
            if group.open_calls:
                return
        for unit in group.units:
            unit.show_sharded()
        if group.is_root:
            self._lent.lenders.clear()  # those of its own output stay until the next forward
        self._lent.note(output)
        if group.is_root and not torch.is_grad_enabled():
            self.rest()
        elif group.reshard_after_forward or not torch.is_grad_enabled():
            self._retire(group.units)
        self._turns.forward_ends()
        if group.is_root:
            self._end_forward(output)

    def _end_forward(self, output: object) -> None:
        # Who has used them waits for our hops along further axes; after an exception, never mind.
        for unit in self._staying if output is not None else ():
            self.finish_gather(unit)
        if self._watch is not None:
            self._watch.ends(END_OF_FORWARD, compares=not torch.is_grad_enabled())

    @property
    def root_calls(self) -> int:
        """Calls of the root that have not returned."""
        return self._root.open_calls

    def forward_failed(self, root_calls: int) -> None:
        """An exception ended a call of the root, which began inside `root_calls` others."""
        if self._backward is not None:
            return
        self._root.open_calls = root_calls
        if not root_calls:
            self._turns.forward_failed()
            for group in self.groups:
                group.open_calls = 0
            for unit in self.units:
                unit.show_sharded()

    # ---- backward

    def pre_backward(self, group: UnitGroup, *, certain: bool = True) -> None:
        """The gradient of an output of `group`'s module is there: its backward begins.

        Unless `certain`: the output is an input of the module, so another module may have made it.
        """
        backward = self._begin_backward_of(group, certain=certain)
        self._turns.take(group, self)
        for unit in self._use_order.with_backward[group.index]:
            if unit.spec.index not in backward.ready:
                self.start_gather(unit)
        for unit in group.units:
            self.finish_gather(unit)
            # A checkpoint inside the module reads its parameters anew.
            unit.faces.show_full()

    def unit_ready(self, index: int) -> None:
        """All trainable parameters of unit `index` have their gradients."""
        backward, unit = self.enter_backward(), self.units[index]
        backward.unit_ready(unit)
        backward.spend(self._group_of[id(unit)])
        self._retire(backward.take_spent())

    def whole_gradient_came(self, unit: Unit, index: int, grad: Tensor) -> None:
        """A parameter that `gathered` had lent got its gradient."""
        self.enter_backward().add_gradient(unit, index, grad)

    def inputs_done(self, group: UnitGroup) -> None:
        """The gradients of one call's inputs are there: nothing before them needs frozen
        parameters.
        """
        group.open_inputs -= 1
        if self._backward is not None:
            self._backward.spend(group)
            self._retire(self._backward.take_spent())

    def _begin_backward_of(self, group: UnitGroup, *, certain: bool = True) -> BackwardPass:
        backward = self.enter_backward()
        backward.enter(group, certain=certain)
        # Units that are used once more after their gradients were complete: nothing else would
        # release them again.
        backward.spend(group)
        self._retire(backward.take_spent())
        return backward

    @property
    def runs_backward(self) -> bool:
        """Whether a backward runs. One that an exception ended is forgotten."""
        if self._backward is None:
            return False
        # A device's thread may hold the callback a little longer than the caller sees the error.
        if self._backward.callback() is None or torch._C._current_graph_task_id() == -1:
            self.recover()
            return False
        return True

    def enter_backward(self) -> BackwardPass:
        """A backward runs, perhaps through no module at all; begins it if it is new."""
        if not self.runs_backward:
            if self.open_writes:
                raise RuntimeError(
                    "gathered: expected no backward inside gathered(write=True), where parameters "
                    "may be in the middle of a change; leave the block first"
                )
            for unit in self.units:
                unit.follow_requires_grad()
            callback = self._finish_backward
            show_sharded = weakref.WeakMethod(self.show_sharded_after)
            self._keeps_gathered |= (creates_graph := torch.is_grad_enabled())
            self._backward = BackwardPass(
                units=self.units,
                order=self.exchange_order.indices,
                number=self.exchange_order.backwards,
                lane=self._reduce_lane,
                trace=self.trace,
                sync=self.sync,
                callback=weakref.ref(callback, functools.partial(engine_let_go, show_sharded)),
                creates_graph=creates_graph,
                allowed_exchanges=self._turns.allowed_exchanges,
            )
            self._turns.backward_begins(self._backward)
            Variable._execution_engine.queue_callback(callback)
        assert self._backward is not None
        return self._backward

    def show_sharded_after(self, callback: weakref.ref[Callable[[], None]]) -> None:
        """Show the sharded parameters if the backward of `callback` did not end by itself."""
        if self._backward is not None and self._backward.callback is callback:
            for unit in self.units:
                unit.show_sharded()

    @uncompiled
    def _finish_backward(self) -> None:
        backward = self._backward
        assert backward is not None
        self._turns.backward_ends()
        if self._watch is not None:
            self._watch.ends(END_OF_BACKWARD, compares=backward.sync)
        backward.finish()
        backward.exchange_late(self._turns.agree_on_late(backward.late_units()))
        self._end_backward(keeps_gathered=backward.creates_graph)
        if backward.sync:
            self.exchange_order.follow(backward.ready)
            agree_on_paths(self.units, self.collectives)
            self.after_exchanges(self)

    def _end_backward(self, *, keeps_gathered: bool = False) -> None:
        self._backward = None
        self._turns.backward_is_over()
        self._keeps_gathered = keeps_gathered
        for group in self.groups:
            group.open_inputs = 0
            group.open_calls = 0
        self.rest()
        self.pool.trim()

    def rest(self) -> None:
        """Bring every unit to rest: parameters released, the modules show the sharded ones."""
        for unit in self.units:
            self.finish_gather(unit)
        self._retire(self.units)

    def settle(self) -> None:
        """Bring every unit to rest for somebody who looks from outside. A backward that failed is
        forgotten, one that runs goes on undisturbed.
        """
        if not self.runs_backward:
            self.rest()

    def recover(self) -> None:
        """Forget a backward that an exception ended: its gradients, exchanges and local sums."""
        backward, self._backward = self._backward, None
        try:
            if backward is not None:
                backward.finish_exchanges()
        finally:
            if backward is not None:
                backward.abandon(time.monotonic())
            for unit in self.units:
                unit.reduction.drop()
        self._end_backward()

    def mark_stale(self) -> None:
        """The optimizer stepped: what is gathered must be refreshed before its next use."""
        for unit in self.units:
            unit.mark_stale()
        if self._keeps_gathered:
            self._keeps_gathered = False
            self.rest()

    def check_reduced(self, caller: str) -> None:
        """Refuse to use gradients that were never exchanged.

        Raises:
            RuntimeError: some were only accumulated under `no_sync`.
        """
        for unit in self.units:
            if unit.gradients.has_unreduced_sum:
                raise RuntimeError(
                    f"{caller}: expected exchanged gradients, unit '{unit.spec.name}' holds "
                    "some that were only accumulated under no_sync; exchange them by a backward "
                    "outside no_sync, or finish_grad_sync, or clear the gradients"
                )

    def before_optimizer_step(self) -> None:
        """The optimizer is about to change the main parameters; raises as `check_reduced` does, and
        inside `gathered`.
        """
        check_not_gathered(self.units, "optimizer.step")
        self.trace.add(Kind.STEP, -1)
        # An unfinished gather still reads what the optimizer writes.
        self.settle()
        self.check_reduced("optimizer.step")

    def needs_gather(self, unit: Unit) -> bool:
        """Whether the full parameters of `unit`, which is about to be used, are not there."""
        # Whole parameters need no gather, but a graph from before them, in backward, does.
        if unit.faces.whole is not None and self._backward is None:
            return False
        return unit.state is UnitState.SHARDED or not unit.is_fresh

    def start_gather(self, unit: Unit) -> None:
        """Start it, if `unit` needs one."""
        if not self.needs_gather(unit):
            return
        if unit.state is not UnitState.SHARDED:
            # Left over from a forward that no backward followed, or that failed.
            self.finish_gather(unit)
            unit.release()
            self.trace.add(Kind.RELEASE, unit.spec.index)
        if unit.gather(self._gather_lane):
            self.trace.add(Kind.GATHER, unit.spec.index)

    def finish_gather(self, unit: Unit) -> None:
        """Order the following compute after a gather of `unit` that is under way."""
        if unit.state is UnitState.GATHERING:
            unit.finish_gather()
            self.trace.add(Kind.FINISH_GATHER, unit.spec.index)

    def _retire(self, units: Sequence[Unit]) -> None:
        """`units` have done their work, unless a graph of gradients or an output may read them."""
        for unit in units:
            if unit.faces.shows_full:
                unit.show_sharded()
            kept = self._keeps_gathered or unit.spec.index in self._lent.lenders
            if unit.state is UnitState.GATHERED and not kept:
                unit.release()
                self.trace.add(Kind.RELEASE, unit.spec.index)
