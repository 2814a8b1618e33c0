"""Two or more candidates timed on a machine that others use too: in pairs, by medians, with an
interval.

    two candidates:    A B B A A B B A ...    pair k = k-th call of A with k-th call of B
    three candidates:  A B C C B A A B C ...
    many candidates:   each round in an order drawn anew

Drift of the machine falls on both members of a pair, so a ratio of pairs is steadier than a ratio
of means. The interval is a percentile bootstrap of the median. Times are seconds unless a name says
otherwise; all but `frozen_heap` is pure.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# Two launches of the same code on a busy machine differ by this much, so a smaller difference is
# not a result.
RESOLUTION = 0.05
CONFIDENCE, RESAMPLES = 0.95, 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with the interval it is known to; `num_samples` is what it was taken from."""

    median: float
    low: float
    high: float
    num_samples: int

    def describe(self, *, digits: int = 3) -> str:
        """`median [low, high]`."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what lives now out of the garbage collector's walks."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def alternating_order(candidates: Sequence[T], rounds: int) -> Iterator[T]:
    """Every candidate once a round, each round in the reverse order of the one before."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; ask for one round or more.")
    for index in range(rounds):
        yield from candidates if index % 2 == 0 else reversed(candidates)


def shuffled_order(candidates: Sequence[T], rounds: int, *, seed: int = 0) -> Iterator[T]:
    """Every candidate once a round, each round in an order of its own; the same for the same seed.

    For more than a few candidates: none always follows the same other.
    """
    generator = random.Random(seed)
    for _ in range(rounds):
        yield from generator.sample(candidates, k=len(candidates))


def pair_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """`numerators[k] / denominators[k]` for every pair k."""
    _check_pairs(numerators, denominators)
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def pair_differences(minuends: Sequence[float], subtrahends: Sequence[float]) -> list[float]:
    """`minuends[k] - subtrahends[k]` for every pair k."""
    _check_pairs(minuends, subtrahends)
    return [first - second for first, second in zip(minuends, subtrahends, strict=True)]


def estimate_median(samples: Sequence[float]) -> Estimate:
    """Median of `samples` and its percentile-bootstrap interval; the same samples give the same.

    Raises ValueError for no samples.
    """
    return estimate_median_of_launches([samples])


def estimate_median_of_launches(launches: Sequence[Sequence[float]]) -> Estimate:
    """Median over all launches together; the bootstrap draws launches first and then samples within
    each.

    Samples of one launch share its luck (placement of memory, neighbours), so drawing them as if
    they were independent would give too narrow an interval. With one launch this is the ordinary
    bootstrap.
    """
    if not launches or any(not samples for samples in launches):
        raise ValueError(
            "every launch needs at least one sample, got "
            f"{[len(samples) for samples in launches]}; measure at least one pair in each."
        )
    generator = random.Random(0)
    medians = []
    for _ in range(RESAMPLES):
        drawn: list[float] = []
        for samples in generator.choices(launches, k=len(launches)):
            drawn.extend(generator.choices(samples, k=len(samples)))
        medians.append(statistics.median(drawn))
    medians.sort()
    tail = (1.0 - CONFIDENCE) / 2.0
    everything = [sample for samples in launches for sample in samples]
    return Estimate(
        median=statistics.median(everything),
        low=medians[round(tail * (RESAMPLES - 1))],
        high=medians[round((1.0 - tail) * (RESAMPLES - 1))],
        num_samples=len(everything),
    )


def compare_with_limit(ratio: Estimate, limit: float) -> str:
    """`met`, `missed`, or `unclear` where the interval of the ratio spans the limit."""
    if ratio.high <= limit:
        return "met"
    return "missed" if ratio.low > limit else "unclear"


def _check_pairs(first: Sequence[float], second: Sequence[float]) -> None:
    if len(first) != len(second):
        raise ValueError(
            f"pairs need as many samples on both sides, got {len(first)} and {len(second)}; "
            "measure the candidates in the same rounds."
        )
