"""p-norms of sharded tensors with the same bits on every rank and for every way of sharding.

With M the largest |x| over all ranks, each block of 128 elements gives s = sum((|x| / M)^p) in
FP32, by halving, so that its bits depend on the block alone. Blocks never straddle tensors or
ranks. The block sums are then added as integers (two limbs, 2^-59 the smallest unit), and integer
sums do not depend on order::

    norm = M * (sum over blocks of s) ^ (1/p)

Dividing by M first means that no finite tensor overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..kernels import ALIGN_NUMEL

AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType], None]
"""Reduces a small tensor over the ranks, in place."""

# s <= 128 = 2^7: the high limb of one block is below 2^33, so that 2^30 blocks (10^11 elements) fit
# int64.
_HIGH_SCALE = 2.0**26
_LOW_SCALE = 2.0**33
_CHUNK_NUMEL = 1 << 20
"""Elements handled at once: bounds the temporaries at a few MiB."""


def exact_norms(
    owned: Sequence[Sequence[Tensor]], norm_type: float, device: torch.device, reduce: AllReduce
) -> Tensor:
    """The norms [n], float32, of n quantities, with two reductions for all of them.

    `owned[i]`: the 1-D parts of quantity i that this rank answers for, each from the start of a
    block on. `norm_type`: p, at least 1 or inf. A NaN makes a norm NaN, else an infinity infinite.
    """
    chunks = [[c for part in parts for c in part.split(_CHUNK_NUMEL)] for parts in owned]
    extremes = torch.stack([_extremes(parts, device) for parts in chunks])
    reduce(extremes, dist.ReduceOp.MAX)
    scale, any_nan, any_inf = extremes.unbind(1)
    norm = scale
    if not math.isinf(norm_type):
        divisors = torch.where(scale > 0, scale, 1.0)
        limbs = torch.zeros(len(chunks), 2, dtype=torch.int64, device=device)
        for total, parts, divisor in zip(limbs, chunks, divisors, strict=True):
            for chunk in parts:
                total += _limbs(chunk, divisor, norm_type)
        reduce(limbs, dist.ReduceOp.SUM)
        total = (limbs[:, 0].double() + limbs[:, 1].double() / _LOW_SCALE) / _HIGH_SCALE
        norm = (scale.double() * total.pow(1.0 / norm_type)).float()
    norm = torch.where(any_inf > 0, math.inf, norm)
    return torch.where(any_nan > 0, math.nan, norm)


def _extremes(chunks: Sequence[Tensor], device: torch.device) -> Tensor:
    """[largest finite |x|, any NaN, any inf]: backends do not agree on the maximum of NaN."""
    extremes = torch.zeros(3, device=device)
    chunks = [chunk for chunk in chunks if chunk.numel()]
    if chunks:
        largest = torch.stack([torch.linalg.vector_norm(c, math.inf).float() for c in chunks])
        extremes[0] = torch.where(torch.isfinite(largest), largest, 0.0).amax()
        extremes[1] = torch.isnan(largest).any()
        extremes[2] = torch.isinf(largest).any()
    return extremes


def _limbs(chunk: Tensor, divisor: Tensor, norm_type: float) -> Tensor:
    """The sum of the block sums of `chunk` as two int64 limbs [2]."""
    terms = chunk.float() / divisor
    terms = pad(terms, (0, -len(terms) % ALIGN_NUMEL)).view(-1, ALIGN_NUMEL)
    terms = terms * terms if norm_type == 2.0 else terms.abs().pow(norm_type)
    width = ALIGN_NUMEL
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    # What is NaN or infinite is reported through the extremes; here it must not become an integer.
    scaled = terms.double().nan_to_num(0.0, 0.0, 0.0) * _HIGH_SCALE
    high = scaled.floor()
    low = ((scaled - high) * _LOW_SCALE).floor()
    return torch.stack([high.long().sum(), low.long().sum()])
