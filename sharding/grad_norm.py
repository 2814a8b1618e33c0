"""The norm of all gradients, the same bits on every rank and for every way of sharding, and
clipping by it.

With M the largest |g| over all ranks, each block of 128 elements gives s = sum((|g| / M)^p) in
FP32, by halving, so that its bits depend on the block alone. Blocks never straddle tensors or
ranks. The block sums
are then added as integers (two limbs, 2^-59 the smallest unit), and integer sums do not depend on
order::

    norm = M * (sum over blocks of s) ^ (1/p)

Dividing by M first means that no finite gradient overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffers import BLOCK_NUMEL
from .arguments import require_flag, require_number
from .fully_shard import runtime_of
from .runtime import Runtime
from .uncompiled import uncompiled

# s <= 128 = 2^7: the high limb of one block is below 2^33, so that 2^30 blocks (10^11 elements) fit
# int64.
_HIGH_SCALE = 2.0**26
_LOW_SCALE = 2.0**33
_CHUNK_NUMEL = 1 << 20
"""Elements handled at once: bounds the temporaries at a few MiB."""


@uncompiled
def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of a sharded module so that their joint norm is at most `max_norm`.

    The factor is min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`. A norm
    that is NaN or infinite, which takes a NaN or infinite gradient, leaves the gradients as they
    are.

    Args:
        module: the module passed to `fully_shard`.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm, at least 1 or inf.
        error_if_nonfinite: raise instead, on every rank. Synchronises with the device.

    Returns:
        The norm before clipping: a 0-d float32 tensor, bit-equal on all ranks.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: bad `max_norm` or `norm_type`; a module that is not sharded.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; gradients that were
            accumulated under `no_sync` wait for their exchange.
    """
    require_number("max_norm", max_norm, "a number of at least 0", lambda norm: norm >= 0)
    require_number("norm_type", norm_type, "a number of at least 1, or inf", lambda p: p >= 1)
    require_flag("error_if_nonfinite", error_if_nonfinite)
    runtime = runtime_of(module)
    runtime.check_reduced("clip_grad_norm_")
    norm = _norm(runtime, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite gradient norm, got {norm.item()}: some gradient "
            "is NaN or "
            "infinite; lower the learning rate, or pass error_if_nonfinite=False to leave the "
            "gradients as they are"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    for unit in runtime.units:
        for run in unit.gradients.runs:
            if run.param.grad is not None:
                run.param.grad.mul_(factor)
    return norm


def _owned_grads(runtime: Runtime) -> Iterator[Tensor]:
    """The gradients this rank answers for: its own slice, also where it holds all."""
    for unit in runtime.units:
        low, high = unit.spec.layout.shard_range(runtime.collectives.rank)
        offset = unit.main_span[0]
        for run in unit.gradients.runs:
            if run.param.grad is not None:
                start, stop = max(low - offset, run.start), min(high - offset, run.stop)
                if stop > start:
                    yield run.param.grad.detach()[start - run.start : stop - run.start]


def _norm(runtime: Runtime, norm_type: float) -> Tensor:
    device = runtime.pool.device
    grads = list(_owned_grads(runtime))
    # [largest finite |g|, any NaN, any inf]: backends do not agree on the maximum of NaN.
    extremes = torch.zeros(3, device=device)
    if grads:
        chunks = [chunk for grad in grads for chunk in grad.split(_CHUNK_NUMEL)]
        largest = torch.stack([torch.linalg.vector_norm(c, math.inf).float() for c in chunks])
        extremes[0] = torch.where(torch.isfinite(largest), largest, 0.0).amax()
        extremes[1] = torch.isnan(largest).any()
        extremes[2] = torch.isinf(largest).any()
    runtime.collectives.all_reduce(extremes, dist.ReduceOp.MAX, "maximum of the gradients")
    scale = extremes[0]
    if math.isinf(norm_type):
        norm = scale
    else:
        limbs = torch.zeros(2, dtype=torch.int64, device=device)
        divisor = torch.where(scale > 0, scale, 1.0)
        for grad in grads:
            for chunk in grad.split(_CHUNK_NUMEL):
                limbs += _limbs(chunk, divisor, norm_type)
        runtime.collectives.all_reduce(limbs, dist.ReduceOp.SUM, "sum of the gradients' norms")
        total = (limbs[0].double() + limbs[1].double() / _LOW_SCALE) / _HIGH_SCALE
        norm = (scale.double() * total.pow(1.0 / norm_type)).float()
    norm = torch.where(extremes[2] > 0, torch.full_like(norm, math.inf), norm)
    return torch.where(extremes[1] > 0, torch.full_like(norm, math.nan), norm)


def _limbs(grad: Tensor, divisor: Tensor, norm_type: float) -> Tensor:
    """The sum of `grad`'s block sums as two int64 limbs [2]."""
    terms = (grad.float() / divisor).view(-1, BLOCK_NUMEL)
    terms = terms * terms if norm_type == 2.0 else terms.abs().pow(norm_type)
    width = BLOCK_NUMEL
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    # A NaN or infinite gradient is reported through the extremes; here it must not become an
    # integer.
    scaled = terms.double().nan_to_num(0.0, 0.0, 0.0) * _HIGH_SCALE
    high = scaled.floor()
    low = ((scaled - high) * _LOW_SCALE).floor()
    return torch.stack([high.long().sum(), low.long().sum()])
