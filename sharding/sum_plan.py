"""How the gradients of a unit are summed, decided before anything is allocated: along which axes,
by which channel and wire, and what an exchange takes. `exchange.py` does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..buffers import BufferPool, Hop, Movement, Placement
from .collectives import Channel, Collectives, Lender
from .unit_spec import UnitSpec
from .wire import Places, PlainWire, Wire


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum along an axis, decided: `hop` along `channel` by `wire`, which sends `message_numel`
    elements for a part, and brings `received_parts` of them. `places`: of what goes in. `lender`:
    of what is sent. `sends_partial`: whether the partial sum that goes in is sent as it is, without
    a copy. `partial_lender`: of that sum.
    """

    hop: Hop
    channel: Channel
    wire: Wire
    message_numel: int
    received_parts: int
    places: Places
    lender: Lender
    sends_partial: bool
    partial_lender: Lender

    @property
    def message_bytes(self) -> int:
        """Of one part."""
        return self.message_numel * self.wire.dtype.itemsize


def _hops(spec: UnitSpec, collectives: Collectives) -> list[Hop]:
    """From what each rank has of all elements to sums as they are kept."""
    partial = (Placement.PARTIAL,) * len(collectives.channels)
    numel = spec.layout.numel
    return collectives.hops(numel, partial, spec.placements.main) if numel else []


def plan_gathers(spec: UnitSpec, collectives: Collectives) -> list[Hop]:
    """Where what has been summed is gathered after it, in order."""
    return [hop for hop in _hops(spec, collectives) if hop.movement is Movement.GATHER]


def plan_sums(spec: UnitSpec, collectives: Collectives, pool: BufferPool) -> list[Sum]:
    """The sums of a unit's gradients, one along each axis that has some, in their order."""
    hops = [hop for hop in _hops(spec, collectives) if hop.movement is Movement.SUM]
    return [
        _sum_along(spec, hop, collectives, pool, is_first=not place)
        for place, hop in enumerate(hops)
    ]


def _sum_along(
    spec: UnitSpec, hop: Hop, collectives: Collectives, pool: BufferPool, *, is_first: bool
) -> Sum:
    wire = spec.wires[0 if is_first else 1]
    sends_partial = isinstance(wire, PlainWire) and wire.dtype == torch.float32 and not is_first
    numel = wire.part_numel(hop.part_numel)
    channel = collectives.sum_channel(hop.axis, wire, hop.parts * numel * wire.dtype.itemsize)
    lender = channel.lender(pool)
    return Sum(
        hop=hop,
        channel=channel,
        wire=wire,
        message_numel=numel,
        received_parts=wire.received_parts(channel),
        places=Places(spec.layout, spec.first_indices, (hop.start, hop.stop)),
        lender=lender,
        sends_partial=sends_partial,
        partial_lender=lender if sends_partial else pool,
    )


def peak_bytes(spec: UnitSpec, sums: Sequence[Sum], packed_numel: int, pool: BufferPool) -> int:
    """The most that the buffers of one exchange take of `pool` at once. packed_numel: of what is
    packed first.
    """
    packed = packed_numel * spec.wires[0].dtype.itemsize
    packed *= not sums or sums[0].lender is pool
    peak, partial = packed + spec.layout.numel * spec.wires[0].scratch_bytes, 0
    for one, following in itertools.zip_longest(sums, sums[1:]):
        is_copied = one.lender is pool and not one.sends_partial
        sent = is_copied * one.hop.parts * one.message_bytes
        received = one.received_parts * one.message_bytes
        scratch = one.hop.part_numel * one.wire.scratch_bytes
        is_made = following is not None and following.partial_lender is pool
        summed = is_made * one.hop.part_numel * torch.float32.itemsize
        # Where the partial sum is not sent itself, what it becomes is made beside it.
        making = (one is not sums[0]) * one.hop.parts * scratch
        stays = partial * one.sends_partial
        peak = max(peak, partial + sent + making, stays + sent + received + scratch + summed)
        partial = summed
    return peak
