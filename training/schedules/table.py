"""A schedule at the steps that tell most of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .batch_schedule import BatchSchedule
from .param_schedule import ParamSchedule

_PARTS = 8
_MAX_SIZES = 32


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """What an update uses, and how many samples those before it have consumed. Step 0 is no update,
    but what an optimizer has before the first.
    """

    step: int
    lr: float
    weight_decay: float
    batch_size: int
    consumed_samples: int


def telling_steps(schedule: ParamSchedule, batches: BatchSchedule, last_step: int) -> list[int]:
    """Return 0, ends, corners, where batch sizes change (of many changes, 32 of them), and every
    eighth of the run; ascending.
    """
    warmup, horizon = schedule.lr_warmup_steps, schedule.lr_decay_steps
    corners = [0, 1, warmup, horizon, horizon + 1, schedule.wd_incr_steps]
    if schedule.wsd_decay_steps is not None:
        corners.append(horizon - schedule.wsd_decay_steps)
    begun = [phase.step for phase in takewhile(lambda one: one.step <= last_step, batches.begun())]
    corners += begun[:: -(-len(begun) // _MAX_SIZES)]
    parts = (last_step * part // _PARTS for part in range(_PARTS + 1))
    return sorted({step for step in (*corners, *parts) if 0 <= step <= last_step})


def even_steps(last_step: int, count: int) -> list[int]:
    """Return `count` steps from 1 to the last, as even as whole numbers are, some of them twice."""
    return [1 + (last_step - 1) * index // max(count - 1, 1) for index in range(count)]


def rows_at(
    schedule: ParamSchedule, batches: BatchSchedule, steps: Iterable[int]
) -> Sequence[ScheduleRow]:
    """Return a row for each of `steps`."""
    rows = []
    for step in steps:
        consumed = batches.consumed_before(max(step, 1))
        rows.append(ScheduleRow(step, *schedule.at(step), batches.at(consumed), consumed))
    return rows
