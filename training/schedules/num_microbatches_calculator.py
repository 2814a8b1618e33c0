"""Megatron-Core's functions of the same names over one calculator, for code that wants globals.

    from sidestream.training.schedules import num_microbatches_calculator
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank, global_batch_size=64, micro_batch_size=4, data_parallel_size=8
    )
    num_microbatches_calculator.get_num_microbatches()  # 2

The one place of `schedules` that keeps state of its own: which calculator, and how far the run is.
All else takes a `MicrobatchCalculator`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from ...sharding.arguments import require_count
from .batch_schedule import RAMP_NUMBERS, BatchSchedule
from .microbatches import MicrobatchCalculator

P = ParamSpec("P")

_logger = logging.getLogger("sidestream")


@dataclass(slots=True)
class _State:
    calculator: MicrobatchCalculator | None = None
    consumed_samples: int = 0
    is_telling: bool = False


_state = _State()


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    *,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
    total_samples: int | None = None,
) -> None:
    """Make the calculator that the other functions ask, in place of the one that may be there; the
    run is at its first sample.

    Args:
        rank: the rank of this process; 0 logs what `update_num_microbatches` finds, if asked.
        rampup_batch_size: start, increment and samples of a ramp-up to `global_batch_size`.
        global_batch_size: of the whole run, or at the end of the ramp-up; None with a step
            schedule, whose last size it may also be.
        micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, total_samples: as
            `MicrobatchCalculator` has them.
        step_batch_size_schedule, seq_length: as `BatchSchedule.parse` reads them.

    Raises:
        ValueError, TypeError: as `MicrobatchCalculator` and `BatchSchedule`; two schedules at once.
    """
    schedule = _schedule_of(
        rampup_batch_size, global_batch_size, step_batch_size_schedule, seq_length
    )
    require_count("micro_batch_size", micro_batch_size)
    require_count("data_parallel_size", data_parallel_size)
    assert micro_batch_size is not None and data_parallel_size is not None, "they are counts"
    _state.calculator = MicrobatchCalculator(
        schedule=schedule,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        decrease_batch_size_if_needed=decrease_batch_size_if_needed,
        total_samples=total_samples,
    )
    _state.consumed_samples, _state.is_telling = 0, rank == 0


def _once(configure: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(configure, assigned=())
    def initialize(*args: P.args, **options: P.kwargs) -> None:
        """As `reconfigure_num_microbatches_calculator`, where there is no calculator yet.

        Raises:
            RuntimeError: there is one already.
            ValueError, TypeError: as that function does.
        """
        if _state.calculator is not None:
            raise RuntimeError(
                "expected no calculator yet, got a second one; call "
                "destroy_num_microbatches_calculator() first, or "
                "reconfigure_num_microbatches_calculator for another one"
            )
        configure(*args, **options)

    return initialize


init_num_microbatches_calculator = _once(reconfigure_num_microbatches_calculator)


def destroy_num_microbatches_calculator() -> None:
    """Forget the calculator, if there is one; another one can be made then."""
    _state.calculator = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Tell how many samples are consumed; the getters are of the step that begins there.

    Args:
        consumed_samples: over all ranks.
        consistency_check: refuse a batch size that cannot be divided at once, and not where its
            microbatches are asked for.
        verbose: have rank 0 log a size that has changed.

    Raises:
        RuntimeError: there is no calculator.
        ValueError, TypeError: no count, or a size that cannot be divided; nothing has changed then.
    """
    calculator = _calculator()
    before = calculator.schedule.at(_state.consumed_samples)
    now = calculator.schedule.at(consumed_samples)
    if consistency_check:
        calculator.at(consumed_samples)
    _state.consumed_samples = consumed_samples
    if verbose and _state.is_telling and now != before:
        _logger.info("global batch size: %d, until now %d", now, before)


def get_num_microbatches() -> int:
    """Microbatches of each rank in this step.

    Raises:
        RuntimeError: there is no calculator.
        ValueError: the batch size of this phase cannot be divided.
    """
    return _calculator().at(_state.consumed_samples).num_microbatches


def get_current_global_batch_size() -> int:
    """The scheduled batch size of this step; raises RuntimeError where there is no calculator."""
    return _calculator().schedule.at(_state.consumed_samples)


def get_current_running_global_batch_size() -> int:
    """How many samples this step has in fact; raises as `get_num_microbatches`."""
    return _calculator().at(_state.consumed_samples).running_global_batch_size


def get_micro_batch_size() -> int:
    """Samples of a microbatch on a rank; raises RuntimeError where there is no calculator."""
    return _calculator().micro_batch_size


def _calculator() -> MicrobatchCalculator:
    if _state.calculator is None:
        raise RuntimeError(
            "expected a calculator, got none; call init_num_microbatches_calculator first"
        )
    return _state.calculator


def _schedule_of(
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int | None,
    step_batch_size_schedule: str | None,
    seq_length: int | None,
) -> BatchSchedule:
    if step_batch_size_schedule is not None:
        schedule = BatchSchedule.parse(step_batch_size_schedule, seq_length=seq_length)
        last = schedule.phases[-1].batch_size
        if rampup_batch_size is not None or global_batch_size not in (None, last):
            raise ValueError(
                f"expected step_batch_size_schedule alone, got rampup_batch_size="
                f"{rampup_batch_size} and global_batch_size={global_batch_size} beside it; leave "
                "them out"
            )
        return schedule
    require_count("global_batch_size", global_batch_size)
    assert global_batch_size is not None, "it is a count"
    if rampup_batch_size is None:
        return BatchSchedule.constant(global_batch_size)
    if len(rampup_batch_size) != RAMP_NUMBERS:
        raise ValueError(
            "expected start, increment and samples as rampup_batch_size, got "
            f"{list(rampup_batch_size)}; pass such as [16, 16, 1_000_000]"
        )
    return BatchSchedule.ramp_up(*rampup_batch_size, final=global_batch_size)
