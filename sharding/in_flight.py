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
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")
# More than a stream takes before the host has to wait for it.
_KEPT_WORKS = 1024
_MOMENT_S = 5.0
"""Failures follow each other: the ranks are asked once."""
_Wait = tuple[str, float, dist.ProcessGroup | None, str, object]
WAITS: dict[int, _Wait | None] = {}
"""By thread, what `Waiting` says of the operation it waits for; None where it waits no more."""
_AROUND: dict[int, _Wait | None] = {}
"""By thread, what it does meanwhile that is no single operation."""


class _NotRecorded:
    """The event of a work that the host is still enqueuing."""

    def query(self) -> bool:
        return False


class Work(Protocol):
    """What a lane was given, `since_s` (`time.monotonic`)."""

    what: str
    since_s: float

    def has_ended(self) -> bool:
        """Whether it is over. Waits for nothing."""


@dataclass(slots=True)
class EnqueuedWork:
    """A work on a GPU's stream, of which `event` is the end."""

    what: str
    since_s: float
    event: Any = _NotRecorded()  # noqa: RUF009 - has no state

    def has_ended(self) -> bool:
        """Whether it is over. Asks the event, which waits for nothing."""
        return bool(self.event.query())


@dataclass(frozen=True, slots=True)
class Waiting:
    """A thread that stands in a collective, `since_s` (`time.monotonic`), of `group` if known and
    for `owner`, if for one model alone. `peer`: " to" or " from" which rank, if one alone.
    """

    thread: int
    what: str
    since_s: float
    group: dist.ProcessGroup | None
    peer: str
    owner: object


def _forget(_: Work) -> None:
    """Where nothing is noted."""


class WorkLog:
    """The latest works of one lane, in order of submission. `on_gpu`: they end by events."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self._works: deque[Work] = deque(maxlen=_KEPT_WORKS)
        self.add: Callable[[Work], None] = self._works.append
        """Note a work that the lane is given now."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is noted: what a CUDA graph records does not run, and asking one of its
        events is an error.
        """
        self.add, add = _forget, self.add
        try:
            yield
        finally:
            self.add = add

    def in_flight(self, begun_before_s: float | None = None) -> list[Work]:
        """Those that are not over; only those that were begun before that time, if one is given.
        From any thread.
        """
        works = copy_of(self._works)
        if begun_before_s is not None:
            works = [work for work in works if work.since_s <= begun_before_s]
        return [work for work in works if not work.has_ended()]


@contextlib.contextmanager
def noting(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, this thread stands in the collective `what`, of `group` if known."""
    thread = get_ident()
    around = _AROUND.get(thread)
    _AROUND[thread] = what, time.monotonic(), group, "", None
    try:
        yield
    finally:
        _AROUND[thread] = around


def host_waits() -> list[Waiting]:
    """The threads that stand in a collective now. From any thread."""
    innermost = dict(copy_of(_AROUND.items()))
    innermost.update((thread, wait) for thread, wait in copy_of(WAITS.items()) if wait is not None)
    return [Waiting(thread, *wait) for thread, wait in innermost.items() if wait is not None]


class Reports:
    """What ranks were last found to do and to wait for, in words.

    `ask`: has them asked now, and waits a moment; set by who can.
    """

    def __init__(self) -> None:
        self._latest = 0.0, ""
        self._failed_s = -_MOMENT_S
        self.ask: Callable[[], None] = lambda: None

    def keep(self, asked_s: float, text: str) -> None:
        """The ranks were asked then (`time.monotonic`), with this result."""
        self._latest = asked_s, text

    def latest(self, since_s: float = 0.0) -> tuple[float, str]:
        """When the ranks were asked, and the result, which is empty if they were not from `since_s`
        on.
        """
        at_s, text = self._latest
        return (at_s, text) if at_s >= since_s else (at_s, "")

    def of_failure(self) -> str:
        """That for a collective of this thread which has failed: made while it waited, or now, or
        for another failure a moment ago; empty if there is none.
        """
        now_s = time.monotonic()
        wait = WAITS.get(thread := get_ident()) or _AROUND.get(thread)
        since_s = now_s if wait is None else wait[1]
        if now_s - self._failed_s < _MOMENT_S:
            since_s = min(since_s, self._failed_s)
        elif not self.latest(since_s)[1]:
            self._failed_s = now_s
            self.ask()
        return self.latest(since_s)[1]


REPORTS = Reports()
"""Those that this process has made or read."""


def copy_of(values: Iterable[T]) -> list[T]:
    """`values`, to which another thread may add meanwhile."""
    while True:
        try:
            return list(values)
        except RuntimeError:
            continue
