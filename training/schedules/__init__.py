"""Learning rate, weight decay and batch size as functions of how far a training has come: closed
forms, what sets them in an optimizer, how a batch is cut into microbatches, tables and pictures.

    from sidestream.training.schedules import OptimizerParamScheduler, ParamSchedule
"""

from .batch_schedule import BatchPhase, BatchSchedule
from .microbatches import MicrobatchCalculator, Microbatches
from .optimizer_params import (
    OptimizerParamScheduler,
    ParamGroupOverride,
    combine_param_group_overrides,
    get_canonical_lr_for_logging,
)
from .param_schedule import LR_STYLES, SHARES, WD_STYLES, ParamSchedule, ScheduledParams

__all__ = [
    "LR_STYLES",
    "SHARES",
    "WD_STYLES",
    "BatchPhase",
    "BatchSchedule",
    "MicrobatchCalculator",
    "Microbatches",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "ParamSchedule",
    "ScheduledParams",
    "combine_param_group_overrides",
    "get_canonical_lr_for_logging",
]
