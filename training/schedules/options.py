"""The options of schedules on a command line: declared once, for every command that has them, and
what they mean where they are left out.

    add_schedule_arguments(parser.add_argument_group("schedules"))
    schedule = schedule_from(vars(parser.parse_args()))

A command has --lr, --steps and --batch of its own, and --seq-len where it knows tokens.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ..errors import OptionsError
from .batch_schedule import BatchSchedule, read_batch_schedule
from .param_schedule import LR_STYLES, SHARES, WD_STYLES, ParamSchedule

T = TypeVar("T")

BATCH_RAMP_UNITS = ("samples", "tokens")
WARMUP_SHARE = 0.1
MAX_WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.1
WSD_SHARE = 0.1
WEIGHT_DECAY = 0.1

# Name, type or choices, metavariable, help. All of them are None where they are left out.
_OPTIONS: tuple[tuple[str, Callable[[str], Any] | tuple[str, ...], str | None, str], ...] = (
    ("lr_schedule", tuple(LR_STYLES), None, "course of the learning rate (default: cosine)"),
    ("min_lr", float, "X", "learning rate at the end (default: a tenth of --lr)"),
    ("init_lr", float, "X", "learning rate that the warm-up begins at (default: 0)"),
    ("warmup_steps", int, "N", "steps up to --lr (default: a tenth of --decay-steps, at most 100)"),
    ("decay_steps", int, "N", "step that reaches --min-lr (default: --steps)"),
    ("wsd_decay_steps", int, "N", "steps of the tail of WSD (default: a tenth of --decay-steps)"),
    ("wsd_decay_style", tuple(SHARES), None, "shape of the tail of WSD (default: exponential)"),
    ("weight_decay", float, "X", f"weight decay at the start (default: {WEIGHT_DECAY})"),
    ("end_weight_decay", float, "X", "weight decay at the end (default: as at the start)"),
    ("weight_decay_steps", int, "N", "step that reaches it (default: --decay-steps)"),
    (
        "weight_decay_style",
        tuple(WD_STYLES),
        None,
        "course of the weight decay (default: linear where it changes)",
    ),
    (
        "batch_ramp",
        str,
        "RAMP",
        "batch sizes: 'THRESHOLD:SIZE THRESHOLD:SIZE ...', such as '0:16 10K:32', or 'START "
        "INCREMENT SAMPLES' up to --batch; K, M, B, T stand for thousands and so on",
    ),
    ("batch_ramp_unit", BATCH_RAMP_UNITS, None, "what RAMP counts (default: samples)"),
)
SCHEDULE_OPTIONS = tuple(name for name, *_ in _OPTIONS)

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


def add_schedule_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare every option of `SCHEDULE_OPTIONS`."""
    for name, kind, metavar, help_text in _OPTIONS:
        kinds: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if metavar:
            kinds["metavar"] = metavar
        group.add_argument(_flag(name), help=help_text, **kinds)


def schedule_from(values: Mapping[str, Any]) -> ParamSchedule:
    """Return the schedule of a run: of `lr`, `steps` and the options of this file, by name.

    Raises:
        OptionsError: the options do not fit each other; the text names them.
    """
    given = {name: value for name, value in values.items() if value is not None}
    values = _defaults(given) | given
    return _told_as_options(
        lambda: ParamSchedule(**{field: values[option] for field, option in _FIELDS.items()})
    )


def batch_schedule_from(values: Mapping[str, Any]) -> BatchSchedule:
    """Return the batch sizes of a run: of `batch`, `batch_ramp` and, for tokens, `seq_len`.

    Raises:
        OptionsError: the ramp cannot be read; the text says at which character.
    """
    seq_length = values["seq_len"] if values["batch_ramp_unit"] == "tokens" else None
    try:
        return read_batch_schedule(values["batch_ramp"], values["batch"], seq_length=seq_length)
    except ValueError as error:
        raise OptionsError(f"--batch-ramp: {error}") from error


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options mean that were left out."""
    steps = given.get("decay_steps", given["steps"])
    warmup = min(MAX_WARMUP_STEPS, max(1, int(steps * WARMUP_SHARE)))
    # A run of one step has its warm-up alone.
    steps = steps if "warmup_steps" in given else max(steps, warmup + 1)
    warmup = given.get("warmup_steps", warmup)
    is_wsd = given.get("lr_schedule") == "WSD"
    tail = max(1, min(int(steps * WSD_SHARE), steps - warmup))
    weight_decay = given.get("weight_decay", WEIGHT_DECAY)
    is_constant = given.get("end_weight_decay", weight_decay) == weight_decay
    return {
        "lr_schedule": "cosine",
        "min_lr": given["lr"] * FINAL_LR_SHARE,
        "init_lr": 0.0,
        "warmup_steps": warmup,
        "decay_steps": steps,
        "wsd_decay_steps": tail if is_wsd else None,
        "wsd_decay_style": "exponential" if is_wsd else None,
        "weight_decay": weight_decay,
        "end_weight_decay": weight_decay,
        "weight_decay_steps": steps,
        "weight_decay_style": "constant" if is_constant else "linear",
    }


def _told_as_options(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        text = _NAMES.sub(lambda found: _flag(_FIELDS[found[0]]), str(error))
        raise OptionsError(text) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
