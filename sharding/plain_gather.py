"""Parameters gathered in the compute dtype, from the main ones to the full ones.

buffer     dtype     elements                    lives
main       main      as its placements say       always: what users see and optimizers update
kept       compute   as parameters at rest       always, where that is neither what `main` is
                                                 nor all (HFSDP): so what is sharded over the
                                                 outer axis is gathered once a step
gathered   compute   all                         always; in use only, where parameters at rest
                                                 are sharded
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..buffers import BufferPool, Hop, PlacedBuffer
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


def _leg(
    source: PlacedBuffer,
    target: PlacedBuffer,
    hops: Sequence[Hop],
    channels: Sequence[Channel],
    what: str,
    *,
    freed: PlacedBuffer | None,
) -> _Leg:
    own, data = target.part(source.span), source.memory
    casts = data.dtype != own.dtype
    if not casts and data.data_ptr() == own.data_ptr():
        data = own
    return _Leg(
        source=data,
        own=own,
        hops=hops,
        channels=channels,
        what=what,
        slices=[target.parts(hop) for hop in hops],
        in_place=casts or data is own,
        freed=freed,
    )


class PlainGather:
    """The way from `main` to `gathered` in the compute dtype, by way of `kept` if there is one."""

    gathering_bytes = 0
    """What a gather takes beside `gathered`."""

    def __init__(
        self,
        spec: UnitSpec,
        main: PlacedBuffer,
        gathered: PlacedBuffer,
        collectives: Collectives,
        pool: BufferPool,
    ) -> None:
        placements = spec.placements
        self._main, self._dtype = main, gathered.dtype
        self.numel = spec.layout.numel
        """Elements that all ranks send of a unit, together."""
        ways = [(main, placements.main), (gathered, placements.whole)]
        if placements.params not in (placements.main, placements.whole):
            held = placements.params
            kept = PlacedBuffer(pool, spec.layout, collectives.grid, held, gathered.dtype)
            kept.hold(pool.lease(kept.numel, kept.dtype))
            ways.insert(1, (kept, held))
        self._frees = placements.frees_params
        self._legs = legs = [
            _leg(
                source,
                target,
                collectives.hops(spec.layout.numel, before, after),
                collectives.channels,
                f"gather of unit '{spec.name}'",
                freed=gathered if self._frees and target is gathered else None,
            )
            for (source, before), (target, after) in itertools.pairwise(ways)
        ]
        self._rest_bytes = sum(leg.own.nbytes for leg in legs[1:])
        shares = legs[0].source is legs[0].own and not self._frees
        if not self._frees:
            self._rest_bytes = gathered.nbytes - (main.nbytes if shares else 0)
        # Made once. They refer to legs and not to this, which they would keep alive.
        first, *others = legs
        rest = [stage for leg in others for stage in leg.stages()]
        self._from_kept = legs[-1].stages()
        self._from_main = [*first.stages(), *rest]
        self._from_casts = [*first.stages(is_copied=True), *rest]
        self.moves = bool(legs[-1].hops) or not shares

    def stages(self, *, kept_is_fresh: bool, main_is_cast: bool = False) -> list[Stage]:
        """See `UnitBuffers.stages`."""
        if kept_is_fresh:
            return self._from_kept
        return self._from_casts if main_is_cast else self._from_main

    def lose(self) -> None:
        """It leases nothing."""

    def main_as_gathered(self) -> None:
        """The cast of the main parameters."""

    def sent_of_main(self) -> Tensor:
        """What is sent of the main parameters of this rank, in memory of its own."""
        return self._main.memory.to(self._dtype, copy=True)

    @property
    def rest_bytes(self) -> int:
        """What parameters take between two uses, beside `main`."""
        return self._rest_bytes

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
        is_freed = self._frees and first is self._legs[-1]
        return None if is_freed or first.source.dtype == first.own.dtype else first.own

    @torch.no_grad()
    def keep_gathered(self) -> bool:
        """Full parameters were written to, on all ranks alike: what is kept of them follows."""
        for leg in self._legs[1:]:
            leg.source.copy_(leg.own)
        return True
