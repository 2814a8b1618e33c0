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
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import torch

from ..buffers import Streams
from .collectives import Pending
from .in_flight import EnqueuedWork, WorkLog
from .ranges import is_profiling, ranged

Stage = Callable[[], Sequence[Pending]]


class Event(Protocol):
    """The end of one submitted work. `has_failed`: an error ended one of its stages, in `advance`
    or `wait`, so those after it do not run.
    """

    has_failed: bool

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

    __slots__ = (
        "_before",
        "_left",
        "_pending",
        "_stages",
        "ended",
        "has_failed",
        "since_s",
        "what",
    )

    def __init__(
        self, what: str, stages: Sequence[Stage], log: WorkLog, before: deque[_Staged]
    ) -> None:
        """Run stages until one has operations under way, or the last is left. before: works of the
        lane with stages left, oldest first, which this one joins.
        """
        self.what = what
        self.since_s = time.monotonic()
        self.ended = self.has_failed = False
        self._stages = stages
        self._left = len(stages)
        self._pending: Sequence[Pending] = []
        self._before = before
        log.add(self)
        # The last one waits for who asks for the end: after a backward that failed, sums that
        # nobody has asked for were not added.
        while not self._pending and (self._left > 1 or self._left == len(stages) > 0):
            self._run("start")
        if self._left:
            before.append(self)

    def has_ended(self) -> bool:
        return self.ended

    def advance(self) -> None:
        # The lane's older works first, used or not: ranks may use them in different orders, and
        # each would wait for an operation that another one starts after its own.
        while self._left and self._before:
            self._before.popleft().run_stages()
        self.run_stages()

    def run_stages(self) -> None:
        """Run what is left, but for the end of its last operations."""
        while self._left:
            self._finish_pending()
            self._run("complete")

    def wait(self) -> None:
        if self._left:
            self.advance()
        if self._pending:
            self._finish_pending()
        self.ended = True

    def _run(self, verb: str) -> None:
        stage = self._stages[-self._left]
        self._left -= 1
        if not self._left:
            self._stages = ()  # they refer to who holds this
        try:
            self._pending = ranged(verb, self.what, stage) if is_profiling() else stage()
        except BaseException:
            self._stages, self._left = (), 0
            self.ended = self.has_failed = True
            raise

    def abandon(self, deadline: float) -> None:
        for operation in self._pending:
            # No longer than that: an error that ends a process must not wait for dead peers.
            rest = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            with contextlib.suppress(Exception):
                operation.wait_at_most(rest)
        self._pending, self._stages, self._left = (), (), 0
        self.ended = True

    def _finish_pending(self) -> None:
        for operation in self._pending:
            operation.wait()
        self._pending = ()


DONE = _Staged("nothing", (), WorkLog(), deque())
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
        return _Staged(what, stages, self.log, self._unfinished)


class SerialLane(DeferredLane):
    """Runs work in the caller to its end: no overlap at all."""

    def submit(self, what: str, *stages: Stage) -> Event:
        """Run all of the work now."""
        work = super().submit(what, *stages)
        try:
            work.wait()
        except BaseException:
            work.abandon(time.monotonic())  # nobody else has it
            raise
        return DONE


class _StreamEvent:
    __slots__ = ("_device", "_first_stage", "_last_stage")
    has_failed = False  # all stages run in `submit`

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
        work = EnqueuedWork(what, time.monotonic())
        self.log.add(work)
        with torch.cuda.stream(stream):
            try:
                _enqueue(what, stages[:1])
                first_stage = last_stage = stream.record_event()
                if len(stages) > 1:
                    _enqueue(what, stages[1:])
                    last_stage = stream.record_event()
            except BaseException:
                work.event = stream.record_event()
                raise
        work.event = last_stage
        return _StreamEvent(first_stage, last_stage, self._device)


def _enqueue(what: str, stages: Sequence[Stage]) -> None:
    for place, stage in enumerate(stages):
        verb = "complete" if place else "start"
        pending = ranged(verb, what, stage) if is_profiling() else stage()
        for operation in pending:
            operation.wait()


def make_lane(device: torch.device, overlap: bool | str) -> Lane:
    """A lane for gathers or for reductions. `overlap`: False, True, or "pipelined", which is True
    on a CPU.
    """
    if not overlap:
        return SerialLane()
    if device.type != "cuda":
        return DeferredLane()
    return StreamLane(device, pipelined=overlap == "pipelined")


@contextlib.contextmanager
def recorded(lanes: Sequence[Lane], device: torch.device) -> Iterator[None]:
    """Inside, a CUDA graph that the current stream records has the work of `lanes` too.

    Their streams join it first: the first wait for one that had not would lead out of the graph.
    All of them end before it, whoever waits for their works: `catch_up` leaves streams behind that
    nobody waits for, and a graph that does not end with its own stream is refused.
    """
    current = torch.cuda.current_stream(device)
    streams = [stream for lane in lanes for stream in lane.streams]
    with contextlib.ExitStack() as logs:
        for lane in lanes:
            logs.enter_context(lane.log.paused())
        for stream in streams:
            stream.wait_stream(current)
        yield
        for stream in streams:
            current.wait_stream(stream)


class LaneStreams(Streams):
    """The streams that own what stages of `lanes` allocate: at least one."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = [lane.streams for lane in lanes if lane.streams]
        self._device = self._lanes[0][0].device

    def current(self) -> Hashable:
        """The current stream."""
        return torch.cuda.current_stream(self._device)

    def catch_up(self) -> None:
        """All of them wait for the compute enqueued so far.

        Memory that is freed may be unmapped (expandable segments do so when memory runs out) as
        soon as the stream that allocated it has passed, whoever else reads it. Inside a stage it
        belongs to streams of that lane, which has waited for the compute: they wait for each other.
        """
        current = torch.cuda.current_stream(self._device)
        lane = next((streams for streams in self._lanes if current in streams), None)
        befores = lane or (current,)
        owners = lane or tuple(stream for streams in self._lanes for stream in streams)
        for event, before in [(stream.record_event(), stream) for stream in befores]:
            for owner in owners:
                if owner != before:
                    owner.wait_event(event)
