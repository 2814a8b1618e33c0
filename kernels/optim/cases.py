"""The cases of the flat optimizers and of the norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..ahead.count import full_path, shortest_full_path
from ..case import DTYPES, Case, Gate, Operands, Row
from ..formats.table import E4M3
from ..inputs import block, block_numel
from .norm_op import l2_norm_
from .op import Segments, flat_adamw_, flat_sgd_

LR, MOMENTUM = 1e-3, 0.9
NONE = "none"

_OPTIMIZER = "fp32 param, moments; fp32, bf16, fp16 gradient; bf16, fp16, e4m3 compute shard"
_ADAMW = Row(
    "flat_adamw_", "flat_adamw_", _OPTIMIZER, "24 + gradient + compute",
    "fp32, one rounding an operation, IEEE division and root; fp64 scalars",
    "bit-exact: `optim.reference`; torch.optim.AdamW: see below", "torch.optim.AdamW", 0.92,
)  # fmt: skip
_SGD = Row(
    "flat_sgd_", "flat_sgd_", _OPTIMIZER, "8, 16 with momentum, + gradient + compute",
    "fp32, one rounding an operation; fp64 scalars",
    "bit-exact: `optim.reference`; torch.optim.SGD: see below", "torch.optim.SGD", 0.92,
)  # fmt: skip
_NORM = Row(
    "l2_norm_", "l2_norm_", "fp32, bf16, fp16, mixed -> fp32", "source, twice",
    "fp32 sums of 128 squares, over the largest, added as integers; fp64 root, once",
    "bit-exact: `optim.norm_reference`", "this project", 0.92,
)  # fmt: skip

# Gradient and compute shard.
_STEPS = (("fp32", NONE), ("bf16", NONE), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"))
_STANDARD = {
    "flat_adamw_": (("fp32", NONE), ("bf16", "bf16")),
    "flat_sgd_": (("bf16", "bf16"),),
}
_GATED_STEPS = (("bf16", "bf16"), ("bf16", NONE), ("fp32", "bf16"), ("bf16", E4M3.name))
_STEP_GATES = {"flat_adamw_": Gate(110.0, 128), "flat_sgd_": Gate(45.0, 128)}
# Of the second launch; of the first, which finds the largest magnitude.
_NORM_GATES = {
    "of fp32": Gate(12.0, 128),
    "of bf16": Gate(12.0, 128),
    "of fp16": Gate(12.0, 128),
    "of fp32 largest": Gate(3.75, 128),
    "of bf16 largest": Gate(4.0, 128),
    "of fp16 largest": Gate(4.0, 128),
}
_LARGEST = " largest"
# Every option that makes work: what the gates hold.
_FULL = " all options"
_ONE_SEGMENT = " one segment"


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _ADAMW, _SGD, _NORM


def cases() -> Iterator[Case]:
    """All."""
    for row in (_ADAMW, _SGD):
        for grad, compute in _STEPS:
            yield _step_case(row, grad, compute)
        for grad, compute in _GATED_STEPS:
            yield _step_case(row, grad, compute, _FULL)
        yield _step_case(row, *_GATED_STEPS[0], _FULL + _ONE_SEGMENT)
    for dtype in DTYPES:
        yield _norm_case(dtype)
        yield _norm_case(dtype, _LARGEST)


def _step_case(row: Row, grad: str, compute: str, options: str = "") -> Case:
    """AdamW with two moments or SGD with one. Scalars: learning rate, step, and the options'."""
    moments = 2 if row is _ADAMW else 1
    dtypes: Mapping[str, torch.dtype] = {**DTYPES, E4M3.name: E4M3.dtype}
    width = 0 if compute == NONE else dtypes[compute].itemsize
    moved = 8 * (1 + moments) + DTYPES[grad].itemsize + width

    def make(device: torch.device, numel: int) -> Operands:
        kept = [torch.randn(numel, device=device) for _ in range(1 + moments)]
        kept[-1].square_()
        blank = torch.zeros(numel * width, dtype=torch.uint8, device=device)
        return Operands(
            read=[torch.randn(numel, device=device).to(DTYPES[grad])],
            written=[] if compute == NONE else [blank.view(dtypes[compute])],
            updated=kept,
            scalars=[torch.tensor(LR, device=device), *_option_scalars(device)],
        )

    def call(operands: Operands) -> None:
        (param, *kept), (gradient,) = operands.updated, operands.read
        lr, step = operands.scalars[:2]
        given = _options(operands, compute, options) if options else {}
        given["compute"] = next(iter(operands.written), None)
        if row is _ADAMW:
            flat_adamw_(param, gradient, kept[0], kept[1], lr, step, **given)
        else:
            given["nesterov"] = bool(options)
            flat_sgd_(param, gradient, kept[0], lr, step, momentum=MOMENTUM, **given)

    return Case(
        op=row.op,
        name=f"{grad} to {compute}{options}",
        format=compute,
        dtype=grad,
        make=make,
        call=call,
        numel=lambda numel: numel,
        num_bytes=lambda numel: numel * moved,
        counted=1,
        gate=_STEP_GATES[row.op] if options else None,
        copy_share=row.share_of(),
        standard=not options and (grad, compute) in _STANDARD[row.op],
    )


def _option_scalars(device: torch.device) -> list[torch.Tensor]:
    """The step, and what follows it where all options are given."""
    step = torch.tensor(2, dtype=torch.int32, device=device)
    factor, scale = torch.tensor(0.5, device=device), torch.tensor(2.0, device=device)
    found_inf, amax = torch.zeros(2, device=device)
    lr_scales, decays = (
        torch.ones(2, dtype=torch.float64, device=device),
        torch.ones(2, device=device),
    )
    return [step, factor, scale, found_inf, amax, lr_scales, decays]


def _options(operands: Operands, compute: str, options: str) -> dict[str, Any]:
    _, _, factor, scale, found_inf, amax, lr_scales, decays = operands.scalars
    given: dict[str, Any] = {"maximize": True, "factor": factor, "found_inf": found_inf}
    if compute == E4M3.name:
        given |= {"compute_scale": scale, "amax": amax}
    if not options.endswith(_ONE_SEGMENT):
        half = operands.read[0].numel() // 2
        given["segments"] = Segments([0, half], lr_scales, decays)
    return given


def _norm_case(dtype: str, launch: str = "") -> Case:
    """The norm of a block's gradients, by one of its two launches where instructions count."""
    name = f"of {dtype}{launch}"

    def make(device: torch.device, numel: int) -> Operands:
        grads = block(device, numel, DTYPES[dtype])
        return Operands(read=grads, scalars=[torch.zeros((), device=device) for _ in range(2)])

    def call(operands: Operands) -> tuple[torch.Tensor, ...]:
        norm, flag = operands.scalars
        l2_norm_(norm, operands.read, found_inf=flag)
        return norm, flag

    return Case(
        op="l2_norm_",
        name=name,
        format=dtype,
        dtype=dtype,
        make=make,
        call=call,
        numel=block_numel,
        num_bytes=lambda numel: 2 * block_numel(numel) * DTYPES[dtype].itemsize,
        passes=2,
        counted=int(launch != _LARGEST),
        gate=_NORM_GATES[name],
        # Each dtype has a path, and all dtypes have as many bytes.
        count=shortest_full_path if dtype == "fp32" else full_path,
        copy_share=_NORM.share_of(),
        standard=dtype in ("fp32", "bf16") and not launch,
    )
