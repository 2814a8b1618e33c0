"""How one call of a kernel is timed on a CPU and on a GPU: cold caches, no host in between.

A call reads what lies in a cache faster than what does not, and a training step finds nothing
there. So each candidate is given its operands many times over, in memory of their own that is more
in all than the last cache holds, and takes one after the other in turn:

    CPU  candidates move along the same rotation, so nobody finds what another one just read;
         a sample is the mean of as many calls as make a millisecond
    GPU  one CUDA graph holds a whole rotation, or more, of a candidate's calls, so the host's time
         does not count; a sample is one replay between two events, while an untimed replay runs

Times are seconds a call.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from ..kernels.case import Operands
from .kernel_cases.competitors import Run
from .reports import CPU_METHOD, EVENTS_METHOD, GRAPH_METHOD

# Twice the cache: what is read again has long been replaced.
CACHE_MULTIPLE = 2
MAX_ROTATED = 256
_DEFAULT_CACHE_BYTES = 64 * 1024 * 1024
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# Short, so that most samples are free of what else the machine does.
SAMPLE_S = 0.001
_WARM_UP_SAMPLES = 25
GRAPH_S = 0.0003
_MAX_CALLS = 10_000
_MAX_GRAPH_CALLS = 512


@dataclass(frozen=True)
class Ticker:
    """Times one candidate: `sample()` is the seconds of one call."""

    sample: Callable[[], float]
    method: str


class Clock(Protocol):
    """How a kind of device is timed, and the bytes of its last cache and of its memory."""

    cache_bytes: int
    memory_bytes: int

    def tickers(
        self, runs: Mapping[str, Sequence[Run]], *, uncaptured: Collection[str] = ()
    ) -> dict[str, Ticker]:
        """One a candidate; `runs` are the same call on rotated operands, equally many for all.

        uncaptured: the candidates whose calls must not become parts of a CUDA graph.
        """

    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""


def clock_of(device: torch.device, *, sample_s: float = SAMPLE_S) -> Clock:
    """The clock of `device`. sample_s: how long a sample on a CPU lasts."""
    return CudaClock(device) if device.type == "cuda" else CpuClock(sample_s)


def num_rotated(num_bytes: int, cache_bytes: int) -> int:
    """How many times operands that lie in `num_bytes` are needed until no cache holds them all."""
    return max(1, min(MAX_ROTATED, math.ceil(CACHE_MULTIPLE * cache_bytes / num_bytes)))


def rotation_of(first: Operands, cache_bytes: int) -> list[Operands]:
    """`first` and as many copies as are needed until no cache holds them all."""
    count = num_rotated(first.footprint_bytes, cache_bytes)
    return [first, *(first.copied() for _ in range(count - 1))]


class CpuClock:
    """`time.perf_counter` around some calls."""

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self.cache_bytes = _largest_cpu_cache()
        self.memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._sample_s = sample_s

    def tickers(
        self, runs: Mapping[str, Sequence[Run]], *, uncaptured: Collection[str] = ()
    ) -> dict[str, Ticker]:
        """As `Clock` has it."""
        rotation = _Rotation()
        return {name: self._ticker(calls, rotation) for name, calls in runs.items()}

    def _ticker(self, runs: Sequence[Run], rotation: _Rotation) -> Ticker:
        end = time.perf_counter() + _WARM_UP_SAMPLES * self._sample_s
        for run in runs:
            run()  # its memory is there before the clock starts
            if time.perf_counter() > end:
                break
        count = 1
        seconds = _timed(runs, rotation, count)
        if seconds < self._sample_s:
            count = min(_MAX_CALLS, math.ceil(self._sample_s / max(seconds, 1e-9)))
        return Ticker(lambda: _timed(runs, rotation, count), CPU_METHOD)

    def synchronize(self) -> None:
        """Nothing runs on its own."""


@dataclass
class _Rotation:
    """Whose turn it is."""

    position: int = 0


def _timed(runs: Sequence[Run], rotation: _Rotation, count: int) -> float:
    size = len(runs)
    calls = [runs[(rotation.position + index) % size] for index in range(count)]
    rotation.position = (rotation.position + count) % size
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / count


class CudaClock:
    """A CUDA graph between two events; events alone around what cannot be captured.

    After a capture that was refused, torch 2.11 refuses every other one of the process, and random
    numbers on the GPU: so none is tried any more, and what is known to wait should be `uncaptured`.
    """

    captures: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self.cache_bytes, self.memory_bytes = properties.L2_cache_size, properties.total_memory

    def tickers(
        self, runs: Mapping[str, Sequence[Run]], *, uncaptured: Collection[str] = ()
    ) -> dict[str, Ticker]:
        """As `Clock` has it."""
        return {
            name: self._ticker(calls, capture=name not in uncaptured)
            for name, calls in runs.items()
        }

    def _ticker(self, runs: Sequence[Run], *, capture: bool) -> Ticker:
        def once() -> None:
            for run in runs:
                run()

        once()  # compiles, and makes the tables of addresses that a capture needs
        seconds = self._between_events(once)
        laps = math.ceil(GRAPH_S / max(seconds, 1e-9))
        laps = max(1, min(laps, _MAX_GRAPH_CALLS // len(runs)))
        graph = self._captured(once, laps) if capture and self.captures else None
        if graph is None:
            return Ticker(lambda: self._between_events(once) / len(runs), EVENTS_METHOD)
        replay, calls = graph.replay, laps * len(runs)
        return Ticker(lambda: self._between_events(replay) / calls, GRAPH_METHOD)

    def _captured(self, once: Callable[[], None], laps: int) -> torch.cuda.CUDAGraph | None:
        """A graph of so many laps; None where the calls refuse, such as by waiting."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph):
                for _ in range(laps):
                    once()
        except torch.OutOfMemoryError:
            raise  # a RuntimeError too, but no refusal
        except RuntimeError:
            CudaClock.captures = False
            torch.cuda.set_stream(stream)  # torch leaves that of the capture current
            torch.cuda.synchronize(self._device)
            return None
        return graph

    def _between_events(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While this runs the host asks for the rest, so the device never waits for the host.
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        """As `Clock` has it."""
        torch.cuda.synchronize(self._device)


def host_microseconds(run: Run, clock: Clock, *, calls: int) -> float:
    """Host time of one call, no waiting for the device, in microseconds."""
    for _ in range(calls // 10 + 1):
        run()
    clock.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    clock.synchronize()
    return elapsed / calls * 1e6


def _largest_cpu_cache() -> int:
    """Bytes of the largest cache that the system tells of."""
    units = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
    sizes = []
    for file in _CPU_CACHES.glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG]?)", file.read_text().strip())
        if found:
            sizes.append(int(found[1]) * units[found[2]])
    return max(sizes, default=_DEFAULT_CACHE_BYTES)
