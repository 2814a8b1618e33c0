"""Records the figures and times of a run's steps and passes them on to whoever shows them.

    clock          a step ends when              its figures
    HostClock      the host has called it (CPU)  are read when the next step has ended
    StreamClock    the GPU has run it            are copied to pinned memory, read after an event

The host enqueues steps ahead of a GPU: who reads a loss at once drains the GPU each step.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .measures import MetricsWriter, SeveralWriters, clock_of
from .progress import Reporter
from .result import peak_memory_mib

NO_WRITER = SeveralWriters(())
NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step is told by: names, and as many FP32 values in a 1-D tensor on the device, which
    nobody waits for.
    """

    names: tuple[str, ...]
    values: Tensor

    @classmethod
    def of(cls, **figures: Tensor) -> "Figures":
        """Scalars of any dtype by name; "loss" is one of them."""
        return cls(tuple(figures), torch.stack([value.float() for value in figures.values()]))


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was enqueued: its number, its tokens, its figures on the host and those that were
    known before, its first and last moment.
    """

    number: int
    tokens: int
    figures: Figures
    known: Mapping[str, float]
    start: Any
    end: Any


class Recorder:
    """Figures and times of the steps so far. Shows a step after a later one was recorded and once
    the device has done it, and never makes the host wait but in `flush`.
    """

    def __init__(
        self, reporter: Reporter, device: torch.device, writer: MetricsWriter = NO_WRITER
    ) -> None:
        self.reporter = reporter
        self.tokens = 0
        """Of the steps that were shown."""
        self.loss_first: float | None = None
        self.loss_last = math.nan
        self.first_nonfinite: int | None = None
        """The first step with a figure that is NaN or infinite."""
        self._device = device
        self._clock = clock_of(device)
        self._writer = writer
        # Sorted: each step asks for a median, and to sort a million anew takes half a second.
        self._step_s: list[float] = []
        self._tokens_per_s: list[float] = []
        self._pending: deque[_Step] = deque()
        self._started = self._clock.mark()

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the next one's time."""
        self._started = self._clock.mark()

    @property
    def num_steps(self) -> int:
        """How many steps were shown."""
        return len(self._step_s)

    def finish_step(
        self, number: int, tokens: int, figures: Figures, known: Mapping[str, float] = NOTHING
    ) -> None:
        """Record one step, which may still be on its way, and show those before it that are not.

        known: figures that need no device, by name, which are written with the others.
        """
        on_host = Figures(figures.names, self._clock.on_host(figures.values))
        end = self._clock.mark()
        self.show_passed()
        self._pending.append(_Step(number, tokens, on_host, known, self._started, end))
        self._started = end

    def show_passed(self) -> None:
        """Show the steps that are over, and wait for none."""
        while self._pending and self._clock.has_passed(self._pending[0].end):
            self._show_next()

    def flush(self) -> None:
        """Wait for the steps that are still on their way, and show them."""
        while self._pending:
            self._clock.wait(self._pending[0].end)
            self._show_next()
        self._writer.flush()

    def _show_next(self) -> None:
        step = self._pending.popleft()
        step_s = self._clock.seconds(step.start, step.end)
        tokens_per_s = step.tokens / step_s
        insort(self._step_s, step_s)
        insort(self._tokens_per_s, tokens_per_s)
        self.tokens += step.tokens
        values = dict(zip(step.figures.names, step.figures.values.tolist(), strict=True))
        self.loss_last = values["loss"]
        if self.loss_first is None:
            self.loss_first = self.loss_last
        if self.first_nonfinite is None and not all(map(math.isfinite, values.values())):
            self.first_nonfinite = step.number
        peak_mib = peak_memory_mib(self._device)
        self.reporter.step(step.number, self.loss_last, self.tokens_per_s, peak_mib)
        measured = {"step_ms": 1000 * step_s, "tokens_per_s": tokens_per_s}
        for name, value in {**values, **step.known, **measured, "peak_mib": peak_mib}.items():
            self._writer.add_scalar(name, value, step.number)

    @property
    def step_ms_median(self) -> float:
        """Median time of a step that was shown, in milliseconds."""
        return 1000 * _median_of_sorted(self._step_s)

    @property
    def tokens_per_s(self) -> float:
        """Median of the tokens over time of each step that was shown."""
        return _median_of_sorted(self._tokens_per_s)


def _median_of_sorted(values: Sequence[float]) -> float:
    middle = len(values) // 2
    return (values[middle] + values[-1 - middle]) / 2
