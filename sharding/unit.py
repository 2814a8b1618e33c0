"""One communication unit: some parameters of one module, what the modules show of them, and the
unit's life cycle.

    buffer      what for                                           in
    main        what the user sees and the optimizer updates       `unit_buffers.py`
    gathered    forward and backward                               `unit_buffers.py`
    grad        reduced gradients, as the optimizer sees them      `optimizer_view.py`

    SHARDED --gather--> GATHERING --finish_gather--> GATHERED --release--> SHARDED
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffers import BufferPool, PlacedBuffer, Placement, spans
from .bits import with_changes
from .collectives import Collectives
from .exchange import Reduction
from .grad_watch import call_weakly
from .lanes import DONE, Event, Lane
from .messages import listed
from .optimizer_view import FlatRun, OptimizerView
from .param_faces import ParamFaces, ParamSlot
from .param_gradients import ParamGradients
from .precision import require_masters
from .tensor.grad_source import GradSource
from .tensor.lent import Lent
from .tensor.sharded_tensor import ShardedTensor
from .unit_buffers import UnitBuffers
from .unit_spec import UnitSpec


class UnitState(Enum):
    """Where a unit is in its life cycle."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """Owns the memory of one `UnitSpec` on this rank and moves it through its life cycle."""

    def __init__(
        self,
        spec: UnitSpec,
        collectives: Collectives,
        pool: BufferPool,
        model_group: dist.ProcessGroup | None = None,
    ) -> None:
        """All parameters are zero until `buffers.fill`. `model_group`: see `ShardedTensor`."""
        self.spec = spec
        self.state = UnitState.SHARDED
        self.collectives = collectives
        self._model_group = model_group
        numel, placements, grid = spec.layout.numel, spec.placements, collectives.grid
        self.buffers = UnitBuffers(spec, collectives, pool)
        self.frees_parameters = self.buffers.frees
        """Whether the full parameters are freed between two uses (ZeRO-3)."""
        self.main = self.buffers.main.memory
        self.main_span = self.buffers.main.span
        self.owned_span = grid.span(numel, (Placement.SHARD,) * len(grid.sizes))
        """What of the flat buffer this rank answers for: the ranks' are disjoint."""
        held = spans(numel, grid.sizes, collectives.groups.coordinates, placements.main)
        # One object for a tensor, its gradient and its moments: of 1,024 ranks it takes 127 KiB,
        # and half a millisecond to make.
        self._intervals = [
            tuple(spec.layout.overlap(index, span) for span in held)
            for index in range(len(spec.names))
        ]
        self._gathered_version = self.main._version
        self._stale = not self.buffers.shares
        self._cast_version: int | None = None  # of `main` when a step wrote its casts too
        self._lent = Lent()
        self.gather_name = f"gather of unit '{spec.name}'"
        self._gather_event: Event = DONE
        grad = PlacedBuffer(pool, spec.layout, grid, placements.main, spec.dtypes.grad)
        self.gradients = OptimizerView(spec.name, grad, pool)
        self.reduction = Reduction(spec, self.gradients, collectives, pool)
        self._flags_changed = True

    # ---- construction

    def attach(
        self,
        requires_grad: Sequence[bool],
        slots: Sequence[ParamSlot],
    ) -> None:
        """Make the two faces of every parameter and put the sharded ones into the modules."""
        full = [
            nn.Parameter(view, requires_grad=trainable)
            for view, trainable in zip(self.buffers.views, requires_grad, strict=True)
        ]
        self._param_gradients = ParamGradients(weakref.proxy(self))
        source = weakref.proxy(self._param_gradients)
        sharded = [
            self.sharded_view(self.main, index, requires_grad=trainable, grad_source=source)
            for index, trainable in enumerate(requires_grad)
        ]
        self._param_gradients.own(sharded)
        self.gradients.on_freed = self._param_gradients.forget_views
        for tensor in sharded:
            tensor.lent = self._lent
        # What is written to a shared buffer has reached the main parameters.
        self.faces = ParamFaces(full, sharded, slots, counts_writes=not self.buffers.shares)
        self.reduction.attach(full)
        self.gradients.runs = [self.make_run(tuple(self.spec.layout.order))]

    def connect(
        self,
        on_ready: weakref.WeakMethod[Any],
        on_contribution: weakref.WeakMethod[Any],
    ) -> None:
        """Have these called in backward: the first with the unit's index, once all trainable
        parameters have their gradients, the other when that of a parameter which a loss used
        directly comes.
        """
        ready = functools.partial(call_weakly, on_ready, self.spec.index)
        self.reduction.watch.on_complete = ready
        self._param_gradients.on_contribution = functools.partial(call_weakly, on_contribution)

    def sharded_view(
        self,
        flat: Tensor,
        index: int,
        *,
        base: int = 0,
        requires_grad: bool = False,
        grad_source: GradSource | None = None,
    ) -> ShardedTensor:
        """Tensor `index` as a sharded tensor over `flat`, which lies like `main` from element
        `base` on.
        """
        layout = self.spec.layout
        start, stop = layout.overlap(index, self.main_span)
        base = layout.segments[index].start - self.main_span[0] - base
        view = ShardedTensor(
            flat[base + start : base + stop] if stop > start else flat[:0],
            shape=layout.segments[index].shape,
            start=start,
            name=self.spec.names[index],
            group=self.collectives.groups.group,
            intervals=self._intervals[index],
            requires_grad=requires_grad,
            grad_source=grad_source,
        )
        view.is_expert, view.model_group = self.spec.is_expert, self._model_group
        return view

    def make_run(self, indices: tuple[int, ...]) -> FlatRun:
        """A flat parameter over tensors `indices`, which must be consecutive in the layout."""
        layout = self.spec.layout
        position = layout.order.index(indices[0])
        assert layout.order[position : position + len(indices)] == indices, (
            "a run must be contiguous"
        )
        after = position + len(indices)
        last = after == len(layout.order)
        stop = layout.numel if last else layout.segments[layout.order[after]].start
        low, high = self.main_span
        start = min(max(layout.segments[indices[0]].start, low), high) - low
        stop = min(max(stop, low), high) - low
        trainable = any(self.faces.full[i].requires_grad for i in indices)
        with torch.no_grad():
            return FlatRun(
                start, stop, indices, nn.Parameter(self.main[start:stop], requires_grad=trainable)
            )

    def show_full(self) -> None:
        """Put the full parameters into the modules, frozen or trainable as the sharded ones are.

        Raises:
            RuntimeError: somebody replaced a parameter of a module, or froze some of those that
                share one flat optimizer parameter.
        """
        # First, so that after an error the modules still show what the user can mend.
        self.follow_requires_grad()
        self.faces.show_full()

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules, with what was written to the full ones.

        Raises:
            RuntimeError: the data of a parameter was replaced by some of another shape or dtype.
        """
        if self.faces.shows_full:
            if self.faces.may_be_written():
                self.adopt_writes()
                # Every rank wrote the same to its gathered copy, which is what the backward reads.
                self._stale = not self.buffers.way.keep_gathered()
                self._gathered_version = self.main._version
            self.faces.show_sharded()

    def requires_grad_changed(self) -> None:
        """A sharded parameter was frozen or unfrozen, which counts from its next use on."""
        self._flags_changed = True

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze what the sharded parameters were, if any were; raises `RuntimeError`
        as `show_full` does.
        """
        if self._flags_changed:
            self._freeze_and_unfreeze()
            self._flags_changed = False

    def _freeze_and_unfreeze(self) -> None:
        sharded, names = self.faces.sharded, self.spec.names
        unfrozen = [tensor.name for tensor in sharded if tensor.requires_grad]
        require_masters(self.spec.dtypes, self.spec.name, unfrozen)
        stretches: dict[int, list[int]] = {}
        for run in self.gradients.runs:
            stretches.setdefault(run.stretch, []).extend(run.indices)
        for indices in stretches.values():
            frozen = [names[i] for i in indices if not sharded[i].requires_grad]
            if 0 < len(frozen) < len(indices):
                raise RuntimeError(
                    f"unit '{self.spec.name}': expected all parameters of one optimizer group that "
                    f"lie together to be trainable or all frozen, got frozen {frozen} beside "
                    "trainable ones; freeze them before fully_shard"
                )
        for run in self.gradients.runs:
            run.param.requires_grad_(sharded[run.indices[0]].requires_grad)
        self.faces.follow_requires_grad()
        self.reduction.follow_requires_grad()

    # ---- gather and release

    def _cannot(self, become: UnitState) -> str:
        return f"unit '{self.spec.name}' is {self.state.value}, which does not go to {become.value}"

    def mark_stale(self) -> None:
        """The main parameters changed in a way their version counter does not show."""
        self._stale = True
        self._cast_version = None

    def compute_shard(self, run: FlatRun) -> Tensor:
        """Where a gather puts the cast of the main parameters of `run` [run numel, compute dtype],
        if `holds_casts`.
        """
        casts = self.buffers.way.main_casts
        assert casts is not None, "a gather casts nothing, or where memory is freed"
        return casts[run.start : run.stop]

    @property
    def holds_casts(self) -> bool:
        """Whether, at rest, there are `compute_shard`s, all of them casts of the main parameters: a
        step that writes to both leaves the next gather none to make.
        """
        is_current = self.is_fresh or self._is_cast
        has_casts = self.buffers.way.main_casts is not None
        return is_current and self.state is UnitState.SHARDED and has_casts

    def mark_cast(self) -> None:
        """A step that began with `holds_casts` wrote to `compute_shard`s what it did to `main`."""
        self._cast_version = self.main._version

    @property
    def _is_cast(self) -> bool:
        return self._cast_version == self.main._version and not self._lent.out

    @property
    def freed_storage(self) -> int:
        """Identifies the storage of the full parameters."""
        return self.buffers.gathered.memory.untyped_storage()._cdata

    @property
    def is_fresh(self) -> bool:
        """Whether the gathered parameters equal the main ones."""
        return not self._stale and self.main._version == self._gathered_version

    def gather(self, lane: Lane) -> bool:
        """Start to bring the full parameters in, on `lane`. False when nothing has to move."""
        assert self.state is UnitState.SHARDED, self._cannot(UnitState.GATHERING)
        version = self.main._version
        if version != self._gathered_version:
            self.faces.forbid_old_graphs()
        if not self.buffers.way.moves:
            self._stale, self._gathered_version = False, version
        is_fresh = self.is_fresh
        if is_fresh and not self.buffers.frees:
            self.state = UnitState.GATHERING
            return False
        is_cast = self._cast_version is not None and self._is_cast
        stages = self.buffers.stages(kept_is_fresh=is_fresh, main_is_cast=is_cast)
        try:
            self._gather_event = lane.submit(self.gather_name, *stages)
        except BaseException:
            self._lose_gather()
            raise
        self._gathered_version = version
        self._stale, self._cast_version = False, None
        self.state = UnitState.GATHERING
        return True

    def finish_gather(self) -> None:
        """Order the following compute after the gather. One that could not go on is begun anew by
        the next use.
        """
        assert self.state is UnitState.GATHERING, self._cannot(UnitState.GATHERED)
        try:
            self._gather_event.wait()
        except BaseException:
            if self._gather_event.has_failed:
                self._lose_gather()
            raise
        self._gather_event = DONE
        self.state = UnitState.GATHERED

    def _lose_gather(self) -> None:
        self.buffers.lose_gather()
        self.mark_stale()
        self._gather_event, self.state = DONE, UnitState.SHARDED

    def forget_gather(self) -> None:
        """What it waits for was recorded for a CUDA graph that failed, and never comes."""
        self._gather_event = DONE

    def abandon(self, deadline: float) -> None:
        """Nobody asks for the gather: see `Event.abandon`."""
        self._gather_event.abandon(deadline)

    def release(self) -> None:
        """The full parameters are not needed any more: back to rest.

        Raises:
            RuntimeError: somebody had torch pin their memory down, as `numpy()` does.
        """
        assert self.state is UnitState.GATHERED, self._cannot(UnitState.SHARDED)
        self.state = UnitState.SHARDED
        if self.buffers.frees:
            try:
                self.buffers.gathered.shrink()
            except RuntimeError as error:
                self.state = UnitState.GATHERED  # the next one raises too, nothing else is wrong
                raise _not_freed(self.spec) from error

    @torch.no_grad()
    def adopt_writes(self, flat: Tensor | None = None) -> None:
        """Take over what was written to the gathered parameters, or to `flat` [numel, compute
        dtype], casts of the main ones: the elements of this rank's own slice that differ bitwise
        from what a gather, or a cast, makes of `main` go to `main`, the others keep theirs.

        All ranks must do so: what is gathered counts as stale after it, whoever wrote what.
        """
        self.mark_stale()
        before = None
        if flat is None:
            assert self.state is UnitState.GATHERED, f"{self.spec.name} is {self.state.value}"
            if self.buffers.shares:
                return
            flat, before = self.buffers.gathered.memory, self.buffers.way.main_as_gathered()
        start, stop = self.main_span
        self.main.copy_(with_changes(self.main, flat[start:stop], before))


def _not_freed(spec: UnitSpec) -> RuntimeError:
    return RuntimeError(
        f"unit '{spec.name}': expected to free the full parameters ({listed(spec.names)}) after "
        "their use, got memory that torch keeps for good, as p.detach().numpy() makes it; write "
        "p.detach().clone().numpy() or p.tolist() in forward, and make the model anew"
    )
