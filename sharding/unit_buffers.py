"""The memory of a unit's parameters on this rank, and the way from the main ones to the full ones.

    buffer     dtype     elements                    lives
    main       main      as its placements say       always: what users see and optimizers update
    kept       compute   as parameters at rest       always, where that is neither what `main` is
                                                     nor all (HFSDP): so what is sharded over the
                                                     outer axis is gathered once a step
    gathered   compute   all                         always; in use only, where parameters at rest
                                                     are sharded

Where all parameters stay, in the dtype of `main`, it is a view of `gathered`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..buffers import BufferPool, FlatBuffer, Hop, PlacedBuffer, Placements
from .collectives import Channel, Collectives, Pending
from .lanes import Stage
from .unit_spec import UnitSpec


@dataclass(frozen=True, slots=True)
class _Leg:
    """The way from one buffer into the next: `source` is that buffer, `own` where its elements are
    in the next, which `hops` complete along `channels`. `slices`: what each hop moves, as a whole
    and in parts. `freed`: the next buffer, if it has to be grown before.
    """

    source: Tensor
    own: Tensor
    hops: Sequence[Hop]
    channels: Sequence[Channel]
    what: str
    slices: Sequence[tuple[Tensor, list[Tensor]]]
    in_place: bool
    """Whether `source` is `own` itself, or has another dtype: then `own` is what is sent."""
    freed: PlacedBuffer | None

    def stages(self, *, is_copied: bool = False) -> list[Stage]:
        """The way as a work of a lane; `is_copied`: `own` has its elements already."""
        copies = self.source is not self.own and not is_copied and (self.in_place or not self.hops)
        more = [functools.partial(self._hop, place) for place in range(1, len(self.hops))]
        return [functools.partial(self._start, copies), *more]

    def _start(self, copies: bool) -> Sequence[Pending]:
        if self.freed is not None:
            self.freed.grow()
        if copies:
            self.own.copy_(self.source)
        return self._hop(0) if self.hops else ()

    def _hop(self, place: int) -> list[Pending]:
        hop, (flat, slices) = self.hops[place], self.slices[place]
        source = slices[hop.own] if place or self.in_place else self.source
        return self.channels[hop.axis].gather(flat, slices, source, self.what)


class UnitBuffers:
    """The placed buffers of one unit's parameters."""

    def __init__(self, spec: UnitSpec, collectives: Collectives, pool: BufferPool) -> None:
        """All parameters are zero until `fill`."""
        layout, dtypes, placements = spec.layout, spec.dtypes, spec.placements

        def placed(held: Placements, dtype: torch.dtype) -> PlacedBuffer:
            return PlacedBuffer(pool, layout, collectives.grid, held, dtype)

        self.main = placed(placements.main, dtypes.main)
        self.gathered = placed(placements.whole, dtypes.compute)
        self.frees = placements.frees_params
        self.shares = not self.frees and dtypes.compute == dtypes.main
        """Whether `main` is a view of `gathered`."""
        self._allocate(pool)
        # Views have to be made while there is memory; they outlive it. Each has a version counter
        # of its own: a write to one parameter must not spoil what autograd saved of the others.
        self.views = [v.data for v in FlatBuffer(self.gathered.memory, layout).views()]
        ways = [(self.main, placements.main), (self.gathered, placements.whole)]
        if placements.params not in (placements.main, placements.whole):
            kept = placed(placements.params, dtypes.compute)
            kept.hold(pool.lease(kept.numel, kept.dtype))
            ways.insert(1, (kept, placements.params))
        self._legs = [
            self._leg(source, target, collectives, (before, after), f"gather of unit '{spec.name}'")
            for (source, before), (target, after) in itertools.pairwise(ways)
        ]
        # Made once. They refer to legs and not to this, which they would keep alive.
        first, *others = self._legs
        self._from_kept = self._legs[-1].stages()
        rest = [stage for leg in others for stage in leg.stages()]
        self._from_main = [*first.stages(), *rest]
        self._from_casts = [*first.stages(is_copied=True), *rest]
        self.moves = bool(self._legs[-1].hops) or not self.shares
        """Whether the gathered parameters have to be brought up to date with the main ones."""
        if self.frees:
            self.gathered.shrink()

    def _allocate(self, pool: BufferPool) -> None:
        flat = pool.lease(self.gathered.numel, self.gathered.dtype)
        # Collectives write through `.data`, which has a version counter of its own, so that
        # tensors which autograd saved from an earlier gather of the same weights stay valid.
        self.gathered.hold(flat.data)
        start, stop = self.main.span
        if self.shares:
            self.main.hold(flat.zero_()[start:stop])
        else:
            self.main.hold(pool.lease(stop - start, self.main.dtype).zero_())

    def fill(self, index: int, whole: Tensor) -> None:
        """Take this rank's part of the initial values `whole` [shape of tensor `index`]."""
        # What `main` is a view of is read without a gather.
        (self.gathered if self.shares else self.main).write(index, whole)

    @property
    def rest_bytes(self) -> int:
        """What parameters take between two uses, beside `main`."""
        if not self.frees:
            return self.gathered.nbytes - (self.main.nbytes if self.shares else 0)
        return sum(leg.own.nbytes for leg in self._legs[1:])

    def sent_bytes(self, gathers: int) -> Counter[str]:
        """What this rank sends to others along each axis in a step with so many gathers."""
        sent: Counter[str] = Counter()
        for leg in self._legs:
            times = gathers if leg is self._legs[-1] else 1
            for hop in leg.hops:
                nbytes = (hop.parts - 1) * hop.part_numel * leg.own.itemsize
                sent[leg.channels[hop.axis].axis.name] += times * nbytes
        return sent

    @property
    def main_casts(self) -> Tensor | None:
        """Where the casts of `main` [its numel, compute dtype] stay; None if there are none, or
        their memory is freed between two uses.
        """
        first = self._legs[0]
        is_freed = self.frees and first is self._legs[-1]
        return None if is_freed or first.source.dtype == first.own.dtype else first.own

    @torch.no_grad()
    def keep_gathered(self) -> None:
        """Full parameters were written to, on all ranks alike: what is kept of them follows."""
        for leg in self._legs[1:]:
            leg.source.copy_(leg.own)

    def stages(self, *, kept_is_fresh: bool, main_is_cast: bool = False) -> list[Stage]:
        """What brings the gathered parameters in; `kept_is_fresh`: from those at rest,
        `main_is_cast`: from `main_casts`.
        """
        if kept_is_fresh:
            return self._from_kept
        return self._from_casts if main_is_cast else self._from_main

    def _leg(
        self,
        source: PlacedBuffer,
        target: PlacedBuffer,
        collectives: Collectives,
        placements: tuple[Placements, Placements],
        what: str,
    ) -> _Leg:
        own, data = target.part(source.span), source.memory
        casts = data.dtype != own.dtype
        if not casts and data.data_ptr() == own.data_ptr():
            data = own
        hops = collectives.hops(target.layout.numel, *placements)
        return _Leg(
            source=data,
            own=own,
            hops=hops,
            channels=collectives.channels,
            what=what,
            slices=[target.parts(hop) for hop in hops],
            in_place=casts or data is own,
            freed=target if self.frees and target is self.gathered else None,
        )
