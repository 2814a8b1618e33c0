"""The collectives of a sharded model: chosen by backend, counted, failing with what was awaited.

    call        native (NCCL and others)    gloo on a CPU
    gather      all-gather                  a send and a receive per peer, straight into place
    exchange    all-to-all                  a send and a receive per peer; our own part stays

gloo's own all-gather stages its data (85 ms against 30 ms for 64 MiB on loopback), its all-to-all
copies what a rank has for itself: hence the second column. A GPU's tensors it can only stage: its
sends and receives would take their addresses for the host's. Sums are never left to a backend:
`exchange` only moves data, `kernels.reduce_` adds it up in rank order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import communicating, communication_error
from .in_flight import noted
from .process_groups import DataParallelGroups
from .ranges import ranged

T = TypeVar("T")
_GATHER_TAG, _EXCHANGE_TAG = 0x51DE, 0x51DF
"""Keep our sends apart from the user's own on the same group; gloo matches peer and tag."""


# A method of the group: the functions around it cost as much host time again.
_ALL_GATHER = (
    "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
)  # the name before torch 2.13


def start_all_gather(group: dist.ProcessGroup, flat: Tensor, source: Tensor) -> dist.Work:
    """Start the backend's all-gather of every rank's `source` [n] into `flat` [world * n]."""
    work: dist.Work = getattr(group, _ALL_GATHER)(flat, source)
    return work


@dataclass(slots=True)
class Pending:
    """A started operation of `group`. `wait` blocks the host on CPU and the current stream on CUDA.

    Raises:
        CommunicationError: the operation failed, for example because a peer died.
    """

    work: dist.Work
    what: str
    group: dist.ProcessGroup

    def wait(self) -> None:
        """Wait for the operation to end."""
        try:
            noted(self.what, self.group, self._wait)
        except RuntimeError as error:
            raise communication_error(self.what, error) from error

    def _wait(self) -> None:
        ranged("wait", self.what, self.work.wait)


@dataclass(slots=True)
class Traffic:
    """How often each collective was called and the bytes this rank sent in it."""

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, nbytes: int) -> None:
        """Add one call of `kind` that sends `nbytes`."""
        self.calls[kind] += 1
        self.sent_bytes[kind] += nbytes

    def reset(self) -> None:
        """Forget all counts."""
        self.calls.clear()
        self.sent_bytes.clear()


class Collectives:
    """Gathers on one communicator, everything that reduces on the other."""

    def __init__(self, groups: DataParallelGroups) -> None:
        self.groups = groups
        self.rank = groups.rank
        self.world_size = groups.world_size
        self.traffic = Traffic()
        self._point_to_point = (
            groups.gather is not None
            and groups.device.type == "cpu"
            and dist.get_backend(groups.gather) == "gloo"
        )
        self._peers = [r for r in range(groups.world_size) if r != groups.rank]

    def gather(
        self, flat: Tensor, slices: Sequence[Tensor], source: Tensor, what: str
    ) -> list[Pending]:
        """Start to fill `flat` [world * n] with every rank's `source` [n]; `slices` are its world
        views.

        `source` may be this rank's own slice. Nothing may write `source` or read `flat` before the
        waits.
        """
        return self._gather(self.groups.gather, "gather", flat, slices, source, what)

    def gather_reduced(self, flat: Tensor, slices: Sequence[Tensor], what: str) -> list[Pending]:
        """Start an in-place all-gather of this rank's slice of `flat`, on the reducing
        communicator.
        """
        return self._gather(
            self.groups.reduce, "gather_reduced", flat, slices, slices[self.rank], what
        )

    def _gather(
        self,
        group: dist.ProcessGroup | None,
        kind: str,
        flat: Tensor,
        slices: Sequence[Tensor],
        source: Tensor,
        what: str,
    ) -> list[Pending]:
        own, peers = slices[self.rank], self._peers
        if group is None or self.world_size == 1:
            if source is not own:
                own.copy_(source)
            return []
        self.traffic.count(kind, len(peers) * source.nbytes)
        try:
            if not self._point_to_point:
                return [Pending(start_all_gather(group, flat, source), what, group)]
            incoming = [slices[peer] for peer in peers]
            pending = self._swap(group, incoming, [source] * len(peers), _GATHER_TAG, what)
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
            Pending(group.recv([part], peer, tag), f"{what} from rank {peer}", group)
            for part, peer in zip(incoming, self._peers, strict=True)
        ]
        pending += [
            Pending(group.send([part], peer, tag), f"{what} to rank {peer}", group)
            for part, peer in zip(outgoing, self._peers, strict=True)
        ]
        return pending

    @property
    def received_parts(self) -> int:
        """How many parts an exchange brings: the world's, or all but our own."""
        return self.world_size - int(self._point_to_point)

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> list[Pending]:
        """Start to swap parts: part r of `sent` [world * n] goes to rank r, and into `received`
        [received_parts * n] comes what every rank, or every other, has for us, in rank order.

        Nothing may write `sent` or read `received` before the waits.
        """
        group = self.groups.reduce
        assert group is not None, "exchange needs a process group"
        numel = sent.numel() // self.world_size
        self.traffic.count("exchange", len(self._peers) * numel * sent.itemsize)
        try:
            if not self._point_to_point:
                return [Pending(group.alltoall_base(received, sent, [], []), what, group)]
            parts = sent.split(numel)
            outgoing = [parts[peer] for peer in self._peers]
            return self._swap(group, received.split(numel), outgoing, _EXCHANGE_TAG, what)
        except RuntimeError as error:
            raise communication_error(what, error) from error

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Overwrite `tensor` with rank 0's; blocks."""
        group = self.groups.gather
        if group is None or self.world_size == 1:
            return
        self.traffic.count("broadcast", tensor.nbytes if self.rank == 0 else 0)
        work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
        assert work is not None
        Pending(work, what, group).wait()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
        """Reduce a small `tensor` over all ranks in place; blocks. For order-free reductions."""
        group = self.groups.gather
        if group is None or self.world_size == 1:
            return
        self.traffic.count("all_reduce", tensor.nbytes)
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
        if self.groups.gather is None or self.world_size == 1:
            return [value]
        gathered: list[T] = [value] * self.world_size
        with communicating("comparison of the ranks' models"):
            dist.all_gather_object(gathered, value, group=self.groups.gather)
        return gathered
