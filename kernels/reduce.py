"""Owns the sum over ranks on the GPU: [world, shard] in, FP32 accumulation in rank order, one rounding.

Formula and rounding are those of `reference`. Bytes moved: shard * (world * bytes of a part element +
bytes of a result element), the result twice with `accumulate`. Blocks that are full and start 16-byte
aligned in every row and in the result take the unmasked path, 16 bytes an access; the tail, and every
block of unaligned memory, takes the masked one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import ACCESS_BYTES, on_device_of, reduce_config
from .rounding import round_to

ROWS_IN_FLIGHT = 8


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(tl.multiple_of(pointers, 16))


@triton.jit
def _reduce_block(
    out,
    parts,
    shard,
    count,
    scale,
    WORLD: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row 0, then rows in groups that are loaded before they are added, then what is left over."""
    lanes = tl.arange(0, BLOCK)
    mask = lanes < count
    total = _load(parts + lanes, mask, MASKED).to(tl.float32)
    GROUP: tl.constexpr = 7
    GROUPED: tl.constexpr = (WORLD - 1) // GROUP * GROUP
    for first in range(1, 1 + GROUPED, GROUP):
        for step in tl.static_range(GROUP):
            row = parts + (first + step) * shard
            total += _load(row + lanes, mask, MASKED).to(tl.float32)
    for rank in tl.static_range(1 + GROUPED, WORLD):
        total += _load(parts + rank * shard + lanes, mask, MASKED).to(tl.float32)
    if SCALED:
        total = total * scale
    if ACCUMULATE:
        total = _load(out + lanes, mask, MASKED).to(tl.float32) + total
    result = round_to(total, out.dtype.element_ty)
    if MASKED:
        tl.store(out + lanes, result, mask=mask)
    else:
        tl.store(tl.multiple_of(out + lanes, 16), result)


@triton.jit(
    do_not_specialize=["shard"], do_not_specialize_on_alignment=["out", "parts"]
)
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
        _reduce_block(
            out, parts, shard, count, scale, WORLD, SCALED, ACCUMULATE, False, BLOCK
        )
    else:
        _reduce_block(
            out, parts, shard, count, scale, WORLD, SCALED, ACCUMULATE, True, BLOCK
        )


def reduce_(
    out: torch.Tensor, parts: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> None:
    """`reference.reduce_` in one launch."""
    world, shard = parts.shape
    if shard == 0:
        return
    config = reduce_config(world)
    part_bytes, out_bytes = parts.element_size(), out.element_size()
    block = config.block_bytes // min(part_bytes, out_bytes)
    aligned = (out.data_ptr() | parts.data_ptr() | (shard * part_bytes)) % ACCESS_BYTES == 0
    with on_device_of(out):
        _reduce_kernel[(triton.cdiv(shard, block),)](
            out,
            parts,
            shard,
            scale,
            WORLD=world,
            SCALED=scale != 1.0,
            ACCUMULATE=accumulate,
            ALIGNED=aligned,
            BLOCK=block,
            num_warps=config.num_warps,
            # A contracted multiply-add rounds once where the definition rounds twice.
            enable_fp_fusion=False,
        )
