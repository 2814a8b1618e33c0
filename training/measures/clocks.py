"""Moments of what a device is given to do, and the seconds between them.

clock          a moment is over when         a mark is
HostClock      the host has come by (CPU)    nanoseconds of `time.perf_counter_ns`
StreamClock    the GPU has come by           a CUDA event in the current stream, from a pool
"""

import time
from typing import Any, Protocol

import torch
from torch import Tensor


class Clock(Protocol):
    """Marks moments in what a device is given to do; a mark is its own clock's."""

    def mark(self) -> Any:
        """The moment after all that was enqueued so far; None where there are no moments, as
        while a CUDA graph is captured.
        """

    def has_passed(self, mark: Any) -> bool:
        """Whether `mark` is over; does not wait."""

    def wait(self, mark: Any) -> None:
        """Return once `mark` is over."""

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two marks that are over."""

    def release(self, mark: Any) -> None:
        """Take back a mark that nobody asks about any more."""

    def on_host(self, value: Tensor) -> Tensor:
        """A scalar's copy on the host, readable once a later mark is over."""


class HostClock:
    """Of a CPU, where what was called has been done."""

    mark = staticmethod(time.perf_counter_ns)

    def has_passed(self, mark: int) -> bool:
        """It always has."""
        return True

    def wait(self, mark: int) -> None:
        """Nothing to wait for."""

    def seconds(self, first: int, last: int) -> float:
        """Seconds between two marks."""
        return (last - first) / 1e9

    def release(self, mark: int) -> None:
        """Nothing to take back."""

    def on_host(self, value: Tensor) -> Tensor:
        """The scalar itself."""
        return value


class StreamClock:
    """Of a GPU's current stream."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event | None:
        """An event in the current stream; None while that is captured into a CUDA graph, where an
        event would become a part of the graph and never tell a time.
        """
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has come by the event."""
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Block the host until the stream comes by the event."""
        mark.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """The GPU's seconds between two events."""
        return first.elapsed_time(last) / 1000

    def release(self, mark: torch.cuda.Event) -> None:
        """Record the event anew for a later mark."""
        self._spare.append(mark)

    def on_host(self, value: Tensor) -> Tensor:
        """A copy in memory that torch pins, since it does not block."""
        return value.to("cpu", non_blocking=True, copy=True)


def clock_of(device: torch.device) -> Clock:
    """The clock of what is computed on `device`."""
    return StreamClock() if device.type == "cuda" else HostClock()
