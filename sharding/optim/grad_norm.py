"""Clipping by the joint norm of all gradients, whose bits do not depend on the sharding."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import require_flag, require_number
from ..fully_shard import runtime_of
from ..modules.uncompiled import uncompiled
from ..runtime import Runtime
from ..tensor.exact_norm import exact_norms
from .flat_runs import owned_grad


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
        ValueError: bad `max_norm` or `norm_type`; a module that is not sharded, or whose experts
            are those of several sets of data-parallel ranks, each with a norm of its own.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; gradients that were
            accumulated under `no_sync` wait for their exchange.
    """
    require_number("max_norm", max_norm, "a number of at least 0", lambda norm: norm >= 0)
    require_number("norm_type", norm_type, "a number of at least 1, or inf", lambda p: p >= 1)
    require_flag("error_if_nonfinite", error_if_nonfinite)
    runtime = runtime_of(module)
    if runtime.collectives is not runtime.ranks.dense:
        raise ValueError(
            "clip_grad_norm_: expected experts whose ranks are among the data-parallel ranks, got "
            "some that several sets of those share, which would each scale them by another norm; "
            "compute one norm from p.grad of all ranks, and scale every p.grad by it"
        )
    runtime.check_reduced("clip_grad_norm_")
    norm = _norm(runtime, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite gradient norm, got {norm.item()}: some gradient "
            "is NaN or infinite; lower the learning rate, or pass error_if_nonfinite=False to "
            "leave the gradients as they are"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    grads = [
        run.param.grad
        for unit in runtime.units
        for run in unit.gradients.runs
        if run.param.grad is not None
    ]
    if grads:
        torch._foreach_mul_(grads, factor)
    return norm


def _norm(runtime: Runtime, norm_type: float) -> Tensor:
    def reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        runtime.collectives.all_reduce(tensor, op, "norm of the gradients")

    runs = [(unit, run) for unit in runtime.units for run in unit.gradients.runs]
    owned = [grad for unit, run in runs if (grad := owned_grad(unit, run)) is not None]
    return exact_norms([owned], norm_type, runtime.pool.device, reduce)[0]
