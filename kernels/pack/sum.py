"""The sum over ranks on the GPU: [world, shard] in, FP32 sum in rank order, one rounding.

Formula and rounding are those of `reference`. Bytes moved: shard * (world * bytes of a part element
+ bytes of a result element), the result twice with `accumulate`. Blocks that are full and start
16-byte aligned in every row and in the result take the unmasked path, 16 bytes an access; the tail,
and every block of unaligned memory, takes the masked one.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..device_numbers import number_of
from ..formats.table import wire_format_of
from ..launch import ACCESS_BYTES, LaunchConfig, config_of, is_aligned, launch
from ..numbers import Scale, unless_one
from ..paths import for_tile, load, store
from ..portable import round_to, to_fp32
from ..tuned import config_for

SMALL_WORLD = 4

_GROUP = tl.constexpr(7)  # rows loaded before the first of them is added


@triton.jit
def _reduce_part(arguments, place, FULL: tl.constexpr, NUMEL: tl.constexpr):
    """Row 0, then rows in groups, then what is left: one order of additions whatever the group."""
    out, parts, shard, scale = arguments[:4]
    WORLD: tl.constexpr = arguments[4]
    ACCUMULATE: tl.constexpr = arguments[5]
    GROUP: tl.constexpr = _GROUP if FULL else 1
    GROUPED: tl.constexpr = (WORLD - 1) // GROUP * GROUP
    total = to_fp32(load(parts, place, FULL, NUMEL))
    for first in range(1, 1 + GROUPED, GROUP):
        for step in tl.static_range(GROUP):
            total += to_fp32(load(parts + (first + step) * shard, place, FULL, NUMEL))
    for rank in tl.static_range(1 + GROUPED, WORLD):
        total += to_fp32(load(parts + rank * shard, place, FULL, NUMEL))
    if scale is not None:
        total = total * number_of(scale)
    if ACCUMULATE:
        total = to_fp32(load(out, place, FULL, NUMEL)) + total
    store(out, round_to(total, out.dtype.element_ty), place, FULL, NUMEL)


@triton.jit(do_not_specialize=["shard", "scale"], do_not_specialize_on_alignment=["out", "parts"])
def _reduce_kernel(
    out,
    parts,
    shard,
    scale,
    WORLD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of the shard.

    Example: WORLD 2, shard 6, BLOCK 4. Program 1 starts at 4, has 2 elements left, and writes
    out[4] = parts[4] + parts[6 + 4] and out[5] = parts[5] + parts[6 + 5].
    """
    shard = shard.to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for_tile(
        _reduce_part,
        (out + start, parts + start, shard, scale, WORLD, ACCUMULATE),
        shard - start,
        ALIGNED,
        BLOCK,
    )


@functools.cache
def default_config(world_size: int) -> LaunchConfig:
    """The block is of the narrower of a row and the result; small worlds have room for two."""
    return config_of(num_warps=4, accesses=2 if world_size <= SMALL_WORLD else 1)


def reduce_(
    out: torch.Tensor, parts: torch.Tensor, scale: Scale = 1.0, accumulate: bool = False
) -> None:
    """`reference.reduce_` in one launch."""
    world, shard = parts.shape
    if shard == 0:
        return
    case = f"{wire_format_of(parts.dtype).name} {'few' if world <= SMALL_WORLD else 'many'} ranks"
    config = config_for("reduce_", case, default_config(world), out.device)
    part_bytes, out_bytes = parts.element_size(), out.element_size()
    block = config.block_bytes // min(part_bytes, out_bytes)
    aligned = is_aligned(out, parts) and (shard * part_bytes) % ACCESS_BYTES == 0
    launch(
        _reduce_kernel,
        triton.cdiv(shard, block),
        out,
        parts,
        shard,
        unless_one(scale),
        on=out,
        num_warps=config.num_warps,
        WORLD=world,
        ACCUMULATE=accumulate,
        ALIGNED=aligned,
        BLOCK=block,
    )
