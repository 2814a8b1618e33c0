"""The options of schedules on a command line: declared once, for every command that has them, and
what they mean where they are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from .errors import OptionsError
from .option_fields import check_each, count, flag, option
from .schedules import LR_STYLES, SHARES, WD_STYLES, BatchSchedule, ParamSchedule
from .schedules.batch_schedule import read_batch_schedule

T = TypeVar("T")

WARMUP_SHARE = 0.1
MAX_WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.1
WSD_SHARE = 0.1
WEIGHT_DECAY = 0.1
RUN, SCHEDULES = "the run", "schedules"

# The option of a field of `ParamSchedule`.
_FIELDS = MappingProxyType(
    {
        "init_lr": "init_lr",
        "max_lr": "lr",
        "min_lr": "min_lr",
        "lr_warmup_steps": "warmup_steps",
        "lr_decay_steps": "decay_steps",
        "lr_decay_style": "lr_schedule",
        "start_wd": "weight_decay",
        "end_wd": "end_weight_decay",
        "wd_incr_steps": "weight_decay_steps",
        "wd_incr_style": "weight_decay_style",
        "wsd_decay_steps": "wsd_decay_steps",
        "lr_wsd_decay_style": "wsd_decay_style",
    }
)
_NAMES = re.compile(rf"\b({'|'.join(_FIELDS)})\b")


def _rate(default: float | None, text: str, **what: Any) -> Any:
    bounds = {"least": 0, "below": math.inf} | what
    return option(default, text, group=SCHEDULES, kind=float, metavar="X", defines=True, **bounds)


def _steps(text: str, least: int = 1, **what: Any) -> Any:
    return count(None, text, group=SCHEDULES, least=least, defines=True, **what)


def _style(default: str | None, text: str, styles: Any, **what: Any) -> Any:
    return option(default, text, group=SCHEDULES, choices=tuple(styles), defines=True, **what)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """How long a run is, how large its steps are, and how its rates change."""

    steps: int = count(200, "optimizer steps", group=RUN, defines=True)
    batch: int = count(
        16, "sequences per step, over all ranks and microbatches", group=RUN, defines=True
    )
    seq_len: int = count(128, "bytes per sequence", group=RUN, defines=True)
    lr: float = option(
        2e-3,
        "peak learning rate",
        group=RUN,
        kind=float,
        metavar="X",
        above=0,
        below=math.inf,
        defines=True,
    )
    lr_schedule: str = _style("cosine", "course of the learning rate", LR_STYLES)
    init_lr: float = _rate(0.0, "learning rate that the warm-up begins at")
    min_lr: float | None = _rate(None, "learning rate at the end (default: a tenth of --lr)")
    warmup_steps: int | None = _steps(
        "steps up to --lr (default: a tenth of --decay-steps, at most 100)", least=0
    )
    decay_steps: int | None = _steps("step that reaches --min-lr (default: --steps)")
    wsd_decay_steps: int | None = _steps(
        "steps of the tail of WSD (default: a tenth of --decay-steps)"
    )
    wsd_decay_style: str | None = _style(
        None, "shape of the tail of WSD (default: exponential)", SHARES
    )
    weight_decay: float = _rate(WEIGHT_DECAY, "weight decay at the start")
    end_weight_decay: float | None = _rate(
        None, "weight decay at the end (default: as at the start)"
    )
    weight_decay_steps: int | None = _steps(
        "step that reaches it (default: --decay-steps)", needs="end_weight_decay"
    )
    weight_decay_style: str | None = _style(
        None,
        "course of the weight decay (default: linear where it changes)",
        WD_STYLES,
        needs="end_weight_decay",
    )
    batch_ramp: str | None = option(
        None,
        "batch sizes: 'THRESHOLD:SIZE THRESHOLD:SIZE ...', such as '0:16 10K:32', or 'START "
        "INCREMENT SAMPLES' up to --batch; K, M, B, T stand for thousands and so on; microbatches "
        "are those of --batch",
        group=SCHEDULES,
        metavar="RAMP",
        defines=True,
    )
    batch_ramp_unit: str = option(
        "samples",
        "what RAMP counts",
        group=SCHEDULES,
        choices=("samples", "tokens"),
        defines=True,
        needs="batch_ramp",
    )

    def __post_init__(self) -> None:
        """Refuse what no run can have.

        Raises:
            OptionsError: a value outside its range.
        """
        check_each(self)


def schedule_of(options: ScheduleOptions) -> ParamSchedule:
    """Return the learning rate and weight decay of a run.

    Raises:
        OptionsError: the options do not fit each other; the text names them.
    """
    values = _meant(options)
    return _told_as_options(
        lambda: ParamSchedule(**{name: values[option] for name, option in _FIELDS.items()})
    )


def batch_schedule_of(options: ScheduleOptions) -> BatchSchedule:
    """Return the batch sizes of a run.

    Raises:
        OptionsError: the ramp cannot be read; the text says at which character.
    """
    seq_length = options.seq_len if options.batch_ramp_unit == "tokens" else None
    try:
        return read_batch_schedule(options.batch_ramp, options.batch, seq_length=seq_length)
    except ValueError as error:
        raise OptionsError(f"--batch-ramp: {error}") from error


def _meant(options: ScheduleOptions) -> dict[str, Any]:
    """The options that make a schedule, those that were left out too."""
    steps = _or(options.decay_steps, options.steps)
    warmup = options.warmup_steps
    if warmup is None:
        warmup = min(MAX_WARMUP_STEPS, max(1, int(steps * WARMUP_SHARE)))
        if options.decay_steps is None:
            # A run of one step has its warm-up alone.
            steps = max(steps, warmup + 1)
    is_wsd = options.lr_schedule == "WSD"
    if options.wsd_decay_style is not None and not is_wsd:
        raise OptionsError(
            "expected --lr-schedule WSD beside --wsd-decay-style, got "
            f"{options.lr_schedule}; give both, or leave out --wsd-decay-style"
        )
    end_weight_decay = _or(options.end_weight_decay, options.weight_decay)
    is_constant = end_weight_decay == options.weight_decay
    tail = max(1, min(int(steps * WSD_SHARE), steps - warmup))
    return {
        "init_lr": options.init_lr,
        "lr": options.lr,
        "min_lr": _or(options.min_lr, options.lr * FINAL_LR_SHARE),
        "warmup_steps": warmup,
        "decay_steps": steps,
        "lr_schedule": options.lr_schedule,
        "wsd_decay_steps": _or(options.wsd_decay_steps, tail if is_wsd else None),
        "wsd_decay_style": _or(options.wsd_decay_style, "exponential" if is_wsd else None),
        "weight_decay": options.weight_decay,
        "end_weight_decay": end_weight_decay,
        "weight_decay_steps": _or(options.weight_decay_steps, steps),
        "weight_decay_style": _or(
            options.weight_decay_style, "constant" if is_constant else "linear"
        ),
    }


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _told_as_options(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        text = _NAMES.sub(lambda found: flag(_FIELDS[found[0]]), str(error))
        raise OptionsError(text) from error
