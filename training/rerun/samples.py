"""How large results have been, for who asks whether one is unexpectedly large."""

from typing import Any

import torch
from torch import Tensor

from .validation import Result


class Samples:
    """The largest magnitude among the first results of each context; no host waits for it."""

    def __init__(self) -> None:
        self._largest: dict[str, tuple[int, Tensor]] = {}

    def is_unexpectedly_large(
        self, result: Result, threshold: float, context: str, num_samples: int, *, resample: bool
    ) -> Tensor:
        """See `RerunStateMachine.is_unexpectedly_large`."""
        magnitude = torch.as_tensor(result).detach().abs().double().max()
        count, largest = self._largest.get(context, (0, torch.zeros_like(magnitude)))
        if resample:
            count, largest = 0, torch.zeros_like(magnitude)
        largest = largest.to(magnitude.device)
        is_large = ~magnitude.isfinite()
        if count >= num_samples:
            self._largest[context] = count, largest
            return is_large | (magnitude > threshold * largest)
        newest = torch.where(is_large, 0.0, magnitude)
        self._largest[context] = count + 1, torch.maximum(largest, newest)
        return is_large

    def copy(self) -> "Samples":
        """The same so far; what comes to one of them does not come to the other."""
        other = Samples()
        other._largest = dict(self._largest)
        return other

    def plain(self) -> tuple[Any, ...]:
        """For a checkpoint; waits for the device."""
        return tuple((name, n, float(x)) for name, (n, x) in self._largest.items())

    @classmethod
    def from_plain(cls, plain: tuple[Any, ...]) -> "Samples":
        """As `plain` says."""
        samples = cls()
        samples._largest = {
            name: (count, torch.tensor(largest, dtype=torch.float64))
            for name, count, largest in plain
        }
        return samples
