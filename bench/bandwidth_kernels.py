"""Two kernels that do nothing but move FP32 numbers, 16 bytes an access and four of them a thread.

    copy   8 bytes an element
    read   4 bytes an element; each program writes the sum of its block
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..kernels.launch import launch

BLOCK, NUM_WARPS = 4096, 8


@triton.jit
def copy_kernel(target: Any, source: Any, numel: Any, BLOCK: tl.constexpr) -> None:
    """Copy a block."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)


@triton.jit
def read_kernel(sums: Any, source: Any, numel: Any, BLOCK: tl.constexpr) -> None:
    """Sum a block."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + index, mask=index < numel, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(values, 0))


def num_programs(source: torch.Tensor) -> int:
    """How many blocks there are."""
    return -(-source.numel() // BLOCK)


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`: FP32 [n] both, on one GPU."""
    arguments = (target, source, source.numel())
    launch(
        copy_kernel, num_programs(source), *arguments, on=source, num_warps=NUM_WARPS, BLOCK=BLOCK
    )


def read_(sums: torch.Tensor, source: torch.Tensor) -> None:
    """Read `source`, FP32 [n], into `sums`, FP32 [num_programs(source)], on one GPU."""
    arguments = (sums, source, source.numel())
    launch(
        read_kernel, num_programs(source), *arguments, on=source, num_warps=NUM_WARPS, BLOCK=BLOCK
    )
