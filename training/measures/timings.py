"""What the timers of all ranks have told: spreads, lines, JSON, and which rank is late where.

A straggler is a rank whose usual time in a region is beyond that of the others by more than noise:

    usual time   the median of its recent occurrences
    others       the median of the other ranks' usual times
    noise        median absolute deviation of recent occurrences: the rank's own or the ranks'
                 median one, whichever is larger

Time that ranks wait for each other is in the regions of the early ones. So a rank is no straggler
where it is late by what it was early in the regions before, beside this one inside the same region;
and what a rank computes is best given a region of its own. All times are seconds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile

from .writers import TakesScalars

# A median and its deviation say little of fewer.
MIN_OCCURRENCES = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """One timer of one rank. elapsed_s: in all, on the device where there is one; host_s: on the
    host; count: occurrences. median_s, deviation_s, num_recent: of the latest ones, which may be
    older than this reading.
    """

    elapsed_s: float
    host_s: float
    count: int
    median_s: float
    deviation_s: float
    num_recent: int


def reading_of(elapsed_s: float, host_s: float, count: int, recent: Iterable[float]) -> Reading:
    """The reading of totals and of some recent occurrences, at least one."""
    latest = list(recent)
    median_s = statistics.median(latest)
    deviation_s = statistics.median(abs(each - median_s) for each in latest)
    return Reading(elapsed_s, host_s, count, median_s, deviation_s, len(latest))


@dataclass(frozen=True, slots=True)
class Spread:
    """The total times of a region by rank; ranks that have none are left out."""

    by_rank_s: Mapping[int, float]

    @property
    def min_s(self) -> float:
        """The least."""
        return min(self.by_rank_s.values())

    @property
    def max_s(self) -> float:
        """The most."""
        return max(self.by_rank_s.values())

    @property
    def mean_s(self) -> float:
        """The mean of the ranks that have one."""
        return statistics.fmean(self.by_rank_s.values())


# What is shown of a spread, by name.
OPTIONS: dict[str, Callable[[Spread], dict[str, float]]] = {
    "max": lambda spread: {"max": spread.max_s},
    "minmax": lambda spread: {"min": spread.min_s, "max": spread.max_s},
    "mean": lambda spread: {"mean": spread.mean_s},
    "all": lambda spread: {f"rank {rank}": each for rank, each in spread.by_rank_s.items()},
}


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is late in a region; all but the rank in seconds."""

    rank: int
    name: str
    median_s: float
    others_s: float
    noise_s: float

    @property
    def excess_s(self) -> float:
        """How far it is beyond the others."""
        return self.median_s - self.others_s

    def __str__(self) -> str:
        share = f" ({self.excess_s / self.others_s:.0%})" if self.others_s else ""
        times = f"{self.excess_s / self.noise_s:.1f} times the" if self.noise_s else "without"
        return (
            f"straggler: rank {self.rank} in {self.name}, {self.median_s * 1e3:.3f} ms a time, "
            f"{self.excess_s * 1e3:.3f} ms{share} beyond the others, {times} noise"
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Readings by name, rank by rank, and what is shown of them: "max", "minmax", "mean", "all"."""

    ranks: tuple[Mapping[str, Reading], ...]
    log_option: str = "minmax"

    @property
    def names(self) -> tuple[str, ...]:
        """Of all ranks, those of the first rank first."""
        return tuple(dict.fromkeys(name for rank in self.ranks for name in rank))

    def of(self, name: str) -> dict[int, Reading]:
        """The readings of one timer by rank; ranks that have none are left out."""
        return {rank: each[name] for rank, each in enumerate(self.ranks) if name in each}

    def spread(self, name: str) -> Spread:
        """The total times of one timer."""
        return Spread({rank: each.elapsed_s for rank, each in self.of(name).items()})

    def lines(self, normalizer: float = 1.0) -> list[str]:
        """A line a timer, in milliseconds; times are divided by `normalizer`.

        Raises:
            ValueError: it is not above zero.
        """
        return [
            f"{name}: "
            + ", ".join(f"{kind} {seconds * 1e3:.3f} ms" for kind, seconds in shown.items())
            for name, shown in self._shown(normalizer).items()
        ]

    def write(self, writer: TakesScalars, iteration: int, normalizer: float = 1.0) -> None:
        """Give the writer a scalar a timer and kind, tagged such as "timers/step/forward/max_s";
        times are divided by `normalizer`.

        Raises:
            ValueError: it is not above zero.
        """
        for name, shown in self._shown(normalizer).items():
            for kind, seconds in shown.items():
                writer.add_scalar(f"timers/{name}/{kind.replace(' ', '_')}_s", seconds, iteration)

    def to_json(self) -> str:
        """One JSON object: a timer's `min_s`, `max_s` and `mean_s`, and in `ranks` the readings of
        all ranks, null where a rank has none.
        """
        content = {}
        for name in self.names:
            spread, told = self.spread(name), self.of(name)
            content[name] = {
                "min_s": spread.min_s,
                "max_s": spread.max_s,
                "mean_s": spread.mean_s,
                "ranks": [
                    asdict(told[rank]) if rank in told else None for rank in range(len(self.ranks))
                ],
            }
        return json.dumps(content, allow_nan=False)

    def stragglers(self, *, times_noise: float = 5.0, min_share: float = 0.05) -> list[Straggler]:
        """Who is beyond the others by more than so many times the noise, and than so large a share
        of their time, and has not waited for them; the farthest first.
        """
        found = [each for name in self.names for each in _late(name, self.of(name))]
        late = [
            each
            for each in found
            if each.excess_s > max(times_noise * each.noise_s, min_share * each.others_s)
            and not self._has_waited(each, found)
        ]
        return sorted(late, key=lambda each: -each.excess_s)

    def _has_waited(self, late: Straggler, found: Iterable[Straggler]) -> bool:
        """Whether most of what the rank is late by here it was early by before; `found`: each rank
        in each region, by the order of regions.
        """
        outer = late.name.rpartition("/")[0]
        before = takewhile(lambda each: each.name != late.name, found)
        excess_s = sum(
            self._total_excess_s(each)
            for each in before
            if outer and each.name.rpartition("/")[0] == outer and each.rank == late.rank
        )
        return excess_s < -self._total_excess_s(late) / 2

    def _total_excess_s(self, late: Straggler) -> float:
        return late.excess_s * self.ranks[late.rank][late.name].count

    def _shown(self, normalizer: float) -> dict[str, dict[str, float]]:
        if not normalizer > 0:
            raise ValueError(
                f"normalizer: expected a number above 0, got {normalizer!r}; pass by how many "
                "iterations to divide"
            )
        kinds = OPTIONS[self.log_option]
        return {
            name: {kind: seconds / normalizer for kind, seconds in kinds(self.spread(name)).items()}
            for name in self.names
        }


def _late(name: str, told: Mapping[int, Reading]) -> list[Straggler]:
    """Each rank of one region beside the others, late or not."""
    judged = {rank: each for rank, each in told.items() if each.num_recent >= MIN_OCCURRENCES}
    if len(judged) < 2:  # noqa: PLR2004
        return []
    usual_s = sorted(each.median_s for each in judged.values())
    noise_s = statistics.median(each.deviation_s for each in judged.values())
    found = []
    for rank, each in judged.items():
        place = usual_s.index(each.median_s)
        others_s = statistics.median(usual_s[:place] + usual_s[place + 1 :])
        found.append(Straggler(rank, name, each.median_s, others_s, max(noise_s, each.deviation_s)))
    return found
