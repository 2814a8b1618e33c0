"""Lanes run work beside the compute: a CUDA stream with events, or a backend's own asynchronous
operations.

    lane          where work runs              its event
    StreamLane    CUDA streams of its own      the current stream waits; the host does not
    DeferredLane  the caller starts it, the    `advance` waits for operations and runs the other
                  backend goes on (CPU)        stages in the caller, `wait` for the last ones too
    SerialLane    the caller, to the end       nothing left to wait for

A work is a list of stages. Each begins operations, and the next one needs them to have ended. The
first stage alone reads what the caller owns, such as gradients; the others work in memory of the
lane. Each lane runs its work in order of submission, after all compute the caller had enqueued. On
CPU there is no worker thread: with as many compute threads as cores it has no core to run on, and
handing over a job costs more than packing a small unit.

Buffers that a work writes are allocated inside it: then their memory is the lane's own, and
whatever fills it at once comes after its last owner. Tensors from other streams that it reads must
stay referenced until its event advanced, or the caching allocator hands their memory to the compute
stream too early. Memory of a lane that the compute stream has read is freed after
`LaneStreams.catch_up`.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from ..buffers import Streams
from .collectives import Pending
from .in_flight import Started, WorkLog
from .ranges import ranged

Stage = Callable[[], Sequence[Pending]]


class Event(Protocol):
    """The end of one submitted work."""

    def advance(self) -> None:
        """Order the caller's following compute after the first stage. What the work has leased may
        go to the lane's next work then: all its stages have run, or are ahead of it on the stream.
        """

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
    streams: tuple[torch.cuda.Stream, ...]
    """Those that own memory which its stages allocate; none on a CPU."""

    def submit(self, what: str, *stages: Stage) -> Event:
        """Run the stages after the compute enqueued so far; returns their end. `what` names the
        work in traces.
        """


class _Staged:
    """Stages that run in the caller."""

    __slots__ = ("_before", "_pending", "_stages", "_started")

    def __init__(
        self, started: Started, stages: Sequence[Stage], before: deque[_Staged] | None = None
    ) -> None:
        """Run stages until one has operations under way. before: works of the lane with stages
        left, oldest first, which this one joins.
        """
        self._started = started
        self._stages = list(stages)
        self._pending: Sequence[Pending] = ()
        while self._stages and not self._pending:
            self._pending = ranged("start", started.what, self._stages.pop(0))
        self._before: deque[_Staged] = deque() if before is None else before
        if self._stages:
            self._before.append(self)

    def advance(self) -> None:
        # The lane's older works first, used or not: ranks may use them in different orders, and
        # each would wait for an operation that another one starts after its own.
        while self._stages and self._before:
            self._before.popleft().run_stages()
        self.run_stages()

    def run_stages(self) -> None:
        """Run what is left, but for the end of its last operations."""
        while self._stages:
            self._finish_pending()
            self._pending = ranged("complete", self._started.what, self._stages.pop(0))

    def wait(self) -> None:
        self.advance()
        self._finish_pending()
        self._started.ended = True

    def abandon(self, deadline: float) -> None:
        for operation in self._pending:
            # No longer than that: an error that ends a process must not wait for dead peers.
            rest = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            with contextlib.suppress(Exception):
                operation.wait_at_most(rest)
        self._pending = ()
        self._stages.clear()
        self._started.ended = True

    def _finish_pending(self) -> None:
        for operation in self._pending:
            operation.wait()
        self._pending = ()


DONE = _Staged(Started("nothing", 0.0, ended=True), ())
"""An event that has already happened."""


class DeferredLane:
    """Runs stages in the caller until one has operations under way, the others when the event is
    advanced or waited for.
    """

    # The caller pays for the sum whenever it runs: when it runs before the next exchange starts,
    # one pair of buffers is enough, and what arrived is still in the caches.
    max_exchanges = 1
    streams: tuple[torch.cuda.Stream, ...] = ()

    def __init__(self) -> None:
        self.log = WorkLog()
        self._unfinished: deque[_Staged] = deque()

    def submit(self, what: str, *stages: Stage) -> Event:
        """Run the first stage now."""
        started = self.log.begin(what)
        try:
            return _Staged(started, stages, self._unfinished)
        except BaseException:
            started.ended = True
            raise


class SerialLane(DeferredLane):
    """Runs work in the caller to its end: no overlap at all."""

    def submit(self, what: str, *stages: Stage) -> Event:
        """Run all of the work now."""
        super().submit(what, *stages).wait()
        return DONE


class _StreamEvent:
    __slots__ = ("_device", "_first_stage", "_last_stage")

    def __init__(
        self, first_stage: torch.cuda.Event, last_stage: torch.cuda.Event, device: torch.device
    ) -> None:
        self._first_stage = first_stage
        self._last_stage = last_stage
        self._device = device

    def advance(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._first_stage)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._last_stage)

    def abandon(self, deadline: float) -> None:
        """What the lane writes is its own, but it may read what goes: the host need not wait."""
        self.wait()


class StreamLane:
    """Enqueues work on a CUDA stream of its own: the next work's first stage follows the last
    stage of the one before.

    `pipelined`: on two streams in turn. One work may sum what has arrived while the next one's
    operations are on the wire, which takes the buffers of two works.
    """

    def __init__(self, device: torch.device, *, pipelined: bool = False) -> None:
        self.max_exchanges = 2 if pipelined else 1
        self._device = device
        # High priority: a gather or a sum that starts late leaves the whole backward waiting.
        self.streams = tuple(
            torch.cuda.Stream(device, priority=-1) for _ in range(self.max_exchanges)
        )
        self._turns = itertools.cycle(self.streams)
        self.log = WorkLog(on_gpu=True)

    def submit(self, what: str, *stages: Stage) -> Event:
        """Enqueue the stages after all that the current stream holds."""
        stream = next(self._turns)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        started = self.log.begin(what)
        with torch.cuda.stream(stream):
            try:
                _Staged(started, stages[:1]).wait()
                first_stage = last_stage = stream.record_event()
                if len(stages) > 1:
                    _Staged(started, stages[1:]).wait()
                    last_stage = stream.record_event()
            except BaseException:
                started.event = stream.record_event()
                raise
        started.event = last_stage
        return _StreamEvent(first_stage, last_stage, self._device)


def make_lane(device: torch.device, overlap: bool | str) -> Lane:
    """A lane for gathers or for reductions. `overlap`: False, True, or "pipelined", which is True
    on a CPU.
    """
    if not overlap:
        return SerialLane()
    if device.type != "cuda":
        return DeferredLane()
    return StreamLane(device, pipelined=overlap == "pipelined")


class LaneStreams(Streams):
    """The streams that own what stages of `lanes` allocate."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = [lane.streams for lane in lanes if lane.streams]

    def current(self) -> Hashable:
        """The current stream."""
        return torch.cuda.current_stream(self._lanes[0][0].device) if self._lanes else None

    def catch_up(self) -> None:
        """All of them wait for the compute enqueued so far.

        Memory that is freed may be unmapped (expandable segments do so when memory runs out) as
        soon as the stream that allocated it has passed, whoever else reads it. Inside a stage it
        belongs to streams of that lane, which has waited for the compute: they wait for each other.
        """
        if not self._lanes:
            return
        current = torch.cuda.current_stream(self._lanes[0][0].device)
        lane = next((streams for streams in self._lanes if current in streams), None)
        befores = lane or (current,)
        owners = lane or tuple(stream for streams in self._lanes for stream in streams)
        for event, before in [(stream.record_event(), stream) for stream in befores]:
            for owner in owners:
                if owner != before:
                    owner.wait_event(event)
