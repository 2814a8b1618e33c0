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

from ..formats.table import wire_format_of
from ..launch import ACCESS_BYTES, LaunchConfig, config_of, is_aligned, launch
from ..portable import covered, round_to, to_fp32
from ..tuned import config_for
from ..wide import wide_lanes

SMALL_WORLD = 4

_GROUP = tl.constexpr(7)  # rows loaded before the first of them is added


@triton.jit
def _aligned_row(base, offset, BLOCK: tl.constexpr):
    """BLOCK elements from aligned memory, in FP32. The hint must sit on the sum it is about."""
    return to_fp32(tl.load(tl.multiple_of(base + offset + wide_lanes(BLOCK), 16)))


@triton.jit
def _reduce_full_block(
    out,
    parts,
    shard,
    scale,
    WORLD: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row 0, then rows in groups, then what is left: one order of additions whatever the group."""
    total = _aligned_row(parts, 0, BLOCK)
    GROUPED: tl.constexpr = (WORLD - 1) // _GROUP * _GROUP
    for first in range(1, 1 + GROUPED, _GROUP):
        for step in tl.static_range(_GROUP):
            total += _aligned_row(parts, (first + step) * shard, BLOCK)
    for rank in tl.static_range(1 + GROUPED, WORLD):
        total += _aligned_row(parts, rank * shard, BLOCK)
    if SCALED:
        total = total * scale
    if ACCUMULATE:
        total = _aligned_row(out, 0, BLOCK) + total
    destinations = tl.multiple_of(out + wide_lanes(BLOCK), 16)
    tl.store(destinations, round_to(total, out.dtype.element_ty))


@triton.jit
def _reduce_masked_block(
    out,
    parts,
    shard,
    count,
    scale,
    WORLD: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In four pieces, whose other shape keeps the compiler from giving both paths one layout."""
    for first in range(0, covered(count, BLOCK), BLOCK // 4):
        lanes = first + tl.arange(0, BLOCK // 4)
        mask = lanes < count
        total = to_fp32(tl.load(parts + lanes, mask=mask, other=0.0))
        for rank in range(1, WORLD):
            row = parts + rank * shard
            total += to_fp32(tl.load(row + lanes, mask=mask, other=0.0))
        if SCALED:
            total = total * scale
        if ACCUMULATE:
            total = to_fp32(tl.load(out + lanes, mask=mask, other=0.0)) + total
        tl.store(out + lanes, round_to(total, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["shard"], do_not_specialize_on_alignment=["out", "parts"])
def _reduce_kernel(
    out,
    parts,
    shard,
    scale,
    WORLD: tl.constexpr,
    SCALED: tl.constexpr,
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
    count = shard - start
    out += start
    parts += start
    if ALIGNED and count >= BLOCK:
        _reduce_full_block(out, parts, shard, scale, WORLD, SCALED, ACCUMULATE, BLOCK)
    else:
        _reduce_masked_block(out, parts, shard, count, scale, WORLD, SCALED, ACCUMULATE, BLOCK)


@functools.cache
def default_config(world_size: int) -> LaunchConfig:
    """The block is of the narrower of a row and the result; small worlds have room for two."""
    return config_of(num_warps=4, accesses=2 if world_size <= SMALL_WORLD else 1)


def reduce_(
    out: torch.Tensor, parts: torch.Tensor, scale: float = 1.0, accumulate: bool = False
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
        scale,
        on=out,
        num_warps=config.num_warps,
        WORLD=world,
        SCALED=scale != 1.0,
        ACCUMULATE=accumulate,
        ALIGNED=aligned,
        BLOCK=block,
    )
