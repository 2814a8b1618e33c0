"""The SGD step on the GPU: parameters, momentum and the compute shard in one pass.

Formula and rounding are those of `reference`. Bytes moved an element: 8 (the parameter, read
and written), 8 more with momentum, + those of a gradient + those of a compute element. Scalars,
tiles and paths are as in `adamw`.
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
from .reference import Shared
from .tiles import (
    decays_of,
    gradient,
    may_not_step,
    rates_of,
    scalars_of,
    segments_of,
    store_computed,
    store_scalars,
    tile_of,
)


@triton.jit(
    do_not_specialize=["num_segments"],
    do_not_specialize_on_alignment=[
        *("scalars", "lr", "step", "found_inf", "lr_scales", "weight_decays"),
    ],
)
def _scalars_kernel(
    scalars,
    lr,
    step,
    found_inf,
    lr_scales,
    weight_decays,
    num_segments,
    decay_high,
    decay_low,
):
    """FP32 (minus the learning rate, weight decay, 1 at the first step and else 0)."""
    if not may_not_step(found_inf):
        segments, exist = segments_of(num_segments)
        minus_rates = (-rates_of(lr, lr_scales, segments, exist)).to(tl.float32)
        decays = decays_of(decay_high, decay_low, weight_decays, segments, exist).to(tl.float32)
        is_first = 0.0
        if step is not None:
            is_first = (tl.load(step).to(tl.int64) == 1).to(tl.float32)
        store_scalars(scalars, segments, exist, minus_rates, decays, is_first)


@triton.jit
def _update(p, g, buffer, scalars, NESTEROV: tl.constexpr):
    """(parameter, momentum buffer) after the step; no buffer, no momentum."""
    made, momentum, growth = scalars
    minus_rate, decay, is_first = made
    # Where there is no decay, 0 * p could be NaN and 0 + g another zero.
    g = tl.where(decay != 0.0, g + decay * p, g)
    if buffer is not None:
        buffer = tl.where(is_first != 0.0, g, buffer * momentum + growth * g)
        g = g + momentum * buffer if NESTEROV else buffer
    return p + minus_rate * g, buffer


@triton.jit
def _step_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    shards, outputs, factor, scalars = arguments[:4]
    MAXIMIZE: tl.constexpr = arguments[4]
    NESTEROV: tl.constexpr = arguments[5]
    HARDWARE: tl.constexpr = arguments[6]
    param, grad, momentum_buffer = shards
    g = gradient(load(grad, place, FULL, NUMEL), factor, MAXIMIZE)
    p = load(param, place, FULL, NUMEL)
    buffer = None
    if momentum_buffer is not None:
        buffer = load(momentum_buffer, place, FULL, NUMEL)
    p, buffer = _update(p, g, buffer, scalars, NESTEROV)
    store(param, p, place, FULL, NUMEL)
    if momentum_buffer is not None:
        store(momentum_buffer, buffer, place, FULL, NUMEL)
    store_computed(p, outputs, place, HARDWARE, FULL, NUMEL)


@triton.jit(
    do_not_specialize=["numel", "num_rows"],
    do_not_specialize_on_alignment=[
        *("param", "grad", "momentum_buffer", "scalars", "factor", "found_inf"),
        *("table", "compute", "compute_scale", "amax"),
    ],
)
def _sgd_kernel(
    param,
    grad,
    momentum_buffer,
    scalars,
    factor,
    found_inf,
    table,
    compute,
    compute_scale,
    amax,
    numel,
    num_rows,
    momentum,
    growth,
    MAXIMIZE: tl.constexpr,
    NESTEROV: tl.constexpr,
    STEPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one segment; `tiles.tile_of` has an example of how the tile is found."""
    if not may_not_step(found_inf):
        segment, start, count = tile_of(table, num_rows, numel, STEPS, BLOCK)
        made = (scalars_of(scalars, segment), momentum, growth)
        if momentum_buffer is not None:
            momentum_buffer += start
        if compute is not None:
            compute += start
        shards = (param + start, grad + start, momentum_buffer)
        outputs = (compute, compute_scale, amax)
        for_tile(
            _step_part,
            (shards, outputs, factor, made, MAXIMIZE, NESTEROV, HARDWARE),
            count,
            ALIGNED,
            BLOCK,
        )


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
    """`reference.flat_sgd_` in two launches, the first one small."""
    options = Shared(**shared)
    shards = (param, grad, momentum_buffer)
    plan = tiles.plan("flat_sgd_", (*shards, options.compute), options.starts)
    if plan.table.num_tiles == 0:
        return
    scalars = tiles.made_scalars(_scalars_kernel, options, lr, step)
    plan.launch(_sgd_kernel, shards, scalars, options, momentum, 1.0 - dampening, NESTEROV=nesterov)
