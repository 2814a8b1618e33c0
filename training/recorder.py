"""Records the figures and times of a run's steps and passes them on to whoever shows them.

    clock          a step ends when              its figures
    HostClock      the host has called it (CPU)  are read when the next step has ended
    StreamClock    the GPU has run it            are copied to pinned memory, read after an event

The host enqueues steps ahead of a GPU: who reads a loss at once drains the GPU each step.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .measures.clocks import clock_of
from .progress import Reporter
from .result import peak_memory_mib


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
    """A step that was enqueued: its number, its figures on the host, its first and last moment."""

    number: int
    figures: Figures
    start: Any
    end: Any


class Recorder:
    """Figures and times of the steps so far. Shows a step after a later one was recorded and once
    the device has done it, and never makes the host wait but in `flush`.
    """

    def __init__(self, reporter: Reporter, device: torch.device, tokens_per_step: int) -> None:
        self.reporter = reporter
        self.loss_first: float | None = None
        self.loss_last = math.nan
        self.first_nonfinite: int | None = None
        """The first step with a figure that is NaN or infinite."""
        self._device = device
        self._clock = clock_of(device)
        self._tokens_per_step = tokens_per_step
        self._step_s: list[float] = []
        self._pending: deque[_Step] = deque()
        self._started = self._clock.mark()

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the next one's time."""
        self._started = self._clock.mark()

    def finish_step(self, number: int, figures: Figures) -> None:
        """Record one step, which may still be on its way, and show those before it that are not."""
        on_host = Figures(figures.names, self._clock.on_host(figures.values))
        end = self._clock.mark()
        while self._pending and self._clock.has_passed(self._pending[0].end):
            self._show_next()
        self._pending.append(_Step(number, on_host, self._started, end))
        self._started = end

    def flush(self) -> None:
        """Wait for the steps that are still on their way, and show them."""
        while self._pending:
            self._clock.wait(self._pending[0].end)
            self._show_next()

    def _show_next(self) -> None:
        step = self._pending.popleft()
        self._step_s.append(self._clock.seconds(step.start, step.end))
        values = dict(zip(step.figures.names, step.figures.values.tolist(), strict=True))
        self.loss_last = values["loss"]
        if self.loss_first is None:
            self.loss_first = self.loss_last
        if self.first_nonfinite is None and not all(map(math.isfinite, values.values())):
            self.first_nonfinite = step.number
        peak_mib = peak_memory_mib(self._device)
        self.reporter.step(step.number, self.loss_last, self.tokens_per_s, peak_mib)

    @property
    def step_ms_median(self) -> float:
        """Median time of a step that was shown, in milliseconds."""
        return 1000 * statistics.median(self._step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over the median time of a step."""
        return 1000 * self._tokens_per_step / self.step_ms_median
