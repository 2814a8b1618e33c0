"""p-norms of sharded tensors with the same bits on every rank and for every way of sharding.

`kernels/optim/norm_reference.py` has the formula: a maximum, and sums of blocks added as integers.
Blocks never straddle tensors or ranks, so that the ranks' maxima and sums are those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.optim.norm_op import Quantities, largest_magnitudes, norms_of, power_sums

AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType], None]
"""Reduces a small tensor over the ranks, in place."""


def exact_norms(
    owned: Quantities, norm_type: float, device: torch.device, reduce: AllReduce
) -> Tensor:
    """The norms [n], float32, of n quantities, with two reductions for all of them.

    `owned[i]`: the parts of quantity i that this rank answers for, each from the start of a block
    on. `norm_type`: p, at least 1 or inf. A NaN makes a norm NaN, else an infinity infinite.
    """
    largest = largest_magnitudes(owned, device)
    reduce(largest, dist.ReduceOp.MAX)
    sums = None
    if not math.isinf(norm_type):
        sums = power_sums(owned, largest, norm_type)
        reduce(sums, dist.ReduceOp.SUM)
    return norms_of(largest, sums, norm_type).float()
