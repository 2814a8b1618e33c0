"""What the optimizer sees of a unit's gradients: flat runs over the reduced ones, and what people
may do to them between two exchanges.

    buffer        dtype   elements   lives
    grad          grad    as `main`  from an exchange to the first forward without it
    waiting       grad    all        from a backward under `no_sync` to the next exchange

The visible gradient (`run.param.grad`) is what says that a gradient exists: once it is cleared, the
next forward of the model or exchange of the unit lets go of `grad`, and of the sum that waits. An
edit in place cannot reach that sum, so it is refused: zeros would not clear it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, PlacedBuffer


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


@dataclass(frozen=True, slots=True)
class Shown:
    """Which runs had a visible gradient when a reduction began, to which it adds, and which had
    none.
    """

    kept: list[FlatRun]
    cleared: list[FlatRun]

    def kept_tensors(self) -> set[int]:
        """The indices of the tensors that had one."""
        return {index for run in self.kept for index in run.indices if index not in run.cleared}


class OptimizerView:
    """The flat gradients of one unit."""

    def __init__(self, unit_name: str, grad: PlacedBuffer, pool: BufferPool) -> None:
        """grad: like the unit's main parameters, without memory until there is a gradient."""
        self._unit_name = unit_name
        self.grad = grad
        self._segments = grad.layout.segments
        self._pool = pool
        self.waiting: Tensor | None = None
        self.runs: list[FlatRun] = []
        self.graphs = 0
        """How many CUDA graphs write to `grad` where it lies: as long as there are any it stays,
        and every exchange, whoever holds an earlier gradient, writes to the same memory.
        """
        self.on_freed: Callable[[], None] = lambda: None
        """Called when the memory of the gradients was freed."""

    @property
    def main_grad(self) -> Tensor | None:
        """The reduced gradients of this rank's part, all runs' one after the other."""
        return self.grad.data

    @property
    def has_grad(self) -> bool:
        """Whether a reduced gradient is held, to which the next one is added."""
        return bool([run for run in self.runs if run.param.grad is not None])

    @property
    def has_unreduced_sum(self) -> bool:
        """Whether gradients were accumulated under `no_sync` and not exchanged since."""
        return self.waiting is not None and self.has_grad

    # ---- a reduction

    def begin(self) -> Shown:
        """A reduction begins. The sum that waits is dropped if no visible gradient is left of it.

        Raises:
            RuntimeError: the visible mark of that sum was changed in place.
        """
        if self.waiting is not None and len(self._unedited()) < len(self.runs):
            raise RuntimeError(
                f"unit '{self._unit_name}': expected gradients that were accumulated under no_sync "
                "to be exchanged or cleared, got ones that were changed in place, which does not "
                "reach the rank's own sum; clear with zero_grad(set_to_none=True), and scale, clip "
                "or edit after the exchange"
            )
        shown = Shown([], [])
        for run in self.runs:
            (shown.cleared if run.param.grad is None else shown.kept).append(run)
        if self.waiting is not None and not shown.kept:
            self.drop_sum()
        return shown

    def make_current(self, shown: Shown) -> None:
        """Bring `grad` up to what the runs show: zero what was cleared, take edits."""
        grad = self.grad.allocate()
        for run in shown.cleared:
            grad[run.start : run.stop].zero_()
        for run in shown.kept:
            if run.param.grad is not None and not self._shows_own(run):
                grad[run.start : run.stop].copy_(run.param.grad)

    def forget_cleared(self, waiting: Tensor, shown: Shown) -> None:
        """Zero in a sum [layout.numel] that waits what was cleared meanwhile."""
        for run in shown.cleared:
            for index in run.indices:
                waiting[self._segments[index].start : self._segments[index].stop].zero_()

    def lease_sum(self) -> Tensor:
        """Memory [layout.numel], any contents, for a sum that waits for its exchange."""
        self.waiting = self._pool.lease(self.grad.layout.numel, self.grad.dtype)
        return self.waiting

    def open_sum(self) -> Tensor:
        """The sum that waits [layout.numel], for who adds to it by himself; new and zero if none
        did. Raises as `begin` does.
        """
        self.free_cleared()
        shown = self.begin()
        if self.waiting is None or shown.cleared:
            self.make_current(shown)
            if self.waiting is None:
                self.lease_sum().zero_()
            else:
                self.forget_cleared(self.waiting, shown)
            self.publish()
        assert self.waiting is not None
        return self.waiting

    def take_sum(self) -> Tensor | None:
        """The sum that waits, if one does, which is the caller's to release now."""
        waiting, self.waiting = self.waiting, None
        return waiting

    def drop_sum(self) -> None:
        """Forget the sum that waits."""
        waiting = self.take_sum()
        if waiting is not None:
            self._pool.release(waiting)

    def publish(self) -> None:
        """Show the optimizer the reduced gradient, or that there is a sum to be exchanged."""
        for run in self.runs:
            if run.param.requires_grad:
                self._show(run)
                run.cleared.clear()
        if self.waiting is not None:
            self._note_versions(self.runs)

    def free_cleared(self) -> bool:
        """Free what `grad` takes if all gradients were cleared; whether there was something. Who
        still refers to one of them, keeps that memory.
        """
        if self.grad.data is None or self.has_grad:
            return False
        if self.waiting is not None:
            self.drop_sum()
        if self.graphs:
            return False
        self.grad.forget()
        self.on_freed()
        return True

    # ---- runs

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

    def _shows_own(self, run: FlatRun) -> bool:
        """Whether the visible gradient of `run` is that part of `grad`: not a copy of another
        dtype, nor what somebody put there.
        """
        grad, main_grad = run.param.grad, self.main_grad
        if grad is None or main_grad is None or grad.dtype != main_grad.dtype:
            return False
        return grad.data_ptr() == main_grad[run.start : run.stop].data_ptr()

    def _show(self, run: FlatRun) -> None:
        assert self.grad.data is not None, "there is no gradient to show"
        grad = self.grad.data[run.start : run.stop]
        run.param.grad = grad if grad.dtype == run.param.dtype else grad.to(run.param.dtype)

    def _run_of(self, index: int) -> FlatRun:
        return next(run for run in self.runs if index in run.indices)

    # ---- single gradients

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, single gradients are set or cleared, the sum with them: no edit to refuse. All
        runs share one version counter, so those that were not edited before count as such.
        """
        unedited = [] if self.waiting is None else self._unedited()
        yield
        self._note_versions(unedited)

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

    def show_tensor(self, index: int) -> None:
        """Make room to write the gradient of tensor `index` by hand, in place of its sum."""
        grad = self.grad.allocate()
        run = self._run_of(index)
        if run.param.grad is None:
            grad[run.start : run.stop].zero_()
            self._show(run)
            run.cleared = set(run.indices)
        run.cleared.discard(index)
        self._forget_sum_of(index)

    def copy_of(self, index: int) -> tuple[Tensor, int] | None:
        """The flat gradient shown for tensor `index` and its start in `main`, if it is no part of
        `grad`.
        """
        run = self._run_of(index)
        grad = run.param.grad
        return None if grad is None or self._shows_own(run) else (grad, run.start)

    def _forget_sum_of(self, index: int) -> None:
        if self.waiting is not None:
            segment = self._segments[index]
            self.waiting[segment.start : segment.stop].zero_()

    def _note_versions(self, runs: Sequence[FlatRun]) -> None:
        if self.waiting is not None:
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
