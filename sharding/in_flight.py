"""What this rank has begun and what it waits for: names and times, for `explain` and the monitor.

    waits    a thread of the host stands in a collective; gloo's time limit counts from there
    works    a lane was given a work; NCCL's time limit counts from there

Nothing here refers to a tensor or an operation, and noting costs a fraction of a microsecond.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar

import torch.distributed as dist

from .ranges import ranged

T = TypeVar("T")
# More than a stream takes before the host has to wait for it.
_KEPT_WORKS = 1024
_WAITS: dict[int, tuple[str, float, dist.ProcessGroup | None] | None] = {}
"""By thread; None where it waits no more."""


class _NotRecorded:
    """The event of a work that the host is still enqueuing."""

    def query(self) -> bool:
        return False


@dataclass(slots=True)
class Started:
    """A work that a lane was given, `since_s` (`time.monotonic`). On a GPU `event` is its end."""

    what: str
    since_s: float
    ended: bool = False
    event: Any = None

    def has_ended(self) -> bool:
        """Whether it is over. Asks a GPU's event, which waits for nothing."""
        return self.ended if self.event is None else bool(self.event.query())


@dataclass(frozen=True, slots=True)
class Waiting:
    """A thread that stands in a collective, `since_s` (`time.monotonic`), of `group` if known."""

    thread: int
    what: str
    since_s: float
    group: dist.ProcessGroup | None


class WorkLog:
    """The latest works of one lane, in order of submission. `on_gpu`: they end by events."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self._no_event = _NotRecorded() if on_gpu else None
        self._works: deque[Started] = deque(maxlen=_KEPT_WORKS)

    def begin(self, what: str) -> Started:
        """Note a work that the lane is given now; to be told of its end."""
        started = Started(what, time.monotonic(), event=self._no_event)
        self._works.append(started)
        return started

    def in_flight(self, begun_before_s: float | None = None) -> list[Started]:
        """Those that are not over; only those that were begun before that time, if one is given.
        From any thread.
        """
        works = copy_of(self._works)
        if begun_before_s is not None:
            works = [work for work in works if work.since_s <= begun_before_s]
        return [work for work in works if not work.has_ended()]


def noted(what: str, group: dist.ProcessGroup | None, wait: Callable[[], T]) -> T:
    """`wait()`, in which this thread stands in the collective `what` of `group`; a range of traces
    too.
    """
    thread = get_ident()
    around = _WAITS.get(thread)
    _WAITS[thread] = what, time.monotonic(), group
    try:
        return ranged("wait", what, wait)
    finally:
        _WAITS[thread] = around


@contextlib.contextmanager
def noting(what: str) -> Iterator[None]:
    """Inside, this thread stands in the collective `what`."""
    thread = get_ident()
    around = _WAITS.get(thread)
    _WAITS[thread] = what, time.monotonic(), None
    try:
        yield
    finally:
        _WAITS[thread] = around


def host_waits() -> list[Waiting]:
    """The threads that stand in a collective now. From any thread."""
    return [Waiting(thread, *wait) for thread, wait in copy_of(_WAITS.items()) if wait is not None]


def copy_of(values: Iterable[T]) -> list[T]:
    """`values`, to which another thread may add meanwhile."""
    while True:
        try:
            return list(values)
        except RuntimeError:
            continue
