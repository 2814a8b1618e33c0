"""Joules of a run, lap by lap, paused where work should not count.

    monitor = EnergyMonitor(device, local_rank=place.local_rank)
    monitor.setup()
    ...                                  # steps, each of them with
    monitor.keep_up()                    # which costs nothing but before a counter comes round
    lap = monitor.lap()                  # of this rank, nobody is asked
    print(lap, lap.per(num_tokens))      # "312.0 J", joules a token; or "unavailable: ...", None
    print(monitor.lap_over_ranks())      # of all ranks; each of them calls it
    monitor.shutdown()

A counter that cannot be read makes the lap and the total unavailable, which is said and never 0.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..across_ranks import gathered
from .energy_sources import EnergySource, EnergyUnavailable, source_of

# In which states a monitor may do what.
_ALLOWED = {
    "setup": ("new", "shut down"),
    "pause": ("running",),
    "resume": ("paused",),
    "keep_up": ("running", "paused"),
    "lap": ("running", "paused"),
    "get_total": ("running", "paused", "shut down"),
    "shutdown": ("running", "paused"),
}


@dataclass(frozen=True, slots=True)
class Energy:
    """joules: what was used, None where that is not known. counter: what counted it. remark: why
    it is not known, or what must be known about it.
    """

    joules: float | None
    counter: str
    remark: str = ""

    def per(self, count: float) -> float | None:
        """Joules of each of `count` steps or tokens; None where they are not known.

        Raises:
            ValueError: the count is not above zero.
        """
        if not count > 0:
            raise ValueError(
                f"count: expected a number of steps or tokens above 0, got {count!r}; ask after "
                "the first one"
            )
        return None if self.joules is None else self.joules / count

    def __str__(self) -> str:
        if self.joules is None:
            return f"unavailable: {self.remark}"
        return f"{self.joules:.1f} J" + (f" ({self.remark})" if self.remark else "")


@dataclass(slots=True)
class _Sum:
    """Joules so far, and why they are not all; empty where they are."""

    joules: float = 0.0
    unknown: str = ""


class EnergyMonitor:
    """Reads the counter of this rank's device; the file's first lines show its use.

    device: whose energy it is: a GPU's own; on a CPU that of the host's packages, which belongs to
    the rank whose `local_rank` is 0, while the other ranks there have none. source: another
    counter.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        local_rank: int = 0,
        source: EnergySource | None = None,
    ) -> None:
        self._source: EnergySource = source or source_of(
            torch.device(device), local_rank=local_rank, host_name=platform.node()
        )
        self._state = "new"
        self._refusal = ""
        self._lap, self._total = _Sum(), _Sum()
        # The latest reading, None where it failed, and when it was made.
        self._last_j: float | None = None
        self._last_s = 0.0

    @property
    def unavailable(self) -> str:
        """Why the lap's energy is not known; empty where it is."""
        return self._lap.unknown

    def setup(self) -> None:
        """Find the counter and begin; where there is none, `unavailable` says why.

        Raises:
            RuntimeError: it is set up.
        """
        self._require("setup")
        self._lap, self._total, self._refusal = _Sum(), _Sum(), ""
        try:
            self._source.open()
        except EnergyUnavailable as error:
            self._refusal = str(error)
        self._begin()

    def shutdown(self) -> None:
        """Count what was used by now, and leave the counter; `get_total` still tells it.

        Raises:
            RuntimeError: it is not set up.
        """
        self._require("shutdown")
        self._count()
        self._state = "shut down"
        if not self._refusal:
            self._source.close()

    def pause(self) -> None:
        """Count nothing from now on.

        Raises:
            RuntimeError: it is not running.
        """
        self._require("pause")
        self._count()
        self._state = "paused"

    def resume(self) -> None:
        """Count again.

        Raises:
            RuntimeError: it is not paused.
        """
        self._require("resume")
        self._begin()

    def keep_up(self) -> None:
        """Read the counter if it could otherwise come round unseen, as those of CPUs do within
        minutes; a call is due more often than that, such as each step.

        Raises:
            RuntimeError: it is not set up.
        """
        self._require("keep_up")
        if time.monotonic() - self._last_s > self._source.max_gap_s / 2:
            self._count()

    def lap(self) -> Energy:
        """What this rank used since the last lap, without its pauses.

        Raises:
            RuntimeError: it is not set up.
        """
        self._require("lap")
        self._count()
        lap = self._lap
        # A lap that begins with no reading will have no sum either.
        self._lap = _Sum(unknown=lap.unknown if self._last_j is None else "")
        return self._energy(lap)

    def get_total(self) -> Energy:
        """What this rank used since `setup`, without its pauses.

        Raises:
            RuntimeError: it was never set up.
        """
        self._require("get_total")
        self._count()
        return self._energy(self._total)

    def lap_over_ranks(self, group: dist.ProcessGroup | None = None) -> Energy:
        """The sum of the laps of all ranks of `group` (None: of the job); each of them calls it.

        Raises:
            RuntimeError: it is not set up.
            CommunicationError: a rank is gone.
        """
        return sum_over_ranks(self.lap(), group)

    def _require(self, act: str) -> None:
        if self._state not in _ALLOWED[act]:
            raise RuntimeError(
                f"{act}: expected an energy monitor that is {' or '.join(_ALLOWED[act])}, got one "
                f"that is {self._state}; call setup, pause, resume and shutdown in that order"
            )

    def _begin(self) -> None:
        self._state = "running"
        self._read()

    def _count(self) -> None:
        if self._state != "running":
            return
        first_j, first_s = self._last_j, self._last_s
        self._read()
        if first_j is None or self._last_j is None:
            return
        if self._last_j < first_j:
            self._fail(f"{self._source.key} went back from {first_j} J to {self._last_j} J")
        elif (since_s := self._last_s - first_s) > self._source.max_gap_s:
            self._fail(
                f"{self._source.key} can begin anew within {self._source.max_gap_s:.0f} s and was "
                f"not read for {since_s:.0f} s; call keep_up() each step"
            )
        for each in (self._lap, self._total):
            each.joules += self._last_j - first_j

    def _read(self) -> None:
        self._last_s = time.monotonic()
        try:
            if self._refusal:
                raise EnergyUnavailable(self._refusal)
            self._last_j = self._source.read_joules()
        except EnergyUnavailable as error:
            self._last_j = None
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        for each in (self._lap, self._total):
            each.unknown = each.unknown or reason

    def _energy(self, total: _Sum) -> Energy:
        if total.unknown:
            return Energy(None, self._source.key, total.unknown)
        return Energy(total.joules, self._source.key, self._source.remark)


def sum_over_ranks(energy: Energy, group: dist.ProcessGroup | None = None) -> Energy:
    """The sum of what the ranks of `group` (None: of the job) have; each of them calls it. A
    counter that several ranks read, as those that share a GPU do, is counted once: the most that
    one of them has. Where one rank's is not known, the sum is not.

    Raises:
        CommunicationError: a rank is gone.
    """
    return _sum_of(gathered(energy, group, "sum of the energy over the ranks"))


def _sum_of(ranks: Sequence[Energy]) -> Energy:
    by_counter: dict[str, Energy] = {}
    for rank, energy in enumerate(ranks):
        if energy.joules is None:
            return Energy(None, energy.counter, f"rank {rank}: {energy.remark}")
        most = by_counter.get(energy.counter, energy)
        by_counter[energy.counter] = max(most, energy, key=lambda each: each.joules or 0.0)
    counted = by_counter.values()
    remarks = dict.fromkeys(each.remark for each in counted if each.remark)
    joules = sum(each.joules or 0.0 for each in counted)
    return Energy(joules, f"{len(by_counter)} counters", "; ".join(remarks))
