"""How many microbatches a step has: the scheduled batch, divided over ranks and microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from ...sharding.arguments import require_count, require_flag, require_kind
from .batch_schedule import BatchSchedule


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Of one step.

    Attributes:
        global_batch_size: what the schedule says.
        running_global_batch_size: how many samples the step has in fact, over all ranks; what
            consumed samples grow by.
        num_microbatches: of each rank; 0 where too few samples are left for one.
    """

    global_batch_size: int
    running_global_batch_size: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCalculator:
    """Microbatches of every step, from how many samples the steps before it have consumed.

        calculator = MicrobatchCalculator(
            schedule=BatchSchedule.parse("0:64 10M:128"), micro_batch_size=4, data_parallel_size=8
        )
        calculator.at(0).num_microbatches  # 2

    A batch has whole microbatches of all ranks: a size that is no multiple of
    `micro_batch_size * data_parallel_size` is refused once its phase is reached, so that a run may
    go on with ranks that an earlier phase was too small for.

    Attributes:
        schedule: the global batch size.
        micro_batch_size: samples of one forward and backward on one rank.
        data_parallel_size: ranks with samples of their own.
        decrease_batch_size_if_needed: round sizes down to such multiples instead.
        total_samples: how many there are, None for no end. The last step has the whole microbatches
            that are left, and its losses and gradients are averaged over so many; what remains
            then, less than `micro_batch_size * data_parallel_size` samples, is left out.

    Raises:
        ValueError, TypeError: sizes that are no counts, no schedule, or one of which no phase can
            run.
    """

    schedule: BatchSchedule
    micro_batch_size: int
    data_parallel_size: int
    decrease_batch_size_if_needed: bool = False
    total_samples: int | None = None

    def __post_init__(self) -> None:
        require_kind(
            "schedule", self.schedule, BatchSchedule, "pass such as BatchSchedule.constant(64)"
        )
        require_count("micro_batch_size", self.micro_batch_size)
        require_count("data_parallel_size", self.data_parallel_size)
        require_flag("decrease_batch_size_if_needed", self.decrease_batch_size_if_needed)
        if self.total_samples is not None:
            require_count("total_samples", self.total_samples, 0)
        sizes = [phase.batch_size for phase in self.schedule.phases]
        if not any(self._running(size) for size in sizes):
            self._require_running(sizes[-1])

    @property
    def samples_per_microbatch(self) -> int:
        """Of all ranks together."""
        return self.micro_batch_size * self.data_parallel_size

    def at(self, consumed_samples: int) -> Microbatches:
        """The microbatches of the step that begins when `consumed_samples` are consumed.

        Raises:
            ValueError, TypeError: no count, or the batch size of this phase cannot be divided.
        """
        batch_size = self.schedule.at(consumed_samples)
        running = self._require_running(batch_size)
        if self.total_samples is not None:
            left = max(self.total_samples - consumed_samples, 0)
            running = min(running, left - left % self.samples_per_microbatch)
        return Microbatches(batch_size, running, running // self.samples_per_microbatch)

    def consumed_before(self, step: int) -> int:
        """How many samples the steps before `step`, counted from 1, have consumed, if all were
        divided as now: sizes that are decreased depend on the ranks. At most `total_samples`: those
        that are left out at the end count.

        Raises:
            ValueError, TypeError: as `BatchSchedule.consumed_before`.
        """
        multiple = self.samples_per_microbatch if self.decrease_batch_size_if_needed else 1
        consumed = self.schedule.consumed_before(step, multiple_of=multiple)
        return consumed if self.total_samples is None else min(consumed, self.total_samples)

    def _running(self, batch_size: int) -> int:
        """What of a batch runs; 0 for one that cannot."""
        rest = batch_size % self.samples_per_microbatch
        return batch_size - rest if self.decrease_batch_size_if_needed or not rest else 0

    def _require_running(self, batch_size: int) -> int:
        running = self._running(batch_size)
        if running:
            return running
        below = batch_size // self.samples_per_microbatch * self.samples_per_microbatch
        nearest = [size for size in (below, below + self.samples_per_microbatch) if size]
        raise ValueError(
            "expected a global batch size that is a multiple of micro_batch_size * "
            f"data_parallel_size = {self.micro_batch_size} * {self.data_parallel_size} = "
            f"{self.samples_per_microbatch}, got {batch_size}; take "
            f"{' or '.join(map(str, nearest))}"
        )
