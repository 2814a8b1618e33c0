"""Sums that read what peers packed where it lies, in place of messages: symmetric memory.

    pack       gradients -> a slot of this rank's memory, which the ranks along the axis can read
    meet       a barrier between the ranks' streams: every rank's slot is packed
    sum        reads the part for this rank in the slots of all, in rank order: the same bits

Nothing is received into a buffer of its own, and no kernel of the backend takes multiprocessors.

Exchanges of one axis take slots in turn, in the one order of all ranks. `depth` of them are under
way at once, and there are twice as many slots: exchange n packs into slot n % (2 depth) and meets
in channel n % depth. On each rank it begins behind the end of exchange n - depth: a lane's streams
take turns, and a backward ends behind all its exchanges. So a rank that has met in exchange n has
summed exchange n - depth, and all ranks have when exchange n + depth packs into the slot of that
one. There is no second barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers import BufferPool
from .collectives import Channel, Lender, Pending, Traffic
from .data_parallel_groups import Axis
from .peer_memory import PeerMemory
from .uses import Uses
from .wire import Wire


@dataclass(slots=True)
class _Slot:
    """One size of message in one slot: this rank's, and the parts for this rank in everybody's."""

    sent: Tensor
    rows: list[Tensor]


class Slots:
    """What exchanges along one axis pack into, in turn. To be called in the one order of all ranks.

    memory: its buffers have 2 * depth slots of `slot_bytes`. rank: along the axis.
    """

    def __init__(self, memory: PeerMemory, rank: int, *, slot_bytes: int, depth: int) -> None:
        self.slot_bytes, self.count = slot_bytes, 2 * depth
        self._memory, self._rank, self._depth = memory, rank, depth
        self._next = 0
        self._made: dict[tuple[int, int, torch.dtype], _Slot] = {}
        self._leased: dict[int, tuple[int, _Slot]] = {}

    @property
    def nbytes(self) -> int:
        """Of this rank's part."""
        return self.count * self.slot_bytes

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next exchange's slot, as a 1-D tensor [numel] with any contents, until `release`."""
        number, self._next = self._next, self._next + 1
        assert all(older > number - self._depth for older, _ in self._leased.values()), (
            f"exchange {number} begins before exchange {number - self._depth} has ended"
        )
        slot = self._slot(number % self.count, numel, dtype)
        self._leased[id(slot.sent)] = number, slot
        return slot.sent

    def meet(self, sent: Tensor) -> dist.Work | None:
        """Order what follows after the packing of every rank's slot, and so after the sums of the
        exchange `depth` before.
        """
        number, _ = self._leased[id(sent)]
        return self._memory.meet(number % self._depth)

    def rows(self, sent: Tensor) -> list[Tensor]:
        """Of every rank, in their order, what it has packed for this one."""
        return self._leased[id(sent)][1].rows

    def release(self, sent: Tensor) -> None:
        """The exchange has summed."""
        del self._leased[id(sent)]

    def lose(self, sent: Tensor) -> None:
        """The exchange failed, on all ranks."""
        self.release(sent)

    def _slot(self, place: int, numel: int, dtype: torch.dtype) -> _Slot:
        key = place, numel, dtype
        if key not in self._made:
            start, nbytes = place * self.slot_bytes, numel * dtype.itemsize
            assert nbytes <= self.slot_bytes, "a slot has the largest message"
            whole = [part[start : start + nbytes] for part in self._memory.buffers]
            own = nbytes // len(whole)
            rows = [part[self._rank * own :][:own].view(dtype) for part in whole]
            self._made[key] = _Slot(whole[self._rank].view(dtype), rows)
        return self._made[key]


class SymmetricChannel(Channel):
    """The ranks along an axis that read each other's memory. Nothing is received."""

    route = "symmetric memory"

    def __init__(
        self, axis: Axis, device: torch.device, traffic: Traffic, uses: Uses, slots: Slots
    ) -> None:
        super().__init__(axis, device, traffic, uses)
        self.slots = slots
        self.received_parts = 0

    def carries(self, wire: Wire, nbytes: int) -> bool:
        """Whether it fits, and `wire` moves and sums as all do: what it does itself we cannot."""
        return nbytes <= self.slots.slot_bytes and leaves_moving(wire)

    def lender(self, pool: BufferPool) -> Lender:
        """The slots."""
        return self.slots

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> list[Pending]:
        """Start to wait until every rank has packed. The sum moves the bytes."""
        group = self.axis.reduce
        assert group is not None, "an exchange needs a process group"
        self._note_exchange(sent, what)
        try:
            return [Pending(self.slots.meet(sent), what, group, self._uses)]
        except RuntimeError as error:
            raise self._uses.failure(what, error) from error

    def rows(self, received: Sequence[Tensor], sent: Tensor) -> list[Tensor]:
        """What every rank has packed for this one, where it lies."""
        return self.slots.rows(sent)


def leaves_moving(wire: Wire) -> bool:
    """Whether `wire` has not its own way to bring parts to ranks."""
    names = ("received_parts", "exchange", "rows")
    return all(getattr(type(wire), name) is getattr(Wire, name) for name in names)
