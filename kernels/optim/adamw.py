"""The AdamW step on the GPU: parameters, both moments and the compute shard in one pass.

Formula and rounding are those of `reference`; the divisions and the root are IEEE's. Bytes
moved an element: 24 (parameter and moments, read and written) + those of a gradient + those of a
compute element, so 28 with BF16 gradients and a BF16 compute shard. Learning rate, step, factor and
found_inf are read from the device by every program, which makes its own bias corrections: no host
waits, and a captured CUDA graph follows them. A tile that is full and 16-byte aligned everywhere
takes the unmasked path, 16 bytes an access; the others take the masked one.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..paths import for_tile, load, store
from . import tiles
from .reference import LERP_SWITCH, Shared, halves
from .tiles import decay_of, gradient, may_not_step, power_of, rate_of, store_computed, tile_of

_POWERS_NUMEL = tl.constexpr(tiles.POWERS_NUMEL)


@triton.jit
def _scalars(step, powers, rate, decay):
    """FP32 (factor of the parameter, minus the step size, root of the second correction)."""
    number = tl.load(step).to(tl.int64)
    correction1 = 1.0 - power_of(powers, number)
    correction2 = 1.0 - power_of(powers + _POWERS_NUMEL, number)
    kept = (1.0 - rate * decay).to(tl.float32)
    return kept, (-(rate / correction1)).to(tl.float32), tl.sqrt(correction2).to(tl.float32)


@triton.jit
def _update(p, g, m, v, scalars, hyper, NEAR: tl.constexpr):
    """(parameter, first moment, second moment) after the step. NEAR: 1 - beta1 is below 0.5."""
    kept, minus_rate, root = scalars
    weight, beta2, growth, eps = hyper
    m = m + weight * (g - m) if NEAR else g - (g - m) * (1.0 - weight)
    v = v * beta2 + (growth * g) * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    return p * kept + tl.div_rn(minus_rate * m, denominator), m, v


@triton.jit
def _step_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    shards, outputs, factor, scalars, hyper = arguments[:5]
    MAXIMIZE: tl.constexpr = arguments[5]
    NEAR: tl.constexpr = arguments[6]
    HARDWARE: tl.constexpr = arguments[7]
    param, grad, exp_avg, exp_avg_sq = shards
    g = gradient(load(grad, place, FULL, NUMEL), factor, MAXIMIZE)
    p = load(param, place, FULL, NUMEL)
    m = load(exp_avg, place, FULL, NUMEL)
    v = load(exp_avg_sq, place, FULL, NUMEL)
    p, m, v = _update(p, g, m, v, scalars, hyper, NEAR)
    store(param, p, place, FULL, NUMEL)
    store(exp_avg, m, place, FULL, NUMEL)
    store(exp_avg_sq, v, place, FULL, NUMEL)
    store_computed(p, outputs, place, HARDWARE, FULL, NUMEL)


@triton.jit(
    do_not_specialize=["numel", "tiles_at"],
    do_not_specialize_on_alignment=["param", "grad", "exp_avg", "exp_avg_sq", "compute"],
)
def _adamw_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    lr,
    step,
    powers,
    factor,
    found_inf,
    table,
    lr_scales,
    weight_decays,
    compute,
    compute_scale,
    amax,
    numel,
    tiles_at,
    decay_high,
    decay_low,
    weight,
    beta2,
    growth,
    eps,
    MAXIMIZE: tl.constexpr,
    NEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one segment; `tile_of` has an example of how the tile is found."""
    if not may_not_step(found_inf):
        segment, start, count = tile_of(table, tiles_at, numel, BLOCK)
        rate = rate_of(lr, lr_scales, segment)
        decay = decay_of(decay_high, decay_low, weight_decays, segment)
        scalars = _scalars(step, powers, rate, decay)
        hyper = (weight, beta2, growth, eps)
        shards = (param + start, grad + start, exp_avg + start, exp_avg_sq + start)
        if compute is not None:
            compute += start
        outputs = (compute, compute_scale, amax)
        for_tile(
            _step_part,
            (shards, outputs, factor, scalars, hyper, MAXIMIZE, NEAR, HARDWARE),
            count,
            ALIGNED,
            BLOCK,
        )


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
    """`reference.flat_adamw_` in one launch."""
    options = Shared(**shared)
    shards = (param, grad, exp_avg, exp_avg_sq)
    plan = tiles.plan("flat_adamw_", (*shards, options.compute), options.starts)
    if plan.num_tiles == 0:
        return
    launch(
        _adamw_kernel,
        plan.num_tiles,
        *shards,
        lr,
        step,
        tiles.device_powers(beta1, beta2, param.device),
        *plan.arguments(options, param.numel()),
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        on=param,
        num_warps=plan.num_warps,
        MAXIMIZE=options.maximize,
        NEAR=halves(1.0 - beta1)[0] < LERP_SWITCH,  # of the weight in FP32, as it is passed
        ALIGNED=plan.aligned,
        BLOCK=plan.block,
    )
