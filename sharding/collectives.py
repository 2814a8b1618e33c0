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

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from ..buffers import Grid, Hop, Placements, redistribute
from .communicators import gather_objects
from .errors import communication_error
from .in_flight import noted
from .process_groups import Axis, DataParallelGroups
from .uses import Uses

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


def start_all_gather(group: dist.ProcessGroup, flat: Tensor, source: Tensor, what: str) -> Pending:
    """Start the backend's all-gather of every rank's `source` [n] into `flat` [world * n]."""
    return Pending(getattr(group, _ALL_GATHER)(flat, source, _GATHER), what, group)


def start_all_to_all(
    group: dist.ProcessGroup, received: Tensor, sent: Tensor, what: str
) -> Pending:
    """Start the backend's all-to-all: part r of `sent` [world * n] goes to rank r, into `received`
    [world * n] comes every rank's part for this one.
    """
    return Pending(group.alltoall_base(received, sent, [], [], _EXCHANGE), what, group)


def start_reduce_scatter(group: dist.ProcessGroup, own: Tensor, flat: Tensor, what: str) -> Pending:
    """Start the backend's sum of every rank's `flat` [world * n], of which this rank's part comes
    into `own` [n].
    """
    return Pending(getattr(group, _REDUCE_SCATTER)(own, flat, _SUM), what, group)


@dataclass(slots=True)
class Pending:
    """A started operation of `group`. `wait` blocks the host on CPU and the current stream on CUDA.

    `work`: None where the operation is a part of the stream that was current when it started.

    Raises:
        CommunicationError: the operation failed, for example because a peer died.
    """

    work: dist.Work | None
    what: str
    group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        """Wait for the operation to end."""
        if self.work is None:
            return
        try:
            noted(self.what, self.group, self.work.wait)
        except RuntimeError as error:
            raise communication_error(self.what, error) from error

    def wait_at_most(self, limit: datetime.timedelta) -> None:
        """Wait for the operation to end; raises what the backend raises at the limit."""
        if self.work is not None:
            self.work.wait(limit)


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


class Channel:
    """The ranks along one axis: gathers on one communicator, everything that reduces on the other.

    `rank` and `size` are those along the axis.
    """

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
        # Whom an error names, who may be another rank of the job than of the axis.
        self._named = [(peer, f"rank {axis.ranks[peer]}") for peer in self._peers]

    def _count(self, kind: str, nbytes: int) -> None:
        self._traffic.count(kind, self.axis.name, nbytes)

    @property
    def tags_messages(self) -> bool:
        """Whether what belongs to one unit can never be taken for another's."""
        return self._point_to_point or self.size == 1

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
        self._count(kind, len(peers) * source.nbytes)
        try:
            if not self._point_to_point:
                return [start_all_gather(group, flat, source, what)]
            incoming = [slices[peer] for peer in peers]
            pending = self._swap(group, incoming, [source] * len(peers), tag, what)
        except RuntimeError as error:
            raise communication_error(what, error) from error
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
        # Receives first: a send has to find its receive posted, or gloo stages it.
        pending = [
            Pending(group.recv([part], peer, tag), f"{what} from {name}", group)
            for part, (peer, name) in zip(incoming, self._named, strict=True)
        ]
        pending += [
            Pending(group.send([part], peer, tag), f"{what} to {name}", group)
            for part, (peer, name) in zip(outgoing, self._named, strict=True)
        ]
        return pending

    @property
    def received_parts(self) -> int:
        """How many parts an exchange brings: the axis's, or all but our own."""
        return self.size - int(self._point_to_point)

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> list[Pending]:
        """Start to swap parts: part r of `sent` [size * n] goes to rank r, and into `received`
        [received_parts * n] comes what every rank, or every other, has for us, in rank order.

        Nothing may write `sent` or read `received` before the waits.
        """
        group = self.axis.reduce
        assert group is not None, "an exchange needs a process group"
        tag = self._uses.exchanges.note(what)
        numel = sent.numel() // self.size
        self._count("exchange", len(self._peers) * numel * sent.itemsize)
        try:
            if not self._point_to_point:
                return [start_all_to_all(group, received, sent, what)]
            parts = sent.split(numel)
            outgoing = [parts[peer] for peer in self._peers]
            return self._swap(group, received.split(numel), outgoing, tag, what)
        except RuntimeError as error:
            raise communication_error(what, error) from error

    def reduce_scatter(self, received: Tensor, sent: Tensor, what: str) -> list[Pending]:
        """Start the backend's own sum: into `received` [n] comes that of all ranks' part of `sent`
        [size * n] for us, in whatever order and precision the backend has.
        """
        group = self.axis.reduce
        assert group is not None, "a reduce-scatter needs a process group"
        self._uses.exchanges.note(what)
        self._count("reduce_scatter", len(self._peers) * received.nbytes)
        try:
            return [start_reduce_scatter(group, received, sent, what)]
        except RuntimeError as error:
            raise communication_error(what, error) from error


class Collectives:
    """A channel along each axis of the mesh, and small collectives over all data-parallel ranks."""

    def __init__(self, groups: DataParallelGroups) -> None:
        self.groups = groups
        self.rank = groups.rank
        self.world_size = groups.world_size
        self.traffic = Traffic()
        self.uses = Uses()
        self.channels = [
            Channel(axis, groups.device, self.traffic, self.uses) for axis in groups.axes
        ]
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

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Overwrite `tensor` with rank 0's; blocks."""
        group = self.groups.group
        if group is None or self.world_size == 1:
            return
        self.traffic.count("broadcast", "all", tensor.nbytes if self.rank == 0 else 0)
        work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
        assert work is not None
        Pending(work, what, group).wait()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
        """Reduce a small `tensor` over all ranks in place; blocks. For order-free reductions."""
        group = self.groups.group
        if group is None or self.world_size == 1:
            return
        self.traffic.count("all_reduce", "all", tensor.nbytes)
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        assert work is not None
        Pending(work, what, group).wait()

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
