"""What one writes without a kernel, in a few lines for torch.compile: for finite numbers, and its
bits need not be ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ...kernels import E2M1, E4M3, NVFP4
from ...kernels.case import Case, Operands
from .competitors import Bind, as_bind
from .rivals import (
    accumulates,
    cast_by_torch,
    is_cast_by_torch,
    is_noisy,
    is_of_ours,
    largest_by_torch,
    norm_by_torch,
    slots_of,
)

_MX_BLOCK, _NVFP4_BLOCK = 32, 16
_BETAS, _EPS, _DECAY = (0.9, 0.999), 1e-8, 1e-2


def plain_of(case: Case) -> Bind | None:
    """The formulation of a case; None where nobody would write one, or not in a few lines."""
    if is_noisy(case) or is_of_ours(case) or "hadamard" in case.name or case.op not in _PLAIN:
        return None
    return _PLAIN[case.op](case)


def _pack(case: Case) -> Bind:
    accumulate = accumulates(case)

    def one_by_one(operands: Operands) -> None:
        (flat,) = operands.results()
        for slot, tensor in zip(slots_of(flat, operands.read), operands.read, strict=True):
            slot.copy_(slot.float() + tensor.float() if accumulate else tensor)

    return as_bind(one_by_one)


def _unpacked(operands: Operands) -> None:
    (flat,) = operands.read
    for slot, tensor in zip(slots_of(flat, operands.written), operands.written, strict=True):
        tensor.copy_(slot)


def _reduce(case: Case) -> Bind:
    accumulate = accumulates(case)

    def in_rank_order(operands: Operands) -> None:
        (parts,), (out,) = operands.read, operands.results()
        added = parts[0].float()
        for one in parts[1:]:
            added = added + one
        out.copy_(out + added if accumulate else added)

    return as_bind(in_rank_order)


def _quantized_fp8(scaling: str, operands: Operands) -> None:
    (x,), (out, scale_inv) = operands.read, operands.written
    rows = {"tensor": len(x), "128x128": min(128, len(x))}.get(scaling, 1)
    columns = 128 if scaling.endswith("128") else x.shape[1]
    blocks = x.float().view(len(x) // rows, rows, x.shape[1] // columns, columns)
    scale = E4M3.max_finite / blocks.abs().amax((1, 3), keepdim=True)
    out.copy_((blocks * scale).view_as(x))
    scale_inv.copy_(scale.reciprocal().view_as(scale_inv))


def _quantize_fp8(case: Case) -> Bind | None:
    scaling = case.format.removeprefix("fp8_")
    return None if scaling == "delayed" else as_bind(partial(_quantized_fp8, scaling))


def _quantize_mx(case: Case) -> Bind | None:
    element = {one.name: one for one in (E2M1, E4M3)}.get(case.name.split()[0])
    if element is None:
        return None
    largest_finite = element.max_finite

    def bind(operands: Operands) -> Callable[[], None]:
        (x,), (data, scales) = operands.read, operands.written
        scale_bytes = scales.view(torch.uint8)  # the compiler knows no E8M0

        def run() -> None:
            blocks = x.float().unflatten(-1, (-1, _MX_BLOCK))
            largest = blocks.abs().amax(-1, keepdim=True) / largest_finite
            exponent = largest.log2().ceil().clamp(-127.0, 127.0)
            scaled = (blocks * torch.exp2(-exponent)).view_as(x)
            data.copy_(_packed_e2m1(scaled) if element is E2M1 else scaled)
            scale_bytes.copy_(exponent.squeeze(-1) + 127.0)

        return run

    return bind


def _quantized_nvfp4(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """For no block of zeros."""
    (x,), (amax,) = operands.read, operands.scalars
    blocks = x.float().unflatten(-1, (-1, _NVFP4_BLOCK))
    encode = E4M3.max_finite * E2M1.max_finite / amax
    largest = blocks.abs().amax(-1, keepdim=True) / E2M1.max_finite
    scale = (largest * encode).to(NVFP4.scale_dtype)
    return _packed_e2m1((blocks * (encode / scale.float())).view_as(x)), scale.squeeze(-1)


def _packed_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Two codes a byte. The steps are 1/2 up to 2, 1 up to 4, and 2 up to 6."""
    size = values.abs()
    upper = torch.where(size < 4.0, size.round() + 2.0, ((size / 2.0).round() + 4.0).clamp_max(7.0))
    code = torch.where(size < 2.0, (size * 2.0).round(), upper) + 8.0 * values.signbit()
    code = code.to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4


def _stepped(operands: Operands) -> None:
    (param, first, second), (grad,) = operands.updated, operands.read
    lr, step, *_ = operands.scalars
    g = grad.float()
    param.mul_(1 - lr * _DECAY)
    first.lerp_(g, 1 - _BETAS[0])
    second.mul_(_BETAS[1]).addcmul_(g, g, value=1 - _BETAS[1])
    denominator = second.sqrt() / (1 - _BETAS[1] ** step).sqrt() + _EPS
    param.sub_(lr / (1 - _BETAS[0] ** step) * first / denominator)
    for compute in operands.written:
        compute.copy_(param)


_PLAIN: Mapping[str, Callable[[Case], Bind | None]] = {
    "pack_": _pack,
    "unpack_": lambda case: as_bind(_unpacked),
    "reduce_": _reduce,
    "cast_": lambda case: cast_by_torch if is_cast_by_torch(case) else None,
    "quantize_fp8_": _quantize_fp8,
    "quantize_mx_": _quantize_mx,
    "amax_nvfp4_": lambda case: largest_by_torch,
    "quantize_nvfp4_": lambda case: as_bind(_quantized_nvfp4),
    "flat_adamw_": lambda case: as_bind(_stepped),
    "l2_norm_": lambda case: norm_by_torch,
}
