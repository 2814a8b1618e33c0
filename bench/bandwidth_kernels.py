"""Two kernels that do nothing but move FP32 numbers, 16 bytes an access and four of them a thread.

    copy   8 bytes an element
    read   4 bytes an element; each program writes the sum of its block

What they move starts at a multiple of 16 bytes and is whole blocks.
"""

# Triton gives the arguments of a JIT function their types when it is launched.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels.launch import launch
from .bandwidth import BLOCK_NUMEL

_NUM_WARPS = 8


@triton.jit
def _lanes(BLOCK: tl.constexpr):
    """Where the elements of this program's block lie."""
    start = tl.multiple_of(tl.program_id(0).to(tl.int64) * BLOCK, BLOCK)
    return start + tl.arange(0, BLOCK)


@triton.jit
def _copy_kernel(target, source, BLOCK: tl.constexpr):
    lanes = _lanes(BLOCK)
    values = tl.load(tl.multiple_of(source + lanes, 16))
    tl.store(tl.multiple_of(target + lanes, 16), values)


@triton.jit
def _read_kernel(sums, source, BLOCK: tl.constexpr):
    values = tl.load(tl.multiple_of(source + _lanes(BLOCK), 16))
    tl.store(sums + tl.program_id(0), tl.sum(values, 0))


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy FP32 [n] on one GPU."""
    programs = source.numel() // BLOCK_NUMEL
    launch(
        _copy_kernel, programs, target, source, on=source, num_warps=_NUM_WARPS, BLOCK=BLOCK_NUMEL
    )


def read_(sums: torch.Tensor, source: torch.Tensor) -> None:
    """Read FP32 [n] on one GPU, and write FP32 [n / `BLOCK_NUMEL`]."""
    programs = source.numel() // BLOCK_NUMEL
    launch(_read_kernel, programs, sums, source, on=source, num_warps=_NUM_WARPS, BLOCK=BLOCK_NUMEL)
