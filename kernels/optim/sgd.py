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

from ..launch import launch
from ..paths import for_tile, load, store
from . import tiles
from .reference import Shared
from .tiles import decay_of, gradient, may_not_step, rate_of, store_computed, tile_of


@triton.jit
def _update(p, g, buffer, scalars, NESTEROV: tl.constexpr):
    """(parameter, momentum buffer) after the step; no buffer, no momentum."""
    minus_rate, decay, momentum, growth, is_first = scalars
    # Where there is no decay, 0 * p could be NaN and 0 + g another zero.
    g = tl.where(decay != 0.0, g + decay * p, g)
    if buffer is not None:
        buffer = tl.where(is_first, g, buffer * momentum + growth * g)
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
    do_not_specialize=["numel", "tiles_at"],
    do_not_specialize_on_alignment=["param", "grad", "momentum_buffer", "compute"],
)
def _sgd_kernel(
    param,
    grad,
    momentum_buffer,
    lr,
    step,
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
    momentum,
    growth,
    MAXIMIZE: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of one segment; `tiles.tile_of` has an example of how the tile is found."""
    if not may_not_step(found_inf):
        segment, start, count = tile_of(table, tiles_at, numel, BLOCK)
        minus_rate = (-rate_of(lr, lr_scales, segment)).to(tl.float32)
        decay = decay_of(decay_high, decay_low, weight_decays, segment).to(tl.float32)
        is_first = False
        if step is not None:
            is_first = tl.load(step).to(tl.int64) == 1
        scalars = (minus_rate, decay, momentum, growth, is_first)
        if momentum_buffer is not None:
            momentum_buffer += start
        if compute is not None:
            compute += start
        shards = (param + start, grad + start, momentum_buffer)
        outputs = (compute, compute_scale, amax)
        for_tile(
            _step_part,
            (shards, outputs, factor, scalars, MAXIMIZE, NESTEROV, HARDWARE),
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
    """`reference.flat_sgd_` in one launch."""
    options = Shared(**shared)
    shards = (param, grad, momentum_buffer)
    plan = tiles.plan("flat_sgd_", (*shards, options.compute), options.starts)
    if plan.num_tiles == 0:
        return
    launch(
        _sgd_kernel,
        plan.num_tiles,
        *shards,
        lr,
        step,
        *plan.arguments(options, param.numel()),
        momentum,
        1.0 - dampening,
        on=param,
        num_warps=plan.num_warps,
        MAXIMIZE=options.maximize,
        NESTEROV=nesterov,
        ALIGNED=plan.aligned,
        BLOCK=plan.block,
    )
