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

from ..buffers import BufferPool, Hop, cut
from .collectives import Collectives, Lender, Pending
from .grad_watch import GradientWatch
from .lanes import Event, Lane
from .message_wire import mixed
from .optimizer_view import OptimizerView, Shown
from .own_gradients import OwnGradients
from .sum_plan import peak_bytes, plan_gathers, plan_sums
from .unit_spec import UnitSpec
from .wire import FlatSource, GradientPacker, Gradients, Places, Source


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
        self.sums = sums = plan_sums(spec, collectives, pool)
        self.gathers = plan_gathers(spec, collectives)
        self.own = sums[-1].hop.own_span if sums else (0, layout.numel)
        # Of the first message: the buffer in parts, as a whole where nothing is sent.
        self.parts = sums[0].hop.parts if sums else 1
        self.packed_numel = self.parts * spec.wires[0].part_numel(layout.numel // self.parts)
        self._packer = GradientPacker(layout, spec.dtypes.compute, pool, spec.first_indices)
        # What is filled by a wire and no tensor's is zero again after each sum.
        self.gaps = [
            Places(layout, spec.first_indices, span) if wire.fills_gaps else None
            for span, wire in (
                [(one.hop.own_span, one.wire) for one in self.sums] or [(self.own, spec.wires[0])]
            )
        ]
        self.coordinate = collectives.grid.coordinate
        self.residual: Tensor | None = None
        """What the wire of gradients has lost so far on this rank, if it is fed back [numel]; from
        when a parameter is trainable on.
        """
        self.name = f"gradient exchange of unit '{spec.name}'"
        self._accumulation = f"gradient accumulation of unit '{spec.name}'"
        self.own_gradients: OwnGradients | None = None
        """What this rank packed, where a step asks whether it was finite."""

    def attach(self, params: Sequence[nn.Parameter]) -> None:
        """Reduce the gradients of `params`, which `watch` sees come."""
        self._params = params
        self.watch = GradientWatch(params)
        self._begin_if_needed()

    def _begin_if_needed(self) -> None:
        self.is_needed = bool(self.watch.trainable)
        """Whether any parameter is trainable."""
        dtype = self.spec.wires[0].residual_dtype
        if self.is_needed and self.residual is None and dtype is not None:
            self.residual = self.pool.lease(self.spec.layout.numel, dtype).zero_()

    def reset_residual(self, indices: Sequence[int]) -> None:
        """Owe nothing to the gradients of these tensors."""
        if self.residual is None:
            return
        for index in indices:
            segment = self.spec.layout.segments[index]
            self.residual[segment.start : segment.stop] = 0

    def note_own_gradients(self) -> None:
        """Note from now on which gradients of this rank are not finite."""
        self.own_gradients = OwnGradients(self.spec.layout.order, self.pool.device)

    def follow_requires_grad(self) -> None:
        """Some parameters may have been frozen or unfrozen."""
        self.watch.follow_requires_grad()
        self._begin_if_needed()

    @property
    def holds_grads(self) -> bool:
        """Whether a parameter has a gradient that no exchange has taken."""
        # No generator: this looks at every parameter of the model in every step.
        return bool([param for param in self.watch.trainable if param.grad is not None])

    def drop(self) -> None:
        """Forget gradients that were not reduced, after a step that failed."""
        self.watch.rearm()
        self._packer.take(self._params)
        self.view.drop_sum()
        # What messages of that step have lost, or paid back, no optimizer will see.
        self.reset_residual(range(len(self.spec.names)))

    def start(self, lane: Lane, *, sync: bool, number: int) -> Exchange:
        """Start to reduce this backward's gradients, which the parameters lose, and what was
        accumulated; or (not `sync`) to add them to what was, without communication. `number`: of
        the exchange, among those of this unit.

        Raises:
            RuntimeError: the visible gradients of that sum were changed in place.
        """
        self.watch.rearm()
        self.view.free_cleared()  # not written anew: somebody may hold them
        shown = self.view.begin()
        exchange = Exchange(self, self._packer.take(self._params), shown, number)
        try:
            if sync:
                exchange.event = lane.submit(self.name, *exchange.stages())
            else:
                exchange.event = lane.submit(self._accumulation, exchange.accumulate)
        except BaseException:
            exchange.drop()
            raise
        return exchange

    def sent_bytes(self) -> Counter[str]:
        """What this rank sends to others along each axis in one exchange, as exchanges of ours do;
        a backend's own reduce-scatter moves no less.
        """
        sent: Counter[str] = Counter()
        for one in self.sums:
            sent[one.channel.axis.name] += (one.hop.parts - 1) * one.message_bytes
        for hop in self.gathers:
            part = hop.part_numel * self.spec.dtypes.grad.itemsize
            sent[self.channels[hop.axis].axis.name] += (hop.parts - 1) * part
        return sent

    def peak_bytes(self) -> int:
        """The most that the buffers of one exchange take at once."""
        return peak_bytes(self.spec, self.sums, self.packed_numel, self.pool)


class Exchange:
    """One reduction under way. Its stages run one after the other on a lane, the next when what the
    one before it started has ended.
    """

    event: Event

    def __init__(self, how: Reduction, grads: Gradients, shown: Shown, number: int) -> None:
        self._how = how
        self._number = number
        self._grads = grads
        self._shown = shown
        self._place = 0  # of the sum that is under way
        # The sum that waits is taken when the exchange begins: what the next backward accumulates
        # waits for the next exchange.
        self._waiting: Tensor | None = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._leases: dict[int, tuple[Lender, Tensor]] = {}

    def stages(self) -> list[Callable[[], Sequence[Pending]]]:
        """All of an exchange."""
        how = self._how
        if (waiting := how.view.take_sum()) is not None:
            self._waiting = self._hold(how.pool, waiting)
        if not how.sums:
            return [self._pack, self._sum]
        # The pack alone reads gradients: they are freed while the rest is on its way.
        stages = [self._pack, self._send, *[self._pass_on] * (len(how.sums) - 1), self._sum]
        for hop in how.gathers[1:]:
            stages.append(functools.partial(self._gather, hop))
        return stages

    def finish(self) -> None:
        """Order the following compute after the pack, and let go of what it read."""
        self.event.advance()
        if self._grads.tensors:
            self._grads.clear()

    def drop(self) -> None:
        """Let go of all memory, after an error. Operations may hold it: nobody gets it next."""
        for lender, tensor in self._leases.values():
            lender.lose(tensor)
        self._leases.clear()
        self._waiting = self._sent = self._received = None

    def _lease(self, lender: Lender, numel: int, dtype: torch.dtype) -> Tensor:
        return self._hold(lender, lender.lease(numel, dtype))

    def _hold(self, lender: Lender, tensor: Tensor) -> Tensor:
        self._leases[id(tensor)] = lender, tensor
        return tensor

    def _release(self, tensor: Tensor) -> None:
        lender, _ = self._leases.pop(id(tensor))
        lender.release(tensor)

    # ---- stages

    def accumulate(self) -> Sequence[Pending]:
        """Add the gradients to the rank's own sum."""
        view = self._how.view
        self._note_own()
        view.make_current(self._shown)
        if view.waiting is None:
            self._grads.fill(view.lease_sum())
        else:
            view.forget_cleared(view.waiting, self._shown)
            self._grads.add_to(view.waiting)
        self._free_packed()
        return ()

    def _pack(self) -> Sequence[Pending]:
        how, waiting = self._how, self._waiting
        self._note_own()
        grads, key = self._grads, self._noise_key()
        grads.noise_key, grads.residual = key, how.residual
        source: Source = grads
        if waiting is not None:
            how.view.forget_cleared(waiting, self._shown)
            grads.add_to(waiting)
            source = FlatSource(waiting, grads.places, key, how.residual)
        wire = how.spec.wires[0]
        lender = how.sums[0].lender if how.sums else how.pool
        self._sent = self._lease(lender, how.packed_numel, wire.dtype)
        wire.pack(self._sent, source, how.parts)
        if waiting is not None:
            self._release(waiting)
            self._waiting = None
        self._free_packed()
        return ()

    def _send(self) -> Sequence[Pending]:
        how = self._how
        one, wire = how.sums[self._place], how.sums[self._place].wire
        assert self._sent is not None
        received = self._sent[:0]
        if one.received_parts:  # only now, in what the gradients took
            numel = one.received_parts * one.message_numel
            self._received = received = self._lease(how.pool, numel, wire.dtype)
        under_way = wire.exchange(one.channel, received, self._sent, how.name)
        if under_way is None:  # nothing would wait for it
            raise TypeError(
                f"{how.name}: expected exchange() of {wire!r} to return the operations that it "
                "has started, got None; return what channel.exchange(...) does"
            )
        return under_way

    def _pass_on(self) -> Sequence[Pending]:
        """Sum what has come to a partial sum, and send that along the next axis."""
        how = self._how
        numel, one = how.sums[self._place].hop.part_numel, how.sums[self._place + 1]
        partial = self._lease(one.partial_lender, numel, torch.float32)
        self._reduce(partial)
        self._place += 1
        self._sent = partial
        if not one.sends_partial:
            numel = one.hop.parts * one.message_numel
            self._sent = self._lease(one.lender, numel, one.wire.dtype)
            source = FlatSource(partial, one.places, self._noise_key())
            one.wire.pack(self._sent, source, one.hop.parts)
            self._release(partial)
        return self._send()

    def _sum(self) -> Sequence[Pending]:
        """Sum what has come into the reduced gradient."""
        how = self._how
        into_existing = bool(self._shown.kept)
        if into_existing:
            how.view.make_current(self._shown)
        how.view.grad.allocate()
        own = how.view.grad.part(how.own)
        self._reduce(own, scale=how.spec.scale, accumulate=into_existing)
        return self._gather(how.gathers[0]) if how.gathers else ()

    def _gather(self, hop: Hop) -> Sequence[Pending]:
        how = self._how
        flat, slices = how.view.grad.parts(hop)
        what = f"gather of the reduced gradient of unit '{how.spec.name}'"
        return how.channels[hop.axis].gather_reduced(flat, slices, what)

    # ---- their parts

    def _note_own(self) -> None:
        if self._how.own_gradients is not None:
            self._how.own_gradients.note(self._grads.tensors, self._shown.kept_tensors())

    def _free_packed(self) -> None:
        if self._how.pool.device.type == "cpu":
            # On a GPU the pack is only enqueued: the gradients live until the event advances.
            self._grads.clear()

    def _noise_key(self) -> int:
        """That of whoever has these summands: along the axes that are summed already, ranks share
        them as units are cut, which no noise may show.
        """
        how = self._how
        axis = how.sums[self._place].hop.axis if how.sums else 0
        return mixed(self._number, self._place, *how.coordinate[axis:])

    def _reduce(self, out: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        """Sum into `out` what the sum that is under way has brought."""
        how, sent, received = self._how, self._sent, self._received
        assert sent is not None
        wire, table = how.spec.wires[0], None
        if not how.sums:
            table, *rows = self._rows(sent, 1)
        else:
            one = how.sums[self._place]
            wire = one.wire
            views = [] if received is None else self._rows(received, one.received_parts)
            rows = wire.rows(one.channel, views[1:], sent)
            if 1 + len(rows) == len(views):
                table = views[0]
        wire.reduce(out, rows, table=table, scale=scale, accumulate=accumulate)
        gaps = how.gaps[self._place]
        if gaps is not None:
            gaps.clear_gaps(out, wire.align_numel)
        self._release(sent)
        if received is not None:
            self._release(received)
        self._sent = self._received = None

    def _rows(self, buffer: Tensor, parts: int) -> list[Tensor]:
        """`buffer` as one table [parts, n], and its rows."""

        def make(buffer: Tensor) -> list[Tensor]:
            return [buffer.view(parts, buffer.numel() // parts), *cut(buffer, parts)]

        # Units that take turns with a buffer share these views of it.
        return self._how.pool.views(buffer, ("rows", parts), make)
