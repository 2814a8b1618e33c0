"""Many numbers in a few."""

import math
from collections.abc import Iterable, Mapping, Sequence

from ...sharding.arguments import require_count


class QuickStats:
    """How many of the numbers >= 0 that were recorded are 0, and how large the others are.

    Keeps the last `max_size` others for their quantiles; counts and the largest are of all.

        >>> stats = QuickStats()
        >>> stats.record([0.0, 0.5, 1.5])
        >>> str(stats)
        '3 recorded, 66.7 % not 0: mean 1, 95 % up to 1.5, max 1.5'
    """

    def __init__(self, max_size: int = 100_000) -> None:
        require_count("max_size", max_size)
        self.count = 0
        self.num_zero = 0
        self.largest = 0.0
        self._max_size = max_size
        self._others: list[float] = []

    def record(self, numbers: Iterable[float]) -> None:
        """Add `numbers`; a NaN counts as infinity."""
        for number in numbers:
            self.count += 1
            if number == 0:
                self.num_zero += 1
                continue
            number = math.inf if math.isnan(number) else number
            self.largest = max(self.largest, number)
            if len(self._others) < self._max_size:
                self._others.append(number)
            else:
                self._others[(self.count - self.num_zero - 1) % self._max_size] = number

    def combine(self, others: Iterable["QuickStats"]) -> None:
        """Add what `others` have recorded, such as those of other ranks."""
        for other in others:
            self.record(other._others)
            self.count += other.count - len(other._others)  # zeros, and what was not kept
            self.num_zero += other.num_zero
            self.largest = max(self.largest, other.largest)

    def quantile(self, share: float) -> float:
        """Of those kept that are not 0, in [0, 1]; NaN where there are none."""
        ordered = sorted(self._others)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

    def __str__(self) -> str:
        if not self.count:
            return "nothing recorded"
        share = 100 * (self.count - self.num_zero) / self.count
        if not self._others:
            return f"{self.count} recorded, all 0"
        mean = math.fsum(self._others) / len(self._others)
        return (
            f"{self.count} recorded, {share:.1f} % not 0: mean {mean:.3g}, "
            f"95 % up to {self.quantile(0.95):.3g}, max {self.largest:.3g}"
        )


def report_of(every: Sequence[Mapping[str, QuickStats]]) -> str:
    """A line for each name in the maps of `every` rank, over all of them."""
    lines = []
    for name in sorted({name for one in every for name in one}):
        stats = QuickStats()
        stats.combine(one[name] for one in every if name in one)
        lines.append(f"{name}: {stats}")
    return "\n".join(lines)
