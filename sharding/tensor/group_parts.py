"""The parts of a tensor that the ranks of a group hold, and which elements each rank answers for.

Ranks hold intervals of its row-major elements. Two intervals are equal or have no element in
common, and need not lie in the order of the ranks. What several ranks hold is divided among them,
so that each element is sent, counted and summed by one rank::

    intervals of ranks 0 to 3                        shares
    [0, 512) [512, 900) [900, 900) [900, 1024)       the same
    [0, 512) [0, 512) [512, 1024) [512, 1024)        [0, 256) [256, 512) [512, 768) [768, 1024)
    [0, 300) [300, 400) [0, 300) [300, 400)          [0, 256) [300, 400) [256, 300) [400, 400)
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ...buffers import BLOCK_NUMEL
from ...buffers.layout import round_up
from ..collectives import start_all_gather
from ..errors import communicating

Intervals = tuple[tuple[int, int], ...]
"""The (start, stop) of every rank of a group."""


@functools.lru_cache(maxsize=64)  # all ranks' numbers: of thousands of ranks, some 100 KiB each
def shares_of(intervals: Intervals) -> Intervals:
    """What each rank answers for: its interval, or a piece of it where several ranks hold the same.

    Pieces are whole blocks, but for the last: a norm sums blocks.

    Raises:
        ValueError: two intervals overlap and are not equal.
    """
    holders = Counter(intervals)
    for (_, stop), (start, _) in pairwise(sorted(x for x in holders if x[0] < x[1])):
        if start < stop:
            raise ValueError(
                f"intervals: expected two of them to be equal or have no element in common, got "
                f"element {start} in several that differ, of {intervals}"
            )
    if len(holders) == len(intervals):
        return intervals
    shares = []
    met: Counter[tuple[int, int]] = Counter()
    for interval in intervals:
        start, stop = interval
        numel = round_up(-(-(stop - start) // holders[interval]), BLOCK_NUMEL)
        first = min(start + met[interval] * numel, stop)
        shares.append((first, min(first + numel, stop)))
        met[interval] += 1
    return tuple(shares)


class GroupParts:
    """Mixed into a tensor class: `local` holds the elements from `start` on of a tensor of `shape`,
    and `intervals` says what every rank of `group` holds.
    """

    local: Tensor
    start: int
    name: str
    shape: torch.Size
    group: dist.ProcessGroup | None
    intervals: Intervals

    def describe(self) -> str:
        """The tensor in a few words, for messages."""
        raise NotImplementedError

    def has_layout_of(self, other: GroupParts) -> bool:
        """Whether each rank holds the same interval of the same shape of both: one answer for all
        ranks, also where this one's intervals are equal and another one's are not.
        """
        alike = self.intervals is other.intervals or self.intervals == other.intervals
        return self.shape == other.shape and alike

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all elements."""
        whole = (0, self.shape.numel())
        return all(interval == whole for interval in self.intervals)

    @property
    def shares(self) -> Intervals:
        """The elements that each rank answers for, every one once."""
        return shares_of(self.intervals)

    @property
    def share(self) -> Tensor:
        """Those of `local` that this rank answers for [share numel]: a view.

        Raises:
            RuntimeError: the tensor was made without its group.
        """
        rank = 0 if len(self.intervals) == 1 else dist.get_rank(self.communicator)
        start, stop = self.shares[rank]
        return self.local[start - self.start : stop - self.start]

    @property
    def communicator(self) -> dist.ProcessGroup:
        """The group whose ranks hold the other elements.

        Raises:
            RuntimeError: the tensor was made without one.
        """
        if self.group is None:
            raise RuntimeError(
                f"{self.describe()}: expected the process group that holds the other elements, got "
                "None; make the ShardedTensor with group= and intervals="
            )
        return self.group

    def gather_full(self) -> Tensor:
        """The whole tensor [shape], new and plain, on every rank of the group (a collective).

        Raises:
            CommunicationError: the gather failed, for example because a rank died.
        """
        full = self.local.new_empty(self.shape.numel())
        if self.is_whole:
            return full.copy_(self.local).view(self.shape)
        numels = [stop - start for start, stop in self.shares]
        own = self.share
        part = own.new_zeros(max(numels))
        part[: len(own)] = own
        parts = self.gather_parts(part)
        assert sum(numels) == len(full), "the ranks' intervals do not tile the tensor"
        for (start, stop), received in zip(self.shares, parts, strict=True):
            full[start:stop] = received[: stop - start]
        return full.view(self.shape)

    def gather_parts(self, part: Tensor) -> Tensor:
        """Every rank's `part` [n] as [world, n].

        Raises:
            CommunicationError: the gather failed, for example because a rank died.
        """
        group = self.communicator
        parts = part.new_empty(len(self.intervals), len(part))
        # As bytes: gloo refuses some dtypes (bool, FP8), and a gather only moves bits.
        flat, source = parts.view(-1).view(torch.uint8), part.view(torch.uint8)
        what = f"gather of parameter {self.name!r}"
        with communicating(what):
            start_all_gather(group, flat, source, what).wait()
        return parts
