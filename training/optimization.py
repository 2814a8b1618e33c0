"""The optimizer of the main job and its learning rate, a plain function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from .schedules.options import FINAL_LR_SHARE, MAX_WARMUP_STEPS, WARMUP_SHARE, WEIGHT_DECAY

MATRIX_NDIM = 2
BETAS = (0.9, 0.95)


def learning_rate(step: int, *, total_steps: int, peak: float) -> float:
    """Return the rate of a step (from 1): linear warm-up over a tenth of the steps, then a cosine
    down to a tenth.
    """
    warmup = min(MAX_WARMUP_STEPS, max(1, int(total_steps * WARMUP_SHARE)))
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def build_optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Return AdamW in two groups: weight decay for matrices, none for biases and norms, also where
    a scheduler sets it.
    """
    all_parameters = list(parameters)
    matrices = [parameter for parameter in all_parameters if parameter.dim() >= MATRIX_NDIM]
    others = [parameter for parameter in all_parameters if parameter.dim() < MATRIX_NDIM]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)
