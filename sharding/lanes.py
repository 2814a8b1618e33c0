"""Lanes run work beside the compute: a CUDA stream with events, or a backend's own asynchronous
operations.

    lane          where work runs              its event
    StreamLane    a CUDA stream of its own     the current stream waits; the host does not
    DeferredLane  the caller starts it, the    `advance` waits for the operations and runs the
                  backend goes on (CPU)        rest in the caller, `wait` for what that started
    SerialLane    the caller, to the end       nothing left to wait for

A work is `start`, which begins operations, and `complete`, which needs them to have ended and may
begin more. Each lane runs its work in order of submission, after all compute the caller had
enqueued. On CPU there is no worker thread: with as many compute threads as cores it has no core to
run on, and handing over a job costs more than packing a small unit. Buffers that a work writes are
allocated inside it: then their memory is the lane's own, and whatever fills it at once comes after
its last owner. Tensors from other streams that it reads must stay referenced until its event
advanced, or the caching allocator hands their memory to the compute stream too early.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .collectives import Pending
from .in_flight import Started, WorkLog
from .ranges import ranged

Work = Callable[[], Sequence[Pending]]


class Event(Protocol):
    """The end of one submitted work."""

    def advance(self) -> None:
        """Order the caller's following compute after `start`'s operations and `complete`."""

    def wait(self) -> None:
        """Order the caller's following compute after all of the work."""

    def abandon(self, deadline: float) -> None:
        """Nobody asks for the result, whose memory goes: wait for operations that peers have begun
        too, until `deadline` (`time.monotonic`) at most.
        """


class Lane(Protocol):
    """Runs submitted work in order."""

    max_exchanges: int
    """Exchanges whose buffers may be alive at once; `prefetch` says how far gathers go ahead."""
    log: WorkLog

    def submit(self, what: str, start: Work, complete: Work | None = None) -> Event:
        """Run the work after the compute enqueued so far; returns its end. `what` names it in
        traces.
        """


class _Deferred:
    """Operations under way, and what is to be done after them."""

    __slots__ = ("_complete", "_pending", "_started", "_what")

    def __init__(self, started: Started, start: Work, complete: Work | None = None) -> None:
        """Run `start`."""
        self._started = started
        what = self._what = started.what
        self._pending = ranged("start", what, start)
        self._complete = complete

    def advance(self) -> None:
        if self._complete is not None:
            self._finish_pending()
            complete, self._complete = self._complete, None
            self._pending = ranged("complete", self._what, complete)

    def wait(self) -> None:
        self.advance()
        self._finish_pending()
        self._started.ended = True

    def abandon(self, deadline: float) -> None:
        for operation in self._pending:
            # No longer than that: an error that ends a process must not wait for dead peers.
            rest = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            with contextlib.suppress(Exception):
                operation.work.wait(rest)
        self._pending = ()
        self._started.ended = True

    def _finish_pending(self) -> None:
        for operation in self._pending:
            operation.wait()
        self._pending = ()


DONE = _Deferred(Started("nothing", 0.0, ended=True), tuple)
"""An event that has already happened."""


class DeferredLane:
    """Starts work in the caller; what follows its operations runs when the event is waited for."""

    # The caller pays for the sum whenever it runs: when it runs before the next exchange starts,
    # one pair of buffers is enough, and what arrived is still in the caches.
    max_exchanges = 1

    def __init__(self) -> None:
        self.log = WorkLog()

    def submit(self, what: str, start: Work, complete: Work | None = None) -> Event:
        """Run `start` now."""
        started = self.log.begin(what)
        try:
            return _Deferred(started, start, complete)
        except BaseException:
            started.ended = True
            raise


class SerialLane(DeferredLane):
    """Runs work in the caller to its end: no overlap at all."""

    def submit(self, what: str, start: Work, complete: Work | None = None) -> Event:
        """Run all of the work now."""
        super().submit(what, start, complete).wait()
        return DONE


class _StreamEvent:
    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def advance(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self.advance()

    def abandon(self, deadline: float) -> None:
        """Nothing to do: the memory is the lane's own."""


class StreamLane:
    """Enqueues work on a CUDA stream of its own."""

    # With one, compute would stand still while the exchange before is on the wire.
    max_exchanges = 2

    def __init__(self, device: torch.device) -> None:
        # High priority: a gather or a sum that starts late leaves the whole backward waiting.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.log = WorkLog(on_gpu=True)

    def submit(self, what: str, start: Work, complete: Work | None = None) -> Event:
        """Enqueue the work after all that the current stream holds."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        started = self.log.begin(what)
        with torch.cuda.stream(self._stream):
            try:
                _Deferred(started, start, complete).wait()
            finally:
                started.event = self._stream.record_event()
            return _StreamEvent(started.event, self._stream.device)


def make_lane(device: torch.device, overlap: bool) -> Lane:
    """A lane for gathers or for reductions."""
    if not overlap:
        return SerialLane()
    return StreamLane(device) if device.type == "cuda" else DeferredLane()
