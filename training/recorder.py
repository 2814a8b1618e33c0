"""Records the losses and times of a run's steps and passes them on to whoever shows them."""

import math
import statistics
import time

import torch
from torch import Tensor

from .progress import Reporter
from .result import peak_memory_mib


class Recorder:
    """Losses and times of the steps so far; reads a loss one step late, so that a GPU is never
    waited for.
    """

    def __init__(self, reporter: Reporter, device: torch.device, tokens_per_step: int) -> None:
        self.reporter = reporter
        self.loss_first: float | None = None
        self.loss_last = math.nan
        self._device = device
        self._tokens_per_step = tokens_per_step
        self._step_s: list[float] = []
        self._pending: tuple[int, Tensor] | None = None
        self._started = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the next one's time."""
        self._started = time.perf_counter()

    def finish_step(self, step: int, loss: Tensor) -> None:
        """Record one step, whose loss may still be on its way, and show the one before it."""
        self.flush()
        now = time.perf_counter()
        self._step_s.append(now - self._started)
        self._started = now
        self._pending = (step, loss)

    def flush(self) -> None:
        """Read and show the loss that is still pending."""
        if self._pending is None:
            return
        step, loss = self._pending
        self._pending = None
        self.loss_last = float(loss.item())
        if self.loss_first is None:
            self.loss_first = self.loss_last
        self.reporter.step(step, self.loss_last, self.tokens_per_s, peak_memory_mib(self._device))

    @property
    def step_ms_median(self) -> float:
        """Median time of a step in milliseconds."""
        return 1000 * statistics.median(self._step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over the median time of a step."""
        return 1000 * self._tokens_per_step / self.step_ms_median
