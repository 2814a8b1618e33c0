"""The rivals of each op: what FSDP2 and others use, torch's own functions, and other packages.

A rival makes what ours makes, or nearly: not always the same bits, nor in the same place, and its
name says what it does besides. torch's fused optimizers take one dtype and write no compute shard:
where ours has a BF16 gradient and a compute shard they get the casts that they need.
`clip_grad_norm_` also scales the gradients, which ours leaves to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...kernels import hadamard16
from ...kernels.case import Case, Operands
from ...kernels.inputs import offsets_of
from . import packages
from .competitors import Bind, Run

_CHUNK_CAT, _SPLIT = "_chunk_cat", "split_with_sizes"
UNCAPTURED = frozenset((_CHUNK_CAT, _SPLIT))
"""Rivals that no CUDA graph may hold: their tables of addresses are copied from pinned memory that
is free as soon as they return."""

Rivals = Mapping[str, Bind]
_NONE: Rivals = {}
_NEVER = 1e30  # a norm to clip at
_BETAS, _EPS, _DECAY, _MOMENTUM = (0.9, 0.999), 1e-8, 1e-2, 0.9
_GROUP = 16
_SCALINGS = {f"fp8_{scaling}": scaling for scaling in ("tensor", "row", "1x128", "128x128")}
# What torch casts to and from.
_CAST_BY_TORCH = ("bf16", "fp16", "e4m3", "e5m2")
# Words of cases that nobody else has: what they make is scaled, laid out or cut otherwise.
_OF_OURS = frozenset(("scaled", "swizzled", "inverse", "torchao", "uneven", "all"))


def rivals_of(case: Case) -> Rivals:
    """By the names that rows bear; each may raise when it is bound."""
    if is_of_ours(case) or case.op not in _RIVALS:
        return _NONE
    return _RIVALS[case.op](case)


def is_of_ours(case: Case) -> bool:
    """Whether nobody else does quite that."""
    return not _OF_OURS.isdisjoint(case.name.split())


def is_noisy(case: Case) -> bool:
    """Whether it rounds stochastically."""
    return "stochastic" in case.name.split()


def accumulates(case: Case) -> bool:
    """Whether it adds to what is there."""
    return "accumulate" in case.name.split()


def slots_of(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What of the flat buffer belongs to each tensor, in its shape."""
    offsets, _ = offsets_of(tensors)
    return [
        flat[offset : offset + tensor.numel()].view_as(tensor)
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]


def _pack(case: Case) -> Rivals:
    def each(function: Callable[..., object]) -> Bind:
        def bind(operands: Operands) -> Run:
            (flat,), tensors = operands.results(), list(operands.read)
            slots = slots_of(flat, tensors)
            return lambda: function(slots, tensors)

        return bind

    if accumulates(case):
        return {"_foreach_add_": each(torch._foreach_add_)}
    return {
        "torch.cat": _cat,
        "_foreach_copy_": each(torch._foreach_copy_),
        _CHUNK_CAT: _chunk_cat,
    }


def _cat(operands: Operands) -> Run:
    rows, flat = _rows_and_flat(operands)
    return lambda: torch.cat(rows, 1, out=flat)


def _chunk_cat(operands: Operands) -> Run:
    rows, flat = _rows_and_flat(operands)
    chunks = flat.view(1, 1, -1)
    return lambda: torch._chunk_cat(rows, dim=1, num_chunks=1, out=chunks)


def _rows_and_flat(operands: Operands) -> tuple[list[torch.Tensor], torch.Tensor]:
    rows = [tensor.view(1, -1) for tensor in operands.read]
    (flat,) = operands.written
    return rows, flat.new_empty(1, sum(row.numel() for row in rows))


def _unpack(case: Case) -> Rivals:
    def foreach_copy(operands: Operands) -> Run:
        (flat,), tensors = operands.read, list(operands.written)
        slots = slots_of(flat, tensors)
        return lambda: torch._foreach_copy_(tensors, slots)

    def split(operands: Operands) -> Run:
        (flat,), tensors = operands.read, operands.written
        full = torch.cat([slot.view(-1) for slot in slots_of(flat, tensors)])
        sizes, out = [tensor.numel() for tensor in tensors], [one.view(-1) for one in tensors]
        return lambda: torch.split_with_sizes_copy(full, sizes, out=out)

    same = case.format == case.dtype
    return {"_foreach_copy_": foreach_copy, **({_SPLIT: split} if same else {})}


def _reduce(case: Case) -> Rivals:
    def bind(operands: Operands) -> Run:
        (parts,), (out,) = operands.read, operands.results()
        if accumulates(case):
            return lambda: out.add_(parts.sum(0, dtype=out.dtype))
        return lambda: torch.sum(parts, 0, dtype=out.dtype, out=out)

    return {"torch.sum, add_" if accumulates(case) else "torch.sum": bind}


def _sum_messages(case: Case) -> Rivals:
    """Of BF16 alone, whose message is what torch sums as well: numbers, one after the other."""

    def bind(operands: Operands) -> Run:
        (out,) = operands.written
        parts = torch.randn(case.world or 1, len(out), device=out.device).bfloat16()
        return lambda: torch.sum(parts, 0, dtype=torch.float32, out=out)

    return {"torch.sum": bind} if case.format == "bf16" else {}


def cast_by_torch(operands: Operands) -> Run:
    """What casts without a kernel of one's own."""
    (x,), (out,) = operands.read, operands.written
    return lambda: out.copy_(x)


def _cast(case: Case) -> Rivals:
    return {"Tensor.copy_": cast_by_torch} if is_cast_by_torch(case) else {}


def is_cast_by_torch(case: Case) -> bool:
    """Whether torch rounds to the format, and so."""
    return case.format in _CAST_BY_TORCH and not is_noisy(case)


def _quantize_fp8(case: Case) -> Rivals:
    return packages.fp8(_SCALINGS[case.format]) if case.format in _SCALINGS else {}


def _quantize_mx(case: Case) -> Rivals:
    element = case.name.split()[0]
    return packages.mx(element) if element in ("e4m3", "e2m1") and not is_noisy(case) else {}


def _dequantize_mx(case: Case) -> Rivals:
    return packages.mxfp8_back() if case.name in ("e4m3 to bf16", "e4m3 to fp32") else {}


def _quantize_nvfp4(case: Case) -> Rivals:
    if "hadamard" in case.name:
        return packages.rotated_nvfp4() if case.dtype == "bf16" else {}
    return packages.stochastic_nvfp4() if is_noisy(case) else packages.nvfp4()


def largest_by_torch(operands: Operands) -> Run:
    """The largest magnitude."""
    (x,) = operands.read
    return lambda: torch.linalg.vector_norm(x, float("inf"))


def _rotated_by_torch(operands: Operands) -> Run:
    (x,) = operands.read
    groups = x.view(-1, _GROUP)
    results = torch.empty_like(groups)
    factor = hadamard16(torch.eye(_GROUP, device=x.device)).to(x.dtype)
    return lambda: torch.mm(groups, factor, out=results)


def _fused(step: Callable[[Operands, torch.Tensor], None]) -> Callable[[Case], Rivals]:
    """One of torch's fused optimizers, `step`, with the casts around it that the case needs."""

    def rivals(case: Case) -> Rivals:
        def bind(operands: Operands) -> Run:
            (grad,), param = operands.read, operands.updated[0]
            wide = grad.float()

            def run() -> None:
                if wide is not grad:
                    wide.copy_(grad)
                step(operands, wide)
                for compute in operands.written:
                    compute.copy_(param)

            return run

        casts = (case.dtype, case.format) != ("fp32", "none")
        return {"torch fused" + (", casts" if casts else ""): bind}

    return rivals


def _adamw_step(operands: Operands, grad: torch.Tensor) -> None:
    (param, first, second), (lr, step, *_) = operands.updated, operands.scalars
    torch._fused_adamw_(
        [param], [grad], [first], [second], [], [step], lr=lr, beta1=_BETAS[0], beta2=_BETAS[1],
        weight_decay=_DECAY, eps=_EPS, amsgrad=False, maximize=False,
    )  # fmt: skip


def _sgd_step(operands: Operands, grad: torch.Tensor) -> None:
    (param, buffer), lr = operands.updated, operands.scalars[0]
    torch._fused_sgd_(
        [param], [grad], [buffer], weight_decay=0.0, momentum=_MOMENTUM, lr=lr, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


def norm_by_torch(operands: Operands) -> Run:
    """The norm of all tensors."""
    grads = list(operands.read)
    return lambda: torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(grads, 2, torch.float32))
    )


def _clip(operands: Operands) -> Run:
    params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in operands.read]
    for param, grad in zip(params, operands.read, strict=True):
        param.grad = grad.clone()
    return lambda: torch.nn.utils.clip_grad_norm_(params, _NEVER, foreach=True)


_RIVALS: Mapping[str, Callable[[Case], Rivals]] = {
    "pack_": _pack,
    "unpack_": _unpack,
    "reduce_": _reduce,
    "cast_": _cast,
    "cast_back_": _cast,
    "quantize_fp8_": _quantize_fp8,
    "quantize_mx_": _quantize_mx,
    "dequantize_mx_": _dequantize_mx,
    "amax_nvfp4_": lambda case: {"vector_norm": largest_by_torch},
    "quantize_nvfp4_": _quantize_nvfp4,
    "hadamard16_": lambda case: {"torch.mm": _rotated_by_torch},
    "reduce_messages_": _sum_messages,
    "reduce_peer_messages_": _sum_messages,
    "flat_adamw_": _fused(_adamw_step),
    "flat_sgd_": _fused(_sgd_step),
    "l2_norm_": lambda case: {"_foreach_norm": norm_by_torch, "clip_grad_norm_, scales": _clip},
}
