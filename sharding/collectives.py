"""The collectives of a sharded model: chosen by backend, counted, failing with what was awaited.

    call        native (NCCL and others)    gloo on a CPU
    gather      all-gather                  a send and a receive per peer, straight into place
    exchange    all-to-all                  a send and a receive per peer; our own part stays

gloo's own all-gather stages its data (85 ms against 30 ms for 64 MiB on loopback), its all-to-all
copies what a rank has for itself: hence the second column. A GPU's tensors it can only stage: its
sends and receives would take their addresses for the host's. Sums are left to a backend only where
`reduce="native"` asks for that: `exchange` only moves data, a wire adds it up in rank order.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from ..buffers import BufferPool, Grid, Hop, Placements, redistribute
from .communicators import gather_objects
from .data_parallel_groups import Axis, DataParallelGroups
from .in_flight import WAITS
from .ranges import is_profiling, ranged
from .uses import Uses

if TYPE_CHECKING:
    from .wire import Wire

T = TypeVar("T")


# A method of the group: the functions around it cost as much host time again.
_ALL_GATHER = (
    "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
)  # the name before torch 2.13


_REDUCE_SCATTER = (
    "reduce_scatter_single"
    if hasattr(dist.ProcessGroup, "reduce_scatter_single")
    else "_reduce_scatter_base"
)


# On CUDA a collective belongs to the stream that is current: it has the priority of the lane that
# starts it, and needs no hop to a stream of the communicator and back. A group's default is such a
# stream, of normal priority. Where no stream counts, as in gloo, the option does nothing.
_GATHER, _EXCHANGE, _SUM = AllgatherOptions(), AllToAllOptions(), ReduceScatterOptions()
_GATHER.asyncOp = _EXCHANGE.asyncOp = _SUM.asyncOp = False
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


_NO_MODELS = Uses()


@dataclass(slots=True)
class Pending:
    """A started operation of `group`. `wait` blocks the host on CPU and the current stream on CUDA.

    `work`: None where the operation is a part of the stream that was current when it started.
    `what`: the use it belongs to, of those in `uses`. `peer`: as in `Waiting`.

    Raises:
        CommunicationError: the operation failed, for example because a peer died.
        DivergentUseError: it failed because ranks use different units.
    """

    work: dist.Work | None
    what: str
    group: dist.ProcessGroup
    uses: Uses = _NO_MODELS
    peer: str = ""

    def wait(self) -> None:
        """Wait for the operation to end."""
        if self.work is None:
            return
        thread = get_ident()
        WAITS[thread] = self.what, time.monotonic(), self.group, self.peer, self.uses
        try:
            if is_profiling():
                ranged("wait", self.what, self.work.wait)
            else:
                self.work.wait()
        except RuntimeError as error:
            raise self.uses.failure(self.what + self.peer, error) from error
        finally:
            WAITS[thread] = None

    def wait_at_most(self, limit: datetime.timedelta) -> None:
        """Wait for the operation to end; raises what the backend raises at the limit."""
        if self.work is not None:
            self.work.wait(limit)


def start_all_gather(
    group: dist.ProcessGroup, flat: Tensor, source: Tensor, what: str, uses: Uses = _NO_MODELS
) -> Pending:
    """Start the backend's all-gather of every rank's `source` [n] into `flat` [world * n]."""
    return Pending(getattr(group, _ALL_GATHER)(flat, source, _GATHER), what, group, uses)


@dataclass(slots=True)
class Traffic:
    """How often each collective was called and the bytes this rank sent in it, and sent to other
    ranks along each axis.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    axis_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, axis: str, nbytes: int) -> None:
        """Add one call of `kind` that sends `nbytes` along `axis`."""
        self.calls[kind] += 1
        self.sent_bytes[kind] += nbytes
        self.axis_bytes[axis] += nbytes

    def reset(self) -> None:
        """Forget all counts."""
        self.calls.clear()
        self.sent_bytes.clear()
        self.axis_bytes.clear()


class Lender(Protocol):
    """Of flat buffers, as a `BufferPool` is."""

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor [numel] with any contents, until `release`."""

    def release(self, tensor: Tensor) -> None:
        """Give it back."""

    def lose(self, tensor: Tensor) -> None:
        """Give it back after an error: something may still write to it."""


class Channel:
    """The ranks along one axis: gathers on one communicator, everything that reduces on the other.

    `rank` and `size` are those along the axis. `route`: what exchanges go by.
    """

    route = "messages"

    def __init__(self, axis: Axis, device: torch.device, traffic: Traffic, uses: Uses) -> None:
        self.axis = axis
        self.rank = axis.rank
        self.size = axis.size
        self._traffic = traffic
        self._uses = uses
        self._point_to_point = (
            axis.size > 1
            and axis.gather is not None
            and device.type == "cpu"
            and dist.get_backend(axis.gather) == "gloo"
        )
        self._peers = [rank for rank in range(axis.size) if rank != axis.rank]
        self.received_parts = axis.size - int(self._point_to_point)
        """How many parts an exchange brings: the axis's, or all but our own."""
        # Whom an error names, who may be another rank of the job than of the axis.
        self._named = [(peer, f"rank {axis.ranks[peer]}") for peer in self._peers]

    @property
    def tags_messages(self) -> bool:
        """Whether what belongs to one unit can never be taken for another's."""
        return self._point_to_point or self.size == 1

    def carries(self, wire: Wire, nbytes: int) -> bool:
        """Whether it can exchange what `wire` sends, `nbytes` in all parts."""
        return True

    def lender(self, pool: BufferPool) -> Lender:
        """Of what is sent in an exchange."""
        return pool

    def gather(
        self, flat: Tensor, slices: Sequence[Tensor], source: Tensor, what: str
    ) -> list[Pending]:
        """Start to fill `flat` [size * n] with every rank's `source` [n]; `slices` are its views.

        `source` may be this rank's own slice. Nothing may write `source` or read `flat` before the
        waits.
        """
        tag = self._uses.gathers.note(what)
        return self._gather(self.axis.gather, "gather", flat, slices, source, what, tag=tag)

    def gather_reduced(self, flat: Tensor, slices: Sequence[Tensor], what: str) -> list[Pending]:
        """Start an in-place all-gather of this rank's slice of `flat`, on the reducing
        communicator.
        """
        source = slices[self.rank]
        tag = self._uses.exchanges.note(what)
        return self._gather(self.axis.reduce, "gather_reduced", flat, slices, source, what, tag=tag)

    def _gather(
        self,
        group: dist.ProcessGroup | None,
        kind: str,
        flat: Tensor,
        slices: Sequence[Tensor],
        source: Tensor,
        what: str,
        *,
        tag: int,
    ) -> list[Pending]:
        assert group is not None, "a gather needs a process group"
        own, peers = slices[self.rank], self._peers
        self._traffic.count(kind, self.axis.name, len(peers) * source.nbytes)
        try:
            if not self._point_to_point:
                return [start_all_gather(group, flat, source, what, self._uses)]
            incoming = [slices[peer] for peer in peers]
            pending = self._swap(group, incoming, [source] * len(peers), tag, what)
        except RuntimeError as error:
            raise self._uses.failure(what, error) from error
        if source is not own:
            own.copy_(source)
        return pending

    def _swap(
        self,
        group: dist.ProcessGroup,
        incoming: Sequence[Tensor],
        outgoing: Sequence[Tensor],
        tag: int,
        what: str,
    ) -> list[Pending]:
        """Start a receive from and a send to every peer, in the order of their ranks."""
        pending: list[Pending] = []
        uses = self._uses
        try:
            # Receives first: a send has to find its receive posted, or gloo stages it.
            for part, (peer, name) in zip(incoming, self._named, strict=True):
                work = group.recv([part], peer, tag)
                pending.append(Pending(work, what, group, uses, f" from {name}"))
            for part, (peer, name) in zip(outgoing, self._named, strict=True):
                work = group.send([part], peer, tag)
                pending.append(Pending(work, what, group, uses, f" to {name}"))
        except RuntimeError:
            # Memory goes now that others may be writing to: have gloo give up what has begun.
            for begun in pending:
                with contextlib.suppress(RuntimeError):
                    begun.wait_at_most(datetime.timedelta(milliseconds=1))
            raise
        return pending

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> list[Pending]:
        """Start to swap parts: part r of `sent` [size * n] goes to rank r, and into `received`
        [received_parts * n] comes what every rank, or every other, has for us, in rank order.

        Nothing may write `sent` or read `received` before the waits.
        """
        group = self.axis.reduce
        assert group is not None, "an exchange needs a process group"
        tag = self._note_exchange(sent, what)
        numel = sent.numel() // self.size
        try:
            if not self._point_to_point:
                work = group.alltoall_base(received, sent, [], [], _EXCHANGE)
                return [Pending(work, what, group, self._uses)]
            parts = sent.split(numel)
            outgoing = [parts[peer] for peer in self._peers]
            return self._swap(group, received.split(numel), outgoing, tag, what)
        except RuntimeError as error:
            raise self._uses.failure(what, error) from error

    def _note_exchange(self, sent: Tensor, what: str) -> int:
        """Of what goes to other ranks; the tag of its messages."""
        nbytes = sent.nbytes // self.size * len(self._peers)
        self._traffic.count("exchange", self.axis.name, nbytes)
        return self._uses.exchanges.note(what)

    def rows(self, received: Sequence[Tensor], sent: Tensor) -> list[Tensor]:
        """What all ranks had for us in an exchange, in their order: `received`, and our own part of
        `sent` where that stayed.
        """
        rows = list(received)
        if len(rows) < self.size:
            numel = rows[0].numel()
            rows.insert(self.rank, sent[self.rank * numel : (self.rank + 1) * numel])
        return rows

    def reduce_scatter(self, received: Tensor, sent: Tensor, what: str) -> list[Pending]:
        """Start the backend's own sum: into `received` [n] comes that of all ranks' part of `sent`
        [size * n] for us, in whatever order and precision the backend has.
        """
        group = self.axis.reduce
        assert group is not None, "a reduce-scatter needs a process group"
        self._uses.exchanges.note(what)
        self._traffic.count("reduce_scatter", self.axis.name, len(self._peers) * received.nbytes)
        try:
            work = getattr(group, _REDUCE_SCATTER)(received, sent, _SUM)
            return [Pending(work, what, group, self._uses)]
        except RuntimeError as error:
            raise self._uses.failure(what, error) from error


class Collectives:
    """A channel along each axis of the mesh, and small collectives over all data-parallel ranks."""

    def __init__(self, groups: DataParallelGroups, beside: Collectives | None = None) -> None:
        """`beside`: others of the same model, with which all that it does is noted in one order."""
        self.groups = groups
        self.rank = groups.rank
        self.world_size = groups.world_size
        self.traffic: Traffic = Traffic() if beside is None else beside.traffic
        self.uses: Uses = Uses() if beside is None else beside.uses
        self.channels = [
            Channel(axis, groups.device, self.traffic, self.uses) for axis in groups.axes
        ]
        self.sum_channels = [[channel] for channel in self.channels]
        """By axis: those by which sums can go, the best first."""
        self.detours: dict[str, str] = {}
        """Why sums along an axis go by messages where something better was asked for."""
        self.grid = Grid(
            tuple(axis.size for axis in groups.axes), tuple(axis.rank for axis in groups.axes)
        )

    def hops(self, numel: int, source: Placements, target: Placements) -> list[Hop]:
        """The movements that take a flat buffer of `numel` elements from one to the other."""
        return [
            hop
            for hop in redistribute(numel, self.grid, source, target)
            if self.channels[hop.axis].axis.gather is not None
        ]

    def sum_channel(self, axis: int, wire: Wire, nbytes: int) -> Channel:
        """That for what `wire` sends along `axis`, `nbytes` in all parts."""
        return next(one for one in self.sum_channels[axis] if one.carries(wire, nbytes))

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Overwrite `tensor` with rank 0's; blocks."""
        group = self.groups.group
        if group is None or self.world_size == 1:
            return
        self.traffic.count("broadcast", "all", tensor.nbytes if self.rank == 0 else 0)
        work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
        self.agree(work, what, group)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
        """Reduce a small `tensor` over all ranks in place; blocks. For order-free reductions."""
        group = self.groups.group
        if group is None or self.world_size == 1:
            return
        self.traffic.count("all_reduce", "all", tensor.nbytes)
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        self.agree(work, what, group)

    def agree(self, work: dist.Work | None, what: str, group: dist.ProcessGroup) -> None:
        """Wait for a small collective of all ranks, which has been started in `group`."""
        self.uses.agreements += 1
        Pending(work, what, group, self.uses).wait()

    def all_equal(self, values: Tensor, what: str) -> bool:
        """Whether every rank passes the same int64 `values`."""
        extremes = torch.stack([values, -values]).to(self.groups.device)
        self.all_reduce(extremes, dist.ReduceOp.MAX, what)
        return bool((extremes[0] == -extremes[1]).all())

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order. For set-up and error messages only."""
        group = self.groups.group
        if group is None:
            return [value]
        what = "comparison of the ranks' models"
        return gather_objects(value, group, self.groups.device, what)
