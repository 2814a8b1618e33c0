"""The flat optimizers in plain PyTorch: their definition, the kernels' oracle, and the CPU path.

All in FP32 but for scalars, which are FP64 until they are rounded once; no fused multiply-add:

    g       = float32(grad) * factor, negated to maximize
    rate    = lr * lr_scale                                     FP64, as all that has no bar below

    AdamW   param      *= |1 - rate * weight_decay|             |..|: rounded to FP32
            w           = |1 - beta1|
            exp_avg    += w * (g - exp_avg)                     w >= 0.5, as torch.lerp:
            exp_avg     = g - (g - exp_avg) * (1 - w)
            exp_avg_sq  = exp_avg_sq * |beta2| + (|1 - beta2| * g) * g
            denominator = sqrt(exp_avg_sq) / |sqrt(1 - beta2^step)| + |eps|
            param      += (|-rate / (1 - beta1^step)| * exp_avg) / denominator

    SGD     g          += |weight_decay| * param                where weight_decay is not 0
            buffer      = g at step 1, then buffer * |momentum| + |1 - dampening| * g
            g           = buffer, or with nesterov g + |momentum| * buffer
            param      += |-rate| * g

The AdamW and SGD formulas and the order of their operations are those of torch.optim.AdamW and SGD
(`_single_tensor_adam`, `_single_tensor_sgd`; neither capturable nor differentiable), whose own
kernels contract some products and sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..formats import codes
from ..formats.table import E4M3

BASE, DIGITS = 2048, 3  # of a step, which is thus below 2**33

_PIECE_NUMEL = 64 * 1024  # elements worked on at once, so that temporaries stay in cache
LERP_SWITCH = 0.5


@dataclass(frozen=True, slots=True)
class Shared:
    """The options that both optimizers' ops have, by their names there."""

    weight_decay: float
    maximize: bool
    starts: Sequence[int]
    lr_scales: torch.Tensor | None
    weight_decays: torch.Tensor | None
    factor: torch.Tensor | None
    found_inf: torch.Tensor | None
    compute: torch.Tensor | None
    compute_scale: torch.Tensor | None
    amax: torch.Tensor | None


def flat_adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    **shared: Any,
) -> None:
    """One AdamW step of a flat shard; shared: `Shared`.

    Raises `ValueError` for a step that is none, nothing written.
    """
    options = Shared(**shared)
    if _skipped(options.found_inf):
        return
    count = _checked_count(step)
    correction1 = 1.0 - _power(beta1, count)
    root = _fp32((1.0 - _power(beta2, count)) ** 0.5)
    weight, keep, grow = _fp32(1.0 - beta1), _fp32(beta2), _fp32(1.0 - beta2)
    for piece, rate, decay in _pieces(param, lr, options):
        p, m, v = param[piece], exp_avg[piece], exp_avg_sq[piece]
        g = _gradient(grad[piece], options)
        p.mul_(_fp32(1.0 - rate * decay))
        difference = g - m
        if weight < LERP_SWITCH:
            m.add_(difference.mul_(weight))
        else:
            torch.sub(g, difference.mul_(1.0 - weight), out=m)
        v.mul_(keep).add_((g * grow).mul_(g))
        denominator = _square_root(v).div_(root).add_(_fp32(eps))
        p.add_((m * _fp32(-(rate / correction1))).div_(denominator))
        if options.compute is not None:
            _store_compute(options.compute[piece], p, options)


def flat_sgd_(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    lr: torch.Tensor,
    step: torch.Tensor | None,
    *,
    momentum: float,
    dampening: float,
    nesterov: bool,
    **shared: Any,
) -> None:
    """One SGD step of a flat shard; shared: `Shared`."""
    options = Shared(**shared)
    if _skipped(options.found_inf):
        return
    for piece, rate, decay in _pieces(param, lr, options):
        p = param[piece]
        g = _gradient(grad[piece], options)
        if (rounded := _fp32(decay)) != 0:
            g = g + p * rounded
        if momentum_buffer is not None:
            assert step is not None
            buffer = momentum_buffer[piece]
            if bool(step.long() == 1):
                buffer.copy_(g)
            else:
                buffer.mul_(_fp32(momentum)).add_(g * _fp32(1.0 - dampening))
            g = g + buffer * _fp32(momentum) if nesterov else buffer
        p.add_(g * _fp32(-rate))
        if options.compute is not None:
            _store_compute(options.compute[piece], p, options)


def _skipped(found_inf: torch.Tensor | None) -> bool:
    return found_inf is not None and bool(found_inf != 0)


def _pieces(
    param: torch.Tensor, lr: torch.Tensor, options: Shared
) -> Iterator[tuple[slice, float, float]]:
    """(elements, learning rate, weight decay) of pieces that lie within one segment each."""
    bounds = [*(options.starts or [0]), param.numel()]
    scales, decays = options.lr_scales, options.weight_decays
    weight_decay = sum(halves(options.weight_decay))
    for index, start in enumerate(bounds[:-1]):
        rate = float(lr) if scales is None else float(lr) * float(scales[index])
        decay = weight_decay if decays is None else float(decays[index])
        for first in range(start, bounds[index + 1], _PIECE_NUMEL):
            yield slice(first, min(first + _PIECE_NUMEL, bounds[index + 1])), rate, decay


def _gradient(grad: torch.Tensor, options: Shared) -> torch.Tensor:
    g = grad.float()
    if options.factor is not None:
        g = g * options.factor.view(())
    return -g if options.maximize else g


def _store_compute(compute: torch.Tensor, param: torch.Tensor, options: Shared) -> None:
    """Round the new parameters into their compute shard; E4M3 and amax as `flat_adamw_` says."""
    if options.compute_scale is None:
        compute.copy_(param)
        return
    compute.copy_(codes.encode(param * options.compute_scale.view(()), E4M3))
    if (amax := options.amax) is not None:
        amax.copy_(torch.maximum(amax.view(()), param.abs().amax()).view_as(amax))


def _square_root(x: torch.Tensor) -> torch.Tensor:
    """The root of FP32 `x`, correctly rounded.

    PyTorch's FP32 root may come from a vector library and be an ulp off. By way of FP64 it is right
    even if that root is an ulp off: the root of a 24-bit number is 2^-50 from any tie of FP32 or
    more, relative to it, and an FP64 ulp is 2^-52.
    """
    return x.double().sqrt_().float()


def _fp32(value: float) -> torch.Tensor:
    """`value` rounded to FP32, as a tensor: a division by a Python number may be a product."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def halves(value: float) -> tuple[float, float]:
    """FP32 numbers that make up the first 48 bits of `value`, which is what a kernel is passed."""
    high = float(_fp32(value))
    return high, float(_fp32(value - high))


def _checked_count(step: torch.Tensor) -> int:
    value = step.item()
    if not (value == value // 1 and 1 <= value < BASE**DIGITS):
        raise ValueError(
            f"step: expected a whole number from 1 to {BASE**DIGITS - 1}, got {value}; count steps "
            "from 1"
        )
    return int(value)


def _power(beta: float, step: int) -> float:
    """beta ** step as the kernel computes it: one entry of the table a digit, lowest first."""
    table = bias_powers(beta)
    power = float(table[step % BASE])
    for digit in range(1, DIGITS):
        power *= float(table[digit * BASE + step // BASE**digit % BASE])
    return power


@functools.lru_cache(maxsize=64)
def bias_powers(beta: float) -> torch.Tensor:
    """beta ** (number * BASE ** digit) for every digit and number below BASE, FP64 [DIGITS * BASE].

    The entries of the lowest digit are exactly what Python computes, so that the first 2047 steps
    have the bias corrections of torch.optim to the last bit.
    """
    powers = [beta ** (number * BASE**digit) for digit in range(DIGITS) for number in range(BASE)]
    return torch.tensor(powers, dtype=torch.float64, device="cpu")
