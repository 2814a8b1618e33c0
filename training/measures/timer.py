"""One named timer: its starts and stops, on the host and on the device, and what they add up to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .clocks import Clock
from .timings import Reading, reading_of

# Occurrences that noise is judged by; and how many may be on their way before a stop asks which of
# them have passed, so that most stops ask the device nothing.
RECENT = 64
LATE = 16


@dataclass(slots=True)
class Scope:
    """What the timers of a rank share: clocks (`device`: None on a CPU), the highest log level
    that is measured, whom barriers wait for (None: the job), and the region that is open.
    """

    host: Clock
    device: Clock | None
    log_level: int
    barrier_group: dist.ProcessGroup | None
    innermost: Timer | None = None

    def barrier(self) -> None:
        """Wait for the ranks of the group, where there are any."""
        if dist.is_initialized():
            dist.barrier(self.barrier_group)


class Timer:
    """The occurrences of one path, `name`. As a context it starts and stops itself, and what
    `Timers.region` is asked for inside is below its path, in `inner`. `log_level`: what it was made
    with.
    """

    __slots__ = (
        "_began",
        "_began_mark",
        "_count",
        "_device",
        "_earlier_s",
        "_elapsed_s",
        "_host",
        "_host_s",
        "_outer",
        "_pending",
        "_recent",
        "_scope",
        "_uncounted",
        "inner",
        "log_level",
        "name",
    )

    def __init__(self, name: str, log_level: int, scope: Scope) -> None:
        self.name = name
        self.log_level = log_level
        self._scope = scope
        self._host, self._device = scope.host, scope.device
        self.inner: dict[str, AnyTimer] = {}
        self._outer: Timer | None = None
        self._began: Any = None
        self._began_mark: Any = None
        # Since the last reset; and all before it.
        self._count, self._elapsed_s, self._host_s = 0, 0.0, 0.0
        self._earlier_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        # Host seconds and two marks of what the device has not done yet, as far as is known; the
        # first `_uncounted` were before the last reset.
        self._pending: deque[tuple[float, Any, Any]] = deque()
        self._uncounted = 0

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._began is not None

    def start(self, barrier: bool = False) -> None:
        """Begin an occurrence; `barrier`: once every rank is here.

        Raises:
            RuntimeError: it is running.
        """
        if self._began is not None:
            raise RuntimeError(
                f"timer '{self.name}': expected a timer that is stopped, got a second start; call "
                "stop() before it starts again"
            )
        if barrier:
            self._scope.barrier()
        if self._device is not None:
            self._began_mark = self._device.mark()
        self._began = self._host.mark()

    def stop(self, barrier: bool = False) -> None:
        """End the occurrence; `barrier`: once every rank is here.

        Raises:
            RuntimeError: it is not running.
        """
        if self._began is None:
            raise RuntimeError(
                f"timer '{self.name}': expected a timer that was started, got a stop without a "
                "start; call start() before each stop()"
            )
        if barrier:
            self._scope.barrier()
        host_s = self._host.seconds(self._began, self._host.mark())
        self._began = None
        if self._device is None:
            self._add(host_s, host_s)
        else:
            self._enqueue(self._device, host_s)

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds of all occurrences since the last reset, and of the one that is running, which
        goes on. On a GPU it waits until the last of them is over. `barrier`: see `start`.

        Raises:
            RuntimeError: it has never been started.
        """
        if running := self.is_running:
            self.stop(barrier)
        elif barrier:
            self._scope.barrier()
        self.settle(wait=True)
        if not self._recent:
            raise RuntimeError(
                f"timer '{self.name}': expected a timer that has run, got one that was never "
                "started, or only while a CUDA graph was captured; call start() and stop() first"
            )
        elapsed_s = self._elapsed_s
        if reset:
            self.reset()
        if running:
            self.start()
        return elapsed_s

    def active_time(self) -> float:
        """Seconds of all occurrences that are known to be over; resets do not change it."""
        self.settle()
        return self._earlier_s + self._elapsed_s

    def reset(self) -> None:
        """Let `elapsed` begin anew, also for what the device has yet to do."""
        self.forget()
        self._uncounted = len(self._pending)

    def forget(self) -> None:
        """Leave what is known by now out of the next reading, and nothing else."""
        self._earlier_s += self._elapsed_s
        self._count, self._elapsed_s, self._host_s = 0, 0.0, 0.0

    def settle(self, *, wait: bool = False) -> None:
        """Add up the occurrences that have passed on the device; `wait`: all of them."""
        device = self._device
        while device is not None and self._pending:
            host_s, first, last = self._pending[0]
            if wait:
                device.wait(last)
            elif not device.has_passed(last):
                return
            self._pending.popleft()
            self._add(device.seconds(first, last), host_s)
            device.release(first)
            device.release(last)

    def reading(self) -> Reading | None:
        """What is known since the last reading; None where nothing is.

        Raises:
            RuntimeError: it is running.
        """
        if self.is_running:
            raise RuntimeError(
                f"timer '{self.name}': expected timers that are stopped, got one that is still "
                "running; stop it before it is read, or name the others in names="
            )
        self.settle()
        if not self._count:
            return None
        return reading_of(self._elapsed_s, self._host_s, self._count, self._recent)

    def _enqueue(self, device: Clock, host_s: float) -> None:
        first, last = self._began_mark, device.mark()
        if first is None or last is None:
            # A CUDA graph is captured: what runs inside is not done now, and to ask for an event
            # would end the capture.
            for mark in (first, last):
                if mark is not None:
                    device.release(mark)
            return
        self._pending.append((host_s, first, last))
        if len(self._pending) > LATE:
            self.settle()

    def _add(self, seconds: float, host_s: float) -> None:
        self._recent.append(seconds)
        if self._uncounted:
            self._uncounted -= 1
            self._earlier_s += seconds
            return
        self._count += 1
        self._elapsed_s += seconds
        self._host_s += host_s

    def __enter__(self) -> Timer:
        scope = self._scope
        self.start()
        self._outer, scope.innermost = scope.innermost, self
        return self

    def __exit__(self, *_: object) -> None:
        scope = self._scope
        if scope.innermost is not self:
            found = scope.innermost.name if scope.innermost else "no region"
            raise RuntimeError(
                f"timer '{self.name}': expected regions to end in the reverse order of their "
                f"beginning, got its end while {found} is the innermost; end that first, and give "
                "each thread Timers of its own"
            )
        scope.innermost = self._outer
        self.stop()


class UnmeasuredTimer:
    """Of a name above the log level: it takes the same calls and has no times. Regions that are
    opened inside it are below the path around it.
    """

    __slots__ = ("_scope", "inner", "log_level", "name")

    def __init__(self, name: str, log_level: int, scope: Scope) -> None:
        self.name = name
        self.log_level = log_level
        self._scope = scope
        self.inner: dict[str, AnyTimer] = {}

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """It has none.

        Raises:
            RuntimeError: always; the text says why there is no time.
        """
        raise RuntimeError(
            f"timer '{self.name}': expected a log level up to {self._scope.log_level}, which these "
            f"timers measure, got {self.log_level}; make them with Timers(log_level="
            f"{self.log_level})"
        )

    def active_time(self) -> float:
        """It has none; raises as `elapsed` does."""
        return self.elapsed()

    def __enter__(self) -> UnmeasuredTimer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


AnyTimer = Timer | UnmeasuredTimer
