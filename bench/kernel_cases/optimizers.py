"""Owns the cases of the flat optimizers and of the norm.

torch's fused optimizers take one dtype and write no compute shard: where ours has a BF16 gradient
and a compute shard they get the casts that they need. `clip_grad_norm_` also scales the gradients,
which ours leaves to the optimizer, so it reads them twice and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...kernels import flat_adamw_, flat_sgd_, l2_norm_, registry
from ...kernels.optim import norm_reference
from ...kernels.optim import reference as reference_optim
from .case import DTYPES, Bind, Case, Operands, Run, as_bind, block_numel, block_shapes

LR, BETAS, EPS, DECAY, MOMENTUM = 1e-3, (0.9, 0.999), 1e-8, 1e-2, 0.9
NEVER = 1e30  # a norm to clip at
NONE = "none"
# (gradient, compute shard)
_STEPS = (("fp32", NONE), ("bf16", NONE), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"))
_STANDARD = {
    "flat_adamw_": (("fp32", NONE), ("bf16", "bf16")),
    "flat_sgd_": (("bf16", "bf16"),),
}
_PLAIN: dict[str, Any] = {
    "weight_decay": 0.0, "maximize": False, "starts": [], "lr_scales": None,
    "weight_decays": None, "factor": None, "found_inf": None, "compute_scale": None, "amax": None,
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All, each for any size."""
    for grad, compute in _STEPS:
        yield _adamw_case(grad, compute)
        yield _sgd_case(grad, compute)
    for dtype in DTYPES:
        yield _norm_case(dtype)


def _shards(device: torch.device, numel: int, grad: str, compute: str, *, moments: int) -> Operands:
    """param and moments, updated; the gradient; the compute shard; learning rate and step."""
    kept = [torch.randn(numel, device=device) for _ in range(1 + moments)]
    kept[-1].square_()
    return Operands(
        read=[torch.randn(numel, device=device).to(DTYPES[grad])],
        written=[]
        if compute == NONE
        else [torch.zeros(numel, device=device, dtype=DTYPES[compute])],
        updated=kept,
        scalars=[torch.tensor(LR, device=device), torch.tensor(2.0, device=device)],
    )


def _moved(grad: str, compute: str, moments: int) -> int:
    width = 0 if compute == NONE else DTYPES[compute].itemsize
    return 8 * (1 + moments) + DTYPES[grad].itemsize + width


def _adamw_case(grad: str, compute: str) -> Case:
    def ours(operands: Operands) -> Run:
        (param, first, second), (g,) = operands.updated, operands.read
        lr, step = operands.scalars
        out = next(iter(operands.written), None)
        return lambda: flat_adamw_(param, g, first, second, lr, step, compute=out)

    def definition(operands: Operands) -> None:
        (param, first, second), (g,) = operands.updated, operands.read
        reference_optim.flat_adamw_(
            param, g, first, second, *operands.scalars, beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
            compute=next(iter(operands.written), None), **{**_PLAIN, "weight_decay": DECAY},
        )  # fmt: skip

    def fused(operands: Operands) -> Run:
        (param, first, second), (g,) = operands.updated, operands.read
        lr, step = operands.scalars
        wide = g.float()

        def run() -> None:
            _widened(wide, g)
            torch._fused_adamw_(
                [param], [wide], [first], [second], [], [step], lr=lr, beta1=BETAS[0],
                beta2=BETAS[1], weight_decay=DECAY, eps=EPS, amsgrad=False, maximize=False,
            )  # fmt: skip
            _stored(operands, param)

        return run

    return _step_case(
        "adamw",
        "flat_adamw_",
        (grad, compute),
        moments=2,
        ours=ours,
        definition=definition,
        fused=fused,
        plain=as_bind(_plain_adamw),
    )


def _plain_adamw(operands: Operands) -> None:
    """The same by torch alone, a few lines as one would write them."""
    (param, first, second), (grad,) = operands.updated, operands.read
    lr, step = operands.scalars
    g = grad.float()
    param.mul_(1 - lr * DECAY)
    first.lerp_(g, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
    denominator = second.sqrt() / (1 - BETAS[1] ** step).sqrt() + EPS
    param.sub_(lr / (1 - BETAS[0] ** step) * first / denominator)
    _stored(operands, param)


def _sgd_case(grad: str, compute: str) -> Case:
    def ours(operands: Operands) -> Run:
        (param, buffer), (g,) = operands.updated, operands.read
        lr, step = operands.scalars
        out = next(iter(operands.written), None)
        return lambda: flat_sgd_(param, g, buffer, lr, step, momentum=MOMENTUM, compute=out)

    def definition(operands: Operands) -> None:
        (param, buffer), (g,) = operands.updated, operands.read
        reference_optim.flat_sgd_(
            param, g, buffer, *operands.scalars, momentum=MOMENTUM, dampening=0.0, nesterov=False,
            compute=next(iter(operands.written), None), **_PLAIN,
        )  # fmt: skip

    def fused(operands: Operands) -> Run:
        (param, buffer), (g,) = operands.updated, operands.read
        lr = operands.scalars[0]
        wide = g.float()

        def run() -> None:
            _widened(wide, g)
            torch._fused_sgd_(
                [param], [wide], [buffer], weight_decay=0.0, momentum=MOMENTUM, lr=lr,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            _stored(operands, param)

        return run

    return _step_case(
        "sgd momentum",
        "flat_sgd_",
        (grad, compute),
        moments=1,
        ours=ours,
        definition=definition,
        fused=fused,
    )


def _widened(wide: torch.Tensor, grad: torch.Tensor) -> None:
    if grad.dtype is not wide.dtype:
        wide.copy_(grad)


def _stored(operands: Operands, param: torch.Tensor) -> None:
    for compute in operands.written:
        compute.copy_(param)


def _step_case(
    name: str,
    op: str,
    dtypes: tuple[str, str],
    *,
    moments: int,
    ours: Bind,
    definition: Callable[[Operands], None],
    fused: Bind,
    plain: Bind | None = None,
) -> Case:
    grad, compute = dtypes
    casts = dtypes != ("fp32", NONE)
    return Case(
        name=f"{name} {grad} -> {compute}",
        op=op,
        format=compute,
        dtype=grad,
        numel=lambda numel: numel,
        num_bytes=lambda numel: numel * _moved(grad, compute, moments),
        make=lambda device, numel: _shards(device, numel, grad, compute, moments=moments),
        ours=ours,
        definition=definition,
        rivals={"torch fused" + (", casts" if casts else ""): fused},
        plain=plain,
        target=registry.target_share(op),
        standard=dtypes in _STANDARD[op],
    )


def _norm_case(dtype: str) -> Case:
    def make(device: torch.device, numel: int) -> Operands:
        grads = [
            torch.randn(shape, device=device).to(DTYPES[dtype]) for shape in block_shapes(numel)
        ]
        return Operands(read=grads, scalars=[torch.zeros((), device=device) for _ in range(2)])

    def ours(operands: Operands) -> Run:
        grads, (norm, flag) = list(operands.read), operands.scalars

        def run() -> tuple[torch.Tensor, ...]:
            l2_norm_(norm, grads, found_inf=flag)
            return norm, flag

        return run

    def definition(operands: Operands) -> tuple[torch.Tensor, ...]:
        norm, flag = operands.scalars
        norm_reference.l2_norm_(norm, operands.read, found_inf=flag, squared=False)
        return norm, flag

    return Case(
        name=f"l2_norm {dtype}",
        op="l2_norm_",
        format=dtype,
        dtype=dtype,
        numel=block_numel,
        num_bytes=lambda numel: block_numel(numel) * DTYPES[dtype].itemsize,
        make=make,
        ours=ours,
        definition=definition,
        rivals={"_foreach_norm": _foreach_norm, "clip_grad_norm_, scales": _clip},
        plain=_foreach_norm,
        target=registry.target_share("l2_norm_"),
        standard=dtype in ("fp32", "bf16"),
    )


def _foreach_norm(operands: Operands) -> Run:
    grads = list(operands.read)
    return lambda: torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(grads, 2, torch.float32))
    )


def _clip(operands: Operands) -> Run:
    params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in operands.read]
    for param, grad in zip(params, operands.read, strict=True):
        param.grad = grad.clone()
    return lambda: torch.nn.utils.clip_grad_norm_(params, NEVER, foreach=True)
