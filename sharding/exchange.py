"""One reduction of a unit's gradients: packed, sent along each axis of the mesh, summed in rank
order, and gathered again where all ranks keep the sum.

    pack      gradients, or the sum that waited under no_sync -> `sent`, in the wire's dtype
    send      `sent`, along the first axis
    sum       what all ranks along an axis have for us -> an FP32 partial sum, sent along the next
              axis, or behind the last axis `grad`, scaled, on top of what is visible there
    gather    the sum, along axes that replicate it

Along the first axis, the ranks that share a shard axis or a node, come the gradients of single
ranks; along each further one sums over the axes before it. So the order of additions is fixed by
the mesh alone: no strategy, unit or overlap changes a bit.

Buffers are leased inside the stages, whose lane owns them, and given back as soon as the last use
of them has been submitted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, Hop, Movement, Placement
from ..buffers.placed_buffer import cut
from .collectives import Collectives, Pending
from .grad_watch import GradientWatch
from .lanes import Event, Lane
from .optimizer_view import OptimizerView, Shown
from .unit_spec import UnitSpec
from .wire import FlatSource, GradientPacker, Gradients, PlainWire, Source, Wire


class Reduction:
    """How a unit's gradients are reduced: the same every time."""

    def __init__(
        self, spec: UnitSpec, view: OptimizerView, collectives: Collectives, pool: BufferPool
    ) -> None:
        self.spec = spec
        self.view = view
        self.pool = pool
        self.channels = collectives.channels
        layout = spec.layout
        partial = (Placement.PARTIAL,) * len(self.channels)
        hops = collectives.hops(layout.numel, partial, spec.placements.main) if layout.numel else []
        self.sums = [hop for hop in hops if hop.movement is Movement.SUM]
        self.gathers = [hop for hop in hops if hop.movement is Movement.GATHER]
        self.own = self.sums[-1].own_span if self.sums else (0, layout.numel)
        self._packer = GradientPacker(layout, spec.dtypes.compute, pool)
        self.name = f"gradient exchange of unit '{spec.name}'"

    def attach(self, params: Sequence[nn.Parameter]) -> None:
        """Reduce the gradients of `params`, which `watch` sees come."""
        self._params = params
        self.watch = GradientWatch(params)

    @property
    def is_needed(self) -> bool:
        """Whether any parameter is trainable."""
        return bool(self.watch.trainable)

    @property
    def holds_grads(self) -> bool:
        """Whether a parameter has a gradient that no exchange has taken."""
        return any(param.grad is not None for param in self.watch.trainable)

    def drop(self) -> None:
        """Forget gradients that were not reduced, after a step that failed."""
        self.watch.rearm()
        self._packer.take(self._params)
        self.view.drop_sum()

    def start(self, lane: Lane, *, sync: bool) -> Exchange:
        """Start to reduce this backward's gradients, which the parameters lose, and what was
        accumulated; or (not `sync`) to add them to what was, without communication.

        Raises:
            RuntimeError: the visible gradients of that sum were changed in place.
        """
        self.watch.rearm()
        self.view.free_cleared()  # not written anew: somebody may hold them
        shown = self.view.begin()
        exchange = Exchange(self, self._packer.take(self._params), shown)
        if sync:
            exchange.submit(lane, self.name, exchange.stages())
        else:
            name = f"gradient accumulation of unit '{self.spec.name}'"
            exchange.submit(lane, name, [exchange.accumulate])
        return exchange

    def wire(self, place: int) -> Wire:
        """That of the sum at `place`."""
        return self.spec.wires[min(place, 1)]

    def sends_as_it_is(self, place: int) -> bool:
        """Whether the partial sum that goes into the sum at `place` is sent without a copy."""
        wire = self.wire(place)
        return place > 0 and isinstance(wire, PlainWire) and wire.dtype == torch.float32

    def sent_bytes(self) -> Counter[str]:
        """What this rank sends to others along each axis in one exchange, as exchanges of ours do;
        a backend's own reduce-scatter moves no less.
        """
        sent: Counter[str] = Counter()
        for place, hop in enumerate(self.sums):
            wire = self.wire(place)
            part = wire.part_numel(hop.part_numel) * wire.dtype.itemsize
            sent[self.channels[hop.axis].axis.name] += (hop.parts - 1) * part
        for hop in self.gathers:
            part = hop.part_numel * self.spec.dtypes.grad.itemsize
            sent[self.channels[hop.axis].axis.name] += (hop.parts - 1) * part
        return sent

    def peak_bytes(self) -> int:
        """The most that the buffers of one exchange take at once."""
        peak = partial = 0
        for place, hop in enumerate(self.sums):
            wire = self.wire(place)
            part = wire.part_numel(hop.part_numel) * wire.dtype.itemsize
            sent = 0 if self.sends_as_it_is(place) else hop.parts * part
            received = wire.received_parts(self.channels[hop.axis]) * part
            summed = hop.part_numel * torch.float32.itemsize if hop is not self.sums[-1] else 0
            # Where the partial sum is not sent itself, what it becomes is made beside it.
            peak = max(peak, partial + sent, partial * (not sent) + sent + received + summed)
            partial = summed
        wire = self.wire(0)
        alone = wire.part_numel(self.spec.layout.numel) * wire.dtype.itemsize
        return peak if self.sums else alone


class Exchange:
    """One reduction under way. Its stages run one after the other on a lane, the next when what the
    one before it started has ended.
    """

    event: Event

    def __init__(self, how: Reduction, grads: Gradients, shown: Shown) -> None:
        self._how = how
        self._grads = grads
        self._shown = shown
        # Taken now: what the next backward accumulates waits for the next exchange.
        self._waiting: Tensor | None = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None

    def submit(
        self, lane: Lane, name: str, stages: Sequence[Callable[[], Sequence[Pending]]]
    ) -> None:
        """Run the stages on `lane`."""
        self.event = lane.submit(name, *stages)

    def stages(self) -> list[Callable[[], Sequence[Pending]]]:
        """All of an exchange."""
        how = self._how
        self._waiting = how.view.take_sum()
        sums = [functools.partial(self._sum, place) for place in range(len(how.sums) or 1)]
        gathers = [functools.partial(self._gather, hop) for hop in how.gathers[1:]]
        # The pack alone reads gradients: they are freed while the rest is on its way.
        sends = [functools.partial(self._send, 0)] if how.sums else []
        return [self._pack, *sends, *sums, *gathers]

    def finish(self) -> None:
        """Order the following compute after the pack, and let go of what it read."""
        self.event.advance()
        self._grads.clear()

    # ---- stages

    def accumulate(self) -> list[Pending]:
        """Add the gradients to the rank's own sum."""
        view = self._how.view
        view.make_current(self._shown)
        if view.waiting is None:
            self._grads.fill(view.lease_sum())
        else:
            view.forget_cleared(view.waiting, self._shown)
            self._grads.add_to(view.waiting)
        self._free_packed()
        return []

    def _pack(self) -> list[Pending]:
        how, waiting, source = self._how, self._waiting, self._grads
        parts = how.sums[0].parts if how.sums else 1
        if waiting is None:
            self._sent = self._packed(source, how.wire(0), parts)
        else:
            how.view.forget_cleared(waiting, self._shown)
            self._grads.add_to(waiting)
            self._sent = self._packed(FlatSource(waiting), how.wire(0), parts)
            how.pool.release(waiting)
        self._free_packed()
        return []

    def _sum(self, place: int) -> Sequence[Pending]:
        how = self._how
        is_last = place + 1 >= len(how.sums)
        if not is_last:
            partial = how.pool.lease(how.sums[place].part_numel, torch.float32)
            self._reduce(place, partial)
            return self._send_on(place + 1, partial)
        into_existing = bool(self._shown.kept)
        if into_existing:
            how.view.make_current(self._shown)
        how.view.grad.allocate()
        own = how.view.grad.part(how.own)
        self._reduce(place, own, scale=how.spec.scale, accumulate=into_existing)
        return self._gather(how.gathers[0]) if how.gathers else []

    def _gather(self, hop: Hop) -> Sequence[Pending]:
        how = self._how
        flat, slices = how.view.grad.parts(hop)
        what = f"gather of the reduced gradient of unit '{how.spec.name}'"
        return how.channels[hop.axis].gather_reduced(flat, slices, what)

    # ---- their parts

    def _packed(self, source: Source, wire: Wire, parts: int) -> Tensor:
        numel = parts * wire.part_numel(source.numel // parts)
        sent = self._how.pool.lease(numel, wire.dtype)
        wire.pack(sent, source, parts)
        return sent

    def _free_packed(self) -> None:
        if self._how.pool.device.type == "cpu":
            # On a GPU the pack is only enqueued: the gradients live until the event advances.
            self._grads.clear()

    def _send(self, place: int) -> list[Pending]:
        how, hop, wire = self._how, self._how.sums[place], self._how.wire(place)
        channel = how.channels[hop.axis]
        assert self._sent is not None
        # Only now, in what the gradients took.
        numel = wire.received_parts(channel) * wire.part_numel(hop.part_numel)
        self._received = how.pool.lease(numel, wire.dtype)
        under_way = wire.exchange(channel, self._received, self._sent, how.name)
        if under_way is None:  # nothing would wait for it
            raise TypeError(
                f"{how.name}: expected exchange() of {wire!r} to return the operations that it "
                "has started, got None; return what channel.exchange(...) does"
            )
        return under_way

    def _send_on(self, place: int, partial: Tensor) -> list[Pending]:
        """Send a partial sum along the next axis."""
        how, wire = self._how, self._how.wire(place)
        if how.sends_as_it_is(place):
            self._sent = partial
        else:
            self._sent = self._packed(FlatSource(partial), wire, how.sums[place].parts)
            how.pool.release(partial)
        return self._send(place)

    def _reduce(
        self, place: int, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """Sum into `out` what the hop at `place` brought."""
        how, wire, sent = self._how, self._how.wire(place), self._sent
        assert sent is not None
        table: Tensor | None
        if how.sums:
            assert self._received is not None
            channel = how.channels[how.sums[place].axis]
            parts = wire.received_parts(channel)
            table, *received = self._rows(self._received, parts)
            rows = wire.rows(channel, received, sent)
            table = table if len(rows) == parts else None
        else:
            table, *rows = self._rows(sent, 1)
        wire.reduce(out, rows, table=table, scale=scale, accumulate=accumulate)
        for lease in (sent, self._received):
            if lease is not None:
                how.pool.release(lease)
        self._sent = self._received = None

    def _rows(self, buffer: Tensor, parts: int) -> list[Tensor]:
        """`buffer` as one table [parts, n], and its rows."""

        def make(buffer: Tensor) -> list[Tensor]:
            return [buffer.view(parts, buffer.numel() // parts), *cut(buffer, parts)]

        # Units that take turns with a buffer share these views of it.
        return self._how.pool.views(buffer, ("rows", parts), make)
