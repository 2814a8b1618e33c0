"""`reference` on the GPU, 16 bytes an access. Bytes moved: 8 an element."""

import functools

import torch
import triton
import triton.language as tl

from sidestream.kernels.launch import LaunchConfig, config_of, is_aligned, launch
from sidestream.kernels.portable import covered
from sidestream.kernels.tuned import config_for
from sidestream.kernels.wide import wide_lanes
from sidestream.tests.kernels.toy_room.reference import SIGN

_SIGN = tl.constexpr(SIGN)


@triton.jit
def _negate_kernel(out, x, numel, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements. Example: numel 6, BLOCK 4: program 1 has elements 4 and 5."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if ALIGNED and start + BLOCK <= numel:
        lanes = start + wide_lanes(BLOCK)
        tl.store(tl.multiple_of(out + lanes, 16), tl.load(tl.multiple_of(x + lanes, 16)) ^ _SIGN)
    else:
        for first in range(0, covered(numel - start, BLOCK), BLOCK // 4):
            lanes = start + first + tl.arange(0, BLOCK // 4)
            tl.store(
                out + lanes, tl.load(x + lanes, mask=lanes < numel) ^ _SIGN, mask=lanes < numel
            )


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of elements, four bytes each."""
    return config_of(num_warps=4, accesses=2)


def negate_(out: torch.Tensor, x: torch.Tensor) -> None:
    """`reference.negate_` in one launch."""
    config = config_for("toy_negate_", "fp32", default_config(), x.device)
    block = config.block_bytes // x.element_size()
    launch(
        _negate_kernel,
        triton.cdiv(x.numel(), block),
        out.view(torch.int32),
        x.view(torch.int32),
        x.numel(),
        on=x,
        num_warps=config.num_warps,
        ALIGNED=is_aligned(out, x),
        BLOCK=block,
    )
