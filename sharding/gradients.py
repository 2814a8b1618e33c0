"""The gradients of one unit on this rank: packed, exchanged, summed in FP32, and shown to the
optimizer.

    buffer        dtype   elements              lives
    sent          wire    all                   during an exchange
    received      wire    all, or all but own   during an exchange: every rank's part of our slice
    accumulated   grad    all                   from a backward under `no_sync` to the next exchange
    main_grad     grad    as `main`             from an exchange to the first forward without it

The visible gradient (`run.param.grad`) is what says that a gradient exists: once it is cleared, the
next forward of the model or exchange of the unit lets go of `main_grad`, and whatever was
accumulated is dropped. An edit in place cannot reach what was accumulated, so it is refused: zeros
would not clear the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, FlatBuffer
from ..kernels import pack_, reduce_
from .collectives import Collectives, Pending
from .grad_packing import GradientPacker, Gradients
from .lanes import Event, Lane
from .placements import Placement

if TYPE_CHECKING:
    from .unit import UnitSpec


@dataclass(eq=False, slots=True)
class FlatRun:
    """Consecutive tensors of a unit that one optimizer group updates: elements [start, stop) of
    `main`.
    """

    start: int
    stop: int
    indices: tuple[int, ...]
    param: nn.Parameter
    cleared: set[int] = field(default_factory=set)
    stretch: int = 0
    """Runs of one stretch, cut to fit caches, are frozen and unfrozen together."""
    owner: Callable[[], torch.optim.Optimizer | None] | None = None
    """A weak reference to the optimizer that updates it."""
    version: int = 0
    """Version of the gradient when it was last shown, while a sum waits for its exchange."""


@dataclass(slots=True)
class Exchange:
    """A reduction under way: its end, and what must stay alive until then."""

    event: Event
    leases: list[Tensor]
    grads: Gradients


class UnitGradients:
    """Reduces a unit's gradients into `main_grad`, which lies like the unit's main parameters."""

    def __init__(
        self, spec: UnitSpec, main_span: tuple[int, int], collectives: Collectives, pool: BufferPool
    ) -> None:
        self._spec = spec
        self._span = main_span
        self._collectives = collectives
        self._pool = pool
        self._replicates = spec.placements.grads is Placement.REPLICATE
        self._packer = GradientPacker(spec.layout, spec.dtypes.wire, pool)
        # Units of one layout share these views of the buffers that they take turns with.
        self._rows_key = ("rows", id(spec.layout))
        self._exchange_name = f"gradient exchange of unit '{spec.name}'"
        self._accumulation_name = f"gradient accumulation of unit '{spec.name}'"
        self._accumulated: Tensor | None = None
        self.main_grad: Tensor | None = None
        self.runs: list[FlatRun] = []

    @property
    def has_grad(self) -> bool:
        """Whether a reduced gradient is held, to which the next one is added."""
        return any(run.param.grad is not None for run in self.runs)

    def replace_runs(self, runs: list[FlatRun]) -> None:
        """Cut the flat gradients like `runs`, which cover all that was covered; what they show
        stays.
        """
        old, self.runs = self.runs, runs
        for run in runs:
            if not any(run is other for other in old):
                self._take_over(run, [o for o in old if set(o.indices) & set(run.indices)])
        self._note_versions(runs)

    def _take_over(self, run: FlatRun, old: Sequence[FlatRun]) -> None:
        shown = [other for other in old if other.param.grad is not None]
        if not shown:
            return
        kept = {i for other in shown for i in other.indices if i not in other.cleared}
        run.cleared = set(run.indices) - kept
        if all(self._shows_own(other) for other in old):
            self._show(run)
            return
        # Copies of another dtype, or what somebody put there: all in one new copy.
        grad = torch.zeros_like(run.param)
        for other in shown:
            start, stop = max(run.start, other.start), min(run.stop, other.stop)
            if start < stop and other.param.grad is not None:
                part = other.param.grad[start - other.start : stop - other.start]
                grad[start - run.start : stop - run.start] = part
        run.param.grad = grad

    def drop(self, params: Sequence[nn.Parameter]) -> None:
        """Forget what `params` and the local sum hold, after a step that failed."""
        self._packer.take(params)
        self._drop_accumulated()

    def free_cleared(self) -> bool:
        """Free what `main_grad` takes if all gradients were cleared; whether there was something.
        Who still refers to one of them, keeps that memory.

        On a GPU it is memory of the reducing lane, which the optimizer read in the compute stream.
        What that lane does next starts after all that compute had enqueued: no event is needed.
        """
        if self.main_grad is None or self.has_grad:
            return False
        self._drop_accumulated()
        self._pool.forget(self.main_grad)
        self.main_grad = None
        return True

    def _drop_accumulated(self) -> None:
        if self._accumulated is not None:
            self._pool.release(self._accumulated)
            self._accumulated = None

    def _make_rows(self, received: Tensor) -> list[Tensor]:
        layout = self._spec.layout
        parts = received.numel() // layout.shard_numel if layout.numel else layout.world_size
        table = received.view(parts, layout.shard_numel)
        return [table, *table]

    def _own_main_grad(self) -> Tensor:
        """`main_grad`, allocated if there is none; no lease, since users may keep views of it."""
        if self.main_grad is None:
            numel = self._span[1] - self._span[0]
            self.main_grad = self._pool.allocate(numel, self._spec.dtypes.grad)
        return self.main_grad

    def _shows_own(self, run: FlatRun) -> bool:
        """Whether the visible gradient of `run` is that part of `main_grad`: not a copy of another
        dtype, nor what somebody put there.
        """
        grad, main_grad = run.param.grad, self.main_grad
        if grad is None or main_grad is None or grad.dtype != main_grad.dtype:
            return False
        return grad.data_ptr() == main_grad[run.start : run.stop].data_ptr()

    def _make_current(self, cleared: Sequence[FlatRun], kept: Sequence[FlatRun]) -> None:
        """Bring `main_grad` up to what the runs show: zero what was cleared, take edits."""
        main_grad = self._own_main_grad()
        for run in cleared:
            main_grad[run.start : run.stop].zero_()
        for run in kept:
            if run.param.grad is not None and not self._shows_own(run):
                main_grad[run.start : run.stop].copy_(run.param.grad)

    def _forget_sums(self, accumulated: Tensor, cleared: Sequence[FlatRun]) -> None:
        for run in cleared:
            for index in run.indices:
                segment = self._spec.layout.segments[index]
                accumulated[segment.start : segment.stop].zero_()

    def _check_unedited(self) -> None:
        """Refuse to go on from a sum whose visible mark was changed in place."""
        if self._accumulated is not None and len(self._unedited()) < len(self.runs):
            raise RuntimeError(
                f"unit '{self._spec.name}': expected gradients that were accumulated under no_sync "
                "to be exchanged or cleared, got ones that were changed in place, which does not "
                "reach the rank's own sum; clear with zero_grad(set_to_none=True), and scale, clip "
                "or edit after the exchange"
            )

    def _begin(
        self, params: Sequence[nn.Parameter]
    ) -> tuple[Gradients, list[FlatRun], list[FlatRun]]:
        """What `params` hold, which they lose, and the runs whose visible gradient does not exist,
        whose sum is dropped if no other exists, and those whose does.
        """
        self._check_unedited()
        grads = self._packer.take(params)
        cleared = [run for run in self.runs if run.param.grad is None]
        kept = [run for run in self.runs if run.param.grad is not None]
        if not kept:
            self._drop_accumulated()
        return grads, cleared, kept

    def accumulate(self, params: Sequence[nn.Parameter], lane: Lane) -> Exchange:
        """Add this backward's gradients to the rank's own sum, without communication.

        Raises:
            RuntimeError: the visible gradients of an earlier sum were changed in place.
        """
        grads, cleared, kept = self._begin(params)
        first = self._accumulated is None

        def start() -> list[Pending]:
            self._make_current(cleared, kept)
            target = self._accumulated
            if target is None:
                target = self._pool.lease(self._spec.layout.numel, self._spec.dtypes.grad)
                self._accumulated = target
            else:
                self._forget_sums(target, cleared)
            self._packer.pack(target, grads, accumulate=not first)
            return []

        return Exchange(lane.submit(self._accumulation_name, start), [], grads)

    def exchange(self, params: Sequence[nn.Parameter], lane: Lane) -> Exchange:
        """Start to reduce this backward's gradients, and what was accumulated, into `main_grad`.

        Raises:
            RuntimeError: the visible gradients of that sum were changed in place.
        """
        grads, cleared, kept = self._begin(params)
        into_existing = bool(kept)
        accumulated, self._accumulated = self._accumulated, None
        leases: list[Tensor] = [] if accumulated is None else [accumulated]
        sent: Tensor
        received: Tensor

        def start() -> list[Pending]:
            nonlocal sent, received
            layout, dtype = self._spec.layout, self._spec.dtypes.wire
            sent = received = self._pool.lease(layout.numel, dtype)
            leases.append(sent)
            if accumulated is None:
                self._packer.pack(sent, grads)
            else:
                self._forget_sums(accumulated, cleared)
                self._packer.pack(accumulated, grads, accumulate=True)
                pack_(sent, [accumulated], [0])
            if sent.device.type == "cpu":
                # On a GPU the pack is only enqueued: the gradients live until the event advances.
                grads.clear()
            if layout.world_size == 1 or not layout.numel:
                return []
            # Only now, in what the gradients took.
            received = self._pool.lease(
                self._collectives.received_parts * layout.shard_numel, dtype
            )
            leases.append(received)
            return self._collectives.exchange(received, sent, self._exchange_name, self._spec.index)

        def complete() -> list[Pending]:
            if into_existing:
                self._make_current(cleared, kept)
            return self._reduce(sent, received, into_existing)

        return Exchange(lane.submit(self._exchange_name, start, complete), leases, grads)

    def _parts(self, sent: Tensor, received: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Every rank's part of our slice, in rank order; as one table too, where it is one."""
        layout = self._spec.layout
        table, *rows = self._pool.views(received, self._rows_key, self._make_rows)
        if len(rows) == layout.world_size:
            return table, rows
        rows.insert(self._collectives.rank, FlatBuffer(sent, layout).shard(self._collectives.rank))
        return None, rows

    def _reduce(self, sent: Tensor, received: Tensor, into_existing: bool) -> list[Pending]:
        layout, main_grad = self._spec.layout, self._own_main_grad()
        world_size, rank = layout.world_size, self._collectives.rank
        own = main_grad
        if self._replicates:
            start, stop = layout.shard_range(rank)
            own = main_grad[start:stop]
        table, rows = self._parts(sent, received)
        reduce_(own, table, scale=1.0 / world_size, accumulate=into_existing, rows=rows)
        if not self._replicates:
            return []
        slices = FlatBuffer(main_grad, layout).shards()
        return self._collectives.gather_reduced(
            main_grad, slices, f"gather of the reduced gradient of unit '{self._spec.name}'"
        )

    def finish(self, exchange: Exchange) -> None:
        """Order the following compute after the sum of `exchange` and give its buffers back."""
        exchange.event.advance()
        for lease in exchange.leases:
            self._pool.release(lease)
        exchange.grads.clear()

    def publish(self) -> None:
        """Show the optimizer the reduced gradient, or that there is a sum to be exchanged."""
        assert self.main_grad is not None
        for run in self.runs:
            if run.param.requires_grad:
                self._show(run)
                run.cleared.clear()
        self._note_versions(self.runs)

    def _note_versions(self, runs: Sequence[FlatRun]) -> None:
        if self._accumulated is not None:
            for run in runs:
                if run.param.grad is not None:
                    run.version = run.param.grad._version

    def _unedited(self) -> list[FlatRun]:
        """The runs whose gradient is as it was shown, or does not exist."""
        return [
            run
            for run in self.runs
            if run.param.grad is None or run.param.grad._version == run.version
        ]

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, single gradients are set or cleared, the sum with them: no edit to refuse. All
        runs share one version counter, so those that were not edited before count as such.
        """
        unedited = [] if self._accumulated is None else self._unedited()
        yield
        self._note_versions(unedited)

    def _forget_sum_of(self, index: int) -> None:
        if self._accumulated is not None:
            segment = self._spec.layout.segments[index]
            self._accumulated[segment.start : segment.stop].zero_()

    def has_tensor(self, index: int) -> bool:
        """Whether tensor `index` has a reduced gradient."""
        run = self._run_of(index)
        return run.param.grad is not None and index not in run.cleared

    def clear_tensor(self, index: int, view: Tensor) -> None:
        """Forget the gradient of tensor `index`, which `view` shows, and its part of the sum."""
        run = self._run_of(index)
        run.cleared.add(index)
        view.zero_()
        self._forget_sum_of(index)
        if len(run.cleared) == len(run.indices):
            run.param.grad = None
            run.cleared.clear()

    @property
    def has_unreduced_sum(self) -> bool:
        """Whether gradients were accumulated under `no_sync` and not exchanged since."""
        return self._accumulated is not None and self.has_grad

    def show_tensor(self, index: int) -> None:
        """Make room to write the gradient of tensor `index` by hand, in place of its sum."""
        main_grad = self._own_main_grad()
        run = self._run_of(index)
        if run.param.grad is None:
            main_grad[run.start : run.stop].zero_()
            self._show(run)
            run.cleared = set(run.indices)
        run.cleared.discard(index)
        self._forget_sum_of(index)

    def copy_of(self, index: int) -> tuple[Tensor, int] | None:
        """The flat gradient shown for tensor `index` and its start in `main`, if it is no part of
        `main_grad`.
        """
        run = self._run_of(index)
        grad = run.param.grad
        return None if grad is None or self._shows_own(run) else (grad, run.start)

    def _show(self, run: FlatRun) -> None:
        assert self.main_grad is not None
        grad = self.main_grad[run.start : run.stop]
        run.param.grad = grad if grad.dtype == run.param.dtype else grad.to(run.param.dtype)

    def _run_of(self, index: int) -> FlatRun:
        return next(run for run in self.runs if index in run.indices)
