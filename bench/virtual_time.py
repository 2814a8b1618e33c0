"""Works of streams in virtual time: what waits for what is recorded, and scheduled afterwards, at
any rates of the links.

    work     starts when all that it comes after has ended, takes a time of its own (compute, a
             kernel, a latency), then moves bytes over links
    link     shared evenly by the works that move bytes over it at the moment

The host takes no time. Times are ms, rates GB/s of 1e9 bytes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .virtual_streams import LoopbackGroup, Machine, Stream

Link = Hashable
Works = frozenset[int]
BYTES_PER_MS = 1e6
"""Of 1 GB/s."""


@dataclass(frozen=True, slots=True)
class Work:
    """`own_ms`, then `loads`: bytes over each link, over all of them at once. `after`: the numbers
    of works that end before it starts.
    """

    own_ms: float
    loads: Mapping[Link, float] = field(default_factory=dict)
    after: Works = frozenset()


class WaitingStream(Stream):
    """Events are the works that have to end before what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.after: Works = frozenset()

    def record_event(self) -> Any:
        """The works."""
        return self.after

    def wait_event(self, event: Any) -> None:
        """What follows comes after these too."""
        self.after |= event

    def wait_stream(self, other: Any) -> None:
        """What follows comes after all that `other` has."""
        self.after |= other.after


Transfer = Callable[[LoopbackGroup, str, Tensor], Work]
"""What a collective of a group takes that is a "gather" or an "exchange" into a tensor."""


class Recorder(Machine):
    """Records works: kernels of the lanes by the bytes of their arguments, collectives, and what
    `compute` is told of the compute stream, whose own kernels take no time.
    """

    def __init__(self, scale: float, memory_gb_per_s: float) -> None:
        """`scale`: bytes that one byte of a tensor stands for."""
        super().__init__(WaitingStream)
        self.works: list[Work] = []
        self.take: Transfer
        self._ms_per_byte = scale / (memory_gb_per_s * BYTES_PER_MS)
        self._last: dict[LoopbackGroup, Works] = {}

    def now(self) -> Works:
        """What the current stream waits for."""
        assert isinstance(self.current, WaitingStream)
        return self.current.after

    def compute(self, ms: float) -> None:
        """The current stream works for `ms`."""
        self._add(Work(ms))

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, unless it is ours: nobody looks at values."""
        # Memory that tests fill when it is new takes no time.
        if self.current is self.streams[0] or func._schema.name == "aten::fill_":
            return super().launch(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        self._add(Work(nbytes * self._ms_per_byte))
        if func._schema.name.startswith("sidestream::"):
            return None
        return super().launch(func, args, kwargs)

    def transfer(self, group: LoopbackGroup, kind: str, target: Tensor, part: Tensor) -> None:
        """A collective, which comes after the one before it of the same group."""
        assert isinstance(self.current, WaitingStream)
        self.current.wait_event(self._last.get(group, frozenset()))
        self._add(self.take(group, kind, target))
        self._last[group] = self.now()

    def _add(self, work: Work) -> None:
        assert isinstance(self.current, WaitingStream)
        self.works.append(Work(work.own_ms, work.loads, self.current.after))
        self.current.after = frozenset([len(self.works) - 1])


def schedule(works: Sequence[Work], gb_per_s: Mapping[Link, float]) -> list[float]:
    """When each of `works` ends. `gb_per_s`: rates of the links."""
    return _Schedule(works, gb_per_s).ends_ms


class _Schedule:
    """Runs from one end of a time or of a flow of bytes to the next."""

    def __init__(self, works: Sequence[Work], gb_per_s: Mapping[Link, float]) -> None:
        self._works = works
        self._gb_per_s = gb_per_s
        self.ends_ms = [0.0] * len(works)
        self._now_ms = 0.0
        self._timers: list[tuple[float, int]] = []
        self._flows: dict[tuple[int, Link], float] = {}  # bytes left of a work's on a link
        self._missing = [len(work.after) for work in works]
        self._followers: list[list[int]] = [[] for _ in works]
        for number, work in enumerate(works):
            for before in work.after:
                self._followers[before].append(number)
            if not work.after:
                self._start(number)
        while self._timers or self._flows:
            self._advance()

    def _start(self, number: int) -> None:
        heapq.heappush(self._timers, (self._now_ms + self._works[number].own_ms, number))

    def _advance(self) -> None:
        sharers = Counter(link for _, link in self._flows)
        bytes_per_ms = {
            (number, link): self._gb_per_s[link] * BYTES_PER_MS / sharers[link]
            for number, link in self._flows
        }
        lasts = {flow: left / bytes_per_ms[flow] for flow, left in self._flows.items()}
        flow = min(lasts, key=lasts.__getitem__, default=None)
        timer_ms = self._timers[0][0] - self._now_ms if self._timers else math.inf
        passed_ms = timer_ms if flow is None else min(timer_ms, lasts[flow])
        self._now_ms += passed_ms
        for moving, rate in bytes_per_ms.items():
            self._flows[moving] -= passed_ms * rate
        if flow is None or timer_ms <= lasts[flow]:
            _, number = heapq.heappop(self._timers)
            loads = self._works[number].loads.items()
            self._flows |= {(number, link): nbytes for link, nbytes in loads if nbytes}
        else:
            number, _ = flow
            del self._flows[flow]
        if not any(of == number for of, _ in self._flows):
            self._end(number)

    def _end(self, number: int) -> None:
        self.ends_ms[number] = self._now_ms
        for follower in self._followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._start(follower)
