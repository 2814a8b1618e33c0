"""The ops `sidestream::flat_adamw_` and `flat_sgd_`: schemas, devices, checks.

| op          | reads               | writes                            | cuda                |
|-------------|---------------------|-----------------------------------|---------------------|
| flat_adamw_ | grad, scalars       | param, moments, compute, amax     | `adamw.flat_adamw_` |
| flat_sgd_   | grad, scalars       | param, momentum, compute, amax    | `sgd.flat_sgd_`     |

On CPUs each is its definition in `reference`. The ops write in place, return nothing and are not
differentiable; what they write shares memory with nothing else that they are given. No host waits
for a device: numbers that change from step to step are read from it, so a captured CUDA graph
follows them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..aliasing import check_apart
from ..checks import (
    MAX_FP32,
    SOURCE_DTYPES,
    check_device,
    check_dtype,
    check_flag,
    check_integers,
    check_like,
    check_number,
    check_one,
    check_pair,
    check_vector,
)
from ..op import Op, on_first_use
from . import reference

_SHARED_OPTIONS = (
    "float weight_decay, bool maximize, SymInt[] starts, Tensor? lr_scales, Tensor? weight_decays, "
    "Tensor? factor, Tensor? found_inf, Tensor(y!)? compute, Tensor? compute_scale, "
    "Tensor(z!)? amax"
)
_FLAT_ADAMW = Op(
    "flat_adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    f"Tensor lr, Tensor step, *, float beta1, float beta2, float eps, {_SHARED_OPTIONS}) -> ()",
    reference.flat_adamw_,
    on_first_use("optim.adamw", "flat_adamw_"),
)
_FLAT_SGD = Op(
    "flat_sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor lr, Tensor? step,"
    f" *, float momentum, float dampening, bool nesterov, {_SHARED_OPTIONS}) -> ()",
    reference.flat_sgd_,
    on_first_use("optim.sgd", "flat_sgd_"),
)

_MASTER = (torch.float32,)
_PRECISE = (torch.float32, torch.float64)
_COUNTS = (torch.int32, torch.int64, torch.float32)
_FLAGS = (torch.bool, torch.int32, torch.float32)
_CODES = (torch.float8_e4m3fn, torch.uint8)
_COMPUTE = (torch.bfloat16, torch.float16, *_CODES)


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of a flat shard, each with its own learning rate and weight decay.

    starts: the first element of each, ascending from 0; one ends where the next starts, the last
    with the shard. Multiples of 16 give 16-byte accesses. lr_scales, weight_decays: 1-D, FP32 or
    FP64, one a segment, on the shard's device, read anew at every step: lr * lr_scale is a
    segment's learning rate. On a GPU each new `starts` makes a table that is kept for good.
    """

    starts: Sequence[int]
    lr_scales: torch.Tensor
    weight_decays: torch.Tensor


def flat_adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    segments: Segments | None = None,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    compute: torch.Tensor | None = None,
    compute_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """One step of AdamW for a flat shard, in one pass; `reference` has formula and rounding.

    Within 1 ulp a step of torch.optim.AdamW (single-tensor, not capturable, no amsgrad): see
    tests/kernels/optim/test_adamw.py for what of. Bytes moved an element: 24 + those of a gradient
    + those of a compute element.

    param, exp_avg, exp_avg_sq: [n], contiguous, FP32, updated. grad: [n], contiguous, FP32, BF16 or
    FP16. What follows has one element, lies on the same device and is read there: lr, FP32 or FP64;
    step, int32, int64 or FP32: the number of this step, from 1 to 2**33 - 1, counted by the caller;
    factor, FP32: multiplied into the gradient (clipping, loss scale); found_inf, bool, int32 or
    FP32: unless it is 0, nothing at all is written.

    segments: learning rates and weight decays by segment, in place of `weight_decay`.
    compute: [n], contiguous: the new parameters rounded to BF16 or FP16, or to E4M3
    (float8_e4m3fn, or its codes as uint8) after a product with `compute_scale`, FP32. amax, FP32,
    with E4M3 only: raised to the largest |parameter| if that is larger or NaN; set it to 0 first.

    Raises `ValueError` before anything is written.
    """
    check_pair("betas", betas)
    beta1, beta2 = (
        _checked_range(f"betas[{index}]", beta, below_one=True) for index, beta in enumerate(betas)
    )
    eps = _checked_range("eps", eps)
    _check_param(param)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, moment in moments.items():
        _check_shard(name, moment, param, _MASTER)
    check_one("step", step, _COUNTS, param.device)
    _FLAT_ADAMW.overload(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        lr,
        step,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        **_shared(
            param,
            moments,
            grad,
            lr,
            step,
            segments,
            weight_decay=weight_decay,
            maximize=maximize,
            factor=factor,
            found_inf=found_inf,
            compute=compute,
            compute_scale=compute_scale,
            amax=amax,
        ),
    )


def flat_sgd_(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    lr: torch.Tensor,
    step: torch.Tensor | None = None,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    segments: Segments | None = None,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    compute: torch.Tensor | None = None,
    compute_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """One step of SGD for a flat shard, in one pass: torch.optim.SGD's formula, see `flat_adamw_`.

    Bytes moved an element: 8, or 16 with momentum, + those of a gradient + of a compute element.

    momentum_buffer: [n], contiguous, FP32, updated; given if `momentum` is not 0, and `step` with
    it: at step 1 the gradient fills it and what was in it does not count. All else is as for
    `flat_adamw_`. Raises `ValueError` before anything is written.
    """
    momentum = _checked_range("momentum", momentum)
    nesterov = check_flag("nesterov", nesterov)
    dampening = check_number("dampening", dampening)
    if not abs(dampening) <= MAX_FP32:
        raise ValueError(f"dampening: expected a finite number, got {dampening}; correct it")
    _check_param(param)
    _check_momentum(param, momentum, momentum_buffer, step)
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov: expected a momentum above 0 and no dampening, got {momentum} and "
            f"{dampening}; change them, or set it to False"
        )
    _FLAT_SGD.overload(
        param,
        grad,
        momentum_buffer,
        lr,
        step,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        **_shared(
            param,
            {"momentum_buffer": momentum_buffer},
            grad,
            lr,
            step,
            segments,
            weight_decay=weight_decay,
            maximize=maximize,
            factor=factor,
            found_inf=found_inf,
            compute=compute,
            compute_scale=compute_scale,
            amax=amax,
        ),
    )


def _shared(
    param: torch.Tensor,
    moments: Mapping[str, torch.Tensor | None],
    grad: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor | None,
    segments: Segments | None,
    **given: Any,
) -> dict[str, Any]:
    """The ops' options that both optimizers have, checked together with what they read."""
    device = param.device
    _check_shard("grad", grad, param, SOURCE_DTYPES)
    check_one("lr", lr, _PRECISE, device)
    read = {"grad": grad, "lr": lr, "step": step}
    for name, dtypes in (("factor", _MASTER), ("found_inf", _FLAGS)):
        read[name] = given[name]
        if given[name] is not None:
            check_one(name, given[name], dtypes, device)
    starts, lr_scales, weight_decays = [], None, None
    if segments is not None:
        starts = _checked_starts(segments, param)
        lr_scales, weight_decays = segments.lr_scales, segments.weight_decays
        read |= {"segments.lr_scales": lr_scales, "segments.weight_decays": weight_decays}
    compute, scale, amax = (given[name] for name in ("compute", "compute_scale", "amax"))
    _check_compute(param, compute, scale, amax)
    written = {"param": param, **moments, "compute": compute, "amax": amax}
    check_apart(written, read | {"compute_scale": scale})
    if compute is not None and compute.dtype in _CODES:
        compute = compute.view(torch.uint8)
    return given | {
        "weight_decay": _checked_range("weight_decay", given["weight_decay"]),
        "maximize": check_flag("maximize", given["maximize"]),
        "starts": starts,
        "lr_scales": lr_scales,
        "weight_decays": weight_decays,
        "compute": compute,
    }


def _checked_range(name: str, value: float, *, below_one: bool = False) -> float:
    value = check_number(name, value)
    if not 0.0 <= value <= MAX_FP32 or (below_one and value >= 1.0):
        limit = "0 or more and below 1" if below_one else "a finite number of 0 or more, in FP32"
        raise ValueError(f"{name}: expected {limit}, got {value}; correct the setting")
    return value


def _check_param(param: torch.Tensor) -> None:
    _check_shard("param", param, param, _MASTER)


def _check_shard(
    name: str, shard: torch.Tensor, param: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    check_dtype(name, shard, dtypes)
    check_device(name, shard, param.device)
    check_vector(name, shard)
    if shard.numel() != param.numel():
        raise ValueError(
            f"{name}: expected {param.numel()} elements, as param has, got {shard.numel()}; pass a "
            "shard of its length"
        )


def _check_momentum(
    param: torch.Tensor,
    momentum: float,
    momentum_buffer: torch.Tensor | None,
    step: torch.Tensor | None,
) -> None:
    has_momentum = momentum != 0.0
    for name, tensor in (("momentum_buffer", momentum_buffer), ("step", step)):
        if (tensor is not None) != has_momentum:
            raise ValueError(
                f"{name}: expected {'a tensor' if has_momentum else 'None'} with a momentum of "
                f"{momentum}, got {'None' if tensor is None else 'a tensor'}; they go together"
            )
    if momentum_buffer is not None and step is not None:
        _check_shard("momentum_buffer", momentum_buffer, param, _MASTER)
        check_one("step", step, _COUNTS, param.device)


def _checked_starts(segments: object, param: torch.Tensor) -> list[int]:
    """The starts of the segments, which are found to be in order, with a number each."""
    if not isinstance(segments, Segments):
        got = type(segments).__name__
        raise TypeError(f"segments: expected Segments, got {got}; pass Segments(starts, ...)")
    starts = check_integers("segments.starts", segments.starts)
    in_order = all(left <= right for left, right in itertools.pairwise([*starts, param.numel()]))
    if not starts or starts[0] != 0 or not in_order:
        raise ValueError(
            f"segments.starts: expected ascending numbers from 0 to at most {param.numel()}, got "
            f"{starts}; start the first segment at 0 and sort them"
        )
    for name, values in (
        ("segments.lr_scales", segments.lr_scales),
        ("segments.weight_decays", segments.weight_decays),
    ):
        check_dtype(name, values, _PRECISE)
        check_like(name, values, (len(starts),), values.dtype, param.device)
    return starts


def _check_compute(
    param: torch.Tensor,
    compute: torch.Tensor | None,
    compute_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    if compute is not None:
        _check_shard("compute", compute, param, _COMPUTE)
    is_fp8 = compute is not None and compute.dtype in _CODES
    if (compute_scale is not None) != is_fp8:
        raise ValueError(
            f"compute_scale: expected {'a tensor' if is_fp8 else 'None'}, got "
            f"{'None' if compute_scale is None else 'a tensor'}; it goes with an E4M3 compute shard"
        )
    if amax is not None and not is_fp8:
        raise ValueError("amax: expected None, got a tensor; it goes with an E4M3 compute shard")
    for name, scalar in (("compute_scale", compute_scale), ("amax", amax)):
        if scalar is not None:
            check_one(name, scalar, _MASTER, param.device)
