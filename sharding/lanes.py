"""Lanes run work beside the compute: a CUDA stream with events, or a worker thread with futures.

    lane          where work runs                     its event's `wait`
    StreamLane    a CUDA stream of its own            the current stream waits; the host does not
    ThreadLane    one worker thread (CPU)             the caller blocks; an error in the work is raised there
    InlineLane    the caller, which starts its        the caller blocks until the started operations end
                  asynchronous operations (CPU)
    SerialLane    the caller, to the end              nothing left to wait for

Work is a function that returns the operations it started and did not wait for. Each lane runs its work in
order of submission, after all compute the caller had enqueued. Buffers that a work writes are allocated
inside `allocating()`; tensors from other streams that it reads must stay referenced until its event was
waited for, or the caching allocator hands their memory to the compute stream too early.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch

from .collectives import Pending

Work = Callable[[], Sequence[Pending]]


class Event(Protocol):
    """The end of one submitted work."""

    def wait(self) -> None:
        """Order the caller's following compute after the work."""


class Lane(Protocol):
    """Runs submitted work in order. `runs_to_end`: work has ended when its function returns."""

    runs_to_end: bool

    def submit(self, work: Work) -> Event:
        """Run `work` after the compute enqueued so far; returns its end."""

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """A context whose allocations belong to this lane."""


class _Started:
    """Operations still to be waited for."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Iterable[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = ()


DONE = _Started(())
"""An event that has already happened."""


class InlineLane:
    """Runs work in the caller; the operations it starts go on by themselves (gloo's own threads)."""

    runs_to_end = True

    def submit(self, work: Work) -> Event:
        """Run `work` now; the event waits for the operations it started."""
        return _Started(work())

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """No special context."""
        return contextlib.nullcontext()


class SerialLane(InlineLane):
    """Runs work in the caller to its end: no overlap at all."""

    def submit(self, work: Work) -> Event:
        """Run `work` now and wait for all it started."""
        _Started(work()).wait()
        return DONE


class _Job:
    """A work on its way through a ThreadLane, and its event."""

    __slots__ = ("_done", "_error", "_work")

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        # A bare lock is the cheapest event there is: held until the work has ended.
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        assert self._work is not None
        try:
            for pending in self._work():
                pending.wait()
        except BaseException as error:  # noqa: BLE001 - carried to whoever waits
            self._error = error
        finally:
            self._work = None
            self._done.release()

    def wait(self) -> None:
        with self._done:
            pass
        if self._error is not None:
            raise self._error


def _serve(queue: SimpleQueue[_Job | None]) -> None:
    torch.set_grad_enabled(False)
    while (job := queue.get()) is not None:
        job.run()
        # Held over the next `get`, it would keep the job's tensors alive.
        del job


class ThreadLane:
    """Runs work on one worker thread, which ends when the lane is collected."""

    runs_to_end = True

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        weakref.finalize(self, self._queue.put, None)
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def submit(self, work: Work) -> Event:
        """Queue `work`; its error, if any, is raised by the event's `wait`."""
        job = _Job(work)
        self._queue.put(job)
        return job

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """No special context: the caller allocates."""
        return contextlib.nullcontext()


class _StreamEvent:
    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamLane:
    """Enqueues work on a CUDA stream of its own."""

    runs_to_end = False

    def __init__(self, device: torch.device) -> None:
        # High priority: a gather or a sum that starts late leaves the whole backward waiting.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Work) -> Event:
        """Enqueue `work` after all that the current stream holds."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for pending in work():
                pending.wait()
            return _StreamEvent(self._stream.record_event())

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Allocations belong to this lane's stream."""
        return torch.cuda.stream(self._stream)


def gather_lane(device: torch.device, overlap: bool) -> Lane:
    """The lane for parameter gathers."""
    if not overlap:
        return SerialLane()
    return StreamLane(device) if device.type == "cuda" else InlineLane()


def reduce_lane(device: torch.device, world_size: int, overlap: bool) -> Lane:
    """The lane for packing, exchanging and summing gradients."""
    if not overlap:
        return SerialLane()
    if device.type == "cuda":
        return StreamLane(device)
    # Alone, there is nothing to hide: a thread would only cost its hand-over.
    return ThreadLane("sidestream-reduce") if world_size > 1 else SerialLane()
