"""The optimizer of the main job."""

from collections.abc import Iterable

import torch
from torch import nn

from .schedule_options import WEIGHT_DECAY

MATRIX_NDIM = 2
BETAS = (0.9, 0.95)


def build_optimizer(
    parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = WEIGHT_DECAY
) -> torch.optim.AdamW:
    """Return AdamW in two groups: weight decay for matrices, none for biases and norms, also where
    a scheduler sets it.
    """
    all_parameters = list(parameters)
    matrices = [parameter for parameter in all_parameters if parameter.dim() >= MATRIX_NDIM]
    others = [parameter for parameter in all_parameters if parameter.dim() < MATRIX_NDIM]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)
