"""The AdamW step on the GPU: parameters, both moments and the compute shard in one pass.

Formula and rounding are those of `reference`; the divisions and the root are IEEE's. Bytes
moved an element: 24 (parameter and moments, read and written) + those of a gradient + those of a
compute element, so 28 with BF16 gradients and a BF16 compute shard. Learning rate, step, factor and
found_inf are read from the device, where a small launch makes a segment's scalars, bias corrections
and all, for every program: no host waits, and a captured CUDA graph follows them. A tile that is
full and 16-byte aligned everywhere takes the unmasked path, 16 bytes an access; the others take the
masked one.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..paths import for_tile, load, store
from . import tiles
from .reference import LERP_SWITCH, Shared, halves
from .tiles import (
    decays_of,
    gradient,
    may_not_step,
    power_of,
    rates_of,
    scalars_of,
    segments_of,
    store_computed,
    store_scalars,
    tile_of,
)

_POWERS_NUMEL = tl.constexpr(tiles.POWERS_NUMEL)


@triton.jit(
    do_not_specialize=["num_segments"],
    do_not_specialize_on_alignment=[
        *("scalars", "lr", "step", "powers", "found_inf", "lr_scales", "weight_decays"),
    ],
)
def _scalars_kernel(
    scalars,
    lr,
    step,
    powers,
    found_inf,
    lr_scales,
    weight_decays,
    num_segments,
    decay_high,
    decay_low,
):
    """FP32 (factor of the parameter, minus the step size, root of the second correction)."""
    if not may_not_step(found_inf):
        segments, exist = segments_of(num_segments)
        rates = rates_of(lr, lr_scales, segments, exist)
        decays = decays_of(decay_high, decay_low, weight_decays, segments, exist)
        number = tl.load(step).to(tl.int64)
        correction1 = 1.0 - power_of(powers, number)
        correction2 = 1.0 - power_of(powers + _POWERS_NUMEL, number)
        kept = (1.0 - rates * decays).to(tl.float32)
        minus_rates = (-(rates / correction1)).to(tl.float32)
        root = tl.sqrt(correction2).to(tl.float32)
        store_scalars(scalars, segments, exist, kept, minus_rates, root)


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
    do_not_specialize=["numel", "num_rows"],
    do_not_specialize_on_alignment=[
        *("param", "grad", "exp_avg", "exp_avg_sq", "scalars", "factor", "found_inf"),
        *("table", "compute", "compute_scale", "amax"),
    ],
)
def _adamw_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    scalars,
    factor,
    found_inf,
    table,
    compute,
    compute_scale,
    amax,
    numel,
    num_rows,
    weight,
    beta2,
    growth,
    eps,
    MAXIMIZE: tl.constexpr,
    NEAR: tl.constexpr,
    STEPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one segment; `tile_of` has an example of how the tile is found."""
    if not may_not_step(found_inf):
        segment, start, count = tile_of(table, num_rows, numel, STEPS, BLOCK)
        hyper = (weight, beta2, growth, eps)
        shards = (param + start, grad + start, exp_avg + start, exp_avg_sq + start)
        if compute is not None:
            compute += start
        outputs = (compute, compute_scale, amax)
        made = scalars_of(scalars, segment)
        for_tile(
            _step_part,
            (shards, outputs, factor, made, hyper, MAXIMIZE, NEAR, HARDWARE),
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
    """`reference.flat_adamw_` in two launches, the first one small."""
    options = Shared(**shared)
    shards = (param, grad, exp_avg, exp_avg_sq)
    plan = tiles.plan("flat_adamw_", (*shards, options.compute), options.starts)
    if plan.table.num_tiles == 0:
        return
    powers = tiles.device_powers(beta1, beta2, param.device)
    scalars = tiles.made_scalars(_scalars_kernel, options, lr, step, powers)
    plan.launch(
        _adamw_kernel,
        shards,
        scalars,
        options,
        *(1.0 - beta1, beta2, 1.0 - beta2, eps),
        NEAR=halves(1.0 - beta1)[0] < LERP_SWITCH,  # of the weight in FP32, as it is passed
    )
